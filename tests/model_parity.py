"""Whether a tiny model trains on a layout as on one process: three steps of SGD with momentum in float64.

    losses       of the three steps
    gradients    as the optimizer's momentum has gathered them: g1 * 0.81 + g2 * 0.9 + g3
    weights      after the third step

Each is compared by its relative norm ||a - b|| / ||b||, tensor by tensor, and the largest must be at most
1e-12, or three times what another order of the samples and another last bit of the weights change on one
process, if that is more. A tensor that hardly moves, such as a key's bias, is held to the typical norm of its
kind. Batches are padded, and ragged over microbatches.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tiny_models import BASE, Architecture, build, float64_throughout, make_batch
from torch import nn

import hpnb
from hpnb import HybridParallelPlugin, placement
from hpnb.mesh import ParallelLayout
from hpnb.pipeline_parallel import Stages, full_state_dict
from hpnb.ranks.errors import RankError
from hpnb.split_sizes import split_sizes

STEPS, TOLERANCE = 3, 1e-12
Tensors = dict[str, torch.Tensor]


LAYOUTS = {  # a name ends with what is recomputed, if anything is
    "pp2": ParallelLayout(pp=2),
    "tp2": ParallelLayout(tp=2),
    "pp2-tp2": ParallelLayout(pp=2, tp=2),
    "dp2-zero1-pp2": ParallelLayout(dp=2, pp=2, zero_stage=1),
    "tp2-attention": ParallelLayout(tp=2, recomputation="attention"),
    "pp2-full": ParallelLayout(pp=2, recomputation="full"),
}


@dataclass(frozen=True)
class Trained:
    """What a training gives.

    Attributes:
        sharded: share of the numbers in the layers' matrices of which a tensor-parallel rank has a part.
    """

    losses: list[float | None]
    gradients: Tensors
    weights: Tensors
    sharded: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Of one model on one layout.

    Attributes:
        status: "exact", "refused", "wrong" or "fails".
        reason: why it is not exact: a sentence for "refused", an error for "fails".
        errors: of losses, gradients and weights.
        rounding: the largest of these on one process, between two orders of the samples.
        commit: of the code that trained it.
    """

    architecture: str
    head: str
    layout: str
    status: str
    reason: str = ""
    errors: tuple[float, float, float] = (0.0, 0.0, 0.0)
    sharded: float = 0.0
    rounding: float = 0.0
    commit: str = ""


# --- on one process ----------------------------------------------------------------------------------------


def train_serial(architecture: Architecture, head: str, backwards: bool = False) -> Trained:
    """
    Args:
        backwards: take the samples in the opposite order, and weights whose last bit is another. This changes
            the rounding alone.
    """
    torch.set_num_threads(1)
    with float64_throughout(architecture.models[head]):
        model, batch = build(architecture, head), make_batch(architecture, head)
        optimizer, losses = _optimizer(model), list[float | None]()
        if backwards:
            batch = {name: value.flip(0) for name, value in batch.items()}
            _change_last_bits(model)
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = _serial_loss(model(**inputs), batch["labels"])
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
    state: Any = optimizer.state
    gradients = {n: state[p]["momentum_buffer"] for n, p in model.named_parameters() if p in state}
    return Trained(losses, gradients, {n: t.detach().clone() for n, t in model.state_dict().items()})


@torch.no_grad()
def _change_last_bits(model: nn.Module) -> None:
    g = torch.Generator().manual_seed(2)
    for p in model.parameters():
        p.mul_(1 + torch.finfo(p.dtype).eps * torch.randint(-1, 2, p.shape, generator=g, dtype=p.dtype))


def _serial_loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    logits = getattr(outputs, "logits", None)
    if logits is None:
        total, count = _hidden_loss(outputs)
        return total / count
    if logits.dim() == 3:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, labels)


def _hidden_loss(outputs: Any) -> tuple[torch.Tensor, int]:
    """Of a model without a head: every number of its hidden states (B, s, h) counts differently."""
    hidden = outputs[0]
    g = torch.Generator().manual_seed(1)
    weights = torch.randn(hidden.shape[1:], generator=g, dtype=hidden.dtype)
    return (hidden * weights).sigmoid().sum(2).mean(1).sum(), len(hidden)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


# --- on ranks ----------------------------------------------------------------------------------------------


def train_on_ranks(architecture: Architecture, head: str, layout: ParallelLayout) -> Trained | str:
    """The same on this rank of the layout; a str says why hpnb refuses the model."""
    torch.set_num_threads(1)
    with float64_throughout(architecture.models[head]):
        model: Any = build(architecture, head)
        names = [name for name, _ in model.named_parameters()]
        plugin = HybridParallelPlugin(
            tp_size=layout.tp, pp_size=layout.pp, zero_stage=layout.zero_stage, precision="fp64",
            num_microbatches=3 if layout.pp > 1 else None, find_unused_parameters=layout.dp > 1,
            activation_checkpointing=layout.recomputation,
        )  # fmt: skip
        booster, optimizer = hpnb.Booster(plugin=plugin), _optimizer(model)
        try:
            model, optimizer, *_ = booster.boost(model, optimizer)
        except (ValueError, TypeError) as error:
            return str(error)
        batch = make_batch(architecture, head)
        sizes, rank = split_sizes(len(batch["labels"]), layout.dp), plugin.mesh.dp.rank
        start = sum(sizes[:rank])
        local = {name: value[start : start + sizes[rank]] for name, value in batch.items()}
        criterion = _criterion_of_hidden if head == BASE else _criterion
        if head == BASE:
            local.pop("labels")
        losses = list[float | None]()
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = booster.execute_pipeline(iter([local]), model, criterion, optimizer)["loss"]
            losses.append(None if loss is None else loss.item())
            optimizer.step()
    states = optimizer.state_dict()["state"]
    gradients = {names[n]: state["momentum_buffer"] for n, state in states.items()}
    sharded = _sharded_share(model.module)
    dp, pp, *tensor = model.axes
    if isinstance(model.module, Stages):
        weights = full_state_dict(model.module, pp, [dp, *tensor])
    else:
        weights = placement.full_state_dict(model.module, [dp, *tensor])
    if hpnb.rank():  # all ranks have the same; one sends it
        return Trained(losses, {}, {}, sharded)
    return Trained(losses, gradients, {name: value.clone() for name, value in weights.items()}, sharded)


def _criterion(outputs: Any, inputs: Any) -> Any:
    return outputs.loss


def _criterion_of_hidden(outputs: Any, inputs: Any) -> Any:
    return _hidden_loss(outputs)


def _sharded_share(module: nn.Module) -> float:
    placed = [(p, placement.placement_of(p, name)) for name, p in module.named_parameters() if p.dim() > 1]
    sizes = [(torch.Size(place.shape).numel(), "tp" in place.axes) for _, place in placed]
    return sum(size for size, cut in sizes if cut) / max(1, sum(size for size, _ in sizes))


# --- the comparison ----------------------------------------------------------------------------------------


def errors_of(results: list[Trained], serial: Trained) -> tuple[float, float, float]:
    """Of losses, gradients and weights; the first result has the tensors."""
    losses = [loss for result in results for loss in zip(result.losses, serial.losses, strict=True)]
    return (
        max(abs(a - b) / abs(b) for a, b in losses if a is not None and b is not None),
        _distance(results[0].gradients, serial.gradients)[0],
        _distance(results[0].weights, serial.weights)[0],
    )


def compare(
    pools: Any, architecture: Architecture, head: str, layout: str, serial: Trained, rounding: float = 0.0
) -> Outcome:
    """Train on as many ranks of `pools` as the layout has, and say how far it is from `serial`.

    Args:
        layout: of `LAYOUTS`.
        rounding: how far `serial` is from the same with other rounding; three times that is allowed.
    """
    outcome, of_ranks = Outcome(architecture.name, head, layout, "exact", rounding=rounding), LAYOUTS[layout]
    try:
        results = pools[of_ranks.world_size].run(train_on_ranks, architecture, head, of_ranks)
    except RankError as error:
        return replace(outcome, status=_status_of(error), reason=str(error).splitlines()[0])
    refusals = [result for result in results if isinstance(result, str)]
    if refusals:
        return replace(outcome, status="refused", reason=refusals[0])
    trained = results[0]
    if trained.weights.keys() != serial.weights.keys() or trained.gradients.keys() != serial.gradients.keys():
        lost = sorted(
            trained.weights.keys() ^ serial.weights.keys()
            | trained.gradients.keys() ^ serial.gradients.keys()
        )
        return replace(outcome, status="wrong", reason=f"{', '.join(lost[:3])} on one side alone")
    errors = errors_of(results, serial)
    outcome = replace(outcome, errors=errors, sharded=min(result.sharded for result in results))
    if all(error <= max(TOLERANCE, 3 * rounding) for error in errors):
        return outcome
    worst, name = max(
        _distance(trained.gradients, serial.gradients), _distance(trained.weights, serial.weights)
    )
    return replace(outcome, status="wrong", reason=f"{name} is off by {worst:.1e}")


def _status_of(error: RankError) -> str:
    """A sentence of hpnb is a refusal; anything else is a failure."""
    lines = error.traceback.strip().splitlines()
    last = max((i for i, line in enumerate(lines) if line.lstrip().startswith("File ")), default=0)
    is_sentence = any(line.startswith(("ValueError: ", "TypeError: ")) for line in lines[last:])
    return (
        "refused"
        if is_sentence and '"hpnb/' in lines[last].replace(f"{Path(hpnb.__file__).parents[1]}/", "")
        else "fails"
    )


def _distance(tensors: Tensors, expected: Tensors) -> tuple[float, str]:
    """The largest relative norm, and whose it is."""
    norms = {name: float(t.double().norm()) for name, t in expected.items()}
    typical = statistics.median(norms.values()) if norms else 1.0
    scales = {name: norm if norm > 1e-2 * typical else max(typical, 1e-30) for name, norm in norms.items()}
    return max((float((tensors[n].double() - t.double()).norm()) / scales[n], n) for n, t in expected.items())
