"""What 2D, 2.5D and 3D have in common: the batch is sharded over some axes, the hidden size over another.

    embedding                  vocabulary and hidden size sharded; all samples (b, s, h / w)
    [split batch]              before the first block                              (b / r, s, h / w)
    block                      norm, [q k v | attention | o], residual, norm, [up | f | down], residual
    head                       logits of a vocabulary: sharded along both; of classes: replicated

The batch falls into r shards and the hidden size into w. An attention has its heads and its samples to
itself, and gets the mask of those samples. Gradients of what is replicated over shards of the
batch (norms, biases) are summed over them, those of a block together. Inside a block everything is sharded
over all ranks, so each draws dropout independently; before the first block all ranks have the full batch,
and ranks with the same shard of the hidden size draw alike.

Nothing is multiplied in this file. A subclass says how matrices are sharded and multiplied: `tp_2d.py`,
`tp_25d.py`, `tp_3d.py`. What a layout is, is in `activation_layout.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.dropout_rng import DropoutRng
from hpnb.mesh import Axis
from hpnb.models import Role
from hpnb.placement import Cut
from hpnb.ranks.current_rank import device as this_device
from hpnb.tensor_parallel.activation_layout import ActivationLayout, before_and_after
from hpnb.tensor_parallel.batch_arguments import BatchArguments
from hpnb.tensor_parallel.block_dropout import BlockDropout, draws_in_training
from hpnb.tensor_parallel.mode import ModelToShard, TensorParallelMode
from hpnb.tensor_parallel.module_hooks import around_forward, change_input, change_output
from hpnb.tensor_parallel.replicated_grad_sum import ReplicatedGradSum
from hpnb.tensor_parallel.sharded_layer_norm import ShardedLayerNorm
from hpnb.tensor_parallel.split_heads import is_transposed, split_evenly, split_units
from hpnb.tensor_parallel.tp_grid_checks import GridRequirements
from hpnb.tensor_parallel.tp_grid_layers import (
    GridClassifier,
    GridLinear,
    GridVocabHead,
    LogitsProduct,
    MatrixProduct,
    SharedInputLinears,
)
from hpnb.tensor_parallel.vocab_cross_entropy import cross_entropy


class GridMode(TensorParallelMode):
    """A mode on an axis that is split into a grid.

    Attributes:
        hidden_layout: of hidden states between the layers of a block.
        inner_layout: of hidden states between a column and its row: in an attention, and in an MLP.
        defers_weight_grads: whether sums of matrices' gradients overlap the rest of a block's backward.
    """

    hidden_layout: ActivationLayout
    inner_layout: ActivationLayout
    logits_layout: ActivationLayout
    defers_weight_grads: bool

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.device = this_device()
        # By the path of a block, norm or head.
        self._grad_sums_by_part: dict[str, _PartGradSums] = {}
        # By the path of a row, or of the module that has the columns, and how these lie.
        self._shared_input_linears: dict[tuple[Any, ...], SharedInputLinears] = {}

    # --- what a subclass says --------------------------------------------------------------------------

    @abstractmethod
    def matrix_cuts(self, role: Role, shape: Sequence[int]) -> tuple[Cut, ...]:
        """The block of a column's or row's weight that this rank holds."""

    @abstractmethod
    def embedding_cuts(self, vocab_dim: int, hidden_dim: int, shape: Sequence[int]) -> tuple[Cut, ...]:
        """This rank's shard of an embedding over a vocabulary."""

    @abstractmethod
    def matrix_product(self, role: Role) -> MatrixProduct:
        """How X W + b is computed for a column or a row."""

    @abstractmethod
    def logits_product(self, vocab_size: int) -> LogitsProduct:
        """How logits are computed from hidden states and this rank's shard of an embedding."""

    @abstractmethod
    def make_embedding(self, old: nn.Embedding, vocab_size: int) -> nn.Module:
        """What looks up a vocabulary of which each rank has a shard."""

    @abstractmethod
    def extra_divisors(self, role: Role, shape: Sequence[int]) -> Iterator[tuple[str, int, int]]:
        """What else of a matrix must divide: what it is, its size, by what."""

    @abstractmethod
    def describe(self) -> str:
        """Such as "2d grid (2 x 2)"."""

    # --- weights ---------------------------------------------------------------------------------------

    def check(self, model: ModelToShard) -> None:
        if self.axis.size > 1:
            hidden_ranks = self.hidden_layout.hidden_axis.size
            inner_ranks = self.inner_layout.hidden_axis.size
            GridRequirements(self.describe(), hidden_ranks, inner_ranks, self.extra_divisors).check(model)

    def weight_cuts(self, role: Role, shape: Sequence[int]) -> tuple[Cut, ...]:
        if self.axis.size == 1 or not shape:
            return ()
        if role.vocabulary is not None:
            if role.bias:
                return (split_evenly(self.logits_layout.hidden_axis, 0, shape[0]),)
            hidden_dim = role.out_dim if role.in_dim is None else role.in_dim
            return self.embedding_cuts(role.vocabulary, hidden_dim, shape)
        if role.kind in ("column", "row") and not role.bias:
            return self.matrix_cuts(role, shape)
        if role.kind == "column":
            return (split_units(self.inner_layout.hidden_axis, role, 0, shape[0]),)
        if role.kind == "head":
            if role.in_dim is None:
                return ()
            return (split_evenly(self.hidden_layout.hidden_axis, role.in_dim, shape[role.in_dim]),)
        return (split_evenly(self.hidden_layout.hidden_axis, role.out_dim, shape[role.out_dim]),)

    def local_heads(self, heads: int) -> int:
        return heads // self.inner_layout.hidden_axis.size

    # --- layers ----------------------------------------------------------------------------------------

    def replaces(self, roles: Mapping[str, Role]) -> bool:
        role = roles.get("weight")
        if role is None or self.axis.size == 1:
            return False
        return role.vocabulary is not None or role.kind in ("norm", "column", "row", "head")

    def replace_layer(self, path: str, old: nn.Module, model: ModelToShard) -> nn.Module | None:
        """See TensorParallelMode. It also notes what to sum: the gradients of replicated weights of the new
        layer over the batch, and which layers have the same input."""
        section, roles = model.layers[path]
        if not self.replaces(roles):
            return None
        role = roles["weight"]
        if role.vocabulary is not None and section == "embedding":
            assert isinstance(old, nn.Embedding)
            return self.make_embedding(old, model.vocab_size_of(path))
        part = next(p.name for p in model.anatomy.parts if path == p.name or path.startswith(p.name + "."))
        sums = self._grad_sums_by_part.setdefault(part, _PartGradSums())
        if role.vocabulary is not None:
            grad_sum, multiply = (
                sums.over_batch_of(self.logits_layout),
                self.logits_product(model.vocab_size_of(path)),
            )
            new: nn.Module = GridVocabHead(old, multiply, grad_sum, self.defers_weight_grads)
            grad_sum.add(new, "bias")
        elif role.kind == "norm":
            assert isinstance(old, nn.LayerNorm)
            if section == "embedding":  # each rank has the full batch there, so its gradients are complete
                return ShardedLayerNorm(old, self.hidden_layout.hidden_axis, None)
            grad_sum = sums.over_batch_of(self.hidden_layout)
            new = ShardedLayerNorm(old, self.hidden_layout.hidden_axis, grad_sum)
            grad_sum.add(new, "weight", "bias")
        elif role.kind in ("column", "row"):
            group = self._linears_with_same_input(path, role, model.shapes[f"{path}.weight"], sums)
            new = GridLinear(old, group)
            group.grad_sum.add(new, "bias")
        else:
            grad_sum = sums.over_batch_of(self.hidden_layout)
            new = GridClassifier(old, is_transposed(roles), self.hidden_layout, grad_sum)
            grad_sum.add(new, "weight")
        return new

    def _linears_with_same_input(
        self, path: str, role: Role, shape: Sequence[int], sums: _PartGradSums
    ) -> SharedInputLinears:
        """The layers that a layer may be computed with: those columns of a module together that lie alike, a
        row alone."""
        key: tuple[Any, ...] = (path,)
        if role.kind == "column":  # a weight q beside a fused kv is one product more
            assert role.in_dim is not None
            key = (path.rpartition(".")[0], role.in_dim, shape[role.in_dim], role.fused)
        if key not in self._shared_input_linears:
            product = self.matrix_product(role)
            _, after = before_and_after(role, self.hidden_layout, self.inner_layout)
            grad_sum = sums.over_batch_of(after)
            self._shared_input_linears[key] = SharedInputLinears(
                product, grad_sum, role.in_dim == 0, self.defers_weight_grads
            )
            sums.linears.append(self._shared_input_linears[key])
        return self._shared_input_linears[key]

    # --- hooks -----------------------------------------------------------------------------------------

    def connect(self, model: ModelToShard) -> None:
        if self.axis.size == 1:
            return
        module = model.module
        for path, sums in self._grad_sums_by_part.items():
            around_forward(module.get_submodule(path), sums.begin, sums.end)
        self._split_arguments(model)
        if (draws := draws_in_training(module)) is not False:
            self._connect_dropout(model, draws)
        change_input(model.anatomy.blocks[0].module, self._split_batch, prepend=True)
        if getattr(module, "base_model", None) is module:  # without a head: its outputs are hidden states
            module.register_forward_hook(self._gather_hidden)
        elif (vocab_size := model.vocab_size) is not None and not model.lazy_logits:
            *_, head = (path for path, (section, _) in model.layers.items() if section == "head")
            gather_logits = partial(self.gather_logits, vocab_size=vocab_size)
            change_output(module.get_submodule(head), gather_logits)

    def _split_arguments(self, model: ModelToShard) -> None:
        """Blocks and attentions get their samples of masks and the like. In 3d a block has two layouts, and
        only what is named as an attention has one."""
        grid, one_layout = self.describe(), self.hidden_layout == self.inner_layout
        for block in model.anatomy.blocks:
            heads = model.head_counts(block.name)
            arguments = BatchArguments(block.name, self.hidden_layout, grid, not model.attentions, heads)
            if one_layout:
                block.module.register_forward_pre_hook(arguments.split, with_kwargs=True)
            elif not model.attentions:
                block.module.register_forward_pre_hook(arguments.refuse, with_kwargs=True)
            block.module.register_forward_hook(arguments.check_output, with_kwargs=True)
        for path in (attention.path for attention in model.attentions):
            attention = model.module.get_submodule(path)
            arguments = BatchArguments(path, self.inner_layout, grid, heads=model.head_counts(path))
            attention.register_forward_pre_hook(arguments.split, with_kwargs=True)
            attention.register_forward_hook(arguments.check_output, with_kwargs=True)

    def _split_batch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Before the first block: (b, s, h / w) -> (b / r, s, h / w)."""
        batch_size, shards = hidden.size(0), self.hidden_layout.batch_shards
        if batch_size % shards:
            below, above = batch_size // shards * shards, (batch_size // shards + 1) * shards
            raise ValueError(
                f"a batch of {batch_size} samples cannot be split into the {shards} batch shards of this "
                f"{self.describe()}; use {f'{below} or {above}' if below else above}"
            )
        return self.hidden_layout.split_batch(hidden)

    def _gather_hidden(self, model: nn.Module, args: Any, outputs: Any) -> Any:
        if isinstance(outputs, tuple):
            return (self.hidden_layout.gather(outputs[0]), *outputs[1:])
        outputs.last_hidden_state = self.hidden_layout.gather(outputs.last_hidden_state)
        return outputs

    def _connect_dropout(self, model: ModelToShard, draws: bool | None) -> None:
        in_blocks = DropoutRng(self.axis, self.device)
        before_blocks = DropoutRng(self.hidden_layout.hidden_axis, self.device)
        parts = [(part, before_blocks) for part in model.anatomy.embedding]
        parts += [(block, in_blocks) for block in model.anatomy.blocks]
        for part, rng in parts:
            if part.name:  # else parameters of the model itself, which drop nothing
                dropout = BlockDropout(model.module.get_submodule(part.name), rng, draws)
                around_forward(dropout.block, dropout.begin_sharded, dropout.end)

    # --- logits ----------------------------------------------------------------------------------------

    def cross_entropy(
        self, logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, **options: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        local_targets, axis = self.logits_layout.narrow_batch(targets), self.logits_layout.hidden_axis
        total, _ = cross_entropy(logits, local_targets, axis, vocab_size, **options)  # type: ignore[arg-type]
        count = (targets != options.get("ignore_index", IGNORE_INDEX)).sum()  # each rank has all targets
        return self.logits_layout.sum_over_batch(total), count

    def gather_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        return self.logits_layout.gather(logits, vocab_size)


class _PartGradSums:
    """The sums of one block, norm or head, which begin and end with its forward."""

    def __init__(self) -> None:
        self.linears: list[SharedInputLinears] = []
        self._grad_sum_by_axes: dict[tuple[Axis, ...], ReplicatedGradSum] = {}

    def over_batch_of(self, layout: ActivationLayout) -> ReplicatedGradSum:
        """What sums gradients over the batch shards of `layout`."""
        return self._grad_sum_by_axes.setdefault(layout.batch_axes, ReplicatedGradSum(layout.batch_axes))

    def begin(self) -> None:
        for grad_sum in self._grad_sum_by_axes.values():
            grad_sum.begin()
        for linears in self.linears:
            linears.begin()

    def end(self) -> None:
        for grad_sum in self._grad_sum_by_axes.values():
            grad_sum.end()
        for linears in self.linears:
            linears.end()
