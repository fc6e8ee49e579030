"""Weights on a disk, read where they are asked for: of each only the boxes that a rank has a part of.

model.safetensors                    one file, or
model.safetensors.index.json         several, by the table in it
pytorch_model.bin, and its index     the same as PyTorch pickles it, mapped into memory
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

NAMES = ("model.safetensors", "pytorch_model.bin")
_CHECKSUMS = "hpnb.crc32"  # in the header of a safetensors file, where others keep what they like


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """What to put into the header of a file of these tensors, which are on the CPU."""
    return {_CHECKSUMS: json.dumps({name: _crc(tensor) for name, tensor in tensors.items()})}


def _crc(tensor: torch.Tensor) -> int:
    seen: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(seen)


class Weights(Protocol):
    """Weights by name."""

    def names(self) -> Sequence[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def box(self, name: str, start: Sequence[int], sizes: Sequence[int]) -> torch.Tensor: ...


class Files:
    """The weights in a folder, or in a file; a context, which closes them.

    Raises:
        FileNotFoundError: there are none.
        ValueError: a file that cannot be read, or an index that names what is not there.
    """

    def __init__(self, path: Path) -> None:
        self._stack = ExitStack()
        self._slices: dict[str, Any] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._sums: dict[str, tuple[Any, Path, int]] = {}
        try:
            for file, wanted in _files(path).items():
                self._open(file, wanted)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Files:
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

    def box(self, name: str, start: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The elements of a box, in the dtype of the file."""
        at = tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))
        if name not in self._slices:
            return self._tensors[name][at]
        found: torch.Tensor = self._slices[name][at if at else ...]
        return found

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Compare one of so many shares of the weights with the checksums that came with them, if any.

        Raises:
            ValueError: a weight is another than was written.
        """
        for name, (opened, file, crc) in list(self._sums.items())[share::shares]:
            if _crc(opened.get_tensor(name)) != crc:
                raise ValueError(f"{file} has another {name} than was written; save or copy it anew")

    def _open(self, file: Path, wanted: Sequence[str] | None) -> None:
        if file.suffix == ".safetensors":
            try:
                opened: Any = self._stack.enter_context(safe_open(file, "pt"))
                held = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                told = json.loads((opened.metadata() or {}).get(_CHECKSUMS, "{}"))
                self._sums |= {name: (opened, file, crc) for name, crc in told.items() if name in held}
            except (SafetensorError, OSError, ValueError, AttributeError) as error:
                raise ValueError(
                    f"{file} cannot be read ({error}); it was cut short, or is another file"
                ) from error
            self._slices.update(_only(held, wanted, file))
            return
        try:
            state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, UnpicklingError, EOFError, OSError) as error:
            first = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"{file} cannot be read ({first}); it must be a state dict by torch.save"
            ) from error
        if not isinstance(state, Mapping) or not all(isinstance(v, torch.Tensor) for v in state.values()):
            raise ValueError(f"{file} holds a {type(state).__name__}, and not {{name: tensor}}")
        self._tensors.update(_only(dict(state), wanted, file))


def _only(held: dict[str, Any], wanted: Sequence[str] | None, file: Path) -> dict[str, Any]:
    """What the index says that `file` has."""
    if wanted is None:
        return held
    if missing := [name for name in wanted if name not in held]:
        raise ValueError(
            f"{file} lacks {missing[0]}, which the index beside it says it has; save the model anew"
        )
    return {name: held[name] for name in wanted}


def _files(path: Path) -> dict[Path, list[str] | None]:
    """{file: the weights in it, None for all}."""
    if path.is_file():
        return {path: None}
    for name in NAMES:
        if (file := path / name).is_file():
            return {file: None}
        index = path / f"{name}.index.json"
        if not index.is_file():
            continue
        try:
            table = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is no index of weights; save the model anew") from error
        files: dict[Path, list[str] | None] = {}
        for weight, file_name in table.items():
            if not (path / file_name).is_file():
                raise ValueError(
                    f"{path} lacks {file_name}, where its index has {weight}; copy all of its files"
                )
            inside = files.setdefault(path / file_name, [])
            assert inside is not None
            inside.append(weight)
        return files
    what = "has no weights" if path.is_dir() else "is not there"
    raise FileNotFoundError(
        f"{path} {what}; give a folder that booster.save_model or save_pretrained wrote, with {NAMES[0]} or "
        "an index of its parts"
    )


class Loaded:
    """Weights that are in memory."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state

    def names(self) -> list[str]:
        return list(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def box(self, name: str, start: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return self._state[name][tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))]
