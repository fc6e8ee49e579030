"""Text to train a language model on: without a network, real English from the Python installation.

    train = hpnb.data.text("train", vocabulary=509, block=128)
    print(train.describe())           # Python documentation: real, 5,021 blocks of 128 tokens, from ...
    train.tokenizer.decode(train[0]["input_ids"])

Rows are of one of three kinds. Packed rows waste nothing; padded ones keep texts apart.

    rows="block"       a b c | d e f        documents end to end, an end-of-text after each, cut every `block`
    rows="paragraph"   a b . | c d e        one a row, with an end-of-text; a longer one takes several rows
    rows="document"    likewise

Labels are the input_ids: transformers shifts them, so a row of s tokens asks for s - 1. With overlap=1 each
block starts with the token that ended the one before: use block = s + 1, and every token is asked for once.
Ragged rows are padded by the loader (`collate_texts`). What is learned and encoded is kept in $HPNB_HOME.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import torch

from hpnb.data import text_sources
from hpnb.data.beans_cifar10_mrpc import Kind
from hpnb.data.dataset import Dataset, Item, Source
from hpnb.data.token_cache import Encoded, encoded
from hpnb.data.tokenizer import collate_texts

Cut = Literal["block", "paragraph", "document"]
LAPTOP = 509  # tokens of the laptop's GPT-2
_HEADING = 8  # tokens: what is shorter is no paragraph of its own


class TextDataset(Dataset):
    """Rows {"input_ids" (t,), "labels" (t,)}, int64, of token ids.

    Attributes:
        tokenizer: of transformers; it decodes what a model goes on with.
        vocabulary: how many tokens there are, what a model needs at least.
        end: the id that ends a text, and pads.
        tokens: in all rows.
        collate: makes a batch of rows that differ in length; None where they do not. A `Loader` uses it.
    """

    def __init__(
        self, rows: Blocks | Pieces, found: Encoded, source: Source, noun: str, size: int | None
    ) -> None:
        super().__init__(rows, source, (), noun, size)
        self.tokenizer, self.vocabulary, self.end = found.tokenizer, found.vocabulary, found.end
        self.collate = None if isinstance(rows, Blocks) else collate_texts(found.end)

    @property
    def tokens(self) -> int:
        kept = range(len(self)) if self._kept is None else self._kept
        return sum(self.rows.length(row) for row in kept)  # type: ignore[attr-defined]


def text(
    split: str = "train",
    size: int | None = None,
    kind: Kind = "auto",
    *,
    vocabulary: int = LAPTOP,
    block: int = 128,
    rows: Cut = "block",
    overlap: int = 0,
    source: str | Path | None = None,
    tokenizer: Any = None,
) -> TextDataset:
    """English in rows of tokens, split by document into "train" and "test"; the same on all ranks.

    Args:
        size: how many rows; None gives all.
        kind: "auto" reads the documentation of this Python, and composes sentences where it was not
            installed; "real" must find it; "generated" composes.
        vocabulary: how many tokens a byte-level BPE, trained on "train", has; the last one ends a text.
        block: the most tokens of a row.
        rows: what a row is, see above.
        overlap: tokens that a block shares with the one before.
        source: a file or folder of the reader's to read instead.
        tokenizer: one of transformers to use instead, such as GPT-2's own; `vocabulary` is then its.

    Raises:
        ValueError: no such split, numbers that leave no rows, or files that cannot be read.
        FileNotFoundError: there is no `source`; or kind="real" and no documentation.
    """
    if split not in ("train", "test"):
        raise ValueError(f"text has no split {split!r}; it has train, test")
    if rows not in get_args(Cut):
        raise ValueError(f"rows={rows!r} is none of 'block', 'paragraph' and 'document'")
    if block < 2:
        raise ValueError(f"block={block} leaves no next token to ask for; use 2 or more")
    if not 0 <= overlap < block or (overlap and rows != "block"):
        raise ValueError(
            f"overlap={overlap} with rows={rows!r}; use 0 to {block - 1} with rows='block', 0 with others"
        )
    pages = _pages(kind, source)
    found = encoded(pages, vocabulary, tokenizer)
    part = found.splits[split]
    if rows == "block":
        made: Blocks | Pieces = Blocks(part.ids, block, overlap)
        noun = f"blocks of {block} tokens"
    else:
        spans = part.paragraphs if rows == "paragraph" else part.documents
        made, noun = Pieces(part.ids, spans, block, found.end), f"{rows}s of up to {block} tokens"
    if not len(made):
        raise ValueError(
            f"the {split!r} split of {pages.source.name} has {len(part.ids)} tokens, which make no {rows} of "
            f"block={block}; use a smaller block or a longer text"
        )
    return TextDataset(made, found, pages.source, noun, size)


class Blocks:
    """Every `block` tokens of a stream; what is left at its end is left out."""

    def __init__(self, ids: torch.Tensor, block: int, overlap: int) -> None:
        self.ids, self.block, self.step = ids, block, block - overlap

    def __len__(self) -> int:
        return max(0, (len(self.ids) - self.block) // self.step + 1)

    def length(self, row: int) -> int:
        return self.block

    def __getitem__(self, row: int) -> Item:
        return _item(self.ids[row * self.step : row * self.step + self.block].long())


class Pieces:
    """Spans of a stream, an end-of-text after each; those longer than `block` in several rows."""

    def __init__(self, ids: torch.Tensor, spans: torch.Tensor, block: int, end: int) -> None:
        self.ids, self.end = ids, end
        self.spans: list[tuple[int, int, bool]] = []  # (start, stop, whether an end-of-text follows)
        for start, stop in spans.tolist():
            if stop - start < _HEADING:
                continue
            while stop - start >= block:
                # One less where an end-of-text would be left over: alone it is asked for by nobody.
                middle = start + block - (stop - start == block)
                self.spans.append((start, middle, False))
                start = middle
            self.spans.append((start, stop, True))

    def __len__(self) -> int:
        return len(self.spans)

    def length(self, row: int) -> int:
        start, stop, ends = self.spans[row]
        return stop - start + ends

    def __getitem__(self, row: int) -> Item:
        start, stop, ends = self.spans[row]
        ids = self.ids[start:stop].long()
        return _item(torch.cat([ids, ids.new_tensor([self.end])]) if ends else ids)


def _item(ids: torch.Tensor) -> Item:
    return {"input_ids": ids, "labels": ids.clone()}


def _pages(kind: Kind, source: str | Path | None) -> text_sources.Pages:
    if kind not in get_args(Kind):
        raise ValueError(f"kind={kind!r} is none of 'auto', 'real' and 'generated'")
    if source is not None:
        if kind == "generated":
            raise ValueError("kind='generated' reads no source; leave one of them out")
        return text_sources.own_pages(source)
    if kind == "generated":
        return text_sources.composed_pages("the documentation of Python was not looked for")
    found = text_sources.python_pages()
    if found is None:
        why = "this Python was installed without pydoc_data and without the sources of its standard library"
        if kind == "real":
            hint = "kind='generated' gives a stand-in"
            raise FileNotFoundError(f"{text_sources.NAME} was not found: {why}; {hint}")
        return text_sources.composed_pages(why)
    return found
