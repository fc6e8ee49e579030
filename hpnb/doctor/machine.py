"""A Machine is all that the doctor knows, as data; `inspect_machine` reads this one."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from hpnb.doctor.gpus import Gpu, Links, Peers, links_between, query_gpus, run_tool
from hpnb.ranks import usable_cores

PACKAGES = (
    "torch",
    "torchvision",
    "transformers",
    "datasets",
    "matplotlib",
    "ipywidgets",
    "jupyterlab",
)
_VARIABLES = re.compile(r"(NCCL|GLOO|CUDA|TORCH_NCCL|PYTORCH_\w*ALLOC|HPNB)_|OMP_NUM_THREADS$")


@dataclass(frozen=True)
class Machine:
    """What one machine has. Sizes in bytes, None where the system does not say.

    `links[i][j]` is how GPU i reaches GPU j, in nvidia-smi's names ("NV18", "PHB", "SYS"), or "P2P" and
    "host" if only torch could be asked; `peers[i][j]` is whether i may read j's memory directly.
    """

    system: str
    cpu: str
    cores: int  # that the machine has
    usable: int  # of them, after affinity and the container's quota
    threads: int | None = None  # that a process computes with
    memory: int | None = None
    memory_available: int | None = None
    shm: int | None = None
    shm_free: int | None = None
    gpus: tuple[Gpu, ...] = ()
    driver_gpus: int = 0  # that the driver lists, whether torch may use them or not
    links: Links = ()
    peers: Peers = ()
    gloo: bool = True
    nccl: str | None = None
    cuda: str | None = None  # what torch was built for: "CUDA 13.2", "ROCm 7.1"
    python: str = ""
    versions: tuple[tuple[str, str | None], ...] = ()  # None: not installed
    environment: tuple[tuple[str, str], ...] = ()
    interfaces: tuple[str, ...] = ()  # of the network; empty where the system does not say
    can_fork: bool = True


def inspect_machine() -> Machine:
    """Read the machine. Every part that cannot be read is left at "unknown"; nothing is raised."""
    memory, available = _memory()
    shm, shm_free = _disk("/dev/shm")
    gpus, peers = query_gpus()
    return Machine(
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        cpu=_cpu_model(),
        cores=os.cpu_count() or 1,
        usable=usable_cores(),
        threads=torch.get_num_threads(),
        memory=memory,
        memory_available=available,
        shm=shm,
        shm_free=shm_free,
        gpus=gpus,
        driver_gpus=max(len(gpus), len(run_tool("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"))),
        links=links_between(gpus, peers),
        peers=peers,
        gloo=torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        nccl=_nccl_version(),
        cuda=_built_for(),
        python=platform.python_version(),
        versions=tuple((name, _version(name)) for name in PACKAGES),
        environment=tuple((k, anonymous(v)) for k, v in sorted(os.environ.items()) if _VARIABLES.match(k)),
        interfaces=_interfaces(),
        can_fork=hasattr(os, "fork"),
    )


def anonymous(text: str) -> str:
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


def _interfaces() -> tuple[str, ...]:
    try:
        return tuple(name for _, name in socket.if_nameindex())
    except OSError:
        return ()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    for line in run_tool("sysctl", "-n", "machdep.cpu.brand_string"):  # macOS
        return line.strip()
    return platform.processor() or platform.machine() or "unknown processor"


def _memory() -> tuple[int | None, int | None]:
    """Total and available bytes, both cut by the container's limit if there is one."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {name: int(words.split()[0]) * 1024 for name, _, words in (s.partition(":") for s in lines)}
        total, available = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, ValueError, LookupError):
        try:  # macOS
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
        except (OSError, ValueError, AttributeError):
            return None, None
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # no container, or "max": no limit
        return total, available
    used -= int(cached[1]) if cached else 0  # the cache can be dropped
    return min(total, limit), min(available, max(0, limit - used))


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
        return ".".join(map(str, torch.cuda.nccl.version()))
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
