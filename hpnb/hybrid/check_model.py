"""Checks what is registered for a model of your own, in float64 and in seconds.

    print(hpnb.models.check(Llama(layers=2), batch))        # a small model of the class, and a small batch

    names       every parameter lies in one part, and has a role that fits its shape
    parts       one after the other they give the forward's outputs and gradients, dropout included
    pipeline    on 2 ranks, half of the blocks each: the same outputs and gradients, tied weights included
    ZeRO 3      on 2 ranks that gather each block in front of its forward: the same of the model's
                forward, and of the parts, as a pipeline runs them
    roles       on 2 ranks of tensor parallelism: the same again, masks included; and on 3 ranks, where every
                split has pieces for 3, because heads that are left over show what an even split hides
    sequence    on 2 ranks that shard the tokens between the matrices

What differs is listed with the names of parts and parameters. The checks need every strategy, so they stand
above them; `hpnb.models` imports this file when `check` is first used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from statistics import median
from typing import Any

import torch
from torch import nn

from hpnb import data_parallel, tensor_parallel
from hpnb.data_parallel.fsdp_units import modules_with_forward
from hpnb.layout import Layout
from hpnb.mesh import Axis, Mesh
from hpnb.models import registry
from hpnb.models.compare_parts import (
    arguments_of,
    compare_outputs,
    draw_weights,
    model_forward,
    restoring_buffers,
    run_parts,
    tensors_of,
)
from hpnb.models.model_anatomy import TARGETS, Anatomy, tied
from hpnb.models.registry import (
    SEE_CHECK,
    Registration,
    anatomy,
    explain_alias,
    has_roles,
    registration_of,
    roles,
)
from hpnb.pipeline_parallel import Builder, Pipeline, schedules
from hpnb.placement import full_gradients
from hpnb.ranks import launch, world_size
from hpnb.ranks.current_rank import inside_rank
from hpnb.ranks.errors import RankError

TOLERANCE = 1e-9
_REFUSED = "refused: "
_ZERO_3, _ZERO_3_PIPELINE, _SEQUENCE = "ZeRO 3", "ZeRO 3 in a pipeline", "sequence parallelism"
_TOKENS = (
    "; each rank has a part of the tokens then, and blocks that take hidden states apart by them need all"
)
_RAISED = re.compile(r"rank \d+ of \d+ raised \w+: ")


def check(model: nn.Module, batch: Mapping[str, Any], ranks: int = 2, timeout: float = 120.0) -> str:
    """Compare what is registered for `model` with its forward, and with itself on `ranks` processes.

    The parts, run one after the other, must give the forward's outputs and gradients, and so must a pipeline,
    ZeRO 3, tensor and sequence parallelism on ranks. Where ZeRO 3 or sequence parallelism is refused or
    raises, the answer says why; other numbers than those of one process are an error everywhere. A model that
    is registered without roles is checked without tensor and sequence parallelism, and the answer says so.

    The model, its gradients and the random generators stay as they are: a copy in float64 with other weights
    is run, on the CPU.

    Args:
        model: a small one of the class: few layers, at least 2 heads and 2 key-value heads.
        batch: as the model takes it, with all that blocks read, such as masks, and 2 samples or more.
        ranks: of the pipeline, of ZeRO 3 and of tensor parallelism, which also runs on one more where weights
            then split unevenly; 1 leaves all of them out, and so does a call on a rank.
        timeout: seconds for them.

    Returns:
        What was checked, and what the batch left out.

    Raises:
        ValueError: all that differs, a line each.
        TypeError: nothing is registered for this class, a Builder, or a batch that is no mapping.
    """
    if isinstance(model, Builder):
        raise TypeError(
            "check compares the parts of a model with its forward, and a Builder has no other forward than "
            "its layers, one after the other: there is nothing to register or to check"
        )
    registration = registration_of(model)
    if not isinstance(batch, Mapping):
        raise TypeError(
            "check takes a batch by the names of the forward's arguments, such as {'input_ids': ids}, not a "
            f"{type(batch).__name__}"
        )
    if meta := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ValueError(
            f"{meta[0]} of this {type(model).__name__} is on the meta device, and check computes with "
            "weights; make a small model of the class on the CPU"
        )
    samples = max((len(t) for t in batch.values() if isinstance(t, torch.Tensor) and t.dim()), default=2)
    if samples < 2 <= ranks and not inside_rank():
        raise ValueError(
            f"a batch of {samples} sample{'s' if samples != 1 else ''} makes no two microbatches, which the "
            "pipeline of this check needs; pass 2 samples or more, or ranks=1, which leaves ranks out"
        )
    copied = deepcopy(model).cpu().double().train(model.training)
    if not any(p.requires_grad for p in copied.parameters()):
        copied.requires_grad_(True)  # gradients are compared, also of a model that is frozen
    draw_weights(copied)
    inputs = {name: _of_float64(value) for name, value in batch.items()}
    problems = list(_check_names(copied))
    compared, not_compared = "", ""
    if not problems:
        problems, compared, not_compared = _check_parts(copied, inputs)
    with_roles = not problems and has_roles(copied)
    names = "names and roles of parameters" if with_roles else "names of parameters"
    done = [names, *([compared] if compared else [])]
    refused: list[str] = []
    if not problems and ranks > 1 and not inside_rank():
        copied.eval()
        wanted = _outputs_and_gradients(lambda: run_parts(anatomy(copied), inputs), copied)
        of_forward = _outputs_and_gradients(lambda: model_forward(copied, inputs), copied)
        runs: list[tuple[str, Any, int]] = [
            ("pipeline", _on_a_pipeline, ranks),
            (_ZERO_3, _on_zero_3, ranks),
            (_ZERO_3_PIPELINE, _on_zero_3_in_a_pipeline, ranks),
        ]
        if with_roles:
            runs.append(("tensor parallelism", _on_tensor_parallel, ranks))
            runs.append((_SEQUENCE, _on_sequence_parallel, ranks))
            if _can_split_unevenly(copied, ranks + 1):
                runs.append(("tensor parallelism", _on_tensor_parallel, ranks + 1))
        for what, compute, n in runs:
            note = f" [on {n} ranks and not {ranks}, so that units are left over]" if n != ranks else ""
            if what == _SEQUENCE:
                note = (
                    " [a rank has a part of the tokens: where a block uses others outside of its attention, "
                )
                note += "use tensor parallelism without it]"
            if what == _ZERO_3_PIPELINE and any(_ZERO_3 in reason for reason in refused):
                continue
            result = of_forward if what == _ZERO_3 else wanted
            lines = list(_compare_on_ranks(what, compute, registration, copied, inputs, result, n, timeout))
            if lines and lines[0].startswith(_REFUSED):
                reason = lines[0].removeprefix(_REFUSED).removesuffix(".")
                refused.append(f"\nIt cannot use {what}: {reason}.")
                continue
            problems += [line + note for line in lines]
            done.append(f"{what} on {n} ranks")
    if problems:
        raise ValueError(
            f"what is registered for {type(model).__name__} does not fit it:\n" + "\n".join(problems)
        )
    taken = arguments_of(copied, inputs, targets=True)
    unused = ", ".join(name for name in inputs if name not in taken and name not in TARGETS)
    note = not_compared + (f" The forward takes no {unused}." if unused else "")
    if not with_roles:
        note += " It has no roles, so tensor and sequence parallelism are left out."
    return f"{type(model).__name__} is registered well: {'; '.join(done)}.{''.join(refused)}{note}"


# --- on this process ---------------------------------------------------------------------------------------


def _can_split_unevenly(model: nn.Module, ranks: int) -> bool:
    """Whether every split weight has a piece for each of so many ranks, and some have one piece more."""
    units = [role.units for role in roles(model).values() if role.cut_dim is not None]
    return bool(units) and min(units) >= ranks and any(n % ranks for n in units)


def _check_names(model: nn.Module) -> Iterator[str]:
    try:
        parts = anatomy(model)
    except ValueError as error:
        yield str(error)
        return
    modules = dict(model.named_modules(remove_duplicate=False))  # a block may stand at several places
    places: dict[str, list[str]] = {}
    for part in parts.parts:
        if part.name and modules.get(part.name) is not part.module:
            yield f"Part {part.name!r} is another module than the one of this name in the model"
        for name, _ in part.module.named_parameters(remove_duplicate=False):
            places.setdefault(part.full_name(name), []).append(part.name or "the root")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    missing = [name for name in names if name not in places]
    if missing and (sentence := explain_alias(model, missing[0], places.keys())) is not None:
        yield sentence
    elif missing:
        yield (
            f"{', '.join(missing)} lie in no part: put their modules into one; hpnb.models.root_parameters "
            "makes one of what is on the model itself"
        )
    ties = {frozenset(names) for names in tied(model)}
    for of_one in parts.tied:
        if frozenset(of_one) not in ties:
            yield f"{', '.join(of_one)} are listed as tied, and are not one parameter in the model"
    try:
        if has_roles(model):
            roles(model)
    except ValueError as error:
        yield str(error).removesuffix(SEE_CHECK)


def _check_parts(model: nn.Module, inputs: dict[str, Any]) -> tuple[list[str], str, str]:
    """Problems; what was compared; and a sentence on the outputs that the forward does not give."""
    with torch.no_grad():
        comparison = compare_outputs(model, inputs, TOLERANCE)
    if comparison.difference is not None:
        return [comparison.difference], "", ""
    pairs, note = comparison.pairs, ""
    if comparison.unpaired:
        note = f" The forward gives no {', '.join(comparison.unpaired)}, so that was not compared."
    if not pairs:
        return [], "", note

    def of_parts() -> Any:
        outputs = tensors_of(run_parts(anatomy(model), inputs))
        return {name: outputs[name] for name in pairs}

    def of_forward() -> Any:
        outputs = tensors_of(model(**arguments_of(model, inputs, comparison.with_targets)))
        return {name: outputs[pair] for name, pair in pairs.items()}

    forward = _outputs_and_gradients(of_forward, model)
    problems = list(_differences("the parts", _outputs_and_gradients(of_parts, model), forward))
    return problems, "parts against the forward" + (", with gradients" if forward[1] else ""), note


Result = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]  # outputs, and gradients by name


def _outputs_and_gradients(run: Callable[[], Any], model: nn.Module) -> Result:
    """Of the loss that weighs every output by other numbers. The model keeps its buffers."""
    model.zero_grad()
    with restoring_buffers(model):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            outputs = tensors_of(run())
        loss = loss_of(outputs.values())
        if loss.requires_grad:
            loss.backward()
        outputs = {name: value.detach().clone() for name, value in outputs.items()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return outputs, gradients


def loss_of(outputs: Any) -> torch.Tensor:
    """A sum over samples in which every number counts differently, the same for all of a batch's samples."""
    total = torch.zeros((), dtype=torch.float64)
    for value in outputs:
        row = value.shape[1:] if value.dim() else value.shape
        weights = torch.randn(row, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        total = total + (value.double() * weights).sum()
    return total


def _differences(what: str, actual: Result, expected: Result) -> Iterator[str]:
    for kind, ours, theirs in zip(("output", "gradient of"), actual, expected, strict=True):
        lost = [name for name in theirs if name not in ours]
        extra = [name for name in ours if name not in theirs]
        both = [n for n in theirs if n in ours and ours[n].shape == theirs[n].shape]
        # A key's bias has a gradient of zero but for rounding: it is held to the norm that is typical.
        floor = 1e-3 * median([float(theirs[n].norm()) for n in both]) if both else 0.0
        off = {
            n: float((ours[n] - theirs[n]).norm()) / max(float(theirs[n].norm()), floor, 1e-30) for n in both
        }
        wrong = sorted((n for n in off if off[n] > TOLERANCE), key=lambda n: -off[n])
        if lost:
            yield f"{what}: no {kind} {', '.join(lost)}"
        if extra and kind != "output":
            yield f"{what}: a {kind} {', '.join(extra)}, which the model does not have"
        if wrong:
            worst = ", ".join(f"{name} by {off[name]:.1e}" for name in wrong[:4])
            more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            yield f"{what}: {kind} {worst}{more} (relative norm; these differ, the others agree)"


# --- on ranks ----------------------------------------------------------------------------------------------


def _compare_on_ranks(
    what: str, compute: Any, registration: Registration, model: nn.Module, inputs: dict[str, Any],
    wanted: Result, ranks: int, timeout: float,
) -> Iterator[str]:  # fmt: skip
    try:
        results = launch(compute, registration, model, inputs, ranks=ranks, device="cpu", timeout=timeout)
    except RankError as error:
        reason = str(error).splitlines()[0]
        if what in (_ZERO_3, _ZERO_3_PIPELINE, _SEQUENCE):  # others may fit; training would raise this too
            hint = _TOKENS if what == _SEQUENCE and "of the tokens" not in reason else ""
            yield f"{_REFUSED}{_RAISED.sub('', reason)}{hint}"
        else:
            yield f"{what} on {ranks} ranks: {reason}"
        return
    if isinstance(results[0], str):
        yield results[0]
        return
    outputs = next(of_rank[0] for of_rank in results if of_rank[0])
    gradients = {name: g for of_rank in reversed(results) for name, g in of_rank[1].items()}
    yield from _differences(f"{what} on {ranks} ranks", (outputs, gradients), (wanted[0], wanted[1]))


def _on_a_pipeline(registration: Registration, model: nn.Module, inputs: dict[str, Any]) -> Result:
    registry.REGISTERED[type(model)] = registration
    schedule = schedules.make("1f1b", stages=world_size(), microbatches=2)

    def loss(outputs: Any, _: Any) -> Any:
        return loss_of(tensors_of(outputs).values()), 1

    first_name = {name: names[0] for names in tied(model) for name in names}
    pipe = Pipeline(model, _axis("pp"), schedule, loss)
    result = pipe.step(inputs, scale=2.0)  # two microbatches, each a sum with a count of 1
    outputs = {} if result.outputs is None else tensors_of(result.outputs)
    gradients = {first_name.get(n, n): p.grad for n, p in pipe.named_parameters() if p.grad is not None}
    return {name: value.detach() for name, value in outputs.items()}, gradients


def _on_zero_3(registration: Registration, model: nn.Module, inputs: dict[str, Any]) -> Result:
    registry.REGISTERED[type(model)] = registration
    axis = _axis("dp")
    data_parallel.fully_shard(model, axis, find_unused_parameters=True)
    outputs = tensors_of(model_forward(model, inputs))
    loss_of(outputs.values()).backward()
    return {name: value.detach() for name, value in outputs.items()}, full_gradients(model, [axis])


def _on_zero_3_in_a_pipeline(registration: Registration, model: nn.Module, inputs: dict[str, Any]) -> Result:
    registry.REGISTERED[type(model)] = registration
    schedule = schedules.make("1f1b", stages=1, microbatches=1)
    mesh = Mesh(Layout(dp=world_size()))

    def loss(outputs: Any, _: Any) -> Any:
        return loss_of(tensors_of(outputs).values()), 1

    pipe = Pipeline(model, mesh.pp, schedule, loss)
    blocks = [inner for block in pipe.module.units for inner in modules_with_forward(block)]
    data_parallel.fully_shard(pipe.module, mesh.dp, units=blocks, find_unused_parameters=True)
    pipe.gradients = data_parallel.sink(pipe.module)
    outputs = tensors_of(pipe.step(inputs).outputs)
    return {name: value.detach() for name, value in outputs.items()}, full_gradients(pipe.module, [mesh.dp])


def _on_sequence_parallel(
    registration: Registration, model: nn.Module, inputs: dict[str, Any]
) -> Result | str:
    """The result, or why such a model cannot run like this, which is no fault of what is registered."""
    registry.REGISTERED[type(model)] = registration
    axis = _axis("tp")
    try:
        tensor_parallel.parallelize(model, axis, sequence_parallel=True)
    except ValueError as error:
        return f"{_REFUSED}{error}"
    try:
        return _result_of_shards(model, inputs)
    except NotImplementedError as error:
        parts = type(registration.anatomy(model))
        if parts.tokens is not Anatomy.tokens:
            return f"{_REFUSED}{error}"
        return (
            f"{_REFUSED}{parts.__name__} has no tokens(self, inputs), which returns (samples, tokens of each)"
        )


def _on_tensor_parallel(registration: Registration, model: nn.Module, inputs: dict[str, Any]) -> Result:
    registry.REGISTERED[type(model)] = registration
    tensor_parallel.parallelize(model, _axis("tp"))
    return _result_of_shards(model, inputs)


def _axis(name: str) -> Axis:
    """All ranks, as the axis of this name."""
    sizes: dict[str, Any] = {name: world_size()}
    axis: Axis = getattr(Mesh(Layout(**sizes)), name)
    return axis


def _result_of_shards(model: nn.Module, inputs: dict[str, Any]) -> Result:
    outputs = tensors_of(run_parts(anatomy(model), inputs))
    loss_of(outputs.values()).backward()
    gradients = tensor_parallel.full_gradients(model)
    return {name: value.detach() for name, value in outputs.items()}, gradients


def _of_float64(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value.double() if value.is_floating_point() else value
