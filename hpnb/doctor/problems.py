"""What is wrong with a Machine, and what to do about each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hpnb.doctor.machine import Machine
from hpnb.ranks.gpu_limits import gpu_memory_limit

GIB = 2**30
# What pyproject.toml asks for; a test keeps the two in step.
OLDEST = {"torch": (2, 11), "transformers": (5, 17)}
WITHOUT = {  # what does not work without packages that training does not need
    "datasets": "Beans and MRPC are generated",
    "ipywidgets": "the explorers do not move",
    "jupyterlab": "the notebooks need another editor",
}


@dataclass(frozen=True)
class Problem:
    """Something wrong and what to do. A "problem" stops hpnb from running; a "note" costs something."""

    level: Literal["problem", "note"]
    what: str
    remedy: str


def find_problems(machine: Machine) -> list[Problem]:
    """Everything wrong with this machine, what stops hpnb first."""
    problems = [*_software(machine), *_resources(machine), *_gpus(machine), *_variables(machine)]
    return sorted(problems, key=lambda problem: problem.level != "problem")


def _software(machine: Machine) -> Iterator[Problem]:
    if not machine.can_fork:
        yield _stop("this system cannot fork processes, and ranks are forked", "on Windows, use WSL 2")
    if not machine.gloo:
        yield _stop("this torch has no gloo, the CPU's backend", "install torch from pytorch.org's wheels")
    for name, version in machine.versions:
        oldest = OLDEST.get(name, ())
        least = ".".join(map(str, oldest))
        install = f"pip install -U '{name}{'>=' if oldest else ''}{least}'"
        if version is None and name in WITHOUT:
            yield _note(f"{name} is not installed: {WITHOUT[name]}", install)
        elif version is None:
            yield _stop(f"{name} is not installed", install)
        elif _release(version) < oldest:
            yield _stop(f"{name} {version} is older than {least}", install)


def _resources(machine: Machine) -> Iterator[Problem]:
    nccl = len(machine.gpus) >= 2
    if machine.shm is not None and machine.shm < GIB:
        users = "DataLoader workers and NCCL" if nccl else "DataLoader workers"
        # Below this NCCL stops with "unhandled system error".
        level = _stop if nccl and machine.shm < GIB // 16 else _note
        yield level(
            f"/dev/shm has {format_bytes(machine.shm)}, and {users} pass data through it",
            "start the container with --shm-size=2g (or --ipc=host); otherwise keep num_workers=0",
        )
    if machine.memory_available is not None and machine.memory_available < 4 * GIB:
        level = _stop if machine.memory_available < GIB else _note
        yield level(
            f"{format_bytes(machine.memory_available)} of memory is free; four small ranks take about 2 GiB",
            "close other programs, raise the container's limit, or ask for fewer ranks",
        )


def _gpus(machine: Machine) -> Iterator[Problem]:
    number = len(machine.gpus)
    if hidden := machine.driver_gpus - number:
        if machine.cuda is None:
            what, remedy = "this torch was built for the CPU alone", "install a CUDA build of torch"
        elif "CUDA_VISIBLE_DEVICES" in dict(machine.environment):
            what, remedy = "CUDA_VISIBLE_DEVICES hides them", "unset it to use them all"
        else:
            what, remedy = "torch cannot use them", f"check that the driver is new enough for {machine.cuda}"
        yield _note(f"{hidden} of {format_count(machine.driver_gpus, 'GPU')} not in use: {what}", remedy)
    if number == 1:
        yield _note(
            "one GPU: ranks share it, and each gets an equal part of its memory",
            "nothing to do: ranks compute one at a time, and figures name the interconnect that they assume",
        )
    for index, gpu in enumerate(machine.gpus):
        if gpu.fault:
            yield _stop(
                f"GPU {index} ({gpu.name}) fails when it is first used: {gpu.fault}",
                "free it, or leave it out of CUDA_VISIBLE_DEVICES; device='cpu' works without it",
            )
        elif gpu.free is not None and gpu.free < gpu.memory // 2:
            yield _note(
                f"GPU {index}: {format_bytes(gpu.free)} of {format_bytes(gpu.memory)} is free",
                "see in nvidia-smi which process has the rest",
            )
    if len({gpu.name for gpu in machine.gpus}) > 1:
        yield _note(
            "the GPUs differ, and a step takes as long as the slowest needs",
            "compare times only on GPUs of one kind",
        )
    if not all(gpu.bf16 for gpu in machine.gpus if not gpu.fault):
        yield _note("a GPU here has no bf16", "use precision='fp16', as the notebooks then do")
    if number >= 2 and machine.nccl is None:
        yield _stop("this torch has no NCCL, the GPUs' backend", "install a CUDA build, or use device='cpu'")
    cut = [(i, j) for i, row in enumerate(machine.peers) for j, ok in enumerate(row) if i < j and not ok]
    if cut:
        pairs = f"{format_count(len(cut), 'pair')} of GPUs (the first: {cut[0][0]} and {cut[0][1]})"
        yield _note(
            f"{pairs} cannot read each other's memory: NCCL copies through the CPU's",
            "usual on clouds and consumer cards; expect communication to cost more",
        )


def _variables(machine: Machine) -> Iterator[Problem]:
    """Variables that change what a notebook measures or prints."""
    environment = dict(machine.environment)
    for name, consequence in (
        ("CUDA_LAUNCH_BLOCKING", "every kernel is waited for, so nothing overlaps and timings mean little"),
        ("NCCL_P2P_DISABLE", "GPUs exchange data through the CPU's memory"),
        ("NCCL_SHM_DISABLE", "GPUs without direct access exchange data through the network stack"),
    ):
        if environment.get(name, "0") not in ("", "0"):
            yield _note(f"{name} is set: {consequence}", f"unset {name}")
    gloo = [name for name in environment.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if machine.interfaces and (missing := [name for name in gloo if name not in machine.interfaces]):
        yield _stop(
            f"GLOO_SOCKET_IFNAME={environment['GLOO_SOCKET_IFNAME']}, and there is no network interface "
            f"{' or '.join(missing)}: ranks cannot reach each other",
            f"unset it, or name one of {', '.join(machine.interfaces)}",
        )
    try:
        gpu_memory_limit(environment)
    except ValueError as error:
        level = _stop if machine.gpus else _note
        yield level(f"{error}: no rank starts on a GPU", "set a number of gigabytes, or unset it")
    if environment.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        yield _note("NCCL_DEBUG prints NCCL's log under every cell", "set NCCL_DEBUG=WARN, or unset it")


def format_bytes(nbytes: int | None) -> str:
    """ "23.5 GiB", "64 MiB", or "unknown"; memory is made in powers of two."""
    if nbytes is None:
        return "unknown"
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.0f} MiB"


def format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _stop(what: str, remedy: str) -> Problem:
    return Problem("problem", what, remedy)


def _note(what: str, remedy: str) -> Problem:
    return Problem("note", what, remedy)


def _release(version: str) -> tuple[int, ...]:
    """(2, 15, 0) of "2.15.0+cpu" and of "2.15.0rc1"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()
