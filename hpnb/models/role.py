"""What a weight is: to tensor parallelism the dims it may be cut along, to an optimizer whether it decays.

Two matrices in a row are cut so that nothing is sent between them (Shoeybi et al. 2019, arXiv 1909.08053,
section 3): the first by its outputs, the second by its inputs, whose partial results are then summed.

    column     y = x A, A = [A1 | A2]      q, k, v and mlp up      y comes out cut; the bias is cut with it
    row        z = y B, B = [B1 ; B2]      projection, mlp down    z is a sum; the bias is added once, after

A cut must not go through an attention head: `units` says how many pieces stay whole.

Weight decay pulls matrices towards zero, and leaves alone what shifts or scales: biases, norms, positions and
the class token. Roles are given by the place of a module in its model. Suffixes of names would not do: a
norm is called `layernorm_before` here and `ln_1` there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["column", "row", "embedding", "norm", "head"]


@dataclass(frozen=True)
class Role:
    """What one parameter is.

    Attributes:
        kind: see above; an embedding turns inputs to hidden states, with class token and positions; a head
            turns hidden states to outputs.
        out_dim: the dim of the tensor that counts outputs.
        in_dim: the dim that counts inputs; None if there is none, as in a bias or a norm. nn.Linear has
            (out, in), so 0 and 1; transformers' Conv1D has (in, out), so 1 and 0.
        decay: whether weight decay applies.
        bias: whether it is the bias of a module whose weight has the same kind.
        units: the cut dim falls into so many equal pieces that must stay whole: the heads of an attention,
            the neurons of an MLP.
        fused: so many weights lie side by side along out_dim, each of which is cut on its own: 3 where q, k
            and v are one weight.
    """

    kind: Kind
    out_dim: int
    in_dim: int | None = None
    decay: bool = False
    bias: bool = False
    units: int = 1
    fused: int = 1

    @property
    def cut_dim(self) -> int | None:
        """The dim along which 1D tensor parallelism cuts; None for what every rank has whole."""
        return {"column": self.out_dim, "row": self.in_dim}.get(self.kind)


def linear(path: str, kind: Kind, units: int = 1) -> Iterator[tuple[str, Role]]:
    """Names and roles of weight (out, in) and bias (out,) of the nn.Linear at `path`."""
    weight = Role(kind, out_dim=0, in_dim=1, decay=True, units=units)
    yield f"{path}.weight", weight
    uncut = kind == "row"  # its bias lies along the outputs
    bias = replace(weight, in_dim=None, decay=False, bias=True, units=1 if uncut else units)
    yield f"{path}.bias", bias


def norm(path: str) -> Iterator[tuple[str, Role]]:
    """Names and roles of scale (h,) and shift (h,) of the norm at `path`."""
    yield f"{path}.weight", Role("norm", out_dim=0)
    yield f"{path}.bias", Role("norm", out_dim=0, bias=True)
