"""Adam on flat master weights: one pass over memory a step, and no float32 gradient.

    every element          g = float(g16) c
                           m = m + (1 - b1) (g - m)        m' = m / (1 - b1^t)
                           v = b2 v + (1 - b2) g^2         v' = v / (1 - b2^t)
                           w = w (1 - lr decay) - lr m' / (sqrt(v') + eps)
                           w16 = round(w)

    bytes a parameter      read    g16 2, w 4, m 4, v 4    14
                           write   w 4, m 4, v 4, w16 2    14

and 4 more if gradients of several parameters are copied together first. The same in four kernels (widen,
multiply by c, PyTorch's fused Adam, round) is 6 + 8 + 28 + 6 = 48, and takes 4 more bytes of memory a
parameter for the float32 gradient. c unscales and clips. It stays on the device, so the CPU waits for
nothing.

    masters    |  a  |pad|    b    |  c  |pad        float32, and two more like it: m, v
    weights    |  a  |pad|    b    |  c  |pad        16 bits, if they may move; else 4 bytes more, copied

`adam` is ten lines of PyTorch. On a GPU torch.compile makes one kernel of it, if `flatten` gets a backend. On
a CPU it runs as it is, over chunks that stay in the cache. Kingma & Ba 2015 (arXiv 1412.6980); Loshchilov &
Hutter 2019 (arXiv 1711.05101).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, reduce
from itertools import accumulate
from math import sqrt
from typing import Any

import torch
from torch.optim import Optimizer

ROW = 16  # elements: every tensor begins at a multiple, so that kernels use vector loads
MAX_PASS = 2**25  # elements of a pass, unless one parameter is larger: 64 MB of gradients copied together
CPU_CHUNK = 2**16  # elements that a CPU takes through all lines of `adam` at once, in its cache
UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable", "foreach")
MOMENTS = ("exp_avg", "exp_avg_sq")

AdamPass = Callable[..., None]


def adam(
    w16: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    c: torch.Tensor,
    numbers: torch.Tensor,
    coupled: bool,
) -> None:
    """One pass, in place. w16, g, w, m, v: (n / ROW, ROW); c: (); numbers: (8,), from `_coefficients`."""
    step_size, keep, decay, one_minus_b1, b2, one_minus_b2, v_correction, eps = numbers.unbind()
    g = g.to(w.dtype) * c
    if coupled:  # Adam's decay; AdamW's leaves gradients alone
        g = g + decay * w
    else:
        w.mul_(keep)
    m.lerp_(g, one_minus_b1)
    v.mul_(b2).add_(one_minus_b2 * g * g)
    w.sub_(step_size * m / (v.sqrt() * v_correction + eps))
    w16.copy_(w)


def _coefficients(group: dict[str, Any], t: float) -> list[float]:
    """What `adam` needs of a group's options, at step t."""
    (b1, b2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    corrected = group.get("bias_correction", True)
    step_size = lr / (1 - b1**t) if corrected else lr
    v_correction = 1 / sqrt(1 - b2**t) if corrected else 1.0
    return [step_size, 1 - lr * decay, decay, 1 - b1, b2, 1 - b2, v_correction, group["eps"]]


@cache
def _compiled(backend: str) -> AdamPass:
    # The second size makes the number of rows dynamic, and after that nothing is compiled again.
    return torch.compile(adam, backend=backend, fullgraph=True)


def _adam_in_chunks(*arguments: Any) -> None:
    flat, scalars = arguments[:5], arguments[5:]
    for chunks in zip(*(t.split(CPU_CHUNK // ROW) for t in flat), strict=True):
        adam(*chunks, *scalars)


def _adam_pass(device: torch.device, backend: str | None) -> AdamPass:
    if backend is not None:
        return _compiled(backend)
    return _adam_in_chunks if device.type == "cpu" else adam  # a GPU has no cache that chunks would fit


class FlatAdam:
    """Steps the parameters whose optimizer is Adam, for `Masters`. Those of one group, dtype and device are a
    `FlatGroup`.

    Args:
        kinds: classes of optimizers whose step is Adam's; a subclass may do something else.
        backend: of torch.compile, such as "inductor"; None compiles nothing.
        move_weights: weights move into flat tensors too. Their Parameters stay the same objects.
    """

    def __init__(self, kinds: Iterable[type[Optimizer]], backend: str | None, move_weights: bool) -> None:
        self.kinds, self.backend, self.move_weights = tuple(kinds), backend, move_weights
        self._position: dict[torch.Tensor, tuple[FlatGroup, int]] = {}

    def supports(self, optimizer: Optimizer, group: dict[str, Any]) -> bool:
        """Whether this steps a group. One with unsupported options is left to the optimizer."""
        numbers = (group.get("lr"), group.get("weight_decay"), group.get("eps"), *group.get("betas", (None,)))
        plain = not any(group.get(option) for option in UNSUPPORTED)
        return type(optimizer) in self.kinds and plain and all(isinstance(n, float | int) for n in numbers)

    def new_parameters(self, group: dict[str, Any]) -> list[torch.Tensor]:
        """The trained parameters of a group that are in no FlatGroup yet."""
        return [p for p in group["params"] if p.requires_grad and p not in self._position]

    def flatten(
        self, parameters: Iterable[torch.Tensor], dtype: torch.dtype
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Make FlatGroups of parameters of one group. Returns {parameter: its master}."""
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for p in parameters:
            kinds.setdefault((p.dtype, p.device), []).append(p)
        master_of: dict[torch.Tensor, torch.Tensor] = {}
        for members in kinds.values():
            flat = FlatGroup(members, dtype, self.move_weights)
            self._position |= {p: (flat, i) for i, p in enumerate(members)}
            master_of |= dict(zip(members, flat.masters, strict=True))
        return master_of

    @torch.no_grad()
    def step(self, optimizer: Optimizer, coefficient: float | torch.Tensor) -> set[torch.Tensor]:
        """Step all parameters with a gradient, of the groups that it supports. Returns which."""
        stepped: set[torch.Tensor] = set()
        for group in optimizer.param_groups:
            due: dict[FlatGroup, list[int]] = {}
            supported = self.supports(optimizer, group)
            for p in group["params"]:
                if p.grad is None or p not in self._position:
                    continue
                flat, i = self._position[p]
                if supported:
                    flat.adopt_state(optimizer, i)
                    due.setdefault(flat, []).append(i)
                    stepped.add(p)
                elif group.get("fused"):
                    flat.release_state(optimizer, i)
            for flat, indices in due.items():
                flat.step(group, sorted(indices), coefficient, self.backend)
        return stepped

    def adopt_loaded_state(self, optimizer: Optimizer) -> None:
        """Copy states that were loaded into the flat tensors."""
        for p, (flat, i) in self._position.items():
            if optimizer.state.get(p):
                flat.adopt_state(optimizer, i)


class FlatGroup:
    """Parameters of one group, dtype and device: flat masters and moments, and maybe flat weights.

    The state of an optimizer stays {"step", "exp_avg", "exp_avg_sq"} by parameter; its tensors are views.
    Moments get memory at the first step, as PyTorch's do.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], dtype: torch.dtype, move_weights: bool) -> None:
        self.parameters = list(parameters)
        sizes = [-(-p.numel() // ROW) * ROW for p in parameters]
        self.starts = list(accumulate(sizes, initial=0))  # of each parameter, and the end
        first = self.parameters[0]
        self.w = torch.zeros(self.starts[-1], dtype=dtype, device=first.device)
        self.masters = self._views(self.w)
        for p, master in zip(self.parameters, self.masters, strict=True):
            master.copy_(p.detach())
        self.w16: torch.Tensor | None = None
        if move_weights:
            self.w16 = self.w.to(first.dtype)
            for p, view in zip(self.parameters, self._views(self.w16), strict=True):
                p.data = view
        self.moments: list[torch.Tensor] = []  # m, v
        self._moment_views: list[list[torch.Tensor]] = []
        self.steps = torch.zeros(len(self.parameters))  # on the CPU, where PyTorch counts too

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.starts, self.parameters, strict=False)
        return [flat[start : start + p.numel()].view(p.shape) for start, p in pairs]

    def adopt_state(self, optimizer: Optimizer, i: int) -> None:
        """Make the state of parameter i views of the flat tensors, with its values, or zeros if it has
        none."""
        if not self.moments:
            self.moments = [torch.zeros_like(self.w) for _ in MOMENTS]
            self._moment_views = [self._views(flat) for flat in self.moments]
        state, views = optimizer.state[self.parameters[i]], [views[i] for views in self._moment_views]
        if all(state.get(name) is view for name, view in zip(MOMENTS, views, strict=True)):
            return
        count = state.get("step", 0.0)
        self.steps[i] = float(count)
        for name, view in zip(MOMENTS, views, strict=True):
            if name in state:
                view.copy_(state[name])
            else:
                view.zero_()
            state[name] = view
        state["step"] = self.steps[i]

    def release_state(self, optimizer: Optimizer, i: int) -> None:
        """Move the step count to the device, for a fused kernel. The next `adopt_state` takes it back."""
        state = optimizer.state.get(self.parameters[i])
        if state and state["step"].device != self.w.device:
            state["step"] = state["step"].to(self.w.device)
            state["exp_avg"] = state["exp_avg"].view_as(state["exp_avg"])

    def step(
        self,
        group: dict[str, Any],
        indices: Sequence[int],
        coefficient: float | torch.Tensor,
        backend: str | None,
    ) -> None:
        """Step the parameters of these indices, in order. They have gradients and adopted states."""
        device, dtype = self.w.device, self.w.dtype
        self.steps[torch.tensor(indices)] += 1
        counts = self.steps.tolist()
        c = _to_device(torch.as_tensor(coefficient, dtype=dtype), device)
        adam_pass = _adam_pass(device, backend)
        coefficients = {
            count: _to_device(torch.tensor(_coefficients(group, count), dtype=dtype), device)
            for count in {counts[i] for i in indices}
        }
        for run in self._split_into_runs(indices, counts):
            span = slice(self.starts[run[0]], self.starts[run[-1] + 1])
            g, w = self._flat_gradients(run), self.w[span]
            w16 = torch.empty_like(w, dtype=self.parameters[0].dtype) if self.w16 is None else self.w16[span]
            rows = [flat.view(-1, ROW) for flat in (w16, g, w, *(m[span] for m in self.moments))]
            adam_pass(*rows, c, coefficients[counts[run[0]]], not group.get("decoupled_weight_decay", False))
            if self.w16 is None:
                torch._foreach_copy_([self.parameters[i] for i in run], self._views_in_run(w16, run))

    def _split_into_runs(self, indices: Sequence[int], counts: Sequence[float]) -> list[list[int]]:
        """Neighbours that have stepped equally often, at most MAX_PASS elements at a time."""
        runs: list[list[int]] = []
        for i in indices:
            follows = bool(runs) and runs[-1][-1] == i - 1 and counts[i - 1] == counts[i]
            if follows and self.starts[i + 1] - self.starts[runs[-1][0]] <= MAX_PASS:
                runs[-1].append(i)
            else:
                runs.append([i])
        return runs

    def _flat_gradients(self, run: Sequence[int]) -> torch.Tensor:
        """(n,): the gradients of neighbours, at the positions of the flat tensors."""
        grads: list[torch.Tensor] = [self.parameters[i].grad for i in run]  # type: ignore[misc]
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError("Adam does not take sparse gradients; use nn.Embedding(sparse=False)")
        if len(grads) == 1 and grads[0].is_contiguous() and grads[0].numel() % ROW == 0:
            return grads[0].view(-1)
        dtype = reduce(torch.promote_types, (grad.dtype for grad in grads))
        size = self.starts[run[-1] + 1] - self.starts[run[0]]
        flat = torch.empty(size, dtype=dtype, device=self.w.device)
        ends = [self.starts[i] + self.parameters[i].numel() - self.starts[run[0]] for i in run]
        nexts = [self.starts[i + 1] - self.starts[run[0]] for i in run]
        if gaps := [flat[end:start] for end, start in zip(ends, nexts, strict=True) if end < start]:
            torch._foreach_zero_(gaps)
        torch._foreach_copy_(self._views_in_run(flat, run), grads)
        return flat

    def _views_in_run(self, flat: torch.Tensor, run: Sequence[int]) -> list[torch.Tensor]:
        """Views of `flat` (n,), one for each parameter of `run`, in its shape."""
        first, views = self.starts[run[0]], []
        for i in run:
            p, start = self.parameters[i], self.starts[i] - first
            views.append(flat[start : start + p.numel()].view(p.shape))
        return views


def _to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move `numbers`. The CPU does not wait for a copy to a GPU, so that starts from pinned memory."""
    if device.type != "cuda" or numbers.device == device:
        return numbers.to(device)
    return (numbers.pin_memory() if numbers.device.type == "cpu" else numbers).to(device, non_blocking=True)
