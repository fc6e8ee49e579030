"""How long until a function has run on N processes that form a group: hpnb beside its peers, in one run.

    python -m hpnb.bench launch --ranks 4 --rounds 5

The function all-reduces one number and returns. Every candidate ends with its processes gone; the row
"hpnb.Ranks.run" is a call on processes that stay. Each candidate has a Python of its own, as it would in a
notebook, and they take turns. torch.multiprocessing.spawn starts Python anew in every process; accelerate's
notebook_launcher forks its own, which it can only do while CUDA has not been touched there.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn  # type: ignore[attr-defined]

import hpnb
from hpnb.bench.results import quartiles, take_turns

_TIMEOUT = 120.0  # seconds for one turn of one candidate
_CALLS_OF_RUN = 100  # a call on processes that stay is short, so it is repeated


def add_one() -> float:
    """What every candidate runs: the group agrees on how many it is."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


# --- the candidates --------------------------------------------------------------------------


def _hpnb(ranks: int) -> None:
    assert hpnb.launch(add_one, ranks=ranks, device="cpu") == [ranks] * ranks


def _accelerate(ranks: int) -> None:
    from accelerate import notebook_launcher

    with contextlib.redirect_stdout(io.StringIO()):
        notebook_launcher(_in_group, num_processes=ranks, use_port=str(_free_port()))


def _in_group() -> None:
    dist.init_process_group("gloo")  # the launcher has set the environment
    assert add_one() == dist.get_world_size()
    dist.destroy_process_group()


def _spawn(ranks: int) -> None:
    spawn(_spawned, args=(ranks, _free_port()), nprocs=ranks)


def _spawned(rank: int, ranks: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    assert add_one() == ranks
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_CANDIDATES: dict[str, Callable[[int], None]] = {
    "hpnb.launch": _hpnb,
    "accelerate.notebook_launcher": _accelerate,
    "torch.multiprocessing.spawn": _spawn,
}


# --- taking turns ----------------------------------------------------------------------------


class _Turn:
    """One candidate in a Python of its own: a line in is a turn, a line out the seconds it took."""

    def __init__(self, name: str, ranks: int) -> None:
        self.name = name
        self.seconds: list[float] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hpnb.bench.launch", name, str(ranks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"},
        )

    def take(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        seconds = self._process.stdout.readline()
        if not seconds:
            raise RuntimeError(f"{self.name} ended without a time; its error stands above")
        self.seconds.append(float(seconds))

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()


def run(ranks: int, rounds: int) -> None:
    """Print the table. All on the CPU: it is the processes that are compared."""
    turns = [_Turn(name, ranks) for name in _CANDIDATES]
    try:
        for turn in take_turns(turns, rounds + 1):
            turn.take()
    finally:
        for turn in turns:
            turn.end()
    rows = {turn.name: turn.seconds[1:] for turn in turns}
    rows |= {f"{turn.name}, first": turn.seconds[:1] for turn in turns}
    with hpnb.Ranks(ranks, device="cpu") as pool:
        pool.run(add_one)
        calls = rows["hpnb.Ranks.run"] = []
        for _ in range(_CALLS_OF_RUN):
            begin = time.perf_counter()
            pool.run(add_one)
            calls.append(time.perf_counter() - begin)
    print(table(f"{ranks} CPU ranks, {hpnb.ranks.usable_cores()} cores, {rounds} rounds", rows))


def table(title: str, rows: dict[str, list[float]]) -> str:
    """Rows of seconds as text; the ratio says how many times as long as the first row each one took."""
    width, first = max(map(len, rows)), quartiles(next(iter(rows.values())))[0]
    lines = [title, f"{'':{width}}  {'median':>10}  {'quartiles':>21}  {'of row 1':>8}"]
    for name, seconds in rows.items():
        median, low, high = quartiles(seconds)
        span = f"{low * 1e3:.2f} to {high * 1e3:.2f}"
        lines.append(f"{name:{width}}  {median * 1e3:7.2f} ms  {span:>18} ms  {median / first:8.2f}")
    return "\n".join(lines)


def _take_turns(name: str, ranks: int) -> None:
    import faulthandler

    for _ in sys.stdin:
        faulthandler.dump_traceback_later(_TIMEOUT, exit=True)  # a candidate that hangs says where
        begin = time.perf_counter()
        _CANDIDATES[name](ranks)
        print(time.perf_counter() - begin, flush=True)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _take_turns(sys.argv[1], int(sys.argv[2]))
