"""Planned architectures of transformers, a drawn few of them, train on every layout as on one process.

`python tests/model_census.py --write` runs all of them, and its table is committed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import model_census as models
import pytest
from model_parity import LAYOUTS, Outcome, compare, train_serial
from rank_pools import RankPools
from tiny_models import planned_architecture

# One a kind of plan: plain, packed, gathered, experts, latent attention, sinks, indexed attention, modules
# beside the plan, an embedding with a norm, experts whose weights are transposed.
NAMES = (
    "LlamaConfig", "Phi3Config", "Olmo2Config", "MixtralConfig", "DeepseekV2Config", "GraniteSWAConfig",
    "DeepseekV32Config", "DeepseekV4Config", "MuseGlimmerTextConfig", "AriaTextConfig", "EsmcConfig",
    "Qwen3NextConfig", "InklingTextConfig", "Gemma2Config", "GPTNeoXConfig",
)  # fmt: skip


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    made = RankPools(models.TIMEOUT)
    yield made
    made.close()


# The first has what one of tests/breakages.py breaks.
@pytest.mark.parametrize(
    "name",
    [
        "Qwen3NextConfig",
        *(pytest.param(n, marks=pytest.mark.sampled(1)) for n in NAMES if n != "Qwen3NextConfig"),
    ],
)
def test_tensor_and_pipeline_parallel_train_as_one_process(pools: RankPools, name: str) -> None:
    check_exact(pools, name, "pp2-tp2")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "layout", [n for n, one in LAYOUTS.items() if n != "pp2-tp2" and not one.recomputation]
)
def test_other_layouts_train_as_one_process(pools: RankPools, name: str, layout: str) -> None:
    check_exact(pools, name, layout)


RECOMPUTING = [name for name, layout in LAYOUTS.items() if layout.recomputation]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", RECOMPUTING)
def test_recomputation_trains_as_one_process(pools: RankPools, name: str, layout: str) -> None:
    check_exact(pools, name, layout)


def check_exact(pools: RankPools, name: str, layout: str) -> None:
    for outcome in models.examine(pools, planned_architecture(name), [layout]):
        assert outcome.status == "exact", models.describe(outcome)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["Gemma3nTextConfig", "GlmMoeDsaConfig"])
def test_a_layer_that_takes_more_than_a_stage_passes_is_refused(pools: RankPools, name: str) -> None:
    architecture, head = planned_architecture(name), "ForCausalLM"
    (serial,) = pools[1].run(train_serial, architecture, head)
    outcome = compare(pools, architecture, head, "pp2", serial)
    assert outcome.status == "refused"
    assert all(words in outcome.reason for words in ("layers.0", "pp_size=1", "hpnb.models.register"))


def test_the_page_has_a_row_a_head_and_every_reason_once() -> None:
    outcomes = [
        Outcome("A", "ForCausalLM", "pp2", "exact", errors=(1e-16, 2e-15, 0.0)),
        Outcome("A", "ForCausalLM", "tp2", "refused", "rank 0 of 2 raised ValueError: no"),
        Outcome("B", "", "pp2", "refused", "no"),
        Outcome("C", "Model", "tp2", "exact", errors=(1e-16, 1e-16, 1e-16)),
        Outcome("C", "Model", "pp2-full", "refused", "no"),
    ]
    page = models.page(outcomes)
    assert "3 architectures: 1 exact, 2 refused, 0 wrong, 0 fails" in page
    assert "| A | ForCausalLM | 2e-15 | refused (1) |" in page
    assert page.count("1. no") == 1


def test_the_committed_table_has_no_wrong_one() -> None:
    text = models.PAGE.read_text()
    exact, refused, wrong, fails = map(
        int, re.findall(r"(\d+) (?:exact|refused|wrong|fails)", text.split("## Why not")[0])[:4]
    )
    assert exact >= 100
    assert (wrong, fails) == (0, 0)
    assert exact + refused == len(set(re.findall(r"^\| (\w+Config) ", text, re.M)))
