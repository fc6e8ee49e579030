"""Notebook 01: a mean over ragged batches, buckets, what hides behind what, a sampler, and ZeRO-1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hpnb
from hpnb import Layout, Mesh
from hpnb.data import Loader
from hpnb.lesson.exercises.checker import Exercise, Finding
from hpnb.lesson.programs.step_timing import relative_distance as distance
from hpnb.lesson.tables import number
from hpnb.mesh import Axis
from hpnb.theory import LINKS, Link, bytes_sent, even_buckets, overlap

_TIMEOUT = 20.0
_EXACT = 1e-12  # relative norm, float64


def _off(apart: float) -> str:
    if apart < _EXACT:
        return "equal"
    small = apart < 1e-4  # looks like rounding, and is not
    return f"off by {apart:.1e}" + (" (in float64 rounding is 1e-16)" if small else "")


def _worst(distances: Iterable[float]) -> float:
    """The largest; NaN, which compares with nothing, is worse than any number."""
    return max(distances, key=lambda apart: math.inf if math.isnan(apart) else apart)


# --- the exact mean of a ragged batch --------------------------------------------------------


class NoLoss(Exception):
    """What a rank returned cannot be a loss. Raised, so that ranks that wait for this one end with it."""


def _run_ragged(loss: Callable[..., Any], counts: Sequence[int]) -> tuple[float, float]:
    """On a rank: (distance of the gradient to one process's, bytes that `loss` sent)."""
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    torch.manual_seed(0)
    x = torch.randn(sum(counts), 4, dtype=torch.float64)
    y = torch.randn(sum(counts), 1, dtype=torch.float64)
    alone = nn.Linear(4, 1, dtype=torch.float64)
    replica = hpnb.DataParallel(nn.Linear(4, 1, dtype=torch.float64), axis)
    replica.module.load_state_dict(alone.state_dict())
    (alone(x) - y).square().mean().backward()
    start = sum(counts[: axis.rank])
    mine = slice(start, start + counts[axis.rank])
    losses = (replica(x[mine]) - y[mine]).square().squeeze(1)  # (n,), n may be 0
    with hpnb.record.traffic() as t:
        value = loss(losses, axis)
    who = f"rank {axis.rank}, with {len(losses)} samples, returned"
    if not isinstance(value, torch.Tensor):
        raise NoLoss(f"{who} a {type(value).__name__}, and a tensor of shape () is wanted")
    if value.dim():
        raise NoLoss(f"{who} a tensor of shape {tuple(value.shape)}, and shape () is wanted")
    if not value.requires_grad:
        raise NoLoss(f"{who} what does not depend on the losses, so it has no gradient to send")
    value.backward()
    grads = [p.grad for p in replica.module.parameters() if p.grad is not None]
    return distance(grads, [p.grad for p in alone.parameters() if p.grad is not None]), t.total


def _verify_ragged(loss: Callable[..., Any]) -> Sequence[Finding]:
    findings = []
    most = bytes_sent("all_reduce", 8, 3)
    for counts in ((2, 2, 2), (3, 1, 2), (4, 1, 0)):
        text = f"{', '.join(map(str, counts))} samples"
        try:
            found = hpnb.launch(_run_ragged, loss, counts, ranks=3, device="cpu", timeout=_TIMEOUT)
        except hpnb.RankError as error:
            if error.error != NoLoss.__name__:
                raise
            findings.append(Finding(False, f"{text}: {error.summary.partition(': ')[2]}"))
            continue
        apart = _worst(apart for apart, _ in found)
        said = f"the gradient of one process on all of them: {_off(apart)}"
        findings.append(Finding(apart < _EXACT, f"{text}: {said}"))
        sent = max(sent for _, sent in found)
        said = f"a rank sent {sent:.1f} bytes, at most {most:.1f} (one number of 8 bytes over 3 ranks)"
        findings.append(Finding(sent < most + 0.1, f"{text}: {said}"))
    return findings


ragged = Exercise("01.1", "the exact mean of a ragged batch", 15, _verify_ragged)


# --- a bucketed reducer ----------------------------------------------------------------------


@dataclass
class _Reduced:
    """What a rank saw of one step: distances to mean and sum, bytes of messages, gradients at the first."""

    apart: float
    to_sum: float
    sent: list[int]
    there: int
    of: int


def _run_reducer(reducer: Callable[..., Any], limit: int) -> list[_Reduced]:
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, dtype=torch.float64) for _ in range(5)))
    twin = nn.Sequential(*(nn.Linear(8, 8, dtype=torch.float64) for _ in range(5)))
    twin.load_state_dict(model.state_dict())
    parameters = list(reversed(list(model.parameters())))
    sent: list[int] = []
    there: list[int] = []

    def all_reduce(flat: torch.Tensor) -> dist.Work | None:
        sent.append(flat.nbytes)
        there.append(sum(p.grad is not None for p in parameters))
        return dist.all_reduce(flat, group=axis.group, async_op=True)

    finish = reducer(parameters, axis.size, limit, all_reduce)
    if not callable(finish):
        raise TypeError(f"reducer returned a {type(finish).__name__}, and a function `finish` is wanted")
    found = []
    for step in range(2):
        x = torch.randn(
            3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7 * step + axis.rank)
        )
        for net in (model, twin):
            net.zero_grad(set_to_none=True)
            net(x).square().sum().backward()
        finish()
        mean = [p.grad.clone() for p in twin.parameters() if p.grad is not None]
        for grad in mean:
            dist.all_reduce(grad, group=axis.group)
            grad /= axis.size
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        apart, to_sum = distance(grads, mean), distance(grads, [axis.size * grad for grad in mean])
        found.append(_Reduced(apart, to_sum, list(sent), there[0] if there else 0, len(parameters)))
        sent.clear()
        there.clear()
    return found


def _buckets(limit: int) -> list[int]:
    """Bytes of the buckets that are wanted: closed before the tensor that would take one over the limit."""
    sizes = [0]
    for size in [64, 512] * 5:
        if sizes[-1] and sizes[-1] + size > limit:
            sizes.append(0)
        sizes[-1] += size
    return sizes


def _verify_reducer(reducer: Callable[..., Any]) -> Sequence[Finding]:
    findings = []
    with hpnb.Ranks(3, device="cpu", timeout=_TIMEOUT) as ranks:
        for limit in (1200, 100, 10**6):
            wanted = _buckets(limit)
            for number, step in enumerate(ranks.run(_run_reducer, reducer, limit)[0], 1):
                text = f"limit {limit} bytes, step {number}"
                said = _off(step.apart) + (" (a sum, not the mean?)" if step.to_sum < 1e-3 else "")
                findings.append(Finding(step.apart < _EXACT, f"{text}: mean gradients: {said}"))
                right = sorted(step.sent) == sorted(wanted)
                said = f"{len(step.sent)} messages, {sum(step.sent)} bytes"
                want = f"target {len(wanted)} and {sum(wanted)}"
                findings.append(Finding(right, f"{text}: {said}, {want}"))
                if len(wanted) > 1:
                    early = 0 < step.there < step.of
                    when = f"the first left when {step.there} of {step.of} gradients were there"
                    findings.append(Finding(early, f"{text}: {when}"))
    return findings


reducer = Exercise("01.2", "a bucketed reducer", 30, _verify_reducer)


# --- what hides behind what ------------------------------------------------------------------

_SHARE = 0.1
_SLACK = 1.05
_MOST = 20_000  # buckets


def _cut(nbytes: float, bucket: float) -> int:
    """How many equal buckets of at most `bucket` bytes; the rounding of nbytes / m makes no m + 1 of m."""
    return max(1, math.ceil(nbytes / bucket * (1 - 1e-9)))


def _share(link: Link, ranks: int, rate: float, parameters: float, buckets: int, tokens: float) -> float:
    """Exposed share of a step of which the forward is half the backward, by simulation."""
    backward = 4 * tokens * parameters / rate
    ready, sizes = even_buckets(2 * parameters, 2 * parameters / buckets, backward)
    bare = overlap(ready, sizes, ranks, link).exposed
    return bare / (1.5 * backward + bare)


def _fewest(link: Link, ranks: int, rate: float, parameters: float) -> float:
    """The fewest tokens with which some equal buckets expose at most _SHARE, by bisection."""
    fewest = math.inf
    for buckets in sorted({round(1.15**k) for k in range(45)}):
        low, high = 1.0, 1e9
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            fits = _share(link, ranks, rate, parameters, buckets, middle) <= _SHARE
            low, high = (low, middle) if fits else (middle, high)
        fewest = min(fewest, high)
    return fewest


def _verify_plan(plan: Callable[[Link, int, float, float], Any]) -> Sequence[Finding]:
    findings = []
    cases = (("NVLink 4", 4, 600e12), ("InfiniBand NDR", 32, 400e12), ("Ethernet 100 Gb", 64, 400e12),
             ("Ethernet 10 Gb", 8, 20e12))  # fmt: skip
    for name, ranks, rate in cases:
        link, parameters = LINKS[name], 3e8
        answer = plan(link, ranks, rate, parameters)
        text = f"{name}, {ranks} ranks"
        try:
            bucket, tokens = (float(value) for value in answer)
        except (TypeError, ValueError):
            bucket = tokens = math.nan
        if not (0 < bucket < math.inf and 0 < tokens < math.inf):
            findings.append(Finding(False, f"{text}: {answer!r} is no pair (bytes of a bucket, tokens)"))
            continue
        buckets = _cut(2 * parameters, bucket)
        plural = "bucket" if buckets == 1 else "equal buckets"
        said = f"{text}: at most {number(bucket, 'B')}, so {buckets:,} {plural}, and {tokens:,.0f} tokens"
        if buckets > _MOST:
            findings.append(Finding(False, f"{said}: more than {_MOST:,}, which would be latency alone"))
            continue
        bare = _share(link, ranks, rate, parameters, buckets, tokens)
        fits, limit = round(bare, 4) <= _SHARE, f"at most {100 * _SHARE:.0f} %"  # judged as it is shown
        findings.append(Finding(fits, f"{said}: {100 * bare:.2f} % exposed, {limit}"))
        over = tokens / _fewest(link, ranks, rate, parameters)
        said = f"{text}: {tokens:,.0f} tokens are {over:,.2f} times the fewest that do"
        findings.append(Finding(over <= _SLACK, f"{said}, at most {_SLACK}"))
    return findings


plan = Exercise("01.3", "buckets and tokens that hide a wire", 20, _verify_plan)


# --- the sampler -----------------------------------------------------------------------------

Seen = list[list[tuple[int, ...]]]  # [step][rank]: numbers of samples
_EPOCHS = 8


class _Samples:
    """24 samples that know their own number."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"number": index, "x": x, "y": x[:3].sum()}


def _train(sampler: str, seed: int) -> tuple[list[tuple[int, ...]], list[float]]:
    """On a rank: what each step of the first epoch saw, and the mean losses of the first and last epoch."""
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    place: Axis | None = axis if sampler == "sharded" else None
    own = seed + (axis.rank + 1 if sampler == "own order" else 0)
    torch.manual_seed(0)
    replica = hpnb.DataParallel(nn.Linear(8, 1), axis)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    loader = Loader(_Samples(), 4, place, seed=own)
    seen, losses = [], []
    for epoch in range(_EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = (replica(batch["x"]).squeeze(1) - batch["y"]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            shown = loss.detach().clone()
            dist.all_reduce(shown, group=axis.group)
            losses.append(shown.item() / axis.size)
            if not epoch:
                seen.append(tuple(batch["number"].tolist()))
    each = len(losses) // _EPOCHS
    losses = [sum(losses[:each]) / each, sum(losses[-each:]) / each]
    return seen, losses


def _verify_sampler(diagnose: Callable[[Seen], Any]) -> Sequence[Finding]:
    findings = []
    with hpnb.Ranks(3, device="cpu", timeout=_TIMEOUT) as ranks:
        for sampler, seed in (("same order", 1), ("sharded", 2), ("own order", 3)):
            found = ranks.run(partial(_train, sampler, seed))
            seen: Seen = [list(step) for step in zip(*(seen for seen, _ in found), strict=True)]
            losses = found[0][1]
            effective = sum(len({n for part in step for n in part}) for step in seen) / len(seen)
            answer = diagnose(seen)
            text = f"{sampler}, loss {losses[0]:.2f} to {losses[-1]:.2f}"
            if not isinstance(answer, tuple) or len(answer) != 2:
                findings.append(Finding(False, f"{text}: {answer!r} is no pair (sampler, effective batch)"))
                continue
            name, batch = answer
            findings.append(Finding(name == sampler, f"{text}: you say {name!r}"))
            near = isinstance(batch, (int, float)) and abs(batch - effective) < 1e-6
            said = f"{batch:.3g}" if isinstance(batch, (int, float)) else repr(batch)
            findings.append(
                Finding(near, f"{text}: {effective:.3g} different samples of 12 a step, you say {said}")
            )
    return findings


sampler = Exercise("01.4", "a sampler behind a healthy curve", 15, _verify_sampler)


# --- ZeRO-1 ----------------------------------------------------------------------------------

_WEIGHTS, _STEPS = 12, 4


def _run_zero(zero: type) -> tuple[float, list[list[str]], int | None]:
    """On a rank: (distance of the weights to Adam's on one process, calls of each step, bytes of moments)."""
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    weights = torch.linspace(-1, 1, _WEIGHTS, dtype=torch.float64)
    twin = weights.clone().requires_grad_()
    adam = torch.optim.Adam([twin], lr=0.1)
    mine = zero(weights, axis, 0.1)
    calls: list[list[str]] = []
    for step in range(_STEPS):
        draw = torch.Generator().manual_seed(10 * step + axis.rank)
        gradient = torch.randn(_WEIGHTS, dtype=torch.float64, generator=draw) * 10.0 ** (-step)
        twin.grad = gradient.clone()
        dist.all_reduce(twin.grad, group=axis.group)
        twin.grad /= axis.size
        adam.step()
        with hpnb.record.traffic() as t:
            mine.step(gradient)
        calls.append([message.op for message in t.messages])
    optimizer = getattr(mine, "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return distance([weights], [twin]), calls, None
    values = [v for state in optimizer.state.values() for v in state.values()]
    moments = sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.numel() > 1)
    return distance([weights], [twin]), calls, moments


def _verify_zero(zero: type) -> Sequence[Finding]:
    findings = []
    wanted = ["reduce_scatter", "all_gather"]
    for ranks in (2, 4):
        found = hpnb.launch(_run_zero, zero, ranks=ranks, device="cpu", timeout=_TIMEOUT)
        text = f"{ranks} ranks, {_STEPS} steps"
        apart = _worst(apart for apart, _, _ in found)
        findings.append(Finding(apart < _EXACT, f"{text}: the weights of Adam on one process: {_off(apart)}"))
        calls = next((calls for calls in found[0][1] if calls != wanted), wanted)
        said = f"each step called {', '.join(wanted)}"
        if calls != wanted:
            once = ", ".join(calls) or "nothing"
            said = f"a step called {once}; one reduce_scatter and one all_gather are wanted"
        findings.append(Finding(calls == wanted, f"{text}: {said}"))
        target = 2 * 8 * _WEIGHTS // ranks
        held = next((moments for *_, moments in found if moments != target), target)
        said = f"{held} bytes of moments on a rank"
        if held is None:
            said = "no torch.optim.Adam in self.optimizer, so no moments on a rank"
        findings.append(Finding(held == target, f"{text}: {said}, target {target} bytes"))
    return findings


zero = Exercise("01.5", "ZeRO-1 by hand", 25, _verify_zero)

__all__ = ["plan", "ragged", "reducer", "sampler", "zero"]
