"""Files whose size and checksum are known from memory, before anything is read back from the disk.

A checksum that is taken from the file would seal whatever became of it: cut short, replaced by another run,
or never written. So the writers compute it from what they write, and `agreement.read_back` compares it with
what the file system gives back.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

FileSum = tuple[int, int]  # (bytes, CRC-32)
WrittenFiles = dict[str, FileSum]  # by name, relative to a folder

# The names that safetensors gives to dtypes.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class _ChecksumStream:
    """Counts and sums up what passes through it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = self.crc = 0

    def write(self, content: Any) -> None:
        self._file.write(content)
        self.size += len(content)
        self.crc = zlib.crc32(content, self.crc)


def write_bytes(path: Path, content: bytes) -> FileSum:
    """Write a small file."""
    path.write_bytes(content)
    return len(content), zlib.crc32(content)


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileSum:
    """Write tensors of any device as one file in the format of safetensors: the length of a header, the
    header in JSON, and the tensors, those of the widest dtype first, so that all are aligned. One tensor at
    a time is copied to the CPU.
    """
    if unknown := [name for name, tensor in tensors.items() if tensor.dtype not in DTYPES]:
        raise ValueError(f"{unknown[0]} has {tensors[unknown[0]].dtype}, which safetensors cannot store")
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        stream = _ChecksumStream(file)
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for name in order:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            if flat.numel():
                content: Any = flat.view(torch.uint8).numpy()
                stream.write(memoryview(content))
    return stream.size, stream.crc
