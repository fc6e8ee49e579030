"""What one layer of GPT-2 keeps for its backward: predicted in parts, and measured.

Measured is what one layer more leaves in memory after a forward: every storage that lives, whoever holds it.
So a layer's input counts once, as the output of the layer before, and weights not at all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import hpnb
from hpnb import record, theory
from hpnb.theory.activation_table import ActivationRow

if TYPE_CHECKING:  # hpnb.lesson is there at once, without transformers
    from hpnb.models import GPT2Size


def predicted_parts(
    row: ActivationRow, block: theory.Block, ranks: int, device: str = "cuda"
) -> dict[str, float]:
    """{part: bytes} that the first of `ranks` ranks keeps: the published formula, and what is beyond it on a
    "cuda" or a "cpu", for a fused GELU and an attention that is matmul by matmul.
    """
    count = ranks if row.parallel else 1
    heads_ratio = theory.imbalance(block.heads, count)  # the formula wants heads that divide
    beyond = row.beyond(block, count, device=device)
    extra = sum(nbytes * (heads_ratio if "attention" in name else 1.0) for name, nbytes in beyond.items())
    return {**theory.activation_parts(row, block, count, even=False), "beyond the formula": extra}


def kept_bytes(
    size: GPT2Size,
    batch: int,
    row: ActivationRow,
    fused_attention: bool = False,
    fused_gelu: bool = True,
) -> int:
    """Bytes that a layer in bfloat16 with dropout keeps on this rank. Every rank calls it.

    Layers and vocabulary of `size` do not count; all of its length is used. On a CPU the flash kernel of a
    fused attention takes no dropout, which is then left out of the attention alone.

    On a CPU, whose bytes are exact, the first two layers are enough. And where nothing is sharded, rank 0
    counts for all, because every rank would take the time of the others: the others return 0.
    """
    size, on_cpu = replace(size, vocab_size=64), hpnb.device().type == "cpu"
    if on_cpu and not row.parallel and hpnb.rank() > 0:
        return 0
    fewer, more = (
        _live_bytes(replace(size, layers=n), batch, row, fused_attention, fused_gelu)
        for n in ((1, 2) if on_cpu else (2, 3))
    )
    return more - fewer


def _live_bytes(
    size: GPT2Size, batch: int, row: ActivationRow, fused_attention: bool, fused_gelu: bool
) -> int:
    """Bytes that live after a forward, parameters aside."""
    from hpnb import models
    from hpnb.hybrid import recompute
    from hpnb.tensor_parallel import parallelize

    attention = "sdpa" if fused_attention else "eager"
    torch.manual_seed(0)  # GPUs' generators begin with different states
    model: Any = models.gpt2(size, dropout=0.1, attention=attention, dtype=torch.bfloat16)
    for block in model.transformer.h:
        if fused_gelu:
            block.mlp.act = nn.GELU(approximate="tanh")
        if fused_attention and hpnb.device().type == "cpu":
            block.attn.attn_dropout.p = 0.0
    if row.parallel:
        mesh = hpnb.Mesh(hpnb.Layout(tp=hpnb.world_size()))
        parallelize(model, mesh.tp, "1d", row.sequence)
    recompute.enable_recomputation(model, row.recompute or False)
    model.to(hpnb.device())
    ids = torch.zeros(batch, size.length, dtype=torch.long, device=hpnb.device())
    if hpnb.device().type == "cuda":
        return _allocated(lambda: model.transformer(input_ids=ids).last_hidden_state)
    with record.memory(model) as recorder:
        outputs = model.transformer(input_ids=ids).last_hidden_state
        _settle(row.parallel)
    assert outputs.requires_grad
    last = recorder.profile().samples[-1]
    return last.activations + last.temporary


def _allocated(forward: Callable[[], torch.Tensor]) -> int:
    """What a forward has asked the allocator for and not given back; a recorder's samples are peaks.

    Not `memory_allocated`: of a cached block that is less than 1 MiB too large, all counts as handed out.
    """
    with torch.no_grad():
        forward()  # kernels' workspaces, which stay
    _settle()
    before = _asked_for()
    outputs = forward()
    _settle()
    assert outputs.requires_grad
    return _asked_for() - before


def _asked_for() -> int:
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def _settle(all_ranks: bool = True) -> None:
    """Until no message of `all_ranks`, and no cycle, holds a tensor any more."""
    if all_ranks:
        dist.barrier()
    if hpnb.device().type == "cuda":
        torch.cuda.synchronize()
    gc.collect()
    torch.empty(1, device=hpnb.device())  # so that the allocator takes back what other streams have let go
