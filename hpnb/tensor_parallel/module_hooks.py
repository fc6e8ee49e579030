"""Forward hooks that change a module's input or its output, or do something around its forward.

A copy of a model must not use the original's regions and sums. `copy.deepcopy` follows a partial and a bound
method, but shares a function, also what it has captured. So a hook that keeps a module, or an object with
modules in it, is a partial or a bound method. A hook may be a function if a copy does as well with what the
original has: the mode, whose axes and batch shape both use, or words of a message.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from hpnb.models import Role
from hpnb.models.model_anatomy import Part
from hpnb.tensor_parallel.mode import ModelToShard

Change = Callable[[torch.Tensor], torch.Tensor]


def change_input(module: nn.Module, change: Change, prepend: bool = False) -> None:
    """Apply `change` to the first tensor that the module's forward takes, by position or by name."""
    hook = partial(_change_first_tensor, change)
    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)


def change_output(module: nn.Module, change: Change) -> None:
    module.register_forward_hook(partial(_change_output, change))


def before_forward(module: nn.Module, call: Callable[[], None]) -> None:
    module.register_forward_pre_hook(partial(_call, call))


def after_forward(module: nn.Module, call: Callable[[], None]) -> None:
    """Not called if the forward raised."""
    module.register_forward_hook(partial(_call, call))


def around_forward(module: nn.Module, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """`begin` runs before every pre-hook registered until now; `end` after the forward, also if it raised."""
    module.register_forward_pre_hook(partial(_call, begin), prepend=True)
    module.register_forward_hook(partial(_call, end), always_call=True)


def tensors_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among a forward's arguments: the hidden states come first, in whatever order a caller
    writes the names."""
    values = (*args, *(kwargs[name] for name in _in_order(module, kwargs)))
    return (value for value in values if isinstance(value, torch.Tensor))


def _in_order(module: nn.Module, kwargs: dict[str, Any]) -> list[str]:
    """The names in the order of the forward's parameters; last what it takes as **kwargs."""
    names = _parameters(type(module).forward)
    return sorted(kwargs, key=lambda name: names.index(name) if name in names else len(names))


@lru_cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Of a class, because a module's forward may have been replaced by a partial of itself."""
    return tuple(inspect.signature(forward).parameters)


def _change_first_tensor(
    change: Change, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return (*args[:i], change(value), *args[i + 1 :]), kwargs
    for name in _in_order(module, kwargs):
        if isinstance(kwargs[name], torch.Tensor):
            return args, {**kwargs, name: change(kwargs[name])}
    raise TypeError(f"a {type(module).__name__} of a sharded model gets no tensor; pass it the hidden states")


def _change_output(change: Change, _: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return change(output)


def _call(call: Callable[[], None], *_: Any) -> None:
    call()


def explain_first_failure(
    block: Part, ranks: int, model: ModelToShard, sequence_parallel: bool, *, is_grid: bool
) -> None:
    """If the first forward of `block` fails, say what it may use that a rank has a part of: the heads of all
    ranks, other units than its roles name, all tokens with sequence parallelism, the width and the samples
    on a grid."""
    roles = {
        name.removeprefix(block.name + "."): (role, model.shapes[name])
        for name, role in model.roles.items()
        if name.startswith(block.name + ".") and not role.bias
    }
    has_heads = any(r.cut_dim is not None and r.units < shape[r.cut_dim] for r, shape in roles.values())
    # In 1d a role without heads may be the mistake.
    of_heads = _HEADS if (has_heads or not is_grid) and not model.attentions else ""
    why = _TOKENS if sequence_parallel else (_SAMPLES + _WIDTH) * is_grid + _COLUMNS + of_heads
    described = "; ".join(_describe(name, role, shape) for name, (role, shape) in roles.items())

    def explain(module: nn.Module, args: Any, output: Any) -> None:
        error = sys.exception()
        if output is not None:
            hook.remove()
        elif type(error) is RuntimeError:
            where = f"this is {block.name} on one of {ranks} tensor-parallel ranks"
            error.args = (f"{error}; {where}. {why.format(ranks)}. Its roles are {described}",)

    hook = block.module.register_forward_hook(explain, always_call=True)


def _describe(name: str, role: Role, shape: Sequence[int]) -> str:
    """The role of a weight: q.weight column, 4 units of 16; or norm.weight norm."""
    if role.cut_dim is None:
        return f"{name} {role.kind}"
    return f"{name} {role.kind}, {role.units} units of {shape[role.cut_dim] // role.units}"


_SAMPLES = (
    "A grid splits the samples too, and with them what a block (in 2d and 2.5d) or a named attention gets as "
    "an argument that has the samples first; anything else with an entry per sample still has all of them. "
)
_WIDTH = (
    "A grid splits hidden states along their width, between columns and rows too. A matrix along tokens, as "
    "an MLP-Mixer has after a transpose, needs the full width: use mode='1d' for such a model. "
)
_COLUMNS = (
    "A rank has some units of each column, whose outputs only a row takes; what else takes them needs all"
)
_HEADS = (
    ". Units are heads for q and o, and key-value heads for k and v; the heads that read one key-value head "
    "stay with it. An attention has only some heads then: fold them by their width, .view(..., -1, "
    "head_size), or name the modules that count heads, hpnb.models.register(.., attentions=..)"
)
_TOKENS = (
    "With sequence parallelism a block gets 1 / {} of the tokens, and only its column matrices get all. What "
    "slices hidden states by tokens, or multiplies along them, needs all too: leave sequence parallelism out "
    "for such a model. A block that only reads B and t from its x takes them from what a column gives: "
    "B, t = q.shape[:2]"
)
