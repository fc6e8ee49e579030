"""ZeRO 3 gathers the next block's weights ahead under every schedule, also where a rank has several stages.

pytest tests/test_zero3_prefetch.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import hybrid_cases
import pytest
import torch
from hybrid_cases import batch as batch_of_images
from hybrid_cases import build, mine
from rank_pools import RankPools
from test_context_vit import train_boosted, train_on_one_process
from test_expert_parallel import batch as batch_of_texts
from test_expert_parallel import build as build_experts

import hpnb
from hpnb.data_parallel.fsdp_hooks import FSDPState, fsdp_state_of

BLOCKS = 8


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def record_gathers(state: FSDPState) -> list[tuple[str, str]]:
    """From now on what happens to blocks, in order: ("gather", block), ("run", block), ("free", block)."""
    events: list[tuple[str, str]] = []
    start = state._unshard
    blocks = [unit for unit in state.units if unit is not state.root]
    names = {unit: state._unit_names[unit.flat_params[0].sharded_params[0]] for unit in blocks}

    def note_run(unit: Any, ahead: Any) -> None:
        if unit is not state.root:
            events.append(("run", names[unit]))
        start(unit, ahead)

    def note(unit: Any, name: str) -> None:
        gather, free = unit.unshard, unit.reshard

        def note_gather() -> None:
            if not unit.flat_params[0].is_unsharded:
                events.append(("gather", name))
            gather()

        def note_free() -> None:
            if unit.flat_params[0].is_unsharded:
                events.append(("free", name))
            free()

        unit.unshard, unit.reshard = note_gather, note_free

    state._unshard = note_run  # type: ignore[method-assign]
    for unit, name in names.items():
        note(unit, name)
    return events


def count_gathers(events: list[tuple[str, str]]) -> Counter[str]:
    """ "run": runs of blocks; "late": those that started their gather; "unused": gathers without a run;
    "most": blocks that were gathered at once."""
    counts: Counter[str] = Counter()
    has_run: dict[str, bool] = {}  # of what is gathered
    for what, name in events:
        if what == "gather":
            has_run.setdefault(name, False)
            counts["most"] = max(counts["most"], len(has_run))
        elif what == "run":
            counts["run"] += 1
            counts["late"] += name not in has_run
            has_run[name] = True
        else:
            counts["unused"] += not has_run.pop(name)
    return counts


def step(kind: str, options: dict[str, Any]) -> tuple[Counter[str], bool]:
    """Counts of the second step on this rank, and whether it has the head."""
    torch.set_num_threads(1)
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", zero_stage=3, **options))
    model: Any = build_experts(kind, num_hidden_layers=BLOCKS) if kind == "Mixtral" else build("vit", BLOCKS)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = fsdp_state_of(model.module)
    assert state is not None
    events = record_gathers(state)
    for number in range(2):
        events.clear()
        batch = batch_of_texts(24) if kind == "Mixtral" else batch_of_images("vit", number, 8)
        booster.execute_pipeline(iter([mine(batch, booster.plugin.mesh.dp)]), model, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return count_gathers(events), booster.plugin.stage_manager.is_last_stage()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "style"),
    [
        ("vit", "1f1b"),
        ("vit", "interleaved"),
        ("vit", "zb-v"),
        ("vit", "dualpipe-v"),
        ("Mixtral", "dualpipe-v"),
    ],
)
def test_each_block_is_gathered_while_the_one_before_it_runs(kind: str, style: str, pools: RankPools) -> None:
    """The first block of an action is gathered while the action before computes its last one, or has stayed
    from there. Only the first action of a step has none before it: with one stage a rank the embedding knows
    its block. Mixtral's actions run in pairs (`overlapped_pairs`), where each gathers its first block."""
    chunks, microbatches = 1 if style == "1f1b" else 2, 6
    options = {"pp_size": 2, "pp_style": style, "num_model_chunks": chunks, "num_microbatches": microbatches}
    if kind == "Mixtral":
        options["ep_size"] = 2
    for counts, has_head in pools[4].run(step, kind, options):
        assert counts["unused"] == 0
        assert counts["run"] == 2 * microbatches * BLOCKS // 2  # forwards and backwards of a rank's blocks
        if kind == "Mixtral":
            assert counts["late"] < chunks * microbatches + (chunks - has_head) * microbatches
        else:
            assert counts["late"] == (0 if chunks == 1 else 1)
            assert counts["most"] <= 2 + 1  # the block at work, the one ahead, and that of the next action


@pytest.mark.sampled(1)
@pytest.mark.parametrize("style", ["1f1b", "gpipe", "interleaved", "zb-v"])
def test_blocks_that_stay_between_actions_are_exact(style: str, pools: RankPools) -> None:
    """Three steps of Adam: a block that stayed over an optimizer's step would have old weights."""
    chunks = 2 if style in ("interleaved", "zb-v") else 1
    options = {"pp_size": 2, "pp_style": style, "num_model_chunks": chunks, "num_microbatches": 4}
    wanted_losses, wanted = train_on_one_process("laptop", "AdamW", 8)
    for losses, weights in pools[4].run(train_boosted, "laptop", "AdamW", 8, {**options, "zero_stage": 3}):
        for loss, expected in zip(losses, wanted_losses, strict=True):
            assert loss is None or abs(loss - expected) < 1e-12 * expected
        assert hybrid_cases.distance(weights, wanted) < 1e-12
