"""A Trainer weighs batches by their targets under context parallelism as one process does.

pytest tests/test_trainer_context.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hpnb


def train(**layout: Any) -> tuple[list[float], float, float]:
    """Losses of two epochs, that of an evaluation, and the sum of |weights|: rows of unequal lengths."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0,
                        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", **layout))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))
    rows = [torch.arange(n) * 7 % 31 for n in (5, 12, 9, 16, 4, 7, 11, 6)]
    collate = hpnb.data.collate_texts(0)
    pairs = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    batches = [collate([{"input_ids": row, "labels": row} for row in pair]) for pair in pairs]
    trainer = hpnb.Trainer(booster, model, optimizer, accumulation=2, display_progress=False)
    losses = [epoch["loss"] for epoch in trainer.fit(batches, epochs=2)]
    weights = float(sum(p.detach().abs().sum() for p in model.parameters()))
    return losses, trainer.evaluate(batches)["loss"], weights


def test_batches_weigh_as_on_one_process() -> None:
    ((losses, evaluated, weights),) = hpnb.launch(train, ranks=1, device="cpu")
    assert losses[1] < losses[0]
    for found in hpnb.launch(train, ranks=2, device="cpu", cp_size=2):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == pytest.approx(evaluated, rel=1e-12)
        assert found[2] == pytest.approx(weights, rel=1e-12)
