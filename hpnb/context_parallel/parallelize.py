"""Let a causal language model, or a ViT of transformers or timm, attend over the ranks of a context axis.

Everything but attention works on each token by itself, so a rank runs the model on its own tokens:

    context = parallelize(model, mesh.cp, "ring")
    outputs = model(**context.shard_batch(batch))     # logits (B, s / cp, V) of this rank's tokens

Only three things have to know of the whole sequence: positions, which `shard_batch` gives each token; labels,
which it shifts before it splits them; and attention, which transformers looks up by a name that stands for
this axis. The gradients are those of this rank's tokens. So they are reduced over dp x cp (`mesh.dp_cp`),
as if every context rank were a replica with tokens of its own, and the loss is divided by the targets of all.

A ViT takes its batch as it is, and splits the tokens after its embeddings (`shard_patches.py`, and
`shard_timm_vit.py` for timm's).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AttentionInterface,
    PreTrainedConfig,
    PreTrainedModel,
    ViTForImageClassification,
)

from hpnb.caller_frame import warn_caller
from hpnb.comm import gather_slices
from hpnb.context_parallel.all_gather import all_gather_attention
from hpnb.context_parallel.ring import Ring, ring_attention
from hpnb.context_parallel.shard_patches import shard_patches
from hpnb.context_parallel.shard_sequence import shard_batch, token_mask
from hpnb.context_parallel.shard_timm_vit import is_timm_vit, shard_timm_vit
from hpnb.context_parallel.ulysses import too_few_heads_message, ulysses_attention
from hpnb.context_parallel.visibility import Visibility
from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.layout import CP_MODES, CP_MODES_IN_WORDS
from hpnb.mesh import Axis, Mesh, axis_of
from hpnb.models.compare_parts import skip_first_step_check
from hpnb.models.linear_cross_entropy import mean_over_targets
from hpnb.models.model_anatomy import Anatomy, Inputs, WrappedAnatomy, wrap_anatomy
from hpnb.models.registry import anatomy, is_known

_numbers = itertools.count()


def parallelize(model: nn.Module, axis: Axis | Mesh, mode: str = "ring") -> ContextParallel:
    """Let `model` attend over the ranks of `axis`, in place. On an axis of one rank nothing changes, and the
    model still shifts labels itself (for another loss see `ContextParallel.shard_batch`).

    Args:
        model: a causal language model or a ViTForImageClassification of transformers, or a ViT of timm
            (`hpnb.models.timm_vit`), also one that is sharded by tensor parallelism.
        axis: the context axis, `mesh.cp`; of a mesh that one is taken.
        mode: "ring" (keys and values travel; zigzag shards), "all-gather" (every rank gathers them; zigzag
            shards) or "ulysses" (all-to-all over heads). A ViT is not causal, so its shards are contiguous.

    Raises:
        TypeError: a model of another kind, or one whose attention transformers cannot exchange.
        ValueError: an unknown mode, dropout in the attention, fewer heads than ranks of "ulysses", or a ViT
            of timm that drops paths.
    """
    axis = axis_of(axis, "cp")
    if mode not in CP_MODES:
        raise ValueError(f"no context-parallel mode {mode!r}; use {CP_MODES_IN_WORDS}")
    of_timm = is_timm_vit(model)
    is_vit = of_timm or isinstance(model, ViTForImageClassification)
    context = ContextParallel(axis, mode, causal=not is_vit)
    if axis.size == 1:
        return context
    if of_timm:
        skip_first_step_check(model)
        context.images = "x"
        context.count_tokens = shard_timm_vit(model, axis, mode, context.attend_to_patches)
        return context
    if not is_vit:
        _check_causal(model)
    assert isinstance(model, PreTrainedModel)
    _check_dropout(model)
    heads = getattr(model.config, "num_attention_heads", axis.size)
    if mode == "ulysses" and heads < axis.size:  # fewer on a rank, by tensor parallelism, the forward refuses
        raise ValueError(too_few_heads_message(heads, axis.size))
    name = f"hpnb_{mode.replace('-', '_')}_{next(_numbers)}"
    AttentionInterface.register(name, context.attend)
    _exchange_attention(model, name)
    skip_first_step_check(model)
    for module in model.modules():  # tensor parallelism gives an attention a config of its own
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            config._attn_implementation = name  # no mask is registered under it, so none is made
    if isinstance(model, ViTForImageClassification):
        context.count_tokens = shard_patches(model, axis)
        return context
    names = frozenset(inspect.signature(model.forward).parameters)
    context.inputs = names if "input_ids" in names else None
    wrap_anatomy(model, _without_shift)
    loss_function = vars(model).get("_loss_function")  # where transformers keeps what was assigned
    if loss_function is None:
        model.loss_function = next_token_loss
    else:
        model.loss_function = _LossOfShifted(loss_function)
    return context


class ContextParallel:
    """The attention of one model over the ranks of `axis`, and the shards of its batches.

    Attributes:
        in_batch: (s / cp,) of the batch at hand: False for tokens that were added so that it can be split.
            None if none were.
        token_mask: (B, s / cp) of the batch at hand: 0 for padding.
        keeps_mask: whether a batch that is sharded has this as its attention_mask, for a loss that leaves
            padding out. No attention reads it.
        count_tokens: of a ViT, which shards its tokens itself: how many tokens an image of a batch has.
        length: of a ViT: how many tokens an image of the batch at hand has.
        images: of a ViT: what a batch calls its images.
        inputs: what the model's forward takes by name. The first batch with another entry (B, s, ...) gives a
            warning, since that is not shifted as labels are. None warns of nothing.
    """

    keeps_mask = False
    count_tokens: Callable[[Inputs], int] | None = None
    length: int | None = None
    images = "pixel_values"
    inputs: Collection[str] | None = None

    def __init__(self, axis: Axis, mode: str, causal: bool = True) -> None:
        self.axis, self.mode, self.zigzag = axis, mode, causal and mode != "ulysses"
        self.in_batch: torch.Tensor | None = None
        self.token_mask: torch.Tensor | None = None
        self._packed = False  # whether the positions of the batch at hand may tell texts apart
        self._texts: dict[Visibility, tuple[torch.Tensor, Visibility]] = {}  # of the last layer

    def __deepcopy__(self, _: dict[int, object]) -> ContextParallel:
        """Itself: the copy of a model attends over the same ranks."""
        return self

    def shard_batch(self, batch: Mapping[str, Any], always_shift: bool = False) -> dict[str, Any]:
        """This rank's tokens of `batch`; see `hpnb.context_parallel.shard_batch`. The next forwards are
        those of this batch. Only `labels` are shifted.

        Args:
            always_shift: shift labels on an axis of one rank, too, for a loss that compares logits[:, i] with
                labels[:, i]. Without it one rank gets the batch as it is, because the loss that the model
                computes shifts labels there; a loss that does not would be another one on one rank.
        """
        if self.axis.size == 1:
            labels = batch.get("labels")
            if always_shift and isinstance(labels, torch.Tensor) and labels.dim() > 1:  # an image's is (B,)
                return {**batch, "labels": F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)}
            return dict(batch)
        if self.count_tokens is not None:
            _check_images(batch, self.images)
            self.length = self.count_tokens(batch)
            return dict(batch)
        self._warn_of_unshifted(batch)
        # As in transformers, positions tell texts apart only where no mask says what tokens see.
        self._packed = batch.get("position_ids") is not None and batch.get("attention_mask") is None
        self._texts = {}
        sharded = self.inputs_of_outputs(batch)
        self.in_batch, self.token_mask = token_mask(batch, self.axis.rank, self.axis.size, self.zigzag)
        return {**sharded, "attention_mask": self.token_mask} if self.keeps_mask else sharded

    def _warn_of_unshifted(self, batch: Mapping[str, Any]) -> None:
        """Once: of what a criterion may read beside labels, which are shifted."""
        shape = getattr(batch.get("input_ids"), "shape", None)
        if self.inputs is None or shape is None:
            return
        for name, value in batch.items():
            known = name in self.inputs or name == "labels"
            if known or not isinstance(value, torch.Tensor) or value.shape[:2] != shape:
                continue
            self.inputs = None
            warn_caller(
                f"context parallelism shifts labels, so that labels[:, i] is the target of token i, and "
                f"splits {name!r} {tuple(value.shape)} as it is. If its entries belong to labels, as weights "
                f"do, shift them in the batch too: torch.nn.functional.pad({name}[:, 1:], (0, 1)). If they "
                "belong to tokens, or are shifted, this is right"
            )
            return

    def inputs_of_outputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What a criterion gets beside the outputs: this rank's tokens of `batch`, or all its images."""
        if self.count_tokens is not None:
            return dict(batch)
        return shard_batch(batch, self.axis.rank, self.axis.size, self.zigzag)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        position_ids: torch.Tensor | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """What transformers calls for softmax(q k^T) v: (B, H, s / cp, d) -> (B, s / cp, H, d)."""
        if attention_mask is not None or s_aux is not None or dropout:
            what = "an attention mask of its own" if attention_mask is not None else "attention sinks"
            what = f"attention dropout {dropout}" if dropout else what
            raise ValueError(f"{type(module).__name__} has {what}, which context parallelism does not split")
        scale = query.size(-1) ** -0.5 if scaling is None else scaling
        ring = Ring.of(self.axis, query.size(2), self.zigzag)
        visible = Visibility(getattr(module, "is_causal", True), sliding_window, length=self.length)
        if self._packed:
            if position_ids is None:
                raise ValueError(
                    f"{type(module).__name__} gets no position_ids, by which packed texts are told apart; "
                    "leave them out of the batch, or use cp_size=1"
                )
            visible = self._with_texts(visible, position_ids, ring, query.size(0))
        return self._over_ranks(query, key, value, ring, visible, scale, softcap).transpose(1, 2), None

    def attend_to_patches(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """What a ViT of timm calls for F.scaled_dot_product_attention: (B, H, s / cp, d) in and out."""
        if attn_mask is not None or is_causal or dropout_p or enable_gqa:
            raise ValueError(
                "under context parallelism a ViT of timm has no mask, no dropout of attention weights and as "
                "many key as query heads: all patches see each other; leave these out, or use cp_size=1"
            )
        ring = Ring.of(self.axis, query.size(2), self.zigzag)
        scale = query.size(-1) ** -0.5 if scale is None else scale
        return self._over_ranks(query, key, value, ring, Visibility(False, length=self.length), scale)

    def _over_ranks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ring: Ring,
        visible: Visibility,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        if self.mode == "ulysses":
            return ulysses_attention(query, key, value, self.axis, visible, scale, softcap)
        width = max(key.size(-1), value.size(-1))  # latent attention's differ, and travel as one tensor
        q, k, v = (  # a pad by 0 would copy
            t if t.size(-1) == width else F.pad(t, (0, width - t.size(-1))) for t in (query, key, value)
        )
        over_ranks = ring_attention if self.mode == "ring" else all_gather_attention
        return over_ranks(q, k, v, ring, visible, scale, softcap)[..., : value.size(-1)]

    def _with_texts(
        self, visible: Visibility, position_ids: torch.Tensor, ring: Ring, samples: int
    ) -> Visibility:
        """The same, with the beginnings of packed texts. The layers of a model ask for the same ones."""
        known = self._texts.get(visible)
        if known is not None and known[0] is position_ids:
            return known[1]
        starts = (ring.places(position_ids.device) - position_ids).expand(samples, -1)  # (B, s / cp)
        if self.mode == "ulysses":  # of all tokens
            starts = gather_slices(starts.contiguous(), self.axis, 1, (starts.size(1),) * self.axis.size)
        packed = replace(visible, starts=starts)
        self._texts[visible] = position_ids, packed
        return packed


def next_token_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORE_INDEX,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Cross entropy of logits (B, s, V) where `labels` (B, s) are the next tokens already; () in float32 or
    wider. The mean over no target is 0."""
    targets = (labels if shift_labels is None else shift_labels).to(logits.device).reshape(-1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, logits.size(-1))
    total = F.cross_entropy(wide, targets, ignore_index=ignore_index, reduction="sum")
    count = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return mean_over_targets(total, count)


class _LossOfShifted:
    """A loss function of transformers, called with labels that are the next tokens already."""

    def __init__(self, loss_function: Callable[..., torch.Tensor]) -> None:
        self.loss_function = loss_function
        vars(self).update(getattr(loss_function, "__dict__", {}))  # what tensor parallelism says of it

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.setdefault("shift_labels", labels)
        return self.loss_function(logits, labels, *args, **kwargs)


@dataclass(frozen=True)
class _ShiftedAnatomy(WrappedAnatomy):
    """Of a model whose labels are the next tokens: nobody shifts them once more."""

    def finish(self, hidden: torch.Tensor, inputs: Inputs) -> Any:
        if "labels" in inputs:
            inputs = {**inputs, "shift_labels": inputs["labels"]}
        return super().finish(hidden, inputs)


def _without_shift(inner: Anatomy) -> Anatomy:
    return replace(_ShiftedAnatomy.around(inner), causal=False)


def _check_images(batch: Mapping[str, Any], name: str) -> None:
    if batch.get("attention_mask") is not None:
        raise ValueError(
            "under context parallelism a ViT takes no attention_mask; leave it out: all patches are seen"
        )
    if not isinstance(images := batch.get(name), torch.Tensor) or images.dim() != 4:
        raise ValueError(
            f"context parallelism splits the patches of {name} (B, 3, height, width); this batch has "
            f"{', '.join(batch)}"
        )


def _check_causal(model: nn.Module) -> None:
    """Raise TypeError for what is no causal language model of transformers, registered or not."""
    causal, instead = False, "cp_size=1"
    if isinstance(model, PreTrainedModel):
        causal = model.can_generate() and not model.config.is_encoder_decoder
        if is_known(model):
            causal, instead = anatomy(model).causal, "cp_size=1, or pp_size and tp_size"
    if not causal:
        raise TypeError(
            "context parallelism splits the tokens of causal language models and of ViTs, those of timm that "
            "hpnb.models.timm_vit has registered and transformers' ViTForImageClassification, and a "
            f"{type(model).__name__} is neither; use {instead}"
        )


def _exchange_attention(model: PreTrainedModel, name: str) -> None:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)  # which only warns where it can do nothing
    if model.config._attn_implementation != name:
        raise TypeError(
            f"a {type(model).__name__} does not call transformers' attention interface, so context "
            "parallelism cannot exchange its attention; use cp_size=1"
        )
    if not is_known(model):
        model.set_attn_implementation(before)
        raise TypeError(
            f"context parallelism has to know the parts of a {type(model).__name__}: register them with "
            "hpnb.models.register, as parts that have causal=True, or use cp_size=1"
        )


def _check_dropout(model: PreTrainedModel) -> None:
    for name in ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob"):
        if probability := getattr(model.config, name, 0.0):
            raise ValueError(
                f"config.{name}={probability} drops attention weights, of which context parallelism never "
                f"has a row in one place; set config.{name}=0.0 before the model is made"
            )
