"""What notebook 06 measures of a tied weight: the distance of its copies on a pipeline's first and last rank,
and what a checkpoint is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

import hpnb
from hpnb import comm
from hpnb.lesson.programs.device_timing import Batch
from hpnb.lesson.programs.layer_times import token_loss
from hpnb.lesson.programs.step_timing import relative_distance
from hpnb.mesh import Axis

EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"


def tied_distance(pipe: hpnb.Pipeline, axis: Axis, shape: Sequence[int]) -> float:
    """How far the last rank's copy is from the first rank's: || head - embedding || / || embedding ||.

    The ranks between do not know the shape of the weight, (V, h).
    """
    parameters = dict(pipe.module.named_parameters(remove_duplicate=False))
    copies = []
    for name, rank in ((EMBEDDING, 0), (HEAD, axis.size - 1)):
        copy = torch.zeros(tuple(shape), dtype=torch.float64, device=hpnb.device())
        if axis.rank == rank:
            copy.copy_(parameters[name].detach())
        copies.append(comm.broadcast(copy, axis, rank))
    return relative_distance(copies[1:], copies[:1])


def loaded_losses(state: Mapping[str, torch.Tensor], model: nn.Module, batch: Batch) -> tuple[float, float]:
    """The loss of `batch` in one process, once `model`, which has one tied weight, has loaded two copies.

    Returns:
        With the embedding's copy, and with the head's: which of them survives is up to who loads.
    """
    inputs = {name: value.to(hpnb.device()) for name, value in batch.items()}
    losses = []
    for copy in (EMBEDDING, HEAD):
        model.load_state_dict({**state, EMBEDDING: state[copy], HEAD: state[copy]})
        with torch.no_grad():
            out = model(**{name: value for name, value in inputs.items() if name != "labels"})
            losses.append(float(token_loss(out, inputs)))
    return losses[0], losses[1]
