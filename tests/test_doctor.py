"""The doctor's judgement on machines that are not at hand, and its page on the one that is."""

from __future__ import annotations

import dataclasses
import getpass
import os
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from hpnb.__main__ import main
from hpnb.doctor import (
    Gpu,
    Machine,
    find_problems,
    format_report,
    gpus,
    inspect_machine,
    parse_topology,
    plan_launch,
)
from hpnb.doctor.machine import anonymous
from hpnb.doctor.problems import OLDEST
from hpnb.doctor.report import WIDTH
from hpnb.ranks import DeviceChoice, choose_device, devices

GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0), bf16=True, free=79 * GIB)
T4 = Gpu("Tesla T4", 15 * GIB, (7, 5), bf16=False, free=14 * GIB)
VERSIONS = (
    ("torch", "2.13.0+cu130"),
    ("torchvision", "0.28.0"),
    ("transformers", "5.20.0"),
    ("datasets", "4.4.0"),
    ("matplotlib", "3.10.0"),
    ("ipywidgets", "8.1.7"),
    ("jupyterlab", "4.4.0"),
)
LAPTOP = Machine(
    system="Linux 6.8.0, x86_64",
    cpu="a processor",
    cores=8,
    usable=8,
    memory=16 * GIB,
    memory_available=12 * GIB,
    shm=8 * GIB,
    shm_free=8 * GIB,
    cuda="CUDA 13.0",
    nccl="2.27.5",
    python="3.12.4",
    versions=VERSIONS,
)

# As a server with four GPUs and two network cards prints it; on a terminal the heading is underlined.
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-31,64-95\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\tSYS\t0-31,64-95\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPIX\t32-63,96-127\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\tNODE\t32-63,96-127\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tSYS\tPIX\tNODE\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""


def with_gpus(*gpus: Gpu, link: str = "NV18", peer: bool = True, cores: int = 64) -> Machine:
    n = len(gpus)
    return dataclasses.replace(
        LAPTOP,
        cores=cores,
        usable=cores,
        gpus=gpus,
        driver_gpus=n,
        links=tuple(tuple("." if i == j else link for j in range(n)) for i in range(n)),
        peers=tuple(tuple(i == j or peer for j in range(n)) for i in range(n)),
    )


def found(machine: Machine, word: str) -> list[str]:
    """The levels of the problems that mention `word`."""
    return [problem.level for problem in find_problems(machine) if word in problem.what]


# --- plans -----------------------------------------------------------------------------------------


def test_a_laptop_shares_its_cores_out_and_says_when_there_are_too_few() -> None:
    assert plan_launch(LAPTOP, 2) == DeviceChoice(2, "cpu", "gloo", threads=2, reason="no GPU here")
    assert plan_launch(LAPTOP, 8) == DeviceChoice(8, "cpu", "gloo", threads=1, reason="no GPU here")
    assert "on the clock" not in format_report(LAPTOP)
    page = format_report(dataclasses.replace(LAPTOP, usable=2))
    assert "2 ranks       CPU over gloo, 1 thread each (no GPU here)\n" in page
    shared = "4 ranks CPU over gloo, 1 thread each (no GPU here); they share 2 cores, so times on the clock"
    assert shared in " ".join(page.split())


def planned(machine: Machine, ranks: int) -> tuple[str, str, int]:
    choice = plan_launch(machine, ranks)
    return choice.device, choice.name, choice.threads


def test_ranks_share_one_gpu() -> None:
    machine = with_gpus(H100, cores=16)
    assert planned(machine, 2) == ("cuda", "CUDA IPC", 4)
    assert found(machine, "share") == ["note"]
    assert "each action is timed alone" in " ".join(format_report(machine).split())


def test_four_gpus_take_up_to_four_ranks() -> None:
    machine = with_gpus(*[H100] * 4)
    assert find_problems(machine) == []
    assert planned(machine, 4) == ("cuda", "NCCL", 8)
    assert planned(machine, 8) == ("cuda", "CUDA IPC and CPU memory", 4)
    over, why = "GPUs over CUDA IPC and CPU memory, 4 threads each", "8 ranks share the 4 GPUs here, up to 2"
    assert f"8 ranks {over} ({why} on each)" in " ".join(format_report(machine).split())
    assert "every pair: NV18 (NVLink, 18 lanes)" in format_report(machine)
    assert "4 x NVIDIA H100 80GB HBM3, 80.0 GiB, compute capability 9.0, bf16" in format_report(machine)


@pytest.mark.parametrize("gpus", [0, 1, 2, 4])
@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (6, 3), (64, 32), (64, 3)])
def test_the_plan_is_what_launch_will_choose(
    gpus: int, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(devices, "usable_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    machine = dataclasses.replace(with_gpus(*[H100] * gpus, cores=cores), threads=threads)
    for ranks in range(1, 9):
        assert plan_launch(machine, ranks) == choose_device("auto", ranks)


# --- problems --------------------------------------------------------------------------------------


def test_a_good_machine_has_no_problem() -> None:
    assert find_problems(LAPTOP) == []
    assert format_report(LAPTOP).splitlines()[-1].strip() == "nothing"


@pytest.mark.parametrize(("name", "old"), [("torch", "2.10.1+cu128"), ("transformers", "5.16.4")])
def test_old_versions_stop_hpnb(name: str, old: str) -> None:
    machine = dataclasses.replace(LAPTOP, versions=tuple({**dict(VERSIONS), name: old}.items()))
    (problem,) = find_problems(machine)
    assert problem.level == "problem"
    assert f"{name} {old} is older" in problem.what
    assert f"{name}>=" in problem.remedy
    assert "cannot run here yet: 1 problem" in format_report(machine)


def test_missing_packages_stop_hpnb_unless_it_can_do_without() -> None:
    missing = ("datasets", "jupyterlab", "torchvision")
    machine = dataclasses.replace(LAPTOP, versions=tuple((name, None) for name in missing))
    assert [(p.level, p.what.split()[0]) for p in find_problems(machine)] == [
        ("problem", "torchvision"),
        ("note", "datasets"),
        ("note", "jupyterlab"),
    ]


def test_the_oldest_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for name, oldest in OLDEST.items():
        assert f"{name}>={'.'.join(map(str, oldest))}" in project["dependencies"]


def test_tiny_shared_memory_is_a_note_on_a_cpu_and_stops_nccl() -> None:
    docker = 64 * 2**20
    assert found(dataclasses.replace(LAPTOP, shm=docker), "/dev/shm has 64 MiB") == ["note"]
    assert found(dataclasses.replace(with_gpus(H100, H100), shm=docker), "/dev/shm") == ["note"]
    assert found(dataclasses.replace(with_gpus(H100, H100), shm=docker // 2), "/dev/shm") == ["problem"]
    assert found(dataclasses.replace(LAPTOP, shm=None), "/dev/shm") == []


def test_little_memory() -> None:
    assert found(dataclasses.replace(LAPTOP, memory_available=3 * GIB), "3.0 GiB of memory") == ["note"]
    assert found(dataclasses.replace(LAPTOP, memory_available=GIB // 2), "512 MiB of memory") == ["problem"]


def test_what_else_stops_hpnb() -> None:
    assert found(dataclasses.replace(LAPTOP, can_fork=False), "fork") == ["problem"]
    assert found(dataclasses.replace(LAPTOP, gloo=False), "gloo") == ["problem"]
    assert found(dataclasses.replace(with_gpus(H100, H100), nccl=None), "NCCL") == ["problem"]
    broken = dataclasses.replace(H100, fault="out of memory")
    assert found(with_gpus(H100, broken), "GPU 1 (NVIDIA H100 80GB HBM3) fails") == ["problem"]
    assert found(with_gpus(broken), "GPU 0 (NVIDIA H100 80GB HBM3) fails") == ["problem"]


def test_what_is_only_worth_a_note() -> None:
    assert found(with_gpus(T4, T4), "bf16") == ["note"]
    assert found(with_gpus(H100, T4), "differ") == ["note"]
    assert found(with_gpus(*[H100] * 4, link="SYS", peer=False), "6 pairs of GPUs") == ["note"]
    assert found(with_gpus(H100, dataclasses.replace(H100, free=GIB)), "GPU 1: 1.0 GiB") == ["note"]
    environment = (("CUDA_LAUNCH_BLOCKING", "1"), ("NCCL_DEBUG", "info"), ("NCCL_P2P_DISABLE", "0"))
    machine = dataclasses.replace(LAPTOP, environment=environment)
    assert [p.what.split()[0] for p in find_problems(machine)] == ["CUDA_LAUNCH_BLOCKING", "NCCL_DEBUG"]


def test_variables_with_which_no_rank_starts() -> None:
    """An interface that does not exist, and a memory limit that is no number."""
    interfaces = ("lo", "eth0")
    wrong = (("GLOO_SOCKET_IFNAME", "eth0,ib7"), ("HPNB_GPU_MEMORY_GB", "abc"))
    machine = dataclasses.replace(LAPTOP, environment=wrong, interfaces=interfaces, gpus=(H100, H100))
    network, memory = (p for p in find_problems(machine) if p.level == "problem")
    assert "no network interface ib7" in network.what
    assert "lo, eth0" in network.remedy
    assert "HPNB_GPU_MEMORY_GB='abc' is not a number of gigabytes" in memory.what
    assert [p.level for p in find_problems(dataclasses.replace(machine, gpus=()))] == ["problem", "note"]
    right = (("GLOO_SOCKET_IFNAME", "eth0"), ("HPNB_GPU_MEMORY_GB", "15"))
    assert not find_problems(dataclasses.replace(LAPTOP, environment=right, interfaces=interfaces))
    assert "lo" in inspect_machine().interfaces or sys.platform != "linux"


def test_gpus_that_torch_does_not_use_are_explained() -> None:
    idle = dataclasses.replace(LAPTOP, driver_gpus=2)
    assert found(dataclasses.replace(idle, cuda=None), "built for the CPU") == ["note"]
    assert found(dataclasses.replace(idle, environment=(("CUDA_VISIBLE_DEVICES", ""),)), "hides") == ["note"]
    assert found(idle, "torch cannot use them") == ["note"]


# --- reading ---------------------------------------------------------------------------------------


def test_topology_of_four_gpus_on_nvlink() -> None:
    links = parse_topology(TOPOLOGY)
    assert links == {(i, j): "NV18" for i in range(4) for j in range(4) if i != j}


def test_topology_of_two_islands() -> None:
    text = """\
\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tSYS\t0-11\t0
GPU1\tNV4\t X \tSYS\t0-11\t0
GPU2\tSYS\tSYS\t X \t12-23\t1
"""
    links = parse_topology(text)
    assert (links[0, 1], links[1, 0], links[0, 2], links[2, 1]) == ("NV4", "NV4", "SYS", "SYS")


@pytest.mark.parametrize("text", ["", "No devices were found\n", "GPU0", "\n\n", "GPU0\tGPU1\nGPU0"])
def test_what_is_no_topology_says_nothing(text: str) -> None:
    assert parse_topology(text) == {}


def test_links_follow_the_numbers_that_torch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES=2,0 makes the driver's GPU 2 torch's GPU 0; an unnumbered one is left to torch."""
    text = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tPHB\tNV2\nGPU1\tPHB\t X \tSYS\nGPU2\tNV2\tSYS\t X \n"
    numbers = "0, GPU-a\n1, GPU-b\n2, GPU-c\n"

    def run_tool(*command: str) -> list[str]:
        return (text if "topo" in command else numbers).splitlines()

    monkeypatch.setattr(gpus, "run_tool", run_tool)
    peers = ((True, True, False), (True, True, False), (False, False, True))
    three = tuple(dataclasses.replace(H100, uuid=uuid) for uuid in ("c", "GPU-a", ""))
    assert gpus.links_between(three, peers) == (
        (".", "NV2", "host"),
        ("NV2", ".", "host"),
        ("host", "host", "."),
    )


def test_a_missing_or_failing_tool_says_nothing() -> None:
    assert gpus.run_tool("no-such-tool-here", "-m") == []
    assert gpus.run_tool(sys.executable, "-c", "print(1); raise SystemExit(3)") == []
    assert gpus.run_tool(sys.executable, "-c", "import time; time.sleep(60)", timeout=0.2) == []


def test_a_child_that_cannot_answer_leaves_faulty_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gpus, "run_tool", lambda *command, timeout=20.0: [])
    machine = inspect_machine()
    assert found(machine, "CUDA does not start") == ["problem", "problem"]
    assert machine.links == ()
    format_report(machine)


def test_inspecting_leaves_cuda_alone() -> None:
    inspect_machine()
    assert not torch.cuda.is_initialized()


def test_values_lose_the_names_of_user_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "engine1")
    monkeypatch.setattr(Path, "home", lambda: Path("/h/ada"))
    assert anonymous("/h/ada/topo.xml") == "~/topo.xml"
    assert anonymous("engine1:8000,ada,adamant") == "<host>:8000,<user>,adamant"


# --- the page --------------------------------------------------------------------------------------


def test_the_worst_machine_still_fits_the_width() -> None:
    broken = [
        dataclasses.replace(T4, name=f"GPU of kind {k}", fault="no kernel image " * 9) for k in range(8)
    ]
    links = tuple(tuple("." if i == j else ("NV4", "SYS")[(i + j) % 2] for j in range(8)) for i in range(8))
    machine = dataclasses.replace(
        with_gpus(*broken, peer=False, cores=2),
        links=links,
        cpu="a processor with a long name " * 9,
        memory_available=0,
        shm=0,
        gloo=False,
        nccl=None,
        can_fork=False,
        versions=tuple((name, None) for name, _ in VERSIONS),
        environment=tuple((f"NCCL_VARIABLE_{k}", "value " * 40) for k in range(40)),
    )
    lines = format_report(machine).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[-1].strip().startswith("hpnb cannot run here yet")


def test_mixed_links_are_a_matrix_up_to_eight_gpus_and_a_count_beyond() -> None:
    def link(i: int, j: int) -> str:
        return "." if i == j else "NV4" if i // 2 == j // 2 else "SYS"

    def links(n: int) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(link(i, j) for j in range(n)) for i in range(n))

    four = format_report(dataclasses.replace(with_gpus(*[H100] * 4), links=links(4)))
    assert "GPU0    . NV4 SYS SYS" in four
    assert "GPU3  SYS SYS NV4   ." in four
    assert "112 pairs: SYS (from socket to socket)" in format_report(
        dataclasses.replace(with_gpus(*[H100] * 16), links=links(16))
    )


def test_the_command_prints_this_machine_on_one_page(capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    printed = capfd.readouterr()
    lines = printed.out.splitlines()
    assert printed.err == ""
    assert lines[0] == "hpnb doctor"
    assert len(lines) <= 60
    assert max(map(len, lines)) <= WIDTH
    assert code == int("cannot run here yet" in lines[-1])
    sections = ("This machine", "Versions", "Environment", 'What device="auto" will use', "What is wrong")
    assert [line for line in lines if line in sections] == list(sections)
    assert not {socket.gethostname(), os.path.expanduser("~")} & set(printed.out.split())


def test_no_command_prints_help() -> None:
    done = subprocess.run([sys.executable, "-m", "hpnb"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0
    assert "doctor" in done.stdout


def test_a_reader_that_stops_reading_ends_a_command_without_a_traceback() -> None:
    command = f"{{ sleep 0.5; {sys.executable} -m hpnb; echo $? >&2; }} | true"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200, env=environ)
    assert done.stderr.split() == [str(128 + signal.SIGPIPE)]
