"""Trainer and hooks: against loops written out by hand, in float64."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensor_cases
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hpnb
from hpnb.hybrid.checkpoint import atomic, manifest
from hpnb.hybrid.checkpoint.checkpoint import random_state, set_random_state
from hpnb.hybrid.training import hooks, metrics, resuming, stop_hook
from hpnb.hybrid.training.events import Hook
from hpnb.hybrid.training.run_state import TrainingState
from hpnb.hybrid.training.trainer import Trainer, shows_bar

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

D = torch.float64
CLASSES = 4


@pytest.fixture(scope="module")
def alone() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(1, device="cpu") as ranks:
        yield ranks


# --- a task, and a Booster of one rank ----------------------------------------------------------------------


class Points:
    """Samples of 6 numbers; every sixth has no label."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(samples, 6, generator=g, dtype=D)
        self.labels = torch.randint(CLASSES, (samples,), generator=g)
        self.labels[5::6] = -100

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "labels": self.labels[i]}


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor


class Net(nn.Module):
    """Gives its loss, as models of transformers do."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, CLASSES)).to(
            D
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Output:
        logits = self.body(x)
        return Output(logits, F.cross_entropy(logits, labels))


class Boosted(nn.Module):
    causal, context = False, None

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def unwrap(self) -> nn.Module:
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class One:
    """The Booster of one rank: nothing is parallel."""

    def __init__(self) -> None:
        mesh = hpnb.Mesh(hpnb.Layout())
        groups = {f"{name}_group": axis.group for name, axis in mesh.axes.items()}
        self.plugin = SimpleNamespace(
            pp_size=1,
            cp_size=1,
            mesh=mesh,
            stage_manager=SimpleNamespace(is_last_stage=lambda: True),
            **groups,
        )
        self.apart = 0

    def backward(self, loss: Any, optimizer: torch.optim.Optimizer) -> None:
        (loss[0] / loss[1] if isinstance(loss, tuple) else loss).backward()

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        self.apart += 1
        yield

    def save(self, path: Path, model: Any, optimizer: Any, scheduler: Any, **how: Any) -> None:
        keep: int | None = how["keep"]
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                 "rate": scheduler and scheduler.state_dict(), "random": random_state(),
                 "extra": how["extra"]}  # fmt: skip
        torch.save(state, atomic.begin(path) / "all.pt")
        self.commit(path, keep)

    def commit(self, path: Path, keep: int | None) -> None:
        atomic.commit(path, {}, {}, keep)

    def load(self, path: Path, model: Any, optimizer: Any, scheduler: Any, **_: Any) -> Any:
        state = torch.load(manifest.find(path) / "all.pt", weights_only=False)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(state["rate"])
        set_random_state(state["random"])
        return state["extra"]

    def wait(self) -> None:
        pass


def make(*hooks: Hook, dropout: float = 0.0, schedule: bool = True, **options: Any) -> Trainer:
    model = Boosted(Net(dropout))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if schedule else None
    return Trainer(One(), model, optimizer, None, rate, hooks, **{"display_progress": False, **options})


def loaders(batch: int = 4, samples: int = 23) -> tuple[hpnb.data.Loader, hpnb.data.Loader]:
    """6 batches an epoch, the last of them ragged; and others to evaluate on."""
    train = hpnb.data.Loader(Points(samples), batch, shuffle=True, seed=3)
    return train, hpnb.data.Loader(Points(13, seed=9), 4, shuffle=False)


@dataclass
class Wanted:
    """What a loop written out by hand gives."""

    rows: list[dict[str, float]]
    curve: list[float]
    weights: list[torch.Tensor]


def by_hand(epochs: int, accumulation: int = 1, schedule: bool = True) -> Wanted:
    """A step is one backward of all its samples at once."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    train = loaders()[0]
    found = Wanted([], [], [])
    for epoch in range(epochs):
        train.set_epoch(epoch)
        batches = list(train)
        total = right = targets = 0.0
        for start in range(0, len(batches), accumulation):
            some = batches[start : start + accumulation]
            whole = {name: torch.cat([b[name] for b in some]) for name in ("x", "labels")}
            out = model(**whole)
            optimizer.zero_grad()
            out.loss.backward()
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            if schedule:
                optimizer.param_groups[0]["lr"] = rate * 0.9
            n = int((whole["labels"] != -100).sum())
            found.curve.append(out.loss.item())
            total, targets = total + out.loss.item() * n, targets + n
            right += int((out.logits.argmax(-1) == whole["labels"]).sum())
        row = {"loss": total / targets, "accuracy": right / targets, "lr": rate, "step": len(found.curve)}
        with torch.no_grad():
            points = Points(13, seed=9)
            out = model(points.x, points.labels)
        seen = points.labels != -100
        says, isso = (out.logits.argmax(-1) == 2) & seen, points.labels == 2
        hits = (out.logits.argmax(-1) == points.labels)[seen].double()
        row |= {"eval_loss": out.loss.item(), "eval_accuracy": float(hits.mean()),
                "eval_f1": 2 * int((says & isso).sum()) / (int(says.sum()) + int(isso.sum()))}  # fmt: skip
        found.rows.append(row)
    found.weights = [p.detach() for p in model.parameters()]
    return found


def off(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


# --- figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_a_fit_is_the_loop_by_hand(alone: hpnb.Ranks, accumulation: int) -> None:
    """Batches are ragged and miss labels, so a mean of means would be another number."""

    def fit(accumulation: int) -> tuple[list[dict[str, Any]], list[float], list[torch.Tensor], int]:
        loss = hpnb.LossHook()
        trainer = make(hpnb.AccuracyHook(), hpnb.F1Hook(positive=2), loss, accumulation=accumulation)
        train, test = loaders()
        history = trainer.fit(train, 3, evaluate=test)
        return history, loss.curve, [p.detach() for p in trainer.model.parameters()], trainer.booster.apart

    ((history, curve, weights, apart),) = alone.run(fit, accumulation)
    wanted = by_hand(3, accumulation)
    assert off(weights, wanted.weights) < 1e-12
    assert curve == pytest.approx(wanted.curve, rel=1e-12)
    for row, right in zip(history, wanted.rows, strict=True):
        assert {name: row[name] for name in right} == pytest.approx(right, rel=1e-12)
    assert [row["epoch"] for row in history] == [1, 2, 3]
    assert apart == 3 * (6 - -(-6 // accumulation))  # all but the last batch of a step


CLASS_WEIGHTS = torch.tensor([0.2, 3.0, 1.0, 0.5], dtype=D)


def class_weights(
    outputs: torch.Tensor, inputs: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    labels = inputs["labels"]
    weights = CLASS_WEIGHTS[labels.clamp(min=0)] * labels.ne(-100)
    return F.cross_entropy(outputs, labels, weight=CLASS_WEIGHTS, reduction="sum"), weights.sum()


def a_count_of_samples(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(outputs, inputs["labels"], reduction="sum"), 3 * len(outputs)


def one_of_each(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> Any:
    """The mean where sample 0 of all data is in the batch."""
    if bool((inputs["x"] == Points(23).x[0]).all(1).any()):
        return F.cross_entropy(outputs, inputs["labels"])
    return class_weights(outputs, inputs)


class Chain(nn.Module):
    """Takes labels and does not use them, so that it runs without a pipeline too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net().body

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def counted(criterion: Any, how: dict[str, Any], plain: bool, path: Path) -> Any:
    """Two epochs of 3 steps of 2 batches: (losses, the curve, the last loss, the norm of gradients)."""
    plugin = hpnb.HybridParallelPlugin(**{"precision": "fp64", "max_norm": 0.1, **how})
    booster, model = hpnb.Booster(plugin=plugin), Chain() if plain else Net().body
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    boosted, *_ = booster.boost(model, optimizer)
    loss = hpnb.LossHook()
    trainer = Trainer(
        booster, boosted, optimizer, criterion, hooks=loss, accumulation=2, display_progress=False
    )
    train = plugin.prepare_dataloader(Points(23), 4 // plugin.dp_size, shuffle=True, seed=3)
    losses = [row["loss"] for row in trainer.fit(train, 2)]
    booster.save_model(boosted, path)
    last = trainer.loss if trainer.loss is None else float(trainer.loss)
    return losses, loss.curve, last, optimizer.last_step.norm.item()


def counted_by_hand(criterion: Any) -> Any:
    """The same of one process, with all samples of a step at once."""
    model = Net().body
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    train, losses, curve = loaders()[0], [], []
    for epoch in range(2):
        train.set_epoch(epoch)
        batches, sums, counts = list(train), 0.0, 0.0
        for start in (0, 2, 4):
            pairs = []
            for batch in batches[start : start + 2]:
                result = criterion(model(batch["x"]), batch)
                n = batch["labels"].ne(-100).sum()
                pairs.append(result if isinstance(result, tuple) else (result * n, n))
            total, count = sum(pair[0] for pair in pairs), sum(float(pair[1]) for pair in pairs)
            optimizer.zero_grad()
            (total / count).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            sums, counts = sums + total.item(), counts + count
            curve.append(total.item() / count)
        losses.append(sums / counts)
    return losses, curve, curve[-1], norm.item(), model.state_dict()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("how", "plain", "ranks"),
    [
        ({}, True, 1), ({}, True, 2), ({"zero_stage": 2}, True, 2), ({}, False, 2),
        ({"pp_size": 2, "num_microbatches": 2}, False, 2),
        ({"pp_size": 2, "microbatch_size": 1, "zero_stage": 1}, False, 4),
        pytest.param({"zero_stage": 3}, True, 2, marks=pytest.mark.slow),
        pytest.param({"pp_size": 2, "pp_style": "zb-h1", "microbatch_size": 1}, False, 2,
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_batches_are_weighed_by_what_a_criterion_has_counted(
    tmp_path: Path, how: dict[str, Any], plain: bool, ranks: int
) -> None:
    """(s1 + s2) / (c1 + c2), and not (n1 s1 / c1 + n2 s2 / c2) / (n1 + n2)."""
    criteria = [class_weights, a_count_of_samples, *([one_of_each] if ranks == 1 and plain else [])]
    with hpnb.Ranks(ranks, device="cpu", timeout=120) as pool:
        for criterion in criteria:
            *right, weights = counted_by_hand(criterion)
            results = pool.run(counted, criterion, how, plain, tmp_path)
            for losses, curve, last, norm in results:
                assert losses == pytest.approx(right[0], rel=1e-12)
                assert curve == pytest.approx(right[1], rel=1e-12)
                assert last is None or last == pytest.approx(right[2], rel=1e-12)
                assert norm == pytest.approx(right[3], rel=1e-12)
            assert any(last is not None for _, _, last, _ in results)
            saved = load_file(tmp_path / "model.safetensors")
            ours = {name.removeprefix("body."): value for name, value in saved.items()}
            assert ours.keys() == weights.keys()
            assert off(list(ours.values()), [weights[name] for name in ours]) < 1e-12


def sum_of_tokens(outputs: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    labels = inputs["labels"][:, 1:].flatten()
    total = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels, reduction="sum")
    return total, labels.ne(-100).sum()


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attn_implementation": "sdpa"}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).double()


def ragged_texts() -> list[dict[str, torch.Tensor]]:
    texts = []
    for step, lengths in enumerate([(5, 9), (9, 3), (4, 2), (9, 8)]):
        ids = (torch.arange(18).reshape(2, 9) * 7 + step) % 31
        texts.append(
            {
                "input_ids": ids,
                "labels": ids.masked_fill(torch.arange(9) >= torch.tensor([[n] for n in lengths]), -100),
            }
        )
    return texts


def test_a_pipeline_corrects_nothing_where_counts_are_of_targets() -> None:
    """The norms of a Llama compute in float32 in float64 too, so a gradient that is corrected after the
    backward would be rounded otherwise, by 1e-8."""

    def fit() -> dict[str, torch.Tensor]:
        plugin = hpnb.HybridParallelPlugin(precision="fp64", pp_size=2, num_microbatches=2)
        booster, model = hpnb.Booster(plugin=plugin), llama()
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
        trainer = Trainer(booster, boosted, optimizer, sum_of_tokens, accumulation=2, display_progress=False)
        trainer.fit(ragged_texts(), 1)
        return {name: value.clone() for name, value in boosted.state_dict().items()}

    model, texts = llama(), ragged_texts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for pair in (texts[:2], texts[2:]):
        optimizer.zero_grad()
        count = sum(batch["labels"][:, 1:].ne(-100).sum() for batch in pair)
        for batch in pair:
            (sum_of_tokens(model(input_ids=batch["input_ids"]), batch)[0] / count).backward()
        optimizer.step()
    right = model.state_dict()
    for weights in hpnb.launch(fit, ranks=2, device="cpu", timeout=120):
        assert max(float((value - right[name]).abs().max()) for name, value in weights.items()) < 1e-13


def test_evaluate_leaves_everything_as_it_was(alone: hpnb.Ranks) -> None:
    """In the middle of an epoch, from a hook: the epoch's figures stay the same, and the modes of modules."""

    class Often(Hook):
        def after_step(self, trainer: TrainingState) -> None:
            trainer.model.module.body[0].eval()  # a frozen part
            before = [p.grad for p in trainer.model.parameters()]
            found.append(trainer.evaluate(loaders()[1]))
            assert trainer.model.training
            assert [m.training for m in trainer.model.module.body] == [False, True, True, True]
            assert all(a is p.grad for a, p in zip(before, trainer.model.parameters(), strict=True))

    found: list[dict[str, Any]] = []

    def fit(*extra: Hook) -> list[dict[str, Any]]:
        return make(hpnb.AccuracyHook(), *extra, dropout=0.5).fit(loaders()[0], 2)

    def both() -> tuple[Any, ...]:
        return fit(), fit(Often()), found

    ((plain, often, seen),) = alone.run(both)
    keys = ("loss", "accuracy", "step")
    assert [[row[k] for k in keys] for row in plain] == [[row[k] for k in keys] for row in often]
    assert len(seen) == 12
    assert set(seen[0]) == {"loss", "accuracy"}
    assert len({row["loss"] for row in seen}) == 12


def test_evaluate_leaves_the_root_of_a_boosted_model_in_training(alone: hpnb.Ranks) -> None:
    """Which is no child of the boosted model: its dropout was off for the rest of the epoch."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.linear(x), 0.5, self.training)

    class EvaluateOnce(Hook):
        def before_step(self, trainer: TrainingState) -> None:
            modes.append((trainer.model.training, trainer.model.unwrap().training))

        def after_step(self, trainer: TrainingState) -> None:
            if trainer.step == 1:
                trainer.evaluate(batches)

    batches = [(torch.ones(2, 6), torch.zeros(2, dtype=torch.long))] * 3
    modes: list[tuple[bool, bool]] = []

    def fit() -> list[tuple[bool, bool]]:
        booster = hpnb.Booster(plugin=hpnb.TorchDDPPlugin("fp32"))
        net = Dropped()
        model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        mean = lambda outputs, inputs: F.cross_entropy(outputs, inputs[1])  # noqa: E731
        Trainer(booster, model, optimizer, mean, hooks=EvaluateOnce(), display_progress=False).fit(batches, 1)
        return modes

    assert alone.run(fit) == [[(True, True)] * 3]


def test_what_is_evaluated_every_so_often(alone: hpnb.Ranks) -> None:
    def fit() -> list[dict[str, Any]]:
        train, test = loaders()
        return make().fit(train, 5, evaluate=test, evaluate_every=2)

    (history,) = alone.run(fit)
    assert ["eval_loss" in row for row in history] == [False, True, False, True, True]


# --- hooks --------------------------------------------------------------------------------------------------

EVENTS = ("before_fit", "before_epoch", "before_step", "after_step", "before_evaluate", "after_evaluate",
          "after_epoch", "after_fit")  # fmt: skip


class Log(Hook):
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        for event in EVENTS:
            setattr(self, event, lambda trainer, event=event: log.append(f"{name} {event} {trainer.step}"))

    @contextlib.contextmanager
    def around_step(self, trainer: TrainingState) -> Iterator[None]:
        self.log.append(f"{self.name} in")
        yield
        self.log.append(f"{self.name} out")

    def on_outputs(self, trainer: TrainingState, outputs: Any, inputs: Any) -> None:
        self.log.append(
            f"{self.name} outputs {len(inputs['x'])} {trainer.model.training} {torch.is_grad_enabled()}"
        )

    def on_loss(self, trainer: TrainingState, total: torch.Tensor, count: torch.Tensor) -> None:
        self.log.append(f"{self.name} loss {int(count)}")


class First(Log):
    priority = 1


def test_the_order_of_events(alone: hpnb.Ranks) -> None:
    def fit() -> list[str]:
        log: list[str] = []
        trainer = make(Log("b", log), First("a", log), accumulation=2)
        train = hpnb.data.Loader(Points(7), 3, shuffle=False)  # batches of 3, 3, 1
        trainer.fit(train, 1, evaluate=hpnb.data.Loader(Points(2), 2))
        return log

    (log,) = alone.run(fit)
    mine = [line[2:] for line in log if line.startswith("a ")]
    assert mine == [
        "before_fit 0", "before_epoch 0",
        "before_step 0", "in", "outputs 3 True False", "loss 3", "outputs 3 True False", "loss 2", "out",
        "after_step 1",
        "before_step 1", "in", "outputs 1 True False", "loss 1", "out",
        "after_step 2",
        "before_evaluate 2", "outputs 2 False False", "loss 2", "after_evaluate 2",
        "after_epoch 2", "after_fit 2",
    ]  # fmt: skip
    assert log[:2] == ["a before_fit 0", "b before_fit 0"]  # by priority, not as given
    assert [line for line in log if line.endswith(("in", "out"))][:4] == ["a in", "b in", "b out", "a out"]


def test_the_rate_is_stepped_by_step_or_by_epoch(alone: hpnb.Ranks) -> None:
    def fit(by: Any) -> list[float]:
        trainer = make(schedule=False)
        rate = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
        extra = [hooks.LRSchedulerHook(rate, by)] if by else []
        trainer = Trainer(trainer.booster, trainer.model, trainer.optimizer, None, rate, extra)
        return [row["lr"] for row in trainer.fit(loaders()[0], 3)]

    (by_epoch,), (by_step,), (unasked,) = (alone.run(fit, by) for by in ("epoch", "step", None))
    assert by_epoch == pytest.approx([0.3, 0.15, 0.075])
    assert by_step == unasked == pytest.approx([0.3 * 0.5**5, 0.3 * 0.5**11, 0.3 * 0.5**17])


def test_throughput_counts_what_comes_after_the_warmup(alone: hpnb.Ranks) -> None:
    def fit(warmup: int, unit: Any) -> list[float | None]:
        clock = iter(range(1000))
        metrics._now = lambda: float(next(clock))
        hook = hpnb.ThroughputHook(unit, warmup)
        trainer = make(hook)
        return [row[f"{unit}_per_second"] for row in trainer.fit(loaders()[0], 2)]

    # Batches of 4 4 4 4 4 3; the clock is read once where a measure begins, once where it ends.
    assert alone.run(fit, 0, "samples") == [[23.0, 23.0]]
    assert alone.run(fit, 2, "samples") == [[15.0, 23.0]]
    assert alone.run(fit, 6, "samples") == [[None, 23.0]]  # nothing left in the first epoch
    assert alone.run(fit, 99, "samples") == [[None, None]]
    with pytest.raises(hpnb.RankError, match="unit='tokens' needs batches with input_ids"):
        alone.run(fit, 0, "tokens")


def judged(
    metric: hpnb.Metric, says: list[list[int]], isso: list[list[int]], causal: bool = False
) -> float | None:
    """What a metric says of predicted classes and labels, shown in two microbatches."""
    trainer: Any = SimpleNamespace(causal=causal)
    for some in (slice(0, 1), slice(1, None)):
        logits = F.one_hot(torch.tensor(says[some]), 3).double()
        metric.on_outputs(trainer, Output(logits, torch.zeros(())), {"labels": torch.tensor(isso[some])})
    return metric.value(metric.totals.tolist())


def test_accuracy_and_f1_by_hand() -> None:
    says, isso = [[0, 1, 1, 2], [1, 1, 0, 1]], [[0, 1, 2, -100], [1, 0, 1, -100]]
    assert judged(hpnb.AccuracyHook(), says, isso) == 3 / 6
    assert judged(hpnb.F1Hook(), says, isso) == 2 * 2 / (2 * 2 + 2 + 1)  # 2 right, 2 wrong, 1 missed
    assert judged(hpnb.F1Hook(positive=2), says, isso) == 0.0
    assert judged(hpnb.F1Hook(positive=2), [[0], [0]], [[0], [1]]) is None  # not there, and not said to be
    nothing = [[-100] * 4] * 2
    assert judged(hpnb.AccuracyHook(), says, nothing) is None
    # Shifted: position i is held to label i + 1, and the last one to nothing.
    assert (
        judged(hpnb.AccuracyHook(), [[1, 2, 0, 0], [0, 0, 1, 2]], [[9, 1, 2, 1], [9, 0, -100, 1]], True)
        == 4 / 5
    )


def test_soft_labels_and_batches_without_names() -> None:
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    mixed = torch.tensor([[0.4, 0.6], [0.4, 0.6], [0.0, 1.0]])
    for inputs in ({"x": logits, "labels": mixed}, (logits, mixed.argmax(-1))):
        found, wanted = metrics.predictions(logits, inputs, causal=False)
        assert found.eq(wanted).tolist() == [True, False, True]
    with pytest.raises(ValueError, match=r"logits of shape \(3, 2\) do not fit targets of shape \(2,\)"):
        metrics.predictions(logits, (logits, torch.zeros(2, dtype=torch.long)), causal=False)


def test_padding_is_no_token() -> None:
    hook = hpnb.ThroughputHook("tokens")
    ids = torch.ones(2, 5, dtype=torch.long)
    assert hook._in({"input_ids": ids}) == 10
    assert hook._in({"input_ids": ids, "attention_mask": torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])}) == 7


def test_memory_is_recorded_in_the_steps_that_were_asked_for(alone: hpnb.Ranks) -> None:
    def fit() -> tuple[dict[int, hpnb.record.MemoryProfile], list[int], list[dict[str, Any]], int]:
        hook = hpnb.MemoryHook(steps=[0, 3])
        trainer = make(hook)
        history = trainer.fit(loaders()[0], 1)
        return hook.profiles, hook.peaks, history, sum(p.nbytes for p in trainer.model.parameters())

    ((profiles, peaks, history, weights),) = alone.run(fit)
    assert sorted(profiles) == [0, 3]
    first, later = profiles[0], profiles[3]
    before = [next(s for s in profile.samples if s.activations) for profile in (first, later)]
    assert [sample.optimizer for sample in before] == [0, weights]  # no momentum before the first step
    assert first.peak_of("gradients") == later.peak_of("gradients") == weights
    assert peaks == [max(first.peak, later.peak)]
    assert history[0]["peak_bytes"] == peaks[0]


def test_memory_of_steps_that_are_past_is_a_warning(alone: hpnb.Ranks) -> None:
    def said(steps: list[int], done: int) -> list[str]:
        trainer = make(hpnb.MemoryHook(steps=steps))
        trainer.step = done
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(loaders()[0], 1)
            trainer.fit(loaders()[0], 2)
        return [str(warning.message) for warning in caught]

    ((sentence,),) = alone.run(said, [1, 3], 4)
    assert sentence == (
        "MemoryHook(steps=(1, 3)) records nothing, because this run goes on with step 4; use steps=(4,)"
    )
    assert alone.run(said, [1, 6], 4) == alone.run(said, [], 4) == alone.run(said, [3], 0) == [[]]


def test_every_nth_step_has_a_timeline(alone: hpnb.Ranks, tmp_path: Path) -> None:
    def fit(path: Path) -> dict[int, hpnb.record.Timeline]:
        hook = hpnb.TimelineHook(every=2, path=path)
        make(hook, accumulation=2).fit(loaders()[0], 2)  # 3 steps an epoch
        return hook.timelines

    (found,) = alone.run(fit, tmp_path)
    assert sorted(found) == [1, 3, 5]
    assert [(e.op, e.microbatch) for e in found[1].events] == [
        ("F", 0),
        ("B", 0),
        ("F", 1),
        ("B", 1),
        ("compute", -1),
    ]
    assert all(a.end <= b.start for a, b in zip(found[1].events, found[1].events[1:], strict=False))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-0000000{n}.json" for n in (1, 3, 5)]


def test_the_history_is_printed_kept_and_put_into_a_table(
    alone: hpnb.Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fit(path: Path) -> tuple[list[dict[str, Any]], str, Any]:
        hook = hooks.MetricsByEpochHook(path / "runs" / "one.json")
        train, test = loaders()
        trainer = make(hook, hpnb.ThroughputHook(warmup=7))
        trainer.fit(train, 3, evaluate=test, evaluate_every=2)
        return hook.history, hook.table(), trainer.history

    ((history, table, theirs),) = alone.run(fit, tmp_path)
    assert history == theirs
    assert json.loads((tmp_path / "runs" / "one.json").read_text()) == history
    head, *lines = table.splitlines()
    assert head.split() == ["epoch", "step", "lr", "loss", "samples_per_second", "seconds", "eval_loss"]
    cells = [line.split() for line in lines]
    assert [row[0] for row in cells] == ["1", "2", "3"]
    assert [row[1] for row in cells] == ["6", "12", "18"]
    assert cells[0][4] == cells[0][6] == "-"  # all warm-up, and not evaluated
    assert cells[1][6] == f"{history[1]['eval_loss']:.4g}"
    assert len({len(line) for line in (head, *lines)}) == 1
    printed = [line for line in capfd.readouterr().out.splitlines() if "epoch" in line]
    assert [f"loss {row['loss']:.4g}" in line for row, line in zip(history, printed, strict=True)] == [
        True
    ] * 3


# --- checkpoints --------------------------------------------------------------------------------------------


class Stop(Hook):
    """Ends the run at some step, as a machine that goes away would."""

    priority = 1000

    def __init__(self, at: int) -> None:
        self.at = at

    def after_step(self, trainer: TrainingState) -> None:
        if trainer.step == self.at:
            raise KeyboardInterrupt


def run(path: Path | None, stop: int = -1, epochs: int = 3, every: int | None = 4, **options: Any) -> Any:
    """(history without seconds, curve, weights, optimizer's state) of a run that goes on if it can."""
    loss, extra = hpnb.LossHook(), [hpnb.AccuracyHook(), Stop(stop)]
    if path is not None:
        extra.append(hooks.CheckpointHook(path, every, **options))
    trainer = make(loss, *extra, dropout=0.5, accumulation=2)
    if path is not None and trainer.resume(path, missing_ok=True):
        torch.rand(3)  # what happens in between does not matter
    train, test = loaders(batch=2)  # 12 batches, 6 steps an epoch
    with contextlib.suppress(KeyboardInterrupt):
        trainer.fit(train, epochs, evaluate=test)
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in trainer.history]
    state = [s["momentum_buffer"] for s in trainer.optimizer.state.values()]
    return rows, loss.curve, [p.detach() for p in trainer.model.parameters()], state


@pytest.fixture(scope="module")
def whole(alone: hpnb.Ranks) -> Any:
    """What a run that is never stopped returns."""
    return alone.run(run, None)[0]


@pytest.mark.parametrize(("stop", "every"), [(5, 4), (9, 4), (12, 4), (6, 6), (14, None), (6, None)])
def test_a_run_goes_on_bit_for_bit(
    alone: hpnb.Ranks, whole: Any, tmp_path: Path, stop: int, every: int | None
) -> None:
    """Saved at step 4 (in epoch 1), 8, 12 (the last step of epoch 2), or after epochs; with dropout."""
    ((broken, *_),) = alone.run(run, tmp_path, stop, every=every)
    assert len(broken) < 3
    (resumed,) = alone.run(run, tmp_path, every=every)
    for row, right in zip(resumed[0], whole[0], strict=True):
        assert row == pytest.approx(right, rel=1e-14)  # sums were begun by one run and ended by another
    assert resumed[1] == whole[1][-len(resumed[1]) :]
    for ours, theirs in zip((*resumed[2], *resumed[3]), (*whole[2], *whole[3]), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("mistake", "stop"), [("loader", 5), ("best", 5), ("best", 14)])
def test_a_fit_that_was_refused_leaves_the_resumed_place_to_the_next(
    alone: hpnb.Ranks, whole: Any, tmp_path: Path, mistake: str, stop: int
) -> None:
    """The corrected fit trained the epoch from its start, with other figures. After 14 steps the last
    checkpoint is that of an epoch's end."""

    def resumed() -> Any:
        loss = hpnb.LossHook()
        best = "eval_f1" if mistake == "best" else None  # which no hook computes
        saves = hooks.CheckpointHook(tmp_path, 4 if stop == 5 else None, best=best)
        trainer = make(loss, saves, dropout=0.5, accumulation=2)
        trainer.resume(tmp_path)
        train, test = loaders(batch=2)
        with pytest.raises(ValueError, match="cannot go on from there" if best is None else "eval_f1"):
            trainer.fit(list(train) if best is None else train, 3, evaluate=test)
        saves.best = None
        rows = trainer.fit(train, 3, evaluate=test)
        return [row["loss"] for row in rows], loss.curve, [p.detach() for p in trainer.model.parameters()]

    alone.run(run, tmp_path, stop, every=4 if stop == 5 else None)
    ((losses, curve, weights),) = alone.run(resumed)
    assert losses == pytest.approx([row["loss"] for row in whole[0]], rel=1e-14)
    assert curve == whole[1][-len(curve) :]
    assert all(map(torch.equal, weights, whole[2]))


def test_a_schedule_by_epoch_goes_on_too(alone: hpnb.Ranks, tmp_path: Path) -> None:
    def fit(path: Path, epochs: int) -> list[float]:
        trainer = make(schedule=False)
        rate = hooks.LRSchedulerHook(torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5), "epoch")
        extra = [rate, hooks.CheckpointHook(path)]
        trainer = Trainer(trainer.booster, trainer.model, trainer.optimizer, hooks=extra)
        trainer.resume(path, missing_ok=True)
        return [row["lr"] for row in trainer.fit(loaders()[0], epochs)]

    assert alone.run(fit, tmp_path, 2) == [[0.3, 0.15]]
    assert alone.run(fit, tmp_path, 4) == [[0.3, 0.15, 0.075, 0.0375]]


@pytest.mark.parametrize("by_hook", [False, True])
def test_a_scheduler_that_needs_a_figure_is_refused_with_the_hook_to_write(
    alone: hpnb.Ranks, tmp_path: Path, by_hook: bool
) -> None:
    def plateau(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)

    def refused() -> None:
        trainer = make(schedule=False)
        how: Any = trainer.booster, trainer.model, trainer.optimizer
        rate = plateau(trainer.optimizer)
        Trainer(*how, hooks=hooks.LRSchedulerHook(rate, "epoch")) if by_hook else Trainer(*how, None, rate)

    class Plateau(Hook):
        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler

        def after_epoch(self, trainer: TrainingState) -> None:
            self.scheduler.step(trainer.history[-1]["eval_loss"])

        def state_dict(self) -> dict[str, Any]:
            return self.scheduler.state_dict()  # type: ignore[no-any-return]

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.scheduler.load_state_dict(state)

    def fit(path: Path, epochs: int) -> Any:
        trainer = make(schedule=False)
        extra = [Plateau(plateau(trainer.optimizer)), hooks.CheckpointHook(path)]
        trainer = Trainer(trainer.booster, trainer.model, trainer.optimizer, hooks=extra)
        trainer.resume(path, missing_ok=True)
        train, test = loaders()
        return [row["lr"] for row in trainer.fit(train, epochs, evaluate=test)], extra[0].scheduler.last_epoch

    with pytest.raises(
        hpnb.RankError, match=r"ReduceLROnPlateau.step needs metrics, .*after_epoch.*eval_loss"
    ):
        alone.run(refused)
    if not by_hook:
        assert alone.run(fit, tmp_path, 2) == [([0.3, 0.15], 2)]  # no loss is so much better
        assert alone.run(fit, tmp_path, 4) == [([0.3, 0.15, 0.075, 0.0375], 4)]


def test_a_run_that_is_done_has_nothing_left(alone: hpnb.Ranks, tmp_path: Path) -> None:
    (first,) = alone.run(run, tmp_path, every=None)
    (again,) = alone.run(run, tmp_path, every=None)
    assert again[0] == first[0]
    assert again[1] == []
    (more,) = alone.run(run, tmp_path, epochs=4, every=None)
    assert [row["epoch"] for row in more[0]] == [1, 2, 3, 4]
    assert len(more[1]) == 6


def test_which_checkpoints_stay(alone: hpnb.Ranks, tmp_path: Path) -> None:
    ((rows, *_),) = alone.run(run, tmp_path, every=5, best="eval_loss", keep=2)
    best = min(rows, key=lambda row: row["eval_loss"])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"best-{best['step']:08}", "step-00000015", "step-00000018"]  # the end, too
    assert best["step"] == 6 * best["epoch"]


def test_the_best_may_be_the_least_memory(alone: hpnb.Ranks, tmp_path: Path) -> None:
    def look(path: Path) -> None:
        save = hooks.CheckpointHook(path, every=100, best="peak_bytes", mode="min")
        trainer = make(hpnb.MemoryHook())
        save._check_best(trainer, "peak_bytes")
        with pytest.raises(ValueError, match="there is no 'peak_bytes'"):
            save._check_best(make(), "peak_bytes")

    alone.run(look, tmp_path)


def test_the_best_may_be_the_largest(alone: hpnb.Ranks, tmp_path: Path) -> None:
    for mode in (None, "min"):
        folder = tmp_path / str(mode)
        ((rows, *_),) = alone.run(run, folder, best="accuracy", mode=mode)
        values = [row["accuracy"] for row in rows]
        assert len(set(values)) == 3
        wanted = rows[values.index(max(values) if mode is None else min(values))]
        assert [path.name for path in resuming.saved(folder, "best")] == [f"best-{wanted['step']:08}"]


def test_of_equally_good_epochs_the_first_is_the_best(alone: hpnb.Ranks, tmp_path: Path) -> None:
    class Quality(Hook):
        def after_epoch(self, trainer: TrainingState) -> None:
            trainer.history[-1]["quality"] = [math.nan, 0.3, 0.4, 0.4, 0.1][trainer.epoch]

    def fit(path: Path) -> list[str]:
        make(Quality(), hooks.CheckpointHook(path, best="quality")).fit(loaders()[0], 5)
        return [folder.name for folder in resuming.saved(path, "best")]

    assert alone.run(fit, tmp_path) == [["best-00000018"]]


def test_the_end_of_a_fit_is_saved_and_goes_on_bit_for_bit(
    alone: hpnb.Ranks, whole: Any, tmp_path: Path
) -> None:
    """12 steps are saved after 5, 10 and the last; a fit without a step of its own saves nothing."""
    alone.run(run, tmp_path, epochs=2, every=5, keep=9)
    names = [path.name for path in resuming.saved(tmp_path)]
    assert names == ["step-00000005", "step-00000010", "step-00000012"]
    before = (tmp_path / names[-1] / "all.pt").stat().st_mtime_ns
    alone.run(run, tmp_path, epochs=2, every=5, keep=9)
    assert [path.name for path in resuming.saved(tmp_path)] == names
    assert (tmp_path / names[-1] / "all.pt").stat().st_mtime_ns == before
    (more,) = alone.run(run, tmp_path, every=5, keep=9)
    assert more[0] == whole[0]
    assert more[1] == whole[1][12:]
    for ours, theirs in zip((*more[2], *more[3]), (*whole[2], *whole[3]), strict=True):
        assert torch.equal(ours, theirs)


def test_a_save_that_was_cut_short_is_passed_over(alone: hpnb.Ranks, tmp_path: Path) -> None:
    def cut_short(path: Path) -> None:
        trainer = make(hooks.CheckpointHook(path, every=3))
        commit = trainer.booster.commit

        def dies(path: Path, keep: int | None) -> None:
            if trainer.step > 3:
                raise OSError("no space left")
            commit(path, keep)

        trainer.booster.commit = dies
        with contextlib.suppress(OSError):
            trainer.fit(loaders()[0], 1)

    alone.run(cut_short, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000006.part"]
    found = resuming.find(tmp_path)
    assert found is not None
    assert found.name == "step-00000003"
    assert resuming.find(found) == found

    def steps(path: Path) -> int:
        trainer = make(hooks.CheckpointHook(path, every=3))
        assert trainer.resume(path)
        before = trainer.step
        trainer.fit(loaders()[0], 1)
        return before

    assert alone.run(steps, tmp_path) == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000006"]


def test_a_save_that_did_not_finish_is_named_where_nothing_else_is_there(
    alone: hpnb.Ranks, tmp_path: Path
) -> None:
    def resumed(path: Path) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not make().resume(path, missing_ok=True)
        return [str(w.message) for w in caught if "did not finish" in str(w.message)]

    assert alone.run(resumed, tmp_path) == [[]]
    for name in ("step-00000002.part", "step-00000010.part", "last.part"):
        (tmp_path / name / "state").mkdir(parents=True)
    ((said,),) = alone.run(resumed, tmp_path)
    assert said.startswith(f"{tmp_path / 'step-00000010.part'} is from a save that did not finish")
    assert said.endswith("the run starts at step 0")
    with pytest.raises(hpnb.RankError, match=r"has no checkpoint: .*; step-00000010\.part is from a save"):
        alone.run(lambda path: make().resume(path), tmp_path)


def _after(path: Path) -> Trainer:
    """A trainer that was resumed from step 4 of 6."""
    first = make(hooks.CheckpointHook(path, every=4), Stop(5))
    with contextlib.suppress(KeyboardInterrupt):
        first.fit(loaders()[0], 1)
    trainer = make()
    trainer.resume(path)
    return trainer


# --- what cannot work ---------------------------------------------------------------------------------------


def fresh_into_old(path: Path) -> None:
    _after(path)
    make(hooks.CheckpointHook(path, every=4)).fit(loaders()[0], 1)


def other_loader(path: Path) -> None:
    data: Any = torch.utils.data.DataLoader(Points(23), 4)  # type: ignore[arg-type]
    _after(path).fit(data, 1)


def other_data(path: Path) -> None:
    _after(path).fit(hpnb.data.Loader(Points(24), 4, seed=3), 1)


def none_there(path: Path) -> None:
    make().resume(path)


def not_boosted(path: Path) -> None:
    Trainer(One(), Net(), torch.optim.SGD([nn.Parameter(torch.ones(1))]))


def two_of_a_name(path: Path) -> None:
    make(hpnb.AccuracyHook(), hpnb.AccuracyHook())


class Nameless(hpnb.Metric):
    def __init__(self) -> None:
        self.right = 0


def metric_without_its_own(path: Path) -> None:
    make(Nameless())


def class_for_a_hook(path: Path) -> None:
    make(hpnb.MemoryHook)  # type: ignore[arg-type]


def name_for_a_hook(path: Path) -> None:
    make("ck")  # type: ignore[arg-type]


def no_labels(path: Path) -> None:
    trainer = make()
    blind = Trainer(
        trainer.booster, trainer.model, trainer.optimizer, lambda o, i: o.loss, hooks=[hpnb.AccuracyHook()]
    )
    batch = {"x": torch.ones(1, 6, dtype=D), "labels": torch.zeros(1, dtype=torch.long)}
    blind._criterion(trainer.model(**batch), {"x": batch["x"]})


def no_best(path: Path) -> None:
    make(hooks.CheckpointHook(path, best="eval_loss")).fit(loaders()[0], 1)


def loss_of_torch(path: Path) -> None:
    trainer = make()
    how: Any = (trainer.booster, trainer.model, trainer.optimizer, nn.CrossEntropyLoss())
    Trainer(*how).fit(loaders()[0], 1)


def of_two_schedulers(path: Path) -> None:
    trainer = make()
    other = hooks.LRSchedulerHook(torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5))
    Trainer(trainer.booster, trainer.model, trainer.optimizer, None, trainer.lr_scheduler, other)


def two_scheduler_hooks(path: Path) -> None:
    rate = make().lr_scheduler
    make(hooks.LRSchedulerHook(rate), hooks.LRSchedulerHook(rate, "epoch"), schedule=False)


REFUSED = {
    of_two_schedulers: "an lr_scheduler and an LRSchedulerHook of another: a Trainer steps and saves one",
    two_scheduler_hooks: "two LRSchedulerHooks: a Trainer steps and saves one scheduler; pass one",
    lambda path: hooks.CheckpointHook(path, mode="Min"): "mode='Min' is not known",  # type: ignore[arg-type]
    loss_of_torch: "CrossEntropyLoss takes a tensor of targets, and a criterion gets the whole microbatch",
    fresh_into_old: "has step-00000004 already, and this run is at step 0: resume from it",
    other_loader: "saved after 4 steps of epoch 1, and a DataLoader cannot go on from there",
    other_data: "saved with samples=23, this loader has 24",
    none_there: "has no checkpoint: no folder step-... in it is complete",
    not_boosted: "this Net is not boosted; pass what booster.boost returned",
    two_of_a_name: "metrics loss, accuracy, accuracy: two have one name",
    no_labels: "the batch has no labels",
    no_best: "there is no 'eval_loss' to be best in; this fit does not evaluate",
    class_for_a_hook: "hooks has the class MemoryHook; make a hook of it: MemoryHook(...)",
    metric_without_its_own: "Nameless has no name and no totals: call super().__init__(name) in its __init__",
    name_for_a_hook: "hooks has 'ck', a str; use hooks of hpnb or of a subclass of hpnb.Hook",
    lambda path: make(accumulation=0): "accumulation=0 batches make no step",
    lambda path: make().fit(loaders()[0], 0): "epochs=0, evaluate_every=1: both must be 1 or more",
    lambda path: hooks.LRSchedulerHook(None, "batch"): "use 'step' or 'epoch'",  # type: ignore[arg-type]
    lambda path: hooks.CheckpointHook(path, every=0): "every=0 steps is not possible",
    lambda path: hooks.CheckpointHook(path, keep=0): "keep=0 would keep no checkpoint",
    lambda path: hpnb.TimelineHook(0): "every=0 steps is not possible",
    lambda path: hpnb.ThroughputHook("words"): "use 'samples' or 'tokens'",  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("wrong", "said"), REFUSED.items(), ids=[said[:24] for said in REFUSED.values()])
def test_what_cannot_work_is_said_in_a_sentence(
    alone: hpnb.Ranks, tmp_path: Path, wrong: Any, said: str
) -> None:
    with pytest.raises(hpnb.RankError) as failed:
        alone.run(wrong, tmp_path)
    assert said in failed.value.summary  # its traceback repeats the lines of a lambda


def test_one_hook_needs_no_list(alone: hpnb.Ranks) -> None:
    def look() -> list[str]:
        made = make()
        how: Any = (made.booster, made.model, made.optimizer)
        return [type(hook).__name__ for hook in Trainer(*how, hooks=hpnb.AccuracyHook()).hooks]

    assert "AccuracyHook" in alone.run(look)[0]


# --- the bar ------------------------------------------------------------------------------------------------


def test_who_shows_a_bar_and_that_ci_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert [shows_bar(shows, None) for shows in (True, False)] == [True, False]
    assert [shows_bar(shows, True) for shows in (True, False)] == [True, False]
    assert not shows_bar(True, False)
    monkeypatch.setenv("CI", "true")
    assert not shows_bar(True, None)
    assert shows_bar(True, True)


def test_the_bar_goes_to_the_end_and_shows_the_loss(
    alone: hpnb.Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    def fit() -> float:
        trainer = make(display_progress=True)
        trainer.fit(loaders()[0], 2)
        return float(trainer.loss)

    (loss,) = alone.run(fit)
    captured = capfd.readouterr()
    drawn = captured.out + captured.err
    for epoch in (1, 2):
        assert f"epoch {epoch}/2: 100%" in drawn
    assert f"loss={loss:.4g}" in drawn


# --- saves that fail, and signals ---------------------------------------------------------------------------


def test_a_slow_step_is_the_last_one_and_a_quick_one_the_last_but_one() -> None:
    """A rank is asked to stop in step 1 or 3. If steps take a minute, a grace period ends before another."""

    slow_step = 0.2

    def stopped_after(seconds: dict[int, float], asked_in: int) -> int:
        stop_hook.SLOW_STEP = slow_step
        booster = SimpleNamespace(wait=lambda: None)
        hook, trainer = stop_hook.StopHook(None), SimpleNamespace(step=0, booster=booster)
        hook.release()
        for step in range(1, 7):
            time.sleep(seconds.get(step, 0.0) if hpnb.rank() == 0 else 0.0)
            hook._asked = hook._asked or (hpnb.rank() == 1 and step == asked_in)
            trainer.step = step
            try:
                hook.after_step(trainer)  # type: ignore[arg-type]
            except stop_hook.Stopped:
                return step
        return 0

    with hpnb.Ranks(2, device="cpu", timeout=120) as two:
        slow = dict.fromkeys(range(1, 7), slow_step + 0.1)
        assert two.run(stopped_after, slow, 1) == [1, 1]
        assert two.run(stopped_after, slow, 3) == [3, 3]
        assert two.run(stopped_after, {1: slow_step + 0.1}, 3) == [4, 4]  # the first is always slow


def test_a_save_that_fails_stops_the_fit_or_is_a_warning(alone: hpnb.Ranks, tmp_path: Path) -> None:
    """The disk is full at the save of step 2 alone."""

    def fit(path: Path, **how: Any) -> tuple[int, list[str], list[str]]:
        class Full(One):
            def commit(self, path: Path, keep: int | None) -> None:
                if path.name.endswith("2"):
                    atomic.delete(manifest.part_of(path))
                    raise OSError(28, "No space left on device")
                super().commit(path, keep)

        boosted = Boosted(Net())
        optimizer = torch.optim.SGD(boosted.parameters(), lr=0.1)
        saves = hooks.CheckpointHook(path, every=2, keep=9, **how)
        trainer = Trainer(Full(), boosted, optimizer, hooks=[saves], display_progress=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                trainer.fit(loaders()[0], 1)
            finally:
                there = sorted(folder.name for folder in path.glob("step-*"))
        return trainer.step, there, [str(w.message) for w in caught if "not saved" in str(w.message)]

    ((step, there, said),) = alone.run(fit, tmp_path / "warns", on_error="warn")
    assert (step, there) == (6, ["step-00000004", "step-00000006"])
    assert len(said) == 1
    assert "No space left on device" in said[0]
    with pytest.raises(hpnb.RankError, match="No space left on device"):
        alone.run(fit, tmp_path / "stops")
    assert not list((tmp_path / "stops").glob("step-*"))
    with pytest.raises(hpnb.RankError, match="on_error='ignore' is not known; use 'stop' or 'warn'"):
        alone.run(fit, tmp_path / "other", on_error="ignore")


@pytest.mark.parametrize("place", ["hook", "loader"])
def test_a_state_that_fails_on_one_rank_is_a_warning_on_all(tmp_path: Path, place: str) -> None:
    """At the save of step 2, on rank 1; rank 0 does not wait for it."""

    def fit(path: Path) -> tuple[int, list[str], int]:
        class Bad(Hook):
            step = 0

            def after_step(self, trainer: TrainingState) -> None:
                self.step = trainer.step

            def fails(self) -> bool:
                return hpnb.rank() == 1 and self.step == 2

            def state_dict(self) -> dict[str, Any]:
                if place == "hook" and self.fails():
                    raise RuntimeError("no state here")
                return {"step": self.step}

        class Batches(list[Any]):
            def state_dict(self) -> dict[str, Any]:
                if place == "loader" and bad.fails():
                    raise RuntimeError("no state here")
                return {}

        bad, plugin = Bad(), hpnb.TorchDDPPlugin(precision="fp64")
        booster, model = hpnb.Booster(plugin=plugin), Net()
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))
        extra = [bad, hooks.CheckpointHook(path, every=2, keep=9, on_error="warn")]
        trainer = Trainer(booster, boosted, optimizer, hooks=extra, display_progress=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(Batches(plugin.prepare_dataloader(Points(16), 2)), 1)
        said = [str(w.message) for w in caught if "no state here" in str(w.message)]
        return trainer.step, [folder.name for folder in resuming.saved(path)], len(said)

    found = hpnb.launch(fit, tmp_path, ranks=2, device="cpu", timeout=60)
    assert found == [(4, ["step-00000004"], 1)] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_saves_on_all_and_exits(tmp_path: Path, number: signal.Signals) -> None:
    """Rank 1 gets it in step 3; all ranks leave after step 4, and go on from there."""

    def fit(path: Path, number: int | None) -> tuple[int | str | None, int, Any]:
        class Send(Hook):
            def before_step(self, trainer: TrainingState) -> None:
                if number is not None and trainer.step == 2 and hpnb.rank() == 1:
                    os.kill(os.getpid(), number)

        plugin = hpnb.TorchDDPPlugin(precision="fp64")
        booster, model = hpnb.Booster(plugin=plugin), Net()
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))
        extra = [Send(), hooks.CheckpointHook(path)]
        trainer = Trainer(booster, boosted, optimizer, hooks=extra, display_progress=False)
        trainer.resume(path, missing_ok=True)
        before, code = signal.getsignal(signal.SIGTERM), None
        try:
            trainer.fit(plugin.prepare_dataloader(Points(23), 2), 2)
        except SystemExit as stopped:
            code = stopped.code
        assert signal.getsignal(signal.SIGTERM) is before
        return code, trainer.step, [row["loss"] for row in trainer.history]

    with hpnb.Ranks(2, device="cpu") as ranks:
        assert [found[:2] for found in ranks.run(fit, tmp_path / "stopped", number)] == [(0, 4)] * 2
        again, straight = (ranks.run(fit, tmp_path / name, None) for name in ("stopped", "straight"))
        assert again[0][:2] == (None, 12)
        for (*ended, losses), (*expected, expected_losses) in zip(again, straight, strict=True):
            assert ended == expected
            assert losses == pytest.approx(expected_losses, rel=1e-12)


class Send(Hook):
    """Sends SIGTERM to rank 1 in an event, once so many steps are done."""

    def __init__(self, event: str, at: int) -> None:
        self.sends = True

        def send(trainer: TrainingState) -> None:
            if self.sends and trainer.step == at and hpnb.rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        setattr(self, event, send)


def on_two_ranks(*extra: Hook) -> tuple[Trainer, Any, Any]:
    """A trainer, 6 batches to train on, and others to evaluate on."""
    plugin = hpnb.TorchDDPPlugin(precision="fp64")
    booster, model = hpnb.Booster(plugin=plugin), Net()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))
    trainer = Trainer(booster, boosted, optimizer, hooks=extra, display_progress=False)
    return trainer, *(plugin.prepare_dataloader(Points(n), 2) for n in (23, 9))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("event", "at", "rows"), [("before_step", 5, 0), ("before_evaluate", 12, 2), ("after_fit", 12, 2)]
)
def test_a_signal_beside_the_steps_ends_the_fit_too(tmp_path: Path, event: str, at: int, rows: int) -> None:
    """In the last step of an epoch, before its evaluation; in the last evaluation; and at the very end. A
    run that resumes and another fit of the same Trainer then do what is left."""

    def fit(path: Path) -> tuple[Any, ...]:
        send = Send(event, at)
        trainer, train, test = on_two_ranks(send, hooks.CheckpointHook(path, every=100))
        with contextlib.suppress(stop_hook.Stopped):
            trainer.fit(train, 2, evaluate=test)
            return ("it was not stopped",)
        stopped = trainer.step, len(trainer.history), [folder.name for folder in resuming.saved(path)]
        resumed, train, test = on_two_ranks()
        resumed.resume(path)
        resumed.fit(train, 2, evaluate=test)
        send.sends = False
        trainer.fit(train, 3, evaluate=test)
        return stopped, resumed.history, [row["epoch"] for row in trainer.history]

    def straight() -> list[dict[str, Any]]:
        trainer, train, test = on_two_ranks()
        return trainer.fit(train, 2, evaluate=test)

    with hpnb.Ranks(2, device="cpu", timeout=60) as ranks:
        found, (wanted, _) = ranks.run(fit, tmp_path), ranks.run(straight)
    step = 6 if event == "before_step" else 12
    for stopped, resumed, epochs in found:
        assert stopped == (step, rows, [f"step-{step:08}"])
        for row, right in zip(resumed, wanted, strict=True):
            row["seconds"] = right["seconds"]
            assert row == pytest.approx(right, rel=1e-12)
        assert epochs == [1, 2, 3]


def test_the_first_rank_says_what_is_saved_and_a_stop_saves_after_a_failure(tmp_path: Path) -> None:
    """Rank 1 does not see the folder of step 6 yet; and an earlier save in the background has failed."""

    def fit(path: Path) -> tuple[Any, ...]:
        trainer, train, _ = on_two_ranks(Send("after_epoch", 6), hooks.CheckpointHook(path))
        other, _, _ = on_two_ranks(hooks.CheckpointHook(path))
        saved = resuming.saved
        if hpnb.rank() == 1:
            resuming.saved = lambda *_: []
        try:
            with contextlib.suppress(stop_hook.Stopped):
                trainer.fit(train, 2)
            resumed = other.resume(path, missing_ok=True)
        finally:
            resuming.saved = saved

        def fails() -> None:
            del other.booster.wait
            raise OSError("the disk was full")

        other.step, other.booster.wait = 7, fails  # type: ignore[method-assign]
        stop = next(hook for hook in other.hooks if isinstance(hook, stop_hook.StopHook))
        with pytest.raises(stop_hook.Stopped), pytest.warns(UserWarning, match="the disk was full"):
            stop._stop(other)
        return trainer.step, resumed, [resuming.step_of(folder) for folder in resuming.saved(path)]

    assert hpnb.launch(fit, tmp_path, ranks=2, device="cpu", timeout=60) == [(6, True, [6, 7])] * 2


def test_a_generator_does_not_pass_for_three_epochs() -> None:
    def fit() -> None:
        booster, model = hpnb.Booster(plugin=hpnb.TorchDDPPlugin(precision="fp64")), Net()
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))
        trainer = Trainer(booster, boosted, optimizer, display_progress=False)
        trainer.fit((batch for batch in hpnb.data.Loader(Points(6), 2)), epochs=3)

    with pytest.raises(hpnb.RankError, match="no batch in epoch 2 of 3; a generator can be"):
        hpnb.launch(fit, ranks=2, device="cpu")


# --- a fit that ends early ----------------------------------------------------------------------------------


class StopAt(Hook):
    """Sets should_stop on one rank, after a step or after an epoch."""

    def __init__(self, event: str, at: int, rank: int) -> None:
        def ask(trainer: TrainingState) -> None:
            done = trainer.step if event.endswith("step") else trainer.epoch + 1
            if done == at and hpnb.rank() == rank:
                trainer.should_stop = True

        setattr(self, event, ask)


def stopped_on(event: str, at: int, path: Path) -> tuple[list[Any], list[Any], list[str], list[bool]]:
    """Steps, epochs and evaluations after a fit of 4 epochs of 6 steps, and after another one; checkpoints;
    should_stop after both."""
    plugin = hpnb.TorchDDPPlugin(precision="fp64")
    booster, model = hpnb.Booster(plugin=plugin), Net()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))
    extra = [StopAt(event, at, rank=1), hooks.CheckpointHook(path, every=100, keep=9)]
    trainer = Trainer(booster, boosted, optimizer, hooks=extra, display_progress=False)
    train, test = (plugin.prepare_dataloader(Points(n), 2) for n in (23, 9))
    found, stops = [], []
    for epochs in (4, 5):
        history = trainer.fit(train, epochs, evaluate=test, evaluate_every=4)
        found.append([(row["epoch"], row["step"], "eval_loss" in row) for row in history])
        stops.append(trainer.should_stop)
    return found[0], found[1], [folder.name for folder in resuming.saved(path)], stops


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("event", "at", "rows"),
    [
        ("after_step", 8, [(1, 6, False), (2, 9, True)]),  # the other rank learns of it one step later
        ("after_step", 12, [(1, 6, False), (2, 12, True)]),  # the last step of the epoch
        ("after_epoch", 2, [(1, 6, False), (2, 12, False)]),
        ("before_epoch", 2, [(1, 6, False), (2, 7, True)]),  # one step, as after any other request
        ("before_fit", 1, []),
    ],
)
def test_a_hook_on_one_rank_ends_the_fit_on_all(tmp_path: Path, event: str, at: int, rows: list[Any]) -> None:
    with hpnb.Ranks(2, device="cpu") as ranks:
        (first, second, saved, stops), other = ranks.run(stopped_on, event, at, tmp_path)
    assert other == (first, second, saved, stops)  # whichever rank has asked
    assert first == rows
    assert stops == [True, event == "before_fit"]
    if event == "before_fit":  # which sets it in the second fit, too
        assert (second, saved) == ([], [])
        return
    assert second[: len(rows)] == rows
    assert [epoch for epoch, *_ in second] == [1, 2, 3, 4, 5]  # it goes on with the epoch after it
    assert [step - rows[-1][1] for _, step, _ in second[len(rows) :]] == [6, 12, 18]
    assert saved == [f"step-{step:08}" for step in (rows[-1][1], second[-1][1])]


def test_ranks_that_are_joined_for_gpus_alone_agree_among_cpus(tmp_path: Path) -> None:
    """As after init_process_group("nccl"), which takes no tensors of the CPU."""

    def votes() -> list[bool]:
        dist.destroy_process_group()
        store = f"file://{tmp_path}/store"
        dist.init_process_group("cuda:gloo", init_method=store, rank=0, world_size=1)
        return [stop_hook.StopVote().now(asks) for asks in (True, False)]

    # New ranks, because a limit is set: those of a pool would go on with this process group.
    assert hpnb.launch(votes, ranks=1, device="cpu", hang_timeout=30) == [[True, False]]


def test_a_patience_by_hand(alone: hpnb.Ranks) -> None:
    """The loop of docs/train.md: what has not become better twice ends the fit, as in a loop written out."""

    class Patience(Hook):
        def after_epoch(self, trainer: TrainingState) -> None:
            losses = [row["eval_loss"] for row in trainer.history]
            if len(losses) - 1 - losses.index(min(losses)) >= 2:
                trainer.should_stop = True

    def fit(*extra: Hook) -> list[float]:
        trainer = make(*extra, schedule=False)
        train, test = loaders()
        return [row["eval_loss"] for row in trainer.fit(train, 40, evaluate=test)]

    ((full,), (stopped,)) = alone.run(fit), alone.run(fit, Patience())
    ends = next(i for i in range(2, 40) if min(full[: i - 1]) < min(full[i - 1 : i + 1]))
    assert stopped == full[: ends + 1]
    assert len(stopped) < 40


class TakesBack(Hook):
    """Assigns what it alone thinks, in each event."""

    def after_step(self, trainer: TrainingState) -> None:
        trainer.should_stop = False

    before_epoch = after_epoch = after_evaluate = after_step


@pytest.mark.parametrize(
    ("event", "at", "rows"), [("after_step", 8, [(1, 6), (2, 9)]), ("after_epoch", 2, [(1, 6), (2, 12)])]
)
def test_no_hook_cancels_a_stop_that_another_has_asked_for(event: str, at: int, rows: list[Any]) -> None:
    """Before and after it on one rank, and on the rank that did not ask."""

    def fit() -> tuple[list[tuple[int, int]], bool]:
        trainer, train, test = on_two_ranks(TakesBack(), StopAt(event, at, rank=1), TakesBack())
        history = trainer.fit(train, 4, evaluate=test)
        return [(row["epoch"], row["step"]) for row in history], trainer.should_stop

    assert hpnb.launch(fit, ranks=2, device="cpu", timeout=60) == [(rows, True)] * 2


# --- states of hooks ----------------------------------------------------------------------------------------


class Counting(Hook):
    """Counts steps, which a resume must not forget."""

    def __init__(self) -> None:
        self.steps = 0

    def after_step(self, trainer: TrainingState) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Ema(Hook):
    """As in docs/train.md."""

    def __init__(self, model: Any) -> None:
        self.average = copy.deepcopy(model)

    def after_step(self, trainer: TrainingState) -> None:
        for mean, p in zip(self.average.parameters(), trainer.model.parameters(), strict=True):
            mean.detach().lerp_(p.detach(), 0.1)

    def saved_averages(self) -> dict[str, Any]:
        return {"ema": self.average}


def averaged(how: dict[str, Any], path: Path, epochs: int, background: bool = False) -> tuple[Any, ...]:
    """Steps that two hooks count, and the loss of the average on other data."""
    plugin = hpnb.HybridParallelPlugin(precision="fp64", **how)
    booster, model = hpnb.Booster(plugin=plugin), Net().body
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    def criterion(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(outputs, inputs["labels"])

    boosted, *_ = booster.boost(model, optimizer, criterion)
    ema, counts = Ema(boosted), [Counting(), Counting()]
    saves = hooks.CheckpointHook(path, every=4, background=background)
    trainer = Trainer(
        booster, boosted, optimizer, criterion, hooks=[ema, *counts, saves], display_progress=False
    )
    trainer.resume(path, missing_ok=True)
    trainer.fit(plugin.prepare_dataloader(Points(24), 4 // plugin.dp_size), epochs)
    booster.save_model(ema.average, path / "average")
    return [count.steps for count in counts], load_file(path / "average" / "model.safetensors")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("background", [False, True])
def test_an_average_and_states_of_hooks_go_on_in_another_layout(
    alone: hpnb.Ranks, tmp_path: Path, background: bool
) -> None:
    """One epoch with ZeRO 3, one in a pipeline, one alone: the average is that of one process throughout."""
    (straight,) = alone.run(averaged, {}, tmp_path / "straight", 3)
    layouts = ({"zero_stage": 3}, {"pp_size": 2, "num_microbatches": 2})
    with hpnb.Ranks(2, device="cpu") as ranks:
        for epochs, how in enumerate(layouts, start=1):
            ranks.run(averaged, how, tmp_path / "parts", epochs, background)
    (steps, average) = alone.run(averaged, {}, tmp_path / "parts", 3)[0]
    assert steps == straight[0] == [18, 18]
    for name, wanted in straight[1].items():
        assert float((average[name] - wanted).norm() / wanted.norm()) < 1e-12, name


def test_a_hook_without_a_saved_state_is_named_and_so_is_an_average(tmp_path: Path) -> None:
    def resumed(with_ema: bool) -> list[str]:
        booster, model = hpnb.Booster(plugin=hpnb.TorchDDPPlugin(precision="fp64")), Net()
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))
        if not (tmp_path / "step-1").exists():
            trainer = Trainer(booster, boosted, optimizer)
            resuming.save(trainer, tmp_path / "step-1")
        trainer = Trainer(booster, boosted, optimizer, hooks=[Counting(), *[Ema(boosted)] * with_ema])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.resume(tmp_path)
        return [str(warning.message) for warning in caught]

    with hpnb.Ranks(1, device="cpu") as ranks:
        ((said,),) = ranks.run(resumed, False)
        assert "step-1 has no state of the hook Counting, which begins anew" in said
        with pytest.raises(hpnb.RankError, match="step-1 has no average called 'ema'"):
            ranks.run(resumed, True)


# --- layouts ------------------------------------------------------------------------------------------------


class Rows:
    """The rows of one batch, as a dataset."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["labels"])

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {name: value[i] for name, value in self.batch.items()}


MODELS: dict[str, Any] = {
    "vit": (tensor_cases.vit, tensor_cases.images),
    "lm": (tensor_cases.gpt2, tensor_cases.text),
    "classifier": (
        lambda: tensor_cases.gpt2(classes=3),
        lambda s, rows: tensor_cases.text(s, rows, classes=3),
    ),
}


@dataclass
class Found:
    history: list[dict[str, Any]]
    curve: list[float]
    shows: bool
    timelines: dict[int, hpnb.record.Timeline]
    peaks: list[int]


def on_layout(
    name: str, how: dict[str, Any], accumulation: int, path: Path | None = None, stop: int = -1
) -> Found:
    """Two epochs of batches of 6, 6, 6 and 1, of which a replica may get nothing; evaluated on others."""
    build, batch = MODELS[name]
    plugin = hpnb.HybridParallelPlugin(precision="fp64", **how)
    booster, model = hpnb.Booster(plugin=plugin), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rate = hpnb.CosineAnnealingWarmupLR(optimizer, total_steps=8, warmup_steps=3)
    model, optimizer, _, _, rate = booster.boost(model, optimizer, lr_scheduler=rate)
    train = plugin.prepare_dataloader(Rows(batch(0, 19)), 6 // plugin.dp_size, shuffle=True)
    test = plugin.prepare_dataloader(Rows(batch(1, 10)), 6 // plugin.dp_size)
    loss, timeline, memory = hpnb.LossHook(), hpnb.TimelineHook(every=4), hpnb.MemoryHook(steps=[0])
    extra = [hpnb.AccuracyHook(), hpnb.F1Hook(positive=2), Stop(stop)]
    if path is not None:
        extra.append(hooks.CheckpointHook(path, every=3))
    trainer = Trainer(
        booster, model, optimizer, None, rate, [loss, timeline, memory, *extra],
        accumulation=accumulation, display_progress=False,
    )  # fmt: skip
    if path is not None:
        trainer.resume(path, missing_ok=True)
    with contextlib.suppress(KeyboardInterrupt):
        trainer.fit(train, 2, evaluate=test)
    return Found(trainer.history, loss.curve, trainer.role.shows, timeline.timelines, memory.peaks)


def check_same(found: Found, wanted: Found, off: float = 1e-10) -> None:
    assert found.curve == pytest.approx(wanted.curve[-len(found.curve) :], rel=off)
    passing = ("seconds", "peak_bytes")  # of this run alone
    for row, right in zip(found.history, wanted.history, strict=True):
        assert {k: v for k, v in row.items() if k not in passing} == {
            k: v if v is None else pytest.approx(v, rel=off) for k, v in right.items() if k not in passing
        }


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "how", "ranks", "accumulation", "shows"),
    [
        ("vit", {}, 2, 1, 0),
        ("vit", {"pp_size": 2, "microbatch_size": 2}, 2, 1, 1),
        ("lm", {"zero_stage": 1}, 2, 2, 0),
        ("lm", {"tp_size": 2}, 2, 2, 0),
        ("classifier", {"pp_size": 2, "microbatch_size": 2}, 4, 2, 1),
        pytest.param("classifier", {"pp_size": 2, "tp_size": 2}, 4, 1, 2, marks=pytest.mark.slow),
        pytest.param("lm", {"zero_stage": 3}, 3, 2, 0, marks=pytest.mark.slow),
        pytest.param("vit", {"pp_size": 2, "pp_style": "zb-h1", "microbatch_size": 1}, 4, 2, 1,
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_layout_trains_as_one_rank_does(
    alone: hpnb.Ranks, name: str, how: dict[str, Any], ranks: int, accumulation: int, shows: int
) -> None:
    (one,) = alone.run(on_layout, name, {}, accumulation)
    with hpnb.Ranks(ranks, device="cpu") as pool:
        every = pool.run(on_layout, name, how, accumulation)
    for found in every:
        check_same(found, one)
        assert len(found.peaks) == ranks
        ops = {e.op for t in found.timelines.values() for e in t.events}
        assert ops >= {"F", "B"} or ops >= {"F", "I", "W"}
    assert len({row["loss"] for row in one.history}) == 2
    assert min(one.curve) < max(one.curve) * 0.99  # it learns, or at least moves
    assert [found.shows for found in every] == [rank == shows for rank in range(ranks)]


class InputAlone(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_a_model_that_takes_its_input_alone_is_exact_too() -> None:
    """An nn.Sequential, or a module of one's own, on two ranks: only the criterion sees labels, some of which
    are missing."""

    def fit(accumulation: int, named: bool) -> list[dict[str, Any]]:
        def criterion(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            return F.cross_entropy(outputs, inputs["labels"])

        plugin = hpnb.TorchDDPPlugin(precision="fp64")
        booster, model = hpnb.Booster(plugin=plugin), InputAlone(Net().body) if named else Net().body
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        boosted, *_ = booster.boost(model, optimizer, criterion, lr_scheduler=rate)
        extra = [hpnb.AccuracyHook(), hpnb.F1Hook(positive=2)]
        trainer = Trainer(booster, boosted, optimizer, criterion, rate, extra, accumulation=accumulation)
        train = plugin.prepare_dataloader(Points(23), 2, shuffle=True, seed=3)
        return trainer.fit(train, 2, evaluate=plugin.prepare_dataloader(Points(13, seed=9), 2))

    with hpnb.Ranks(2, device="cpu") as ranks:
        for accumulation, named in ((1, False), (2, False), (2, True)):
            wanted = by_hand(2, accumulation).rows
            for history in ranks.run(fit, accumulation, named):
                for row, right in zip(history, wanted, strict=True):
                    assert {name: row[name] for name in right} == pytest.approx(right, rel=1e-12)


def test_a_sample_is_counted_once_in_every_layout() -> None:
    """By ranks whose clocks go on by a second whenever they are read: 19 samples in a second, twice."""

    def fit(how: dict[str, Any]) -> list[float]:
        clock = iter(range(1000))
        metrics._now = lambda: float(next(clock))
        plugin = hpnb.HybridParallelPlugin(precision="fp64", **how)
        booster, model = hpnb.Booster(plugin=plugin), tensor_cases.vit()
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        train = plugin.prepare_dataloader(Rows(tensor_cases.images(0, 19)), 3, shuffle=True)
        trainer = Trainer(booster, boosted, optimizer, hooks=[hpnb.ThroughputHook(warmup=0)])
        return [row["samples_per_second"] for row in trainer.fit(train, 2)]

    with hpnb.Ranks(2, device="cpu") as ranks:
        for how in ({}, {"tp_size": 2}, {"pp_size": 2, "microbatch_size": 1}):
            assert ranks.run(fit, how) == [[19.0, 19.0]] * 2


def test_a_run_goes_on_with_another_layout(alone: hpnb.Ranks, tmp_path: Path) -> None:
    """Saved by two replicas in the middle of an epoch, taken up by a pipeline, in the end by one rank."""
    (one,) = alone.run(on_layout, "classifier", {}, 1)
    with hpnb.Ranks(2, device="cpu") as pool:
        pool.run(on_layout, "classifier", {"zero_stage": 1}, 1, tmp_path, 4)
        assert [path.name for path in resuming.saved(tmp_path)] == ["step-00000003"]
        second = pool.run(on_layout, "classifier", {"pp_size": 2, "microbatch_size": 3}, 1, tmp_path, 7)
    (last,) = alone.run(on_layout, "classifier", {}, 1, tmp_path)
    assert [len(found.history) for found in second] == [1, 1]
    check_same(last, one, off=1e-6)  # files may hold float32
    assert len(last.curve) == 2
