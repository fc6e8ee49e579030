"""What a weight is: the dims along which tensor parallelism may split it, and whether weight decay applies.

Two matrices in a row are sharded so that nothing is sent between them (Shoeybi et al. 2019, arXiv 1909.08053,
section 3): the first by its outputs, the second by its inputs, whose partial results are then summed.

    column     y = x A, A = [A1 | A2]      q, k, v and mlp up      y comes out sharded, and so is the bias
    row        z = y B, B = [B1 ; B2]      projection, mlp down    z is a sum; the bias is added once, after

A split must not go through an attention head: `units` says how many pieces stay whole. GPT-2 has q, k and v
in one weight, A = [Q | K | V], and each of the three is split by itself: `fused`. An embedding over a
vocabulary, and the output layer that gives one logit per token of it, may be split by tokens: `vocabulary` is
that dim.

Weight decay pulls matrices towards zero, and leaves alone what shifts or scales. A model's table of roles
says which of its embeddings decay: see `vit_parts` and `gpt2_parts`. Roles follow from the place of a module
in its model. Suffixes of names would not do: a norm is called `layernorm_before` in one model and `ln_1` in
another.
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
        kind: see above for "column" and "row". The others are replicated, unless `vocabulary` splits them,
            and say what a weight does: an embedding turns inputs into hidden states, with class token and
            positions; a norm scales or shifts; a head is any other matrix, such as the one that gives
            outputs. No layout treats these three differently, but a bias must have the kind of its weight.
        out_dim: the dim of the tensor that counts outputs.
        in_dim: the dim that counts inputs; None if there is none, as in a bias, a norm or an embedding that
            is looked up. nn.Linear has (out, in), so 0 and 1; transformers' Conv1D has (in, out), so 1 and 0.
        decay: whether weight decay applies.
        bias: whether it is the bias of a module whose weight has the same kind.
        units: into how many equal pieces, which must stay whole, the split dim falls: the heads of an
            attention, the key-value heads of its k and v, the neurons of an MLP.
        fused: how many weights lie side by side along out_dim and are split separately: 3 where q, k and v
            are one weight. Where they alternate head by head, a head's three are one unit: 1.
        widths: instead of `fused`, relative widths of the weights side by side: with (4, 1, 1) q is four
            times as wide as k and as v, because 4 query heads read one key and one value.
        vocabulary: the dim that counts tokens of the vocabulary; None if there is none. Positions are none.
        sum_grads: whether it is replicated and used on a rank's heads alone, as a norm of queries is. Its
            gradient is then summed over the ranks.
        partial_outputs: how many of its last outputs a rank uses for its own heads alone, although the weight
            is replicated, as latent attention does with the rotary part of keys. Their gradient is then
            summed over the ranks.
    """

    kind: Kind
    out_dim: int
    in_dim: int | None = None
    decay: bool = False
    bias: bool = False
    units: int = 1
    fused: int = 1
    vocabulary: int | None = None
    widths: tuple[int, ...] = ()
    sum_grads: bool = False
    partial_outputs: int = 0

    @property
    def cut_dim(self) -> int | None:
        """The dim along which 1D tensor parallelism splits; None for what is replicated."""
        return {"column": self.out_dim, "row": self.in_dim}.get(self.kind)

    def sections(self, dim: int, size: int) -> tuple[int, ...]:
        """Sizes of the weights that lie side by side along `dim`, which has `size` elements."""
        if dim != self.out_dim:
            return (size,)
        widths = self.widths or (1,) * self.fused
        return tuple(size * width // sum(widths) for width in widths)


def embedding(path: str, vocabulary: bool = True, decay: bool = False) -> Iterator[tuple[str, Role]]:
    """Name and role of weight (entries, h) of the nn.Embedding at `path`.

    Args:
        vocabulary: whether entries are tokens, along which it may be split; False for positions.
    """
    yield f"{path}.weight", Role("embedding", 1, decay=decay, vocabulary=0 if vocabulary else None)


def linear(
    path: str, kind: Kind, units: int = 1, fused: int = 1, vocabulary: bool = False
) -> Iterator[tuple[str, Role]]:
    """Names and roles of weight (out, in) and bias (out,) of the nn.Linear at `path`.

    Args:
        kind: "column" or "row"; "head", "norm" or "embedding" for one that is replicated, such as a router.
        vocabulary: whether its outputs are logits of tokens, along which it may be split. A weight that is
            tied to an embedding has one role, under the embedding's name.
    """
    tokens = 0 if vocabulary else None
    yield from _matrix(path, Role(kind, 0, 1, decay=True, units=units, fused=fused, vocabulary=tokens))


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
    yield f"{path}.bias", replace(bias, units=1, fused=1) if weight.kind == "row" else bias  # not split


def check(name: str, role: Role, shape: Sequence[int]) -> None:
    """Raise ValueError unless `role` can be that of an unsplit parameter of this shape."""
    parameter = f"{name} of shape {tuple(shape)}"
    if role.kind not in get_args(Kind):
        raise ValueError(f"{parameter} has the role {role.kind!r}; use {', '.join(get_args(Kind))}")
    for what, dim in (("out_dim", role.out_dim), ("in_dim", role.in_dim), ("vocabulary", role.vocabulary)):
        dims = max(1, len(shape))  # a number without dims counts as a vector of one
        if dim is not None and not 0 <= dim < dims:
            have = "dim 0 alone" if dims == 1 else f"dims 0 to {dims - 1}"
            raise ValueError(f"{parameter} has {have}, but its role says {what}={dim}")
    if role.kind == "row" and role.in_dim is None and not role.bias:
        raise ValueError(
            f"{parameter} is cut by its inputs (row), but its role has no in_dim; say which dim it is"
        )
    of_linear = role.in_dim is not None and {role.out_dim, role.in_dim} == {0, 1}
    if role.kind in ("column", "row") and of_linear and len(shape) > 2:
        raise ValueError(
            f"{parameter} is {len(shape)}-D, and the role {role.kind!r} is for the 2-D weight of a linear "
            "layer; Role('head', 0, 1, decay=True) leaves it whole on every tensor-parallel rank"
        )
    if role.units < 1 or role.fused < 1:
        raise ValueError(f"{parameter} has units={role.units}, fused={role.fused}; use 1 or more of each")
    if role.cut_dim is not None and shape and role.widths:
        _check_widths(parameter, role, shape[role.cut_dim])
    elif role.cut_dim is not None and shape:
        _check_units(parameter, role, shape[role.cut_dim])


def _check_units(parameter: str, role: Role, size: int) -> None:
    fused = role.fused if role.cut_dim == role.out_dim else 1
    if size % fused:
        raise ValueError(f"{parameter}: {size} along dim {role.cut_dim} are not fused={fused} equal weights")
    width = size // fused
    if width % role.units:
        divisors = [n for n in range(1, width + 1) if width % n == 0]
        near = sorted(sorted(divisors, key=lambda n: abs(n - role.units))[:2])
        widths = f"{width} in each of {fused}" if fused > 1 else str(size)
        raise ValueError(
            f"{parameter}: {widths} along dim {role.cut_dim} do not fall into {role.units} equal units; "
            f"{' or '.join(map(str, near))} would work"
        )


def _check_widths(parameter: str, role: Role, size: int) -> None:
    if size % sum(role.widths) or any(n % role.units for n in role.sections(role.out_dim, size)):
        raise ValueError(
            f"{parameter}: {size} along dim {role.cut_dim} are not weights of relative widths {role.widths} "
            f"that each fall into {role.units} equal units"
        )
