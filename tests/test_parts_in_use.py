"""Parts of transformers' models in inference mode, with recorded outputs, and without samples.

pytest tests/test_parts_in_use.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hpnb
from hpnb.models import Anatomy, Part, accept_empty_batch
from hpnb.models.compare_parts import run_parts
from hpnb.models.model_shell import ModelShell


def llama(**options: Any) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50,
            **options,
        )
    )  # fmt: skip


def batch() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 4:] = 0
    return {"input_ids": torch.arange(12).view(2, 6), "attention_mask": mask}


@pytest.mark.parametrize("make", [llama, lambda: hpnb.models.gpt2("laptop")])
def test_parts_train_on_a_batch_that_they_ran_in_inference_mode(make: Any) -> None:
    parts, inputs = hpnb.models.anatomy(make()), batch()
    with torch.inference_mode():
        run_parts(parts, inputs)
    run_parts(parts, inputs).logits.sum().backward()
    with torch.inference_mode():
        run_parts(parts, inputs)


@pytest.mark.parametrize("inference", [False, True])
def test_layers_are_prepared_once_in_a_forward(monkeypatch: pytest.MonkeyPatch, inference: bool) -> None:
    prepared: list[int] = []
    plain = ModelShell._prepare

    def counting(self: Any, *args: Any) -> Any:
        prepared.append(1)
        return plain(self, *args)

    monkeypatch.setattr(ModelShell, "_prepare", counting)
    model = llama()
    parts = hpnb.models.anatomy(model)
    with torch.inference_mode() if inference else torch.no_grad():
        inputs = batch()
        run_parts(parts, inputs)
        assert len(prepared) == 1
        inputs["attention_mask"][0, 2:] = 0  # the same tensor, other values
        torch.testing.assert_close(run_parts(parts, inputs).logits, model(**inputs).logits)
        assert len(prepared) == 2


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_parts_record_no_outputs_of_layers_that_did_not_run(name: str) -> None:
    model = llama(**{name: True}, attn_implementation="eager")
    outputs = run_parts(hpnb.models.anatomy(model), batch())
    assert outputs.get(name.removeprefix("output_")) is None
    torch.testing.assert_close(outputs.logits, model(**batch()).logits)


class TupleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x), None, {"mean": x.mean(), "states": [x]}


class Parts(Anatomy):
    def embed(self, inputs: Any) -> Any:
        return inputs["x"]

    def run(self, block: Part, hidden: Any, inputs: Any) -> Any:
        return block.module(hidden)[0]

    def finish(self, hidden: Any, inputs: Any) -> Any:
        return hidden


def test_a_block_that_returns_a_tuple_takes_an_empty_batch() -> None:
    block = TupleBlock()
    accept_empty_batch(Parts((), (Part("block", block),), ()))
    hidden, nothing, more = block(torch.zeros(0, 3, 4))
    assert hidden.shape == more["states"][0].shape == (0, 3, 4)
    assert nothing is None
    assert more["mean"].dim() == 0
    hidden.sum().backward()
    assert block.linear.weight.grad is not None
