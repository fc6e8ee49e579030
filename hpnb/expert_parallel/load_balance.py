"""Keep experts equally busy: by a loss over the tokens of all ranks, or by a bias without a loss.

    f_e   share of the tokens that chose expert e          P_e   mean router probability of expert e

    balancing loss   E sum_e f_e P_e           Fedus et al. 2021 (Switch, arXiv 2101.03961), section 2.2
    selection bias   b_e += rate sign(mean load - load_e)        Wang et al. 2024 (arXiv 2408.15664)

The loss is a product of two means, so the mean of the ranks' losses is not the loss of all their tokens. Here
f_e and P_e are means over all ranks, forward and backward, and it is exactly that of one process with the
whole batch. The bias only changes which experts are chosen, never their weights, so it has no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hpnb import comm
from hpnb.expert_parallel.parallelize import ExpertParallel
from hpnb.expert_parallel.router_sums import (
    find_recorders,
    loss_of_sums,
    real_tokens,
    router_sums,
    with_router_sums,
)
from hpnb.mesh import Axis
from hpnb.models.compare_parts import skip_first_step_check
from hpnb.models.model_anatomy import wrap_anatomy
from hpnb.models.placeholder_sample import drop_empty_mask


def balancing_loss(
    router_logits: Sequence[torch.Tensor],
    k: int,
    axis: Axis,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """E sum_e f_e P_e over the tokens and layers of all ranks of `axis`: (), equal on all of them.

    Its gradient is that of a loss to which every rank adds its weight times this one, if the weights of all
    ranks add up to 1. All ranks call it, and run its backward.

    Args:
        router_logits: of each layer, (n, E).
        k: experts of a token.
        attention_mask: (B, s), 0 for padding, with B s = n; by default all tokens count.
    """
    sums = [router_sums(logits, k, attention_mask) for logits in router_logits]
    return loss_of_sums(torch.stack(sums).sum(0), axis)


def share_balancing_loss(model: nn.Module, axis: Axis) -> bool:
    """Let a model that adds a balancing loss compute it over all ranks of `axis`.

    Its outputs' `aux_loss` changes, and `loss` where there is one. A `Pipeline` of it gives outputs with this
    `aux_loss` too, on its last stage (`router_sums.py`), and leaves it to the loss function to add it.

    Returns:
        Whether it adds one: config.output_router_logits, and a router_aux_loss_coef, be it 0.
    """
    config = getattr(model, "config", None)
    adds = getattr(config, "output_router_logits", False) and hasattr(model, "router_aux_loss_coef")
    if not adds:
        return False

    masks: list[Any] = [None]  # of the forward that is under way

    def keep_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """transformers' loss is 0 / 0 without a token, so a mask that has none becomes ones: that loss is
        then finite, and `replace_loss` subtracts it."""
        masks[0] = mask = kwargs.get("attention_mask")
        if not isinstance(mask, torch.Tensor):
            return None
        return args, kwargs | {"attention_mask": torch.where(mask.any(), mask, torch.ones_like(mask))}

    def replace_loss(module: Any, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> Any:
        attention_mask, masks[0] = masks[0], None
        if getattr(outputs, "aux_loss", None) is None or not outputs.router_logits:
            return None
        mask = real_tokens(outputs.router_logits[0], kwargs.get("input_ids"), attention_mask)
        local = outputs.aux_loss
        shared = balancing_loss(outputs.router_logits, module.num_experts_per_tok, axis, mask)
        if outputs.loss is not None:  # which has the local one in it
            outputs.loss = outputs.loss + module.router_aux_loss_coef * (shared.to(outputs.loss) - local)
        outputs.aux_loss = shared
        return outputs

    known: Any = model
    wrapper = partial(
        with_router_sums, recorders=find_recorders(model), k=known.num_experts_per_tok,
        coefficient=known.router_aux_loss_coef, axis=axis,
    )  # fmt: skip
    wrap_anatomy(model, wrapper)
    if axis.size > 1:
        skip_first_step_check(model)  # one rank alone would run it, and wait for the sums of the others
    model.register_forward_pre_hook(drop_empty_mask, with_kwargs=True)
    model.register_forward_pre_hook(keep_mask, with_kwargs=True)
    model.register_forward_hook(replace_loss, with_kwargs=True)
    return True


class ExpertLoads:
    """A record of how many tokens each expert got in each step, from all ranks of `axis`.

        loads = ExpertLoads(boosted.experts, plugin.mesh.dp_cp)
        ...                              # forward, backward
        optimizer.step(); loads.end_step()
        loads.imbalances                 # one number a step; hpnb.plot.expert_loads draws it

    A `SelectionBias` has one as `.loads` and ends its steps itself.

    Attributes:
        steps: of each step {name of a layer: (E,) on the CPU}.
    """

    def __init__(self, experts: ExpertParallel, axis: Axis) -> None:
        self.experts, self.axis = experts, axis
        self.steps: list[dict[str, torch.Tensor]] = []
        experts.clear_tokens()

    @torch.no_grad()
    def end_step(self) -> dict[str, torch.Tensor]:
        """Note the tokens since the last call. All ranks of the axis call it.

        Returns:
            {name of a layer: (E,) on the CPU}.
        """
        counted, by_layer = self.experts.clear_tokens(), {}
        names = [name for name in self.experts.num_experts if name in counted]  # of a pipeline stage's layers
        if names:
            total = comm.all_reduce(torch.cat([counted[name] for name in names]), self.axis).cpu()
            by_layer = dict(zip(names, total.split([len(counted[name]) for name in names]), strict=True))
        self.steps.append(by_layer)
        return by_layer

    @property
    def imbalances(self) -> list[float]:
        """Of each step that had tokens, the mean over layers of `imbalance`."""
        ratios = [[imbalance(load) for load in step.values() if load.any()] for step in self.steps]
        return [sum(of_layers) / len(of_layers) for of_layers in ratios if of_layers]


class SelectionBias:
    """Moves the selection bias of the routers after each step, so that loads become equal without a loss.

    Args:
        model: whose routers have a buffer e_score_correction_bias (E,), as DeepSeek-V3's have.
        experts: what counts the tokens of each expert, from `parallelize`.
        axis: whose ranks have other tokens, `mesh.dp_cp`.
        rate: how far a bias moves in a step; the paper uses 0.001.

    Raises:
        TypeError: routers without such a buffer.
        ValueError: a rate that is not above 0.
    """

    def __init__(self, model: nn.Module, experts: ExpertParallel, axis: Axis, rate: float = 0.001) -> None:
        if not rate > 0:
            raise ValueError(f"rate={rate} moves no selection bias; use a rate above 0, such as 0.001")
        self.rate = rate
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._as_given: dict[str, torch.Tensor] = {}
        buffers = dict(model.named_buffers())
        for name in experts.num_experts:
            parent = name.rpartition(".")[0]
            inside = [path for path in buffers if path.startswith(f"{parent}.")]
            bias_names = [path for path in inside if path.endswith("e_score_correction_bias")]
            if not bias_names:
                raise TypeError(
                    f"the router beside {name} of this {type(model).__name__} has no selection bias "
                    "(e_score_correction_bias); balance it by config.output_router_logits=True and "
                    "router_aux_loss_coef"
                )
            path, _, attribute = bias_names[0].rpartition(".")
            self._owners[name] = model.get_submodule(path), attribute
            self._as_given[name] = buffers[bias_names[0]].clone()
        self.loads = ExpertLoads(experts, axis)

    @property
    def biases(self) -> dict[str, torch.Tensor]:
        """{name of a layer: (E,)}: the buffers as they are now. Moving or casting a model makes new ones."""
        return {name: module.get_buffer(attribute) for name, (module, attribute) in self._owners.items()}

    def widen(self) -> None:
        """Undo a cast of the biases to 16 bits, where a step of 0.001 is lost above 0.5 (bf16) or above 4
        (fp16). The first call restores them exactly, and a later one leaves what the cast has rounded."""
        for name, bias in self.biases.items():
            module, attribute = self._owners[name]
            if bias.dtype in (torch.float16, torch.bfloat16) and bias.device.type != "meta":
                exact = self._as_given.get(name, bias)
                module._buffers[attribute] = exact.to(bias.device, torch.float32)
        self._as_given.clear()

    @torch.no_grad()
    def step(self) -> dict[str, torch.Tensor]:
        """Move every bias by the loads since the last call. All ranks call it.

        Returns:
            {name of a layer: (E,)}: tokens of each expert on all ranks.
        """
        loads, biases = self.loads.end_step(), self.biases
        for name, load in loads.items():
            bias = biases[name]
            wide = load.double().to(bias.device)
            bias += self.rate * torch.sign(wide.mean() - wide).to(bias)
        return loads


def imbalance(load: torch.Tensor) -> float:
    """The busiest expert's tokens over the mean, 1 where all are equal: (E,) -> a number.

    Raises:
        ValueError: no token went anywhere.
    """
    total = load.sum().item()
    if not total:
        raise ValueError(
            f"none of the {len(load)} experts got a token; count the loads of a step with tokens"
        )
    return float(load.max().item() * len(load) / total)
