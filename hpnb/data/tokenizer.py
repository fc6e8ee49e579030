"""From words to token ids and back, and from rows of tokens that differ in length to one batch.

Byte-level BPE as in GPT-2 (Radford et al. 2019, section 2.2; Sennrich et al. 2016, arXiv 1508.07909): a
token is a byte, or a pair of tokens that was the most common one when it was merged.

    id 0 to 255         the bytes, with the ids that they have in GPT-2
    id 256 + i          merge i
    the last id         the end of a text, which also pads
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from hpnb.data.dataset import Batch, Item

END = "<|endoftext|>"
IGNORE_INDEX = -100  # a label that no loss counts, as everywhere in PyTorch and transformers
BYTES = 256

Merge = tuple[str, str]


def train_merges(texts: Iterable[str], vocab_size: int) -> list[Merge]:
    """The merges that `texts` teach, in order: alike in every process, and none of a pair seen once.

    Args:
        vocab_size: tokens in all, bytes and the end of a text among them; a short text has fewer to give.

    Raises:
        ValueError: a vocabulary that does not hold the bytes.
    """
    check_vocab_size(vocab_size)
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    learner.train_from_iterator(texts, trainer)
    return [(one, other) for one, other in json.loads(learner.to_str())["model"]["merges"]]


def bpe_tokenizer(merges: Sequence[Merge], vocab_size: int) -> Any:
    """A GPT2Tokenizer of transformers with these merges; ids that no merge takes stay unused.

    Raises:
        ValueError: more merges than the vocabulary holds.
    """
    check_vocab_size(vocab_size)
    from transformers import GPT2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if len(merges) > vocab_size - BYTES - 1:
        raise ValueError(
            f"{len(merges)} merges, {BYTES} bytes and the end of a text do not fit a vocabulary of "
            f"{vocab_size}; use {len(merges) + BYTES + 1} or more"
        )
    letters = [*bytes_to_unicode().values(), *(one + other for one, other in merges)]
    ids = {letter: index for index, letter in enumerate(letters)} | {END: vocab_size - 1}
    return GPT2Tokenizer(vocab=ids, merges=list(merges), pad_token=END)


def byte_tokenizer() -> Any:
    """GPT-2's tokenizer without its merges, for machines that do not have GPT-2's.

    Every byte is a token, with the id that it has in GPT-2's vocabulary (0 to 255); the end of a text, which
    also pads, is 50256. Any text can be read, in about four times as many tokens.
    """
    return bpe_tokenizer((), 50257)


def check_vocab_size(vocab_size: int) -> None:
    if vocab_size < BYTES + 1:
        raise ValueError(
            f"vocab_size={vocab_size} does not hold {BYTES} bytes and the end of a text; use "
            f"{BYTES + 1} or more"
        )


# --- batches -----------------------------------------------------------------------------------------------


def collate_pairs(tokenizer: Any, max_length: int = 512) -> Callable[[Sequence[Item]], Batch]:
    """A collate function for MRPC: {"input_ids" (B, T), "attention_mask" (B, T), "labels" (B,)}, int64.

    T is the longest of the batch, so it changes from batch to batch and from rank to rank. A tokenizer
    without a separator, such as GPT-2's, gets the two sentences as two lines.

    Raises:
        ValueError: the tokenizer cannot pad.
    """
    if tokenizer.pad_token is None:
        raise ValueError(
            "this tokenizer has no pad token, and sentences of a batch differ in length; "
            "set tokenizer.pad_token = tokenizer.eos_token, and model.config.pad_token_id to its id"
        )
    return partial(_pairs, tokenizer=tokenizer, max_length=max_length)


def _pairs(items: Sequence[Item], tokenizer: Any, max_length: int) -> Batch:
    first, second = ([item[name] for item in items] for name in ("sentence1", "sentence2"))
    if tokenizer.sep_token is None:
        texts: tuple[list[str], ...] = ([f"{one}\n{two}" for one, two in zip(first, second, strict=True)],)
    else:
        texts = (first, second)
    batch = tokenizer(*texts, padding="longest", truncation=True, max_length=max_length)
    # Not return_tensors="pt": transformers 5 walks through the rows number by number first, in Python.
    tensors = {name: torch.tensor(rows, dtype=torch.int64) for name, rows in batch.items()}
    return tensors | {"labels": torch.tensor([item["label"] for item in items])}


def collate_texts(pad: int) -> Callable[[Sequence[Item]], Batch]:
    """A collate function for rows {"input_ids" (t,), "labels" (t,)} of any lengths t, padded on the right.

    It returns {"input_ids", "attention_mask", "labels"}, all (B, T) and int64, with T the longest of the
    batch. Padding has token `pad`, mask 0 and label -100.
    """
    return partial(_texts, pad=pad)


def _texts(items: Sequence[Item], pad: int) -> Batch:
    ids = [item["input_ids"] for item in items]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence([item["labels"] for item in items], True, padding_value=IGNORE_INDEX),
    }
