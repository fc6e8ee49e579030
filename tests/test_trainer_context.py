"""A Trainer weighs batches by their targets under context parallelism as one process does.

pytest tests/test_trainer_context.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig

import hpnb
from hpnb.hybrid.training import resuming

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")


class Seen(hpnb.Hook):
    """Targets that a hook sees beside the outputs."""

    def __init__(self) -> None:
        self.count = 0

    def on_outputs(self, trainer: Any, outputs: Any, inputs: Any) -> None:
        logits, labels = outputs["logits"], inputs["labels"]
        assert logits.shape[:2] == labels.shape
        self.count += int(labels[:, 1:].ne(-100).sum() if trainer.causal else labels.ne(-100).sum())


def train(**layout: Any) -> tuple[list[float], dict[str, Any], float, int, int]:
    """Losses of two epochs, an evaluation, the sum of |weights|, targets that a hook saw, and tokens: rows of
    unequal lengths."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0,
                        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    plugin = hpnb.HybridParallelPlugin(precision="fp64", **layout)
    booster = hpnb.Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))
    rows = [torch.arange(n) * 7 % 31 for n in (5, 12, 9, 16, 4, 7, 11, 6)]
    collate = hpnb.data.collate_texts(0)
    pairs = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    batches = [collate([{"input_ids": row, "labels": row} for row in pair]) for pair in pairs]
    speed, seen = hpnb.ThroughputHook("tokens", warmup=0), Seen()
    hooks = [hpnb.AccuracyHook(), *(hpnb.F1Hook(n, f"f1 of {n}") for n in range(31)), speed, seen]
    trainer = hpnb.Trainer(booster, model, optimizer, hooks=hooks, accumulation=2, display_progress=False)
    losses = [epoch["loss"] for epoch in trainer.fit(batches, epochs=2)]
    tokens = int(trainer.role.add_up(speed.sums())[0])  # of the last epoch
    seen.count = 0
    evaluated = trainer.evaluate(batches)
    both = [torch.zeros(()) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(both, torch.tensor(float(seen.count)))
    last = plugin.stage_manager.is_last_stage()
    weights = float(sum(p.detach().abs().sum() for p in model.parameters()))
    return losses, evaluated, weights, int(sum(both)), tokens if last else -1


@pytest.fixture(scope="module")
def alone() -> Any:
    return hpnb.launch(train, ranks=1, device="cpu")[0]


def test_batches_weigh_as_on_one_process(alone: Any) -> None:
    losses, evaluated, weights, *_ = alone
    assert losses[1] < losses[0]
    for found in hpnb.launch(train, ranks=2, device="cpu", cp_size=2):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1]["loss"] == pytest.approx(evaluated["loss"], rel=1e-12)
        assert found[2] == pytest.approx(weights, rel=1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "layout", [{}, {"context_parallel": "ulysses"}, {"pp_size": 2, "num_microbatches": 2}], ids=str
)
def test_accuracy_and_f1_are_those_of_one_process(alone: Any, layout: dict[str, Any]) -> None:
    """Outputs are those of a rank's tokens, and hooks saw the batch of all of them beside these."""
    losses, evaluated, _, targets, tokens = alone
    assert 0 < evaluated["accuracy"] < 1
    assert any(evaluated[f"f1 of {n}"] for n in range(31))
    for found in hpnb.launch(train, ranks=2 * layout.get("pp_size", 1), device="cpu", cp_size=2, **layout):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert {name: value for name, value in found[1].items() if value is not None} == pytest.approx(
            {name: value for name, value in evaluated.items() if value is not None}, rel=1e-12
        )
        assert found[3] == targets
        assert found[4] in (tokens, -1)


def tag(**layout: Any) -> list[tuple[float, float]]:
    """Loss and accuracy of two epochs of a tagger, whose first tokens have targets, too."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(31, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 5)
    ).double()
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", **layout))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))
    ids = torch.arange(36).reshape(4, 9) * 7 % 31
    lengths = torch.tensor([[3], [9], [5], [4]])
    batch = {"input": ids, "labels": (ids % 5).masked_fill(torch.arange(9) >= lengths, -100)}

    def loss(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), inputs["labels"].flatten())

    hooks = [hpnb.AccuracyHook()]
    trainer = hpnb.Trainer(booster, model, optimizer, loss, hooks=hooks, display_progress=False)
    return [(epoch["loss"], epoch["accuracy"]) for epoch in trainer.fit([batch], epochs=2)]


def test_what_a_pipeline_asks_of_its_loss_function_is_no_microbatch() -> None:
    """Its first step calls the function with other labels, which loss and accuracy of that epoch counted."""
    (alone,) = hpnb.launch(tag, ranks=1, device="cpu")
    for found in hpnb.launch(tag, ranks=2, device="cpu", pp_size=2, num_microbatches=2):
        assert found[0] == pytest.approx(alone[0], rel=1e-12)
        assert found[1] == pytest.approx(alone[1], rel=1e-12)


# --- an epoch whose last batch leaves a replica without samples ---------------------------------------------


def train_ragged(kind: str, packed: bool = False, **layout: Any) -> tuple[list[float], float, float]:
    """Losses of two epochs of 5 samples in batches of 4, of an evaluation, and the sum of |weights|."""
    torch.manual_seed(0)
    if kind == "gpt2":
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config: Any = GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=16, **no_dropout)
    else:
        config = LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    config.use_cache = False  # with a cache transformers mixes packed texts
    model = AutoModelForCausalLM.from_config(config).double()
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(5):
        ids = torch.randint(31, (12,), generator=generator)
        samples.append({"input_ids": ids, "labels": ids})
        if packed:
            positions = torch.arange(12)
            samples[-1]["position_ids"] = torch.where(positions < 7, positions, positions - 7)
    plugin = hpnb.HybridParallelPlugin(precision="fp64", **layout)
    booster, loader = hpnb.Booster(plugin=plugin), plugin.prepare_dataloader(samples, 4 // plugin.dp_size)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))
    trainer = hpnb.Trainer(booster, model, optimizer, display_progress=False)
    losses = [epoch["loss"] for epoch in trainer.fit(loader, epochs=2)]
    weights = float(sum(p.detach().abs().sum() for p in model.parameters()))
    return losses, trainer.evaluate(loader)["loss"], weights


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "packed", "layout"),
    [
        ("llama", False, {"cp_size": 2}),
        ("llama", False, {"cp_size": 2, "context_parallel": "ulysses"}),
        ("llama", False, {"cp_size": 2, "context_parallel": "all-gather"}),
        ("llama", False, {"cp_size": 2, "activation_checkpointing": "full"}),
        ("gpt2", False, {"cp_size": 2}),
        ("llama", True, {"cp_size": 2}),
        ("llama", True, {"cp_size": 2, "context_parallel": "ulysses"}),
        ("llama", True, {}),
    ],
    ids=str,
)
def test_a_replica_without_samples_in_the_last_batch(kind: str, packed: bool, layout: dict[str, Any]) -> None:
    (alone,) = hpnb.launch(train_ragged, kind, packed, ranks=1, device="cpu")
    assert alone[0][1] < alone[0][0]
    ranks = 2 * layout.get("cp_size", 1)
    for found in hpnb.launch(train_ragged, kind, packed, ranks=ranks, device="cpu", **layout):
        assert found[0] == pytest.approx(alone[0], rel=1e-12)
        assert found[1] == pytest.approx(alone[1], rel=1e-12)
        assert found[2] == pytest.approx(alone[2], rel=1e-12)


# --- a run that is resumed in the middle of an epoch, with another size of cp -------------------------------


def train_and_save(
    folder: str, own_criterion: bool, resume: str | None = None, **layout: Any
) -> tuple[dict[str, list[float]], list[dict[str, Any]]]:
    """Sums in the checkpoint after 2 of 4 steps, and the history: 13 samples of unequal lengths."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).double()
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(13):
        ids, length = (
            torch.randint(31, (12,), generator=generator),
            torch.randint(2, 13, (), generator=generator),
        )
        mask = torch.arange(12) < length
        samples.append(
            {"input_ids": ids, "labels": ids.masked_fill(~mask, -100), "attention_mask": mask.long()}
        )
    plugin = hpnb.HybridParallelPlugin(precision="fp64", **layout)
    booster, loader = hpnb.Booster(plugin=plugin), plugin.prepare_dataloader(samples, 4 // plugin.dp_size)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hooks = [hpnb.AccuracyHook(), hpnb.CheckpointHook(folder, every=2, keep=9)]
    criterion = sum_over_targets if own_criterion else None
    trainer = hpnb.Trainer(booster, model, optimizer, criterion, hooks=hooks, display_progress=False)
    if resume is not None:
        trainer.resume(resume)
    history = trainer.fit(loader, epochs=1)
    return resuming.read_state(Path(resume or f"{folder}/step-00000002"))["sums"], history


def sum_over_targets(outputs: Any, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of labels that are the next tokens already, as those of a rank of context parallelism are."""
    logits, labels = outputs.logits, inputs["labels"]
    if labels.shape[1] == 12:
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, labels.ne(-100).sum()


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {}, "cp": {"cp_size": 2}, "ulysses": {"cp_size": 2, "context_parallel": "ulysses"},
    "pp": {"pp_size": 2, "num_microbatches": 2}, "cp 4": {"cp_size": 4},
    "cp x pp": {"cp_size": 2, "pp_size": 2, "num_microbatches": 2},
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("own_criterion", [False, True])
@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [("dp", "cp"), ("cp", "dp"), ("cp 4", "pp"), ("ulysses", "cp x pp"), ("cp x pp", "cp 4")],
)
def test_a_resumed_epoch_counts_all_its_targets_alike(
    tmp_path: Path, saved_by: str, resumed_by: str, own_criterion: bool
) -> None:
    """A checkpoint's sums are those of the batch, and not once for each rank that has a shard of it."""
    alone, first, second = (str(tmp_path / name) for name in ("alone", "first", "second"))
    ranks = 4 if {"cp 4", "cp x pp"} & {saved_by, resumed_by} else 2
    ((sums, history),) = hpnb.launch(train_and_save, alone, own_criterion, ranks=1, device="cpu")
    how: dict[str, Any] = {"ranks": ranks, "device": "cpu"}
    saved = hpnb.launch(train_and_save, first, own_criterion, **how, **LAYOUTS[saved_by])[0][0]
    assert saved["loss"] == pytest.approx(sums["loss"], rel=1e-6)  # rotary tables are in float32
    assert saved["accuracy"] == sums["accuracy"]
    checkpoint = f"{first}/step-00000002"
    results = hpnb.launch(train_and_save, second, own_criterion, checkpoint, **how, **LAYOUTS[resumed_by])
    for _, ours in results:
        assert ours[0]["loss"] == pytest.approx(history[0]["loss"], rel=1e-6)
        assert ours[0]["accuracy"] == history[0]["accuracy"]
