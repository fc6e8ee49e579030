"""Master weights: float32 copies of 16-bit weights, which the optimizer steps instead of them.

    before a step   g32 = float(g16) * coefficient          g16 is the parameter's .grad
    the step        w32 = step(w32, g32)                    moments are float32 too
    after it        w16 = round(w32)                        g32 is freed

Bytes a parameter with Adam: 2 (w16) + 2 (g16) + 12 (w32 and two moments), as in `hpnb.theory.model_states`,
and 4 more (g32) during a step. `flatten` needs no g32 (`flat_adam.py`). Micikevicius et al. 2018 (arXiv
1710.03740), section 3.1.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from hpnb.precision.flat_adam import FlatAdam


class Masters:
    """Gives an optimizer master weights. It stays the same object, so a scheduler made before stays attached.

    Its groups keep the model's parameters, and its state stays keyed by them. A step runs on a stand-in: the
    same optimizer and state, with masters instead of parameters. So an error in a step leaves the groups as
    they were. A parameter as wide as `dtype` needs no master, and one without a gradient is left alone.

    `optimizer.state_dict()` has a third entry, "masters", by parameter number. Loading it sets masters and
    weights. With a state dict without masters, masters become copies of the weights.

    Args:
        optimizer: any of torch.optim, or one with the same hooks. Its state is converted to `dtype`.
        dtype: of the masters.

    Attributes:
        coefficient: gradients are multiplied by it once they are wide; 1.0 again after each step.

    Raises:
        ValueError: the optimizer has masters already; later, a step with a closure.

    >>> weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> optimizer = torch.optim.SGD([weight], lr=1e-3)
    >>> masters = hpnb.precision.Masters(optimizer)
    >>> weight.grad = torch.ones_like(weight)
    >>> optimizer.step()
    >>> weight.item(), masters.of(weight).item()  # too small a step for bf16
    (1.0, 0.9990...)
    """

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> None:
        if Masters.attached_to(optimizer) is not None:
            raise ValueError(
                f"this {type(optimizer).__name__} has masters already; Masters.attached_to gives them"
            )
        self.dtype = dtype
        self.coefficient: float | torch.Tensor = 1.0
        self._master: dict[torch.Tensor, torch.Tensor] = {}  # parameter -> its master
        self._parameter: dict[torch.Tensor, torch.Tensor] = {}  # and back
        self._versions: dict[torch.Tensor, int] = {}  # of parameters, when masters last wrote them
        # During a load: masters by parameter, state by master.
        self._loaded: tuple[dict[torch.Tensor, torch.Tensor], dict[Any, Any]] = {}, {}
        self._flat: FlatAdam | None = None  # steps what it can, and the optimizer the rest
        # The optimizer's hooks refer to this object. A reference back would keep both until a garbage
        # collection.
        self._optimizer = weakref.ref(optimizer)
        for p in parameters_of(optimizer):
            if p.requires_grad:
                self._make_master(p)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_post_hook(self._after_state_dict)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)
        vars(optimizer).update(masters=self, tensors_by_category=self.tensors_by_category)
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())

    @staticmethod
    def attached_to(optimizer: Optimizer) -> Masters | None:
        """The masters of `optimizer`, if it has any."""
        masters = vars(optimizer).get("masters")
        return masters if isinstance(masters, Masters) else None

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """What the optimizer steps in place of `parameter`: its master, or itself if it has none."""
        return self._master.get(parameter, parameter)

    @torch.no_grad()
    def flatten(
        self,
        kinds: Iterable[type[Optimizer]] = (Adam, AdamW),
        *,
        backend: str | None = None,
        move_weights: bool = False,
    ) -> None:
        """Make masters and moments flat, and step Adam in one pass (`flat_adam.py`). A group with other
        options (amsgrad, a tensor lr, ...) and an optimizer that is none of `kinds` are stepped as before.
        State dicts stay the same.

        Args:
            kinds: classes, without their subclasses, whose step is Adam's or AdamW's.
            backend: of torch.compile for the pass, such as "inductor"; None runs it eagerly.
            move_weights: weights move into a flat tensor too. Leave it off if others rely on their memory.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        self._flat = FlatAdam(kinds, backend, move_weights)
        self._flatten_new(optimizer)
        self._flat.adopt_loaded_state(optimizer)
        self.note()

    @torch.no_grad()
    def _flatten_new(self, optimizer: Optimizer) -> None:
        """Flatten the masters of parameters that have come since: of groups added, or trained again."""
        assert self._flat is not None
        for group in optimizer.param_groups:
            if self._flat.supports(optimizer, group):
                narrow = [p for p in self._flat.new_parameters(group) if self._make_master(p) is not p]
                for p, master in self._flat.flatten(narrow, self.dtype).items():
                    old = self._master[p]
                    del self._parameter[old]
                    master.copy_(old)
                    self._master[p], self._parameter[master] = master, p
                    self._versions[p] = p._version

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy weights that others have written (a checkpoint, a broadcast) to masters. A step does so by
        itself, except for what was written through `.data`, which PyTorch does not count as a change: call
        this after it, or the next step undoes it.

        It goes element by element: a weight that is its master rounded leaves the master, which has more
            digits.
        """
        for p, master in self._master.items():
            master.copy_(torch.where(p == master.to(p.dtype), master, p.to(master.dtype)))
        self.note()

    def note(self) -> None:
        """Note that weights are as masters have written them."""
        self._versions = {p: p._version for p in self._master}

    def tensors_by_category(self) -> dict[str, list[torch.Tensor]]:
        """{"optimizer": masters}, which are not in optimizer.state. Their gradients live only during a
        step."""
        return {"optimizer": list(self._master.values())}

    def _make_master(self, p: torch.Tensor) -> torch.Tensor:
        """The master of `p`, made when it is first needed; `p` itself if it is wide enough."""
        known = self._master.get(p)
        if known is not None or not p.is_floating_point() or p.dtype.itemsize >= self.dtype.itemsize:
            return p if known is None else known
        master = p.detach().to(self.dtype)
        self._master[p], self._parameter[master], self._versions[p] = master, p, p._version
        return master

    def _stand_in(self, optimizer: Optimizer, without: Collection[torch.Tensor] = ()) -> Optimizer:
        """A stand-in for `optimizer` with masters instead of parameters. Both share their states."""
        stand_in = object.__new__(type(optimizer))
        vars(stand_in).update(vars(optimizer))
        groups = optimizer.param_groups
        stand_in.param_groups = [
            {**group, "params": [self.of(p) for p in group["params"] if p not in without]} for group in groups
        ]
        stand_in.state = defaultdict(dict, {self.of(p): state for p, state in optimizer.state.items()})
        return stand_in

    # --- a step ------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if optimizer is not self._optimizer():
            return None  # the stand-in, in a step that calls its superclass's step
        if kwargs.get("closure") is not None or any(callable(a) for a in args[1:]):
            raise ValueError(
                f"{type(optimizer).__name__}.step(closure) cannot step masters: gradients must be there "
                "before it; run forward and backward first, then step() without a closure"
            )
        if any(p._version != version for p, version in self._versions.items()):
            self.refresh()
        stepped: set[torch.Tensor] = set()
        if self._flat is not None:
            self._flatten_new(optimizer)
            stepped = self._flat.step(optimizer, self.coefficient)
        self._take_gradients(optimizer, stepped)
        return (self._stand_in(optimizer, stepped), *args[1:]), kwargs

    @torch.no_grad()
    def _take_gradients(self, optimizer: Optimizer, stepped: Collection[torch.Tensor]) -> None:
        wide, narrow, without_master = [], [], []
        for p in parameters_of(optimizer):
            if p.grad is None or p in stepped:
                self.of(p).grad = None  # a step that failed may have left one
            elif (master := self._make_master(p)) is p:
                without_master.append(p.grad)
            else:
                master.grad = torch.empty_like(master)
                wide.append(master.grad)
                narrow.append(p.grad)
        if wide:
            torch._foreach_copy_(wide, narrow)
        multiply([*wide, *without_master], self.coefficient)
        self.coefficient = 1.0

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer is not self._optimizer():
            return
        stepped = [(p, master) for p, master in self._master.items() if master.grad is not None]
        if stepped:
            torch._foreach_copy_([p for p, _ in stepped], [master for _, master in stepped])
        for _, master in stepped:
            master.grad = None
        self.note()
        # What the step has noted on the stand-in, in its groups and in its state belongs to the optimizer.
        stand_in: Optimizer = args[0]
        noted = {k: v for k, v in vars(stand_in).items() if k not in ("param_groups", "state")}
        vars(optimizer).update(noted)
        for group, new in zip(optimizer.param_groups, stand_in.param_groups, strict=True):
            group.update({k: v for k, v in new.items() if k != "params"})
        optimizer.state.update({self._parameter.get(k, k): state for k, state in stand_in.state.items()})

    # --- saving and loading ------------------------------------------------------------------

    def _after_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        # Beside the state and not in it, because Adam takes a parameter with any state for one that has
        # stepped.
        numbered = _numbered(optimizer, state_dict)
        state_dict["masters"] = {i: self._master[p] for i, p in numbered if p in self._master}

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if optimizer is not self._optimizer():
            return None
        masters = state_dict.get("masters", {})
        saved = {p: masters[i] for i, p in _numbered(optimizer, state_dict) if i in masters}
        for p in saved:
            self._make_master(p)
        # PyTorch casts state to the dtype of its parameter, so it is loaded into the stand-in.
        stand_in = self._stand_in(optimizer)
        Optimizer.load_state_dict(stand_in, state_dict)
        self._loaded = saved, dict(stand_in.state)
        return {**state_dict, "state": {}}

    @torch.no_grad()
    def _after_load(self, optimizer: Optimizer) -> None:
        if optimizer is not self._optimizer():
            return
        (saved, state), self._loaded = self._loaded, ({}, {})
        optimizer.state.update({self._parameter.get(k, k): value for k, value in state.items()})
        for p in parameters_of(optimizer):
            value = saved.get(p, p)
            for target in (self.of(p), p):  # the same where there is no master
                if target is not value:
                    target.copy_(value)
        if self._flat is not None:
            self._flat.adopt_loaded_state(optimizer)
        self.note()


def _numbered(optimizer: Optimizer, state_dict: dict[str, Any]) -> list[tuple[int, torch.Tensor]]:
    """Parameters with their numbers in the state dict, which may have fewer or more."""
    numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
    return list(zip(numbers, parameters_of(optimizer), strict=False))


# --- lists of tensors ------------------------------------------------------------------------


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def group_by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors of one device and dtype, for which one kernel does."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.device, tensor.dtype].append(tensor)
    return list(kinds.values())


@torch.no_grad()
def multiply(tensors: list[torch.Tensor], by: float | torch.Tensor) -> None:
    """In place, by a number or a tensor () on the device; the number 1 costs nothing."""
    if isinstance(by, torch.Tensor):
        for group in group_by_kind(tensors):
            dtype = torch.promote_types(group[0].dtype, torch.float32)
            torch._foreach_mul_(group, by.to(group[0].device, dtype))
    elif by != 1.0:
        for group in group_by_kind(tensors):
            torch._foreach_mul_(group, by)
