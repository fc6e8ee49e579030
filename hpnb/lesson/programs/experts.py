"""What notebook 11 runs on its ranks: a small mixture of experts, and a layer beside one process's.

Every rank calls what is here. How long a layer computes is in `expert_timing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import hpnb
from hpnb import comm, theory
from hpnb.lesson.programs.device_timing import Batch
from hpnb.lesson.programs.expert_timing import Compute
from hpnb.lesson.programs.expert_timing import expert_axis as expert_axis
from hpnb.lesson.programs.expert_timing import routed_rows as routed_rows
from hpnb.lesson.programs.expert_timing import seconds_of_ranks as seconds_of_ranks
from hpnb.lesson.programs.expert_timing import sorted_rows as sorted_rows
from hpnb.lesson.programs.gpt2_tensor import random_values
from hpnb.lesson.programs.step_timing import largest_over_ranks, relative_distance
from hpnb.mesh import Axis

_STEPS = {"cpu": (40, 16), "cuda": (60, 30)}
ExpertLayer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Compute, Axis], torch.Tensor]
KeepRows = Callable[[torch.Tensor, int], torch.Tensor]  # (n, k) experts, capacity -> (n, k) bool


def training_steps(device: str) -> tuple[int, int]:
    """Steps of the training with three ways to balance, and with right and wrong reductions."""
    return _STEPS[device]


def transformers_block(
    num_experts: int, k: int
) -> tuple[Any, torch.Tensor, list[Callable[..., torch.Tensor]]]:
    """(a Qwen3-MoE block of transformers, its router (E, h), its experts as functions (r, h) -> (r, h))."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=48, num_experts=num_experts, num_experts_per_tok=k,
        norm_topk_prob=True, experts_implementation="eager",
    )  # fmt: skip
    block: Any = Qwen3MoeSparseMoeBlock(config).requires_grad_(False)
    for seed, weight in enumerate(block.parameters()):
        generator = torch.Generator().manual_seed(seed)
        weight.copy_(torch.randn(weight.shape, generator=generator) / weight.size(-1) ** 0.5)
    up, down = block.experts.gate_up_proj, block.experts.down_proj

    def feed_forward(expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate, values = (rows @ up[expert].T).chunk(2, -1)
        result: torch.Tensor = (F.silu(gate) * values) @ down[expert].T
        return result

    return block, block.gate.weight, [partial(feed_forward, expert) for expert in range(num_experts)]


@dataclass(frozen=True)
class ComparedLayer:
    """A layer of experts on ranks beside one process's: {"output", "gradient of tokens" or "gradient of
    experts": relative distance on the rank where it is largest}, bytes that left this rank, and rows that it
    sent to other ranks' experts ("there") and received from other ranks ("back").
    """

    distances: dict[str, float]
    sent: float
    there: int
    back: int


def compare_layer(layer: ExpertLayer, num_experts: int, k: int, tokens: int = 16) -> ComparedLayer:
    """Run `layer` on this rank's tokens, and one process on those of all ranks, in float64.

    It takes tokens (n, h), chosen (n, k), weights (n, k), a `LocalExperts` and the axis, and returns (n, h).
    """
    axis, hidden, device = expert_axis(), 8, hpnb.device()
    x = [random_values(tokens, hidden, seed=r).requires_grad_() for r in range(axis.size)]
    chosen = [routed_rows(tokens, num_experts, k, 4.0, seed=r).to(device) for r in range(axis.size)]
    weights = [random_values(tokens, k, seed=50 + r).softmax(-1) for r in range(axis.size)]
    seeds = [random_values(tokens, hidden, seed=90 + r) for r in range(axis.size)]
    matrices = random_values(num_experts, hidden, hidden, seed=99).requires_grad_()
    wanted = [(_apply(matrices, x[r].repeat_interleave(k, 0), chosen[r].flatten()).view(tokens, k, hidden)
               * weights[r].unsqueeze(-1)).sum(1) for r in range(axis.size)]  # fmt: skip
    torch.stack([(out * seed).sum() for out, seed in zip(wanted, seeds, strict=True)]).sum().backward()

    count = num_experts // axis.size
    here, local_experts = axis.rank, slice(axis.rank * count, (axis.rank + 1) * count)
    local = matrices.detach()[local_experts].clone().requires_grad_()
    tokens_here = x[here].detach().clone().requires_grad_()
    with hpnb.record.traffic() as traffic:
        out = layer(tokens_here, chosen[here], weights[here], LocalExperts(local, num_experts), axis)
        (out * seeds[here]).sum().backward()
    assert matrices.grad is not None
    pairs = {
        "output": (out, wanted[here]),
        "gradient of tokens": (tokens_here.grad, x[here].grad),
        "gradient of experts": (local.grad, matrices.grad[local_experts]),
    }
    distances = {what: relative_distance([ours], [right]) if ours is not None and right is not None else 1.0
                 for what, (ours, right) in pairs.items()}  # fmt: skip
    to_rank = [[int((rows // count == to).sum()) for to in range(axis.size)] for rows in chosen]
    there = sum(rows for to, rows in enumerate(to_rank[here]) if to != here)
    back = sum(row[here] for source, row in enumerate(to_rank) if source != here)
    return ComparedLayer(largest_over_ranks(distances, axis), float(traffic.total), there, back)


@dataclass(frozen=True)
class LocalExperts:
    """This rank's experts of one matrix each, (E / p, h, h); `num_experts` is E, on all ranks of the axis."""

    matrices: torch.Tensor
    num_experts: int

    def __call__(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """(r, h), (r,) which of this rank's experts each row is for -> (r, h)."""
        return _apply(self.matrices, rows, experts)


def _apply(matrices: torch.Tensor, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """(E, h, h), (r, h), (r,) -> (r, h)."""
    return torch.tanh(torch.einsum("rh,rhf->rf", rows, matrices[experts]))


def this_rank(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The one of this rank, on its device."""
    return tensors[hpnb.rank()].to(hpnb.device())


def mixture(num_experts: int = 8, k: int = 2, layers: int = 2) -> Any:
    """A DeepSeek-V3 of small blocks for the 509 tokens of `hpnb.data.text`, equal on all ranks."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=509, hidden_size=64, intermediate_size=128, moe_intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=num_experts, num_experts_per_tok=k,
        n_group=1, topk_group=1, first_k_dense_replace=0, n_shared_experts=1, routed_scaling_factor=1.0,
        q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        max_position_embeddings=64, use_cache=False, experts_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # the model is made on the CPU
        torch.default_generator.manual_seed(0)
        return DeepseekV3ForCausalLM(config).to(hpnb.device()).train()


def routers(model: Any) -> list[Any]:
    """Routers of a `mixture`, one a layer; they return logits (n, E), weights (n, k) and chosen (n, k)."""
    return [module for name, module in model.named_modules() if name.endswith("mlp.gate")]


def router_logits(model: Any) -> list[torch.Tensor]:
    """A list that holds the routers' logits of the last forward, one of (n, E) a layer."""
    layers = routers(model)
    kept: list[torch.Tensor] = [torch.empty(0)] * len(layers)

    def keep(layer: int, module: Any, args: Any, outputs: Any) -> None:
        kept[layer] = outputs[0]

    for layer, module in enumerate(layers):
        module.register_forward_hook(partial(keep, layer))
    return kept


def shard(batch: Batch, axis: Axis) -> Batch:
    """This rank's samples of a batch, on its device."""
    return {name: x.chunk(axis.size)[axis.rank].to(hpnb.device()) for name, x in batch.items()}


def loss_within_capacity(
    states: Mapping[str, Batch], keep: KeepRows, factors: Sequence[float], batches: Sequence[Batch],
    num_experts: int, k: int,
) -> dict[str, list[tuple[float, float]]]:  # fmt: skip
    """{model: (share of rows dropped, loss) for each capacity factor}. Ranks share the batches.

    Args:
        states: {model: weights of a `mixture`}.
        factors: of capacity over the mean load of a batch; infinity drops nothing.
    """
    axis, points = expert_axis(), {}
    for name, state in states.items():
        model = mixture(num_experts, k).eval()
        model.load_state_dict(state)
        sums = torch.zeros(len(factors), 2, dtype=torch.float64, device=hpnb.device())
        for i, factor in enumerate(factors):
            dropped: list[float] = []
            hooks = [router.register_forward_hook(partial(_drop, keep, factor, num_experts, dropped))
                     for router in routers(model)]  # fmt: skip
            for batch in batches[axis.rank :: axis.size]:
                with torch.no_grad():
                    loss = model(**{n: x.to(hpnb.device()) for n, x in batch.items()}).loss.item()
                sums[i] += torch.tensor([sum(dropped[-len(hooks) :]) / len(hooks), loss]).to(sums)
            for hook in hooks:
                hook.remove()
        means = comm.all_reduce(sums, axis) / len(batches)
        points[name] = [(dropped_share, loss) for dropped_share, loss in means.tolist()]
    return points


def _drop(
    keep: KeepRows, factor: float, num_experts: int, dropped: list[float], module: Any, args: Any, out: Any
) -> Any:
    """A router's outputs with weight 0 for the rows without a place."""
    logits, weights, chosen = out
    mean = chosen.numel() / num_experts
    kept = keep(chosen, int(min(factor * mean, chosen.numel())))
    dropped.append(1 - kept.double().mean().item())
    return logits, weights * kept, chosen


@torch.no_grad()
def busiest_experts(
    state: Batch, batches: Sequence[Batch], num_experts: int, k: int
) -> dict[str, dict[str, float]]:
    """{"busiest" or "second busiest": {"block 1": its load over the mean load}}, a mean over batches, in one
    process; `state` has the weights of a `mixture`.
    """
    model = mixture(num_experts, k).eval()
    model.load_state_dict(state)
    loads: list[list[torch.Tensor]] = [[] for _ in routers(model)]

    def count(block: int, module: Any, args: Any, outputs: Any) -> None:
        counts = torch.bincount(outputs[2].flatten(), minlength=num_experts).double()
        loads[block].append((counts / counts.mean()).sort(descending=True).values)

    for block, router in enumerate(routers(model)):
        router.register_forward_hook(partial(count, block))
    for batch in batches:
        model(**{name: x.to(hpnb.device()) for name, x in batch.items()})
    means = {f"block {i}": torch.stack(rows).mean(0).tolist() for i, rows in enumerate(loads, 1)}
    return {name: {block: of_block[place] for block, of_block in means.items()}
            for place, name in enumerate(("busiest", "second busiest"))}  # fmt: skip


@dataclass(frozen=True)
class ProbedExperts:
    """What each expert of the last layer got from a few tokens: rows, counted on all ranks, and the norm of
    its gradient after the reduction, (E,) both; and the distance of all these gradients from one process's.
    """

    tokens: list[int]
    norms: list[float]
    distance: float

    @property
    def unused_with_gradient(self) -> int:
        """Experts that got no token, and whose gradient is not zero."""
        return sum(not count and norm > 0 for count, norm in zip(self.tokens, self.norms, strict=True))


def probe_experts(
    model: Any, reduce: Callable[[], None], expert_axis: Axis, ranks: int, ids: torch.Tensor
) -> ProbedExperts:
    """Send the same few tokens, `ids` (1, s), through `model` on every rank, for the experts' gradients.

    Args:
        model: a `mixture` with experts that are sharded over `expert_axis`.
        reduce: what the training loop does to all gradients after a backward.
        ranks: of dp; each has these tokens, so means over them are those of one process.
    """
    ids = ids.to(hpnb.device())
    chosen: list[torch.Tensor] = []
    hook = routers(model)[-1].register_forward_hook(lambda module, args, out: chosen.append(out[2]))
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    hook.remove()
    reduce()
    grads = {name: p.grad for name, p in model.named_parameters() if ".experts." in name}
    full = {name: comm.gather(grad, expert_axis, 0) for name, grad in grads.items() if grad is not None}
    alone = mixture(len(next(iter(full.values()))), chosen[0].size(-1))
    alone.load_state_dict(hpnb.placement.full_state_dict(model, [expert_axis]))
    alone(input_ids=ids, labels=ids).loss.backward()
    right = {name: p.grad for name, p in alone.named_parameters() if name in full and p.grad is not None}
    last = f".{len(routers(model)) - 1}.mlp."
    norms = sum((g.flatten(1).square().sum(1) for name, g in full.items() if last in name), torch.zeros(()))
    tokens = torch.bincount(chosen[0].flatten(), minlength=len(norms)) * ranks
    distance = relative_distance([full[name] for name in right], list(right.values()))
    return ProbedExperts(tokens.tolist(), norms.sqrt().tolist(), distance)


def deepseek_v3_layer(tokens: int, ranks: int, rate: float, link: theory.Link) -> dict[str, float]:
    """{"attention", "experts" or "all-to-all": seconds of one forward} of a layer of DeepSeek-V3, predicted.

    8 of 256 experts of width 2,048 and one shared expert, on one sequence of tokens of 7,168 values in 16
    bits, at `rate` FLOP/s of a rank. Every token is taken to cross the link 8 times; DeepSeek-V3 limits that
    to 4 nodes.
    """
    hidden, width, chosen, heads = 7168, 2048, 8, 128
    query = hidden * 1536 + 1536 * heads * 192
    key_value = hidden * 576 + 512 * heads * 256
    scores = heads * (192 + 128) * tokens / 2  # causal: half of all pairs
    attention = 2 * tokens * (query + key_value + heads * 128 * hidden + scores)
    experts = 2 * tokens * 3 * hidden * width * (chosen + 1)
    message = theory.seconds("all_to_all", chosen * tokens * hidden * 2, ranks, link)
    return {"attention": attention / rate, "experts": experts / rate, "all-to-all": message}


def pipeline_losses(options: Mapping[str, Any], batches: Sequence[Batch]) -> list[float]:
    """The loss of each step of a `mixture` of four blocks under a plugin with these options."""
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp32", **options))
    model = mixture(layers=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for batch in batches:
        samples = shard(batch, booster.plugin.mesh.dp)
        result = booster.execute_pipeline(iter([samples]), boosted, None, optimizer, return_loss=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(-1.0 if result["loss"] is None else float(result["loss"]))
    of_ranks = torch.tensor([losses], dtype=torch.float64, device=hpnb.device())
    largest: list[float] = comm.gather(of_ranks, expert_axis(), 0).amax(0).tolist()
    return largest
