"""Ctrl-C and SIGTERM to the program that runs ranks: a fit that saves does so first; what else runs ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from preloaded_python import Program
from torch import nn

import hpnb
from hpnb.hybrid.training.run_state import TrainingState
from hpnb.ranks import stop_request

STOPPED = "hpnb: the fit stops after this step, the next one or this evaluation, with a checkpoint"


class Slow(hpnb.Hook):
    """Takes its time, and says in a file that the second step has begun."""

    def __init__(self, begun: Path) -> None:
        self.begun = begun

    def before_step(self, trainer: TrainingState) -> None:
        time.sleep(0.1)
        if trainer.step == 1:
            self.begun.touch()


def loss(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(outputs, batch[1])


def fit(path: Path, saves: bool = True, epochs: int = 500) -> int:
    """Steps that were done; two an epoch on two ranks."""
    torch.manual_seed(0)
    plugin = hpnb.TorchDDPPlugin("fp32")
    booster, model = hpnb.Booster(plugin=plugin), nn.Linear(4, 3)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hooks = [Slow(path / "begun"), *([hpnb.CheckpointHook(path / "saved", every=10_000)] if saves else [])]
    trainer = hpnb.Trainer(booster, boosted, optimizer, loss, hooks=hooks, display_progress=False)
    trainer.resume(path / "saved", missing_ok=True)
    trainer.fit(plugin.prepare_dataloader([(torch.ones(4), n % 3) for n in range(4)], 1), epochs)
    return trainer.step


def fit_and_catch(path: Path) -> str:
    try:
        return f"{fit(path)} steps"
    except SystemExit as stopped:
        return str(stopped)


def saved_steps(path: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in (path / "saved").glob("step-*")]


def after(file: Path, act: Callable[[], Any]) -> threading.Thread:
    """Act in another thread once the file is there."""

    def wait() -> None:
        while not file.exists():
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("number", "group", "saves"),
    [(signal.SIGTERM, True, True), (signal.SIGINT, True, True), (signal.SIGTERM, False, False)],
    ids=["SIGTERM", "Ctrl-C", "SIGTERM without a checkpoint"],
)
def test_a_signal_to_a_program_that_launches(
    tmp_path: Path, number: signal.Signals, group: bool, saves: bool
) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "import hpnb; from test_ranks_stop import fit\n"
        "hpnb.launch(fit, Path(sys.argv[2]), bool(int(sys.argv[3])), ranks=2, device='cpu')\n"
    )
    script = tmp_path / "program.py"
    script.write_text(code)
    program = Program(script, str(Path(__file__).parent), str(tmp_path), str(int(saves)))
    send = os.killpg if group else os.kill
    after(tmp_path / "begun", lambda: (send(program.pid, number), send(program.pid, signal.SIGTERM)))
    said = program.communicate(timeout=120)[1]
    if not saves:
        assert (program.returncode, saved_steps(tmp_path)) == (-signal.SIGTERM, [])
        return
    (step,) = saved_steps(tmp_path)
    assert 2 <= step < 20
    assert STOPPED in said
    if number == signal.SIGTERM:  # and the second one does not end it at once
        assert program.returncode == 128 + signal.SIGTERM
        assert said.endswith(f"hpnb: stopped after step {step}\n")
    else:
        assert program.returncode not in (0, -signal.SIGTERM)
        assert said.endswith(f"RankInterrupt: interrupted; stopped after step {step}\n")


def test_ranks_stay_after_a_fit_that_was_interrupted_and_take_it_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with hpnb.Ranks(2, device="cpu", timeout=120) as ranks:
        after(tmp_path / "begun", interrupt)
        with pytest.raises(hpnb.RankInterrupt, match=r"^interrupted; stopped after step \d+$") as caught:
            ranks.run(fit, tmp_path)
        (step,) = saved_steps(tmp_path)
        assert str(caught.value) == f"interrupted; stopped after step {step}"
        assert f"{STOPPED}; a second Ctrl-C or interrupt ends it at once" in capsys.readouterr().err
        done = 2 * (step // 2 + 2)
        assert ranks.run(fit, tmp_path, True, done // 2) == [done] * 2  # nobody asks any more
        again = tmp_path / "again"
        again.mkdir()
        after(again / "begun", interrupt)
        caught_on_ranks = ranks.run(fit_and_catch, again)  # the function has dealt with it
        assert len(set(caught_on_ranks)) == 1
        assert caught_on_ranks[0].startswith("stopped after step")
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_the_second_ctrl_c_ends_ranks_at_once(tmp_path: Path) -> None:
    def announces(path: Path) -> None:
        stop_request.announce(saves=True)
        (path / "begun").touch()
        while not stop_request.is_asked():
            time.sleep(0.01)
        (path / "asked").touch()
        time.sleep(600)  # a step that never ends

    with hpnb.Ranks(2, device="cpu", timeout=120) as ranks:
        after(tmp_path / "begun", interrupt)
        after(tmp_path / "asked", interrupt)
        begun = time.monotonic()
        with pytest.raises(hpnb.RankInterrupt, match="the 2 ranks were stopped"):
            ranks.run(announces, tmp_path)
        assert time.monotonic() - begun < 60
        assert not ranks.alive


def test_what_no_rank_has_looked_at_is_not_lost(tmp_path: Path) -> None:
    def looks_away(path: Path) -> None:
        stop_request.announce(saves=True)
        (path / "begun").touch()
        time.sleep(1)
        stop_request.withdraw()

    with hpnb.Ranks(1, device="cpu", timeout=120) as ranks:
        after(tmp_path / "begun", interrupt)
        with pytest.raises(hpnb.RankInterrupt, match="interrupted"):
            ranks.run(looks_away, tmp_path)


def test_a_handler_of_the_program_stays(tmp_path: Path) -> None:
    """It decides what its signal does, and no rank is asked."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with hpnb.Ranks(1, device="cpu", timeout=120) as ranks:
            after(tmp_path / "begun", lambda: os.kill(os.getpid(), signal.SIGTERM))
            assert ranks.run(fit, tmp_path, True, 3) == [12]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]
