"""What notebook 07 asks of dropout on its ranks: who drops what, and what a wrong policy does to a model.

    pool.run(masks.drawn, "right")                   {place: what is dropped there}, of each rank
    masks.apart(first, second)                       share of elements that only one of two ranks drops

A policy is what generators do between ranks:

    "right"          hpnb's: alike where an activation is replicated, apart where it is cut
    "a seed each"    every rank has its own: apart everywhere
    "one seed"       all have the same, and nobody does more: alike as long as all draw as many

Two places are looked at, in the first block: the attention's probabilities, cut by heads whatever the layout,
and the MLP's output, which is replicated, or cut along tokens with sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import hpnb
from hpnb.lesson.programs import gpt2_pipeline, tied_weights, vit_tensor
from hpnb.lesson.programs.step_timing import distance
from hpnb.models import GPT2_SIZES
from hpnb.placement import placement_of
from hpnb.tensor_parallel import full_state_dict, parallelize
from hpnb.tensor_parallel.dropout_rng import DropoutRng

POLICIES = ("right", "a seed each", "one seed")
PLACES = ("attention", "MLP")
SIZE = replace(GPT2_SIZES["laptop"], layers=2)


def model(policy: str, dropout: float, sequence: bool = False) -> Any:
    """A cut GPT-2 whose masks follow `policy`, and generators seeded for it. Every rank calls it."""
    made: Any = hpnb.models.gpt2(SIZE, dropout=dropout, attention="eager", device=hpnb.device())
    parallelize(made, vit_tensor.tensor_axis(), "1d", sequence)
    if policy != POLICIES[0]:
        _leave_alone(made)
    torch.manual_seed(7 + (hpnb.rank() if policy == "a seed each" else 0))
    return made


def _leave_alone(made: Any) -> None:
    """The generators draw as they stand: nobody lends a rank a state of its own any more."""
    mode = next(
        vars(m)["_hpnb_tensor_parallel"] for m in made.modules() if "_hpnb_tensor_parallel" in vars(m)
    )
    randomness: DropoutRng = mode.randomness
    randomness.own = lambda: None  # type: ignore[method-assign]


def drawn(
    policy: str, dropout: float = 0.5, sequence: bool = False, steps: int = 1
) -> dict[str, torch.Tensor]:
    """What is dropped in the first block, on the CPU: {"attention": (steps, s, s), "MLP": (steps, n, h)}.

    Of this rank's first head, and of its tokens of the first row. 1 is dropped, 0 kept, -1 not computed (a
    causal attention sees nothing later).
    """
    made = model(policy, dropout, sequence)
    found: dict[str, list[torch.Tensor]] = {place: [] for place in PLACES}

    def attention(module: Any, args: Any, output: Any) -> None:
        first = output[1][0, 0].detach()  # (s, s), of the first row's first head
        seen = torch.ones_like(first).tril()
        found["attention"].append(torch.where(seen == 1, (first == 0).to(seen.dtype), -1.0))

    def mlp(module: Any, args: Any, output: Any) -> None:
        # What goes in is hardly ever 0 by itself.
        found["MLP"].append((output[0] == 0).to(torch.float32))

    made.transformer.h[0].attn.register_forward_hook(attention)
    made.transformer.h[0].mlp.register_forward_hook(mlp)
    words = gpt2_pipeline.words(SIZE, 2)["input_ids"]
    with torch.no_grad():
        for _ in range(steps):
            made(input_ids=words)
    return {place: torch.stack(each).to("cpu", torch.int8) for place, each in found.items()}


def slope(policy: str, step: float = 1e-4) -> float:
    """What the loss changes by along its gradient, over what the gradient says; 1 if it is the gradient.

    Two forwards with the same masks, a little to either side; float64, dropout 0.1. Every rank calls it.
    """
    made, axis = model(policy, 0.1).double(), vit_tensor.tensor_axis()
    words, state = gpt2_pipeline.words(SIZE, 2)["input_ids"], torch.get_rng_state()
    device_state = torch.cuda.get_rng_state() if hpnb.device().type == "cuda" else None

    def loss() -> torch.Tensor:
        torch.set_rng_state(state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)
        value: torch.Tensor = made(input_ids=words, labels=words).loss
        return value

    loss().backward()
    along, said = [], torch.zeros((), dtype=torch.float64, device=hpnb.device())
    for name, p in made.named_parameters():
        assert p.grad is not None
        d = p.grad.clone()
        if not placement_of(p, name).cuts:
            hpnb.data_parallel.broadcast([d], axis)  # one weight, so one direction: the first rank's
        along.append((p, d))
        if placement_of(p, name).cuts or axis.rank == 0:
            said += (d * d).sum()
    dist.all_reduce(said, group=axis.group)
    there = []
    with torch.no_grad():
        for sign in (1.0, -2.0):
            for p, d in along:
                p.add_(d, alpha=sign * step / float(said.sqrt()))
            there.append(float(loss()))
    return (there[0] - there[1]) / (2 * step * float(said.sqrt()))


def apart(first: torch.Tensor, second: torch.Tensor) -> float:
    """Share of the elements that one of two masks drops and the other keeps."""
    seen = (first >= 0) & (second >= 0)
    return float((first != second)[seen].double().mean())


def pictures(found: Sequence[Mapping[str, torch.Tensor]], sequence: bool) -> list[Any]:
    """What the first and the last rank drop in the first step, a `plot.Masks` for each of PLACES."""
    from hpnb import plot

    first, last = found[0], found[-1]
    alike = {"attention": False, "MLP": not sequence}
    return [plot.Masks(first[place][0], last[place][0], alike[place]) for place in PLACES]


def trained(policy: str, texts: list[Mapping[str, torch.Tensor]], test: Mapping[str, torch.Tensor]) -> Any:
    """Train with dropout 0.1: (the losses, distances of this rank's copies to rank 0's, test losses).

    Copies are norms, positions and biases that are whole on every rank. Test losses are two: of the model on
    its ranks, and of what this rank would save, in one process.
    """
    made = model(policy, 0.1)
    axis = vit_tensor.tensor_axis()
    copies = [p for name, p in made.named_parameters() if "ln_" in name or "wpe" in name]
    optimizer, losses, gaps = torch.optim.AdamW(made.parameters(), lr=3e-3), [], []
    for batch in texts:
        words = batch["input_ids"].to(hpnb.device())
        loss = made(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        first = [p.detach().clone() for p in copies]
        hpnb.data_parallel.broadcast(first, axis)
        losses.append(float(loss.detach()))
        gaps.append(distance(copies, first))
    words = test["input_ids"].to(hpnb.device())
    with torch.no_grad():
        whole = float(made.eval()(input_ids=words, labels=words).loss)
    alone = hpnb.models.gpt2(SIZE, device=hpnb.device())
    saved, _ = tied_weights.saved(full_state_dict(made), alone, test)
    return losses, gaps, (whole, saved)
