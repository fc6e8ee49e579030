"""Files that a plain training loop wrote: loaded where they fit, and what to do with the others is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import hpnb

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def scheduler_of(kind: str, optimizer: torch.optim.Optimizer) -> Any:
    if kind == "OneCycleLR":
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    if kind == "LambdaLR":
        return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    if kind == "SequentialLR":
        parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1, 2), lr_scheduler.CosineAnnealingLR(optimizer, 6)]
        return lr_scheduler.SequentialLR(optimizer, parts, [2])
    return lr_scheduler.StepLR(optimizer, 3)


def load_scheduler(kind: str, file: str) -> tuple[Any, str]:
    """The last epoch and learning rates after a load, and the error."""
    booster, model = hpnb.Booster(plugin=hpnb.TorchDDPPlugin("fp32")), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = scheduler_of(kind, optimizer)
    _, _, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    try:
        booster.load_lr_scheduler(scheduler, file)
    except ValueError as error:
        return scheduler.last_epoch, str(error)
    return (scheduler.last_epoch, scheduler.get_last_lr()), ""


def plain_scheduler(kind: str, file: Path) -> Any:
    scheduler = scheduler_of(kind, torch.optim.SGD(net().parameters(), lr=0.1))
    for _ in range(4):
        scheduler.optimizer.step()
        scheduler.step()
    torch.save(scheduler.state_dict(), file)
    return scheduler.last_epoch, scheduler.get_last_lr()


@pytest.mark.parametrize("kind", ["OneCycleLR", "LambdaLR", "SequentialLR", "StepLR"])
def test_a_plain_scheduler_is_loaded(tmp_path: Path, kind: str) -> None:
    expected = plain_scheduler(kind, tmp_path / "scheduler.pt")
    loads = hpnb.launch(load_scheduler, kind, str(tmp_path / "scheduler.pt"), ranks=2, device="cpu")
    assert loads == [(expected, "")] * 2


def test_another_plain_scheduler_is_refused(tmp_path: Path) -> None:
    plain_scheduler("StepLR", tmp_path / "scheduler.pt")
    [(epoch, message)] = hpnb.launch(
        load_scheduler, "OneCycleLR", str(tmp_path / "scheduler.pt"), ranks=1, device="cpu"
    )
    assert epoch == 0
    assert "the plain state_dict of another lr_scheduler than this OneCycleLR" in message


def load_model(file: str) -> str:
    booster, model = hpnb.Booster(plugin=hpnb.TorchDDPPlugin("fp32")), net()
    boosted, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        booster.load_model(boosted, file)
    except ValueError as error:
        return str(error)
    return ""


FILES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "DDP": (
        lambda state: {f"module.{name}": value for name, value in state.items()},
        "'module.' in front of the model's names is the prefix of a DistributedDataParallel: load a file of "
        "{name.removeprefix('module.'): tensor for name, tensor in state.items()}",
    ),
    "DDP of a compiled model": (
        lambda state: {f"module._orig_mod.{name}": value for name, value in state.items()},
        "'module._orig_mod.' in front of the model's names is the prefix of a wrapper",
    ),
    "a loop's checkpoint": (
        lambda state: {"epoch": 3, "model": state},
        "holds a dict, and not {name: tensor}; its entry 'model' is one",
    ),
    "another model": (lambda state: {**state, "2.weight": state["1.weight"]}, "with its config"),
}


@pytest.mark.parametrize("kind", FILES)
def test_weights_of_a_plain_loop(tmp_path: Path, kind: str) -> None:
    change, expected = FILES[kind]
    torch.save(change(net().state_dict()), tmp_path / "model.pt")
    [message] = hpnb.launch(load_model, str(tmp_path / "model.pt"), ranks=1, device="cpu")
    assert expected in message
