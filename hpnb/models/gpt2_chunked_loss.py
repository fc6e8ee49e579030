"""A GPT-2 whose training forward gives its loss and no logits, whole or tensor-parallel.

    model = hpnb.models.chunk_loss(hpnb.models.gpt2("124m"), 1024)
    model(input_ids=ids, labels=ids).loss.backward()          # never more than 1,024 rows of logits at once
    model.eval(); model(input_ids=ids).logits                 # without labels or gradients: as before

`linear_cross_entropy.py` has the computation; here it is connected to a GPT2LMHeadModel. The output layer
computes the loss in its own forward, so hooks, ZeRO's shards, a tied weight and a sharded vocabulary stay as
they are: to all of them it is a layer whose output is one number.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2LMHeadModel
from transformers.utils import ModelOutput

from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.models.in_place_cross_entropy import VocabShard
from hpnb.models.linear_cross_entropy import (
    LossSum,
    chunked_cross_entropy,
    cross_entropy_sum,
    mean_over_targets,
)
from hpnb.models.model_anatomy import Inputs, Part, WrappedAnatomy, wrap_anatomy

M = TypeVar("M", bound=nn.Module)


@dataclass
class LossOnly(ModelOutput):  # type: ignore[misc]
    """The outputs of a forward that has kept no logits."""

    loss: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None

    @property
    def logits(self) -> torch.Tensor:
        raise AttributeError(
            "a loss in chunks keeps no logits: read outputs.loss, or leave the chunks out (loss_chunk=0)"
        )


def chunk_loss(model: M, chunk: int, recompute: bool = False, backend: Any = None) -> M:
    """Let `model` compute its loss `chunk` tokens at a time, in place, whenever it is given labels to train.

    Call it after `hpnb.tensor_parallel.parallelize(model, ...)`, if that is used, and before a pipeline or
    `fully_shard`.

    Args:
        recompute: see `chunked_cross_entropy`; for many in-flight microbatches on the last stage.
        backend: of torch.compile for the cross entropy, such as "inductor"; None compiles nothing.

    Raises:
        TypeError: not a GPT2LMHeadModel.
        ValueError: a chunk below 1, a model that has it already, or one whose output layer is sharded along
            its hidden size.
    """
    if not isinstance(model, GPT2LMHeadModel):
        raise TypeError(without_chunks(type(model).__name__))
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"loss_chunk={chunk!r} is no number of tokens; use 1 or more")
    head = model.lm_head
    if isinstance(head.__dict__.get("forward"), ChunkedHead):
        raise ValueError("this model computes its loss in chunks already")
    if head.weight.shape[1] != model.config.n_embd:
        raise ValueError(
            f"an output layer of shape {tuple(head.weight.shape)} is cut along its width of "
            f"{model.config.n_embd}, and its logits are sums over ranks; use tensor parallelism of mode '1d'"
        )
    _ChunkedLossHooks(model, chunk, recompute, backend)
    return model


def without_chunks(kind: str) -> str:
    """The sentence for a model of class `kind`."""
    return f"a loss in chunks is for a GPT2LMHeadModel, not for a {kind}; leave loss_chunk out"


class ChunkedHead:
    """Replaces the forward of an output layer: given targets it returns the summed loss, and no logits.

    Args:
        head: without a bias; its weight is (V, h).
        loss_sum, recompute, backend: see `chunked_cross_entropy`.
    """

    def __init__(
        self,
        head: nn.Module,
        chunk: int,
        loss_sum: LossSum = cross_entropy_sum,
        recompute: bool = False,
        backend: Any = None,
    ) -> None:
        self.head, self.chunk, self.loss_sum = head, chunk, loss_sum
        self.recompute, self.backend = recompute, backend
        self.targets: torch.Tensor | None = None

    def set_labels(self, labels: torch.Tensor | None) -> None:
        """The next forwards have these labels (B, s), where position i predicts label i + 1; or none."""
        self.targets = None if labels is None else F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]

    @property
    def gives_loss(self) -> bool:
        """Whether a forward gives the loss: it has targets, and is to be trained."""
        return self.targets is not None and torch.is_grad_enabled()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.targets is None or not self.gives_loss:
            logits: torch.Tensor = type(self.head).forward(self.head, hidden)  # (B, s, V)
            return logits
        if self.targets.shape != hidden.shape[:-1]:
            raise ValueError(
                f"labels {tuple(self.targets.shape)} do not fit hidden states {tuple(hidden.shape)}: a loss "
                "in chunks needs a label for each token"
            )
        weight: Any = self.head.weight
        targets = self.targets.to(hidden.device).flatten()
        return chunked_cross_entropy(
            hidden.flatten(0, 1), weight, targets, self.chunk, self.loss_sum, self.recompute, self.backend
        )


class _ModelLossSum:
    """The summed loss as the model's own `loss_function` computes it: of a vocabulary shard's logits
    (c, V / t), or by whatever function somebody has set."""

    def __init__(self, loss_function: Any, vocab_size: int) -> None:
        self.loss_function, self.vocab_size = loss_function, vocab_size
        self.vocab_shard: VocabShard | None = getattr(loss_function, "vocab_shard", None)

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss_function(
            logits, None, vocab_size=self.vocab_size, num_items_in_batch=1, shift_labels=targets
        )
        return loss


def _check_sums(loss_function: Any) -> None:
    """A function that ignores the count would return a mean for each chunk, and the loss be their sum."""
    taken = inspect.signature(loss_function).parameters
    if lost := [name for name in ("num_items_in_batch", "shift_labels") if name not in taken]:
        raise ValueError(
            f"the model's loss_function {getattr(loss_function, '__name__', loss_function)} takes no "
            f"{' and no '.join(lost)}, by which a loss in chunks asks for the sum over a chunk of targets: "
            "let it take both, as transformers' ForCausalLMLoss does, or use loss_chunk=0"
        )


class _ChunkedLossHooks:
    """Everything that `chunk_loss` puts around a model and its output layer."""

    def __init__(self, model: Any, chunk: int, recompute: bool, backend: Any) -> None:
        loss_function = vars(model).get("_loss_function")  # of sharded logits, or the user's
        self.loss_sum: LossSum = cross_entropy_sum
        if loss_function is not None:
            _check_sums(loss_function)
            self.loss_sum = _ModelLossSum(loss_function, model.config.vocab_size)
        head = ChunkedHead(model.lm_head, chunk, self.loss_sum, recompute, backend)
        self.head = model.lm_head.forward = head
        model.loss_function = self.loss
        model.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        model.register_forward_hook(self.after_forward, with_kwargs=True, always_call=True)
        wrap_anatomy(model, self.wrap)

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """As transformers calls it, with the output layer's output: the summed loss, or logits (B, s, V)."""
        if logits.dim():
            targets = F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].to(logits.device)
            logits = self.loss_sum(logits.flatten(0, 1), targets.flatten())
        count = (labels[:, 1:] != IGNORE_INDEX).sum() if num_items_in_batch is None else num_items_in_batch
        return mean_over_targets(logits, count)

    def before_forward(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.head.set_labels(kwargs.get("labels"))

    def after_forward(self, _: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        chunked = self.head.gives_loss
        self.head.set_labels(None)
        if not chunked or outputs is None:
            return outputs
        if isinstance(outputs, tuple):
            return (outputs[0], *outputs[2:])
        return LossOnly(outputs.loss, outputs.hidden_states, outputs.attentions)

    def wrap(self, inner: Any) -> WrappedAnatomy:
        return ChunkedAnatomy.around(inner, hooks=self)


@dataclass(frozen=True)
class ChunkedAnatomy(WrappedAnatomy):
    """The parts of such a model, whose head gets the labels from the batch."""

    hooks: _ChunkedLossHooks | None = field(kw_only=True, repr=False, compare=False)

    def with_parts(
        self, embedding: tuple[Part, ...] = (), blocks: tuple[Part, ...] = (), head: tuple[Part, ...] = ()
    ) -> Self:
        """The hooks refer to the output layer, which a stage without a head does not keep."""
        other = super().with_parts(embedding, blocks, head)
        if not head:
            object.__setattr__(other, "hooks", None)
        return other

    def finish(self, hidden: torch.Tensor, inputs: Inputs) -> Any:
        assert self.hooks is not None, "stages with a head have them"
        head, labels = self.hooks.head, inputs.get("labels")
        head.set_labels(labels)
        try:
            outputs, chunked = super().finish(hidden, inputs), head.gives_loss
        finally:
            head.set_labels(None)
        if labels is None:
            return outputs
        head_output = vars(outputs)["logits"]  # not outputs.logits, which gathers sharded logits
        loss = self.hooks.loss(head_output, labels)
        if chunked:
            return LossOnly(loss)
        outputs["loss"] = loss
        return outputs
