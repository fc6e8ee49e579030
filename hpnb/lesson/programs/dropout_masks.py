"""What notebook 07 asks of dropout on its ranks: who drops what, and what a wrong policy does to a model.

    pool.run(dropout_masks.record_masks, "right")      {place: what is dropped there}, of each rank

A policy is what generators do between ranks:

    "right"          hpnb's: equal where an activation is replicated, different where it is sharded
    "a seed each"    every rank has a seed of its own: different everywhere
    "one seed"       all have the same seed and nothing else is done: equal as long as all draw as many

Two places are looked at, in the first block: the attention's probabilities, sharded by heads in every layout,
and the MLP's output, which is replicated, or sharded along tokens with sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import hpnb
from hpnb.lesson.programs import tied_weights
from hpnb.lesson.programs.device_timing import all_ranks, random_tokens
from hpnb.lesson.programs.step_timing import relative_distance
from hpnb.models import GPT2_SIZES
from hpnb.placement import placement_of
from hpnb.tensor_parallel import full_state_dict, parallelize
from hpnb.tensor_parallel.dropout_rng import DropoutRng

POLICIES = ("right", "a seed each", "one seed")
PLACES = ("attention", "MLP")
SIZE = replace(GPT2_SIZES["laptop"], layers=2)


def build_model(policy: str, dropout: float, sequence: bool = False) -> Any:
    """A tensor-parallel GPT-2 whose masks follow `policy`, with seeded generators. Every rank calls it."""
    model: Any = hpnb.models.gpt2(SIZE, dropout=dropout, attention="eager", device=hpnb.device())
    parallelize(model, all_ranks("tp"), "1d", sequence)
    if policy != POLICIES[0]:
        _disable_rank_states(model)
    torch.manual_seed(7 + (hpnb.rank() if policy == "a seed each" else 0))
    return model


def _disable_rank_states(model: Any) -> None:
    """Let every place draw from the default generator, as if ranks had no random state of their own."""
    mode = next(
        vars(m)["_hpnb_tensor_parallel"] for m in model.modules() if "_hpnb_tensor_parallel" in vars(m)
    )
    rng: DropoutRng = mode.dropout_rng
    rng.use_rank_state = lambda: None  # type: ignore[method-assign]


def record_masks(
    policy: str, dropout: float = 0.5, sequence: bool = False, steps: int = 1
) -> dict[str, torch.Tensor]:
    """What is dropped in the first block, on the CPU: {"attention": (steps, s, s), "MLP": (steps, n, h)}.

    Of this rank's first head, and of its tokens of the first row. 1 is dropped, 0 kept, -1 not computed (a
    causal attention sees nothing later).
    """
    model = build_model(policy, dropout, sequence)
    masks: dict[str, list[torch.Tensor]] = {place: [] for place in PLACES}

    def attention(module: Any, args: Any, output: Any) -> None:
        first = output[1][0, 0].detach()  # (s, s), of the first row's first head
        visible = torch.ones_like(first).tril()
        masks["attention"].append(torch.where(visible == 1, (first == 0).to(visible.dtype), -1.0))

    def mlp(module: Any, args: Any, output: Any) -> None:
        # What goes in is hardly ever 0 by itself.
        masks["MLP"].append((output[0] == 0).to(torch.float32))

    model.transformer.h[0].attn.register_forward_hook(attention)
    model.transformer.h[0].mlp.register_forward_hook(mlp)
    ids = random_tokens(SIZE, 2)["input_ids"]
    with torch.no_grad():
        for _ in range(steps):
            model(input_ids=ids)
    return {place: torch.stack(drops).to("cpu", torch.int8) for place, drops in masks.items()}


def gradient_check(policy: str, step: float = 1e-4) -> float:
    """The measured change of the loss along its gradient, over the change that the gradient predicts.

    It should be 1. Two forwards with the same masks, a little to either side; float64, dropout 0.1. Every
    rank calls it.
    """
    model, axis = build_model(policy, 0.1).double(), all_ranks("tp")
    ids, state = random_tokens(SIZE, 2)["input_ids"], torch.get_rng_state()
    device_state = torch.cuda.get_rng_state() if hpnb.device().type == "cuda" else None

    def loss() -> torch.Tensor:
        torch.set_rng_state(state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)
        value: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return value

    loss().backward()
    directions, squared = [], torch.zeros((), dtype=torch.float64, device=hpnb.device())
    for name, p in model.named_parameters():
        assert p.grad is not None
        direction, sharded = p.grad.clone(), bool(placement_of(p, name).cuts)
        if not sharded:
            hpnb.data_parallel.broadcast([direction], axis)  # one weight, so one direction: the first rank's
        directions.append((p, direction))
        if sharded or axis.rank == 0:
            squared += (direction * direction).sum()
    dist.all_reduce(squared, group=axis.group)
    norm, losses = float(squared.sqrt()), []
    with torch.no_grad():
        for sign in (1.0, -2.0):  # one step forward, then two back
            for p, direction in directions:
                p.add_(direction, alpha=sign * step / norm)
            losses.append(float(loss()))
    return (losses[0] - losses[1]) / (2 * step * norm)


def mask_pictures(masks: Sequence[Mapping[str, torch.Tensor]], sequence: bool) -> list[Any]:
    """What the first and the last rank drop in the first step, a `MaskPair` for each of PLACES."""
    from hpnb.lesson.figures import gpt2_tensor

    first, last = masks[0], masks[-1]
    equal = {"attention": False, "MLP": not sequence}
    return [gpt2_tensor.MaskPair(first[place][0], last[place][0], equal[place]) for place in PLACES]


def train_with_dropout(
    policy: str, texts: list[Mapping[str, torch.Tensor]], test: Mapping[str, torch.Tensor]
) -> tuple[list[float], list[float], tuple[float, float]]:
    """Train with dropout 0.1: (the losses, distances of this rank's copies to rank 0's, test losses).

    Copies are norms, positions and biases that every rank holds in full. There are two test losses: of the
    model on its ranks, and of what this rank would save, in one process.
    """
    model, axis = build_model(policy, 0.1), all_ranks("tp")
    copies = [p for name, p in model.named_parameters() if "ln_" in name or "wpe" in name]
    optimizer, losses, distances = torch.optim.AdamW(model.parameters(), lr=3e-3), [], []
    for batch in texts:
        ids = batch["input_ids"].to(hpnb.device())
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        first = [p.detach().clone() for p in copies]
        hpnb.data_parallel.broadcast(first, axis)
        losses.append(float(loss.detach()))
        distances.append(relative_distance(copies, first))
    ids = test["input_ids"].to(hpnb.device())
    with torch.no_grad():
        on_ranks = float(model.eval()(input_ids=ids, labels=ids).loss)
    serial = hpnb.models.gpt2(SIZE, device=hpnb.device())
    saved, _ = tied_weights.loaded_losses(full_state_dict(model), serial, test)
    return losses, distances, (on_ranks, saved)
