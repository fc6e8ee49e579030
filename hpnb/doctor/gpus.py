"""The GPUs and the links between them, from the driver and from a child process that uses torch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

import torch

Links = tuple[tuple[str, ...], ...]
Peers = tuple[tuple[bool, ...], ...]

_QUERY = """
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


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it. `memory` and `free` in bytes; `fault` is why a first sum on it failed.

    `uuid` is what the driver calls it too; torch's numbers follow CUDA_VISIBLE_DEVICES, the driver's do not.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    bf16: bool  # in hardware; torch also emulates it, slower than fp16
    free: int | None = None
    fault: str | None = None
    uuid: str = ""


def query_gpus() -> tuple[tuple[Gpu, ...], Peers]:
    """torch's GPUs, and whether i may read j's memory directly, from a child process."""
    number = torch.cuda.device_count()  # asks the driver; does not initialise CUDA
    if number == 0:
        return (), ()
    try:
        answer = json.loads(run_tool(sys.executable, "-c", _QUERY, timeout=120.0)[-1])
        gpus = tuple(Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in answer["gpus"])
        return gpus, tuple(map(tuple, answer["peers"]))
    except (IndexError, KeyError, TypeError, ValueError):
        # The driver lists them and CUDA does not start: say so for each, rather than hide them.
        nothing = Gpu("unknown GPU", 0, (0, 0), False, fault="CUDA does not start")
        return (nothing,) * number, ()


def links_between(gpus: tuple[Gpu, ...], peers: Peers) -> Links:
    """nvidia-smi's name for the link of every pair, or else whether CUDA allows direct access."""
    if len(peers) < 2:
        return ()
    known = parse_topology("\n".join(run_tool("nvidia-smi", "topo", "-m")))
    numbers: dict[str, int] = {}  # of the driver
    for line in run_tool("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"):
        index, _, uuid = line.partition(",")
        if index.isdigit():  # else it is one of the driver's warnings
            numbers[uuid.strip().removeprefix("GPU-")] = int(index)
    order = [numbers.get(gpu.uuid.removeprefix("GPU-"), -1) for gpu in gpus]

    def link(i: int, j: int) -> str:
        return known.get((order[i], order[j])) or ("P2P" if peers[i][j] else "host")

    places = range(len(peers))
    return tuple(tuple("." if i == j else link(i, j) for j in places) for i in places)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """`nvidia-smi topo -m` as {(i, j): link}, by the driver's GPU numbers; empty if `text` is no such table.

    The table also has network cards and affinities; GPUs come first in it, in rows and in columns.
    """
    columns: list[int] = []
    links: dict[tuple[int, int], str] = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():  # the heading is underlined on terminals
        cells = line.split()
        gpus = [re.fullmatch(r"GPU(\d+)", cell) for cell in cells]
        if not columns:
            columns = [int(match[1]) for match in gpus if match]
        elif cells and (row := gpus[0]) and len(cells) > len(columns):
            for column, link in zip(columns, cells[1:], strict=False):
                if column != int(row[1]):
                    links[int(row[1]), column] = link
    return links


def run_tool(*command: str, timeout: float = 20.0) -> list[str]:
    """The lines that a command prints; none if it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
