"""The first thing a page shows: what runs where, and whether a clock means anything here.

More ranks than cores queue for the CPU, and a wall clock then measures the queue. The banner says so once,
and `timings_mean_something` lets the cells below say it again where they branch.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from dataclasses import dataclass

import torch

from hpnb.lesson.page_sizes import PageSizes
from hpnb.lesson.tables import table
from hpnb.ranks import choose_device, default_ranks, usable_cores
from hpnb.theory import REPLAY_LINK


@dataclass(frozen=True, repr=False)
class Banner:
    """Where the ranks of one page run.

    Attributes:
        ranks: how many processes.
        device: "cpu" or "cuda".
        backend: "gloo" or "NCCL".
        devices: names of the GPUs used, as in "2 x NVIDIA L4"; "" on the CPU.
        timings_mean_something: False where ranks share cores or a GPU.
    """

    ranks: int
    device: str
    backend: str
    devices: str
    timings_mean_something: bool

    def __repr__(self) -> str:
        return f"<{count_text(self.ranks, 'rank')} on {self.device} over {self.backend}>"


def banner(
    ranks: int | None = None,
    device: str = "auto",
    model: str = "",
    data: str = "",
    *,
    reading: str = "",
    timed: bool = True,
    sizes: PageSizes | None = None,
) -> Banner:
    """Display where this page runs, and return it: `here = lesson.banner(ranks=4)`.

    Args:
        ranks, device: as for `hpnb.launch`.
        model: what is trained, such as "ViT, 4 blocks of 64".
        data: where samples come from, such as "generated stand-in for CIFAR-10".
        reading: one more sentence, about how to read this page's numbers.
        timed: False for a page that measures no time; then nothing is said about what timings mean.
        sizes: what `choose_sizes` chose; on a GPU the banner says why.

    Raises:
        ValueError: ranks or device cannot be had here.
    """
    choice = choose_device(device, default_ranks() if ranks is None else ranks)
    cores, cuda = usable_cores(), choice.device == "cuda"
    honest = not choice.shares_gpus if cuda else choice.ranks <= cores
    if choice.shares_gpus:
        timings = f"{choice.reason}: computing is measured by turns, each action alone on the GPU, and steps "
        timings += f"are replayed over {REPLAY_LINK.name}; messages between GPUs are not measured here"
    elif cuda:
        timings = "one GPU a rank: times on this page are this machine's"
    elif honest:
        timings = f"{count_text(choice.ranks, 'rank')} on {count_text(cores, 'core')}: "
        timings += "wall-clock times hold here, for this CPU"
    else:
        timings = "wall-clock timings on this page are contended: "
        timings += f"{choice.ranks} ranks share {count_text(cores, 'core')}; "
        timings += "figures replayed from CPU times are labelled so"
    from hpnb import __version__

    devices = gpu_names(choice.gpus) if cuda else ""
    where = devices or f"the CPU is used, {count_text(cores, 'core')}"
    rows = [
        ("ranks", f"{choice.ranks}, {count_text(choice.threads, 'thread')} each"),
        ("backend", choice.name),
        ("device", f"{where}: {choice.reason.removeprefix('the CPU, ')}"),
        ("model", model),
        ("sizes", str(sizes) if sizes is not None and cuda else ""),
        ("data", data),
        ("versions", f"hpnb {__version__}, torch {torch.__version__}, python {platform.python_version()}"),
        ("timings", timings if timed else ""),
        ("reading", reading),
    ]
    table(("", ""), [row for row in rows if row[1]])
    return Banner(choice.ranks, choice.device, choice.name, devices, honest)


def gpu_names(used: int) -> str:
    """ "4 x NVIDIA H200", asked of the driver: torch would have to start CUDA in the notebook's process."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", visible]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=False)
        names = [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []
    except (OSError, subprocess.SubprocessError):
        names = []
    if len(names) < used:
        return count_text(used, "GPU")
    return ", ".join(f"{many} x {name}" if many > 1 else name for name, many in Counter(names[:used]).items())


def count_text(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
