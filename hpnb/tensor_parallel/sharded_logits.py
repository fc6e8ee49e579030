"""The loss of a language model whose logits stay sharded along the vocabulary.

Each rank has the logits of a shard of the vocabulary. `mode.cross_entropy` computes the loss from these, and
exchanges three numbers per token. The full logits are gathered only if somebody reads `outputs.logits`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F

from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.models.linear_cross_entropy import mean_over_targets
from hpnb.models.model_anatomy import Inputs
from hpnb.tensor_parallel.lazy_logits import with_lazy_logits
from hpnb.tensor_parallel.mode import TensorParallelMode


def keep_logits_sharded(
    model: Any, mode: TensorParallelMode, vocab_size: int
) -> Callable[[Any, Inputs], Any]:
    """Give `model` a loss of sharded logits, and outputs that gather logits when they are read.

    A `loss_function` that somebody has set stays in use. It gets gathered logits.

    Returns:
        What a pipeline's last stage does to the outputs of its head.
    """
    replaced = vars(model).get("_loss_function")  # where transformers keeps what was assigned

    def loss_of_shards(
        logits: torch.Tensor,
        labels: torch.Tensor,
        _: int | None = None,  # the vocabulary's size, which some models pass by position
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: torch.Tensor | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        **__: Any,
    ) -> torch.Tensor:
        """What transformers' ForCausalLMLoss computes, of sharded logits; the mean of no token is 0."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        total, count = mode.cross_entropy(
            logits,
            shift_labels,
            vocab_size,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )
        return mean_over_targets(total, count if num_items_in_batch is None else num_items_in_batch)

    def gather(logits: torch.Tensor) -> torch.Tensor:
        return mode.gather_logits(logits, vocab_size)

    def loss_of_gathered(logits: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = replaced(gather(logits), *args, **options)
        return loss

    loss_function: Callable[..., torch.Tensor] = loss_of_shards
    if replaced is not None:
        loss_function = wraps(replaced)(loss_of_gathered)  # with its name and its parameters

    def finish_outputs(outputs: Any, inputs: Inputs) -> Any:
        labels = inputs.get("labels")
        if labels is None:
            return with_lazy_logits(outputs, gather)
        options: dict[str, Any] = {"vocab_size": vocab_size}  # as a model of transformers calls it
        next_tokens = inputs.get("shift_labels")  # of a batch that was split along its tokens
        if next_tokens is not None:
            options["shift_labels"] = next_tokens
        return with_lazy_logits(outputs, gather, lambda logits: loss_function(logits, labels, **options))

    vars(loss_function)["vocab_shard"] = mode.vocab_shard(vocab_size) if replaced is None else None
    model.loss_function = loss_function
    model.register_forward_hook(lambda module, args, outputs: with_lazy_logits(outputs, gather))
    return finish_outputs
