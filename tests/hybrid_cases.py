"""Small models, batches and layouts on which a Booster is compared with one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

import hpnb
from hpnb import models, placement
from hpnb.models import ViTSize
from hpnb.pipeline_parallel import Stages, full_state_dict
from hpnb.split_sizes import split_sizes

D = torch.float64
STEPS = 2  # the second starts from an optimizer that has state
WORDS, CLASSES = 29, 5
Batch = dict[str, torch.Tensor]


# --- models and batches ------------------------------------------------------------------------------------


def build(kind: str, layers: int = 4, dropout: float = 0.0, hidden: int = 16) -> nn.Module:
    """ "vit", "gpt2" (tied embeddings) or "gpt2 classifies"; norms and biases away from 1 and 0."""
    if kind == "vit":
        size = ViTSize(hidden=hidden, layers=layers, heads=4, mlp=2 * hidden, patch=8, image=16)
        model: nn.Module = models.vit(size, classes=CLASSES, dtype=D, dropout=dropout)
    else:
        config = GPT2Config(
            vocab_size=WORDS, n_positions=16, n_embd=hidden, n_layer=layers, n_head=4, n_inner=2 * hidden,
            attn_implementation="sdpa", resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
            use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=1, num_labels=CLASSES,
        )  # fmt: skip
        torch.manual_seed(5)
        made = GPT2LMHeadModel if kind == "gpt2" else GPT2ForSequenceClassification
        model = made(config).to(D).train()
    g = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g, dtype=D).mul_(0.2 if p.dim() < 2 else 0.05))
    return model


def batch(kind: str, step: int, rows: int) -> Batch:
    """Samples that differ; texts are padded, and what is padding has no label."""
    g = torch.Generator().manual_seed(100 + step)
    labels = torch.randint(0, CLASSES, (rows,), generator=g)
    if kind == "vit":
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=g, dtype=D), "labels": labels}
    length = 6 + step % 3  # each step has another one
    ids = torch.randint(1, WORDS, (rows, length), generator=g)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, length - row % 4 :] = 0
    ids[mask == 0] = 0
    if kind == "gpt2":
        labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def logits_and_targets(outputs: Any, inputs: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    logits = outputs.logits
    labels = inputs["labels"].to(logits.device)
    if logits.dim() == 3:
        return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return logits, labels


def own(outputs: Any, inputs: Any) -> torch.Tensor:
    return outputs.loss  # type: ignore[no-any-return]


def mean(outputs: Any, inputs: Batch) -> torch.Tensor:
    return F.cross_entropy(*logits_and_targets(outputs, inputs))


def pair(outputs: Any, inputs: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts something else than targets: each weighs its label."""
    logits, targets = logits_and_targets(outputs, inputs)
    weights = 1.0 + torch.arange(logits.size(-1), dtype=D, device=logits.device) / 10
    counted = weights[targets.clamp(min=0)] * (targets >= 0)
    return F.cross_entropy(logits, targets, weights.to(logits.dtype), reduction="sum"), counted.sum()


LOSSES = {"own": own, "mean": mean, "pair": pair}


# --- one way to train --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """The defaults are the plainest."""

    kind: str = "vit"
    dp: int = 1
    pp: int = 1
    tp: int = 1
    tp_mode: str = "1d"
    tp_depth: int = 1
    sequence: bool = False
    zero: int = 0
    replicas: int = 1  # of each shard of ZeRO 3
    style: str = "1f1b"
    chunks: int = 1
    microbatches: int | None = None
    microbatch_size: int | None = None
    direct: bool = False  # model(**batch) and booster.backward
    loss: str = "own"
    rows: int = 8  # of all data-parallel ranks
    accumulate: int = 1
    clip: float = 0.0
    again: Any = False  # activation checkpointing
    optimizer: str = "SGD"

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def may_be_empty(self) -> bool:
        """Whether there are ranks, or microbatches, without samples."""
        share = split_sizes(self.rows, self.dp)
        plugin = self.plugin()
        return min(share) < max(plugin.microbatches(rows) for rows in share)

    def plugin(self, **knobs: Any) -> hpnb.HybridParallelPlugin:
        return hpnb.HybridParallelPlugin(**{
            "tp_size": self.tp, "pp_size": self.pp, "zero_stage": self.zero, "precision": "fp64",
            "zero_replicas": self.replicas,
            "num_microbatches": self.microbatches, "microbatch_size": self.microbatch_size,
            "pp_style": self.style, "num_model_chunks": self.chunks, "max_norm": self.clip,
            "tp_mode": self.tp_mode, "tp_depth": self.tp_depth, "enable_sequence_parallelism": self.sequence,
            "activation_checkpointing": self.again, "zero_bucket_size_in_m": 5e-3,
            "ddp_bucket_cap_mb": 1e-2, **knobs,
        })  # fmt: skip

    def optimize(self, model: nn.Module) -> torch.optim.Optimizer:
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        if self.optimizer == "SGD":
            return torch.optim.SGD(groups, lr=0.2, momentum=0.9)
        return torch.optim.AdamW(groups, lr=0.02)


Found = dict[str, Any]


@cache
def serial(case: Case) -> Found:
    """One process, the batch of all ranks, one backward."""
    model = build(case.kind)
    optimizer = case.optimize(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = 0.0
        for part in range(case.accumulate):
            given = batch(case.kind, step * case.accumulate + part, case.rows)
            outputs = model(**{name: t for name, t in given.items() if name != "labels"})
            found: Any = LOSSES["pair" if case.loss == "pair" else "mean"](outputs, given)
            loss = found[0] / found[1] if isinstance(found, tuple) else found
            (loss / case.accumulate).backward()
            value += loss.item() / case.accumulate
        losses.append(value)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), case.clip or 1e9).item())
        optimizer.step()
        scheduler.step()
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


def wanted(case: Case) -> Found:
    """What `case` has to give: the same whatever its layout."""
    alike = Case(case.kind, loss="pair" if case.loss == "pair" else "own", rows=case.rows,
                 accumulate=case.accumulate, clip=case.clip, optimizer=case.optimizer)  # fmt: skip
    return serial(alike)


def mine(given: Batch, axis: hpnb.Axis) -> Batch:
    sizes = split_sizes(len(given["labels"]), axis.size)
    start = sum(sizes[: axis.rank])
    return {name: t[start : start + sizes[axis.rank]] for name, t in given.items()}


def train(case: Case, knobs: dict[str, Any] | None = None) -> Found:
    """The same on ranks, through a Booster."""
    torch.set_num_threads(1)
    plugin = case.plugin(**(knobs or {}))
    booster = hpnb.Booster(plugin=plugin)
    model: Any = build(case.kind)
    optimizer: Any = case.optimize(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    criterion = LOSSES[case.loss]
    model, optimizer, criterion, _, scheduler = booster.boost(model, optimizer, criterion, None, scheduler)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        values = []
        for part in range(case.accumulate):
            given = mine(batch(case.kind, step * case.accumulate + part, case.rows), plugin.mesh.dp)
            last = part == case.accumulate - 1

            def scaled(outputs: Any, inputs: Any) -> Any:
                found: Any = criterion(outputs, inputs)
                n = case.accumulate
                return (found[0] / n, found[1]) if isinstance(found, tuple) else found / n

            def one(given: Batch = given, scaled: Any = scaled) -> Any:
                if case.direct:
                    outputs = model(**given)
                    booster.backward(scaled(outputs, given), optimizer)
                    return outputs.loss.detach() / case.accumulate
                return booster.execute_pipeline(iter([given]), model, scaled, optimizer)["loss"]

            if last:
                values.append(one())
            else:
                with booster.no_sync(model, optimizer):
                    values.append(one())
        here = plugin.stage_manager.is_last_stage()
        assert case.direct or all((value is not None) == here for value in values)
        losses.append(sum(float(value) for value in values) if here else None)
        optimizer.step()
        norms.append(None if optimizer.last_step.norm is None else float(optimizer.last_step.norm))
        scheduler.step()
    return {"losses": losses, "norms": norms, "weights": weights(model)}


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Of the whole model, on every rank."""
    dp, pp, *tensor = model.axes
    if isinstance(model.module, Stages):
        return full_state_dict(model.module, pp, [dp, *tensor])
    full = placement.full_state_dict(model.module, [dp, *tensor])
    return {name: value.cpu().clone() for name, value in full.items()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The worst relative distance; a tensor that hardly moves is held to the typical norm."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    a, b = ({n: t.double() for n, t in one.items()} for one in (a, b))
    typical = sum(float(t.norm()) for t in b.values()) / len(b)
    return max(float((a[n] - b[n]).norm()) / max(float(b[n].norm()), 1e-2 * typical) for n in b)


def off(case: Case, found: list[Found]) -> float:
    """How far what the ranks found is from one process."""
    expected, worst = wanted(case), 0.0
    for one in found:
        # A direct forward shows the model's own loss, whatever a criterion makes of the logits.
        shown = None if case.direct and case.loss == "pair" else expected["losses"]
        for a, b in zip(one["losses"], shown or one["losses"], strict=True):
            worst = max(worst, 0.0 if a is None else abs(a - b) / abs(b))
        for a, b in zip(one["norms"], expected["norms"], strict=True):
            worst = max(worst, 0.0 if a is None else abs(a - b) / abs(b))
        worst = max(worst, distance(one["weights"], expected["weights"]))
    return worst


# --- all of them, and a sample -----------------------------------------------------------------------------

CHUNKS = {"gpipe": (1,), "1f1b": (1,), "interleaved": (1, 2), "breadth-first": (1, 2), "zb-h1": (1,),
          "zb-h2": (1,), "zb-v": (2,), "dualpipe-v": (2,)}  # fmt: skip
BLOCKS = 4


def draw(random: Random, most: int) -> Case:
    """Any case on at most so many ranks."""
    while True:
        dp, pp, tp = (random.choice([1, 1, 2, 2, 3, 4]) for _ in range(3))
        if not 1 < dp * pp * tp <= most:
            continue
        style = random.choice(list(CHUNKS))
        chunks = random.choice(CHUNKS[style])
        if pp * chunks > BLOCKS:
            continue
        modes = [("1d", 1), *[("2d", 1)] * 2 * (tp == 4), *[("2.5d", 2), ("3d", 1)] * (tp == 8)]
        mode, depth = random.choice(modes)
        microbatches, size = random.choice(
            [(None, None), (1, None), (2, None), (3, None), (None, 2), (5, None)]
        )
        if style == "dualpipe-v" and microbatches is not None and pp > 1:
            microbatches = max(microbatches, 2 * pp)
        found = Case(
            kind=random.choice(["vit", "gpt2", "gpt2", "gpt2 classifies"]),
            dp=dp, pp=pp, tp=tp, tp_mode=mode, tp_depth=depth,
            sequence=tp > 1 and mode == "1d" and random.random() < 0.5,
            zero=random.choice([0, 1, 2, 3]),
            style=style, chunks=chunks, microbatches=microbatches, microbatch_size=size,
            direct=pp == 1 and random.random() < 0.6,
            loss=random.choice(list(LOSSES)),
            # A grid deals its rows out evenly; else the last ranks, and microbatches, may have none.
            rows=8 * dp if mode != "1d" else random.choice([8, 7, 5, 2, 1]),
            accumulate=random.choice([1, 1, 2, 3]),
            clip=random.choice([0.0, 0.5]),
            again=random.choice([False, False, "full", "attention"]),
            optimizer=random.choice(["SGD", "SGD", "AdamW"]),
        )  # fmt: skip
        if not (found.sequence and found.pp > 1 and found.may_be_empty):
            return found


def sample(seed: int, count: int, most: int = 4, least: int = 2) -> list[Case]:
    """Different cases on at least and at most so many ranks."""
    random, found = Random(seed), dict[Case, None]()
    while len(found) < count:
        case = draw(random, most)
        if case.ranks >= least:
            found[case] = None
    return list(found)
