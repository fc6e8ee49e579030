"""What a mode of tensor parallelism, 1D, 2D, 2.5D or 3D, decides about a model.

    weight_cuts      which shard of each weight this rank holds
    replace_layer    what replaces a layer, so that it computes with shards
    connect          where hidden states are sharded, and where they are gathered again
    cross_entropy    the loss of sharded logits

`parallelize.py` does the rest for all of them: it reads the model's table of roles, shards each weight, and
replaces the layers. The model's own forward stays unchanged.

Between the first block and the head, hidden states (b, s, h) are sharded as the mode likes. What a model gets
is replicated: ids, masks and labels are equal on all ranks. Embeddings are replicated in 1D; those of a grid
give each rank a shard of the hidden size.

    1d      t              any number of ranks
    2d      q x q          1, 4, 9, 16, ...
    2.5d    d x q x q      8 = 2 x 2 x 2, 12 = 3 x 2 x 2, 18 = 2 x 3 x 3, ...; d = 1 is 2d
    3d      l x l x l      1, 8, 27, ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Literal

import torch
from torch import nn

from hpnb.mesh import Axis
from hpnb.models import Anatomy, Role
from hpnb.models.in_place_cross_entropy import VocabShard
from hpnb.models.model_anatomy import Attention
from hpnb.placement import Cut

NAMES = ("1d", "2d", "2.5d", "3d")
Section = Literal["embedding", "block", "head"]


def check_ranks(mode: str, ranks: int, depth: int = 1) -> None:
    """Raises ValueError if a grid mode cannot use so many ranks, with the nearest numbers that it can."""
    if mode == "3d":
        side = round(ranks ** (1 / 3))
        if side**3 != ranks:
            low = max(n for n in range(1, ranks + 1) if n**3 <= ranks)
            raise ValueError(
                f"3d needs l x l x l ranks, and {ranks} is no cube; {low**3} = {low} x {low} x {low} would "
                f"do, or {(low + 1) ** 3}, or mode='1d' on all {ranks}"
            )
    elif mode in ("2d", "2.5d"):
        square, rest = divmod(ranks, depth)
        if rest or isqrt(square) ** 2 != square:
            name = "q x q" if depth == 1 else f"{depth} x q x q"
            if mode == "2.5d" and (works := _largest_grid(ranks)) is not None:
                d, q = works
                raise ValueError(
                    f"2.5d with depth={depth} needs {name} ranks, and {ranks} is not of that form; use "
                    f"depth={d}, a grid of {d} x {q} x {q}, or mode='1d'"
                )
            low = max(1, isqrt(ranks // depth))
            raise ValueError(
                f"{mode} needs {name} ranks, and {ranks} is not of that form; {depth * low**2} would do, or "
                f"{depth * (low + 1) ** 2}, or mode='1d' on all {ranks}"
            )


def _largest_grid(ranks: int) -> tuple[int, int] | None:
    """(d, q) of d x q x q = ranks with the largest q; None if that is 1."""
    return next(
        ((ranks // q**2, q) for q in range(isqrt(ranks), 1, -1) if ranks % q**2 == 0),
        None,
    )


@dataclass(frozen=True)
class ModelToShard:
    """The model that is being sharded.

    Attributes:
        shapes: of each full parameter; a tied one stands under all of its names.
        layers: paths of the modules that have parameters with a role, with their section and roles by
            attribute ("weight", "bias"), in the model's order.
        lazy_logits: whether logits may stay sharded after the head, because the model computes its loss
            through a `loss_function` that can be replaced. If not, the head must gather its logits.
    """

    module: nn.Module
    anatomy: Anatomy
    attentions: tuple[Attention, ...]
    roles: Mapping[str, Role]
    shapes: Mapping[str, tuple[int, ...]]
    layers: Mapping[str, tuple[Section, Mapping[str, Role]]]
    lazy_logits: bool

    @property
    def vocab_size(self) -> int | None:
        """Of the logits that the head gives; None if it classifies."""
        for path, (section, roles) in self.layers.items():
            if section == "head" and "weight" in roles and roles["weight"].vocabulary is not None:
                return self.vocab_size_of(path)
        return None

    def vocab_size_of(self, path: str) -> int:
        """Of the embedding or head at `path`."""
        dim = self.layers[path][1]["weight"].vocabulary
        assert dim is not None, f"{path} has no vocabulary"
        return self.shapes[f"{path}.weight"][dim]

    def head_counts(self, path: str) -> set[int]:
        """The numbers of heads and of key-value heads in the module at `path`, as its roles name them."""
        counts = {
            attention.heads for attention in self.attentions if f"{attention.path}.".startswith(f"{path}.")
        }
        for name, role in self.roles.items():
            if name.startswith(f"{path}.") and role.kind == "column" and not role.bias and role.units > 1:
                width = role.sections(role.out_dim, self.shapes[name][role.out_dim])[0]
                counts |= {role.units} if width > role.units else set()  # else the neurons of an MLP
        return counts


class TensorParallelMode(ABC):
    """How one model is sharded over the ranks of one axis.

    Attributes:
        axes: along which weights may be sharded: the axis itself, or those of the grid that it is split into.
    """

    name: str
    axes: tuple[Axis, ...]

    @abstractmethod
    def check(self, model: ModelToShard) -> None:
        """Raises ValueError if something cannot be sharded so, with the numbers and what would work."""

    @abstractmethod
    def weight_cuts(self, role: Role, shape: Sequence[int]) -> tuple[Cut, ...]:
        """How this rank's shard is cut from a weight; () is all of it."""

    @abstractmethod
    def replaces(self, roles: Mapping[str, Role]) -> bool:
        """Whether `replace_layer` replaces a layer whose parameters have these roles."""

    @abstractmethod
    def replace_layer(self, path: str, old: nn.Module, model: ModelToShard) -> nn.Module | None:
        """What replaces `old`, whose weights are sharded already; None keeps it."""

    @abstractmethod
    def connect(self, model: ModelToShard) -> None:
        """Register the model's hooks, after its layers have been replaced."""

    @property
    def set_batch_shape(self) -> Callable[[int, int], None] | None:
        """To be called with a batch's size and length before a block runs on it; None if nothing needs it."""
        return None

    @abstractmethod
    def local_heads(self, heads: int) -> int:
        """How many of an attention's heads this rank computes."""

    @abstractmethod
    def cross_entropy(
        self, logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, **options: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss and count over the full batch, on all ranks.

        Args:
            logits: as this rank's head gives them.
            targets: (b, s) of the full batch, equal on all ranks.
        """

    def vocab_shard(self, vocab_size: int) -> VocabShard | None:
        """This rank's, if its logits are those of all samples and of a shard of the vocabulary."""
        return None

    @abstractmethod
    def gather_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """This rank's logits -> those of all samples and tokens of the vocabulary, on all ranks."""
