"""Text to train a language model on: without a network, real English from the Python installation.

    train = hpnb.data.text("train", vocab_size=509, block=128)
    print(train.describe())           # Python documentation: real, 5,021 blocks of 128 tokens, from ...
    train.tokenizer.decode(train[0]["input_ids"])

A sequence is a row of the dataset, and there are three kinds. Packed sequences need no padding; padded ones
keep texts apart.

    rows="block"       a b c | d e f        documents end to end with end-of-text between, split every `block`
    rows="paragraph"   a b . | c d e        one paragraph and an end-of-text; a longer one takes several rows.
                                            One of fewer than 8 tokens is left out as a heading
    rows="document"    a b . | c d e        the same with documents, however short

Labels are the input_ids: transformers shifts them, so a sequence of s tokens has s - 1 targets. With
overlap=1 a block starts with the token that ended the one before: use block = s + 1, and every token is a
target once. Sequences of different lengths are padded by the loader (`collate_texts`). The learned vocabulary
and the tokens are kept in $HPNB_HOME (token_cache.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import torch

from hpnb.data import text_sources
from hpnb.data.beans_cifar10_mrpc import DatasetKind
from hpnb.data.dataset import Dataset, Item, Source
from hpnb.data.token_cache import TokenizedText, tokenize_source
from hpnb.data.tokenizer import collate_texts

Cut = Literal["block", "paragraph", "document"]
LAPTOP = 509  # tokens of the laptop's GPT-2
_HEADING = 8  # tokens: a paragraph that is shorter is a heading


class TextDataset(Dataset):
    """Sequences {"input_ids" (t,), "labels" (t,)}, int64, of token ids.

    Attributes:
        tokenizer: of transformers; it decodes what a model generates.
        vocab_size: what a model needs at least.
        end: the id of the end-of-text token, which also pads.
        tokens: in all sequences.
        collate: makes a batch of sequences that differ in length; None if they do not. A `Loader` uses it.
    """

    def __init__(
        self,
        rows: PackedBlocks | TextSpans,
        tokenized: TokenizedText,
        source: Source,
        noun: str,
        size: int | None,
    ) -> None:
        super().__init__(rows, source, (), noun, size)
        self.tokenizer = tokenized.tokenizer
        self.vocab_size, self.end = tokenized.vocab_size, tokenized.eos_token_id
        self.collate = None if isinstance(rows, PackedBlocks) else collate_texts(self.end)

    @property
    def tokens(self) -> int:
        kept = range(len(self)) if self._kept is None else self._kept
        return sum(self.rows.length(row) for row in kept)  # type: ignore[attr-defined]


def text(
    split: str = "train",
    size: int | None = None,
    kind: DatasetKind = "auto",
    *,
    vocab_size: int = LAPTOP,
    block: int = 128,
    rows: Cut = "block",
    overlap: int = 0,
    source: str | Path | None = None,
    tokenizer: Any = None,
) -> TextDataset:
    """English in sequences of tokens, split by document into "train" and "test"; the same on all ranks.

    Args:
        size: how many sequences; None returns all.
        kind: "auto" reads the documentation of this Python, and composes sentences if it is not installed;
            "real" must find it; "generated" composes.
        vocab_size: of a byte-level BPE that is trained on "train"; the last id ends a text.
        block: sequence length, in tokens; the maximum if sequences differ in length.
        rows: what a sequence is, see above.
        overlap: tokens that a block shares with the one before.
        source: a file or folder to read instead. Its lines stay as they are; a paragraph that occurs a second
            time is left out (text_sources.py).
        tokenizer: one of transformers to use instead, such as GPT-2's; it has its own vocabulary size.

    Raises:
        ValueError: no such split, numbers that leave no sequence, or files that cannot be read.
        FileNotFoundError: there is no `source`; or kind="real" and no documentation.
    """
    if split not in ("train", "test"):
        raise ValueError(f"text has no split {split!r}; it has train, test")
    if rows not in get_args(Cut):
        raise ValueError(f"rows={rows!r} is none of 'block', 'paragraph' and 'document'")
    least = 2 if rows == "block" else 3  # a longer text is split, and no row may be one token
    if block < least:
        raise ValueError(f"block={block} leaves no next token to predict; use {least} or more")
    if not 0 <= overlap < block or (overlap and rows != "block"):
        raise ValueError(
            f"overlap={overlap} with rows={rows!r}; use 0 to {block - 1} with rows='block', 0 with others"
        )
    text_source = _choose_source(kind, source)
    tokenized = tokenize_source(text_source, vocab_size, tokenizer)
    tokens = tokenized.splits[split]
    if rows == "block":
        sequences: PackedBlocks | TextSpans = PackedBlocks(tokens.ids, block, overlap)
        noun = f"blocks of {block} tokens"
    else:
        spans = tokens.paragraphs if rows == "paragraph" else tokens.documents
        shortest = _HEADING if rows == "paragraph" else 1
        sequences = TextSpans(tokens.ids, spans, block, tokenized.eos_token_id, shortest)
        noun = f"{rows}s of up to {block} tokens"
    if not len(sequences):
        there = f"the {split!r} split of {text_source.source.name} has {len(tokens.ids)} tokens"
        if rows == "block":
            raise ValueError(
                f"{there}, which make no block of block={block}; use a smaller block or a longer text"
            )
        raise ValueError(
            f"{there}, and no {rows} of {shortest} or more: shorter ones are left out, as headings are; "
            "use rows='document' or rows='block', or a longer text"
        )
    return TextDataset(sequences, tokenized, text_source.source, noun, size)


class PackedBlocks:
    """Every `block` tokens of a stream; the rest at its end is left out."""

    def __init__(self, ids: torch.Tensor, block: int, overlap: int) -> None:
        self.ids, self.block, self.step = ids, block, block - overlap

    def __len__(self) -> int:
        return max(0, (len(self.ids) - self.block) // self.step + 1)

    def length(self, row: int) -> int:
        return self.block

    def __getitem__(self, row: int) -> Item:
        return _item(self.ids[row * self.step : row * self.step + self.block].long())


class TextSpans:
    """Spans of a stream, followed by an end-of-text; those longer than `block` take several rows, and those
    below `shortest` tokens none."""

    def __init__(self, ids: torch.Tensor, spans: torch.Tensor, block: int, end: int, shortest: int) -> None:
        self.ids, self.end = ids, end
        self.spans: list[tuple[int, int, bool]] = []  # (start, stop, whether an end-of-text follows)
        for start, stop in spans.tolist():
            if stop - start < shortest:
                continue
            while stop - start >= block:
                # Without the last token if only the end-of-text would follow: one token has no target.
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


def _choose_source(kind: DatasetKind, source: str | Path | None) -> text_sources.TextSource:
    if kind not in get_args(DatasetKind):
        raise ValueError(f"kind={kind!r} is none of 'auto', 'real' and 'generated'")
    if source is not None:
        if kind == "generated":
            raise ValueError("kind='generated' reads no source; leave one of them out")
        return text_sources.text_files(source)
    if kind == "generated":
        return text_sources.composed_news("the documentation of Python was not looked for")
    documentation = text_sources.python_documentation()
    if documentation is None:
        why = "this Python was installed without pydoc_data and without the sources of its standard library"
        if kind == "real":
            hint = "kind='generated' gives a stand-in"
            raise FileNotFoundError(f"{text_sources.NAME} was not found: {why}; {hint}")
        return text_sources.composed_news(why)
    return documentation
