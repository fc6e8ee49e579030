"""A GPT-2 whose training forward gives its loss and no logits (`linear_cross_entropy.py`), whole or cut.

model = hpnb.models.chunk_loss(hpnb.models.gpt2("124m"), 1024)
model(input_ids=ids, labels=ids).loss.backward()          # at no time more than 1,024 rows of logits
model.eval(); model(input_ids=ids).logits                 # without labels, or without gradients: as before
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2LMHeadModel
from transformers.utils import ModelOutput

from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.models.in_place_cross_entropy import VocabShard
from hpnb.models.linear_cross_entropy import ChunkedHead, Total, cross_entropy_sum
from hpnb.models.model_anatomy import Anatomy, Inputs, Part, wrap, wrapping

M = TypeVar("M", bound=nn.Module)


@dataclass
class LossOnly(ModelOutput):  # type: ignore[misc]
    """What a forward gives that has kept no logits."""

    loss: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None

    @property
    def logits(self) -> torch.Tensor:
        raise AttributeError(
            "a loss in chunks keeps no logits: read outputs.loss, or leave the chunks out (loss_chunk=0)"
        )


def chunk_loss(model: M, chunk: int, recompute: bool = False, backend: Any = None) -> M:
    """Let `model` compute its loss `chunk` tokens at a time, in place, wherever it is given labels to train.

    Done after `hpnb.tensor_parallel.parallelize(model, ...)`, if at all, and before a pipeline or
    `fully_shard`.

    Args:
        recompute: see `chunked_cross_entropy`; for schedules that hold many microbatches on the last stage.
        backend: of torch.compile for the cross entropy, such as "inductor"; None compiles nothing.

    Raises:
        TypeError: not a GPT2LMHeadModel.
        ValueError: a chunk below 1, a model that has it already, or one whose output layer is cut along its
            width.
    """
    if not isinstance(model, GPT2LMHeadModel):
        raise TypeError(f"a loss in chunks is for a GPT2LMHeadModel, not for a {type(model).__name__}")
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
    _Chunks(model, chunk, recompute, backend)
    return model


class _OfCutLogits:
    """The summed loss of a rank's logits (c, V / t), or whatever somebody has given the model for a loss."""

    def __init__(self, given: Any, vocab_size: int) -> None:
        self.given, self.vocab_size = given, vocab_size
        self.words: VocabShard | None = getattr(given, "words", None)

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.given(
            logits, None, vocab_size=self.vocab_size, num_items_in_batch=1, shift_labels=targets
        )
        return found


class _Chunks:
    """What stands around a model and its output layer."""

    def __init__(self, model: Any, chunk: int, recompute: bool, backend: Any) -> None:
        self.given = vars(model).get("_loss_function")  # of logits that are cut, or anybody's own
        self.total: Total = cross_entropy_sum
        if self.given is not None:
            self.total = _OfCutLogits(self.given, model.config.vocab_size)
        head = ChunkedHead(model.lm_head, chunk, self.total, recompute, backend)
        self.head = model.lm_head.forward = head
        model.loss_function = self.loss
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after, with_kwargs=True, always_call=True)
        wrap(model, wrapping(model, self.around))

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """As transformers calls it. Of what the output layer gives: the sum, or logits (B, s, V)."""
        if logits.dim():
            targets = F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].to(logits.device)
            logits = self.total(logits.flatten(0, 1), targets.flatten())
        count = (labels[:, 1:] != IGNORE_INDEX).sum().clamp(min=1)
        return logits / (count if num_items_in_batch is None else num_items_in_batch)

    # --- the whole model ---------------------------------------------------------------------------------

    def before(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.head.tell(kwargs.get("labels"))

    def after(self, _: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        chunked = self.head.gives_loss
        self.head.tell(None)
        if not chunked or outputs is None:
            return outputs
        if isinstance(outputs, tuple):
            return (outputs[0], *outputs[2:])
        return LossOnly(outputs.loss, outputs.hidden_states, outputs.attentions)

    # --- in parts ----------------------------------------------------------------------------------------

    def around(self, inner: Anatomy) -> ChunkedAnatomy:
        return ChunkedAnatomy(
            inner.embedding,
            inner.blocks,
            inner.head,
            inner.tied,
            causal=inner.causal,
            inner=inner,
            chunks=self,
        )


@dataclass(frozen=True)
class ChunkedAnatomy(Anatomy):
    """An anatomy around another, whose head is told the labels."""

    inner: Anatomy = field(kw_only=True)
    chunks: _Chunks = field(kw_only=True, repr=False, compare=False)

    def embed(self, inputs: Inputs) -> torch.Tensor:
        return self._own.embed(inputs)

    def run(self, block: Part, hidden: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        return self._own.run(block, hidden, inputs)

    def finish(self, hidden: torch.Tensor, inputs: Inputs) -> Any:
        head, labels = self.chunks.head, inputs.get("labels")
        head.tell(labels)
        try:
            found, chunked = self._own.finish(hidden, inputs), head.gives_loss
        finally:
            head.tell(None)
        if labels is None:
            return found
        total = vars(found)["logits"]  # as the head gave it; of a cut model, to read .logits is to gather
        loss = self.chunks.loss(total, labels)
        if chunked:
            return LossOnly(loss)
        found["loss"] = loss
        return found

    def tokens(self, inputs: Inputs) -> tuple[int, int]:
        return self.inner.tokens(inputs)

    @property
    def _own(self) -> Anatomy:
        """The inner one with the parts that this one has: a pipeline's layer has some of them."""
        return replace(self.inner, embedding=self.embedding, blocks=self.blocks, head=self.head)
