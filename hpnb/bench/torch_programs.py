"""Which of PyTorch's programs contend in which layout. Names say what they are; --thorough tries more forms.

A layout's best peer is the fastest of all that ran, so that no choice of form flatters hpnb.
"""

from __future__ import annotations

from functools import partial

from hpnb.bench.layouts import kind_of
from hpnb.bench.program import Candidate
from hpnb.bench.torch_data_parallel import fsdp, replicas, timm
from hpnb.bench.torch_pipeline import ReplicaWrapper, pipelined
from hpnb.bench.torch_precision import Compiled
from hpnb.bench.torch_tensor_parallel import tensor_parallel
from hpnb.mesh import ParallelLayout

_HEAD = ", head and loss as one"  # of a language model
_SP = ", SequenceParallel"
_TENSOR_FORMS: list[tuple[str, Compiled, bool]] = [
    (_SP + _HEAD, "head", True), (_HEAD, "head", False), (_SP, "blocks", True), ("", "blocks", False),
    (_SP + ", eager", "no", True), (", eager", "no", False),
]  # fmt: skip


def candidates(what: str, layout: ParallelLayout) -> list[Candidate]:
    """All of a layout, the likely best in front; none where PyTorch has no program."""
    kind = kind_of(layout)
    peers = _PEERS.get(kind, [])
    if what == "gpt2-xl":
        return peers
    peers = [peer for peer in peers if not peer.name.endswith(_HEAD)]
    if kind in ("one", "dp"):
        name = "timm" if kind == "one" else "timm, DDP"
        peers.append(Candidate(f"{name}, model compiled", partial(timm, "model"), same=False))
        peers.append(Candidate(f"{name}, blocks compiled", partial(timm, "blocks"), same=False, extra=True))
    return peers


def _sharded(name: str, reshard: bool) -> list[Candidate]:
    return [
        Candidate(name + _HEAD, partial(fsdp, "head", reshard, True)),
        Candidate(name, partial(fsdp, "blocks", reshard, True)),
    ]


def _pipelines(wrapper: ReplicaWrapper, suffix: str = "") -> list[Candidate]:
    """1F1B, interleaved and ZBV. A compiled block is one node of autograd, which ZBV cannot split. In a ZBV
    of
    DDP's stages the gradients of replicas are not summed as they should be: losses diverge after a step."""
    forms: list[tuple[str, int, str, Compiled, bool]] = [
        ("Schedule1F1B", 1, _HEAD, "head", False),
        ("ScheduleInterleaved1F1B", 2, _HEAD, "head", bool(suffix)),
        ("ScheduleInterleaved1F1B", 4, " in 4 chunks" + _HEAD, "head", bool(suffix)),
        ("Schedule1F1B", 1, "", "blocks", False),
        ("ScheduleInterleaved1F1B", 2, "", "blocks", bool(suffix)),
        ("ScheduleZBVZeroBubble", 2, "", "no", bool(suffix)),
    ]
    return [
        Candidate(kind + suffix + form, partial(pipelined, kind, chunks, wrapper, how, False), extra=extra)
        for kind, chunks, form, how, extra in forms
        if not (how == "no" and suffix == ", DDP")
    ]


def _tensor(name: str) -> list[Candidate]:
    forms = [*_TENSOR_FORMS, (f"{_SP}, async{_HEAD}", "async", True)]
    return [
        Candidate(name + form, partial(tensor_parallel, how, sequence), extra=how in ("no", "async"))
        for form, how, sequence in forms
    ]


_ZERO_1 = "DDP with ZeroRedundancyOptimizer"
_PEERS = {
    "one": [
        Candidate("torch" + _HEAD, partial(replicas, "head")),
        Candidate("torch, blocks compiled", partial(replicas, "blocks")),
        Candidate("torch, autocast, blocks compiled", partial(replicas, "blocks", autocast=True), extra=True),
        Candidate("torch, model compiled", partial(replicas, "model"), extra=True),
    ],
    "dp": [
        Candidate("DDP" + _HEAD, partial(replicas, "head")),
        Candidate("DDP, blocks compiled", partial(replicas, "blocks")),
        Candidate("DDP, autocast, blocks compiled", partial(replicas, "blocks", autocast=True), extra=True),
        Candidate("FSDP2 of replicas", partial(fsdp, "blocks", False, False), extra=True),
        Candidate("DDP, model compiled", partial(replicas, "model"), extra=True),
        Candidate("DDP, autocast, model compiled", partial(replicas, "model", autocast=True), extra=True),
    ],
    "zero1": [
        Candidate(_ZERO_1 + _HEAD, partial(replicas, "head", autocast=True, zero_1=True), extra=True),
        Candidate(_ZERO_1, partial(replicas, "blocks", autocast=True, zero_1=True)),
        *_sharded("FSDP2 without resharding", False),
    ],
    "zero2": _sharded("FSDP2 without resharding", False),
    "zero3": _sharded("FSDP2", True),
    "pp": _pipelines("ddp"),
    "dp-pp": [*_pipelines("fsdp", ", FSDP2"), *_pipelines("ddp", ", DDP")],
    "tp": _tensor("parallelize_module"),
    "dp-tp": _tensor("FSDP2 x parallelize_module"),
    "tp-pp": [
        Candidate(
            "Schedule1F1B, parallelize_module" + form,
            partial(pipelined, "Schedule1F1B", 1, "ddp", how, sequence),
            extra=how == "no",
        )
        for form, how, sequence in _TENSOR_FORMS
    ],
}
