"""1D tensor parallelism of a whole model: which layers are columns and which are rows, and what lies between.

    embedding                  words cut, the rest whole: hidden states equal on all ranks
    [split tokens]             with sequence parallelism, before the first block
    block                      norm, [q k v | attention | o], residual, norm, [up | f | down], residual
    [gather tokens]            with sequence parallelism, after the last norm
    head                       words cut, logits stay so; a classifier is whole, and computed by every rank

The brackets are regions (`overlap.py`): in at a column layer, out at a row layer. What is uneven is dealt out
unevenly: 25 heads over 4 ranks are 7, 6, 6 and 6. `column_row.py` has the mathematics and the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hpnb import comm
from hpnb.mesh import Axis
from hpnb.models import Role
from hpnb.models.in_place_cross_entropy import VocabShard
from hpnb.placement import Cut
from hpnb.ranks.current_rank import device as this_device
from hpnb.tensor_parallel.dropout_rng import DropoutRng, drops
from hpnb.tensor_parallel.layernorm_grads import ReplicatedGradSum
from hpnb.tensor_parallel.mode import SplitModel, TensorParallelMode, is_transposed, split_evenly, split_units
from hpnb.tensor_parallel.tp_1d_linear import (
    ColumnParallelLinear,
    ParallelRegion,
    RowParallelLinear,
    SequenceSharding,
)
from hpnb.tensor_parallel.vocab_cross_entropy import cross_entropy, vocab_shard
from hpnb.tensor_parallel.vocab_embedding import VocabParallelEmbedding

_SHAPE = "hpnb_shape"


class TensorParallel1D(TensorParallelMode):
    """Columns, then rows, over all ranks of one axis."""

    name = "1d"

    def __init__(self, axis: Axis, sequence_parallel: bool) -> None:
        self.axes = (axis,)
        self.axis = axis
        self.line = SequenceSharding(axis, sequence_parallel, this_device())
        self.randomness = DropoutRng(axis, this_device())

    # --- weights -----------------------------------------------------------------------------------------

    def check(self, subject: SplitModel) -> None:
        for attention in subject.attentions:
            self._enough(attention.heads, "heads", attention.path)
        for name, role in subject.roles.items():
            if role.cut_dim is not None and not role.bias:
                self._enough(role.units, "pieces that must stay whole", name)

    def _enough(self, units: int, what: str, path: str) -> None:
        if units < self.axis.size:
            raise ValueError(
                f"{path} has {units} {what}, which {self.axis.size} ranks cannot share; use at most {units} "
                f"ranks along {self.axis.name}"
            )

    def cuts(self, role: Role, shape: Sequence[int]) -> tuple[Cut, ...]:
        if self.axis.size == 1:
            return ()
        if not _is_cut(role):
            return ()
        if role.vocabulary is not None:
            return (split_evenly(self.axis, role.vocabulary, shape[role.vocabulary]),)
        assert role.cut_dim is not None
        return (split_units(self.axis, role, role.cut_dim, shape[role.cut_dim]),)

    @property
    def begin(self) -> Callable[[int, int], None] | None:
        return self.line.begin if self.line.sequence else None

    def heads(self, total: int) -> int:
        return comm.split_sizes(total, self.axis.size)[self.axis.rank]

    # --- layers ------------------------------------------------------------------------------------------

    def layer(self, path: str, old: nn.Module, subject: SplitModel) -> nn.Module | None:
        place, roles = subject.layers[path]
        role = roles.get("weight")
        if role is None or self.axis.size == 1:
            return None
        if role.vocabulary is not None:
            if place == "embedding":
                assert isinstance(old, nn.Embedding)
                return VocabParallelEmbedding(old, subject.words_of(path), self.axis)
            return ColumnParallelLinear(old, is_transposed(roles))
        if role.kind == "column":
            return ColumnParallelLinear(old, is_transposed(roles))
        if role.kind == "row":
            return RowParallelLinear(old, is_transposed(roles), self.line)
        return None

    # --- hooks -------------------------------------------------------------------------------------------

    def connect(self, subject: SplitModel) -> None:
        if self.axis.size == 1:
            return
        draws = drops(subject.model)
        if self.line.sequence:
            _before(subject.anatomy.blocks[0].module, self.line.deal)
        for block in subject.anatomy.blocks:
            self._connect_block(block.name, block.module, subject, draws)
        if self.line.sequence:
            norm = self._last_norm(subject)
            self._share(norm, [n for n in subject.layers if n == norm], subject)
            module = subject.model.get_submodule(norm)
            alike = subject.words is None  # the head is whole, and each rank computes all of it
            _after(module, lambda x: self.line.together(x, alike))
        words = subject.words
        for path, (place, _) in subject.layers.items():
            head = subject.model.get_submodule(path)
            if place == "head" and isinstance(head, ColumnParallelLinear):
                if not self.line.sequence:
                    self._region(head, [head])
                if not subject.lazy:
                    _after(head, lambda z: comm.gather(z, self.axis, -1, words))

    def _connect_block(self, name: str, block: nn.Module, subject: SplitModel, draws: bool) -> None:
        paths = [path for path in subject.layers if path.startswith(name + ".")]
        if self.line.sequence:
            self._share(name, paths, subject)
            if block is not subject.anatomy.blocks[0].module:  # which deals out
                _before(block, self.line.arrive)
            self._tell_shape(block, subject)
        for parent, layers in _pairs(subject.model, block, paths):
            self._region(parent, layers)
        if not draws:
            return
        if self.line.sequence:  # all of a block lies on this rank's tokens
            _before(block, lambda x: self._draw_alone(block, x))
        else:
            for path in paths:
                layer = subject.model.get_submodule(path)
                if isinstance(layer, ColumnParallelLinear):
                    _after(layer, lambda y: self._draw_alone(block, y))
                elif isinstance(layer, RowParallelLinear):
                    _before(layer, lambda y: self._draw_alike(y))
        block.register_forward_pre_hook(lambda *_: self.randomness.forget(), prepend=True)
        block.register_forward_hook(lambda *_: self.randomness.common(), always_call=True)

    def _tell_shape(self, block: nn.Module, subject: SplitModel) -> None:
        """Where transformers checkpoints a block, it keeps the block's keyword arguments, and runs its
        forward again without the block's own hooks: so the attention in it is told by a keyword."""

        def tell(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if block.training and getattr(block, "gradient_checkpointing", False):
                return args, {**kwargs, _SHAPE: self.line.shape}
            return None

        def listen(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if _SHAPE in kwargs:
                self.line.begin(*kwargs.pop(_SHAPE))
            return args, kwargs

        block.register_forward_pre_hook(tell, with_kwargs=True)
        inside = {id(module) for module in block.modules()}
        for attention in subject.attentions:
            module = subject.model.get_submodule(attention.path)
            if id(module) in inside:
                module.register_forward_pre_hook(listen, with_kwargs=True, prepend=True)

    def _draw_alone(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if block.training:
            self.randomness.own()
        return x

    def _draw_alike(self, x: torch.Tensor) -> torch.Tensor:
        self.randomness.common()
        return x

    def _region(self, parent: nn.Module, layers: Sequence[ColumnParallelLinear | RowParallelLinear]) -> None:
        region = ParallelRegion(self.line, layers)
        _before(parent, region.begin)
        parent.register_forward_hook(lambda *_: region.end(), always_call=True)

    def _share(self, part: str, paths: Sequence[str], subject: SplitModel) -> None:
        """Send the gradients of what `part` has whole together, and lend its norms what they use."""
        shared = ReplicatedGradSum([self.axis])
        owner = subject.model.get_submodule(part)
        for path in paths:
            module = subject.model.get_submodule(path)
            whole = [name for name, role in subject.layers[path][1].items() if not _is_cut(role)]
            if not isinstance(module, ColumnParallelLinear | RowParallelLinear):  # these see all tokens
                shared.homes += [(module, name) for name in whole]
                _lend(module, whole, shared)
        owner.register_forward_pre_hook(lambda *_: shared.begin(), prepend=True)
        owner.register_forward_hook(lambda *_: shared.end(), always_call=True)

    def _last_norm(self, subject: SplitModel) -> str:
        norms = [
            path
            for path, (place, roles) in subject.layers.items()
            if place == "head" and any(role.kind == "norm" for role in roles.values())
        ]
        if not norms:
            raise ValueError(
                f"sequence parallelism ends at the norm in the head, and this {type(subject.model).__name__} "
                "has none there; use sequence_parallel=False"
            )
        return norms[-1]

    # --- logits ------------------------------------------------------------------------------------------

    def cross_entropy(
        self, logits: torch.Tensor, targets: torch.Tensor, words: int, **options: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return cross_entropy(logits, targets, self.axis, words, **options)  # type: ignore[arg-type]

    def words(self, vocabulary: int) -> VocabShard | None:
        return vocab_shard(self.axis, vocabulary)

    def gather_logits(self, logits: torch.Tensor, words: int) -> torch.Tensor:
        return comm.gather(logits, self.axis, -1, words)


def _is_cut(role: Role) -> bool:
    return role.vocabulary is not None or role.cut_dim is not None


def _pairs(
    model: nn.Module, block: nn.Module, paths: Sequence[str]
) -> Iterator[tuple[nn.Module, list[ColumnParallelLinear | RowParallelLinear]]]:
    """Where to send around: each module with one row and its columns; else each column by itself."""
    found: dict[str, list[ColumnParallelLinear | RowParallelLinear]] = {}
    for path in paths:
        layer = model.get_submodule(path)
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            found.setdefault(path.rpartition(".")[0], []).append(layer)
    for parent, layers in found.items():
        rows = [layer for layer in layers if isinstance(layer, RowParallelLinear)]
        columns = [layer for layer in layers if isinstance(layer, ColumnParallelLinear)]
        module = model.get_submodule(parent)
        if len(rows) == 1 and columns and module is not block:
            yield module, layers
        else:
            for column in columns:
                yield column, [column]


# --- hooks on the first argument of a module -----------------------------------------------------------


def _before(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], prepend: bool = False) -> None:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
        return args, {**kwargs, name: change(kwargs[name])}

    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)


def _after(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module.register_forward_hook(lambda module, args, output: change(output))


def _lend(module: nn.Module, names: Sequence[str], shared: ReplicatedGradSum) -> None:
    """During a forward of `module`, its weights are those that `shared` has for it."""
    own: dict[str, nn.Parameter] = {}

    def lend(*_: Any) -> None:
        for name in names:
            parameter = module._parameters[name]
            assert parameter is not None
            own[name] = parameter
            module._parameters[name] = shared.used(parameter)  # type: ignore[assignment]

    def take_back(*_: Any) -> None:
        for name, parameter in own.items():
            module._parameters[name] = parameter
        own.clear()

    module.register_forward_pre_hook(lend)
    module.register_forward_hook(take_back, always_call=True)
