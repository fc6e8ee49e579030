"""What a model must be like for 2D, 2.5D and 3D: widths and heads divide by the sides of the grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from hpnb.models import Role
from hpnb.tensor_parallel.mode import SplitModel

if TYPE_CHECKING:
    from hpnb.tensor_parallel.tp_grid import GridMode


def check(mode: GridMode, subject: SplitModel) -> None:
    """Raises ValueError, with the numbers and what comes nearest, if `subject` cannot be cut so."""
    width, inner = mode.hidden.width.size, mode.inner.width.size
    for attention in subject.attentions:
        _divides(mode, attention.path, attention.heads, "heads", inner)
    for path, (place, roles) in subject.layers.items():
        role, module = roles.get("weight"), subject.model.get_submodule(path)
        for attribute, one in roles.items():  # vectors too, such as a class token
            if one.kind in ("embedding", "norm"):
                shape = subject.shapes[f"{path}.{attribute}"]
                _divides(mode, f"{path}.{attribute}", shape[one.out_dim], "values along the width", width)
        if role is None:
            continue
        shape = subject.shapes[f"{path}.weight"]
        if role.kind in ("column", "row"):
            if role.in_dim is None:
                raise ValueError(
                    f"{path} has no dim of inputs, which a {mode.describe()} cuts; use mode='1d'"
                )
            into, out = shape[role.in_dim], shape[role.out_dim] // role.fused
            column = role.kind == "column"
            _divides(mode, path, role.units, "pieces that must stay whole", inner)
            _divides(mode, path, into, "inputs", (width if column else inner))
            _divides(mode, path, out, "outputs", (inner if column else width))
            for what, size, side in mode.further(role, shape):
                _divides(mode, path, size, what, side)
        elif role.kind == "norm" and not (isinstance(module, nn.LayerNorm) and place != "block"):
            _check_norm(mode, path, module, subject)
        if role.vocabulary is not None and place == "head" and "bias" in roles:
            _check_word_bias(path, roles["bias"])
    for path, module in subject.model.named_modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) and path not in subject.layers:
            raise ValueError(
                f"{path} has no weight to cut, and would norm the part of the width that a rank of a "
                f"{mode.describe()} has; use mode='1d'"
            )


def _check_word_bias(path: str, bias: Role) -> None:
    if bias.vocabulary is None:
        raise ValueError(f"{path}.bias has a value a word, and its role must say so: vocabulary=0")


def _check_norm(mode: GridMode, path: str, module: nn.Module, subject: SplitModel) -> None:
    if not isinstance(module, nn.LayerNorm):
        raise ValueError(
            f"{path} is a {type(module).__name__}, and a {mode.describe()}, which cuts the width, knows only "
            "nn.LayerNorm; use mode='1d'"
        )
    inputs = {
        subject.shapes[f"{other}.weight"][role.in_dim]
        for other, (_, roles) in subject.layers.items()
        if (role := roles.get("weight")) is not None and role.kind == "column" and role.in_dim is not None
    }
    if inputs and tuple(module.normalized_shape) not in {(h,) for h in inputs}:
        raise ValueError(
            f"{path} norms {tuple(module.normalized_shape)}, not the {max(inputs)} values of a token, "
            f"which is what a {mode.describe()} cuts; use mode='1d'"
        )


def _divides(mode: GridMode, path: str, size: int, what: str, by: int) -> None:
    if size % by:
        below, above = size // by * by, (size // by + 1) * by
        near = f"{below} or {above}" if below else str(above)
        raise ValueError(
            f"{path} has {size} {what}, and a {mode.describe()} needs a multiple of {by}; {near} would work, "
            "or mode='1d'"
        )
