"""Small models and batches for tensor parallelism, and what one process makes of them, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from hpnb import models
from hpnb.models import ViTSize

D = torch.float64
LR = 0.2  # large enough that a skipped update shows


def vit(heads: int = 4, hidden: int = 48, dropout: float = 0.0) -> nn.Module:
    size = ViTSize(hidden=hidden, layers=2, heads=heads, mlp=2 * hidden, patch=8, image=32)
    return _moved(models.vit(size, classes=5, dtype=D, dropout=dropout))


def gpt2(
    heads: int = 4,
    hidden: int = 48,
    words: int = 53,
    classes: int | None = None,
    dropout: float = 0.0,
    tie: bool = True,
    layers: int = 2,
) -> nn.Module:
    """With tied embeddings unless it classifies."""
    config = GPT2Config(
        vocab_size=words, n_positions=24, n_embd=hidden, n_layer=layers, n_head=heads,
        attn_implementation="sdpa",
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False, pad_token_id=0,
        bos_token_id=1, eos_token_id=1, tie_word_embeddings=tie,
    )  # fmt: skip
    torch.manual_seed(5)
    if classes is None:
        return _moved(GPT2LMHeadModel(config).to(D).train())
    config.num_labels = classes
    return _moved(GPT2ForSequenceClassification(config).to(D).train())


def _moved(model: nn.Module) -> nn.Module:
    """Norms and biases away from 1 and 0, or a mistake with them would not show."""
    g = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g, dtype=D).mul_(0.2 if p.dim() < 2 else 0.05))
    return model


def images(step: int, rows: int = 8) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(100 + step)
    return {
        "pixel_values": torch.randn(rows, 3, 32, 32, generator=g, dtype=D),
        "labels": torch.randint(0, 5, (rows,), generator=g),
    }


def text(
    step: int, rows: int = 8, words: int = 53, padded: bool = True, classes: int | None = None
) -> dict[str, torch.Tensor]:
    """Rows of unequal length, padded on the right; what is padding has no label."""
    g = torch.Generator().manual_seed(200 + step)
    length = 11 + step  # each step has another one
    ids = torch.randint(1, words, (rows, length), generator=g)
    batch = {"input_ids": ids}
    mask = torch.ones_like(ids)
    if padded:
        for row in range(rows):
            mask[row, length - row % 5 :] = 0
        ids[mask == 0] = 0
        batch["attention_mask"] = mask
    if classes is None:
        batch["labels"] = ids.masked_fill(mask == 0, -100)
    else:
        batch["labels"] = torch.randint(0, classes, (rows,), generator=g)
    return batch


@dataclass
class Case:
    """What is trained: how the model is made, and the batch of each step."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]
    loss: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)


def causal_loss(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """In float64, where transformers' own would go through float32."""
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def own_loss(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return outputs.loss  # type: ignore[no-any-return]


@dataclass
class Run:
    losses: list[float]
    gradients: dict[str, torch.Tensor]  # of the last step
    weights: dict[str, torch.Tensor]


def train(
    model: nn.Module,
    case: Case,
    loss_of: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor],
    gradients: Callable[[nn.Module], dict[str, torch.Tensor]],
    weights: Callable[[nn.Module], dict[str, torch.Tensor]],
    steps: int = 2,
    accumulate: int = 1,
) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses, found = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for part in range(accumulate):
            batch = {
                n: v.to(next(model.parameters()).device)
                for n, v in case.batch(step * accumulate + part).items()
            }
            loss = loss_of(model(**batch), batch) / accumulate
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        found = gradients(model)
        optimizer.step()
    return Run(losses, found, weights(model))


def serial(case: Case, **how: int) -> Run:
    return train(
        case.build(),
        case,
        case.loss,
        lambda m: {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None},
        lambda m: {n: p.detach().clone() for n, p in m.state_dict().items()},
        **how,
    )


def apart(found: Run, wanted: Run) -> float:
    """The largest relative distance; a tensor that hardly moves is held to the typical norm."""
    worst = max(abs(a - b) / abs(b) for a, b in zip(found.losses, wanted.losses, strict=True))
    for ours, theirs in ((found.gradients, wanted.gradients), (found.weights, wanted.weights)):
        assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
        typical = sum(float(t.norm()) for t in theirs.values()) / len(theirs)
        for name, wanted_one in theirs.items():
            assert ours[name].shape == wanted_one.shape, name
            off = float((ours[name].cpu() - wanted_one).norm() / max(wanted_one.norm(), 0.01 * typical))
            worst = max(worst, off)
    return worst


def vit_case(**options: Any) -> Case:
    return Case(lambda: vit(**options), images, own_loss)


def lm_case(words: int = 53, padded: bool = True, **options: Any) -> Case:
    return Case(
        lambda: gpt2(words=words, **options), lambda step: text(step, words=words, padded=padded), causal_loss
    )


def classifier_case(**options: Any) -> Case:
    return Case(lambda: gpt2(classes=3, **options), lambda step: text(step, classes=3), own_loss)
