"""The balancing loss of a model whose layers lie on several pipeline stages, where no rank sees all routers.

The loss E sum_e f_e P_e needs no router logits but their sums over tokens and layers, 2 E + 1 numbers:

    p_e   sum of the probabilities of expert e      c_e   how many tokens chose expert e      n   tokens

    stage 0       hidden, sums of layers 0 1        ->  stage 1   hidden, sums of layers 0 1 2 3  ->  ...
    last stage    E sum_e c_e p_e / n^2, each sum taken over the ranks of dp x cp as well

So these sums pass from stage to stage beside the hidden states, and a layer with a router adds those of its
tokens. In the backward their gradient comes back through all stages, next to that of the hidden states.

Every microbatch has its own loss, which is that of one process with the same microbatches on all ranks. It
has the weight of the microbatch's targets, as the rest of the loss has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from hpnb import comm
from hpnb.gradients import in_backward
from hpnb.mesh import Axis
from hpnb.models.model_anatomy import Anatomy, Inputs, Part, WrappedAnatomy

Paths = tuple[tuple[str, int], ...]  # of routers in a block: path, and which output is the logits


# --- sums ------------------------------------------------------------------------------------------------


def router_sums(logits: torch.Tensor, k: int, is_real: torch.Tensor | None = None) -> torch.Tensor:
    """p_e (with a gradient), c_e and n of router logits (n, E): (2 E + 1,), in float32 or wider.

    Args:
        is_real: n numbers of any shape, 0 for padding; by default all tokens count.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probability = wide.softmax(-1)  # (n, E)
    real = torch.ones_like(probability[:, :1]) if is_real is None else is_real.reshape(-1, 1).to(probability)
    with torch.no_grad():
        is_chosen = torch.zeros_like(probability).scatter(-1, probability.topk(k, -1).indices, 1.0)
        counts, tokens = (is_chosen * real).sum(0), real.sum(0)
    return torch.cat([(probability * real).sum(0), counts, tokens])


def loss_of_sums(sums: torch.Tensor, axis: Axis) -> torch.Tensor:
    """E sum_e c_e p_e / n^2: (), with every sum taken over the ranks of `axis`. All of them call it."""
    total = comm.all_reduce(comm.replicate(sums, axis), axis)  # a sum in the backward too
    num_experts = len(total) // 2
    probabilities, counts, tokens = total.split([num_experts, num_experts, 1])
    loss: torch.Tensor = (counts.detach() * probabilities).sum() / tokens[0].detach().clamp(min=1).square()
    return num_experts * loss


def real_tokens(logits: torch.Tensor, input_ids: Any, attention_mask: Any) -> torch.Tensor | None:
    """The `is_real` of router logits. A batch of 0 samples runs on one sample of zeros, which is not real."""
    if isinstance(input_ids, torch.Tensor) and len(input_ids) == 0:
        return logits.new_zeros(len(logits))
    return attention_mask if isinstance(attention_mask, torch.Tensor) else None


# --- routers ---------------------------------------------------------------------------------------------


def find_recorders(model: Any) -> tuple[Any, ...]:
    """What transformers records of such a model for `output_router_logits`."""
    core = getattr(model, "base_model", model)
    recorded = (getattr(type(core), "_can_record_outputs", None) or {}).get("router_logits", ())
    recorded = recorded if isinstance(recorded, list | tuple) else (recorded,)
    return tuple(one for one in recorded if hasattr(one, "target_class"))


def _find_routers(block: Part, recorders: Sequence[Any]) -> Paths:
    return tuple(
        (path, recorder.index)
        for path, module in block.module.named_modules()
        for recorder in recorders
        if _is_recorded(f"{block.name}.{path}", module, recorder)
    )


def _is_recorded(name: str, module: nn.Module, recorder: Any) -> bool:
    of_class = recorder.target_class is not None and isinstance(module, recorder.target_class)
    by_name = recorder.class_name is not None and name.endswith(recorder.class_name)
    inside = recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{name}."
    return (of_class or by_name) and inside


@contextmanager
def _collecting(block: nn.Module, routers: Paths) -> Iterator[list[torch.Tensor]]:
    """The logits of these routers, in a forward of `block` inside. A forward that a backward runs, because it
    recomputes activations, has been collected before."""
    collected: list[torch.Tensor] = []

    def collect(index: int, module: nn.Module, args: Any, output: Any) -> None:
        if not in_backward():
            collected.append(output[index] if isinstance(output, tuple) else output)

    hooks = [
        block.get_submodule(path).register_forward_hook(partial(collect, index)) for path, index in routers
    ]
    try:
        yield collected
    finally:
        for hook in hooks:
            hook.remove()


# --- stages ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BalancedAnatomy(WrappedAnatomy):
    """The parts of a model that adds a balancing loss. What passes from a layer to the next is (hidden, sums)
    from the first router on, and outputs have `aux_loss`.

    Attributes:
        routers: of every block.
        k: experts of a token.
        coefficient: of the balancing loss in the loss.
        axis: `mesh.dp_cp`.
    """

    routers: dict[str, Paths] = field(kw_only=True)
    k: int = field(kw_only=True)
    coefficient: float = field(kw_only=True)
    axis: Axis = field(kw_only=True)

    @property
    def has_router_loss(self) -> bool:
        return any(self.routers.values())

    def run(self, block: Part, hidden: Any, inputs: Inputs) -> Any:
        hidden, sums = hidden if isinstance(hidden, tuple) else (hidden, None)
        with _collecting(block.module, self.routers[block.name]) as collected:
            hidden = super().run(block, hidden, inputs)
        for logits in collected:
            real = real_tokens(logits, inputs.get("input_ids"), inputs.get("attention_mask"))
            of_layer = router_sums(logits, self.k, real)
            sums = of_layer if sums is None else sums + of_layer
        return hidden if sums is None else (hidden, sums)

    def finish(self, hidden: Any, inputs: Inputs) -> Any:
        hidden, sums = hidden if isinstance(hidden, tuple) else (hidden, None)
        outputs = super().finish(hidden, inputs)
        if sums is None:
            return outputs
        outputs["aux_loss"] = loss_of_sums(sums, self.axis)
        if (add_to_loss := getattr(outputs, "add_to_loss", None)) is not None:  # of logits that are sharded
            add_to_loss(self.coefficient * outputs["aux_loss"])
        return outputs


def with_router_sums(
    inner: Anatomy, recorders: Sequence[Any], k: int, coefficient: float, axis: Axis
) -> WrappedAnatomy:
    """A wrapper for `wrap_anatomy`."""
    routers = {block.name: _find_routers(block, recorders) for block in inner.blocks}
    return BalancedAnatomy.around(inner, routers=routers, k=k, coefficient=coefficient, axis=axis)
