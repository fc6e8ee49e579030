"""Which of PyTorch's programs contend in which layout. Names say what they are; --thorough tries more forms.

A layout's best peer is the fastest of all that ran, so that no choice of form flatters hpnb.
"""

from __future__ import annotations

from functools import partial

from hpnb.bench.whole import data_peers, forms, pipeline_peers, tensor_peers
from hpnb.bench.whole.layouts import Shape
from hpnb.bench.whole.program import Candidate
from hpnb.bench.whole.task import What

_FSDP = "FSDP2"
_KEPT = "FSDP2 without resharding"
_SP = ", SequenceParallel"


def candidates(what: What, shape: Shape) -> list[Candidate]:
    """All of a layout, the likely best in front; none where PyTorch has no program."""
    found = _PEERS.get(shape.kind, [])
    if what == "vit-l16" and shape.kind in ("one", "dp"):
        name = "timm" if shape.kind == "one" else "timm, DDP"
        ways: list[tuple[str, forms.Compiled, bool]] = [
            ("model", "whole", False), ("blocks", "blocks", True),
        ]  # fmt: skip
        found = [*found, *(
            Candidate(f"{name}, {said} compiled", partial(data_peers.timm, how), same=False, extra=extra)
            for said, how, extra in ways
        )]  # fmt: skip
    return [*found, *_HEADS.get(shape.kind, [])] if what == "gpt2-xl" else found


def _one() -> list[Candidate]:
    return [
        Candidate("torch, blocks compiled", partial(data_peers.alone, "blocks")),
        Candidate(
            "torch, autocast, blocks compiled", partial(data_peers.alone_autocast, "blocks"), extra=True
        ),
        Candidate("torch, model compiled", partial(data_peers.alone, "whole"), extra=True),
    ]


def _replicas() -> list[Candidate]:
    return [
        Candidate("DDP, blocks compiled", partial(data_peers.ddp, "blocks")),
        Candidate("DDP, autocast, blocks compiled", partial(data_peers.ddp_autocast, "blocks")),
        Candidate("FSDP2 of replicas", partial(data_peers.fsdp, "blocks", False, False), extra=True),
        Candidate("DDP, model compiled", partial(data_peers.ddp, "whole"), extra=True),
        Candidate("DDP, autocast, model compiled", partial(data_peers.ddp_autocast, "whole"), extra=True),
    ]


def _pipelines(replicas: pipeline_peers.Replicas, behind: str = "") -> list[Candidate]:
    """1F1B, interleaved and ZBV. A compiled block is one node of autograd, which ZBV cannot split; and in a
    ZBV of DDP's stages the gradients of replicas are not summed as they should: losses part after a step."""
    ways: list[tuple[str, int, forms.Compiled, bool]] = [
        ("Schedule1F1B", 1, "blocks", False),
        ("ScheduleInterleaved1F1B", 2, "blocks", bool(behind)),
        ("ScheduleZBVZeroBubble", 2, "no", bool(behind)),
    ]
    return [
        Candidate(kind + behind, partial(pipeline_peers.pipelined, kind, n, replicas, how, False), extra=more)
        for kind, n, how, more in ways
        if not (how == "no" and behind == ", DDP")
    ]


def _both() -> list[Candidate]:
    kind = "Schedule1F1B"
    ways: list[tuple[bool, forms.Compiled, bool]] = [
        (True, "blocks", False), (True, "no", False), (False, "blocks", True),
    ]  # fmt: skip
    return [
        Candidate(
            f"{kind}, parallelize_module{_SP if sequence else ''}{', eager' if how == 'no' else ''}",
            partial(pipeline_peers.pipelined, kind, 1, "ddp", how, sequence),
            extra=extra,
        )
        for sequence, how, extra in ways
    ]


def _shared(over: bool) -> list[Candidate]:
    build = tensor_peers.sharded if over else tensor_peers.parallelized
    name = "FSDP2 x parallelize_module" if over else "parallelize_module"
    ways: list[tuple[bool, forms.Compiled, bool]] = [
        (True, "blocks", False), (True, "no", False), (False, "blocks", True), (False, "no", True),
    ]  # fmt: skip
    return [
        Candidate(
            f"{name}{_SP if sequence else ''}{', eager' if how == 'no' else ''}",
            partial(build, how, sequence),
            extra=extra,
        )
        for sequence, how, extra in ways
    ]


_PEERS = {
    "one": _one(),
    "dp": _replicas(),
    "zero1": [
        Candidate("DDP with ZeroRedundancyOptimizer", data_peers.zero_1),
        Candidate(_KEPT, partial(data_peers.fsdp, "blocks", False, True)),
    ],
    "zero2": [Candidate(_KEPT, partial(data_peers.fsdp, "blocks", False, True))],
    "zero3": [Candidate(_FSDP, partial(data_peers.fsdp, "blocks", True, True))],
    "pp": _pipelines("ddp"),
    "dp-pp": [*_pipelines("fsdp", ", FSDP2"), *_pipelines("ddp", ", DDP")],
    "tp": _shared(over=False),
    "dp-tp": _shared(over=True),
    "tp-pp": _both(),
}

_HEAD = ", head and loss as one"
_HEADS = {
    "one": [Candidate(f"torch{_HEAD}", partial(data_peers.alone, "head"))],
    "dp": [Candidate(f"DDP{_HEAD}", partial(data_peers.ddp, "head"))],
    "zero1": [Candidate(f"{_KEPT}{_HEAD}", partial(data_peers.fsdp, "head", False, True))],
    "zero2": [Candidate(f"{_KEPT}{_HEAD}", partial(data_peers.fsdp, "head", False, True))],
    "zero3": [Candidate(f"{_FSDP}{_HEAD}", partial(data_peers.fsdp, "head", True, True))],
    "pp": [
        Candidate(f"{kind}{said}{_HEAD}", partial(pipeline_peers.pipelined, kind, n, "ddp", "head", False))
        for kind, n, said in (
            ("Schedule1F1B", 1, ""),
            ("ScheduleInterleaved1F1B", 2, ""),
            ("ScheduleInterleaved1F1B", 4, " in 4 chunks"),
        )
    ],
}
