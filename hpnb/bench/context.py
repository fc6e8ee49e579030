"""Causal attention over a long sequence: hpnb's three ways beside PyTorch's context_parallel.

    python -m hpnb.bench context --ranks 2 --length 8192

A step is the forward and backward of one attention over a sequence that is sharded. The ideal is
one rank alone with all of it, divided by the ranks: the same FLOPs, and nothing is sent. On a CPU the
ranks need a core each, or the clock shows who got one. Bytes are counted (`hpnb.record.traffic`); the table
shows those of the rank that sends most, and the largest distance of any rank's result from one process's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hpnb
from hpnb.bench.results import LayoutResult, ProgramResult, take_turns
from hpnb.bench.worker import time_step
from hpnb.context_parallel import (
    Ring,
    Visibility,
    all_gather_attention,
    ring_attention,
    token_places,
    ulysses_attention,
)
from hpnb.context_parallel.shard_sequence import split_sequence
from hpnb.ranks.devices import usable_cores

Tensors = tuple[torch.Tensor, ...]
TORCH, IDEAL = "torch context_parallel", "ideal"


@dataclass(frozen=True)
class Size:
    """(batch, heads, length, head_dim) of the queries; keys and values have `kv_heads`."""

    length: int
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    batch: int = 1


def run(
    ranks: int, rounds: int, device: str, length: int, heads: int, kv_heads: int | None, head_dim: int
) -> None:
    """Measure, and print the table."""
    compare(ranks, rounds, device, Size(length, heads, kv_heads or heads, head_dim))
    cores = usable_cores()
    if not torch.cuda.is_available() and cores < ranks:
        print(f"{ranks} ranks share {cores} cores: these times say who got a core; use --ranks {cores}")


def compare(ranks: int, rounds: int, device: str, size: Size) -> LayoutResult:
    """All candidates in one run.

    Raises:
        ValueError: a length that cannot be split.
    """
    if size.length % (2 * ranks):
        raise ValueError(
            f"length={size.length} cannot be split into {2 * ranks} equal chunks for {ranks} ranks; use "
            f"{-(-size.length // (2 * ranks)) * 2 * ranks}"
        )
    result = hpnb.launch(_measure, size, rounds, ranks=ranks, device=device, timeout=1800.0)[0]
    print(table(result, size))
    return result


def table(result: LayoutResult, size: Size) -> str:
    """A line a candidate: step, ratio to the ideal with quartiles, TFLOP/s of a rank, bytes of the rank that
    sends most."""
    lines = [
        f"causal attention, {size.length:,} tokens, {size.heads} heads of {size.head_dim} on {size.kv_heads} "
        f"key-value heads, {result.ranks} ranks",
        f"{'':26}{'step':>10}{'of the ideal':>24}{'TFLOP/s/rank':>14}{'most sent by a rank':>23}"
        f"{'distance':>11}",
    ]
    for one in result.entries:
        ratio, seconds = result.ratio(one.name, IDEAL), result.seconds(one.name)
        if ratio is None or seconds is None:
            lines.append(f"{one.name:26}{one.failed}")
            continue
        share = f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})"
        tflops = result.flops / result.ranks / seconds / 1e12
        sent = f"{one.sent / 1e6:.1f} MB" + ("" if one.sent_rank is None else f" (rank {one.sent_rank})")
        lines.append(
            f"{one.name:26}{seconds * 1e3:7.1f} ms{share:>24}{tflops:14.2f}{sent:>23}{one.distance:11.1e}"
        )
    return "\n".join(lines)


# --- on the ranks ----------------------------------------------------------------------------------------


def _measure(size: Size, rounds: int) -> LayoutResult:
    """All candidates take turns. The ideal runs on the first rank, while the others wait."""
    axis, device = hpnb.Mesh(hpnb.Layout(cp=hpnb.world_size())).cp, hpnb.device()
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        shape = (size.batch, heads, size.length, size.head_dim)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    full = draw(size.heads), draw(size.kv_heads), draw(size.kv_heads), draw(size.heads)  # q, k, v, dout
    wanted = _step(full, _dense)
    scale, causal = size.head_dim**-0.5, Visibility(causal=True)
    ring = Ring.of(axis, size.length // axis.size, zigzag=True)
    attends: dict[str, Callable[..., torch.Tensor]] = {
        "hpnb ring": lambda q, k, v: ring_attention(q, k, v, ring, causal, scale),
        "hpnb all-gather": lambda q, k, v: all_gather_attention(q, k, v, ring, causal, scale),
        "hpnb ulysses": lambda q, k, v: ulysses_attention(q, k, v, axis, causal, scale),
    }
    steps: dict[str, Callable[[], Tensors]] = {}
    places: dict[str, torch.Tensor] = {TORCH: ring.places(device)}
    for name, attend in attends.items():
        chunks = split_sequence(size.length, axis.size, zigzag=name != "hpnb ulysses")
        places[name] = token_places(chunks[axis.rank], device)
        local = tuple(t[:, :, places[name]].contiguous() for t in full)
        steps[name] = partial(_step, local, attend)
    local = tuple(t[:, :, places[TORCH]].contiguous() for t in full)
    steps[TORCH] = partial(_torch_step, local)

    def ideal() -> None:
        if axis.rank == 0:
            _step(full, _dense)

    names = [*steps, IDEAL]
    sent, distances, failed = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0), dict[str, str]()
    for name, step in steps.items():
        try:
            with hpnb.record.traffic() as traffic:  # PyTorch's own collectives count, too
                outcome = step()
        except (NotImplementedError, RuntimeError, ValueError, TypeError, AssertionError) as error:
            what = " ".join(str(error).split())[:160]
            failed[name] = f"does not run here: {type(error).__name__}: {what}"
            continue
        sent[name] = float(sum(traffic.bytes.values()))
        pairs = zip(outcome, wanted, strict=True)
        here = [(ours, theirs[:, :, places[name]]) for ours, theirs in pairs]
        distances[name] = max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in here)
    reasons: list[dict[str, str]] = [{} for _ in range(axis.size)]
    dist.all_gather_object(reasons, failed)  # what fails on one rank runs on none
    failed = {name: reason for of_rank in reasons for name, reason in of_rank.items()}
    most = {name: _largest(sent[name]) for name in steps}
    far = {name: _largest(distances[name])[0] for name in steps}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in take_turns([name for name in names if name not in failed], rounds + 1):
        seconds[name].append(time_step(steps[name]) if name in steps else time_step(ideal) / axis.size)
    entries = tuple(
        ProgramResult(
            name, name.startswith("hpnb"), sent=most.get(name, (0.0, 0))[0],
            sent_rank=most[name][1] if most.get(name, (0.0, 0))[0] else None, distance=far.get(name, 0.0),
            failed=failed.get(name, ""),
        )
        for name in names
    )  # fmt: skip
    # Two products in the forward and five in the backward, of the half of the scores that is seen.
    flops = 7 * size.batch * size.heads * size.length**2 * size.head_dim
    waves = {name: seconds[name][1:] for name in names if name not in failed}
    return LayoutResult(
        f"cp{axis.size}", axis.size, "tokens", size.batch * size.length, flops, 0.0, entries, (waves,)
    )


def _largest(value: float) -> tuple[float, int]:
    """(the largest of all ranks' values, the first rank that has it); all ranks call it."""
    values: list[float] = [0.0] * hpnb.world_size()
    dist.all_gather_object(values, value)
    return max(values), values.index(max(values))


def _step(tensors: Tensors, attend: Callable[..., torch.Tensor]) -> Tensors:
    """(output, dq, dk, dv) of a forward and backward."""
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    out = attend(q, k, v)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3]))


def _torch_step(local: Tensors) -> Tensors:
    """With PyTorch's `context_parallel`, which has kernels on GPUs alone (torch 2.15).

    Args:
        local: this rank's tokens of q, k, v and dout, balanced as PyTorch does: as a zigzag. A model's batch
            is sharded once for all its attentions, so that is no part of the step. The context shards at
            least one tensor, and gets a small one.
    """
    from torch.distributed.tensor.experimental import context_parallel

    places = torch.zeros(1, 2 * hpnb.world_size(), device=local[0].device)
    with context_parallel(_mesh(), buffers=[places], buffer_seq_dims=[1], no_restore_buffers={places}):
        try:
            return _step(local, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        except Exception as error:
            failure = error  # raised outside: an error that passes through it leaves F patched (torch 2.11)
    raise failure


@cache
def _mesh() -> DeviceMesh:
    return init_device_mesh(hpnb.device().type, (hpnb.world_size(),))


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
