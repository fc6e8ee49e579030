"""Notebook 03: columns and rows, a cliff to read, tokens between the matrices, SUMMA, how many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hpnb
from hpnb import comm
from hpnb.lesson.exercises.checker import Finding, WrongAnswer, exercise
from hpnb.lesson.exercises.findings import (
    ComparedRun,
    bytes_of,
    calls_of,
    divisors,
    exact,
    exact_runs,
    expect_tensor,
    keeps_to_cap,
    most_sent,
    nearly_shortest,
    normal,
    run_on_ranks,
)
from hpnb.lesson.programs import vit_tensor
from hpnb.lesson.programs.step_timing import relative_distance
from hpnb.lesson.tables import number
from hpnb.mesh import Axis
from hpnb.models import ViTSize
from hpnb.record import Message
from hpnb.tensor_parallel import parallelize
from hpnb.theory import LINKS, Link, bytes_sent, exposed_seconds, seconds

_D = torch.float64


def _expect_tensor(value: Any, shape: Sequence[int], axis: Axis) -> torch.Tensor:
    return expect_tensor(value, shape, f"rank {axis.rank} of {axis.size} returned")


def _backward(loss: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> None:
    if not loss.requires_grad:
        raise WrongAnswer("what was returned does not depend on the weights, so it has no gradient")
    loss.backward()
    for leaf in leaves.values():
        leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _drawn(shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    return {n: normal(*shape, seed=i).requires_grad_() for i, (n, shape) in enumerate(shapes.items())}


def _gradient_distances(
    local: Mapping[str, torch.Tensor], serial: Mapping[str, torch.Tensor], sharded: Sequence[str], axis: Axis
) -> dict[str, float]:
    """Of each weight's gradient; a rank has its part of a sharded weight's, and zeros elsewhere."""
    distances = {}
    for name, leaf in local.items():
        grad, right = leaf.grad, serial[name].grad
        assert grad is not None
        assert right is not None
        text = f"the gradient of {name}"
        if name in sharded:
            grad, text = comm.all_reduce(grad, axis), f"{text}, parts put together"
        distances[text] = relative_distance([grad], [right])
    return distances


# --- columns, then rows -----------------------------------------------------------------------------

_ROWS, _WIDTH = 6, 12  # of x


def _run_mlp(mlp: Callable[..., Any]) -> ComparedRun:
    axis = vit_tensor.tensor_axis()
    shapes = {"x": (_ROWS, _WIDTH), "A": (_WIDTH, 4 * _WIDTH), "a": (4 * _WIDTH,), "B": (4 * _WIDTH, _WIDTH)}
    serial, local = (_drawn({**shapes, "b": (_WIDTH,)}) for _ in range(2))
    weigh = normal(_ROWS, _WIDTH, seed=9)
    z = F.gelu(serial["x"] @ serial["A"] + serial["a"]) @ serial["B"] + serial["b"]
    (z * weigh).sum().backward()
    with hpnb.record.traffic() as forward, FlopCounterMode(display=False) as counter:
        output = _expect_tensor(mlp(*local.values(), axis), (_ROWS, _WIDTH), axis)
    with hpnb.record.traffic() as backward:
        _backward((output * weigh).sum(), local)
    distances = {"the output": relative_distance([output], [z])}
    distances |= _gradient_distances(local, serial, ("A", "a", "B"), axis)
    flops = counter.get_total_flops() / (2 * _ROWS * _WIDTH * 4 * _WIDTH * 2)
    return ComparedRun(distances, list(forward.messages), list(backward.messages), flops)


@exercise("03.1", "an MLP with biases", 20)
def column_row(mlp: Callable[..., Any]) -> Iterator[Finding]:
    for ranks in (2, 3):
        runs = run_on_ranks(_run_mlp, mlp, ranks=ranks, case=f"{ranks} ranks")
        yield from exact_runs(runs, f"{ranks} ranks")
        wanted = bytes_sent("all_reduce", 8 * _ROWS * _WIDTH, ranks)
        for way in ("forward", "backward"):
            messages = most_sent(runs, way)
            sent = bytes_of(messages)
            text = f"{ranks} ranks, {way}: {calls_of(messages)}, {number(sent, 'B')} a rank"
            right = [message.op for message in messages] == ["all_reduce"] and sent == wanted
            yield Finding(right, f"{text}; target 1 all_reduce, {number(wanted, 'B')}")
        share = max(run.measured for run in runs)
        text = f"a rank does {share:.2f} of one process's FLOPs, target {1 / ranks:.2f}"
        yield Finding(share < 1 / ranks + 1e-9, f"{ranks} ranks: {text}")


# --- tokens between the matrices --------------------------------------------------------------------

_TOKENS = 12


class CountingNorm:
    """A layer norm without weights, which notes how many tokens it was given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.tokens.append(x.size(0))
        return F.layer_norm(x, x.shape[-1:])


def _run_block(block: Callable[..., Any]) -> ComparedRun:
    axis = vit_tensor.tensor_axis()
    share = _TOKENS // axis.size
    rows = slice(axis.rank * share, (axis.rank + 1) * share)
    norm, weigh = CountingNorm(), normal(_TOKENS, _WIDTH, seed=9)
    shapes = {"gain": (_WIDTH,), "A": (_WIDTH, 4 * _WIDTH), "B": (4 * _WIDTH, _WIDTH)}
    serial, local = (_drawn(shapes) for _ in range(2))
    x = normal(_TOKENS, _WIDTH, seed=5).requires_grad_()
    local_x = x.detach()[rows].clone().requires_grad_()
    z = x + F.gelu((F.layer_norm(x, (_WIDTH,)) * serial["gain"]) @ serial["A"]) @ serial["B"]
    (z * weigh).sum().backward()
    with hpnb.record.traffic() as forward:
        output = block(local_x, local["gain"], norm, local["A"], local["B"], axis)
        output = _expect_tensor(output, (share, _WIDTH), axis)
    with hpnb.record.traffic() as backward:
        _backward((output * weigh[rows]).sum(), {"x": local_x, **local})
    assert x.grad is not None
    assert local_x.grad is not None
    distances = {
        "this rank's tokens of the output": relative_distance([output], [z[rows]]),
        "the gradient of x": relative_distance([local_x.grad], [x.grad[rows]]),
        **_gradient_distances(local, serial, ("A", "B"), axis),
    }
    tokens = max(norm.tokens, default=0)
    return ComparedRun(distances, list(forward.messages), list(backward.messages), tokens)


@exercise("03.3", "norms on a part of the tokens", 20)
def sequence_parallel(block: Callable[..., Any]) -> Iterator[Finding]:
    for ranks in (2, 3):
        runs = run_on_ranks(_run_block, block, ranks=ranks, case=f"{ranks} ranks")
        yield from exact_runs(runs, f"{ranks} ranks")
        once = bytes_sent("all_reduce", 8 * _TOKENS * _WIDTH, ranks)
        vector = bytes_sent("all_reduce", 8 * _WIDTH, ranks)
        for way, most in (("forward", once), ("backward", once + vector)):
            messages = most_sent(runs, way)
            sent = bytes_of(messages)
            text = f"{calls_of(messages)}, {number(sent, 'B')} a rank, at most {number(most, 'B')}"
            yield Finding(sent <= most + 1e-6, f"{ranks} ranks, {way}: {text}")
        tokens, target = max(run.measured for run in runs), _TOKENS // ranks
        text = f"the norm saw {tokens:g} tokens on a rank, target {target} of {_TOKENS}"
        yield Finding(tokens == target, f"{ranks} ranks: {text}")


# --- one step of SUMMA ------------------------------------------------------------------------------

_GRID = (6, 4, 10)  # (6, 4) times (4, 10), in 2 x 2 blocks


def _run_panel(panel: Callable[..., Any]) -> tuple[list[float], list[list[Message]]]:
    """On a rank: after each step the distance to the sum so far, and what it sent."""
    axis = vit_tensor.tensor_axis()
    down, across = axis.split(2, 2)
    m, k, n = (size // 2 for size in _GRID)
    full_a, full_b = normal(2 * m, 2 * k, seed=1), normal(2 * k, 2 * n, seed=2)
    rows = slice(down.rank * m, (down.rank + 1) * m)
    columns = slice(across.rank * n, (across.rank + 1) * n)
    a = full_a[rows, across.rank * k : (across.rank + 1) * k].contiguous()
    b = full_b[down.rank * k : (down.rank + 1) * k, columns].contiguous()
    c, distances, sent = torch.zeros(m, n, dtype=_D), [], []
    for t in range(2):
        with hpnb.record.traffic() as traffic:
            c = _expect_tensor(panel(c, a.clone(), b.clone(), t, across, down), (m, n), axis)
        so_far = full_a[rows, : (t + 1) * k] @ full_b[: (t + 1) * k, columns]
        distances.append(relative_distance([c], [so_far]))
        sent.append(list(traffic.messages))
    return distances, sent


@exercise("03.4", "one step of SUMMA", 15)
def summa(panel: Callable[..., Any]) -> Iterator[Finding]:
    runs = run_on_ranks(_run_panel, panel, ranks=4)
    m, k, n = (size // 2 for size in _GRID)
    ways = (("across", "tp.1", 8 * m * k), ("down", "tp.0", 8 * k * n))
    for t in range(2):
        yield exact((d[t] for d, _ in runs), f"after step {t}: the sum of {t + 1} of 2 panels:")
        for way, axis, nbytes in ways:
            wanted = bytes_sent("broadcast", nbytes, 2)
            along = [[message for message in sent[t] if message.axis == axis] for _, sent in runs]
            most = max(map(bytes_of, along))
            text = f"{calls_of(along[0])}, {number(most, 'B')} a rank, target {number(wanted, 'B')}"
            yield Finding(most == wanted, f"step {t}, {way}: {text}")


# --- a cliff to read --------------------------------------------------------------------------------

FORWARD, BACKWARD, OWN = "forward", "backward", "own"
_ROUNDING = 1e-9  # of a gradient's relative error; what is above is wrong
_SIZE = ViTSize(hidden=16, layers=3, heads=4, mlp=32, patch=8, image=16)


class FaultyMlp(nn.Module):
    """A tensor-parallel MLP by hand with something wrong: "bias", "share" or "sum"."""

    def __init__(self, mlp: Any, axis: Axis, wrong: str) -> None:
        super().__init__()
        self.fc1, self.fc2, self.axis, self.wrong = mlp.fc1, mlp.fc2, axis, wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wrong != "sum":
            x = comm.replicate(x, self.axis)
        y = F.linear(F.gelu(F.linear(x, self.fc1.weight, self.fc1.bias)), self.fc2.weight)
        if self.wrong == "bias":  # added by every rank
            return comm.all_reduce(y + self.fc2.bias, self.axis)
        if self.wrong == "share":  # mends the output, and not the gradient
            return comm.all_reduce(y + self.fc2.bias / self.axis.size, self.axis)
        z: torch.Tensor = comm.all_reduce(y, self.axis) + self.fc2.bias
        return z


class FaultyAttention(nn.Module):
    """A tensor-parallel attention by hand, whose backward lacks its sum."""

    def __init__(self, attention: Any, axis: Axis, heads: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj, self.axis, self.heads = attention.o_proj, axis, heads

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        q, k, v = (
            F.linear(x, projection.weight, projection.bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return comm.all_reduce(F.linear(y, self.o_proj.weight), self.axis) + self.o_proj.bias, None


_FAULTS = (("sum", 1), ("share", 2), ("attention", 1), ("bias", 0))  # what is wrong, in which layer


def records() -> list[tuple[dict[str, float], tuple[str, str | None], float]]:
    """On ranks, of each fault: {module: error} from the loss down, what is wrong where, error of the loss."""
    axis, cliffs = vit_tensor.tensor_axis(), []
    pixels = torch.randn(4, 3, 16, 16, dtype=_D, generator=torch.Generator().manual_seed(3))
    batch = {"pixel_values": pixels, "labels": torch.arange(4) % 3}
    loss, right = vit_tensor.serial_gradients(_SIZE, batch)
    for fault, layer in _FAULTS:
        model: Any = parallelize(vit_tensor.float64_vit(_SIZE), axis)
        block, path = model.vit.layers[layer], f"vit.layers.{layer}"
        truth: tuple[str, str | None] = {
            "sum": (BACKWARD, f"{path}.mlp"),
            "share": (OWN, f"{path}.mlp.fc2"),
            "attention": (BACKWARD, f"{path}.attention"),
            "bias": (FORWARD, None),
        }[fault]
        if fault == "attention":
            block.attention = FaultyAttention(block.attention, axis, _SIZE.heads // axis.size)
        else:
            block.mlp = FaultyMlp(block.mlp, axis, fault)
        value = model(**batch).loss
        value.backward()
        off = abs(float(value.detach()) - loss) / loss
        cliffs.append((vit_tensor.gradient_errors(model, right), truth, off))
    return cliffs


@exercise("03.2", "read a cliff", 15)
def gradient_cliff(diagnose: Callable[[dict[str, float]], Any]) -> Iterator[Finding]:
    cliffs = hpnb.launch(records, ranks=2, device="cpu", timeout=60.0)[0]
    for count, (errors, truth, off) in enumerate(cliffs, 1):
        answer = diagnose(dict(errors))
        answer = tuple(answer) if isinstance(answer, list) else answer
        text = f"record {count}, loss off by {off:.0e}: {_describe_cliff(errors)}; you say {answer!r}"
        yield Finding(answer == truth, text)


def _describe_cliff(errors: Mapping[str, float]) -> str:
    """Where a record turns wrong, from the loss down; what that means is for the reader to say."""
    modules = list(errors)
    wrong = [module for module in modules if errors[module] > _ROUNDING]
    first = modules.index(wrong[0])
    before = f"right down to {modules[first - 1]}" if first else "none is right before it"
    return f"first wrong is {wrong[0]}, {before}, {len(wrong)} of {len(modules)} wrong"


# --- how many ranks ---------------------------------------------------------------------------------

_BUCKETS = 24


@dataclass(frozen=True)
class TensorTask:
    """A transformer that is to be trained on `devices`, t by t of them sharing each matrix.

    Attributes:
        devices: t times the replicas d.
        layers, hidden: 12 layers hidden^2 parameters.
        tokens: of a whole batch; each replica gets its d-th.
        rate: matmul FLOP/s of a device.
        link: between any two of them.
        cap: bytes that a device may hold of states, 16 a parameter.
    """

    devices: int
    layers: int
    hidden: int
    tokens: float
    rate: float
    link: Link
    cap: float

    @property
    def parameters(self) -> float:
        return 12.0 * self.layers * self.hidden**2

    def state_bytes(self, t: int) -> float:
        """On a device."""
        return 16 * self.parameters / t

    def step_seconds(self, t: int) -> float:
        """Compute, four exposed all-reduces a layer, and what 24 gradient buckets leave exposed."""
        d = self.devices // t
        compute = 6 * self.parameters * self.tokens / self.devices / self.rate
        activation = 2 * self.tokens / d * self.hidden
        tp = 4 * self.layers * seconds("all_reduce", activation, t, self.link) if t > 1 else 0.0
        gradient, backward = 2 * self.parameters / t, 2 / 3 * (compute + tp)
        dp = exposed_seconds(backward, gradient, _BUCKETS, d, self.link) if d > 1 else 0.0
        return compute + tp + dp


TASKS = {
    "fits, and many tokens": TensorTask(64, 24, 2048, 2e6, 400e12, LINKS["NVLink 4"], 80e9),
    "does not fit": TensorTask(64, 40, 5120, 2e6, 400e12, LINKS["NVLink 4"], 80e9),
    "few tokens, a slow link": TensorTask(64, 24, 8192, 8192, 400e12, LINKS["InfiniBand NDR"], 400e9),
    "fits, a slow link": TensorTask(64, 24, 2048, 65536, 400e12, LINKS["Ethernet 100 Gb"], 80e9),
    "does not fit, a slow link": TensorTask(32, 32, 4096, 32768, 400e12, LINKS["Ethernet 100 Gb"], 60e9),
}


@exercise("03.5", "the number of ranks that share a matrix", 20)
def choose_ranks(choose: Callable[[TensorTask], Any]) -> Iterator[Finding]:
    for name, task in TASKS.items():
        t, sizes = choose(task), divisors(task.devices)
        if isinstance(t, bool) or t not in sizes:  # 4.0 and NumPy's 4 are equal to 4
            wanted = f"an int that divides {task.devices} devices: {', '.join(map(str, sizes))}"
            raise WrongAnswer(f"{name}: t is {t!r}, and it must be {wanted}")
        t = int(t)
        memory = keeps_to_cap(f"{name}: t={t}: a device", task.state_bytes(t), task.cap)
        yield memory
        if not memory.ok:
            continue  # it is compared with those that fit
        fitting = [n for n in sizes if task.state_bytes(n) <= task.cap]
        yield nearly_shortest(f"{name}: t={t}", task.step_seconds(t), map(task.step_seconds, fitting))
