"""Launching under torchrun, the coordinator, HybridAdam and schedules of learning rates."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preloaded_python import run_program
from torch import nn

import hpnb
from hpnb import HybridParallelPlugin
from hpnb.hybrid.torchrun.launch_from_torch import launch_from_torch

D = torch.float64
ROOT = Path(__file__).parents[1]
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# --- launch_from_torch ---------------------------------------------------------------------------------

SCRIPT = """
import json, random, sys, warnings
from pathlib import Path
warnings.simplefilter("error")
import numpy, torch, torch.distributed as dist
import hpnb
hpnb.launch_from_torch(config={}, seed=7)
drawn = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
again = []
for _ in range(2):  # a second call seeds anew, and joins nothing
    hpnb.launch_from_torch(seed=7)
    again.append([random.random(), float(numpy.random.rand()), float(torch.rand(()))])
mesh = hpnb.Mesh(hpnb.Layout(dp=hpnb.world_size()))
total = torch.ones((), device=hpnb.device())
dist.all_reduce(total, group=mesh.dp.group)
who = hpnb.DistCoordinator()
who.print_on_master(f"said by {who.rank}")
found = {"rank": hpnb.rank(), "world": hpnb.world_size(), "device": str(hpnb.device()), "total": float(total),
         "drawn": drawn, "again": again, "local": who.local_rank, "backend": dist.get_backend()}
Path(sys.argv[1], f"{hpnb.rank()}.json").write_text(json.dumps(found))
"""


def run_script(folder: Path, text: str, *how: str, **told: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own: `how` comes before it, "{...}" is what it writes to."""
    script = folder / "train.py"
    script.write_text(text)
    environ = {name: value for name, value in os.environ.items() if name not in TOLD}
    environ.update({"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **told})
    if not how:
        return run_program(script, str(folder), folder=folder, environ=environ)
    return subprocess.run(
        [sys.executable, *how, str(script), str(folder)],
        capture_output=True, text=True, timeout=200, env=environ, stdin=subprocess.DEVNULL, cwd=folder,
    )  # fmt: skip


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """One run on two ranks that logs, agrees, and fails; and what its ranks wrote until then."""
    folder = tmp_path_factory.mktemp("torchrun")
    text = LOGS_BEFORE + SCRIPT + LOGS_AFTER + FAILS
    done = run_script(folder, text, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    files = [folder / f"{rank}.json" for rank in (0, 1)]
    assert all(file.exists() for file in files), done.stderr
    return done, [json.loads(file.read_text()) for file in files]


def test_torchrun_gives_ranks_that_agree(
    torchrun: tuple[subprocess.CompletedProcess[str], list[Any]],
) -> None:
    done, found = torchrun
    assert [(f["rank"], f["local"], f["world"], f["device"]) for f in found] == [
        (0, 0, 2, "cpu"),
        (1, 1, 2, "cpu"),
    ]
    assert [f["total"] for f in found] == [2.0, 2.0]
    assert found[0]["drawn"] == found[1]["drawn"]
    assert len(set(found[0]["drawn"])) == 3
    assert found[0]["again"] == found[1]["again"] == [found[0]["drawn"]] * 2
    assert done.stdout.splitlines() == ["said by 0"]


@pytest.mark.gpu
def test_torchrun_gives_each_rank_its_gpu(tmp_path: Path) -> None:
    how = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"
    done = run_script(tmp_path, SCRIPT, *how, CUDA_VISIBLE_DEVICES="0,1")
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [f["device"] for f in found] == ["cuda:0", "cuda:1"]
    assert [f["total"] for f in found] == [2.0, 2.0]
    assert found[0]["drawn"] == found[1]["drawn"]
    assert "destroy_process_group" not in done.stderr  # PyTorch's complaint about a group that was left


@pytest.mark.gpu
def test_one_fused_kernel_steps_weights_on_a_gpu() -> None:
    def both(decoupled: bool) -> float:
        how: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
        model, x = model_and_data()
        model, x = model.to(hpnb.device()), x.to(hpnb.device())
        other = copy.deepcopy(model)
        ours = hpnb.HybridAdam(model.parameters(), adamw_mode=decoupled, **how)
        theirs = KINDS["adamw" if decoupled else "adam"][1](other.parameters(), foreach=True, **how)
        off = apart(train(model, ours, x), train(other, theirs, x))
        assert ours.param_groups[0]["fused"] is True
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))  # moments are shared, counts on the CPU
        model.load_state_dict(other.state_dict())
        return max(off, apart(train(model, ours, x), train(other, theirs, x)))

    for decoupled in (True, False):
        assert max(hpnb.launch(both, decoupled, ranks=2, device="cuda")) < 1e-12


def test_without_torchrun_it_is_one_rank_alone(tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "0.json").read_text())
    assert (found["rank"], found["world"], found["total"], found["backend"]) == (0, 1, 1.0, "gloo")
    assert found["again"][0] == found["drawn"]


def test_another_seed_draws_other_numbers() -> None:
    def draws(seed: int) -> list[float]:
        hpnb.launch_from_torch(seed=seed)
        import random

        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    with hpnb.Ranks(2, device="cpu") as ranks:
        first, second = ranks.run(draws, 1), ranks.run(draws, 2)
        assert first == ranks.run(draws, 1)  # inside a pool's rank it seeds, and the group stays
        assert ranks.run(hpnb.world_size) == [2, 2]
    assert first[0] == first[1]
    assert all(a != b for a, b in zip(first[0], second[0], strict=True))


REFUSED = """
import os
import hpnb

def refuse(call, **told):
    os.environ.update(told)
    try:
        call()
        print("nothing")
    except (RuntimeError, ValueError) as error:
        print(error)
    for name in told:
        del os.environ[name]

refuse(hpnb.DistCoordinator)
refuse(hpnb.launch_from_torch, RANK="0", WORLD_SIZE="2")
refuse(lambda: hpnb.launch_from_torch(backend="nccl"))
refuse(lambda: hpnb.launch_from_torch(backend="mpi"))
refuse(lambda: hpnb.launch_from_torch(seed=-1))
hpnb.launch_from_torch()
refuse(lambda: hpnb.launch_from_torch(backend="nccl"))
"""


def test_what_cannot_be_launched_is_said_in_a_sentence(tmp_path: Path) -> None:
    done = run_script(tmp_path, REFUSED)
    assert done.returncode == 0, done.stderr
    words = ["call hpnb.launch_from_torch() first",
             "the environment has RANK, WORLD_SIZE and lacks LOCAL_RANK, MASTER_ADDR, MASTER_PORT",
             "needs 1 GPUs for the 1 ranks of this machine", "use 'nccl', 'gloo'",
             "seed=-1 must be from 0 to 4294967295", "joined already over"]  # fmt: skip
    for said, word in zip(done.stdout.splitlines(), words, strict=True):
        assert word in said


def test_a_group_that_somebody_else_made_is_used(tmp_path: Path) -> None:
    text = (
        "import torch.distributed as dist, hpnb\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "hpnb.launch_from_torch(backend='gloo')\nprint(hpnb.rank(), hpnb.world_size(), hpnb.device())"
    )
    done = run_script(tmp_path, text)
    assert done.stdout.split() == ["0", "1", "cpu"], done.stderr


# Rank 1 waits in a barrier that rank 0 never enters; torchrun stops it.
FAILS = """
if who.is_master():
    raise RuntimeError("on purpose")
who.block_all()
"""


def test_a_rank_that_fails_ends_the_others(
    torchrun: tuple[subprocess.CompletedProcess[str], list[Any]],
) -> None:
    done, _ = torchrun
    assert done.returncode == 1
    assert "RuntimeError: on purpose" in done.stderr


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"NUM_MICRO_BATCHES": 4, "parallel": {"pipeline": 2, "tensor": {"mode": "2d", "size": 4}},
             "clip_grad_norm": 1.0, "fp16": {"mode": "naive"}},
            "HybridParallelPlugin(pp_size=2, tp_mode='2d', tp_size=4, num_microbatches=4, max_norm=1.0, "
            "precision='fp16')",
        ),
        ({"gradient_accumulation": 16}, "Trainer(accumulation=...)"),
        ("config.py", "config='config.py' is not read"),
    ],
)  # fmt: skip
def test_a_config_that_asks_for_something_is_not_passed_over(config: Any, said: str) -> None:
    with pytest.raises(ValueError, match=r"leave .*out") as told:
        launch_from_torch(config)
    assert said in str(told.value)


def test_a_plugin_is_made_of_a_config_of_the_first_tutorials(tmp_path: Path) -> None:
    """A file with the program's own entries, read as Python reads it."""
    file = tmp_path / "config.py"
    file.write_text(
        "import enum\n"
        "AMP_TYPE = enum.Enum('AMP_TYPE', {'TORCH': 'torch', 'NAIVE': 'naive'})\n"
        "BATCH_SIZE, gradient_accumulation, clip_grad_norm = 256, 16, 1.0\n"
        "fp16 = dict(mode=AMP_TYPE.TORCH, init_scale=2**8)\n"
        "parallel = dict(pipeline=dict(size=2), tensor=dict(mode='2.5d', size=8, depth=2))\n"
        "NUM_MICRO_BATCHES, NUM_CHUNKS = parallel['pipeline']['size'], 2\n"
    )
    plugin = HybridParallelPlugin.from_config(runpy.run_path(str(file)), zero_stage=1)
    assert repr(plugin) == (
        "HybridParallelPlugin(tp_size=8, pp_size=2, zero_stage=1, precision='amp-fp16', num_microbatches=2, "
        "pp_style='interleaved', num_model_chunks=2, max_norm=1.0, tp_mode='2.5d', tp_depth=2, "
        "initial_scale=256)"
    )
    plain = HybridParallelPlugin.from_config({"parallel": {"tensor": {"size": 2, "mode": None}}, "fp16": {}})
    assert repr(plain) == "HybridParallelPlugin(tp_size=2, precision='fp16')"
    for config, said in (
        ({"zero": {}}, "zero_stage"),
        ({"parallel": {"sequence": 2}}, "has sequence; it takes data, pipeline and tensor"),
        ({"parallel": {"tensor": {"side": 2}}}, "tensor has side; it takes size, mode, depth"),
        ({"fp16": {"loss_scale": 8}}, "fp16 has loss_scale; it takes init_scale"),
    ):
        with pytest.raises(ValueError, match=said):
            HybridParallelPlugin.from_config(config)


# --- DistCoordinator -------------------------------------------------------------------------------------


def test_the_coordinator_knows_who_is_who() -> None:
    def ask() -> dict[str, Any]:
        who = hpnb.DistCoordinator()
        log: list[int] = []

        @who.on_master_only()
        def note(value: int) -> int:
            """A docstring."""
            log.append(value)
            return value + 1

        mesh = hpnb.Mesh(hpnb.Layout(dp=2, tp=2))
        return {
            "who": (who.rank, who.world_size, who.local_rank),
            "is": (who.is_master(), who.is_node_master(), who.is_last_process()),
            "in tp": (who.is_master(mesh.tp.group), who.is_last_process(mesh.tp.group)),
            "noted": (note(3), log, note.__doc__),
        }

    found = hpnb.launch(ask, ranks=4, device="cpu")
    assert [f["who"] for f in found] == [(r, 4, r) for r in range(4)]
    assert [f["is"] for f in found] == [
        (True, True, False),
        *[(False, False, False)] * 2,
        (False, False, True),
    ]
    assert [f["in tp"] for f in found] == [(True, False), (False, True)] * 2
    assert [f["noted"] for f in found] == [(4, [3], "A docstring."), *[(None, [], "A docstring.")] * 3]


def test_one_rank_goes_first(tmp_path: Path) -> None:
    def go(folder: Path, first: int, fails: bool) -> list[str]:
        import time

        who = hpnb.DistCoordinator()
        try:
            with who.priority_execution(first):
                if who.rank == first:
                    time.sleep(0.3)
                    (folder / f"{first}-{fails}").touch()
                    if fails:
                        raise KeyError("on purpose")
                seen = sorted(path.name for path in folder.iterdir())
        except KeyError:
            seen = ["failed"]
        who.block_all()
        return seen

    with hpnb.Ranks(3, device="cpu") as ranks:
        assert ranks.run(go, tmp_path, 1, False) == [["1-False"]] * 3
        both = ["1-False", "1-True"]
        assert ranks.run(go, tmp_path, 1, True) == [both, ["failed"], both]  # the others are let go
        with pytest.raises(hpnb.RankError, match="executor_rank=3 is not among 3 ranks; use 0 to 2"):
            ranks.run(go, tmp_path, 3, False)


# --- loggers ---------------------------------------------------------------------------------------------

LOGS_BEFORE = """
import logging
import hpnb
noisy, quiet = logging.getLogger("noisy"), logging.getLogger("hpnb.data")
for logger in (noisy, quiet):
    logger.setLevel(logging.INFO)
hpnb.disable_existing_loggers()
assert (noisy.level, quiet.level) == (logging.WARNING, logging.INFO)
logger = hpnb.get_dist_logger()
logger.info("before there are ranks")
"""
LOGS_AFTER = """
logger = hpnb.get_dist_logger()  # the same one: a line is not written twice
logger.info("built in %d s", 3, ranks=[0])
logger.warning("an empty batch", ranks=[1])
logger.debug("too much")
logger.error("on all")
"""


def test_a_logger_says_its_rank_and_keeps_the_others_quiet(
    torchrun: tuple[subprocess.CompletedProcess[str], list[Any]],
) -> None:
    done, _ = torchrun
    pattern = r"\d\d:\d\d:\d\d (INFO|WARNING|ERROR|DEBUG) (.*)"
    lines = sorted(m.group(1, 2) for m in re.finditer(pattern, done.stderr))
    assert lines == [
        ("ERROR", "rank 0: on all"), ("ERROR", "rank 1: on all"),
        ("INFO", "rank 0: before there are ranks"), ("INFO", "rank 0: built in 3 s"),
        ("INFO", "rank 1: before there are ranks"), ("WARNING", "rank 1: an empty batch"),
    ]  # fmt: skip


# --- HybridAdam ------------------------------------------------------------------------------------------


def model_and_data(dtype: torch.dtype = D) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)
    return model, torch.randn(12, 5, dtype=dtype)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, steps: int = 6
) -> list[torch.Tensor]:
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def apart(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


KINDS = {"adamw": (True, torch.optim.AdamW), "adam": (False, torch.optim.Adam)}


@pytest.mark.parametrize("kind", KINDS)
def test_hybrid_adam_is_torchs(kind: str) -> None:
    decoupled, theirs = KINDS[kind]
    model, x = model_and_data()
    other = copy.deepcopy(model)
    how: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    start = [p.detach().clone() for p in model.parameters()]
    ours = train(model, hpnb.HybridAdam(model.parameters(), adamw_mode=decoupled, **how), x)
    wanted = train(other, theirs(other.parameters(), **how), x)
    assert apart(ours, wanted) < 1e-13
    assert apart(wanted, start) > 0.1  # it has moved


def test_the_two_kinds_differ() -> None:
    found = []
    for decoupled in (True, False):
        model, x = model_and_data()
        how = hpnb.HybridAdam(model.parameters(), lr=0.05, weight_decay=0.1, adamw_mode=decoupled)
        found.append(train(model, how, x))
    assert apart(*found) > 1e-3


@pytest.mark.parametrize("decoupled", [True, False])
def test_without_bias_correction_it_is_the_formula(decoupled: bool) -> None:
    model, x = model_and_data()
    other = copy.deepcopy(model)
    lr, b1, b2, eps, decay = 0.05, 0.8, 0.95, 1e-6, 0.1
    options: dict[str, Any] = {"lr": lr, "betas": (b1, b2), "eps": eps, "weight_decay": decay}
    options["adamw_mode"] = decoupled
    optimizer = hpnb.HybridAdam(model.parameters(), bias_correction=False, **options)
    ours = train(model, optimizer, x)

    m = {p: torch.zeros_like(p) for p in other.parameters()}
    v = {p: torch.zeros_like(p) for p in other.parameters()}
    for _ in range(6):
        for p, g in zip(m, torch.autograd.grad(other(x).square().mean(), list(m)), strict=True):
            with torch.no_grad():
                whole = g if decoupled else g + decay * p
                m[p] = b1 * m[p] + (1 - b1) * whole
                v[p] = b2 * v[p] + (1 - b2) * whole**2
                shrunk = p * (1 - lr * decay) if decoupled else p
                p.copy_(shrunk - lr * m[p] / (v[p].sqrt() + eps))
    wanted = [p.detach() for p in other.parameters()]
    assert apart(ours, wanted) < 1e-12
    corrected, x = model_and_data()
    assert apart(train(corrected, hpnb.HybridAdam(corrected.parameters(), **options), x), wanted) > 1e-2


def test_a_gradient_that_lies_otherwise_in_memory_is_read_right() -> None:
    """PyTorch's fused kernel on a CPU goes through memory whatever the strides: it must not be used there."""
    weights = []
    for kind in (hpnb.HybridAdam, torch.optim.AdamW):
        p = nn.Parameter(torch.arange(12, dtype=D).view(3, 4))
        optimizer: torch.optim.Optimizer = kind([p], lr=0.1, weight_decay=0.01)
        for step in range(3):
            g = torch.Generator().manual_seed(step)
            p.grad = (
                torch.randn(4, 3, generator=g, dtype=D).t()
                if step
                else torch.randn(3, 4, generator=g, dtype=D)
            )
            optimizer.step()
            if step < 2 and kind is hpnb.HybridAdam:
                assert optimizer.param_groups[0]["fused"] is (step == 0)
        weights.append(p.detach())
    assert apart(weights[:1], weights[1:]) < 1e-14


def test_a_step_runs_hooks_once_and_takes_a_closure() -> None:
    model, x = model_and_data()
    torch.optim.Adam(model.parameters())  # from here on torch.optim.Adam.step itself runs hooks
    optimizer, calls = hpnb.HybridAdam(model.parameters()), []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert calls == [1, 1]
    assert second.item() < first.item()


def test_its_state_goes_back_and_forth_with_torchs() -> None:
    model, x = model_and_data()
    wanted = train(model, hpnb.HybridAdam(model.parameters(), lr=0.05, weight_decay=0.1), x, 8)
    model, _ = model_and_data()
    ours = hpnb.HybridAdam(model.parameters(), lr=0.05, weight_decay=0.1)
    train(model, ours, x, 3)
    theirs = torch.optim.AdamW(model.parameters(), lr=1.0)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(model, theirs, x, 2)
    back = hpnb.HybridAdam(model.parameters(), lr=1.0)
    back.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert apart(train(model, back, x, 3), wanted) < 1e-13


def test_zero_may_cut_it_anywhere_and_masters_step_it() -> None:
    """Two ranks, 16-bit weights and uneven shares: as one process with torch's AdamW and masters."""

    def zero(name: str, stage: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).bfloat16()
        x = torch.randn(12, 5).bfloat16()
        how: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
        optimizer: torch.optim.Optimizer
        if stage:
            axis = hpnb.Mesh(hpnb.Layout(dp=2)).dp
            optimizer = hpnb.ZeroOptimizer(model.parameters(), hpnb.HybridAdam, axis, stage=stage, **how)
            assert len({len(b.parameters) for b in optimizer.buckets}) == 1
        else:
            optimizer = (hpnb.HybridAdam if name == "ours" else torch.optim.AdamW)(model.parameters(), **how)
            hpnb.precision.Masters(optimizer)
        for _ in range(5):
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
        return [p.detach().float() for p in model.parameters()]

    with hpnb.Ranks(2, device="cpu") as ranks:
        wanted, *_ = ranks.run(zero, "theirs", 0)
        for stage in (0, 1, 2):
            for found in ranks.run(zero, "ours", stage):
                assert apart(found, wanted) < 4e-3  # one bit of bfloat16
    assert hpnb.HybridAdam.elementwise is True


def test_a_disk_is_refused_and_groups_must_agree() -> None:
    model, x = model_and_data()
    with pytest.raises(ValueError, match=r"nvme_offload_fraction=0.5.*cpu_offload=True"):
        hpnb.HybridAdam(model.parameters(), nvme_offload_fraction=0.5, nvme_offload_dir="/tmp")
    groups = [{"params": [p], "bias_correction": i == 0} for i, p in enumerate(model.parameters())]
    with pytest.raises(ValueError, match="5 of 6 groups are without bias correction"):
        train(model, hpnb.HybridAdam(groups), x, 1)


# --- schedules ---------------------------------------------------------------------------------------------


def closed_form(kind: str, k: int, base: float, total: int, warmup: int, least: float) -> float:
    if kind == "cosine":
        if k < warmup:
            return base * (k + 1) / warmup
        return (
            least + (base - least) * (1 + math.cos(math.pi * min(1.0, (k - warmup) / (total - warmup)))) / 2
        )
    if k < warmup:
        return base * (k + 1) / (warmup + 1)
    return base * max(0.0, (total - k) / (total - warmup))


def scheduled(kind: str, optimizer: torch.optim.Optimizer, total: int, warmup: int, least: float) -> Any:
    if kind == "cosine":
        return hpnb.CosineAnnealingWarmupLR(optimizer, total, warmup, eta_min=least)
    return hpnb.LinearWarmupLR(optimizer, total_steps=total, warmup_steps=warmup)


def two_groups() -> torch.optim.Optimizer:
    a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
    return torch.optim.SGD([{"params": [a], "lr": 0.5}, {"params": [b], "lr": 0.02}])


@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.filterwarnings("error")
def test_rates_are_the_closed_form_and_go_on_from_a_state(kind: str, warmup: int) -> None:
    total, least = 11, 0.003
    optimizer = two_groups()
    schedule = scheduled(kind, optimizer, total, warmup, least)
    for k in range(total + 3):
        wanted = [closed_form(kind, k, base, total, warmup, least) for base in (0.5, 0.02)]
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx(wanted, rel=1e-14, abs=1e-17)
        assert schedule.get_last_lr() == [g["lr"] for g in optimizer.param_groups]
        if k == 5:  # taken up by another one
            state, weights = schedule.state_dict(), optimizer.state_dict()
            optimizer = two_groups()
            schedule = scheduled(kind, optimizer, total, warmup, least)
            optimizer.load_state_dict(weights)
            schedule.load_state_dict(json.loads(json.dumps(state)))
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_state_of_checkpoints_before_lambdas_loads(kind: str) -> None:
    """What the schedules kept as subclasses of LRScheduler; they are LambdaLRs of PyTorch now."""
    schedule = scheduled(kind, two_groups(), 11, 4, 0.003)
    assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    state = {"total_steps": 30, "warmup_steps": 2, "base_lrs": [0.5, 0.02], "last_epoch": 7, "_step_count": 8,
             "_get_lr_called_within_step": False, "_last_lr": [0.1, 0.1]}  # fmt: skip
    schedule.load_state_dict(state | ({"eta_min": 0.001} if kind == "cosine" else {}))
    for k in range(8, 33):
        schedule.optimizer.step()
        schedule.step()
        wanted = [closed_form(kind, k, base, 30, 2, 0.001) for base in (0.5, 0.02)]
        assert schedule.get_last_lr() == pytest.approx(wanted, rel=1e-12, abs=1e-15)


def test_the_peak_and_the_end_are_where_they_are_said_to_be() -> None:
    rates: dict[str, list[float]] = {"cosine": [], "linear": []}
    for kind, found in rates.items():
        optimizer = two_groups()
        schedule = scheduled(kind, optimizer, 10, 3, 0.003)
        for _ in range(11):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    assert rates["cosine"][:4] == pytest.approx([0.5 / 3, 1.0 / 3, 0.5, 0.5])
    assert rates["linear"][:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    for found, end in ((rates["cosine"], 0.003), (rates["linear"], 0.0)):
        assert found[10] == end
        assert found[3:] == sorted(found[3:], reverse=True)
        assert found[9] > end  # the last step that counts still learns


@pytest.mark.parametrize(("total", "warmup"), [(0, 0), (5, 6), (5, -1)])
def test_impossible_schedules_are_refused(total: int, warmup: int) -> None:
    for kind in ("cosine", "linear"):
        with pytest.raises(ValueError, match=f"{warmup} steps of warm-up in {total} steps"):
            scheduled(kind, two_groups(), total, warmup, 0.0)
