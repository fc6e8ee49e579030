"""Adam on masters that lie end to end: one pass over memory a step, and no float32 gradient.

    for each element       g = float(g16) c
                           m = m + (1 - b1) (g - m)        m' = m / (1 - b1^t)
                           v = b2 v + (1 - b2) g^2         v' = v / (1 - b2^t)
                           w = w (1 - lr decay) - lr m' / (sqrt(v') + eps)
                           w16 = round(w)

    bytes a parameter      read    g16 2, w 4, m 4, v 4    14
                           write   w 4, m 4, v 4, w16 2    14

and 4 more where gradients of several parameters are brought together first. The same in steps (widen,
multiply by c, PyTorch's fused kernel, round) is 6 + 8 + 28 + 6 = 48, and 4 bytes a parameter of memory for
the float32 gradient. c, which unscales and clips, stays on the device: the host waits for nothing.

    masters    |  a  |pad|    b    |  c  |pad        float32, and two more like it: m, v
    weights    |  a  |pad|    b    |  c  |pad        16 bits, if they may move; else 4 bytes more, copied

`adam` is ten lines of PyTorch: on a GPU torch.compile makes one kernel of it, on a CPU it runs as it is, over
pieces that stay in the cache. Kingma & Ba 2015 (arXiv 1412.6980); Loshchilov & Hutter 2019 (arXiv
1711.05101).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, reduce
from itertools import accumulate
from math import sqrt
from typing import Any

import torch
from torch.optim import Optimizer

ROW = 16  # elements: every tensor begins at a multiple, so that kernels load and store in vectors
TOGETHER = 2**25  # elements of a pass, but for a larger parameter: 64 MB of gradients brought together
IN_CACHE = 2**16  # elements that a CPU takes through all lines of `adam` before it goes on
UNUSUAL = ("amsgrad", "maximize", "capturable", "differentiable", "foreach")
MOMENTS = ("exp_avg", "exp_avg_sq")

Pass = Callable[..., None]


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
    """The pass, in place. w16, g, w, m, v: (n / ROW, ROW); c: (); numbers: (8,), of `_numbers`."""
    size, keep, decay, a1, b2, a2, root, eps = numbers.unbind()
    g = g.to(w.dtype) * c
    if coupled:  # Adam's decay; AdamW's leaves gradients alone
        g = g + decay * w
    else:
        w.mul_(keep)
    m.lerp_(g, a1)
    v.mul_(b2).add_(a2 * g * g)
    w.sub_(size * m / (v.sqrt() * root + eps))
    w16.copy_(w)


def _numbers(group: dict[str, Any], t: float) -> list[float]:
    """What `adam` needs of a group's options, at step t."""
    (b1, b2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    corrected = group.get("bias_correction", True)
    size = lr / (1 - b1**t) if corrected else lr
    root = 1 / sqrt(1 - b2**t) if corrected else 1.0
    return [size, 1 - lr * decay, decay, 1 - b1, b2, 1 - b2, root, group["eps"]]


@cache
def _compiled(backend: str) -> Pass:
    # A second length makes the number of rows dynamic, and there are no more compilations after that.
    return torch.compile(adam, backend=backend, fullgraph=True)


def _by_pieces(*given: Any) -> None:
    flat, same = given[:5], given[5:]
    for part in zip(*(t.split(IN_CACHE // ROW) for t in flat), strict=True):
        adam(*part, *same)


class FlatAdam:
    """Steps what is Adam's, for `Masters`. Parameters of one group, dtype and device are a `Lane`.

    Args:
        kinds: classes of optimizers whose step is the pass above; a subclass may do something else.
        backend: of torch.compile for what lies on GPUs, such as "inductor"; None compiles nothing.
        moves: weights move into flat tensors too; their Parameters stay the same objects.
    """

    def __init__(self, kinds: Iterable[type[Optimizer]], backend: str | None, moves: bool) -> None:
        self.kinds, self.backend, self.moves = tuple(kinds), backend, moves
        self._at: dict[torch.Tensor, tuple[Lane, int]] = {}

    def takes(self, optimizer: Optimizer, group: dict[str, Any]) -> bool:
        """Whether a group's step is the pass: with another option it is left to the optimizer."""
        numbers = (group.get("lr"), group.get("weight_decay"), group.get("eps"), *group.get("betas", (None,)))
        usual = not any(group.get(option) for option in UNUSUAL)
        return type(optimizer) in self.kinds and usual and all(isinstance(n, float | int) for n in numbers)

    def new(self, group: dict[str, Any]) -> list[torch.Tensor]:
        """The trained parameters of a group that lie in no lane."""
        return [p for p in group["params"] if p.requires_grad and p not in self._at]

    def gather(
        self, parameters: Iterable[torch.Tensor], dtype: torch.dtype
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Lanes for parameters of one group: {parameter: its master}."""
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for p in parameters:
            kinds.setdefault((p.dtype, p.device), []).append(p)
        made: dict[torch.Tensor, torch.Tensor] = {}
        for alike in kinds.values():
            lane = Lane(alike, dtype, self.moves)
            self._at |= {p: (lane, i) for i, p in enumerate(alike)}
            made |= dict(zip(alike, lane.masters, strict=True))
        return made

    @torch.no_grad()
    def step(self, optimizer: Optimizer, coefficient: float | torch.Tensor) -> set[torch.Tensor]:
        """Step all parameters with a gradient, of groups that it takes. Returns which."""
        stepped: set[torch.Tensor] = set()
        for group in optimizer.param_groups:
            due: dict[Lane, list[int]] = {}
            takes = self.takes(optimizer, group)
            for p in group["params"]:
                if p.grad is None or p not in self._at:
                    continue
                lane, i = self._at[p]
                if takes:
                    lane.adopt(optimizer, i)
                    due.setdefault(lane, []).append(i)
                    stepped.add(p)
                elif group.get("fused"):
                    lane.leave(optimizer, i)
            for lane, held in due.items():
                lane.step(group, sorted(held), coefficient, self.backend)
        return stepped

    def loaded(self, optimizer: Optimizer) -> None:
        """Take states that were loaded."""
        for p, (lane, i) in self._at.items():
            if optimizer.state.get(p):
                lane.adopt(optimizer, i)


class Lane:
    """Parameters of one group, dtype and device: masters, moments and maybe weights, each end to end.

    The state of an optimizer stays what it was, {"step", "exp_avg", "exp_avg_sq"} by parameter; its tensors
    are views. Moments get memory at the first step, as PyTorch's do.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], dtype: torch.dtype, moves: bool) -> None:
        self.parameters = list(parameters)
        sizes = [-(-p.numel() // ROW) * ROW for p in parameters]
        self.starts = list(accumulate(sizes, initial=0))  # of each parameter, and the end
        first = self.parameters[0]
        self.w = torch.zeros(self.starts[-1], dtype=dtype, device=first.device)
        self.masters = self._views(self.w)
        for p, master in zip(self.parameters, self.masters, strict=True):
            master.copy_(p.detach())
        self.w16: torch.Tensor | None = None
        if moves:
            self.w16 = self.w.to(first.dtype)
            for p, view in zip(self.parameters, self._views(self.w16), strict=True):
                p.data = view
        self.moments: list[torch.Tensor] = []  # m, v
        self._moment_views: list[list[torch.Tensor]] = []
        self.steps = torch.zeros(len(self.parameters))  # on the CPU, where PyTorch counts too

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.starts, self.parameters, strict=False)
        return [flat[start : start + p.numel()].view(p.shape) for start, p in pairs]

    def adopt(self, optimizer: Optimizer, i: int) -> None:
        """Make the state of a parameter views, with the values that it has; zeros if it has none."""
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

    def leave(self, optimizer: Optimizer, i: int) -> None:
        """Count where a fused kernel does, on the device; the next `adopt` takes the count back."""
        state = optimizer.state.get(self.parameters[i])
        if state and state["step"].device != self.w.device:
            state["step"] = state["step"].to(self.w.device)
            state["exp_avg"] = state["exp_avg"].view_as(state["exp_avg"])

    def step(
        self,
        group: dict[str, Any],
        held: Sequence[int],
        coefficient: float | torch.Tensor,
        backend: str | None,
    ) -> None:
        """Step the parameters `held`, in order, which have gradients and adopted states."""
        self.steps[torch.tensor(held)] += 1
        counts = self.steps.tolist()
        c = _brought(torch.as_tensor(coefficient, dtype=self.w.dtype), self.w.device)
        run = _by_pieces if backend is None else _compiled(backend)
        numbers = {t: torch.tensor(_numbers(group, t), dtype=self.w.dtype) for t in {counts[i] for i in held}}
        brought = {t: _brought(n, self.w.device) for t, n in numbers.items()}
        for some in self._runs(held, counts):
            parts = slice(self.starts[some[0]], self.starts[some[-1] + 1])
            g, w = self._gradients(some), self.w[parts]
            w16 = torch.empty_like(w, dtype=self.parameters[0].dtype) if self.w16 is None else self.w16[parts]
            rows = [flat.view(-1, ROW) for flat in (w16, g, w, *(m[parts] for m in self.moments))]
            run(*rows, c, brought[counts[some[0]]], not group.get("decoupled_weight_decay", False))
            if self.w16 is None:
                torch._foreach_copy_([self.parameters[i] for i in some], self._parts(w16, some))

    def _runs(self, held: Sequence[int], counts: Sequence[float]) -> list[list[int]]:
        """Neighbours that have stepped equally often, not too many at a time."""
        runs: list[list[int]] = []
        for i in held:
            follows = bool(runs) and runs[-1][-1] == i - 1 and counts[i - 1] == counts[i]
            if follows and self.starts[i + 1] - self.starts[runs[-1][0]] <= TOGETHER:
                runs[-1].append(i)
            else:
                runs.append([i])
        return runs

    def _gradients(self, some: Sequence[int]) -> torch.Tensor:
        """(n,), of neighbours, as they lie in the flat tensors."""
        grads: list[torch.Tensor] = [self.parameters[i].grad for i in some]  # type: ignore[misc]
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError("Adam does not take sparse gradients; use nn.Embedding(sparse=False)")
        if len(grads) == 1 and grads[0].is_contiguous() and grads[0].numel() % ROW == 0:
            return grads[0].view(-1)
        dtype = reduce(torch.promote_types, (grad.dtype for grad in grads))
        size = self.starts[some[-1] + 1] - self.starts[some[0]]
        flat = torch.empty(size, dtype=dtype, device=self.w.device)
        ends = [self.starts[i] + self.parameters[i].numel() - self.starts[some[0]] for i in some]
        nexts = [self.starts[i + 1] - self.starts[some[0]] for i in some]
        if gaps := [flat[end:start] for end, start in zip(ends, nexts, strict=True) if end < start]:
            torch._foreach_zero_(gaps)
        torch._foreach_copy_(self._parts(flat, some), grads)
        return flat

    def _parts(self, flat: torch.Tensor, some: Sequence[int]) -> list[torch.Tensor]:
        """Of (n,) the view of each of `some` parameters."""
        first, found = self.starts[some[0]], []
        for i in some:
            p, start = self.parameters[i], self.starts[i] - first
            found.append(flat[start : start + p.numel()].view(p.shape))
        return found


def _brought(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On `device`. On its way to a GPU the host does not wait for it, so it leaves from pinned memory."""
    if device.type != "cuda" or numbers.device == device:
        return numbers.to(device)
    return (numbers.pin_memory() if numbers.device.type == "cpu" else numbers).to(device, non_blocking=True)
