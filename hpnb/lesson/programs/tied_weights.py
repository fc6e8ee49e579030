"""What notebook 06 asks of a weight with two homes, and of a batch whose rows are not equally long.

The table of words of a GPT-2 is on a pipeline's first rank and, as the head, on its last. Every rank calls
what takes a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

import hpnb
from hpnb import comm
from hpnb.lesson.programs import gpt2_pipeline
from hpnb.lesson.programs.step_timing import distance
from hpnb.mesh import Axis, Layout, Mesh
from hpnb.models import GPT2Size
from hpnb.pipeline_parallel.microbatches import count_targets, split_batch

Batch = Mapping[str, torch.Tensor]
TABLE, HEAD = "transformer.wte.weight", "lm_head.weight"


def apart(pipe: hpnb.Pipeline, axis: Axis, shape: Sequence[int]) -> float:
    """How far the last rank's home is from the first rank's: || head - table || / || table ||.

    Args:
        shape: of the table, (V, h), which the ranks between do not know.
    """
    held = dict(pipe.module.named_parameters(remove_duplicate=False))
    found = []
    for name, home in ((TABLE, 0), (HEAD, axis.size - 1)):
        value = torch.zeros(tuple(shape), dtype=torch.float64, device=hpnb.device())
        if axis.rank == home:
            value.copy_(held[name].detach())
        found.append(comm.broadcast(value, axis, home))
    return distance(found[1:], found[:1])


def saved(state: Mapping[str, torch.Tensor], model: nn.Module, batch: Batch) -> tuple[float, float]:
    """The loss of `batch` in one process, once `model`, with its one table, has loaded `state` with its two.

    Returns:
        With the first home as the table, and with the last: which of them stays is up to who loads.
    """
    inputs = {name: value.to(hpnb.device()) for name, value in batch.items()}
    found = []
    for kept in (TABLE, HEAD):
        model.load_state_dict({**state, TABLE: state[kept], HEAD: state[kept]})
        with torch.no_grad():
            out = model(**{name: value for name, value in inputs.items() if name != "labels"})
            found.append(float(gpt2_pipeline.loss(out, inputs)))
    return found[0], found[1]


def gradients_off(pipe: hpnb.Pipeline, alone: nn.Module) -> float:
    """How far the gradients of this rank's layers are from those of the whole model, `alone`."""
    right = {name: p.grad for name, p in alone.named_parameters()}
    right.setdefault(HEAD, right[TABLE])  # the last rank knows the table by this name
    pairs = [(p.grad, right[name]) for name, p in pipe.named_parameters()]
    return distance([a for a, _ in pairs if a is not None], [b for _, b in pairs if b is not None])


def asked(batch: Batch, microbatches: int) -> list[int]:
    """How many targets each microbatch of a batch of texts has."""
    return [int(count_targets(each, causal=True)) for each in split_batch(batch, microbatches)]


def sent(size: GPT2Size, rows: int, dtype: torch.dtype, run: gpt2_pipeline.Run) -> dict[str, float]:
    """Bytes that this rank sends in a step: {"activations": between stages, "tie": for the table}."""
    schedule, counts = run
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    pipe = hpnb.Pipeline(gpt2_pipeline.gpt2(size, dtype), axis, schedule, gpt2_pipeline.loss, cut=counts)
    batch = gpt2_pipeline.words(size, rows)
    pipe.step(batch, return_outputs=False, record=False)  # the first step also says what is coming
    with hpnb.record.traffic() as t:
        pipe.step(batch, return_outputs=False, record=False).loss.item()
    of = {"send": "activations", "all_reduce": "tie"}
    found = dict.fromkeys(of.values(), 0.0)
    for message in t.messages:
        if message.op in of:
            found[of[message.op]] += message.bytes
    return found
