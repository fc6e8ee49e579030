"""Which of PyTorch's programs contend in which layout. Names say what they are; --thorough tries more forms.

A layout's best peer is the fastest of all that ran, so that no choice of form flatters hpnb.
"""

from __future__ import annotations

from functools import partial

from hpnb.bench import torch_data_parallel, torch_pipeline, torch_precision, torch_tensor_programs
from hpnb.bench.layouts import Shape
from hpnb.bench.program import Candidate
from hpnb.bench.tasks import What

_FSDP = "FSDP2"
_KEPT = "FSDP2 without resharding"
_HEAD = ", head and loss as one"  # of a language model
_SP = ", SequenceParallel"
_CUT: list[tuple[str, torch_precision.Compiled, bool]] = [
    (_SP + _HEAD, "head", True), (_HEAD, "head", False), (_SP, "blocks", True), ("", "blocks", False),
    (_SP + ", eager", "no", True), (", eager", "no", False),
]  # fmt: skip


def candidates(what: What, shape: Shape) -> list[Candidate]:
    """All of a layout, the likely best in front; none where PyTorch has no program."""
    found = _PEERS.get(shape.kind, [])
    if what == "gpt2-xl":
        return found
    found = [one for one in found if not one.name.endswith(_HEAD)]
    if shape.kind in ("one", "dp"):
        name = "timm" if shape.kind == "one" else "timm, DDP"
        whole, blocks = (
            partial(torch_data_parallel.timm, "whole"),
            partial(torch_data_parallel.timm, "blocks"),
        )
        found.append(Candidate(f"{name}, model compiled", whole, same=False))
        found.append(Candidate(f"{name}, blocks compiled", blocks, same=False, extra=True))
    return found


def _one() -> list[Candidate]:
    return [
        Candidate("torch" + _HEAD, partial(torch_data_parallel.alone, "head")),
        Candidate("torch, blocks compiled", partial(torch_data_parallel.alone, "blocks")),
        Candidate(
            "torch, autocast, blocks compiled",
            partial(torch_data_parallel.alone_autocast, "blocks"),
            extra=True,
        ),
        Candidate("torch, model compiled", partial(torch_data_parallel.alone, "whole"), extra=True),
    ]


def _replicas() -> list[Candidate]:
    return [
        Candidate("DDP" + _HEAD, partial(torch_data_parallel.ddp, "head")),
        Candidate("DDP, blocks compiled", partial(torch_data_parallel.ddp, "blocks")),
        Candidate(
            "DDP, autocast, blocks compiled", partial(torch_data_parallel.ddp_autocast, "blocks"), extra=True
        ),
        Candidate("FSDP2 of replicas", partial(torch_data_parallel.fsdp, "blocks", False, False), extra=True),
        Candidate("DDP, model compiled", partial(torch_data_parallel.ddp, "whole"), extra=True),
        Candidate(
            "DDP, autocast, model compiled", partial(torch_data_parallel.ddp_autocast, "whole"), extra=True
        ),
    ]


def _sharded(name: str, reshard: bool) -> list[Candidate]:
    return [
        Candidate(name + _HEAD, partial(torch_data_parallel.fsdp, "head", reshard, True)),
        Candidate(name, partial(torch_data_parallel.fsdp, "blocks", reshard, True)),
    ]


def _pipelines(replicas: torch_pipeline.Replicas, behind: str = "") -> list[Candidate]:
    """1F1B, interleaved and ZBV. A compiled block is one node of autograd, which ZBV cannot split; and in a
    ZBV of DDP's stages the gradients of replicas are not summed as they should: losses part after a step."""
    ways: list[tuple[str, int, str, torch_precision.Compiled, bool]] = [
        ("Schedule1F1B", 1, _HEAD, "head", False),
        ("ScheduleInterleaved1F1B", 2, _HEAD, "head", bool(behind)),
        ("ScheduleInterleaved1F1B", 4, " in 4 chunks" + _HEAD, "head", bool(behind)),
        ("Schedule1F1B", 1, "", "blocks", False),
        ("ScheduleInterleaved1F1B", 2, "", "blocks", bool(behind)),
        ("ScheduleZBVZeroBubble", 2, "", "no", bool(behind)),
    ]
    return [
        Candidate(
            kind + behind + said, partial(torch_pipeline.pipelined, kind, n, replicas, how, False), extra=more
        )
        for kind, n, said, how, more in ways
        if not (how == "no" and behind == ", DDP")
    ]


def _both() -> list[Candidate]:
    name, kind = "Schedule1F1B, parallelize_module", "Schedule1F1B"
    return [
        Candidate(
            name + said, partial(torch_pipeline.pipelined, kind, 1, "ddp", how, sequence), extra=how == "no"
        )
        for said, how, sequence in _CUT
    ]


def _shared(over: bool) -> list[Candidate]:
    build = torch_tensor_programs.sharded if over else torch_tensor_programs.parallelized
    name = "FSDP2 x parallelize_module" if over else "parallelize_module"
    ways = [*_CUT, (f"{_SP}, async{_HEAD}", "async", True)]
    return [
        Candidate(name + said, partial(build, how, sequence), extra=how in ("no", "async"))
        for said, how, sequence in ways
    ]


_PEERS = {
    "one": _one(),
    "dp": _replicas(),
    "zero1": [
        Candidate(
            "DDP with ZeroRedundancyOptimizer" + _HEAD,
            partial(torch_data_parallel.zero_1, "head"),
            extra=True,
        ),
        Candidate("DDP with ZeroRedundancyOptimizer", partial(torch_data_parallel.zero_1, "blocks")),
        *_sharded(_KEPT, False),
    ],
    "zero2": _sharded(_KEPT, False),
    "zero3": _sharded(_FSDP, True),
    "pp": _pipelines("ddp"),
    "dp-pp": [*_pipelines("fsdp", ", FSDP2"), *_pipelines("ddp", ", DDP")],
    "tp": _shared(over=False),
    "dp-tp": _shared(over=True),
    "tp-pp": _both(),
}
