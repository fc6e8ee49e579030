"""A training step in pieces of time: what was computed when, when each bucket was ready, what was exposed.

alone = time_backward(model, loss, bucket_mb=25)    on a rank: nothing is sent
alone.on(link, ranks)                               the same step on any link, as a Timeline
record_step(model, loss)                            a step that does send, as a Timeline of all ranks
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

import hpnb
from hpnb import comm
from hpnb.data import Dataset, ImageTransform, Loader
from hpnb.data_parallel.buckets import assign_buckets
from hpnb.gradients import hook_gradients
from hpnb.lesson.programs.device_timing import warmup_steps
from hpnb.mesh import Axis
from hpnb.record import Event, MemoryProfile, Timeline
from hpnb.record.recorder import Recorder
from hpnb.theory import Link, overlap

Loss = Callable[[], torch.Tensor]
READY = "ready"
T = TypeVar("T")


@dataclass(frozen=True)
class Backward:
    """One step of one rank in which nothing was sent: when its forward and its backward ended and each bucket
    of gradients was full, in seconds from its start, and bytes of each bucket, in the order of sending.
    """

    forward: float
    end: float
    ready: tuple[float, ...]
    nbytes: tuple[float, ...]

    def exposed(self, link: Link, ranks: int, during: bool = True) -> float:
        """Seconds by which the all-reduces of the buckets prolong the step."""
        return overlap(self._send_times(during), self.nbytes, ranks, link, self.end).exposed

    def share(self, link: Link, ranks: int, during: bool = True) -> float:
        """Exposed communication as a share of the step, 0 to 1."""
        exposed = self.exposed(link, ranks, during)
        return exposed / (self.end + exposed)

    def as_long_as(self, other: Backward) -> Backward:
        """This step's buckets in a step that computes as long as `other`, so that only messages differ."""
        longer = other.end / self.end
        return Backward(other.forward, other.end, tuple(at * longer for at in self.ready), self.nbytes)

    def on(self, link: Link, ranks: int, during: bool = True) -> Timeline:
        """The step on `link`, as any one of `ranks` equal ranks would have it; "simulated". A bucket is sent
        `during` the backward when it is full, or all of them are sent after it.
        """
        sent = overlap(self._send_times(during), self.nbytes, ranks, link, self.end)
        group = tuple(range(ranks))
        events = [Event(0, -1, "F", -1, 0.0, self.forward), Event(0, -1, "B", -1, self.forward, self.end)]
        for start, end, size in zip(sent.starts, sent.ends, self.nbytes, strict=True):
            ring = hpnb.record.ring_bytes("all_reduce", size, ranks)
            events.append(Event(0, -1, "all_reduce", -1, start, end, "dp", ring, group))
        return Timeline(tuple(events), "simulated")

    def _send_times(self, during: bool) -> tuple[float, ...]:
        return self.ready if during else (self.end,) * len(self.ready)


def time_backward(module: torch.nn.Module, loss: Loss, bucket_mb: float = 25.0, repeats: int = 5) -> Backward:
    """Time a step of this rank alone, and when each bucket of `DataParallel(module, bucket_mb=...)` is full.

    Call it on all ranks, so that they share cores and memory as they will later. Gradients are dropped.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    buckets = assign_buckets(reversed(trained), bucket_mb)
    bucket_of = {p: i for i, bucket in enumerate(buckets) for p in bucket.parameters}
    sizes = tuple(float(bucket.nbytes) for bucket in buckets)
    steps: list[Backward] = []
    warmup = warmup_steps()
    for _ in range(warmup + repeats):
        missing = [len(bucket.parameters) for bucket in buckets]
        with hpnb.record.timeline() as recorder:

            def mark(p: torch.nn.Parameter, missing: list[int] = missing, to: Recorder = recorder) -> None:
                missing[bucket_of[p]] -= 1
                if not missing[bucket_of[p]]:
                    to.begin(Event(hpnb.rank(), -1, READY, bucket_of[p], 0.0, 0.0))()

            hooks = hook_gradients(trained, mark)
            try:
                with recorder.span("step"):  # where ranks share a GPU, no other's turn lies between F and B
                    _forward_and_backward(loss, recorder)
            finally:
                for hook in hooks:
                    hook.remove()
        module.zero_grad(set_to_none=True)
        events = recorder.events()
        by_op = {e.op: e for e in events if e.op != READY}
        start = by_op["F"].start
        ready = {e.microbatch: e.end - start for e in events if e.op == READY}
        times = tuple(ready[i] for i in range(len(buckets)))
        steps.append(Backward(by_op["F"].end - start, by_op["B"].end - start, times, sizes))
    return median_by(steps[warmup:], lambda step: step.end)


def record_step(module: torch.nn.Module, loss: Loss, repeats: int = 5) -> Timeline:
    """Record forward, backward and whatever travels: the Timeline of all ranks, of the median repeat.

    Every rank calls it. Gradients are dropped after each repeat.
    """
    return median_by(record_in_turn({"": (module, loss)}, repeats)[""], lambda tl: tl.makespan)


def record_in_turn(
    steps: Mapping[str, tuple[torch.nn.Module, Loss]], repeats: int = 5
) -> dict[str, list[Timeline]]:
    """{name: the Timeline of all ranks in each round}, of steps that take turns: A B C A B C ... Every rank
    calls it, and all ranks begin a step together. First rounds warm up. Gradients are dropped.
    """
    timelines: dict[str, list[Timeline]] = {name: [] for name in steps}
    for module, loss in [*steps.values()] * warmup_steps():  # not recorded: ranks would take turns on a GPU
        loss().backward()
        module.zero_grad(set_to_none=True)
    for _ in range(repeats):
        for name, (module, loss) in steps.items():
            wait_for_device(hpnb.device())
            dist.barrier()
            with hpnb.record.timeline() as recorder:
                _forward_and_backward(loss, recorder)
            timelines[name].append(recorder.gather().shifted())
            module.zero_grad(set_to_none=True)
    return timelines


def _forward_and_backward(loss: Loss, recorder: Recorder) -> None:
    with recorder.span("F"):
        value = loss()
    with recorder.span("B"):
        value.backward()


# --- over timelines and tensors ----------------------------------------------------------------------


def median_by(items: Sequence[T], seconds: Callable[[T], float]) -> T:
    """The item in the middle of an odd number. An even number has none, and this is the slower of the two."""
    return sorted(items, key=seconds)[len(items) // 2]


def exposed_seconds(tl: Timeline) -> float:
    """Seconds in which a rank communicates and computes nothing, mean over the ranks."""
    from hpnb.plot.lanes import exposed_parts

    parts = (end - start for rank in tl.ranks for _, start, end in exposed_parts(tl.by_rank[rank]))
    return sum(parts) / len(tl.ranks)


def compute_seconds(tl: Timeline) -> float:
    """Seconds in which a rank computes, mean over the ranks."""
    return sum(tl.work(rank) for rank in tl.ranks) / len(tl.ranks)


def falls(losses: Sequence[float]) -> bool:
    """Whether losses are lower in their last quarter than in their first, by at least a thousandth."""
    quarter = max(1, len(losses) // 4)
    return fmean(losses[-quarter:]) < (1 - 1e-3) * fmean(losses[:quarter])


def fall_in_words(losses: Mapping[str, Sequence[float]]) -> str:
    """Which of these losses fall: "Both losses fall"."""
    fell = [name for name, run in losses.items() if falls(run)]
    if len(fell) == len(losses):
        return "Both losses fall" if len(fell) == 2 else "All losses fall"
    if len(fell) == 1:
        return f"Only the loss of {fell[0]} falls"
    return f"Only the losses of {' and '.join(fell)} fall" if fell else "No loss falls"


def relative_distance(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> float:
    """|| a - b || / || b || over all of them together, in float64; infinite if a number is NaN, so that the
    largest of several distances shows it."""
    pairs = [
        (a.detach().double().cpu(), b.detach().double().cpu()) for a, b in zip(tensors, others, strict=True)
    ]
    difference = sum(float((a - b).square().sum()) for a, b in pairs)
    norm = sum(float(b.square().sum()) for _, b in pairs)
    if not math.isfinite(difference) or not math.isfinite(norm):
        return math.inf
    return (difference / norm) ** 0.5 if norm else float(difference > 0)


def largest_over_ranks(distances: Mapping[str, float], axis: Axis) -> dict[str, float]:
    """{quantity: its distance on the rank of `axis` where that is largest}. Every rank calls it."""
    here = torch.tensor([list(distances.values())], dtype=torch.float64, device=hpnb.device())
    largest = comm.gather(here, axis, 0).amax(0).tolist()
    return dict(zip(distances, largest, strict=True))


def rounds_in_turn(steps: Mapping[str, Callable[[], object]], repeats: int = 5) -> dict[str, list[float]]:
    """{name: seconds of each round on the slowest rank}, of steps that take turns. Every rank calls it.

    All ranks begin a step together. If a step returns a `dist.Work`, it is waited for after the clock has
    stopped. First rounds warm up.
    """
    device = hpnb.device()
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    warmup = warmup_steps()
    for repeat in range(warmup + repeats):
        for name, step in steps.items():
            wait_for_device(device)
            dist.barrier()
            begin = time.perf_counter()
            pending = step()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=device)
            if isinstance(pending, dist.Work):
                pending.wait()
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if repeat >= warmup:
                rounds[name].append(seconds.item())
    return rounds


class Spread(NamedTuple):
    """The median of several rounds and the range that holds the true one with a confidence of 95 %.

    The range runs between two rounds that are equally far from both ends, as in a sign test: from the second
    lowest to the second highest of 9, from the fourth to the twelfth of 15. It assumes independent rounds.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of_rounds(cls, values: Iterable[float]) -> Spread:
        """Of at least six values, because fewer cannot give 95 %."""
        ordered = sorted(values)
        count = len(ordered)
        if count < 6:
            raise ValueError(f"{count} rounds cannot give a range of 95 %; measure at least 6")
        left_out, outside = 0, 2 * 0.5**count  # the chance that the true median is outside
        while (wider := outside + 2 * math.comb(count, left_out + 1) * 0.5**count) <= 0.05:
            left_out, outside = left_out + 1, wider
        return cls(median(ordered), ordered[left_out], ordered[-1 - left_out])

    @property
    def range(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f}"

    @property
    def verdict(self) -> str:
        """Of a ratio of two times: "slower", "faster", or "cannot tell" if the range includes 1."""
        return "slower" if self.low > 1 else "faster" if self.high < 1 else "cannot tell"


def divide_rounds(seconds: Sequence[float], others: Sequence[float]) -> Spread:
    """How many times as long one step takes as another, divided within each round."""
    return Spread.of_rounds(a / b for a, b in zip(seconds, others, strict=True))


def subtract_rounds(seconds: Sequence[float], others: Sequence[float]) -> Spread:
    """By how many seconds one step takes longer than another, subtracted within each round."""
    return Spread.of_rounds(a - b for a, b in zip(seconds, others, strict=True))


def wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forward_and_backward(module: torch.nn.Module, loss: Callable[[torch.nn.Module], torch.Tensor]) -> None:
    """One step without an optimizer; gradients of the last step are dropped."""
    module.zero_grad()
    loss(module).backward()


def beside_all_reduce(
    module: torch.nn.Module, loss: Callable[[torch.nn.Module], torch.Tensor]
) -> Callable[[], dist.Work | None]:
    """`forward_and_backward` with an unrelated all-reduce of as many bytes as the gradients have.

    It starts before the backward and is returned, so that `rounds_in_turn` does not time its end.
    """
    first = next(module.parameters())
    message = torch.zeros(sum(p.numel() for p in module.parameters()), dtype=first.dtype, device=first.device)

    def step() -> dist.Work | None:
        module.zero_grad()
        value = loss(module)
        work = dist.all_reduce(message, async_op=True)
        value.backward()
        return work

    return step


def step_with(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter], gradient: torch.Tensor
) -> None:
    """Step with `gradient` (n,), the gradients of all `parameters` one behind the other."""
    for p, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)
    optimizer.step()


def measured_knee(ratios: Mapping[int, float], limit: float = 1.1) -> int | None:
    """The fewest tokens from which on step / step alone stays below `limit`; None if it never does."""
    knee = None
    for tokens in sorted(ratios, reverse=True):
        if ratios[tokens] >= limit:
            break
        knee = tokens
    return knee


class ReplicaStep(NamedTuple):
    """A step: the mean loss over the ranks, the largest relative distance of a rank's weights to rank 0's,
    and the number of ranks whose gradient overflowed."""

    loss: float
    distance: float
    overflows: int


def compare_replicas(
    loss: torch.Tensor, parameters: Sequence[torch.nn.Parameter], overflow: torch.Tensor, axis: Axis
) -> ReplicaStep:
    """Compare this rank with the others after a step; `overflow` () is above 0 if its gradient overflowed."""
    sums = torch.stack([loss.detach(), (overflow > 0).to(loss.dtype)])
    dist.all_reduce(sums, group=axis.group)
    first = [p.detach().clone() for p in parameters]
    hpnb.data_parallel.broadcast(first, axis)
    distance = torch.tensor(relative_distance(parameters, first), dtype=torch.float64, device=loss.device)
    dist.all_reduce(distance, dist.ReduceOp.MAX, group=axis.group)
    return ReplicaStep(sums[0].item() / axis.size, distance.item(), int(sums[1].item()))


def load_batch(dataset: Dataset, axis: Axis, images: int = 4) -> tuple[dict[str, torch.Tensor], list[slice]]:
    """(the full batch on every rank, the slices of all ranks), with `images` per rank."""
    transform = ImageTransform(32, device=hpnb.device())
    loader = Loader(dataset, images * axis.size, transform=transform)
    return next(iter(loader)), [slice(images * r, images * (r + 1)) for r in range(axis.size)]


def distances(
    run: Mapping[str, Sequence[torch.Tensor]], reference: Mapping[str, Sequence[torch.Tensor]]
) -> dict[str, float]:
    """{quantity: relative distance} of everything in `run`."""
    return {name: relative_distance(tensors, reference[name]) for name, tensors in run.items()}


def sent_bytes(tl: Timeline) -> float:
    """Bytes that rank 0 sent."""
    return sum(event.bytes for event in tl.by_rank[0] if not event.is_compute)


def state_bytes(profile: MemoryProfile, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """{category: bytes} of the model states after a step, without Adam's step counters."""
    last = profile.samples[-1]
    states = (v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
    counters = sum(v.nbytes for v in states if v.numel() == 1)
    return {
        "parameters": last.parameters,
        "gradients": last.gradients,
        "optimizer": last.optimizer - counters,
    }
