"""Three numbers of the machine at hand, measured once: latency, bandwidth, matmul rate; and rho.

    rho = matmul FLOP/s of a rank / bytes/s that a rank sends           FLOP per byte

is the exchange rate of the series: how many FLOP a rank could have done while it sent one byte. Everything
is measured with all ranks at work, because that is how it will be used.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from tqdm import tqdm

import hpnb
from hpnb.lesson.banner import count_text, gpu_names
from hpnb.lesson.home import digest, load, write_json
from hpnb.lesson.tables import number, table
from hpnb.precision import best_16_bit, policy
from hpnb.ranks import DeviceChoice
from hpnb.theory import REPLAY_LINK, Link, fit_link, seconds

_SIZES = {
    "cpu": tuple(1 << k for k in range(8, 26)),  # 256 B to 32 MB
    "cuda": tuple(1 << k for k in range(10, 30)),  # 1 kB to 0.5 GB
}
_LEAST_REPEATS = {"cpu": 2, "cuda": 3}  # of one size in a pass: on CPUs 32 MB take a tenth of a second
_MOST_REPEATS = {"cpu": 10, "cuda": 30}
_MATMUL_SIDE = {"cpu": 512, "cuda": 8192}
_PASSES = 3  # over all sizes, so that a busy moment does not fall on one size


@dataclass(frozen=True)
class MachineCard:
    """What one machine can do with a number of ranks. Seconds, bytes/s, FLOP/s.

    `sizes` and `seconds` are the all-reduces that latency and bandwidth were fitted to: bytes, and the median
    time of the rank whose median is longest. `matmul` is a median, too, of the slowest rank.
    """

    hardware: str
    device: str
    ranks: int
    latency: float
    bandwidth: float
    matmul: float
    dtype: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def rho(self) -> float:
        """FLOP that a rank could have done in the time in which it sends one byte."""
        return self.matmul / self.bandwidth

    @property
    def link(self) -> Link:
        """The link between the ranks, for `hpnb.theory`."""
        return Link(self.latency, self.bandwidth, self.hardware)

    def predicted(self, nbytes: float, algorithm: str = "ring") -> float:
        """Seconds of an all-reduce of `nbytes` on this machine, by latency and bandwidth."""
        return seconds("all_reduce", nbytes, self.ranks, self.link, algorithm)

    def curve(self, points: int = 60) -> tuple[list[float], list[float]]:
        """(bytes, predicted seconds) between the least and the most that was measured, for a figure."""
        low, high = math.log(self.sizes[0]), math.log(self.sizes[-1])
        sizes = [math.exp(low + (high - low) * i / (points - 1)) for i in range(points)]
        return sizes, [self.predicted(nbytes) for nbytes in sizes]

    def show(self) -> None:
        """Display the numbers."""
        columns = ("latency α", "bandwidth B", "matmul rate of a rank", "ρ")
        row = (
            number(self.latency, "s"),
            number(self.bandwidth, "B/s"),
            number(self.matmul, "FLOP/s"),
            f"{self.rho:,.0f} FLOP a byte",
        )
        table(columns, [row], f"machine card · {self.hardware}, {self.ranks} ranks, {self.dtype}")


def machine_card(ranks: int | None = None, device: str = "auto", refresh: bool = False) -> MachineCard:
    """Measure this machine with `ranks` ranks, or find the card that was measured before.

    A card is kept under a digest of the hardware, the ranks and the version of PyTorch. It takes a few
    seconds; `refresh` measures anew.
    """
    choice = hpnb.ranks.choose_device(device, hpnb.ranks.default_ranks() if ranks is None else ranks)
    hardware = hardware_name(choice)
    name = f"machine-card-{digest(hardware, choice.ranks, choice.threads, torch.__version__)}.json"
    known = None if refresh else load(name, TypeAdapter(MachineCard).validate_json, None)
    if known is not None:
        return known
    card = _measure_card(choice, hardware)
    write_json(name, asdict(card))
    return card


def _measure_card(choice: DeviceChoice, hardware: str) -> MachineCard:
    ranks, sizes = choice.ranks, _SIZES[choice.device]
    if choice.shares_gpus:
        # No message between GPUs can be measured here: the matmul of one rank alone, and the link of replays.
        ((rate, dtype),) = hpnb.launch(matmul_rate, ranks=1, device="cuda", timeout=120.0)
        link, hardware = REPLAY_LINK, f"{hardware}, {REPLAY_LINK.name} assumed"
        times = tuple(seconds("all_reduce", n, ranks, link) for n in sizes)
    else:
        results = hpnb.launch(measure, ranks=ranks, device=choice.device, timeout=120.0)
        # A collective is over when its last rank is; every rank's matmul runs at the pace of the slowest.
        times = tuple(max(of_size) for of_size in zip(*(times for times, _, _ in results), strict=True))
        link = fit_link(sizes, times, ranks)
        rate = min(rate for _, rate, _ in results)
        dtype = results[0][2]
    return MachineCard(
        hardware, choice.device, ranks, link.latency, link.bandwidth, rate, dtype, sizes, times
    )


def hardware_name(choice: DeviceChoice) -> str:
    """What the ranks run on, without a host's name: "2 CPU cores" or "4 x NVIDIA H200"."""
    if choice.device == "cuda":
        return gpu_names(choice.gpus)
    return count_text(hpnb.ranks.usable_cores(), "CPU core")


def measure() -> tuple[list[float], float, str]:
    """On a rank: median seconds of an all-reduce of each size, FLOP/s of a matrix product, and its dtype."""
    device = hpnb.device()
    sizes = _SIZES[device.type]
    buffers = {n: torch.zeros(n // 4, device=device) for n in sizes}
    runs: dict[int, list[float]] = {n: [] for n in sizes}
    for n in sizes:  # connections and code paths are set up on first use
        dist.all_reduce(buffers[n])
    rounds = [n for _ in range(_PASSES) for n in sizes]
    for n in tqdm(rounds, "measuring this machine", disable=hpnb.rank() > 0, leave=False):
        repeats = max(_LEAST_REPEATS[device.type], min(_MOST_REPEATS[device.type], (1 << 22) // n))
        runs[n] += [_timed(partial(dist.all_reduce, buffers[n])) for _ in range(repeats)]
    return [statistics.median(runs[n]) for n in sizes], *matmul_rate()


def matmul_rate() -> tuple[float, str]:
    """On a rank: FLOP/s of a matrix product, and in which dtype."""
    device = hpnb.device()
    size = _MATMUL_SIDE[device.type]
    dtype = policy(best_16_bit(device)).compute if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    products = [_timed(partial(torch.matmul, a, b)) for _ in range(12)][2:]
    return 2 * size**3 / statistics.median(products), str(dtype).removeprefix("torch.")


def _timed(work: Callable[[], object]) -> float:
    """Seconds of one call, begun together."""
    dist.barrier()
    if hpnb.device().type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3
