"""Chaos between hosts under torchrun: a link that drops for 20 s, and a host that dies and comes back.

Hosts are network namespaces of this machine, as in test_hosts.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_tally import Tally, tally
from test_hosts import HOSTS, RUN, on_host, sh, spaces, unbroken

import hpnb

__all__ = ["spaces"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]
STEPS, EVERY, STRUCK, SECONDS = 8, 2, 5, 20.0

PROGRAM = """
import json, sys, time
from pathlib import Path
import hpnb
from hpnb.hybrid.training.events import Hook
from hpnb.hybrid.train_command.run_file import load
from hpnb.hybrid.train_command.train import train

folder, struck = Path(sys.argv[2]), int(sys.argv[3])


class Watch(Hook):
    def before_step(self, trainer):
        if trainer.step == struck:
            (folder / f"there-{hpnb.rank()}").touch()
            time.sleep(0.5)

    def after_step(self, trainer):
        with open(folder / f"loss-{hpnb.rank()}", "a") as lines:
            lines.write(json.dumps([trainer.step, float(trainer.loss)]) + "\\n")


run = train(load(sys.argv[1]), more=[Watch()])
(folder / f"done-{hpnb.rank()}").write_text(json.dumps([run.step, run.resumed, run.final]))
"""


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[Tally]:
    with tally("hosts", request) as made:
        yield made


class Cluster:
    """Two hosts that train, each under its torchrun."""

    def __init__(self, spaces: dict[str, str], folder: Path) -> None:
        self.spaces, self.folder = spaces, folder
        tables = RUN % {"tp": 2, "steps": STEPS, "every": EVERY, "folder": folder / "run"}
        (folder / "run.toml").write_text(tables)
        (folder / "program.py").write_text(PROGRAM)
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, host: str) -> None:
        command = (
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
            "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "first:29500",
            "program.py", "run.toml", str(self.folder), str(STRUCK),
        )  # fmt: skip
        self.running[host] = on_host(host, self.spaces, self.folder, *command)

    def link(self, state: str) -> None:
        """ "up" or "down"."""
        sh("ip", "-n", self.spaces["second"], "link", "set", "hpnb1", state)

    def kill(self, host: str) -> None:
        """Everything that runs there, as when the power fails."""
        command = ["ip", "netns", "pids", self.spaces[host]]
        listed = subprocess.run(command, capture_output=True, text=True, check=True)
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.running.pop(host).wait(20)

    def wait_until(self, there: Callable[[], bool], seconds: float) -> float:
        began = time.monotonic()
        while not there():
            assert time.monotonic() - began < seconds, self.said()
            time.sleep(0.1)
        return time.monotonic() - began

    def said(self) -> str:
        outputs = {host: (self.folder / f"out-{host}").read_text() for host in HOSTS}
        return "\n".join(f"--- {host}\n{output[-3000:]}" for host, output in outputs.items())

    def is_struck(self) -> bool:
        return (self.folder / "there-0").exists() and (self.folder / "there-3").exists()

    def stop(self) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def results(self) -> list[Any]:
        return [json.loads((self.folder / f"done-{rank}").read_text()) for rank in range(4)]


@pytest.fixture
def cluster(spaces: dict[str, str], tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(spaces, tmp_path)
    for host in HOSTS:
        made.start(host)
    try:
        made.wait_until(made.is_struck, 240)
        yield made
    finally:
        with contextlib.suppress(OSError):
            made.link("up")
        made.stop()


def check(counts: Tally, kind: str, cluster: Cluster, tmp_path: Path) -> None:
    """The run has ended with what one process computes."""
    cluster.wait_until(lambda: all((cluster.folder / f"done-{rank}").exists() for rank in range(4)), 300)
    tables = RUN % {"tp": 1, "steps": STEPS, "every": STEPS, "folder": tmp_path / "alone"}
    tables = tables.replace("batch_size = 2", "batch_size = 4")
    alone = hpnb.launch(unbroken, tables, ranks=1, device="cpu")[0]
    alone.pop("curve")
    for step, resumed, final in cluster.results():
        right = step == STEPS and final == pytest.approx(alone, rel=1e-7)
        said = f"resumed from {resumed}"
        lost = resumed is not None and resumed < STRUCK - EVERY
        outcome = "lost" if lost else "unharmed" if right else "wrong"
        counts.add(kind, outcome, 0.0, f"{said}, {final}, {alone}")


def test_a_link_that_drops_for_twenty_seconds(counts: Tally, cluster: Cluster, tmp_path: Path) -> None:
    cluster.link("down")
    time.sleep(SECONDS)
    cluster.link("up")
    check(counts, "a link drops for 20 s", cluster, tmp_path)
    counts.check()


def test_a_host_that_dies_and_comes_back(counts: Tally, cluster: Cluster, tmp_path: Path) -> None:
    """Its connections are not closed. torchrun's rendezvous does not take it up again in torch 2.11: so the
    job is started again on both hosts, as a scheduler does, and goes on from its last checkpoint."""
    cluster.link("down")
    cluster.kill("second")
    time.sleep(SECONDS)
    cluster.link("up")
    cluster.kill("first")
    for host in HOSTS:
        cluster.start(host)
    check(counts, "a host dies silently, and the job is started again", cluster, tmp_path)
    counts.check()
