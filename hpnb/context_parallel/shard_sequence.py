"""Which tokens of a sequence each rank of the context axis has.

    cp = 2, s = 8        chunks   0 0 1 1 2 2 3 3
    contiguous           rank 0   0 1 2 3            rank 1   4 5 6 7
    zigzag               rank 0   0 1         6 7    rank 1       2 3 4 5

Under a causal mask token i attends to i + 1 tokens. With contiguous shards the last rank has (2 cp - 1) times
the work of the first, and all others wait for it. Zigzag pairs chunk r with chunk 2 cp - 1 - r, and every
rank has the same work (Megatron-Core and Brandon et al. 2023, "Striped attention", arXiv 2311.09431, balance
alike).

Labels are shifted before the sequence is split: the target of a shard's last token is on another rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hpnb.data.tokenizer import IGNORE_INDEX


@dataclass(frozen=True)
class Chunk:
    """Neighbouring tokens of a sequence, `size` of them from place `start` on."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


def split_sequence(length: int, ranks: int, zigzag: bool) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of every rank, equally many tokens for each; see the picture above.

    Args:
        length: tokens, a multiple of `ranks`, or of 2 `ranks` for a zigzag.

    Raises:
        ValueError: `length` is no such multiple.
    """
    pieces = 2 * ranks if zigzag else ranks
    if length % pieces:
        raise ValueError(
            f"a sequence of {length} tokens cannot be split into {pieces} equal chunks for {ranks} ranks; "
            f"pad it to {padded_length(length, ranks, zigzag)}"
        )
    size = length // pieces
    if not zigzag:
        return tuple((Chunk(rank * size, size),) for rank in range(ranks))
    return tuple((Chunk(r * size, size), Chunk((pieces - 1 - r) * size, size)) for r in range(ranks))


def padded_length(length: int, ranks: int, zigzag: bool) -> int:
    """The least length that can be split and is not below `length`."""
    pieces = 2 * ranks if zigzag else ranks
    return -(-length // pieces) * pieces


def token_places(chunks: tuple[Chunk, ...], device: torch.device | None = None) -> torch.Tensor:
    """(s / cp,): where in the sequence the tokens of these chunks stand."""
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


def shard_batch(batch: Mapping[str, Any], rank: int, ranks: int, zigzag: bool) -> dict[str, Any]:
    """This rank's tokens of a batch for a causal language model.

        input_ids (B, s)  ->  input_ids (B, s / cp), position_ids (B, s / cp), labels (B, s / cp)

    `labels` become the next tokens: entry i is the target of token i. Sequences are padded on the right until
    they can be split; no token attends to what comes after it, and padding has no target. Other entries
    (B, s, ...) are split as they are, and padded with their last value: what belongs to labels, such as a
    weight `w` for each of them, has to be shifted before, `F.pad(w[:, 1:], (0, 1))`. A batch's own
    position_ids say where packed texts begin, if it has no attention_mask: each counts from 0.

    Raises:
        ValueError: no input_ids (B, s), no tokens in them, or padding on the left.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise ValueError(f"context parallelism splits input_ids (B, s); this batch has {', '.join(batch)}")
    if ids.size(1) == 0:
        raise ValueError(
            f"input_ids of shape {tuple(ids.shape)} have no tokens to split over {ranks} ranks; leave empty "
            "sequences out of the batch"
        )
    _check_padding(batch.get("attention_mask"))
    length, missing, _, places = _local_tokens(ids, rank, ranks, zigzag)
    sharded = {}
    for name, value in batch.items():
        along_tokens = isinstance(value, torch.Tensor) and value.dim() >= 2 and value.size(1) == length
        if name == "attention_mask":
            continue
        if name == "labels" and along_tokens:
            value = F.pad(value[:, 1:], (0, 1 + missing), value=IGNORE_INDEX)
        elif along_tokens:
            value = torch.cat([value, value[:, -1:].expand(-1, missing, *value.shape[2:])], 1)
        sharded[name] = value[:, places] if along_tokens else value
    if batch.get("position_ids") is None:
        sharded["position_ids"] = places.clamp(max=length - 1).expand(ids.size(0), -1)
    return sharded


def token_mask(
    batch: Mapping[str, Any], rank: int, ranks: int, zigzag: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Of this rank's tokens: which are in the batch, (s / cp,), or None if all are; and which are no padding,
    (B, s / cp)."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    length, missing, chunks, places = _local_tokens(ids, rank, ranks, zigzag)
    mask = torch.ones_like(ids) if mask is None else mask
    all_in_batch = all(chunk.stop <= length for chunk in chunks)  # of sizes, which the CPU knows
    return None if all_in_batch else places < length, F.pad(mask, (0, missing))[:, places]


def _local_tokens(
    ids: torch.Tensor, rank: int, ranks: int, zigzag: bool
) -> tuple[int, int, tuple[Chunk, ...], torch.Tensor]:
    """s, how many tokens are added so that it can be split, and this rank's chunks and places (s / cp,)."""
    length = ids.size(1)
    missing = padded_length(length, ranks, zigzag) - length
    chunks = split_sequence(length + missing, ranks, zigzag)[rank]
    return length, missing, chunks, token_places(chunks, ids.device)


def _check_padding(mask: Any) -> None:
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise ValueError("under context parallelism attention_mask is (B, s), 1 for tokens and 0 for padding")
    if bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ValueError(
            "this attention_mask has padding before tokens, and context parallelism needs it after them; set "
            "tokenizer.padding_side='right'"
        )
