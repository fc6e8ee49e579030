"""The loss of a model: its own, or what a transformers model computes from its labels, outside of the model.

    ViTForImageClassification, GPT2ForSequenceClassification    cross entropy of the classes
    GPT2LMHeadModel                                             of the next token, so shifted by one
    a planned model for sequences, tokens or the next token     the same, and of the class of each token
    a model whose `loss_function` was replaced                  that function, in a pipeline

The first two are transformers' formulas, with two differences. Logits keep their dtype if it is float32 or
wider, where transformers casts float64 to float32 too. And the mean over no target is 0 instead of nan, so a
microbatch of padding alone does no harm.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel, ViTForImageClassification
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.models.plan_parts import has_plan
from hpnb.pipeline_parallel.microbatches import TARGET_NAMES

ModelLoss = Callable[[Any, torch.Tensor], torch.Tensor]  # (outputs, labels) -> (), the mean over the targets


def loss_of_outputs(outputs: Any, inputs: Any) -> Any:
    """The criterion where there is none: the model's own loss."""
    if not hasattr(outputs, "loss"):
        raise TypeError(
            f"the model returns a {type(outputs).__name__}, which has no loss; pass a criterion "
            "(outputs, batch) -> loss to execute_pipeline or to the Trainer, also one that was given to boost"
        )
    loss = outputs.loss
    if loss is None and isinstance(inputs, Mapping) and "labels" in inputs:
        raise ValueError(
            f"the batch has labels, and the {type(outputs).__name__} of the last stage has no loss: hpnb "
            "does not know how this model computes one, and stages pass hidden states alone. Pass a "
            "criterion (outputs, batch) -> loss, or use pp_size=1"
        )
    if loss is None:
        names = f"it has {', '.join(map(str, inputs))}" if isinstance(inputs, Mapping) else "it has no names"
        raise ValueError(
            "the loss of the model's outputs is None, which a model gives without labels: is 'labels' in the "
            f"batch? {names}. Otherwise pass a criterion (outputs, batch) -> loss"
        )
    return loss


def find_model_loss(model: nn.Module, in_stages: bool = False) -> ModelLoss | None:
    """The loss that `model` computes from labels; None if the model has to compute it itself. In stages, a
    replaced `loss_function` that takes full logits is called by the last stage as the model would."""
    if type(model) is GPT2ForSequenceClassification:  # which never calls its loss_function
        return partial(classification, model.config)
    replaced = getattr(model, "_loss_function", None)  # where transformers keeps what was assigned
    if replaced is not None:
        return _with_balance(model, partial(_call_loss_function, model, replaced)) if in_stages else None
    if type(model) is GPT2LMHeadModel:
        return causal
    if type(model) is ViTForImageClassification:
        return partial(classification, model.config)
    loss_type = getattr(model, "loss_type", None) if has_plan(model) else None
    if loss_type == "ForCausalLM":
        return _with_balance(model, causal)
    if loss_type == "ForSequenceClassification":
        return partial(classification, model.config)
    if loss_type == "ForTokenClassification":
        return partial(token_classification, model.config)
    return None


def _call_loss_function(
    model: Any, loss_function: Callable[..., torch.Tensor], outputs: Any, labels: torch.Tensor
) -> torch.Tensor:
    """Call a replaced `loss_function` with the arguments that the forward of `model` would pass. Only the
    logits of all tokens of a text that is classified are not there, because the last stage pools them."""
    labels = labels.to(outputs.logits.device)
    if isinstance(model, ViTForImageClassification):
        return loss_function(labels, outputs.logits, model.config)
    if isinstance(model, GenericForTokenClassification):
        return loss_function(outputs.logits, labels, model.config)
    if isinstance(model, GenericForSequenceClassification):
        return loss_function(logits=None, labels=labels, pooled_logits=outputs.logits, config=model.config)
    if isinstance(model, GPT2LMHeadModel):
        return loss_function(outputs.logits, labels, vocab_size=model.config.vocab_size)
    return loss_function(logits=outputs.logits, labels=labels, vocab_size=model.config.vocab_size)


def causal(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Of logits (B, s, V) and labels (B, s): position i predicts label i + 1."""
    logits = _at_least_float32(outputs.logits)[:, :-1]  # (B, s-1, V)
    return _cross_entropy(logits.reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1))


def _with_balance(model: Any, loss: ModelLoss) -> ModelLoss:
    """`loss`, plus the balancing loss of a mixture of experts that adds one."""
    if not getattr(model.config, "output_router_logits", False):
        return loss
    return partial(_add_balance, loss, getattr(model.config, "router_aux_loss_coef", 0.0))


def _add_balance(loss: ModelLoss, coefficient: float, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    value = loss(outputs, labels)
    if (balance := getattr(outputs, "aux_loss", None)) is None:
        return value
    weighted: torch.Tensor = coefficient * balance.to(value)
    return value + weighted


def classification(config: Any, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Of logits (B, classes), and labels (B,) that are classes, or (B, classes) or (B,) that are numbers.

    As config.problem_type says; by default what the number of classes and the dtype of the labels suggest.
    """
    logits, problem = _at_least_float32(outputs.logits), config.problem_type
    if problem is None:
        are_classes = labels.dtype in (torch.long, torch.int)
        problem = "single_label_classification" if are_classes else "multi_label_classification"
        problem = "regression" if config.num_labels == 1 else problem
    if problem == "single_label_classification":
        return _cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))
    targets = labels.to(logits.dtype).reshape(logits.shape)
    criterion = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
    return criterion(logits, targets, reduction="sum") / max(1, logits.numel())


def token_classification(config: Any, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Of logits (B, s, classes), and labels (B, s) that are classes, or -100 for a token without one."""
    logits = _at_least_float32(outputs.logits)
    return _cross_entropy(logits.reshape(-1, config.num_labels), labels.reshape(-1))


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    targets = targets.to(logits.device)
    total = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / (targets != IGNORE_INDEX).sum().clamp(min=1)


def _at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def inputs_of_forward(
    module: nn.Module, model_loss: ModelLoss | None
) -> Callable[[Collection[str]], Collection[str]]:
    """Which entries of a batch the forward of `module` gets: those that it names; all, if it names none of
    them but takes **kwargs. It gets no targets if the loss is computed outside."""
    parameters = inspect.signature(module.forward).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    targets = TARGET_NAMES if model_loss is not None else ()

    def takes(names: Collection[str]) -> list[str]:
        inputs = [name for name in names if name not in targets]
        return [name for name in inputs if name in named] or (inputs if any_name else [])

    return takes
