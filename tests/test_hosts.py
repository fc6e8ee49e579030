"""Two hosts: network namespaces of this machine with names and hosts files of their own, and a slow link.

    first  10.77.0.1   rank 0 (rank 1)       dp2 under torchrun; with --slow dp2 x tp2, tp inside a host
      | 200 Mbit/s
    second 10.77.0.2   rank 1 (rank 2  rank 3)

What crosses the link is counted, and one of the ranks is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, Store

import hpnb
from hpnb import theory
from hpnb.hybrid.torchrun import network_interface, restart_store

ROOT = Path(__file__).parents[1]
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HOSTS = {"first": "10.77.0.1", "second": "10.77.0.2"}
STEPS, SAVED, KILLED = 9, 4, 6  # a checkpoint after step 4; the last rank dies before step 7 begins
FIRST, LAST = 1, 3  # the steps that are measured, after one that warms up

RUN = """
[model]
family = "vit"
size = { hidden = 64, layers = 3, heads = 4, mlp = 256, patch = 8, image = 16 }
[data]
name = "beans"
kind = "generated"
batch_size = 2
rows = 36
[layout]
tp_size = %(tp)d
[training]
steps = %(steps)d
learning_rate = 1e-3
precision = "fp64"
seed = 3
[checkpoint]
dir = "%(folder)s"
every = %(every)d
"""

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import torch.distributed as dist
import hpnb
from hpnb.hybrid.training.events import Hook
from hpnb.hybrid.train_command.run_file import load
from hpnb.hybrid.train_command.train import train

file, folder = load(sys.argv[1]), Path(sys.argv[2])
first, last, killed = map(int, sys.argv[3:])


def sent():
    "Bytes that have left this host."
    (name,) = [path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith("hpnb")]
    return int(Path("/sys/class/net", name, "statistics/tx_bytes").read_text())


class Watch(Hook):
    def before_step(self, trainer):
        if trainer.step == first:
            dist.barrier()
            self.before, self.counting = sent(), hpnb.record.traffic()
            self.traffic = self.counting.__enter__()
        last_rank = hpnb.rank() == hpnb.world_size() - 1
        if trainer.step == killed and last_rank and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, trainer):
        with open(folder / f"loss-{hpnb.rank()}", "a") as lines:
            lines.write(json.dumps([trainer.step, float(trainer.loss)]) + "\\n")
        if trainer.step == last:
            self.counting.__exit__(None, None, None)
            dist.barrier()
            found = {
                "link": sent() - self.before,
                "messages": [[m.axis, m.op, m.bytes, m.group] for m in self.traffic.messages],
                "parameters": sum(p.numel() for p in trainer.model.parameters()),
                "name": os.uname().nodename,
                "interface": os.environ["GLOO_SOCKET_IFNAME"],
            }
            (folder / f"seen-{hpnb.rank()}").write_text(json.dumps(found))


run = train(file, more=[Watch()])
(folder / f"done-{hpnb.rank()}").write_text(json.dumps([run.step, run.resumed, run.history, run.final]))
"""


def sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def spaces() -> Iterator[dict[str, str]]:
    """A network namespace for each host, by its name."""
    if sys.platform != "linux" or os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "mount"))):
        pytest.skip("two hosts are network namespaces, which takes Linux, root, ip, unshare and mount")
    made = {name: f"hpnb-{name}-{os.getpid()}" for name in HOSTS}
    ends = {name: f"hpnb{i}" for i, name in enumerate(HOSTS)}
    one, other = HOSTS
    try:
        try:
            for space in made.values():
                sh("ip", "netns", "add", space)
            sh("ip", "link", "add", ends[one], "netns", made[one], "type", "veth",
               "peer", "name", ends[other], "netns", made[other])  # fmt: skip
        except OSError as error:
            pytest.skip(f"two hosts are network namespaces, which cannot be made here: {error}")
        for name, address in HOSTS.items():
            sh("ip", "-n", made[name], "addr", "add", f"{address}/24", "dev", ends[name])
            for interface in ("lo", ends[name]):
                sh("ip", "-n", made[name], "link", "set", interface, "up")
            if shutil.which("tc"):
                sh("tc", "-n", made[name], "qdisc", "add", "dev", ends[name], "root", "tbf",
                   "rate", "200mbit", "burst", "128kb", "latency", "100ms")  # fmt: skip
        yield made
    finally:
        for space in made.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=20, check=False)


def on_host(name: str, spaces: dict[str, str], folder: Path, *command: str) -> subprocess.Popen[str]:
    """Start a command there. To itself a host is 127.0.1.1, as Debian has it."""
    hosts = folder / f"hosts-{name}"
    own = {other: address if other != name else "127.0.1.1" for other, address in HOSTS.items()}
    lines = ["127.0.0.1 localhost", *(f"{address} {other}" for other, address in own.items())]
    hosts.write_text("\n".join(lines) + "\n")
    environ = {key: value for key, value in os.environ.items() if key not in TOLD}
    environ.pop("GLOO_SOCKET_IFNAME", None)
    environ.update(CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", CI="1")
    inside = f'hostname {name} && mount --bind {hosts} /etc/hosts && exec "$@"'
    return subprocess.Popen(
        ["ip", "netns", "exec", spaces[name], "unshare", "--uts", "sh", "-c", inside, "sh", *command],
        stdout=(folder / f"out-{name}").open("w"), stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        text=True, cwd=folder, env=environ, start_new_session=True,
    )  # fmt: skip


def torchrun_on_hosts(
    spaces: dict[str, str], folder: Path, ranks: int, port: int, *program: str, seconds: float = 240
) -> str:
    """Run the program on both hosts, with so many ranks on each, to its end; what they said."""
    torchrun = (sys.executable, str(Path(__file__).with_name("forked_torchrun.py")), "--nnodes", "2",
                "--nproc-per-node", str(ranks), "--max-restarts", "1",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"first:{port}", *program)  # fmt: skip
    running = [on_host(name, spaces, folder, *torchrun) for name in HOSTS]
    deadline = time.monotonic() + seconds
    try:
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in running]
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    said = "\n".join(f"--- {name}\n" + (folder / f"out-{name}").read_text() for name in HOSTS)
    assert codes == [0, 0], said
    return said


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def ran(
    request: pytest.FixtureRequest, spaces: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, int]:
    """The folder that both hosts wrote into, what they said, and how many ranks each had; the last one was
    killed on the way."""
    ranks: int = request.param
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "run.toml").write_text(
        RUN % {"tp": ranks, "steps": STEPS, "every": SAVED, "folder": folder / "run"}
    )
    (folder / "program.py").write_text(PROGRAM)
    measured = map(str, (FIRST, LAST, KILLED))
    said = torchrun_on_hosts(spaces, folder, ranks, 29500, "program.py", "run.toml", str(folder), *measured)
    return folder, said, ranks


def test_only_gradients_of_replicas_cross_the_link(ran: tuple[Path, str, int]) -> None:
    folder, _, ranks = ran
    found = [json.loads((folder / f"seen-{rank}").read_text()) for rank in range(2 * ranks)]
    assert [one["name"] for one in found] == ["first"] * ranks + ["second"] * ranks
    assert [one["interface"] for one in found] == ["hpnb0"] * ranks + ["hpnb1"] * ranks
    steps = LAST - FIRST
    for rank, one in enumerate(found):
        crossing: dict[str, float] = {}
        for axis, _, nbytes, group in one["messages"]:
            if len({member // ranks for member in group}) > 1:
                crossing[axis] = crossing.get(axis, 0) + nbytes
            else:
                assert axis == "tp"
        gradients = steps * theory.bytes_sent("all_reduce", 8 * one["parameters"], 2)
        one["crossing"] = sum(crossing.values())
        assert crossing["dp"] == pytest.approx(gradients, rel=1e-3), rank  # and how many targets there are
        assert sum(crossing.values()) - crossing["dp"] < 100, crossing  # whether somebody asked to stop
        inside = sum(nbytes for axis, _, nbytes, _ in one["messages"] if axis == "tp")
        assert (inside > 0) == (ranks > 1)
    for host in (0, 1):  # what the ranks of a host send, and what leaves it: headers and acknowledgements
        predicted = sum(one["crossing"] for one in found[host * ranks : (host + 1) * ranks])
        measured = found[host * ranks]["link"]
        print(f"host {host}: predicted {predicted:,.0f} bytes, measured {measured:,}, "
              f"ratio {measured / predicted:.3f}")  # fmt: skip
        assert 1.0 <= measured / predicted < 1.15


def losses(folder: Path, rank: int) -> list[tuple[int, float]]:
    return [tuple(json.loads(line)) for line in (folder / f"loss-{rank}").read_text().splitlines()]


def test_a_killed_rank_and_the_run_goes_on_from_the_checkpoint(
    ran: tuple[Path, str, int], tmp_path: Path
) -> None:
    folder, said, ranks = ran
    assert (folder / "killed").exists()
    assert f"goes on from {folder / 'run' / f'step-{SAVED:08}'}" in said
    found = [json.loads((folder / f"done-{rank}").read_text()) for rank in range(2 * ranks)]
    assert [one[:2] for one in found] == [[STEPS, SAVED]] * 2 * ranks
    for one in found[1:]:  # the seconds of an epoch are each rank's own
        assert [row["loss"] for row in one[2]] == [row["loss"] for row in found[0][2]]
        assert one[3] == found[0][3]

    both = losses(folder, 0)
    assert [step for step, _ in both] == [*range(1, KILLED + 1), *range(SAVED + 1, STEPS + 1)]
    again = dict(both[KILLED:])
    for step, loss in both[SAVED:KILLED]:  # done in both lives
        assert again[step] == loss

    alone = tmp_path / "alone"
    tables = RUN % {"tp": 1, "steps": STEPS, "every": STEPS, "folder": alone}
    run = hpnb.launch(unbroken, tables.replace("batch_size = 2", "batch_size = 4"), ranks=1, device="cpu")[0]
    whole = dict(both)
    assert [whole[step] for step in range(1, STEPS + 1)] == pytest.approx(run.pop("curve"), rel=1e-7)
    assert found[0][3] == pytest.approx(run, rel=1e-7)
    assert found[0][3]["loss"] != pytest.approx(both[0][1], rel=1e-3)  # it has learned


def unbroken(tables: str) -> dict[str, Any]:
    """One process alone, which nobody kills."""
    import tomllib

    from hpnb.hybrid.train_command.run_file import parse
    from hpnb.hybrid.train_command.train import train
    from hpnb.hybrid.training.events import Hook

    curve: list[float] = []

    class Losses(Hook):
        def after_step(self, trainer: Any) -> None:
            curve.append(float(trainer.loss))

    run = train(parse(tomllib.loads(tables)), more=[Losses()])
    return {"curve": curve, **run.final}


# --- which way to the others --------------------------------------------------------------------------------


def test_the_interface_that_leads_to_an_address() -> None:
    assert network_interface.address_towards("127.0.0.1") == "127.0.0.1"
    assert network_interface.address_towards("nowhere.invalid") is None
    if sys.platform == "linux":
        assert network_interface.interface_of("127.0.0.1") == "lo"
    assert network_interface.interface_of("192.0.2.1") is None  # nobody's, by RFC 5737


# --- a store without a past ---------------------------------------------------------------------------------


def live(store: Store, late: dict[int, float], world: int = 3) -> list[Store]:
    """What the ranks of one life get, each in a thread; `late` ones come so many seconds later."""
    found: dict[int, Store] = {}

    def come(rank: int) -> None:
        time.sleep(late.get(rank, 0.0))
        found[rank] = restart_store.fresh(store, rank, world, patience=20.0)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(world)]


def test_ranks_that_are_started_again_find_nothing_of_those_before() -> None:
    store = HashStore()
    for late in ({}, {0: 0.2}, {1: 0.2}, {0: 0.1, 2: 0.3}):  # the ones who come first see what is old
        ranks = live(store, late)
        for rank, own in enumerate(ranks):
            assert not own.check([f"address of {rank}"])
        for rank, own in enumerate(ranks):
            own.set(f"address of {rank}", "mine")
        assert all(own.get(f"address of {rank}") == b"mine" for own in ranks for rank in range(3))


def test_a_life_that_ends_while_it_begins_is_no_obstacle() -> None:
    store = HashStore()
    with pytest.raises(RuntimeError, match=r"rank 1 has waited 0.1 s for all of 3 ranks"):
        restart_store.fresh(store, 1, 3, patience=0.1)
    assert len(live(store, {1: 0.1})) == 3
