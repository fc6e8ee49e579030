"""CUDA graphs for pipeline stages: small microbatches without Python's launches.

    step 1, 2    eager, and watched: can this stage be captured?                    `capture_watch.py`
    step 3       first capture what the step needs, then replay it                  `stage_graph.py`
    later        replay; each microbatch in flight has a slot of memory             `graph_slots.py`

    pipe = hpnb.Pipeline(model, mesh.pp, "1f1b", loss_fn, cuda_graphs=True)

Every stage has a graph for each action (F and B, or F, I and W), each form of a microbatch, and each slot. A
form is the shapes and dtypes of its tensors, the values of all else in it, and the dtype of autocast.
Each rank decides for itself, because messages between stages are the same with and without graphs. Ranks that
communicate within a stage, by tensor parallelism or ZeRO 3, decide together (`graph_agreement.py`). A stage
that cannot be captured runs as before, and a warning says why. So does a form that is new, and each further
one after `MAX_FORMS`: pad batches to a few lengths, and pass numbers that change as tensors.

A graph repeats what was captured. What Python decides is decided once: by an attribute of a loss module, a
dropout rate, a layer that is switched off. Call `pipe.forget()` after such a change, on every rank. Weights,
masks, labels and the loss scale may change freely. Every step compares whether modules train, where weights
lie in memory, and which loss function is set; where one of them changes, graphs are captured anew.

`.grad` is the same tensor in every step, zeroed where `zero_grad` has set it to None. With ZeRO 3 this is the
full gradient of a full parameter (`fsdp_capture.py`). Data parallelism reduces gradients after the graphs.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path

from hpnb.caller_frame import warn_caller
from hpnb.dropout_rng import RankStateStart
from hpnb.gradients import GradientSink
from hpnb.mesh import Axis
from hpnb.pipeline_parallel.boundary import KnownBoundaries
from hpnb.pipeline_parallel.capture_watch import CaptureWatch, describe_failure
from hpnb.pipeline_parallel.graph_agreement import CAPTURE, EAGER, REPLAY, GraphAgreement, refused_by
from hpnb.pipeline_parallel.graph_slots import StageMicrobatch, assign_slots
from hpnb.pipeline_parallel.loss import LossFunction
from hpnb.pipeline_parallel.rank_schedule import RankSchedule
from hpnb.pipeline_parallel.split_backward import SplitBackward
from hpnb.pipeline_parallel.stage_graph import CudaCapture, StageGraph, StageWork, without_autocast_cache
from hpnb.pipeline_parallel.stages import Stages

WARM_UP = 2  # eager steps with a form before it is captured
MAX_FORMS = 16  # forms of microbatches of a stage; further ones run eagerly
MAX_RECAPTURES = 8  # how often everything may be captured anew


@dataclass
class StepGraphs:
    """What one step replays, and what it watches.

    Attributes:
        graphs: {(stage, microbatch): its graph}; the others run eagerly.
        static_grads: {parameter: the tensor to which graphs add its gradient}.
        warms_up: whether an eager forward of this step is captured later.
        watch: looks at eager forwards, in the last step that warms up.
    """

    graphs: Mapping[StageMicrobatch, StageGraph] = field(default_factory=dict)
    static_grads: Mapping[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    warms_up: bool = False
    watch: CaptureWatch | None = None

    def running(self) -> AbstractContextManager[None]:
        """Around the step: what compiles in a step that warms up has to compile as for the capture."""
        return without_autocast_cache() if self.warms_up else nullcontext()

    def watch_forward(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext() if self.watch is None else self.watch.forward(stage, microbatch)


@dataclass(frozen=True)
class GraphKey:
    """What a graph is for."""

    stage: int
    form: Hashable
    slot: int
    splits: bool


class StageGraphs:
    """The graphs of one rank's stages, over all steps.

    Args:
        captured_axes: along which the stages communicate by collectives that are captured.

    Attributes:
        reasons: {stage: why it runs eagerly}.
    """

    def __init__(
        self,
        module: Stages,
        device: torch.device,
        split_backward: SplitBackward,
        capture: CudaCapture | None = None,
        captured_axes: Sequence[Axis] = (),
    ) -> None:
        self._module, self._device, self._split_backward = module, device, split_backward
        self._capture = CudaCapture(device) if capture is None else capture
        self._captured_axes, self._sink = tuple(captured_axes), GradientSink()
        self._agreement = GraphAgreement(captured_axes)
        self.reasons: dict[int, str] = {}
        self._plans: dict[RankSchedule, tuple[dict[StageMicrobatch, int], set[StageMicrobatch]]] = {}
        self._static_grads: dict[nn.Parameter, torch.Tensor] = {}
        self._modules = list(module.modules())
        self._recaptures = self._count_captures = 0
        self._warned_of_forms: set[int] = set()
        self._warned_of_others = False
        self.forget()

    def forget(self) -> None:
        """Drop all graphs, and warm up anew."""
        self._graphs: dict[GraphKey, StageGraph] = {}
        self._captures: dict[GraphKey, int] = {}  # the number of the capture that made it
        self._steps = Counter[tuple[int, Hashable]]()  # eager steps with a form, by stage
        self._running: dict[StageMicrobatch, tuple[int, Hashable]] = {}  # those of the step that runs
        self._rank_states: dict[tuple[int, Hashable], Sequence[RankStateStart]] = {}  # by stage and form
        self._frozen_world: tuple[Hashable, ...] | None = None
        self._loss_runs_eagerly = False  # as it cannot be captured
        self._capture.forget()

    def begin_step(
        self,
        rank_schedule: RankSchedule,
        microbatches: Sequence[Any],
        signatures: Sequence[Hashable],
        boundaries: KnownBoundaries,
        loss: tuple[LossFunction, object],
        keeps_outputs: bool,
        sink: GradientSink | None = None,
        overlaps_pairs: bool = False,
    ) -> StepGraphs:
        """Capture what is missing, and say what the step replays.

        Args:
            loss: the loss function, and what it calls inside if that may be another one in every step.
            sink: reduces gradients. If it shards parameters too, graphs gather them.
            overlaps_pairs: whether forwards and backwards overlap in pairs.
        """
        refused = refused_by(sink, overlaps_pairs, self._captured_axes)
        for stage in self._module.numbers if refused else ():
            self._run_eagerly(stage, refused)
        self._sink = sink if sink is not None else GradientSink()
        gathered = () if refused else self._sink.gather_axes
        self._agreement = GraphAgreement(dict.fromkeys([*self._captured_axes, *gathered]))
        self._check_world(tuple(map(_function_key, loss)))
        if rank_schedule not in self._plans:
            splits = {(a.stage, a.microbatch) for a in rank_schedule.actions if a.op == "I"}
            self._plans[rank_schedule] = assign_slots(rank_schedule.actions), splits
        slots, splits = self._plans[rank_schedule]
        pairs = zip(signatures, microbatches, strict=True)
        forms = [(signature, _constants(microbatch)) for signature, microbatch in pairs]
        keys: dict[StageMicrobatch, GraphKey] = {}
        self._running = {}
        for (stage, m), slot in slots.items():
            form = (forms[m], keeps_outputs and stage == rank_schedule.last_stage)
            if stage in self.reasons or not self._admit(stage, form, microbatches[m]):
                continue
            self._running[stage, m] = (stage, form)
            if self._steps[stage, form] >= WARM_UP:
                keys[stage, m] = GraphKey(stage, form, slot, (stage, m) in splits)
        keys = self._agree(list(slots), keys)
        missing: dict[GraphKey, int] = {}  # and a microbatch that needs it
        for (_, m), key in keys.items():
            if key not in self._graphs:
                missing.setdefault(key, m)
        if missing:
            with self._capture.session():
                for key, m in missing.items():
                    loss_fn = loss[0] if key.stage == rank_schedule.last_stage else None
                    boundary = boundaries.get((key.stage - 1, signatures[m]))
                    self._capture_stage(
                        key,
                        StageWork(
                            stage=key.stage,
                            run_stage=self._module,
                            boundary=boundary,
                            inputs=microbatches[m],
                            loss=loss_fn,
                            keeps_outputs=keeps_outputs,
                            splits=key.splits,
                            split_backward=self._split_backward,
                            device=self._device,
                            rank_states=self._rank_states.get((key.stage, key.form), ()),
                        ),
                    )
            self._count_captures += 1
            self._captures.update(dict.fromkeys(missing, self._count_captures))
            self._agree_on_captures(list(missing))
        graphs = {at: self._graphs[key] for at, key in keys.items() if key in self._graphs}
        used = {p: self._static_grads[p] for graph in set(graphs.values()) for p in graph.parameters}
        running = set(self._running.values())
        warms_up = any(self._steps[form] < WARM_UP for form in running)
        watches = any(self._steps[form] == WARM_UP - 1 for form in running)
        watch = CaptureWatch(self._device, self._agreement.axes) if watches else None
        return StepGraphs(graphs, used, warms_up, watch)

    def end_step(self, step: StepGraphs) -> None:
        """The step is done: count it, and note which stages cannot be captured."""
        for form in set(self._running.values()):
            self._steps[form] += 1
        if step.watch is not None:
            for work, starts in step.watch.rank_states.items():
                if work in self._running:
                    self._rank_states[self._running[work]] = starts
            for stage, reason in step.watch.reasons.items():
                self._run_eagerly(stage, reason)

    # --- inside ------------------------------------------------------------------------------------------

    def _agree(
        self, all_work: Sequence[StageMicrobatch], keys: dict[StageMicrobatch, GraphKey]
    ) -> dict[StageMicrobatch, GraphKey]:
        """Those of `keys` that every rank of the stages replays. A graph that one of them lacks is dropped:
        all capture it."""
        first = {key: i for i, key in reversed([(i, keys.get(work)) for i, work in enumerate(all_work)])}
        states = [self._state(keys.get(work)) for work in all_work]
        captures = [self._captures.get(keys[work], 0) if work in keys else 0 for work in all_work]
        least = self._agreement.least(states, [first[keys.get(work)] for work in all_work], captures)
        agreed = dict(zip(all_work, least, strict=True))
        for work, key in keys.items():
            if agreed[work] == CAPTURE:
                self._graphs.pop(key, None)
            elif agreed[work] == EAGER and key in self._graphs and not self._warned_of_others:
                self._warned_of_others = True
                warnings.warn(
                    f"stage {key.stage} runs some microbatches without CUDA graphs, because ranks that it "
                    "communicates with have microbatches of other shapes; pad batches to the same length on "
                    "all ranks",
                    stacklevel=2,
                )
        return {work: key for work, key in keys.items() if agreed[work] != EAGER}

    def _state(self, key: GraphKey | None) -> int:
        return EAGER if key is None else REPLAY if key in self._graphs else CAPTURE

    def _agree_on_captures(self, keys: Sequence[GraphKey]) -> None:
        """A capture that failed on one rank of the stage, or that has no loss in it there, is of no use."""
        kinds = [1 + self._graphs[key].has_loss if key in self._graphs else 0 for key in keys]
        states = [self._state(key) if key in self._graphs else EAGER for key in keys]
        for key, state in zip(keys, self._agreement.least(states, kinds), strict=True):
            if state == EAGER:
                self._run_eagerly(key.stage, "another rank that communicates within it could not capture it")

    def _capture_stage(self, key: GraphKey, work: StageWork) -> None:
        if key.stage in self.reasons:
            return
        if self._loss_runs_eagerly:
            work = replace(work, loss=None)
        try:
            with self._sink.capturing():
                self._graphs[key] = StageGraph(work, self._capture, key.slot, self._static_grad)
        except Exception as error:
            self._split_backward.drop()
            if work.loss is None:
                self._run_eagerly(key.stage, describe_failure(error))
                return
            self._loss_runs_eagerly = True
            self._capture_stage(key, work)
            if key.stage not in self.reasons:
                reason = describe_failure(error)
                warnings.warn(f"the loss runs without CUDA graphs, because {reason}", stacklevel=2)

    def _static_grad(self, parameter: nn.Parameter) -> torch.Tensor:
        if parameter not in self._static_grads:
            self._static_grads[parameter] = torch.zeros_like(parameter)
        return self._static_grads[parameter]

    def _run_eagerly(self, stage: int, reason: str) -> None:
        if stage in self.reasons:
            return
        self.reasons[stage] = reason
        self._graphs = {key: graph for key, graph in self._graphs.items() if key.stage != stage}
        warnings.warn(f"stage {stage} runs without CUDA graphs, because {reason}", stacklevel=2)

    def _admit(self, stage: int, form: Hashable, microbatch: Any) -> bool:
        """Whether this form is captured sooner or later."""
        if (stage, form) in self._steps:
            return True
        if sum(other == stage for other, _ in self._steps) < MAX_FORMS:
            self._steps[stage, form] = 0
            return True
        if stage not in self._warned_of_forms:
            self._warned_of_forms.add(stage)
            forms: list[Any] = [other for at, other in self._steps if at == stage]
            changing = _changing_values([constants for (_, constants), _ in forms], microbatch)
            advice = (
                f"a graph repeats the value of {' and '.join(changing)} in the batch, which changes: pass it "
                "as a tensor, or leave it out"
                if changing
                else "pad batches to fewer lengths, and drop a last batch that is smaller"
            )
            what = "forms" if changing else "shapes"
            warnings.warn(
                f"stage {stage} has met more than {MAX_FORMS} {what} of microbatches, and further ones run "
                f"without CUDA graphs; {advice}",
                stacklevel=2,
            )
        return False

    def _check_world(self, loss: tuple[Hashable, ...]) -> None:
        """Drop the graphs if something has changed that they have captured."""
        tables = (table for m in self._modules for table in (m._parameters, m._buffers))
        tensors = [t for table in tables for t in table.values() if t is not None]
        world = (
            loss,
            tuple(t.data_ptr() for t in tensors),
            tuple(t.requires_grad for t in tensors),
            tuple(module.training for module in self._modules),
        )
        if world == self._frozen_world:
            return
        if self._frozen_world is not None and self._graphs:
            self._recaptures += 1
            if self._recaptures > MAX_RECAPTURES:
                parts = "the loss function", "the memory of weights", "what is trained", "train() or eval()"
                changed = [w for w, a, b in zip(parts, world, self._frozen_world, strict=True) if a != b]
                for stage in self._module.numbers:
                    self._run_eagerly(
                        stage,
                        f"{' and '.join(changed)} changed for the {self._recaptures}th time, and every "
                        "change needs a new capture",
                    )
        self.forget()
        self._frozen_world = world


def make_stage_graphs(
    module: Stages,
    device: torch.device,
    split_backward: SplitBackward,
    wanted: bool,
    captured_axes: Sequence[Axis] = (),
) -> StageGraphs | None:
    """For `Pipeline(cuda_graphs=wanted)`. None on a CPU, and a warning if they are wanted."""
    if not wanted or device.type == "cuda":
        return StageGraphs(module, device, split_backward, None, captured_axes) if wanted else None
    warn_caller(f"cuda_graphs=True needs a GPU; on this {device.type.upper()} all stages run eagerly")
    return None


_VALUES = int, float, bool, str, bytes, type(None), torch.dtype, torch.device


def _function_key(function: object) -> Hashable:
    """Equal for functions that do the same: the same code, with equal values from outside. A criterion is
    often a lambda, which is another object in every step."""
    if isinstance(function, MethodType):
        return id(function.__self__), function.__func__
    if isinstance(function, partial):
        values = [*function.args, *function.keywords.values()]
        return _function_key(function.func), tuple(function.keywords), tuple(map(_value_key, values))
    if isinstance(function, FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
        values = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return function.__code__, tuple(map(_value_key, values))
    return _value_key(function)


def _value_key(value: object) -> Hashable:
    if isinstance(value, _VALUES):
        return type(value).__name__, value
    return _function_key(value) if isinstance(value, FunctionType | MethodType | partial) else id(value)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a name that is not assigned yet
        return False


def _constants(microbatch: Any) -> tuple[Hashable, ...]:
    """What a microbatch has besides tensors, which a graph cannot change."""
    others = [leaf for leaf in tree_flatten(microbatch)[0] if not isinstance(leaf, torch.Tensor)]
    return tuple(map(_value_key, others))


def _changing_values(seen: Sequence[tuple[Hashable, ...]], microbatch: Any) -> list[str]:
    """The entries of a microbatch that are no tensors and had different values in these `_constants`."""
    leaves = tree_flatten_with_path(microbatch)[0]
    names = [keystr(path) for path, leaf in leaves if not isinstance(leaf, torch.Tensor)]
    values = zip(*(constants for constants in seen if len(constants) == len(names)), strict=True)
    return [name for name, of_name in zip(names, values, strict=False) if len(set(of_name)) > 1]
