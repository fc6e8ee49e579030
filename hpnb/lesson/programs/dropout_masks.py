"""What notebook 07 asks of dropout on its ranks: a GPT-2 whose masks follow a policy, and the masks.

    pool.run(dropout_masks.record_masks, "rank states")      {place: what is dropped there}, of each rank

A policy is what the ranks' random generators do:

    "rank states"    hpnb's: equal where an activation is replicated, different where it is sharded
    "a seed each"    every rank has a seed of its own: different everywhere
    "one seed"       all have the same seed and nothing else is done: equal as long as all draw as many

"As many" depends on the device. A CPU's generator advances with every number. A GPU's (Philox) advances by
the rounds that all its threads need for a tensor, so tensors of one round leave equal states whatever their
size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import hpnb
from hpnb.dropout_rng import DropoutRng
from hpnb.lesson.programs.device_timing import all_ranks, random_tokens
from hpnb.models import GPT2_SIZES
from hpnb.tensor_parallel import parallelize

POLICIES = ("rank states", "a seed each", "one seed")
PLACES = ("attention", "MLP")
SIZE = replace(GPT2_SIZES["laptop"], layers=2)


def seed_ranks(policy: str, seed: int) -> None:
    """Seed PyTorch's generators of this rank as `policy` does."""
    torch.manual_seed(seed + (hpnb.rank() if policy == "a seed each" else 0))


def build_model(policy: str, dropout: float, sequence: bool = False) -> Any:
    """A tensor-parallel GPT-2 whose masks follow `policy`, with seeded generators. Every rank calls it."""
    model: Any = hpnb.models.gpt2(SIZE, dropout=dropout, attention="eager", device=hpnb.device())
    parallelize(model, all_ranks("tp"), "1d", sequence)
    if policy != POLICIES[0]:
        _disable_rank_states(model)
    seed_ranks(policy, 7)
    return model


def _disable_rank_states(model: Any) -> None:
    """Let every place draw from the default generator, as if ranks had no random state of their own."""
    mode = next(
        vars(m)["_hpnb_tensor_parallel"] for m in model.modules() if "_hpnb_tensor_parallel" in vars(m)
    )
    rng: DropoutRng = mode.dropout_rng
    rng.use_rank_state = lambda: None  # type: ignore[method-assign]


def record_masks(policy: str, dropout: float = 0.5, sequence: bool = False) -> dict[str, torch.Tensor]:
    """What is dropped in the first block, on the CPU: {"attention": (s, s), "MLP": (tokens, h)}.

    Of this rank's first head, and of its tokens of the first sample. 1 is dropped, 0 kept, -1 not computed (a
    causal attention sees nothing later).
    """
    model = build_model(policy, dropout, sequence)
    masks: dict[str, torch.Tensor] = {}

    def attention(module: Any, args: Any, output: Any) -> None:
        first = output[1][0, 0].detach()  # (s, s), of the first sample's first head
        visible = torch.ones_like(first).tril()
        masks["attention"] = torch.where(visible == 1, (first == 0).to(visible.dtype), -1.0)

    def mlp(module: Any, args: Any, output: Any) -> None:
        masks["MLP"] = (output[0] == 0).to(torch.float32)  # it is hardly ever 0 by itself

    model.transformer.h[0].attn.register_forward_hook(attention)
    model.transformer.h[0].mlp.register_forward_hook(mlp)
    with torch.no_grad():
        model(input_ids=random_tokens(SIZE, 2)["input_ids"])
    return {place: mask.to("cpu", torch.int8) for place, mask in masks.items()}
