"""How many layers each stage gets, so that no stage keeps the others waiting.

    step time of a pipeline  >=  microbatches x the largest stage

    uniform       the same number of blocks; the embedding on the first stage, the head on the last
    balanced      the least possible largest stage, given a cost for every layer:
                  parameters, FLOPs or seconds (`layer_costs.py`)

Stages are contiguous. The least possible largest stage is found by bisection: with a limit L on a stage,
filling stages one after the other needs the fewest. Among the cuts that reach it, dynamic programming takes
the most even one: the least sum of squared costs, then of squared numbers of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, lcm
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from hpnb.mesh import Axis
from hpnb.pipeline_parallel.layer_costs import flops_of, parameters_of, seconds_of
from hpnb.pipeline_parallel.layers import Builder, Inputs, Layer
from hpnb.pipeline_parallel.layers import layers as layers_of
from hpnb.theory.layout_step import stage_blocks

How = Literal["uniform", "parameters", "flops", "time"] | Sequence[int]


def cut(
    layers: Sequence[Layer] | nn.Module | Builder,
    stages: int,
    how: How = "uniform",
    example: Inputs = None,
    agree: Axis | Sequence[Axis] | None = None,
) -> tuple[tuple[Layer, ...], ...]:
    """The layers of each stage.

    Args:
        layers: of `hpnb.pipeline_parallel.layers.layers`, or the model or Builder that has them.
        how: "uniform"; balanced by "parameters", "flops" or "time"; or a list of how many each stage gets,
            by hand: layers, or blocks alone if there are embedding and head.
        example: a microbatch, for "flops" and "time".
        agree: axes whose ranks must cut alike: one of them measures for all. Replicas must.

    Raises:
        ValueError: more stages than layers (or blocks); a list of another length, with another sum, or that
            leaves a stage with nothing to do; an unknown `how`; no example where one is needed.
    """
    if isinstance(layers, nn.Module | Builder):
        layers = layers_of(layers)
    if isinstance(how, str):
        counts = _choose_counts(layers, stages, how, example, agree)
    else:
        counts = _counts_by_hand(layers, stages, how)
    ends = list(accumulate(counts, initial=0))
    return tuple(tuple(layers[start:end]) for start, end in pairwise(ends))


def _choose_counts(
    layers: Sequence[Layer],
    stages: int,
    how: str,
    example: Inputs,
    agree: Axis | Sequence[Axis] | None,
) -> tuple[int, ...]:
    if how == "uniform":
        return uniform(layers, stages)
    if how == "parameters":
        return balanced(parameters_of(layers), stages)
    if how not in ("flops", "time"):
        raise ValueError(
            f"how={how!r} is no way to cut; use 'uniform', 'parameters', 'flops', 'time' or a list of layers "
            "per stage"
        )
    if stages == 1:  # whatever the layers cost
        return (len(layers),)
    if example is None:
        raise ValueError(f"to cut by {how!r} takes an example: pass a microbatch")
    check_count(len(layers), stages, "layers")  # before anything is run
    measure = flops_of if how == "flops" else seconds_of
    axes = () if agree is None else (agree,) if isinstance(agree, Axis) else tuple(agree)
    return balanced(_measure_once(lambda: measure(layers, example), axes), stages)


def _measure_once(measure: Callable[[], list[float]], axes: Sequence[Axis]) -> list[float]:
    """The costs that the first rank of all axes measures; where it fails, all ranks do."""
    axes = [axis for axis in axes if axis.size > 1]
    message: list[Any] = [None]  # the costs, or what went wrong
    failed: Exception | None = None
    if all(axis.rank == 0 for axis in axes):
        try:
            message = [measure()]
        except Exception as error:
            message, failed = [f"{type(error).__name__}: {error}"], error
    for axis in axes:  # along the first axis, then from all that have it along the next
        dist.broadcast_object_list(message, src=axis.ranks[0], group=axis.group)
    if failed is not None:
        raise failed
    if isinstance(message[0], str):
        raise ValueError(f"the rank that was to measure the layers failed with {message[0]}")
    costs: list[float] = message[0]
    return costs


def _counts_by_hand(layers: Sequence[Layer], stages: int, counts: Sequence[int]) -> tuple[int, ...]:
    counts = tuple(counts)
    if len(counts) != stages:
        raise ValueError(f"{list(counts)} is for {len(counts)} stages, and there are {stages}")
    front, blocks, back = _count_kinds(layers)
    if sum(counts) not in (blocks, len(layers)):
        kinds = f"{len(layers)}" if blocks == len(layers) else f"{len(layers)}, or its {blocks} blocks alone"
        raise ValueError(f"{list(counts)} adds up to {sum(counts)}, and the model's layers are {kinds}")
    if sum(counts) == blocks < len(layers):
        counts = _with_ends(counts, front, back)
    if min(counts) < 1:
        raise ValueError(f"stage {counts.index(min(counts))} of {list(counts)} has nothing to do; give it 1")
    return counts


# --- over numbers ------------------------------------------------------------------------------------


def uniform(layers: Sequence[Layer], stages: int) -> tuple[int, ...]:
    """Layers per stage, with the blocks split as evenly as possible. Where they do not divide, the stages in
    the middle get one more, because the first stage also has the embedding, and the last one the head.

    Where the model does not tell its layers apart, all of them count as blocks.
    """
    front, blocks, back = _count_kinds(layers)
    check_count(blocks, stages, "layers" if blocks == len(layers) else "blocks")
    return _with_ends(stage_blocks(blocks, stages), front, back)


def _count_kinds(layers: Sequence[Layer]) -> tuple[int, int, int]:
    """(layers before the first block, blocks, layers after the last one); without blocks, all count."""
    at = [i for i, layer in enumerate(layers) if layer.kind == "block"] or list(range(len(layers)))
    return (at[0], len(at), len(layers) - 1 - at[-1]) if at else (0, 0, 0)


def _with_ends(counts: Sequence[int], front: int, back: int) -> tuple[int, ...]:
    last = len(counts) - 1
    return tuple(n + front * (stage == 0) + back * (stage == last) for stage, n in enumerate(counts))


def balanced(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Layers per stage such that the largest stage costs the least possible; every stage has one or more.

    Of several such cuts the most even one. Exact: costs are compared as fractions, without rounding.

    Args:
        costs: of each layer in order, 0 or more.
    """
    check_count(len(costs), stages, "layers")
    if wrong := [cost for cost in costs if not isfinite(cost) or cost < 0]:
        raise ValueError(f"{wrong[0]} is no cost of a layer; it must be 0 or more")
    exact = [Fraction(cost) for cost in costs]
    unit = lcm(*(cost.denominator for cost in exact))
    integers = [int(cost * unit) for cost in exact]
    limit = _least_limit(integers, stages)
    upto = list(accumulate(integers, initial=0))  # upto[j] - upto[i] is the cost of layers i to j - 1
    # best[j]: the most even way to cut the first j layers into the stages so far. The layers before any stage
    # of the most even cut are cut most evenly themselves.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for _ in range(stages):
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for i, (squares, lengths, counts) in best.items():
            for j in range(i + 1, len(upto)):
                cost = upto[j] - upto[i]
                if cost > limit:
                    break
                option = squares + cost**2, lengths + (j - i) ** 2, (*counts, j - i)
                longer[j] = min(longer.get(j, option), option)
        best = longer
    return best[len(integers)][-1]


def _least_limit(costs: Sequence[int], stages: int) -> int:
    """The least L such that `stages` stages of at most L hold all."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        needed, load = 1, 0
        for cost in costs:
            if load + cost > middle:
                needed, load = needed + 1, 0
            load += cost
        low, high = (low, middle) if needed <= stages else (middle + 1, high)
    return low


def check_count(layers: int, stages: int, what: str) -> None:
    """Raise ValueError unless each stage gets one or more of the layers, which `what` names."""
    if stages < 1:
        raise ValueError(f"{stages} stages hold nothing; use 1 or more")
    if stages > layers:
        raise ValueError(
            f"{stages} stages need {stages} {what} or more, and there are {layers}: at most {layers} stages"
        )
