"""From pairs of sentences to what GPT-2 reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hpnb.data.dataset import Item
from hpnb.data.deal import Batch


def collate_pairs(tokenizer: Any, max_length: int = 512) -> Callable[[Sequence[Item]], Batch]:
    """A collate function for MRPC: {"input_ids" (B, T), "attention_mask" (B, T), "labels" (B,)}, int64.

    T is the longest of the batch at hand, so it changes from batch to batch and from rank to rank. A
    tokenizer without a separator, as GPT-2's, gets the two sentences as two lines.

    Raises:
        ValueError: the tokenizer cannot pad.
    """
    if tokenizer.pad_token is None:
        raise ValueError(
            "this tokenizer has no pad token, and sentences of a batch differ in length; "
            "set tokenizer.pad_token = tokenizer.eos_token, and model.config.pad_token_id to its id"
        )
    return partial(_pairs, tokenizer=tokenizer, max_length=max_length)


def byte_tokenizer() -> Any:
    """GPT-2's tokenizer before it has learned a merge, for where GPT-2's own cannot be had.

    Each byte is a token, with the id that it has in GPT-2's vocabulary (0 to 255); the end of a text, which
    also pads, is 50256. Any text can be read, in about four times as many tokens.
    """
    from transformers import GPT2Tokenizer

    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2 writes as they are
    hidden = [byte for byte in range(256) if byte not in shown]  # the others become letters from 256 on
    letters = [chr(byte) for byte in shown] + [chr(256 + i) for i in range(len(hidden))]
    vocabulary = {letter: index for index, letter in enumerate(letters)} | {"<|endoftext|>": 50256}
    return GPT2Tokenizer(vocab=vocabulary, merges=[], pad_token="<|endoftext|>")


def _pairs(items: Sequence[Item], tokenizer: Any, max_length: int) -> Batch:
    first, second = ([item[name] for item in items] for name in ("sentence1", "sentence2"))
    if tokenizer.sep_token is None:
        texts: tuple[list[str], ...] = ([f"{one}\n{two}" for one, two in zip(first, second, strict=True)],)
    else:
        texts = (first, second)
    found = tokenizer(*texts, padding="longest", truncation=True, max_length=max_length, return_tensors="pt")
    return {**found, "labels": torch.tensor([item["label"] for item in items])}
