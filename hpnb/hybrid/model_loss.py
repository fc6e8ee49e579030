"""The loss that a transformers model computes from its own labels, where its last layers are on another rank.

    ViTForImageClassification, GPT2ForSequenceClassification    cross entropy of the classes
    GPT2LMHeadModel                                             of the next word, so shifted by one

They are transformers' own formulas, with two differences: logits are computed with as they are, in float32 at
least, where transformers goes through float32 from float64 too; and the mean over no target is 0 and not nan,
so that a microbatch of padding alone does no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel, ViTForImageClassification

from hpnb.data.tokenizer import IGNORE_INDEX

OwnLoss = Callable[[Any, torch.Tensor], torch.Tensor]  # (outputs, labels) -> (), the mean over the targets


def own_loss(model: nn.Module) -> OwnLoss | None:
    """What `model` computes from labels; None if only itself can say, or keeps its logits cut."""
    if "_loss_function" in vars(model):  # somebody's own, such as that of logits that are cut
        return None
    if type(model) is GPT2LMHeadModel:
        return causal
    if type(model) in (ViTForImageClassification, GPT2ForSequenceClassification):
        return partial(classification, model.config)
    return None


def causal(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Of logits (B, s, V) and labels (B, s): position i is asked for label i + 1."""
    logits = _wide(outputs.logits)[:, :-1]  # (B, s-1, V)
    return _cross_entropy(logits.reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1))


def classification(config: Any, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Of logits (B, classes), and labels (B,) that are classes, or (B, classes) or (B,) that are numbers.

    As config.problem_type says; by default what the number of classes and the dtype of the labels suggest.
    """
    logits, problem = _wide(outputs.logits), config.problem_type
    if problem is None:
        whole = labels.dtype in (torch.long, torch.int)
        problem = "single_label_classification" if whole else "multi_label_classification"
        problem = "regression" if config.num_labels == 1 else problem
    if problem == "single_label_classification":
        return _cross_entropy(logits.reshape(-1, config.num_labels), labels.reshape(-1))
    wanted = labels.to(logits.dtype).reshape(logits.shape)
    how = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
    return how(logits, wanted, reduction="sum") / max(1, logits.numel())


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    targets = targets.to(logits.device)
    total = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / (targets != IGNORE_INDEX).sum().clamp(min=1)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
