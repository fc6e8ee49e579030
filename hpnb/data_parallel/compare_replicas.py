"""Do replicas still agree? Parameters and gradients that should be equal along an axis, and are not.

    differing = compare_replicas(model, mesh.tp)        # {} if all is well, on every rank

Most silent faults of parallel training end here: a gradient that was not summed, a step that one rank
skipped, a weight that was not broadcast. Nothing fails at that moment, because the copies only drift apart.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.placement import placement_of


@torch.no_grad()
def compare_replicas(module: torch.nn.Module, axis: Axis) -> dict[str, float]:
    """Which parameters and gradients of `module` differ along `axis`, and by how much.

    All ranks of the axis call it, with modules of the same parameters, and get the same answer. Call it after
    gradients have been summed and before `zero_grad`. It sends every parameter, so it is no part of a step.

        model = torch.nn.Linear(4, 4)                   # other random weights on each rank
        hpnb.data_parallel.compare_replicas(model, mesh.dp)     # {"weight": 1.31, "bias": 1.58}

    Args:
        module: parameters that are sharded along `axis` are skipped (`hpnb.placement`).

    Raises:
        ValueError: one is sharded along a part of `axis`, which `axis.split` made.

    Returns:
        {name: the largest ||a - b|| / ||b|| of any rank, where b is the tensor of the axis's rank 0}; a
        gradient is "name.grad", and inf if some ranks have it and others do not. Equal tensors are left out,
        except that one with an inf or nan is listed with nan.

    >>> def compare():
    ...     model = torch.nn.Linear(2, 1, bias=False)
    ...     torch.nn.init.constant_(model.weight, 1.0 + hpnb.rank())  # should be equal, and is not
    ...     return hpnb.data_parallel.compare_replicas(model, hpnb.Mesh(hpnb.Layout(dp=2)).dp)
    >>> hpnb.launch(compare, ranks=2, device="cpu")
    [{'weight': 1.0}, {'weight': 1.0}]
    """
    tensors: dict[str, torch.Tensor | None] = {}
    for name, p in module.named_parameters():
        axes = placement_of(p, name).axes
        if parts := sorted(other for other in axes if other.startswith(f"{axis.name}.")):
            raise ValueError(
                f"{name} is sharded along {' and '.join(parts)}, so ranks of {axis.name} have different "
                f"parts of it: compare along the axes that mesh.{axis.name}.split made, one after the other"
            )
        if axis.name not in axes:
            tensors |= {name: p, f"{name}.grad": p.grad}
    missing = torch.tensor([t is None for t in tensors.values()], dtype=torch.int32)
    parameters = [t for t in tensors.values() if t is not None]
    if not parameters:
        return {}
    missing = missing.to(parameters[0].device)
    dist.all_reduce(missing, group=axis.group)
    distances: list[torch.Tensor] = []
    for tensor, count in zip(tensors.values(), missing.tolist(), strict=True):
        if tensor is None or count:
            distance = 0.0 if count == axis.size else math.inf
            distances.append(torch.full((), distance, dtype=torch.float64, device=missing.device))
            continue
        first = tensor.clone()
        dist.broadcast(first, src=axis.ranks[0], group=axis.group)
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        norm = first.to(wide).norm()
        difference = (tensor.to(wide) - first.to(wide)).norm()
        distance = difference / torch.where(norm > 0, norm, 1.0)
        distances.append(torch.where(distance.isfinite(), distance, math.nan))
    here = torch.stack(distances)
    # A maximum over nan depends on the backend, so whether there is one is a second maximum.
    largest = torch.stack([here.nan_to_num(posinf=math.inf), here.isnan().double()])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=axis.group)
    by_name = zip(tensors, *largest.tolist(), strict=True)
    return {name: math.nan if nan else distance for name, distance, nan in by_name if nan or distance}
