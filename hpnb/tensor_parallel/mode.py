"""What a mode of tensor parallelism has to say about a model: 1D, 2D, 2.5D and 3D each are one `Mode`.

    cuts      which part of each weight this rank holds
    layer     what takes the place of a layer, so that it computes with parts
    connect   where hidden states are dealt out, and where they are put together again
    loss      the cross entropy of logits that are cut

`parallelize.py` does the rest, the same for all of them: it asks the model's table of roles, cuts each
weight, exchanges the layers, and nothing in the model's own forward changes.

Between the first block and the head, hidden states (b, s, h) are cut as the mode likes. What comes before and
after is whole: ids, masks and labels are the same on all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from hpnb.mesh import Axis
from hpnb.models import Anatomy, Role
from hpnb.models.attention import Attention
from hpnb.models.in_place_cross_entropy import VocabShard
from hpnb.placement import Cut
from hpnb.split_sizes import split_sizes

Place = Literal["embedding", "block", "head"]


@dataclass(frozen=True)
class SplitModel:
    """The model that is being cut.

    Attributes:
        roles: of each parameter, by its name in the model.
        shapes: of each parameter as it is whole; a tied one stands under all of its names.
        layers: paths of the modules that have parameters with a role, with their place and roles by attribute
            ("weight", "bias"), in the model's order.
        lazy: whether logits may stay cut after the head: the model computes its loss through a
            `loss_function` that can be exchanged. If not, the head must give whole logits.
    """

    model: nn.Module
    anatomy: Anatomy
    attentions: tuple[Attention, ...]
    roles: Mapping[str, Role]
    shapes: Mapping[str, tuple[int, ...]]
    layers: Mapping[str, tuple[Place, Mapping[str, Role]]]
    lazy: bool

    @property
    def words(self) -> int | None:
        """The size of the vocabulary that the head gives logits of; None if it classifies."""
        for path, (place, roles) in self.layers.items():
            if place == "head" and roles.get("weight", _NO_WORDS).vocabulary is not None:
                return self.words_of(path)
        return None

    def words_of(self, path: str) -> int:
        """The vocabulary of the embedding or head at `path`."""
        dim = self.layers[path][1]["weight"].vocabulary
        assert dim is not None, f"{path} has no vocabulary"
        return self.shapes[f"{path}.weight"][dim]


_NO_WORDS = Role("head", out_dim=0)


class TensorParallelMode(ABC):
    """How one model lies on the ranks of one axis.

    Attributes:
        name: "1d", "2d", "2.5d" or "3d".
        axes: along which weights may be cut: the axis itself, or those of the grid that it is folded into.
    """

    name: str
    axes: tuple[Axis, ...]

    @abstractmethod
    def check(self, subject: SplitModel) -> None:
        """Raises ValueError if something cannot be cut so: the numbers, and the nearest layout that works."""

    @abstractmethod
    def cuts(self, role: Role, shape: Sequence[int]) -> tuple[Cut, ...]:
        """The part of a weight that this rank holds; () is all of it."""

    @abstractmethod
    def layer(self, path: str, old: nn.Module, subject: SplitModel) -> nn.Module | None:
        """What takes the place of `old`, whose weights are cut already; None leaves it."""

    @abstractmethod
    def connect(self, subject: SplitModel) -> None:
        """Hook the model up, after its layers have been exchanged."""

    @property
    def begin(self) -> Callable[[int, int], None] | None:
        """Who wants to know how many rows and tokens a batch has, before a block runs on it."""
        return None

    @abstractmethod
    def heads(self, total: int) -> int:
        """How many of an attention's heads this rank computes."""

    @abstractmethod
    def cross_entropy(
        self, logits: torch.Tensor, targets: torch.Tensor, words: int, **options: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss and count over the whole batch, on all ranks.

        Args:
            logits: as this rank's head gives them.
            targets: (b, s) of the whole batch, equal on all ranks.
            options: of `hpnb.tensor_parallel.cross_entropy`.
        """

    def words(self, vocabulary: int) -> VocabShard | None:
        """This rank's, if its loss is the cross entropy of all rows and of these words."""
        return None

    @abstractmethod
    def gather_logits(self, logits: torch.Tensor, words: int) -> torch.Tensor:
        """Logits of all words and rows, on all ranks; gathers."""


# --- what all modes share ----------------------------------------------------------------------------------


def split_units(axis: Axis, role: Role, dim: int, size: int) -> Cut:
    """A cut along `dim` that leaves units whole: 25 heads over 4 ranks are 7, 6, 6 and 6 of them.

    A fused weight (q, k and v side by side) is cut in each of its parts.
    """
    fused = role.fused if dim == role.out_dim else 1
    width = size // fused  # of one of q, k and v
    unit = width // role.units
    share = split_sizes(role.units, axis.size)
    start = sum(share[: axis.rank]) * unit
    stop = start + share[axis.rank] * unit
    return Cut(axis.name, dim, tuple((part * width + start, part * width + stop) for part in range(fused)))


def split_evenly(axis: Axis, dim: int, size: int) -> Cut:
    """A cut along `dim`, where any row may be the first: the first ranks have one more if it is uneven."""
    share = split_sizes(size, axis.size)
    start = sum(share[: axis.rank])
    return Cut(axis.name, dim, ((start, start + share[axis.rank]),))


def is_transposed(roles: Mapping[str, Role]) -> bool:
    """Whether a layer's weight is (in, out), as transformers' Conv1D has it."""
    return roles["weight"].in_dim == 0
