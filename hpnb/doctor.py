"""What this machine has, what hpnb will do with it, and what stands in the way.

    python -m hpnb doctor

`inspect_machine` reads everything once into a `Machine`; `plan`, `problems` and `report` are pure functions
of it, so each can be tried on a machine that is not at hand. Nothing here touches a GPU in the calling
process (that would forbid forking ranks from it later): GPUs are questioned in a child that then ends. No
host or user name gets into the report, which can be pasted into an issue as it is.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hpnb.ranks import usable_cores

GIB = 2**30
PAGE = 60  # lines of a report
WIDTH = 100  # columns of a report

# What pyproject.toml asks for; a test keeps the two in step.
OLDEST = {"torch": (2, 11), "transformers": (5, 17)}
PACKAGES = (
    "torch",
    "torchvision",
    "transformers",
    "datasets",
    "matplotlib",
    "ipywidgets",
    "jupyterlab",
)
WITHOUT = {  # what is lost where a package is missing that training itself does without
    "datasets": "Beans and MRPC are generated",
    "ipywidgets": "the explorers do not move",
    "jupyterlab": "the notebooks need another editor",
}

_VARIABLES = re.compile(r"(NCCL|GLOO|CUDA|TORCH_NCCL|PYTORCH_\w*ALLOC)_|OMP_NUM_THREADS$")


# --- what is here ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it. `memory` and `free` in bytes; `fault` is why a first sum on it failed."""

    name: str
    memory: int
    capability: tuple[int, int]
    bf16: bool  # in hardware; torch also emulates it, slower than fp16
    free: int | None = None
    fault: str | None = None


@dataclass(frozen=True)
class Machine:
    """All that the doctor knows. Sizes in bytes, None where the system does not say.

    `links[i][j]` is how GPU i reaches GPU j, in nvidia-smi's words ("NV18", "PHB", "SYS"), or "P2P" and
    "host" where only torch could be asked; `peers[i][j]` is whether i may read j's memory directly.
    """

    system: str
    cpu: str
    cores: int  # that the machine has
    usable: int  # of them, after affinity and the container's quota
    memory: int | None = None
    memory_available: int | None = None
    shm: int | None = None
    shm_free: int | None = None
    gpus: tuple[Gpu, ...] = ()
    driver_gpus: int = 0  # that the driver lists, whether torch may use them or not
    links: tuple[tuple[str, ...], ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()
    gloo: bool = True
    nccl: str | None = None
    cuda: str | None = None  # what torch was built for: "CUDA 13.2", "ROCm 7.1"
    python: str = ""
    versions: tuple[tuple[str, str | None], ...] = ()  # None: not installed
    environment: tuple[tuple[str, str], ...] = ()
    can_fork: bool = True
    name_resolves: bool = True


@dataclass(frozen=True)
class Plan:
    """What `device="auto"` means for `ranks` ranks here."""

    ranks: int
    device: Literal["cpu", "cuda"]
    backend: Literal["gloo", "NCCL"]
    threads: int  # for each rank
    contended: bool  # more ranks than cores: a wall clock would measure the queue for the CPU
    reason: str


@dataclass(frozen=True)
class Problem:
    """Something wrong and what to do. A "problem" stops hpnb from running; a "note" costs something."""

    level: Literal["problem", "note"]
    what: str
    remedy: str


def inspect_machine() -> Machine:
    """Read the machine. Every part that cannot be read is left at "unknown"; nothing is raised."""
    memory, available = _memory()
    shm, shm_free = _disk("/dev/shm")
    gpus, peers, order = _question_gpus() if torch.cuda.device_count() else ((), (), ())
    return Machine(
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        cpu=_cpu_model(),
        cores=os.cpu_count() or 1,
        usable=usable_cores(),
        memory=memory,
        memory_available=available,
        shm=shm,
        shm_free=shm_free,
        gpus=gpus,
        driver_gpus=max(len(gpus), len(_tool("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"))),
        links=_links(peers, order),
        peers=peers,
        gloo=torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        nccl=_nccl_version(),
        cuda=_built_for(),
        python=platform.python_version(),
        versions=tuple((name, _version(name)) for name in PACKAGES),
        environment=tuple((k, _anonymous(v)) for k, v in sorted(os.environ.items()) if _VARIABLES.match(k)),
        can_fork=hasattr(os, "fork"),
        name_resolves=_name_resolves(),
    )


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """`nvidia-smi topo -m` as {(i, j): link}, by the driver's GPU numbers; empty if `text` is no such table.

    The table also has network cards and affinities; GPUs come first in it, in rows and in columns.
    """
    columns: list[int] = []
    links: dict[tuple[int, int], str] = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():  # the heading is underlined on terminals
        words = line.split()
        gpus = [re.fullmatch(r"GPU(\d+)", word) for word in words]
        if not columns:
            columns = [int(match[1]) for match in gpus if match]
        elif words and (row := gpus[0]) and len(words) > len(columns):
            for column, link in zip(columns, words[1:], strict=False):
                if column != int(row[1]):
                    links[int(row[1]), column] = link
    return links


# --- what it means ---------------------------------------------------------------------------------


def plan(machine: Machine, ranks: int) -> Plan:
    """The rule of `hpnb.launch(..., device="auto")`, on any machine.

    One rank a GPU over NCCL when there are at least 2 GPUs and enough of them, otherwise the CPU over gloo;
    the usable cores are shared out evenly. `hpnb.ranks.choose_device` decides the same for this machine.
    """
    gpus = len(machine.gpus)
    threads = max(1, machine.usable // ranks)
    if gpus >= 2 and ranks <= gpus:
        return Plan(ranks, "cuda", "NCCL", threads, False, "one rank a GPU")
    if gpus == 0:
        reason = "no GPU"
    elif gpus == 1:
        reason = "one GPU, and NCCL needs one for each rank"
    else:
        reason = f"{gpus} GPUs are fewer than {ranks} ranks"
    return Plan(ranks, "cpu", "gloo", threads, ranks > machine.usable, reason)


def problems(machine: Machine) -> list[Problem]:
    """Everything wrong with this machine, what stops hpnb first."""
    found = [*_software(machine), *_resources(machine), *_gpus(machine), *_variables(machine)]
    return sorted(found, key=lambda problem: problem.level != "problem")


def _software(machine: Machine) -> Iterator[Problem]:
    if not machine.can_fork:
        yield _stop("this system cannot fork processes, and ranks are forked", "on Windows, use WSL 2")
    if not machine.gloo:
        yield _stop("this torch has no gloo, the CPU's backend", "install torch from its own wheels")
    for name, version in machine.versions:
        oldest = OLDEST.get(name, ())
        at_least = f">={_dotted(oldest)}" if oldest else ""
        install = f"pip install -U '{name}{at_least}'"
        if version is None and name in WITHOUT:
            yield _note(f"{name} is not installed: {WITHOUT[name]}", install)
        elif version is None:
            yield _stop(f"{name} is not installed", install)
        elif _release(version) < oldest:
            yield _stop(f"{name} {version} is older than {_dotted(oldest)}", install)
    if not machine.name_resolves:
        yield _note(
            "this machine's own name does not resolve: ranks in a cell do not mind, torchrun may hang",
            "add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME to a network interface",
        )


def _resources(machine: Machine) -> Iterator[Problem]:
    nccl = len(machine.gpus) >= 2
    if machine.shm is not None and machine.shm < GIB:
        users = "DataLoader workers and NCCL" if nccl else "DataLoader workers"
        # Below this NCCL stops with "unhandled system error".
        level = _stop if nccl and machine.shm < GIB // 16 else _note
        yield level(
            f"/dev/shm has {_size(machine.shm)}, and {users} pass data through it",
            "in a container, --shm-size=2g (or --ipc=host); otherwise keep num_workers=0",
        )
    if machine.memory_available is not None and machine.memory_available < 4 * GIB:
        level = _stop if machine.memory_available < GIB else _note
        yield level(
            f"{_size(machine.memory_available)} of memory is free, and four small ranks take about 2 GiB",
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
            what, remedy = "torch cannot use them", f"see that the driver is new enough for {machine.cuda}"
        yield _note(f"{hidden} of {_count(machine.driver_gpus, 'GPU')} not in use: {what}", remedy)
    if number == 1:
        yield _note(
            "one GPU: ranks run on the CPU, since NCCL needs a GPU for each rank",
            "nothing to do: every cell works, and timings are the CPU's",
        )
    for index, gpu in enumerate(machine.gpus):
        if gpu.fault:
            level = _stop if number >= 2 else _note
            yield level(
                f"GPU {index} ({gpu.name}) fails at a first sum: {gpu.fault}",
                "free it, or leave it out of CUDA_VISIBLE_DEVICES; device='cpu' works without it",
            )
        elif gpu.free is not None and gpu.free < gpu.memory // 2:
            yield _note(
                f"GPU {index}: {_size(gpu.free)} of {_size(gpu.memory)} is free",
                "see in nvidia-smi who has the rest",
            )
    if len({gpu.name for gpu in machine.gpus}) > 1:
        yield _note("the GPUs differ, and a step takes as long as the slowest needs", "time on equal ones")
    if not all(gpu.bf16 for gpu in machine.gpus if not gpu.fault):
        yield _note("a GPU here has no bf16", "use precision='fp16', as the notebooks then do")
    if number >= 2 and machine.nccl is None:
        yield _stop("this torch has no NCCL, the GPUs' backend", "install a CUDA build, or use device='cpu'")
    cut = [(i, j) for i, row in enumerate(machine.peers) for j, ok in enumerate(row) if i < j and not ok]
    if cut:
        pairs = f"{_count(len(cut), 'pair')} of GPUs (the first: {cut[0][0]} and {cut[0][1]})"
        yield _note(
            f"{pairs} cannot read each other's memory: NCCL goes through the host's",
            "usual on clouds and consumer cards; expect communication to cost more",
        )


def _variables(machine: Machine) -> Iterator[Problem]:
    """Variables that change what a notebook measures or prints."""
    here = dict(machine.environment)
    for name, consequence in (
        ("CUDA_LAUNCH_BLOCKING", "every kernel is waited for, so nothing overlaps and timings mean little"),
        ("NCCL_P2P_DISABLE", "GPUs exchange data through the host's memory"),
        ("NCCL_SHM_DISABLE", "GPUs without direct access exchange data through the network stack"),
    ):
        if here.get(name, "0") not in ("", "0"):
            yield _note(f"{name} is set: {consequence}", f"unset {name}")
    if here.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        yield _note("NCCL_DEBUG fills every cell with NCCL's log", "NCCL_DEBUG=WARN")


def _stop(what: str, remedy: str) -> Problem:
    return Problem("problem", what, remedy)


def _note(what: str, remedy: str) -> Problem:
    return Problem("note", what, remedy)


# --- the page --------------------------------------------------------------------------------------


def report(machine: Machine) -> str:
    """The machine on one page: at most 60 lines of at most 100 columns, plain text."""
    lines = ["hpnb doctor", "", "This machine"]
    lines += _rows(_machine_rows(machine))
    lines += ["", "Versions", *_rows(_version_rows(machine))]
    lines += ["", "Environment", *_rows(_environment_rows(machine))]
    lines += ["", 'What device="auto" will use', *_rows(_plan_rows(machine))]
    lines += ["", "What is wrong"]
    found = problems(machine)
    for number, problem in enumerate(found):
        rows = _rows([(problem.level, problem.what), ("", "-> " + problem.remedy)])
        if len(lines) + len(rows) > PAGE - 2:  # keep room for this line and the last
            lines += _rows([("", f"and {len(found) - number} more")])
            break
        lines += rows
    stopping = sum(problem.level == "problem" for problem in found)
    if stopping:
        lines.append(f"  hpnb cannot run here yet: {_count(stopping, 'problem')} to solve")
    elif found:
        lines.append(f"  nothing that stops hpnb: {_count(len(found), 'note')}")
    else:
        lines.append("  nothing")
    return "\n".join(lines)


def _machine_rows(machine: Machine) -> list[tuple[str, str]]:
    rows = [
        ("system", machine.system),
        ("processor", f"{machine.cpu}; {machine.usable} of {_count(machine.cores, 'core')} usable"),
        ("memory", f"{_size(machine.memory)}, {_size(machine.memory_available)} available"),
        ("/dev/shm", f"{_size(machine.shm)}, {_size(machine.shm_free)} free" if machine.shm else "none"),
    ]
    groups = Counter((gpu.name, gpu.memory, gpu.capability, gpu.bf16) for gpu in machine.gpus)
    for (name, memory, (major, minor), bf16), many in groups.most_common(3):
        line = (f"{many} x " if many > 1 else "") + name
        if memory:  # else it did not answer
            line += f", {_size(memory)}, compute capability {major}.{minor}, {'bf16' if bf16 else 'no bf16'}"
        rows.append(("GPUs", line))
    if len(groups) > 3:
        rows.append(("GPUs", f"and {len(groups) - 3} more kinds"))
    if not groups:
        rows.append(("GPUs", "none that torch can use" if machine.driver_gpus else "none"))
    rows += [("links", line) for line in _link_lines(machine.links)]
    backends = ["gloo"] * machine.gloo + [f"NCCL {machine.nccl}"] * (machine.nccl is not None)
    rows.append(("backends", ", ".join(backends) or "none"))
    return rows


def _link_lines(links: tuple[tuple[str, ...], ...]) -> list[str]:
    """One line where all pairs are linked alike; up to 8 GPUs a matrix; beyond that a count of each kind."""
    pairs = Counter(links[i][j] for i in range(len(links)) for j in range(i + 1, len(links)))
    if not pairs:
        return []
    if len(pairs) == 1:
        return [f"every pair: {_link(next(iter(pairs)))}"]
    if len(links) > 8:
        return [f"{many} pairs: {_link(kind)}" for kind, many in pairs.most_common(4)]
    width = max(len(link) for row in links for link in row) + 1
    heading = "     " + "".join(f"{j:>{width}}" for j in range(len(links)))
    return [heading] + [
        f"GPU{i:<2}" + "".join(f"{'.' if i == j else link:>{width}}" for j, link in enumerate(row))
        for i, row in enumerate(links)
    ]


def _link(name: str) -> str:
    words = {
        "PIX": "one PCIe switch between them",
        "PXB": "several PCIe switches between them",
        "PHB": "through the CPU's PCIe bridge",
        "NODE": "through PCIe bridges of one socket",
        "SYS": "from socket to socket",
        "P2P": "directly, over NVLink or PCIe",
        "host": "through the host's memory",
    }
    if lanes := re.fullmatch(r"NV(\d+)", name):
        return f"{name} (NVLink, {_count(int(lanes[1]), 'lane')})"
    return f"{name} ({words[name]})" if name in words else name


def _version_rows(machine: Machine) -> list[tuple[str, str]]:
    """Packages in two columns, Python and hpnb first."""
    from hpnb import __version__

    built = f" for {machine.cuda}" if machine.cuda else " for the CPU"
    cells = [("python", machine.python), ("hpnb", __version__)]
    for name, version in machine.versions:
        cells.append((name, "missing" if version is None else version + (built if name == "torch" else "")))
    half = (len(cells) + 1) // 2
    rows = []
    for left, right in zip(cells[:half], [*cells[half:], ("", "")], strict=False):
        rows.append((left[0], f"{left[1]:<32}{right[0]:<14}{right[1]}"))
    return rows


def _environment_rows(machine: Machine) -> list[tuple[str, str]]:
    if not machine.environment:
        return [("", "no NCCL_*, GLOO_* or CUDA_* variable is set")]
    words = [f"{name}={textwrap.shorten(value, 60)}" for name, value in machine.environment]
    if len(words) > 6:
        words = [*words[:6], f"and {len(words) - 6} more"]
    return [("", word) for word in words]


def _plan_rows(machine: Machine) -> list[tuple[str, str]]:
    rows = []
    for ranks in (2, 4, 8):
        it = plan(machine, ranks)
        where = "GPUs" if it.device == "cuda" else "CPU"
        line = f"{where} over {it.backend}, {_count(it.threads, 'thread')} each ({it.reason})"
        if it.contended:
            line += "; wall clocks contended: fewer cores than ranks"
        rows.append((f"{ranks} ranks", line))
    return rows


def _rows(rows: list[tuple[str, str]]) -> list[str]:
    """`name  text`, aligned and wrapped; a name that repeats is written once."""
    lines: list[str] = []
    last = None
    for name, text in rows:
        first = f"  {'' if name == last else name:<14}"
        # A table's own spaces stay; only what is too long is wrapped, under the text.
        parts = [text] if len(text) <= WIDTH - 16 else textwrap.wrap(text, WIDTH - 16, break_on_hyphens=False)
        lines += [(first if k == 0 else " " * 16) + part for k, part in enumerate(parts)]
        last = name
    return [line.rstrip() for line in lines]


def _size(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


# --- reading the machine ---------------------------------------------------------------------------

_QUESTIONS = """
import json, torch
n = torch.cuda.device_count()
gpus = []
for i in range(n):
    p = torch.cuda.get_device_properties(i)
    gpu = {"name": p.name, "memory": p.total_memory, "capability": [p.major, p.minor],
           "bf16": torch.version.hip is not None or p.major >= 8, "uuid": str(getattr(p, "uuid", ""))}
    try:
        gpu["free"] = torch.cuda.mem_get_info(i)[0]
        torch.ones(8, device=i).sum().item()
    except Exception as error:
        gpu["fault"] = (str(error).strip().splitlines() or [type(error).__name__])[0]
    gpus.append(gpu)
peers = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(n)] for i in range(n)]
print(json.dumps({"gpus": gpus, "peers": peers}))
"""


def _question_gpus() -> tuple[tuple[Gpu, ...], tuple[tuple[bool, ...], ...], tuple[int | None, ...]]:
    """GPUs, who reads whose memory, and each GPU's number with the driver, from a child process.

    torch's numbers follow CUDA_VISIBLE_DEVICES and the driver's do not; the identifiers tell which is which.
    """
    output = _tool(sys.executable, "-c", _QUESTIONS, timeout=120.0)
    try:
        answer = json.loads(output[-1])
        gpus = tuple(
            Gpu(
                name=gpu["name"],
                memory=gpu["memory"],
                capability=(gpu["capability"][0], gpu["capability"][1]),
                bf16=gpu["bf16"],
                free=gpu.get("free"),
                fault=gpu.get("fault"),
            )
            for gpu in answer["gpus"]
        )
        peers = tuple(tuple(bool(ok) for ok in row) for row in answer["peers"])
    except (IndexError, KeyError, TypeError, ValueError):
        # The driver lists them and CUDA does not start: say so for each, rather than hide them.
        nothing = Gpu("unknown GPU", 0, (0, 0), False, fault="CUDA does not start")
        return (nothing,) * torch.cuda.device_count(), (), ()
    numbers: dict[str, int] = {}
    for line in _tool("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"):
        index, _, identifier = line.partition(",")
        if index.strip().isdigit():
            numbers[identifier.strip().removeprefix("GPU-")] = int(index)
    return gpus, peers, tuple(numbers.get(gpu["uuid"].removeprefix("GPU-")) for gpu in answer["gpus"])


def _links(peers: tuple[tuple[bool, ...], ...], order: tuple[int | None, ...]) -> tuple[tuple[str, ...], ...]:
    """nvidia-smi's word for every pair where it has one, else whether CUDA allows direct access."""
    if len(peers) < 2:
        return ()
    known = parse_topology("\n".join(_tool("nvidia-smi", "topo", "-m")))

    def link(i: int, j: int) -> str:
        if i == j:
            return "."
        a, b = order[i], order[j]
        word = known.get((a, b)) if a is not None and b is not None else None
        return word or ("P2P" if peers[i][j] else "host")

    return tuple(tuple(link(i, j) for j in range(len(peers))) for i in range(len(peers)))


def _tool(*command: str, timeout: float = 20.0) -> list[str]:
    """The lines that a command prints; none if it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _cpu_model() -> str:
    """The processor's name, as well as the system knows it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    for line in _tool("sysctl", "-n", "machdep.cpu.brand_string"):
        return line.strip()
    return platform.processor() or platform.machine() or "unknown processor"


def _memory() -> tuple[int | None, int | None]:
    """Total and available bytes, both cut by the container's limit."""
    total = available = None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemTotal":
                total = int(value.split()[0]) * 1024
            elif name == "MemAvailable":
                available = int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        try:  # macOS
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, AttributeError):
            return None, None
    for limit, used in _memory_limits():
        total = min(total, limit) if total is not None else limit
        free = max(0, limit - used)
        available = min(available, free) if available is not None else free
    return total, available


def _memory_limits() -> list[tuple[int, int]]:
    """(limit, used) in bytes of every control group that this process is in; version 2, then version 1."""
    root = Path("/sys/fs/cgroup")
    try:
        entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in (entry for entry in entries if len(entry) == 3):
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        names = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        group = base / path.lstrip("/")
        for folder in [group, *group.parents]:
            if folder != base and base not in folder.parents:
                break
            try:
                limit, used = (int((folder / f"memory.{name}").read_text()) for name in names)
                statistics = (folder / "memory.stat").read_text()
            except (OSError, ValueError):  # no such file, or "max": no limit here
                continue
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", statistics, re.MULTILINE)
            if limit < 1 << 60:  # version 1 writes a huge number for no limit
                found.append((limit, used - int(cached[1]) if cached else used))  # the cache can be dropped
    return found


def _disk(path: str) -> tuple[int | None, int | None]:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None, None
    return usage.total, usage.free


def _nccl_version() -> str | None:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    try:
        return _dotted(torch.cuda.nccl.version())
    except Exception:  # a build without the function, or without the library
        return "of unknown version"


def _built_for() -> str | None:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else None


def _version(name: str) -> str | None:
    if name == "torch":
        return str(torch.__version__)  # with its build, which the metadata may lack
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """(2, 15, 0) of "2.15.0+cpu" and of "2.15.0rc1"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in release)


def _name_resolves(patience: float = 3.0) -> bool:
    """Whether this machine finds its own address by name; a resolver that does not answer counts as no."""
    found = threading.Event()

    def look() -> None:
        try:
            socket.getaddrinfo(socket.gethostname(), None)
            found.set()
        except OSError:
            pass

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(patience)
    return found.is_set()


def _anonymous(text: str) -> str:
    """Without the home folder, the user's name and this machine's."""
    text = text.replace(str(Path.home()), "~") if len(str(Path.home())) > 1 else text
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = ""
    for name, stand_in in ((socket.gethostname(), "<host>"), (user, "<user>")):
        if name:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", stand_in, text)
    return text
