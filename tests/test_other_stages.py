"""A rank of a pipeline keeps the weights of its stages, and frees those of the others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hpnb
from hpnb.hybrid import compile_blocks


@pytest.fixture(scope="module")
def two() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(2, device="cpu", timeout=120) as pool:
        yield pool


def names_left_after_a_step(style: str, **knobs: Any) -> list[str]:
    """Parameters of other stages that are alive after a step, although the collector has not come by."""
    compile_blocks.ON_CPUS = "eager"
    gc.disable()
    try:
        plugin = hpnb.HybridParallelPlugin(
            pp_size=2, pp_style=style, num_microbatches=2, precision="fp32", **knobs
        )
        model: Any = hpnb.models.gpt2("laptop")
        refs = {name: weakref.ref(p) for name, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters())
        booster = hpnb.Booster(plugin=plugin)
        boosted, optimizer, *_ = booster.boost(model, optimizer)
        gc.collect(1)  # collections of young objects, which torch.compile asks for, no longer look at it
        del model
        ids = torch.arange(32).reshape(4, 8)
        booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), boosted, None, optimizer)
        here = {id(p) for _, p in boosted.named_parameters()}
        alive = {name: p for name, ref in refs.items() if (p := ref()) is not None}
        return [name for name, p in alive.items() if id(p) not in here]
    finally:
        gc.enable()
        compile_blocks.ON_CPUS = None


@pytest.mark.parametrize(
    ("style", "knobs"),
    [
        ("1f1b", {"enable_jit_fused": True}),  # whole blocks are compiled
        ("zb-h1", {"enable_jit_fused": True}),  # what lies between linears
    ],
    ids=["whole", "between"],
)
def test_blocks_of_other_stages_are_freed(two: hpnb.Ranks, style: str, knobs: dict[str, Any]) -> None:
    assert two.run(names_left_after_a_step, style, **knobs) == [[], []]
