"""Notebook 01: a mean over ragged batches, a bucketed reducer, a sampler, and ZeRO stage 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hpnb
from hpnb.data import Loader
from hpnb.lesson.exercises.checker import Finding, WrongAnswer, exercise
from hpnb.lesson.exercises.findings import TIMEOUT, exact, expect_tensor, is_number, run_on_ranks
from hpnb.lesson.programs.device_timing import all_ranks
from hpnb.lesson.programs.step_timing import relative_distance
from hpnb.theory import bytes_sent

# --- the exact mean of a ragged batch --------------------------------------------------------


def _linear() -> nn.Linear:
    return nn.Linear(4, 1, dtype=torch.float64)


def _run_ragged(loss: Callable[..., Any], counts: Sequence[int]) -> tuple[float, float]:
    """On a rank: (distance of the gradient to one process's, bytes that `loss` sent)."""
    axis = all_ranks("dp")
    torch.manual_seed(0)
    x = torch.randn(sum(counts), 4, dtype=torch.float64)
    y = torch.randn(sum(counts), 1, dtype=torch.float64)
    serial, replica = _linear(), hpnb.DataParallel(_linear(), axis)
    replica.module.load_state_dict(serial.state_dict())
    (serial(x) - y).square().mean().backward()
    start = sum(counts[: axis.rank])
    rows = slice(start, start + counts[axis.rank])
    losses = (replica(x[rows]) - y[rows]).square().squeeze(1)  # (n,), n may be 0
    with hpnb.record.traffic() as t:
        answer = loss(losses, axis)
    who = f"rank {axis.rank}, with {len(losses)} samples, returned"
    value = expect_tensor(answer, (), who)
    if not value.requires_grad:
        raise WrongAnswer(f"{who} what does not depend on the losses, so it has no gradient to send")
    value.backward()
    gradients = ([p.grad for p in m.parameters() if p.grad is not None] for m in (replica.module, serial))
    return relative_distance(*gradients), t.total


@exercise("01.1", "the exact mean of a ragged batch", 15)
def ragged_mean(loss: Callable[..., Any]) -> Iterator[Finding]:
    most = bytes_sent("all_reduce", 8, 3)
    for counts in ((2, 2, 2), (3, 1, 2), (4, 1, 0)):
        text = f"{', '.join(map(str, counts))} samples"
        runs = run_on_ranks(_run_ragged, loss, counts, ranks=3, case=text)
        yield exact((d for d, _ in runs), f"{text}: the gradient of one process on all of them:")
        sent = max(sent for _, sent in runs)
        limit = f"at most {most:.1f} (one number of 8 bytes over 3 ranks)"
        yield Finding(sent < most + 0.1, f"{text}: a rank sent {sent:.1f} bytes, {limit}")


# --- a bucketed reducer ----------------------------------------------------------------------


@dataclass
class ReducedStep:
    """What a rank saw of one step.

    Attributes:
        to_mean, to_sum: distances of its gradients to the mean and to the sum.
        sent: bytes of each message.
        ready: gradients that existed at the first message, of `parameters`.
    """

    to_mean: float
    to_sum: float
    sent: list[int]
    ready: int
    parameters: int


def _run_reducer(reducer: Callable[..., Any], limit: int) -> list[ReducedStep]:
    axis = all_ranks("dp")
    torch.manual_seed(0)
    model, twin = (nn.Sequential(*(nn.Linear(8, 8, dtype=torch.float64) for _ in range(5))) for _ in "ab")
    twin.load_state_dict(model.state_dict())
    parameters = list(reversed(list(model.parameters())))
    sent: list[int] = []
    ready: list[int] = []

    def all_reduce(flat: torch.Tensor) -> dist.Work | None:
        sent.append(flat.nbytes)
        ready.append(sum(p.grad is not None for p in parameters))
        return dist.all_reduce(flat, group=axis.group, async_op=True)

    finish = reducer(parameters, axis.size, limit, all_reduce)
    if not callable(finish):
        raise TypeError(f"reducer returned a {type(finish).__name__}, and a function `finish` is wanted")
    steps = []
    for step in range(2):
        generator = torch.Generator().manual_seed(7 * step + axis.rank)
        x = torch.randn(3, 8, dtype=torch.float64, generator=generator)
        for net in (model, twin):
            net.zero_grad(set_to_none=True)
            net(x).square().sum().backward()
        finish()
        mean = [p.grad.clone() for p in twin.parameters() if p.grad is not None]
        for grad in mean:
            dist.all_reduce(grad, group=axis.group)
            grad /= axis.size
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        to_sum = relative_distance(grads, [axis.size * grad for grad in mean])
        first = ready[0] if ready else 0
        steps.append(ReducedStep(relative_distance(grads, mean), to_sum, list(sent), first, len(parameters)))
        sent.clear()
        ready.clear()
    return steps


def _bucket_bytes(limit: int) -> list[int]:
    """Bytes of the buckets that are wanted: closed before the tensor that would take one over the limit."""
    sizes = [0]
    for size in [64, 512] * 5:
        if sizes[-1] and sizes[-1] + size > limit:
            sizes.append(0)
        sizes[-1] += size
    return sizes


@exercise("01.2", "a bucketed reducer", 30)
def reducer(answer: Callable[..., Any]) -> Iterator[Finding]:
    with hpnb.Ranks(3, device="cpu", timeout=TIMEOUT) as ranks:
        for limit in (1200, 100, 10**6):
            wanted = _bucket_bytes(limit)
            for count, of_ranks in enumerate(zip(*ranks.run(_run_reducer, answer, limit), strict=True), 1):
                text = f"limit {limit} bytes, step {count}"
                hint = " (a sum, not the mean?)" if max(step.to_sum for step in of_ranks) < 1e-3 else ""
                mean = exact((step.to_mean for step in of_ranks), f"{text}: mean gradients:")
                yield Finding(mean.ok, mean.text + hint)
                # A rank that sends something else or too late, if there is one.
                step = min(of_ranks, key=lambda s: (sorted(s.sent) == sorted(wanted), -s.ready))
                messages = f"{len(step.sent)} messages, {sum(step.sent)} bytes"
                target = f"target {len(wanted)} and {sum(wanted)}"
                yield Finding(sorted(step.sent) == sorted(wanted), f"{text}: {messages}, {target}")
                if len(wanted) > 1:
                    when = f"the first left when {step.ready} of {step.parameters} gradients were there"
                    yield Finding(0 < step.ready < step.parameters, f"{text}: {when}")


# --- the sampler -----------------------------------------------------------------------------

SeenSamples = list[list[tuple[int, ...]]]  # [step][rank]: numbers of samples
_EPOCHS = 8


class NumberedSamples:
    """24 samples that know their own number."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"number": index, "x": x, "y": x[:3].sum()}


def _train(sampler: str, seed: int) -> tuple[list[tuple[int, ...]], list[float]]:
    """On a rank: what each step of the first epoch saw, and the mean losses of the first and last epoch."""
    axis = all_ranks("dp")
    rank_seed = seed + (axis.rank + 1 if sampler == "own order" else 0)
    torch.manual_seed(0)
    replica = hpnb.DataParallel(nn.Linear(8, 1), axis)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    loader = Loader(NumberedSamples(), 4, axis if sampler == "sharded" else None, seed=rank_seed)
    seen, losses = [], []
    for epoch in range(_EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = (replica(batch["x"]).squeeze(1) - batch["y"]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=axis.group)
            losses.append(mean.item() / axis.size)
            if not epoch:
                seen.append(tuple(batch["number"].tolist()))
    steps = len(losses) // _EPOCHS
    return seen, [sum(losses[:steps]) / steps, sum(losses[-steps:]) / steps]


@exercise("01.3", "a sampler behind a healthy curve", 15)
def sampler(diagnose: Callable[[SeenSamples], Any]) -> Iterator[Finding]:
    with hpnb.Ranks(3, device="cpu", timeout=TIMEOUT) as ranks:
        for truth, seed in (("same order", 1), ("sharded", 2), ("own order", 3)):
            runs = ranks.run(partial(_train, truth, seed))
            seen: SeenSamples = [list(step) for step in zip(*(seen for seen, _ in runs), strict=True)]
            first, last = runs[0][1]
            effective = sum(len({n for part in step for n in part}) for step in seen) / len(seen)
            answer = diagnose(seen)
            text = f"{truth}, loss {first:.2f} to {last:.2f}"
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise WrongAnswer(f"{text}: {answer!r} is no pair (sampler, effective batch)")
            name, batch = answer
            yield Finding(name == truth, f"{text}: you say {name!r}")
            batch_text = f"{batch:.3g}" if is_number(batch) else repr(batch)
            text = f"{text}: {effective:.3g} different samples of 12 a step, you say {batch_text}"
            yield Finding(is_number(batch) and abs(batch - effective) < 1e-6, text)


# --- ZeRO stage 1 ----------------------------------------------------------------------------

_WEIGHTS, _STEPS = 12, 4


def _run_zero(zero: type) -> tuple[float, list[list[str]], int | None]:
    """On a rank: (distance of the weights to Adam's on one process, calls of each step, bytes of moments)."""
    axis = all_ranks("dp")
    weights = torch.linspace(-1, 1, _WEIGHTS, dtype=torch.float64)
    twin = weights.clone().requires_grad_()
    adam = torch.optim.Adam([twin], lr=0.1)
    sharded = zero(weights, axis, 0.1)
    calls: list[list[str]] = []
    for step in range(_STEPS):
        generator = torch.Generator().manual_seed(10 * step + axis.rank)
        gradient = torch.randn(_WEIGHTS, dtype=torch.float64, generator=generator) * 10.0 ** (-step)
        twin.grad = gradient.clone()
        dist.all_reduce(twin.grad, group=axis.group)
        twin.grad /= axis.size
        adam.step()
        with hpnb.record.traffic() as t:
            sharded.step(gradient)
        calls.append([message.op for message in t.messages])
    optimizer, moments = getattr(sharded, "optimizer", None), None
    if isinstance(optimizer, torch.optim.Optimizer):
        values = [v for state in optimizer.state.values() for v in state.values()]
        moments = sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.numel() > 1)
    return relative_distance([weights], [twin]), calls, moments


@exercise("01.4", "ZeRO stage 1 by hand", 25)
def zero1(zero: type) -> Iterator[Finding]:
    wanted = ["reduce_scatter", "all_gather"]
    for ranks in (2, 4):
        runs = run_on_ranks(_run_zero, zero, ranks=ranks)
        text = f"{ranks} ranks, {_STEPS} steps"
        yield exact((distance for distance, *_ in runs), f"{text}: the weights of Adam on one process:")
        calls = next((calls for calls in runs[0][1] if calls != wanted), wanted)
        words = f"each step called {', '.join(wanted)}"
        if calls != wanted:
            ops = ", ".join(calls) or "nothing"
            words = f"a step called {ops}; one reduce_scatter and one all_gather are wanted"
        yield Finding(calls == wanted, f"{text}: {words}")
        target = 2 * 8 * _WEIGHTS // ranks
        moments = next((moments for *_, moments in runs if moments != target), target)
        words = f"{moments} bytes of moments on a rank"
        if moments is None:
            words = "no torch.optim.Adam in self.optimizer, so no moments on a rank"
        yield Finding(moments == target, f"{text}: {words}, target {target} bytes")
