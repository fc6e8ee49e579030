"""A Machine on one page of plain text, at most 100 columns wide."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from dataclasses import replace

from hpnb.doctor.gpus import Links
from hpnb.doctor.machine import Machine
from hpnb.doctor.problems import find_problems, format_bytes, format_count
from hpnb.ranks import DeviceChoice, choose_device

WIDTH = 100  # columns
_NAMES = 16  # of them, for what stands before the text of a row

NamedLines = list[tuple[str, str]]  # (name, text)


def plan_launch(machine: Machine, ranks: int) -> DeviceChoice:
    """What `hpnb.launch(..., ranks=ranks, device="auto")` would do on `machine`."""
    choice = choose_device("auto", ranks, gpus=len(machine.gpus), cores=machine.usable)
    return replace(choice, threads=min(choice.threads, machine.threads or choice.threads))


def format_report(machine: Machine) -> str:
    """What there is, what `device="auto"` will use, and what is wrong."""
    problems = find_problems(machine)
    stopping = sum(problem.level == "problem" for problem in problems)
    if stopping:
        verdict = f"hpnb cannot run here yet: {format_count(stopping, 'problem')} to solve"
    elif problems:
        verdict = f"nothing that stops hpnb: {format_count(len(problems), 'note')}"
    else:
        verdict = "nothing"
    wrong = [row for p in problems for row in ((p.level, p.what), ("", "-> " + p.remedy))]
    environment = [("", f"{name}={value}") for name, value in machine.environment]
    sections = {
        "This machine": _machine_rows(machine),
        "Versions": _version_rows(machine),
        "Environment": environment or [("", "no NCCL_*, GLOO_*, CUDA_* or HPNB_* variable is set")],
        'What device="auto" will use': [(f"{ranks} ranks", _plan(machine, ranks)) for ranks in (2, 4, 8)],
        "What is wrong": wrong,
    }
    lines = ["hpnb doctor"]
    for heading, rows in sections.items():
        lines += ["", heading, *_aligned(rows)]
    return "\n".join([*lines, "  " + verdict])


def _machine_rows(machine: Machine) -> NamedLines:
    shm = f"{format_bytes(machine.shm)}, {format_bytes(machine.shm_free)} free" if machine.shm else "none"
    rows = [
        ("system", machine.system),
        ("processor", f"{machine.cpu}; {machine.usable} of {format_count(machine.cores, 'core')} usable"),
        ("memory", f"{format_bytes(machine.memory)}, {format_bytes(machine.memory_available)} available"),
        ("/dev/shm", shm),
    ]
    kinds = Counter((gpu.name, gpu.memory, gpu.capability, gpu.bf16) for gpu in machine.gpus)
    for (name, memory, (major, minor), bf16), many in kinds.items():
        line = (f"{many} x " if many > 1 else "") + name
        if memory:  # else it did not answer
            line += f", {format_bytes(memory)}, compute capability {major}.{minor}"
            line += ", bf16" if bf16 else ", no bf16"
        rows.append(("GPUs", line))
    if not kinds:
        rows.append(("GPUs", "none that torch can use" if machine.driver_gpus else "none"))
    rows += [("links", line) for line in _link_lines(machine.links)]
    backends = ["gloo"] * machine.gloo + [f"NCCL {machine.nccl}"] * (machine.nccl is not None)
    return [*rows, ("backends", ", ".join(backends) or "none")]


def _link_lines(links: Links) -> list[str]:
    """One line where all pairs are linked alike; up to 8 GPUs a matrix; beyond that a count of each kind."""
    pairs = Counter(links[i][j] for i in range(len(links)) for j in range(i + 1, len(links)))
    if not pairs:
        return []
    if len(pairs) == 1:
        return [f"every pair: {_link(next(iter(pairs)))}"]
    if len(links) > 8:
        return [f"{many} pairs: {_link(kind)}" for kind, many in pairs.most_common()]
    width = max(len(link) for row in links for link in row) + 1
    heading = "     " + "".join(f"{j:>{width}}" for j in range(len(links)))
    return [heading] + [
        f"GPU{i:<2}" + "".join(f"{'.' if i == j else link:>{width}}" for j, link in enumerate(row))
        for i, row in enumerate(links)
    ]


def _link(name: str) -> str:
    meanings = {
        "PIX": "one PCIe switch between them",
        "PXB": "several PCIe switches between them",
        "PHB": "through the CPU's PCIe bridge",
        "NODE": "through PCIe bridges of one socket",
        "SYS": "from socket to socket",
        "P2P": "directly, over NVLink or PCIe",
        "host": "through the CPU's memory",
    }
    if lanes := re.fullmatch(r"NV(\d+)", name):
        return f"{name} (NVLink, {format_count(int(lanes[1]), 'lane')})"
    return f"{name} ({meanings[name]})" if name in meanings else name


def _version_rows(machine: Machine) -> NamedLines:
    from hpnb import __version__

    built = f" for {machine.cuda or 'the CPU'}"
    rows = [("python", machine.python), ("hpnb", __version__)]
    for name, version in machine.versions:
        rows.append((name, "missing" if version is None else version + (built if name == "torch" else "")))
    return rows


def _plan(machine: Machine, ranks: int) -> str:
    choice = plan_launch(machine, ranks)
    where = "GPUs" if choice.device == "cuda" else "CPU"
    line = f"{where} over {choice.name}, {format_count(choice.threads, 'thread')} each ({choice.reason})"
    if choice.shares_gpus:
        return f"{line}; ranks compute one at a time, and each action is timed alone"
    contended = choice.device == "cpu" and ranks > machine.usable
    return line + (
        f"; they share {format_count(machine.usable, 'core')}, so times on the clock say little"
        if contended
        else ""
    )


def _aligned(rows: NamedLines) -> list[str]:
    """`name  text`, aligned and wrapped; a name that repeats is written once."""
    lines: list[str] = []
    last = None
    for name, text in rows:
        first = f"  {'' if name == last else name}".ljust(_NAMES)
        # A table's own spaces stay; only what is too long is wrapped, under the text.
        room = WIDTH - _NAMES
        parts = [text] if len(text) <= room else textwrap.wrap(text, room, break_on_hyphens=False)
        lines += [(" " * _NAMES if k else first) + part for k, part in enumerate(parts)]
        last = name
    return [line.rstrip() for line in lines]
