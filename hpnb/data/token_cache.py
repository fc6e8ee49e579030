"""Documents as token ids, made once per machine and kept under the digest of what they were made from.

    $HPNB_HOME/text-<digest>.npz          else $XDG_CACHE_HOME/hpnb, else ~/.cache/hpnb
    $HPNB_HOME/docstrings-<digest>.json   documents of Python files, for a vocabulary of another size

The digest is of every byte that was read, of the vocabulary or tokenizer with the token that ends its texts,
and of FORMAT_VERSION, so another text, size or rule makes another file. One process makes it and the others
wait; a file that cannot be read is made again. If the folder cannot be written, every process makes the
tokens for itself, and they are equal.
"""

from __future__ import annotations

import copy
import hashlib
import json
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpnb import files
from hpnb.data import text_sources
from hpnb.data.text_sources import Document, TextSource
from hpnb.data.tokenizer import Merge, bpe_tokenizer, check_vocab_size, train_merges

FORMAT_VERSION = 3  # raise it when documents are read, split or encoded in another way
_READ_ERRORS = (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError)


@dataclass(frozen=True)
class TokenizedSplit:
    """The documents of one split, one after the other.

    Attributes:
        ids: (n,), int32: every token, with an end-of-text after each document.
        paragraphs: (p, 2), int64: start and stop of every paragraph in `ids`.
        documents: (d, 2), int64: start and stop of every document, without its end-of-text.
    """

    ids: torch.Tensor
    paragraphs: torch.Tensor
    documents: torch.Tensor


@dataclass(frozen=True)
class TokenizedText:
    splits: dict[str, TokenizedSplit]
    tokenizer: Any
    vocab_size: int
    eos_token_id: int


def tokenize_source(source: TextSource, vocab_size: int, tokenizer: Any = None) -> TokenizedText:
    """`source` in tokens of `tokenizer`, or of a BPE of `vocab_size` tokens learned from its "train" split.

    Raises:
        ValueError: too small a vocabulary, a tokenizer without an end of texts, or a source without words.
    """
    reads = ""
    if tokenizer is None:
        check_vocab_size(vocab_size)
    else:
        if tokenizer.eos_token_id is None:
            raise ValueError("this tokenizer has no eos_token, which separates texts; set one")
        # Which token ends a text is no part of the backend, and is written into the ids.
        reads, vocab_size = f"{tokenizer.eos_token_id} {_backend(tokenizer).to_str()}", len(tokenizer)
    name = f"text-{_digest(source, vocab_size, reads)}.npz"
    folder = files.writable_home()
    if folder is None:
        arrays = _make(source.documents(), vocab_size, tokenizer)
    else:
        with files.locked(folder / f".{name}.lock"):
            kept = _load(folder / name)
            arrays = _make(_documents(source, folder), vocab_size, tokenizer) if kept is None else kept
            if kept is None:
                _save(folder / name, arrays)
    if tokenizer is None:
        tokenizer = bpe_tokenizer(_merges(arrays), vocab_size)
    return TokenizedText(_splits(arrays), tokenizer, vocab_size, int(tokenizer.eos_token_id))


Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]


def _make(documents: Sequence[Document], vocab_size: int, tokenizer: Any) -> Arrays:
    splits = text_sources.split_documents(documents)
    merges: list[Merge] = []
    if tokenizer is None:
        merges = train_merges((document.text for document in splits["train"]), vocab_size)
        tokenizer = bpe_tokenizer(merges, vocab_size)
    arrays: Arrays = {"merges": np.frombuffer(json.dumps(merges).encode(), dtype=np.uint8)}
    for name, part in splits.items():
        for what, values in zip(("ids", "paragraphs", "documents"), _encode(part, tokenizer), strict=True):
            arrays[f"{name} {what}"] = values
    return arrays


def _backend(tokenizer: Any) -> Any:
    """A copy that neither pads nor truncates: a call of `tokenizer` may have left both switched on."""
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return backend


def _encode(documents: Sequence[Document], tokenizer: Any) -> tuple[np.ndarray[Any, Any], ...]:
    """(ids, paragraphs, documents) of a `TokenizedSplit`."""
    backend, end = _backend(tokenizer), tokenizer.eos_token_id
    texts = [paragraph for document in documents for paragraph in document.paragraphs]
    encodings = backend.encode_batch([*texts, "\n\n"], add_special_tokens=False)
    *rows, between = (encoding.ids for encoding in encodings)
    ids: list[int] = []
    paragraphs, bounds = [], []
    row = iter(rows)
    for document in documents:
        begin = len(ids)
        for number in range(len(document.paragraphs)):
            if number:
                ids += between
            start = len(ids)
            ids += next(row)
            paragraphs.append((start, len(ids)))
        bounds.append((begin, len(ids)))
        ids.append(end)
    return np.array(ids, np.int32), np.array(paragraphs, np.int64), np.array(bounds, np.int64)


def _splits(arrays: Arrays) -> dict[str, TokenizedSplit]:
    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(arrays[name])

    return {
        name: TokenizedSplit(tensor(f"{name} ids"), tensor(f"{name} paragraphs"), tensor(f"{name} documents"))
        for name in ("train", "test")
    }


def _merges(arrays: Arrays) -> list[Merge]:
    return [(one, other) for one, other in json.loads(arrays["merges"].tobytes())]


# --- the file ----------------------------------------------------------------------------------------------


def _documents(source: TextSource, folder: Path) -> list[Document]:
    """Documents of `source`. Those of Python files are kept in `folder`, because parsing takes seconds."""
    if not source.with_modules:
        return source.documents()
    path = folder / f"docstrings-{_digest(source, 0, '')}.json"
    with suppress(OSError, ValueError, TypeError):
        return [Document(name, tuple(paragraphs)) for name, paragraphs in json.loads(path.read_text("utf-8"))]
    documents = source.documents()
    with suppress(OSError):  # a full disk: the next one parses again
        files.write_text(path, json.dumps([[each.name, each.paragraphs] for each in documents]))
    return documents


def _digest(source: TextSource, vocab_size: int, reads: str) -> str:
    digest = hashlib.sha256(f"{FORMAT_VERSION} {vocab_size} {len(reads)} {reads}".encode())
    for name, raw in source.raw.items():
        digest.update(f"{name} {len(raw)} ".encode())
        digest.update(raw)
    return digest.hexdigest()[:16]


def _load(path: Path) -> Arrays | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        _splits(arrays), _merges(arrays)
    except _READ_ERRORS:
        return None
    return arrays


def _save(path: Path, arrays: Arrays) -> None:
    def write(draft: Path) -> None:
        with draft.open("wb") as file:  # a name without .npz would get one
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    with suppress(OSError):  # a full disk: the next one makes it again
        files.replace_file(path, write)
