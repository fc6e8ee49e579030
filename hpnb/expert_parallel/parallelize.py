"""Shard the experts of a transformers model over the ranks of the expert axis.

    parallelize(model, mesh.ep)        # in place; the model's code stays as it is
    outputs = model(**batch)           # of this rank's own samples

transformers stacks the experts of a layer as tensors (E, ...) and looks up by a name how they compute. Each
rank keeps E / ep of them, and that name stands for: dispatch the rows, let the model's own implementation
(grouped products, or its loop over experts) compute them on the rank that has the expert, combine. Everything
else (router, attention, shared experts) is replicated.

Which ranks share an expert? The expert axis takes its ranks from dp x cp, where every rank has tokens of its
own. With dp 4 and ep 2:

    dp rank      0     1     2     3
    experts     0 1   2 3   0 1   2 3         ep groups (0, 1) and (2, 3): together they have all experts
                                              edp groups (0, 2) and (1, 3): the same experts

An expert's gradient has the tokens of its whole ep group already, so it is reduced over `mesh.edp` alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hpnb.expert_parallel.dispatch import check_divides, combine_rows, dispatch_rows, plan_dispatch
from hpnb.gradients import in_backward
from hpnb.mesh import Axis, Mesh, axis_of
from hpnb.models.compare_parts import skip_first_step_check
from hpnb.models.registry import anatomy
from hpnb.placement import Cut, placement_of, set_placement

ExpertsForward = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_numbers = itertools.count()


def parallelize(model: nn.Module, axis: Axis | Mesh) -> ExpertParallel:
    """Keep this rank's experts of `model`, in place, and compute them for the tokens of all ranks of `axis`.

    Args:
        model: of transformers, with layers of experts (Mixtral, Qwen3-MoE, DeepSeek-V3 and others).
        axis: the expert axis, `mesh.ep`; of a mesh that one is taken. On an axis of one rank nothing is sent.

    Raises:
        TypeError: a model without experts, or with experts that are not stacked along their first dim.
        ValueError: experts that do not divide by the ranks.
    """
    axis = axis_of(axis, "ep")
    layers = dict(expert_modules(model))
    if not layers:
        raise TypeError(without_experts(type(model).__name__))
    for name, module in layers.items():
        check_divides(module.num_experts, axis.size, f"{name} of this {type(model).__name__}")
        _check_stacked(name, module)
    experts = ExpertParallel(axis, layers)
    if axis.size > 1:
        skip_first_step_check(model)  # one rank alone would run the forward, and send tokens to nobody
    registered = f"hpnb_experts_{next(_numbers)}"
    for name, module in layers.items():
        _keep_local_experts(name, module, axis)
    ALL_EXPERTS_FUNCTIONS.register(registered, experts.compute)
    for module in layers.values():
        module.config._experts_implementation = registered
    _note_empty_batches(model, experts)
    return experts


def without_experts(kind: str, biased: bool = False) -> str:
    """The sentence for a model of class `kind`; `biased` if a selection bias was asked for, and not ep."""
    what, instead = "expert parallelism shards", "use ep_size=1"
    if biased:
        what, instead = "a selection bias keeps equally busy", "leave selection_bias_rate out"
    return f"a {kind} has no experts that transformers computes as one, which {what}; {instead}"


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of every layer of experts whose computing transformers looks up by a name."""
    for name, module in model.named_modules():
        looked_up = hasattr(type(module).forward, "__wrapped__") and hasattr(module, "is_transposed")
        if looked_up and isinstance(getattr(module, "num_experts", None), int):
            yield name, module


class ExpertParallel:
    """The experts of one model over the ranks of `axis`, and how many tokens each of them got.

    Attributes:
        num_experts: {name of a layer: E}.
        tokens_per_expert: {name of a layer: (E,)}: rows of this rank's tokens since `clear_tokens`, of
            forwards in training. An empty batch has none, although a block runs on one sample of zeros.
        in_batch: gives (s,), False for tokens of each sequence that do not count, because context parallelism
            has added them; or None if all count.
    """

    def __init__(self, axis: Axis, layers: dict[str, Any]) -> None:
        self.axis = axis
        self.num_experts = {name: module.num_experts for name, module in layers.items()}
        self.tokens_per_expert: dict[str, torch.Tensor] = {}
        self.in_batch: Callable[[], torch.Tensor | None] = lambda: None
        self._before: dict[str, str] = {
            name: module.config._experts_implementation or "eager" for name, module in layers.items()
        }
        self._name_of = {id(module): name for name, module in layers.items()}
        self._empty: set[str] = set()  # layers whose block got a batch without samples

    def __deepcopy__(self, _: dict[int, object]) -> ExpertParallel:
        """Itself: the copy of a model sends its tokens to the same ranks."""
        return self

    def compute(
        self, module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """What transformers calls for a layer of experts: (n, h), (n, k), (n, k) -> (n, h)."""
        num_experts = module.num_experts * self.axis.size
        plan = plan_dispatch(chosen, num_experts, self.axis)
        name = self._name_of.get(id(module))
        if name is not None and module.training and not in_backward():  # where it recomputes
            before = self.tokens_per_expert.get(name)
            counts = plan.tokens_per_expert
            if (in_batch := self.in_batch()) is not None:
                counts = _count_in_batch(chosen, in_batch, num_experts)
            counts = torch.zeros_like(counts) if name in self._empty else counts
            self.tokens_per_expert[name] = counts if before is None else before + counts
        rows = dispatch_rows(hidden, plan, self.axis)  # (r, h)
        results = self._compute_local(module, rows, plan.experts)
        return combine_rows(results, weights, plan, self.axis).to(hidden.dtype)

    def note_samples(self, name: str, block: nn.Module, args: tuple[Any, ...]) -> None:
        """Hook before the block that has the layer `name`: whether its batch has samples."""
        if in_backward():
            return
        is_empty = bool(args) and isinstance(args[0], torch.Tensor) and args[0].size(0) == 0
        (self._empty.add if is_empty else self._empty.discard)(name)

    def clear_tokens(self) -> dict[str, torch.Tensor]:
        """{name of a layer: (E,)} of this rank since the last call, which starts the count again."""
        counted, self.tokens_per_expert = self.tokens_per_expert, {}
        return counted

    def _compute_local(self, module: Any, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """(r, h) -> (r, h), by the implementation that the model had."""
        if len(rows):
            name = self._name_of.get(id(module)) or next(iter(self._before))  # a copy's layers have no name
            forward: ExpertsForward = ALL_EXPERTS_FUNCTIONS.get_interface(
                self._before[name], type(module).forward.__wrapped__
            )
            ones = rows.new_ones((len(rows), 1))
            return forward(module, rows, experts.unsqueeze(1), ones)
        # No token came. The backward must still take part in the exchange, and weights get gradients of zero.
        nothing = [parameter[:0].sum() for parameter in module.parameters()]
        return rows + torch.stack(nothing).sum()


def _count_in_batch(chosen: torch.Tensor, in_batch: torch.Tensor, num_experts: int) -> torch.Tensor:
    """(E,): the rows of each expert, of tokens that are in the batch: (B s, k), (s,) -> (E,).

    A sum of zeros and ones: how many tokens a mask selects, the CPU would have to wait for.
    """
    ones = in_batch[:, None].expand(len(chosen) // len(in_batch), -1, chosen.size(1))  # (B, s, k)
    counts = chosen.new_zeros(num_experts)
    return counts.scatter_add_(0, chosen.reshape(-1), ones.reshape(-1).to(counts))


def _note_empty_batches(model: nn.Module, experts: ExpertParallel) -> None:
    try:
        blocks = anatomy(model).blocks
    except TypeError:  # a model that hpnb does not know gets no placeholder (placeholder_sample.py)
        return
    for block in blocks:
        for name in experts.num_experts:
            if name.startswith(f"{block.name}."):  # first, as the hook that adds the placeholder comes later
                note = partial(experts.note_samples, name)
                block.module.register_forward_pre_hook(note, prepend=True)


def _check_stacked(name: str, module: Any) -> None:
    for path, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if tensor.dim() == 0 or tensor.size(0) != module.num_experts:
            raise TypeError(
                f"{name}.{path} is {tuple(tensor.shape)}, which is not stacked over its "
                f"{module.num_experts} experts, so expert parallelism cannot shard it; use ep_size=1"
            )


@torch.no_grad()
def _keep_local_experts(name: str, module: Any, axis: Axis) -> None:
    """Cut the stacked weights to this rank's experts; the parameters stay the same objects."""
    local = module.num_experts // axis.size
    start, stop = axis.rank * local, (axis.rank + 1) * local
    for path, p in module.named_parameters():
        placement = placement_of(p, f"{name}.{path}")
        if axis.size > 1:
            placement = placement.cut(Cut("ep", 0, ((start, stop),)))
            p.data = p.data[start:stop].clone()
        set_placement(p, placement)
    module.num_experts = local
