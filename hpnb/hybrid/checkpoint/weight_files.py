"""Files of weights, of which each rank reads only the chunks that it holds.

model.safetensors                    one file, or
model.safetensors.index.json         several files, by the table in it
pytorch_model.bin, and its index     the same as PyTorch pickles it, mapped into memory
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hpnb.hybrid.checkpoint.manifest import is_inside
from hpnb.hybrid.checkpoint.state_files import first_line

FILE_NAMES = ("model.safetensors", "pytorch_model.bin")
_CHECKSUMS = "hpnb.crc32"  # in the header of a safetensors file, where others keep what they like


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """An entry for the header of a file of these tensors, which are on the CPU."""
    return {_CHECKSUMS: json.dumps({name: _crc32(tensor) for name, tensor in tensors.items()})}


def _crc32(tensor: torch.Tensor) -> int:
    content: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(content)


class WeightFiles:
    """The weights in a folder or a file; a context, which closes them."""

    def __init__(self, path: Path) -> None:
        self._stack = ExitStack()
        self._slices: dict[str, Any] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._sums: dict[str, tuple[Any, Path, int]] = {}
        try:
            for file, names in _find_files(path).items():
                self._open(file, names)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._slices.clear()
        self._sums.clear()
        self._tensors.clear()
        self._stack.close()

    def names(self) -> list[str]:
        return [*self._slices, *self._tensors]

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._slices:
            return tuple(self._slices[name].get_shape())
        return tuple(self._tensors[name].shape)

    def is_floating_point(self, name: str) -> bool:
        if name in self._slices:
            return str(self._slices[name].get_dtype()).startswith(("F", "BF"))
        return self._tensors[name].is_floating_point()

    def replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give these from now on, which somebody else has made of the files."""
        self._slices.clear()
        self._tensors = dict(tensors)

    def read_chunk(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The elements of a chunk, in the dtype of the file and in memory of their own."""
        chunk = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        if name not in self._slices:
            return self._tensors[name][chunk].clone()
        elements: torch.Tensor = self._slices[name][chunk if chunk else ...]
        return elements

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Compare this rank's share of the weights with the checksums in their files, if there are any."""
        for name, (opened, file, crc) in list(self._sums.items())[rank::ranks]:
            if _crc32(opened.get_tensor(name)) != crc:
                raise ValueError(f"{file} has another {name} than was written; save or copy it anew")

    def _open(self, file: Path, names: Sequence[str] | None) -> None:
        if file.suffix == ".safetensors":
            try:
                opened: Any = self._stack.enter_context(safe_open(file, "pt"))
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                sums = json.loads((opened.metadata() or {}).get(_CHECKSUMS, "{}"))
                self._sums |= {name: (opened, file, crc) for name, crc in sums.items() if name in slices}
            except Exception as error:  # whatever the reader makes of bytes that anybody may have written
                raise ValueError(
                    f"{file} cannot be read ({first_line(error)}); it was cut short, or is another file"
                ) from error
            self._slices.update(_select(slices, names, file))
            return
        try:
            state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # torch.load raises about anything on bytes that it did not write
            raise ValueError(
                f"{file} cannot be read ({first_line(error)}); it must be a state dict by torch.save"
            ) from error
        if not isinstance(state, Mapping) or not all(isinstance(v, torch.Tensor) for v in state.values()):
            kind = type(state).__name__
            raise ValueError(f"{file} holds a {kind}, and not {{name: tensor}}{_hint(state)}")
        self._tensors.update(_select(dict(state), names, file))


def _hint(state: Any) -> str:
    """What to do if an entry of `state` has the weights, as in the checkpoint of a training loop."""
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, Mapping) and value and all(isinstance(v, torch.Tensor) for v in value.values()):
            return f"; its entry {key!r} is one: torch.save(torch.load(file)[{key!r}], other) and load that"
    return ""


def _select(weights: dict[str, Any], names: Sequence[str] | None, file: Path) -> dict[str, Any]:
    """The weights that the index assigns to `file`; all of them without an index."""
    if names is None:
        return weights
    if missing := [name for name in names if name not in weights]:
        raise ValueError(
            f"{file} lacks {missing[0]}, which the index beside it says it has; save the model anew"
        )
    return {name: weights[name] for name in names}


def _find_files(path: Path) -> dict[Path, list[str] | None]:
    """{file: the weights in it, None for all}."""
    if path.is_file():
        return {path: None}
    for name in FILE_NAMES:
        if (file := path / name).is_file():
            return {file: None}
        index = path / f"{name}.index.json"
        if not index.is_file():
            continue
        try:
            table = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{index} is no index of weights; save the model anew") from error
        files: dict[Path, list[str] | None] = {}
        for weight, file_name in table.items():
            if not is_inside(file_name):
                raise ValueError(
                    f"{index} says that {weight} is in {str(file_name)[:80]!r}, which is no file beside it"
                )
            if not (path / file_name).is_file():
                raise ValueError(
                    f"{path} lacks {file_name}, where its index has {weight}; copy all of its files"
                )
            in_file = files.setdefault(path / file_name, [])
            assert in_file is not None
            in_file.append(weight)
        return files
    what = "has no weights" if path.is_dir() else "is not there"
    raise FileNotFoundError(
        f"{path} {what}; give a folder that booster.save_model or save_pretrained wrote, with "
        f"{FILE_NAMES[0]} or an index of its parts"
    )
