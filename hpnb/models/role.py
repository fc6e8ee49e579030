"""What a weight is: to tensor parallelism the dims it may be cut along, to an optimizer whether it decays.

Two matrices in a row are cut so that nothing is sent between them (Shoeybi et al. 2019, arXiv 1909.08053,
section 3): the first by its outputs, the second by its inputs, whose partial results are then summed.

    column     y = x A, A = [A1 | A2]      q, k, v and mlp up      y comes out cut; the bias is cut with it
    row        z = y B, B = [B1 ; B2]      projection, mlp down    z is a sum; the bias is added once, after

A cut must not go through an attention head: `units` says how many pieces stay whole. GPT-2 has q, k and v in
one weight, A = [Q | K | V], and each of the three is cut on its own: `fused`. A table with a row a word, and
the output layer that gives a logit a word, may be cut by words: `vocabulary` is the dim that counts them.

Weight decay pulls matrices towards zero, and leaves alone what shifts or scales. The page of roles of a model
says which of its tables decay: see `vit_parts` and `gpt2_parts`. Roles are given by the place of a module in
its model. Suffixes of names would not do: a norm is called `layernorm_before` here and `ln_1` there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

Kind = Literal["column", "row", "embedding", "norm", "head"]


@dataclass(frozen=True)
class Role:
    """What one parameter is.

    Attributes:
        kind: see above; an embedding turns inputs to hidden states, with class token and positions; a head
            turns hidden states to outputs.
        out_dim: the dim of the tensor that counts outputs.
        in_dim: the dim that counts inputs; None if there is none, as in a bias, a norm or a table that is
            looked up. nn.Linear has (out, in), so 0 and 1; transformers' Conv1D has (in, out), so 1 and 0.
        decay: whether weight decay applies.
        bias: whether it is the bias of a module whose weight has the same kind.
        units: the cut dim falls into so many equal pieces that must stay whole: the heads of an attention,
            the neurons of an MLP.
        fused: so many weights lie side by side along out_dim, each of which is cut on its own: 3 where q, k
            and v are one weight. Where they take turns head by head, a head's three are one unit: 1.
        vocabulary: the dim that counts words; None if there is none. Positions are no words.
    """

    kind: Kind
    out_dim: int
    in_dim: int | None = None
    decay: bool = False
    bias: bool = False
    units: int = 1
    fused: int = 1
    vocabulary: int | None = None

    @property
    def cut_dim(self) -> int | None:
        """The dim along which 1D tensor parallelism cuts; None for what every rank has whole."""
        return {"column": self.out_dim, "row": self.in_dim}.get(self.kind)


def linear(path: str, kind: Kind, units: int = 1, fused: int = 1) -> Iterator[tuple[str, Role]]:
    """Names and roles of weight (out, in) and bias (out,) of the nn.Linear at `path`."""
    yield from _matrix(path, Role(kind, 0, 1, decay=True, units=units, fused=fused))


def conv1d(path: str, kind: Kind, units: int = 1, fused: int = 1) -> Iterator[tuple[str, Role]]:
    """Names and roles of weight (in, out) and bias (out,) of transformers' Conv1D at `path`."""
    yield from _matrix(path, Role(kind, 1, 0, decay=True, units=units, fused=fused))


def norm(path: str) -> Iterator[tuple[str, Role]]:
    """Names and roles of scale (h,) and shift (h,) of the norm at `path`."""
    yield f"{path}.weight", Role("norm", out_dim=0)
    yield f"{path}.bias", Role("norm", out_dim=0, bias=True)


def _matrix(path: str, weight: Role) -> Iterator[tuple[str, Role]]:
    yield f"{path}.weight", weight
    bias = replace(weight, out_dim=0, in_dim=None, decay=False, bias=True)
    yield f"{path}.bias", replace(bias, units=1, fused=1) if weight.kind == "row" else bias  # lies uncut


def check(name: str, role: Role, shape: Sequence[int]) -> None:
    """Raise ValueError unless `role` can be that of a whole parameter of this shape."""
    told = f"{name} of shape {tuple(shape)}"
    if role.kind not in get_args(Kind):
        raise ValueError(f"{told} has the role {role.kind!r}; use {', '.join(get_args(Kind))}")
    for what, dim in (("out_dim", role.out_dim), ("in_dim", role.in_dim), ("vocabulary", role.vocabulary)):
        dims = max(1, len(shape))  # a number without dims counts as a vector of one
        if dim is not None and not 0 <= dim < dims:
            have = "dim 0 alone" if dims == 1 else f"dims 0 to {dims - 1}"
            raise ValueError(f"{told} has {have}, but its role says {what}={dim}")
    if role.kind == "row" and role.in_dim is None and not role.bias:
        raise ValueError(
            f"{told} is cut by its inputs (row), but its role has no in_dim; say which dim it is"
        )
    if role.units < 1 or role.fused < 1:
        raise ValueError(f"{told} has units={role.units}, fused={role.fused}; use 1 or more of each")
    if role.cut_dim is not None and shape:
        _check_pieces(told, role, shape[role.cut_dim])


def _check_pieces(told: str, role: Role, size: int) -> None:
    beside = role.fused if role.cut_dim == role.out_dim else 1
    if size % beside:
        raise ValueError(f"{told}: {size} along dim {role.cut_dim} are not fused={beside} equal weights")
    if (size // beside) % role.units:
        able = [n for n in range(1, size // beside + 1) if size // beside % n == 0]
        near = sorted(sorted(able, key=lambda n: abs(n - role.units))[:2])
        each = f"{size // beside} in each of {beside}" if beside > 1 else str(size)
        raise ValueError(
            f"{told}: {each} along dim {role.cut_dim} do not fall into {role.units} equal units; "
            f"{' or '.join(map(str, near))} would work"
        )
