"""The balancing loss of all layers, over microbatches and on pipeline stages, is that of one process.

One process computes it from the formula: of each microbatch, which is that of all ranks together, it
concatenates the router probabilities of all layers, and leaves padding out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_pools import RankPools
from test_expert_parallel import build, distances

import hpnb
from hpnb.data.tokenizer import IGNORE_INDEX

COEFFICIENT, STEPS = 0.5, 2
LENGTHS = (7, 4, 6, 2, 7, 3, 5, 6)  # of the texts
OPTIONS = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT, "num_hidden_layers": 4}
KINDS: dict[str, dict[str, Any]] = {"Mixtral": {}, "Qwen3Moe": {"mlp_only_layers": [1]}}


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def batch(samples: int, width: int = 7, lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    """Texts of these lengths, padded on the right."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 29, (samples, width), generator=generator)
    mask = (torch.arange(width) < torch.tensor(lengths)[:samples, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORE_INDEX)}


# --- one process -----------------------------------------------------------------------------------------


def split_among(samples: int, ranks: int, microbatches: int) -> list[torch.Tensor]:
    """Which samples each microbatch has, those of all ranks together."""
    by_rank = [here.tensor_split(microbatches) for here in torch.arange(samples).tensor_split(ranks)]
    return [torch.cat(parts) for parts in zip(*by_rank, strict=True)]


def dense_balance(router_logits: tuple[torch.Tensor, ...], mask: torch.Tensor, k: int) -> torch.Tensor:
    """E sum_e f_e P_e of all layers, one after the other."""
    probability = torch.cat([logits.softmax(-1)[mask.flatten() > 0] for logits in router_logits])
    num_experts = probability.size(-1)
    chosen = torch.nn.functional.one_hot(probability.topk(k, -1).indices, num_experts).sum(1)
    return num_experts * (chosen.double().mean(0) * probability.mean(0)).sum()


def train_on_one_process(kind: str, samples: int, ranks: int, microbatches: int, *texts: Any) -> Any:
    """(losses, weights after the last step)."""
    model, data, losses = build(kind, **OPTIONS, **KINDS[kind]), batch(samples, *texts), []
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    targets = (data["labels"][:, 1:] != IGNORE_INDEX).sum()
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for here in split_among(samples, ranks, microbatches):
            inputs = {name: value[here] for name, value in data.items()}
            labels = inputs.pop("labels")[:, 1:]
            if not len(here):
                continue
            outputs = model(**inputs)
            total = torch.nn.functional.cross_entropy(
                outputs.logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX,
                reduction="sum",
            )  # fmt: skip
            balance = dense_balance(outputs.router_logits, inputs["attention_mask"], 2)
            count = (labels != IGNORE_INDEX).sum()
            loss = (total + COEFFICIENT * count * balance) / targets
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return losses, dict(model.named_parameters())


# --- ranks -----------------------------------------------------------------------------------------------


def train_boosted(
    kind: str, samples: int, plugin: dict[str, Any], folder: str, *texts: Any
) -> list[float | None]:
    """The losses, None where they are not known."""
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", **plugin))
    model = build(kind, **OPTIONS, **KINDS[kind])
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    losses: list[float | None] = []
    dp = booster.plugin.mesh.dp
    here = {name: value.tensor_split(dp.size)[dp.rank] for name, value in batch(samples, *texts).items()}
    for _ in range(STEPS):
        optimizer.zero_grad()
        result = booster.execute_pipeline(iter([here]), boosted, None, optimizer, return_loss=True)
        losses.append(None if result["loss"] is None else float(result["loss"]))
        optimizer.step()
    booster.save_model(boosted, folder)
    return losses


TWO, FOUR = {"num_microbatches": 2}, {"num_microbatches": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "microbatches": (1, TWO),
    "dp 2": (2, TWO),
    "cp 2": (2, {"cp_size": 2, **TWO}),
    "pp 2, 1f1b": (2, {"pp_size": 2, **FOUR}),
    "pp 2, gpipe": (2, {"pp_size": 2, "pp_style": "gpipe", **TWO}),
    "pp 4, zb-h2": (4, {"pp_size": 4, "pp_style": "zb-h2", **FOUR}),
    "pp 2 x tp 2, zb-h1": (4, {"pp_size": 2, "tp_size": 2, "pp_style": "zb-h1", **TWO}),
    "pp 2 x dp 2, interleaved": (
        4, {"pp_size": 2, "pp_style": "interleaved", "num_model_chunks": 2, **TWO},
    ),
    "pp 2 x dp 2, breadth-first, ZeRO 1": (
        4, {"pp_size": 2, "pp_style": "breadth-first", "num_model_chunks": 2, "zero_stage": 1, **TWO},
    ),
    "pp 2 x ep 2, ZeRO 3": (4, {"pp_size": 2, "ep_size": 2, "zero_stage": 3, **TWO}),
    "pp 2 x ep 2, zb-v": (4, {"pp_size": 2, "ep_size": 2, "pp_style": "zb-v", **FOUR}),
    "pp 2 x ep 2, dualpipe-v, ZeRO 2": (
        4, {"pp_size": 2, "ep_size": 2, "pp_style": "dualpipe-v", "zero_stage": 2, **FOUR},
    ),
    "pp 2 x ep 2, dualpipe-v, recomputation": (
        4, {"pp_size": 2, "ep_size": 2, "pp_style": "dualpipe-v", "activation_checkpointing": "full", **FOUR},
    ),
    "pp 2 x cp 2 = ep 2": (4, {"pp_size": 2, "cp_size": 2, "ep_size": 2, **TWO}),
    "pp 2 x dp 2, cut by parameters": (4, {"pp_size": 2, "cut": "parameters", **TWO}),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_the_loss_of_routers_equals_one_process(
    pools: RankPools, kind: str, layout: str, tmp_path: Any
) -> None:
    ranks, plugin = LAYOUTS[layout]
    replicas = ranks // (plugin.get("pp_size", 1) * plugin.get("tp_size", 1) * plugin.get("cp_size", 1))
    losses, weights = train_on_one_process(kind, 8, replicas, plugin["num_microbatches"])
    check(pools, kind, 8, ranks, plugin, losses, weights, tmp_path)


@pytest.mark.parametrize("layout", ["dp 2", "pp 2 x dp 2"])
def test_ranks_and_microbatches_without_samples_take_part(
    pools: RankPools, layout: str, tmp_path: Any
) -> None:
    """3 samples are 2 and 1, in microbatches of one sample: the second rank's second one is empty."""
    pp = {"pp_size": 2} if layout != "dp 2" else {}
    losses, weights = train_on_one_process("Mixtral", 3, 2, 2)
    plugin = {"microbatch_size": 1, **pp}
    check(pools, "Mixtral", 3, 2 * pp.get("pp_size", 1), plugin, losses, weights, tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["ring", "all-gather", "ulysses"])
@pytest.mark.parametrize(("cp", "width", "length"), [(2, 7, 2), (4, 5, 5)])
def test_context_ranks_whose_tokens_are_all_padding_take_part(
    pools: RankPools, mode: str, cp: int, width: int, length: int, tmp_path: Any
) -> None:
    """2 tokens of 7 are on one rank of 2. Of 5 tokens 4 ranks of Ulysses have 2, 2, 1 and none."""
    texts = width, (length,) * 4
    losses, weights = train_on_one_process("Mixtral", 4, 1, 2, *texts)
    plugin = {"cp_size": cp, "context_parallel": mode, **TWO}
    check(pools, "Mixtral", 4, cp, plugin, losses, weights, tmp_path, *texts)


def check(
    pools: RankPools, kind: str, samples: int, ranks: int, plugin: dict[str, Any], losses: list[float],
    weights: dict[str, torch.Tensor], folder: Any, *texts: Any,
) -> None:  # fmt: skip
    results = pools[ranks].run(train_boosted, kind, samples, plugin, str(folder), *texts)
    known = [of_rank for of_rank in results if None not in of_rank]
    assert known
    for of_rank in known:
        assert of_rank == pytest.approx(losses, rel=1e-12)
    made = type(build(kind, **OPTIONS, **KINDS[kind]))
    saved = dict(made.from_pretrained(folder, dtype=torch.float64).named_parameters())
    worst = distances({name: p.detach() for name, p in saved.items()}, weights)
    assert max(worst.values()) < 1e-12, worst


def refused_with_a_measured_cut() -> str:
    plugin = hpnb.HybridParallelPlugin(pp_size=2, num_microbatches=2, cut="flops", precision="fp64")
    rows = [{name: value[i] for name, value in batch(8).items()} for i in range(8)]
    loader = plugin.prepare_dataloader(rows, batch_size=4)
    try:
        hpnb.Booster(plugin=plugin).boost(build("Mixtral", **OPTIONS), dataloader=loader)
    except ValueError as error:
        return str(error)
    return ""


def test_a_measured_cut_of_several_replicas_is_refused(pools: RankPools) -> None:
    for said in pools[4].run(refused_with_a_measured_cut):
        assert said.startswith(
            "cut='flops' lets one rank measure for all, and with output_router_logits=True"
        )
