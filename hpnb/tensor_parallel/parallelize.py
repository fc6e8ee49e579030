"""Cut a transformers model so that the ranks of one axis compute it together.

    model = hpnb.models.vit("laptop", classes=3)
    hpnb.tensor_parallel.parallelize(model, mesh.tp, mode="1d", sequence_parallel=True)
    loss = model(pixel_values=pixels, labels=labels).loss         # the whole batch in, the whole loss out
    loss.backward()
    hpnb.tensor_parallel.full_state_dict(model)                   # as if it had never been cut

The model's class and its forward stay as they are. What changes is read off one table, the role of each
weight (`hpnb.models.roles`): a weight keeps this rank's part under its old name, a linear layer becomes one
that computes with parts, and hooks deal hidden states out before the first block and put them together at the
head. The same table serves every mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hpnb import placement
from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.mesh import Axis
from hpnb.models import Role, anatomy, attentions, roles
from hpnb.models.model_anatomy import Inputs, wrap
from hpnb.placement import Placement, gather_full, placement_of, set_placement
from hpnb.ranks.current_rank import device as this_device
from hpnb.tensor_parallel.cut_anatomy import around
from hpnb.tensor_parallel.lazy_logits import lazily
from hpnb.tensor_parallel.mode import Place, SplitModel, TensorParallelMode
from hpnb.tensor_parallel.modes import make

_MODE = "_hpnb_tensor_parallel"


def parallelize(
    model: nn.Module,
    axis: Axis,
    mode: str = "1d",
    sequence_parallel: bool = False,
    depth: int = 1,
) -> nn.Module:
    """Cut `model` along `axis`, in place, and return it.

    Every rank of the axis passes the same batch and reads the same loss. Parameters stay the same objects, so
    an optimizer that was made before holds the parts now; what it had gathered of a parameter does not fit
    any more. Values are those of the axis's first rank. A model on the meta device stays there, to be filled
    by `hpnb.placement.load_full_state_dict`; another one goes to `hpnb.device()`, one part after the other.

    Args:
        model: one that `hpnb.models` knows: a ViTForImageClassification, GPT2LMHeadModel or
            GPT2ForSequenceClassification, or a class given to `hpnb.models.register`.
        axis: the tensor axis, `mesh.tp`.
        mode: "1d" (columns and rows; any number of ranks), "2d" (q x q ranks), "2.5d" (depth x q x q), "3d"
            (l x l x l).
        sequence_parallel: cut what lies between the matrices along the tokens. For "1d"; the grids cut
            everything anyway.
        depth: the d of "2.5d".

    Raises:
        TypeError: a model of another kind, or a wrapped one.
        ValueError: a mode that this many ranks cannot serve, sizes that do not divide where they must, more
            ranks than heads, a model that has been cut before, or trained parameters with a gradient.
    """
    if _mode(model) is not None:
        raise ValueError("this model has been cut by parallelize before; cut a new one")
    subject = _subject(model)
    how = make(mode, axis, sequence_parallel, depth)
    how.check(subject)
    _cut(subject, axis, how)
    for path in subject.layers:
        old = model.get_submodule(path)
        if (new := how.layer(path, old, subject)) is not None:
            model.set_submodule(path, new)
    for attention in subject.attentions:
        attention.resize(how.heads(attention.heads))
    how.connect(subject)
    words = subject.words
    outputs = None if words is None or not subject.lazy else _keep_logits_cut(model, how, words)
    wrap(model, partial(around, begin=how.begin, outputs=outputs))
    setattr(model, _MODE, how)
    placement.keep_placements(model)
    if not any(p.is_meta for p in model.parameters()):
        model.to(this_device())
    return model


def axes(model: nn.Module) -> tuple[Axis, ...]:
    """The axes along which `model`, or what it wraps, has been cut.

    Raises:
        ValueError: it has not been.
    """
    if (how := _mode(model)) is None:
        raise ValueError(
            "this model has not been cut; hpnb.tensor_parallel.parallelize(model, mesh.tp) does it"
        )
    return how.axes


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """{name: tensor} of the unsplit model, on every rank; all ranks call it.

    Raises:
        ValueError: a model that has not been cut, or one that is cut along another axis too:
            `hpnb.placement.full_state_dict(model, [*axes(model), mesh.dp])` is for that.
    """
    return placement.full_state_dict(model, axes(model))


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """{name: gradient} of the unsplit model's parameters that have one, on every rank; all ranks call it.

    A tied parameter stands under its first name. The errors are those of `full_state_dict`.
    """
    along = {axis.name: axis for axis in axes(model)}
    held = {name: p for name, p in model.named_parameters() if p.grad is not None}
    places = {name: placement_of(p, name) for name, p in held.items()}
    peers: dict[str, list[dict[str, Placement]]] = {}
    for axis in along.values():
        peers[axis.name] = [{} for _ in range(axis.size)]
        dist.all_gather_object(peers[axis.name], places, axis.group)
    found = {}
    for name, p in held.items():
        assert p.grad is not None
        others = {a: [theirs[name] for theirs in peers[a]] for a in places[name].axes}
        found[name] = gather_full(p.grad, places[name], others, along)
    return found


def load_full_state_dict(model: nn.Module, full: Mapping[str, torch.Tensor]) -> None:
    """Fill `model` from the unsplit model's tensors, each rank taking its parts; nothing is sent.

    What is on the meta device gets memory on `hpnb.device()` for its part, and is another Parameter then:
    make the optimizer after.

    Args:
        full: {name: tensor}; read one after the other, so that a mapping that reads files never holds all.

    Raises:
        ValueError: a missing or unexpected name, or another shape.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied one stays one
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                if p not in made:
                    made[p] = nn.Parameter(torch.empty_like(p, device=this_device()), p.requires_grad)
                    set_placement(made[p], placement_of(p, name))
                module._parameters[name] = made[p]
    placement.load_full_state_dict(model, full)


# --- the pieces ---


def _mode(model: nn.Module) -> TensorParallelMode | None:
    for module in model.modules():
        if (how := module.__dict__.get(_MODE)) is not None:
            return how  # type: ignore[no-any-return]
    return None


def _subject(model: nn.Module) -> SplitModel:
    found, table = anatomy(model), roles(model)
    places: dict[str, Place] = {}
    places |= {part.name: "embedding" for part in found.embedding}
    places |= {part.name: "block" for part in found.blocks}
    places |= {part.name: "head" for part in found.head}
    layers: dict[str, tuple[Place, dict[str, Role]]] = {}
    by_parameter = {p: table[name] for name, p in model.named_parameters()}
    for name, p in model.named_parameters(remove_duplicate=False):
        path, _, attribute = name.rpartition(".")
        place = next(places[part] for part in places if path == part or path.startswith(part + "."))
        layers.setdefault(path, (place, {}))[1][attribute] = by_parameter[p]
    return SplitModel(
        model=model,
        anatomy=found,
        attentions=attentions(model),
        roles=table,
        shapes={n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)},
        layers=layers,
        lazy=hasattr(type(model), "loss_function"),
    )


def _cut(subject: SplitModel, axis: Axis, how: TensorParallelMode) -> None:
    """Leave each parameter this rank's part, which is on this rank's device unless it is on meta."""
    for name, p in subject.model.named_parameters():
        if p.grad is not None:
            raise ValueError(
                f"{name} has a gradient, which would not fit its part; cut the model before that"
            )
        whole = p.detach()
        if not p.is_meta:
            whole = whole.to(this_device(), copy=True).contiguous()
            if axis.size > 1:
                dist.broadcast(whole, axis.ranks[0], axis.group)
        place = Placement(name, tuple(p.shape), how.cuts(subject.roles[name], p.shape))
        part = place.take(whole)
        p.data = part.clone() if place.cuts else part
        if place.cuts:
            set_placement(p, place)


def _keep_logits_cut(model: Any, how: TensorParallelMode, words: int) -> Callable[[Any, Inputs], Any]:
    """Gives what a pipeline's last stage does to the outputs of its head."""

    def loss(
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: torch.Tensor | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        **_: Any,
    ) -> torch.Tensor:
        """What transformers' ForCausalLMLoss gives, of logits that are cut; the mean of no token is 0."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        total, count = how.cross_entropy(
            logits,
            shift_labels,
            words,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )
        return total / (count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch)

    vars(loss)["words"] = how.words(words)
    model.loss_function = loss

    def after(module: nn.Module, args: Any, outputs: Any) -> Any:
        return lazily(outputs, lambda logits: how.gather_logits(logits, words))

    def of_a_stage(outputs: Any, inputs: Inputs) -> Any:
        labels = inputs.get("labels")
        of = None if labels is None else lambda logits: loss(logits, labels)
        return lazily(outputs, lambda logits: how.gather_logits(logits, words), of)

    model.register_forward_hook(after)
    return of_a_stage
