"""Notebook 03: columns and rows, a cliff to read, tokens between them, SUMMA, how many ranks to cut over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hpnb
from hpnb import comm
from hpnb.lesson.exercises.checker import Exercise, Finding
from hpnb.lesson.exercises.rank_checks import EXACT, NotThat, calls_of, launched, normal, off_by, worst_of
from hpnb.lesson.exercises.vit_tensor_ranks import Job, choose
from hpnb.lesson.programs import vit_tensor
from hpnb.lesson.programs.step_timing import relative_distance as distance
from hpnb.lesson.tables import number
from hpnb.mesh import Axis
from hpnb.models import ViTSize
from hpnb.record import Message, Traffic
from hpnb.tensor_parallel import parallelize
from hpnb.theory import bytes_sent

_D = torch.float64


def _tensor(value: Any, shape: Sequence[int], axis: Axis) -> torch.Tensor:
    who = f"rank {axis.rank} of {axis.size} returned"
    if not isinstance(value, torch.Tensor):
        raise NotThat(f"{who} a {type(value).__name__}, and a tensor of shape {tuple(shape)} is wanted")
    if value.shape != torch.Size(shape):
        raise NotThat(f"{who} a tensor of shape {tuple(value.shape)}, and shape {tuple(shape)} is wanted")
    return value


@dataclass
class _Ran:
    """What one rank saw of a forward and a backward; distances to one process."""

    apart: dict[str, float]
    forward: list[Message]
    backward: list[Message]
    flops: float = 0.0


def _messages(counted: Traffic) -> list[Message]:
    return list(counted.messages)


def _backward(loss: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> None:
    if not loss.requires_grad:
        raise NotThat("what was returned does not depend on the weights, so it has no gradient")
    loss.backward()
    for leaf in leaves.values():
        leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


# --- columns, then rows -----------------------------------------------------------------------------

_ROWS, _WIDTH = 6, 12  # of x


def _run_mlp(mlp: Callable[..., Any]) -> _Ran:
    axis = vit_tensor.tensor_axis()
    shapes = {"x": (_ROWS, _WIDTH), "A": (_WIDTH, 4 * _WIDTH), "a": (4 * _WIDTH,), "B": (4 * _WIDTH, _WIDTH)}
    shapes["b"] = (_WIDTH,)
    whole, mine = ({n: normal(*s, seed=i).requires_grad_() for i, (n, s) in enumerate(shapes.items())}
                   for _ in range(2))  # fmt: skip
    weigh = normal(_ROWS, _WIDTH, seed=9)
    z = F.gelu(whole["x"] @ whole["A"] + whole["a"]) @ whole["B"] + whole["b"]
    (z * weigh).sum().backward()
    with hpnb.record.traffic() as there, FlopCounterMode(display=False) as counter:
        found = _tensor(mlp(*mine.values(), axis), (_ROWS, _WIDTH), axis)
    with hpnb.record.traffic() as back:
        _backward((found * weigh).sum(), mine)
    apart = {"the output": distance([found], [z])}
    for name, leaf in mine.items():
        grad = leaf.grad
        assert grad is not None
        if name in ("A", "a", "B"):  # each rank has its own part, and zeros elsewhere
            grad = comm.all_reduce(grad, axis)
        said = f"the gradient of {name}" + (", parts put together" if name in ("A", "a", "B") else "")
        other = whole[name].grad
        assert other is not None
        apart[said] = distance([grad], [other])
    products = 2 * _ROWS * _WIDTH * 4 * _WIDTH * 2
    return _Ran(apart, _messages(there), _messages(back), counter.get_total_flops() / products)


def _verify_mlp(mlp: Callable[..., Any]) -> Sequence[Finding]:
    findings = []
    for ranks in (2, 3):
        ran = launched(_run_mlp, mlp, ranks=ranks)
        if isinstance(ran, Finding):
            findings.append(Finding(False, f"{ranks} ranks: {ran.text}"))
            continue
        for what in ran[0].apart:
            apart = worst_of([one.apart[what] for one in ran])
            findings.append(Finding(apart < EXACT, f"{ranks} ranks: {what}: {off_by(apart)}"))
        wanted = bytes_sent("all_reduce", 8 * _ROWS * _WIDTH, ranks)
        for way, messages in (("forward", ran[0].forward), ("backward", ran[0].backward)):
            sent = sum(message.bytes for message in messages)
            said = f"{calls_of(messages)}, {number(sent, 'B')} a rank"
            said += f"; target 1 all_reduce, {number(wanted, 'B')}"
            right = [message.op for message in messages] == ["all_reduce"] and sent == wanted
            findings.append(Finding(right, f"{ranks} ranks, {way}: {said}"))
        share = max(one.flops for one in ran)
        said = f"a rank does {share:.2f} of one process's FLOPs, target {1 / ranks:.2f}"
        findings.append(Finding(share < 1 / ranks + 1e-9, f"{ranks} ranks: {said}"))
    return findings


column_row = Exercise("03.1", "columns, then rows", 20, _verify_mlp)


# --- tokens between the matrices --------------------------------------------------------------------

_TOKENS = 12


class _Norm:
    """A layer norm without weights, which notes how many tokens it was given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.tokens.append(x.size(0))
        return F.layer_norm(x, x.shape[-1:])


def _run_block(block: Callable[..., Any]) -> tuple[_Ran, int]:
    axis = vit_tensor.tensor_axis()
    share = _TOKENS // axis.size
    own = slice(axis.rank * share, (axis.rank + 1) * share)
    norm, weigh = _Norm(), normal(_TOKENS, _WIDTH, seed=9)
    shapes = {"g": (_WIDTH,), "A": (_WIDTH, 4 * _WIDTH), "B": (4 * _WIDTH, _WIDTH)}
    whole, mine = ({n: normal(*s, seed=i).requires_grad_() for i, (n, s) in enumerate(shapes.items())}
                   for _ in range(2))  # fmt: skip
    x = normal(_TOKENS, _WIDTH, seed=5).requires_grad_()
    x_own = x.detach()[own].clone().requires_grad_()
    z = x + F.gelu((F.layer_norm(x, (_WIDTH,)) * whole["g"]) @ whole["A"]) @ whole["B"]
    (z * weigh).sum().backward()
    with hpnb.record.traffic() as there:
        found = block(x_own, mine["g"], norm, mine["A"], mine["B"], axis)
        found = _tensor(found, (share, _WIDTH), axis)
    with hpnb.record.traffic() as back:
        _backward((found * weigh[own]).sum(), {"x": x_own, **mine})
    grads = {name: leaf.grad for name, leaf in mine.items()}
    apart = {"this rank's tokens of the output": distance([found], [z[own]])}
    assert x.grad is not None
    assert x_own.grad is not None
    apart["the gradient of x"] = distance([x_own.grad], [x.grad[own]])
    for name, other in whole.items():
        grad = grads[name]
        assert grad is not None
        assert other.grad is not None
        said = f"the gradient of {name}"
        if name != "g":
            grad, said = comm.all_reduce(grad, axis), f"{said}, parts put together"
        apart[said] = distance([grad], [other.grad])
    return _Ran(apart, _messages(there), _messages(back)), max(norm.tokens, default=0)


def _verify_block(block: Callable[..., Any]) -> Sequence[Finding]:
    findings = []
    for ranks in (2, 3):
        ran = launched(_run_block, block, ranks=ranks)
        if isinstance(ran, Finding):
            findings.append(Finding(False, f"{ranks} ranks: {ran.text}"))
            continue
        for what in ran[0][0].apart:
            apart = worst_of([one.apart[what] for one, _ in ran])
            findings.append(Finding(apart < EXACT, f"{ranks} ranks: {what}: {off_by(apart)}"))
        one, once = ran[0][0], bytes_sent("all_reduce", 8 * _TOKENS * _WIDTH, ranks)
        vector = bytes_sent("all_reduce", 8 * _WIDTH, ranks)
        for way, messages, most in (
            ("forward", one.forward, once),
            ("backward", one.backward, once + vector),
        ):
            sent = sum(message.bytes for message in messages)
            said = f"{calls_of(messages)}, {number(sent, 'B')} a rank, at most {number(most, 'B')}"
            findings.append(Finding(sent <= most + 1e-6, f"{ranks} ranks, {way}: {said}"))
        tokens, target = max(tokens for _, tokens in ran), _TOKENS // ranks
        said = f"the norm saw {tokens} tokens on a rank, target {target} of {_TOKENS}"
        findings.append(Finding(tokens == target, f"{ranks} ranks: {said}"))
    return findings


sequence = Exercise("03.3", "norms on a share of the tokens", 20, _verify_block)


# --- one step of SUMMA ------------------------------------------------------------------------------

_GRID = (6, 4, 10)  # (6, 4) times (4, 10), in 2 x 2 blocks


def _run_panel(panel: Callable[..., Any]) -> tuple[list[float], list[list[Message]]]:
    """On a rank: after each step the distance to the sum so far, and what it sent."""
    axis = vit_tensor.tensor_axis()
    down, across = axis.split(2, 2)
    m, k, n = (size // 2 for size in _GRID)
    i, j = down.rank, across.rank
    whole_a, whole_b = normal(2 * m, 2 * k, seed=1), normal(2 * k, 2 * n, seed=2)
    a = whole_a[i * m : (i + 1) * m, j * k : (j + 1) * k].contiguous()
    b = whole_b[i * k : (i + 1) * k, j * n : (j + 1) * n].contiguous()
    c, apart, sent = torch.zeros(m, n, dtype=_D), [], []
    for t in range(2):
        with hpnb.record.traffic() as traffic:
            c = _tensor(panel(c, a.clone(), b.clone(), t, across, down), (m, n), axis)
        so_far = whole_a[i * m : (i + 1) * m, : (t + 1) * k] @ whole_b[: (t + 1) * k, j * n : (j + 1) * n]
        apart.append(distance([c], [so_far]))
        sent.append(_messages(traffic))
    return apart, sent


def _verify_panel(panel: Callable[..., Any]) -> Sequence[Finding]:
    ran = launched(_run_panel, panel, ranks=4)
    if isinstance(ran, Finding):
        return [ran]
    findings = []
    m, k, n = (size // 2 for size in _GRID)
    wanted = {"across": bytes_sent("broadcast", 8 * m * k, 2), "down": bytes_sent("broadcast", 8 * k * n, 2)}
    for t in range(2):
        apart = worst_of([each[t] for each, _ in ran])
        findings.append(
            Finding(apart < EXACT, f"after step {t}: the sum of {t + 1} of 2 panels: {off_by(apart)}")
        )
        for way, name in (("across", "tp.1"), ("down", "tp.0")):
            along = [[message for message in sent[t] if message.axis == name] for _, sent in ran]
            most = max(sum(message.bytes for message in each) for each in along)
            said = f"{calls_of(along[0])}, {number(most, 'B')} a rank, target {number(wanted[way], 'B')}"
            findings.append(Finding(most == wanted[way], f"step {t}, {way}: {said}"))
    return findings


summa = Exercise("03.4", "one step of SUMMA", 15, _verify_panel)


# --- a cliff to read --------------------------------------------------------------------------------

FORWARD, BACKWARD, OWN = "forward", "backward", "own"
_ROUNDING = 1e-9  # of a gradient's relative error; what is above is wrong
_SIZE = ViTSize(hidden=16, layers=3, heads=4, mlp=32, patch=8, image=16)


class Mlp(nn.Module):
    """An MLP by hand on the parts that a rank holds, with something wrong: "bias", "share" or "sum"."""

    def __init__(self, old: Any, axis: Axis, wrong: str) -> None:
        super().__init__()
        self.fc1, self.fc2, self.axis, self.wrong = old.fc1, old.fc2, axis, wrong

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


class SelfAttention(nn.Module):
    """An attention by hand, on the heads that a rank holds, whose backward lacks its sum."""

    def __init__(self, old: Any, axis: Axis, heads: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = old.q_proj, old.k_proj, old.v_proj, old.o_proj
        self.axis, self.heads = axis, heads

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        q, k, v = (
            F.linear(x, each.weight, each.bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return comm.all_reduce(F.linear(y, self.o_proj.weight), self.axis) + self.o_proj.bias, None


_FAULTS = (  # what is wrong, in which layer
    ("sum", 1),
    ("share", 2),
    ("attention", 1),
    ("bias", 0),
)


def records() -> list[tuple[dict[str, float], tuple[str, str | None], float]]:
    """On ranks, of each fault: {module: error} from the loss down, what is wrong where, error of the loss."""
    axis, found = vit_tensor.tensor_axis(), []
    g = torch.Generator().manual_seed(3)
    batch = {
        "pixel_values": torch.randn(4, 3, 16, 16, dtype=_D, generator=g),
        "labels": torch.arange(4) % 3,
    }
    loss, right = vit_tensor.serial_gradients(_SIZE, batch)
    for fault, layer in _FAULTS:
        model: Any = parallelize(vit_tensor.float64_vit(_SIZE), axis)
        block, path = model.vit.layers[layer], f"vit.layers.{layer}"
        if fault == "attention":
            block.attention = SelfAttention(block.attention, axis, _SIZE.heads // axis.size)
            truth: tuple[str, str | None] = (BACKWARD, f"{path}.attention")
        else:
            block.mlp = Mlp(block.mlp, axis, fault)
            truth = {
                "sum": (BACKWARD, f"{path}.mlp"),
                "share": (OWN, f"{path}.mlp.fc2"),
                "bias": (FORWARD, None),
            }[fault]
        value = model(**batch).loss
        value.backward()
        off = abs(float(value.detach()) - loss) / loss
        found.append((vit_tensor.gradient_errors(model, right), truth, off))
    return found


def _verify_diagnose(diagnose: Callable[[dict[str, float]], Any]) -> Sequence[Finding]:
    findings = []
    for count, (errors, truth, off) in enumerate(
        hpnb.launch(records, ranks=2, device="cpu", timeout=60.0)[0], 1
    ):
        answer = diagnose(dict(errors))
        answer = tuple(answer) if isinstance(answer, list) else answer
        said = f"record {count}, loss off by {off:.0e}: {_in_words(errors)}; you say {answer!r}"
        findings.append(Finding(answer == truth, said))
    return findings


def _in_words(errors: Mapping[str, float]) -> str:
    """Where a record turns wrong, from the loss down; what that means is for the reader to say."""
    modules = list(errors)
    wrong = [module for module in modules if errors[module] > _ROUNDING]
    first = modules.index(wrong[0])
    before = f"right down to {modules[first - 1]}" if first else "none is right before it"
    return f"first wrong is {wrong[0]}, {before}, {len(wrong)} of {len(modules)} wrong"


cliff = Exercise("03.2", "read a cliff", 15, _verify_diagnose)

__all__ = ["Job", "choose", "cliff", "column_row", "records", "sequence", "summa"]
