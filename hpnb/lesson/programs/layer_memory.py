"""What one layer of GPT-2 keeps for its backward: published, predicted and measured, row by row.

    size = hpnb.models.GPT2Size(hidden=160, layers=3, heads=5, mlp=640, vocab_size=64, length=96)
    hpnb.lesson.layer_memory(hpnb.lesson.measure_layers(size, batch=2, ranks=2))

Measured is what a forward of three layers leaves in memory and one of two does not: every storage that lives,
whoever holds it. So a layer's input counts once, as the output of the layer before, and weights not at all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import hpnb
from hpnb import record
from hpnb.lesson.tables import number, table
from hpnb.theory.activation_table import ACTIVATION_ROWS, ActivationRow

if TYPE_CHECKING:  # hpnb.lesson is there at once, without transformers
    from hpnb.models import GPT2Size


@dataclass(frozen=True)
class LayerMemory:
    """One row, bytes a layer on each rank.

    Attributes:
        formula: as published; predicted: with `terms`, which are beyond it.
        measured: on the first rank.
    """

    row: ActivationRow
    formula: float
    terms: dict[str, float]
    measured: int

    @property
    def predicted(self) -> float:
        return self.formula + sum(self.terms.values())

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def measure_layers(
    size: GPT2Size,
    batch: int = 1,
    ranks: int = 2,
    *,
    rows: Sequence[ActivationRow] = ACTIVATION_ROWS,
    fused_attention: bool = False,
    fused_gelu: bool = True,
    device: str = "auto",
) -> list[LayerMemory]:
    """Measure a layer in bfloat16 with dropout, row by row; those that are parallel on `ranks` ranks.

    Args:
        size: its layers are not counted; all of its length is used. Heads and mlp divide by `ranks`, or the
            first rank has more than the formula's share.
        batch: rows of it.
        fused_attention: scaled_dot_product_attention. On a CPU its flash kernel takes no dropout, which is
            then left out of the attention alone.
        fused_gelu: nn.GELU in place of gelu_new.
    """
    measured: dict[ActivationRow, tuple[int, str]] = {}
    for count, parallel in ((ranks, True), (1, False)):  # ranks that stay, for what they import takes longest
        if chosen := [row for row in rows if row.parallel is parallel]:
            with hpnb.Ranks(count, device=device) as pool:
                for row in chosen:
                    measured[row] = pool.run(_kept, size, batch, row, fused_attention, fused_gelu)[0]
    block, layers = size.block(batch), []
    for row in rows:
        count = ranks if row.parallel else 1
        nbytes, kind = measured[row]
        terms = row.beyond(block, count, device=kind, fused_attention=fused_attention, fused_gelu=fused_gelu)
        layers.append(LayerMemory(row, row.published(block, count), terms, nbytes))
    return layers


def layer_memory(layers: Sequence[LayerMemory], title: str = "What a layer keeps for its backward") -> None:
    """Display the rows: formula, with what is beyond it, measured, and the ratio of the last two."""
    cells = [
        (
            layer.row.name,
            number(layer.formula, "B"),
            number(layer.predicted, "B"),
            number(layer.measured, "B"),
            f"{layer.ratio:.3f}",
        )
        for layer in layers
    ]
    terms = dict.fromkeys(name for layer in layers for name in layer.terms)
    note = f"Predicted counts, beyond the formula: {'; '.join(terms)}." if terms else ""
    table(("layer", "formula", "predicted", "measured", "measured / predicted"), cells, title, note)


def _kept(
    size: GPT2Size, batch: int, row: ActivationRow, fused_attention: bool, fused_gelu: bool
) -> tuple[int, str]:
    """(bytes that a layer keeps on this rank, the device's kind)."""
    two, three = (_held(replace(size, layers=n), batch, row, fused_attention, fused_gelu) for n in (2, 3))
    return three - two, hpnb.device().type


def _held(size: GPT2Size, batch: int, row: ActivationRow, fused_attention: bool, fused_gelu: bool) -> int:
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
        _settle()
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


def _settle() -> None:
    """Until no message, and no cycle, holds a tensor any more."""
    dist.barrier()
    if hpnb.device().type == "cuda":
        torch.cuda.synchronize()
    gc.collect()
    torch.empty(1, device=hpnb.device())  # so that the allocator takes back what other streams have let go
