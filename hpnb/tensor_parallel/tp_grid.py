"""What 2D, 2.5D and 3D have in common: a block is cut over all ranks, rows by some axes, width by another.

    embedding                  words cut and summed, the rest cut along the width: all rows (b, s, h / w)
    [deal rows]                before the first block                              (b / r, s, h / w)
    block                      norm, [q k v | attention | o], residual, norm, [up | f | down], residual
    head                       logits of words: cut along both; of classes: whole

Rows fall into r shares and the width into w. An attention has its heads and its rows to itself, and is given
the part of the mask that belongs to them. Gradients of what a row share has whole (scale and shift of norms,
biases) are summed over the row shares, those of a block together. Everything in a block is cut over all
ranks, so each draws its own dropout there; before the first block rows are whole, and ranks with the same
part of the width draw alike.

A subclass says where matrices are cut, and how they are multiplied: `grid.py`, `cube.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.mesh import Axis
from hpnb.models import Role
from hpnb.placement import Cut
from hpnb.ranks.current_rank import device as this_device
from hpnb.tensor_parallel import tp_grid_checks
from hpnb.tensor_parallel.activation_layout import ActivationLayout
from hpnb.tensor_parallel.async_weight_grads import PendingWeightGrads
from hpnb.tensor_parallel.dropout_rng import DropoutRng, drops
from hpnb.tensor_parallel.layernorm_grads import ReplicatedGradSum
from hpnb.tensor_parallel.mode import SplitModel, TensorParallelMode, is_transposed, split_evenly, split_units
from hpnb.tensor_parallel.sharded_layer_norm import ShardedLayerNorm
from hpnb.tensor_parallel.tp_grid_layers import (
    GridClassifier,
    GridLinear,
    GridProduct,
    GridVocabHead,
    SharedInputLinears,
)
from hpnb.tensor_parallel.vocab_cross_entropy import cross_entropy


class GridMode(TensorParallelMode):
    """A mode on an axis that is folded into a grid.

    Attributes:
        hidden: how hidden states lie between the layers of a block.
        inner: how they lie between a column and its row layer: in an attention, and in an MLP.
        logits: how logits of words lie.
        later: whether gradients of matrices are still on their way when a layer's backward ends.
    """

    hidden: ActivationLayout
    inner: ActivationLayout
    logits: ActivationLayout
    later: bool

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.device = this_device()
        self._sums: dict[str, _Sums] = {}  # by the path of the block, norm or head
        self._siblings: dict[str, SharedInputLinears] = {}  # column layers by their module

    # --- what a subclass says --------------------------------------------------------------------------

    @abstractmethod
    def matrix(self, role: Role, shape: Sequence[int]) -> tuple[Cut, ...]:
        """The block of a column's or row's weight that this rank holds."""

    @abstractmethod
    def table(self, words: int, width: int, shape: Sequence[int]) -> tuple[Cut, ...]:
        """The part of a table of words, with `words` and `width` its dims."""

    @abstractmethod
    def multiply(self, role: Role) -> GridProduct:
        """How X W + b is computed for a column or a row."""

    @abstractmethod
    def multiply_words(
        self, words: int
    ) -> Callable[[torch.Tensor, torch.Tensor, PendingWeightGrads | None], torch.Tensor]:
        """How logits are computed from hidden states and this rank's part of a table of words."""

    @abstractmethod
    def embedding(self, old: nn.Embedding, words: int) -> nn.Module:
        """What looks up words of which each rank has some."""

    @abstractmethod
    def further(self, role: Role, shape: Sequence[int]) -> Iterator[tuple[str, int, int]]:
        """What else of a matrix must divide: what it is, its size, by what."""

    @abstractmethod
    def describe(self) -> str:
        """Such as "2d grid (2 x 2)"."""

    # --- weights ---------------------------------------------------------------------------------------

    def check(self, subject: SplitModel) -> None:
        if self.axis.size > 1:
            tp_grid_checks.check(self, subject)

    def cuts(self, role: Role, shape: Sequence[int]) -> tuple[Cut, ...]:
        if self.axis.size == 1 or not shape:
            return ()
        if role.vocabulary is not None:
            if role.bias:
                return (split_evenly(self.logits.width, 0, shape[0]),)
            width = role.out_dim if role.in_dim is None else role.in_dim
            return self.table(role.vocabulary, width, shape)
        if role.kind in ("column", "row") and not role.bias:
            return self.matrix(role, shape)
        if role.kind == "column":
            return (split_units(self.inner.width, role, 0, shape[0]),)
        if role.kind == "head":
            if role.in_dim is None:
                return ()
            return (split_evenly(self.hidden.width, role.in_dim, shape[role.in_dim]),)
        return (split_evenly(self.hidden.width, role.out_dim, shape[role.out_dim]),)

    def heads(self, total: int) -> int:
        return total // self.inner.width.size

    # --- layers ----------------------------------------------------------------------------------------

    def layer(self, path: str, old: nn.Module, subject: SplitModel) -> nn.Module | None:
        place, roles = subject.layers[path]
        role = roles.get("weight")
        if role is None or self.axis.size == 1:
            return None
        if role.vocabulary is not None and place == "embedding":
            assert isinstance(old, nn.Embedding)
            return self.embedding(old, subject.words_of(path))
        sums = self._sums_of(path, subject)
        if role.vocabulary is not None:
            shared, multiply = sums.over(self.logits), self.multiply_words(subject.words_of(path))
            return _told(shared, GridVocabHead(old, multiply, shared, self.later), "bias")
        if role.kind == "norm":
            assert isinstance(old, nn.LayerNorm)
            if place == "embedding":  # rows are whole there, and so are gradients
                return ShardedLayerNorm(old, self.hidden.width, None)
            shared = sums.over(self.hidden)
            return _told(shared, ShardedLayerNorm(old, self.hidden.width, shared), "weight", "bias")
        if role.kind in ("column", "row"):
            shared = sums.over(self.inner if role.kind == "column" else self.hidden)
            siblings = self._siblings_of(path, role, is_transposed(roles), shared, sums)
            return _told(shared, GridLinear(old, siblings), "bias")
        if role.kind == "head":
            shared = sums.over(self.hidden)
            return _told(shared, GridClassifier(old, is_transposed(roles), self.hidden, shared), "weight")
        return None

    def _siblings_of(
        self, path: str, role: Role, transposed: bool, shared: ReplicatedGradSum, sums: _Sums
    ) -> SharedInputLinears:
        """Whom a layer is computed with: the columns of one module, or itself alone."""
        family = path.rpartition(".")[0] if role.kind == "column" else path
        if family not in self._siblings:
            self._siblings[family] = SharedInputLinears(self.multiply(role), shared, transposed, self.later)
            sums.siblings.append(self._siblings[family])
        return self._siblings[family]

    def _sums_of(self, path: str, subject: SplitModel) -> _Sums:
        part = next(p.name for p in subject.anatomy.parts if path == p.name or path.startswith(p.name + "."))
        return self._sums.setdefault(part, _Sums())

    # --- hooks -----------------------------------------------------------------------------------------

    def connect(self, subject: SplitModel) -> None:
        if self.axis.size == 1:
            return
        model = subject.model
        for path, sums in self._sums.items():
            _around(model.get_submodule(path), sums.begin, sums.end)
        for attention in subject.attentions:
            model.get_submodule(attention.path).register_forward_pre_hook(self._own_mask, with_kwargs=True)
        if drops(model):
            self._draw(subject)
        first = subject.anatomy.blocks[0].module
        first.register_forward_pre_hook(_on_first(self._deal), with_kwargs=True, prepend=True)
        if getattr(model, "base_model", None) is model:  # without a head: its outputs are hidden states
            model.register_forward_hook(self._whole_hidden)
        elif (words := subject.words) is not None and not subject.lazy:
            *_, head = (path for path, (place, _) in subject.layers.items() if place == "head")
            model.get_submodule(head).register_forward_hook(
                lambda module, args, logits: self.gather_logits(logits, words)
            )

    def _deal(self, hidden: torch.Tensor) -> torch.Tensor:
        """Before the first block: (b, s, h / w) -> (b / r, s, h / w)."""
        self.check_rows(hidden.size(0))
        return self.hidden.deal(hidden)

    def _whole_hidden(self, model: nn.Module, args: Any, outputs: Any) -> Any:
        if isinstance(outputs, tuple):
            return (self.hidden.whole(outputs[0]), *outputs[1:])
        outputs.last_hidden_state = self.hidden.whole(outputs.last_hidden_state)
        return outputs

    def check_rows(self, rows: int) -> None:
        """Raises ValueError if a batch, or a microbatch of a pipeline, cannot be dealt out."""
        shares = self.hidden.shares
        if rows % shares:
            below, above = rows // shares * shares, (rows // shares + 1) * shares
            raise ValueError(
                f"a batch of {rows} rows cannot be dealt out over {shares} row shares of this "
                f"{self.describe()}; use {f'{below} or {above}' if below else above}"
            )

    def _own_mask(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of a mask (b, 1, s, s), and of what else has a row for each of the batch, an attention's own rows.

        One row for all, (1, 1, s, s), stays.
        """

        def own(value: Any) -> Any:
            batched = isinstance(value, torch.Tensor) and value.dim() > 0 and value.size(0) > 1
            return self.inner.mine(value) if batched else value

        beside = [v if isinstance(v, torch.Tensor) and v.dim() != 4 else own(v) for v in args[1:]]
        named = {name: own(kwargs[name]) for name in _BY_ROWS if name in kwargs}
        return (*args[:1], *beside), {**kwargs, **named}

    def _draw(self, subject: SplitModel) -> None:
        inside = DropoutRng(self.axis, self.device)
        before = DropoutRng(self.hidden.width, self.device)
        places = [(part, before) for part in subject.anatomy.embedding]
        places += [(block, inside) for block in subject.anatomy.blocks]
        for part, randomness in places:
            module = subject.model.get_submodule(part.name)

            def begin(module: nn.Module = module, randomness: DropoutRng = randomness) -> None:
                randomness.forget()
                if module.training:
                    randomness.own()

            _around(module, begin, randomness.common)

    # --- logits ----------------------------------------------------------------------------------------

    def cross_entropy(
        self, logits: torch.Tensor, targets: torch.Tensor, words: int, **options: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own, width = self.logits.mine(targets), self.logits.width
        total, _ = cross_entropy(logits, own, width, words, **options)  # type: ignore[arg-type]
        # Targets are whole here: there is nothing to ask the others.
        return self.logits.over_rows(total), (targets != options.get("ignore_index", IGNORE_INDEX)).sum()

    def gather_logits(self, logits: torch.Tensor, words: int) -> torch.Tensor:
        return self.logits.whole(logits, words)


_BY_ROWS = ("attention_mask", "position_ids")  # what an attention may be told by name, with a row each


class _Sums:
    """What the layers of one block, norm or head sum together."""

    def __init__(self) -> None:
        self.siblings: list[SharedInputLinears] = []
        self._shared: dict[tuple[Axis, ...], ReplicatedGradSum] = {}

    def over(self, lies: ActivationLayout) -> ReplicatedGradSum:
        """What sums gradients over the row shares of `lies`."""
        return self._shared.setdefault(lies.rows, ReplicatedGradSum(lies.rows))

    def begin(self) -> None:
        for shared in self._shared.values():
            shared.begin()
        for siblings in self.siblings:
            siblings.begin()

    def end(self) -> None:
        for shared in self._shared.values():
            shared.end()
        for siblings in self.siblings:
            siblings.end()


def _told(shared: ReplicatedGradSum, module: nn.Module, *names: str) -> nn.Module:
    """`module`, whose weights of these names `shared` sums."""
    shared.homes += [(module, name) for name in names]
    return module


def _around(module: nn.Module, begin: Callable[[], None], end: Callable[[], None]) -> None:
    module.register_forward_pre_hook(lambda *_: begin(), prepend=True)
    module.register_forward_hook(lambda *_: end(), always_call=True)


def _on_first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A hook that changes hidden states, a module's first argument, however they are passed."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
        return args, {**kwargs, name: change(kwargs[name])}

    return hook
