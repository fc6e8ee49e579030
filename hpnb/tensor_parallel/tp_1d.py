"""1D tensor parallelism of a whole model: which layers are column- and row-parallel, and what lies between.

    embedding                  vocabulary sharded, the rest replicated: hidden states equal on all ranks
    [split tokens]             with sequence parallelism, before the first block
    block                      norm, [q k v | attention | o], residual, norm, [up | f | down], residual
    [gather tokens]            with sequence parallelism, after the last norm
    head                       vocabulary sharded, logits stay so; a classifier is replicated

The brackets are regions (`async_all_reduce.py`): in at a column-parallel layer, out at a row-parallel layer.
What does not divide is split unevenly: 25 heads over 4 ranks are 7, 6, 6 and 6 (`split_heads.py`). The
mathematics and the bytes are in `tp_1d_linear.py` and `sequence_parallel.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from hpnb import comm
from hpnb.mesh import Axis
from hpnb.models import Role
from hpnb.models.in_place_cross_entropy import VocabShard
from hpnb.placement import Cut
from hpnb.ranks.current_rank import device as this_device
from hpnb.split_sizes import split_sizes
from hpnb.tensor_parallel.dropout_rng import DropoutRng, has_dropout
from hpnb.tensor_parallel.layernorm_grads import ReplicatedGradSum
from hpnb.tensor_parallel.mode import ModelToShard, TensorParallelMode
from hpnb.tensor_parallel.module_hooks import around_forward, change_input, change_output
from hpnb.tensor_parallel.sequence_parallel import SequenceSharding
from hpnb.tensor_parallel.split_heads import is_transposed, split_evenly, split_units
from hpnb.tensor_parallel.tp_1d_linear import ColumnParallelLinear, ParallelRegion, RowParallelLinear
from hpnb.tensor_parallel.tp_1d_regions import connect_partial_outputs, find_regions, is_sharded
from hpnb.tensor_parallel.vocab_cross_entropy import cross_entropy, vocab_shard
from hpnb.tensor_parallel.vocab_embedding import VocabParallelEmbedding

_SHAPE = "hpnb_shape"


class TensorParallel1D(TensorParallelMode):
    """Column-parallel, then row-parallel layers over all ranks of one axis."""

    name = "1d"

    def __init__(self, axis: Axis, sequence_parallel: bool, overlap: bool = True) -> None:
        self.axes = (axis,)
        self.axis = axis
        self.sharding = SequenceSharding(axis, sequence_parallel, this_device(), overlap)
        self.dropout_rng = DropoutRng(axis, this_device())
        self._grad_sums: dict[nn.Module, list[ReplicatedGradSum]] = {}  # a norm may serve several blocks

    # --- weights -----------------------------------------------------------------------------------------

    def check(self, model: ModelToShard) -> None:
        for attention in model.attentions:
            self._check_units(attention.heads, "heads", attention.path)
        for name, role in model.roles.items():
            if role.cut_dim is not None and not role.bias:
                self._check_units(role.units, "units (pieces that are not split)", name)

        if self.sharding.enabled:
            self._check_convolutions(model)

    def _check_convolutions(self, model: ModelToShard) -> None:
        """A convolution between two pairs would see this rank's tokens alone, without their neighbours."""
        for path, (section, _) in model.layers.items():
            module = model.module.get_submodule(path)
            if section == "block" and isinstance(module, _ConvNd) and max(module.kernel_size) > 1:
                raise ValueError(
                    f"{path} is a {type(module).__name__} with kernel_size={module.kernel_size}, and with "
                    "sequence parallelism a rank has some of the tokens that it looks at; use "
                    "enable_sequence_parallelism=False, which is sequence_parallel=False of parallelize"
                )

    def _check_units(self, units: int, what: str, path: str) -> None:
        if units < self.axis.size:
            works = f"use at most {units} ranks along {self.axis.name}"
            if units == 1 and what != "heads":  # what a role has that says nothing
                works = f"say units= in its role (its heads, or hidden columns), or {works}"
            raise ValueError(f"{path} has {units} {what}, which {self.axis.size} ranks cannot share; {works}")

    def weight_cuts(self, role: Role, shape: Sequence[int]) -> tuple[Cut, ...]:
        if self.axis.size == 1 or not is_sharded(role):
            return ()
        if role.vocabulary is not None:
            return (split_evenly(self.axis, role.vocabulary, shape[role.vocabulary]),)
        assert role.cut_dim is not None
        return (split_units(self.axis, role, role.cut_dim, shape[role.cut_dim]),)

    @property
    def set_batch_shape(self) -> Callable[[int, int], None] | None:
        return self.sharding.set_batch_shape if self.sharding.enabled else None

    def local_heads(self, heads: int) -> int:
        return split_sizes(heads, self.axis.size)[self.axis.rank]

    # --- layers ------------------------------------------------------------------------------------------

    def replace_layer(self, path: str, old: nn.Module, model: ModelToShard) -> nn.Module | None:
        section, roles = model.layers[path]
        role = roles.get("weight")
        if role is None or self.axis.size == 1:
            return None
        if role.vocabulary is not None and section == "embedding":
            assert isinstance(old, nn.Embedding)
            return VocabParallelEmbedding(old, model.vocab_size_of(path), self.axis)
        if role.vocabulary is not None or role.kind == "column":
            return ColumnParallelLinear(old, is_transposed(roles))
        if role.kind == "row":
            return RowParallelLinear(old, is_transposed(roles), self.sharding)
        return None

    # --- hooks -------------------------------------------------------------------------------------------

    def connect(self, model: ModelToShard) -> None:
        if self.axis.size == 1:
            return
        if self.sharding.enabled:
            change_input(model.anatomy.blocks[0].module, self.sharding.split_tokens)
        drops = has_dropout(model.module)
        for block in model.anatomy.blocks:
            self._connect_block(block.name, block.module, model, drops)
        vocab_size = model.vocab_size
        if self.sharding.enabled:
            norm = self._last_norm(model)
            self._sum_replicated_grads(norm, [norm], model)
            replicated = vocab_size is None  # the head is not sharded, and each rank computes all of it
            change_output(
                model.module.get_submodule(norm), lambda x: self.sharding.gather_tokens(x, replicated)
            )
        for path, (section, _) in model.layers.items():
            head = model.module.get_submodule(path)
            if section == "head" and isinstance(head, ColumnParallelLinear):
                if not self.sharding.enabled:
                    self._make_region(head, [head])
                if not model.lazy_logits:
                    change_output(head, lambda z: comm.gather(z, self.axis, -1, vocab_size))

    def _connect_block(self, name: str, block: nn.Module, model: ModelToShard, drops: bool) -> None:
        paths = [path for path in model.layers if path.startswith(name + ".")]
        if self.sharding.enabled:
            self._sum_replicated_grads(name, paths, model)
            if block is not model.anatomy.blocks[0].module:  # which splits the tokens
                change_input(block, self.sharding.recall_batch_shape)
            self._pass_batch_shape(block, model)
        else:
            self._sum_replicated_grads(name, [p for p in paths if _sums_grads(model.layers[p][1])], model)
        for parent, layers in find_regions(model, block, paths, self.sharding.enabled):
            self._make_region(parent, layers)
        for path in paths:
            connect_partial_outputs(model.module.get_submodule(path), model.layers[path][1], self.axis)
        if drops:
            self._connect_dropout(block, [model.module.get_submodule(path) for path in paths])

    def _pass_batch_shape(self, block: nn.Module, model: ModelToShard) -> None:
        """Activation checkpointing keeps a block's keyword arguments, and runs its forward again without the
        block's hooks. So the batch's shape is a keyword argument. The block's forward takes it; but where
        transformers checkpoints inside of that forward, the attention takes it, to which it is passed on."""
        checkpoints_itself = hasattr(block, "gradient_checkpointing")

        def add_shape(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if block.training and (block.gradient_checkpointing if checkpoints_itself else True):
                return args, {**kwargs, _SHAPE: self.sharding.shape}
            return None

        block.register_forward_pre_hook(add_shape, with_kwargs=True)
        if not checkpoints_itself:
            block.forward = partial(_forward_with_shape, self.sharding, block.forward)  # deepcopy follows it
            return

        def take_shape(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            self.sharding.set_batch_shape(*kwargs.pop(_SHAPE, self.sharding.shape))
            return args, kwargs

        modules = set(block.modules())
        for attention in model.attentions:
            module = model.module.get_submodule(attention.path)
            if module in modules:
                module.register_forward_pre_hook(take_shape, with_kwargs=True, prepend=True)

    def _connect_dropout(self, block: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Sharded activations draw from this rank's state: with sequence parallelism all of a block, else
        what lies between a column- and a row-parallel layer."""

        def draw_independently(x: torch.Tensor) -> torch.Tensor:
            if block.training:
                self.dropout_rng.use_rank_state()
            return x

        def draw_alike(x: torch.Tensor) -> torch.Tensor:
            self.dropout_rng.use_common_state()
            return x

        if self.sharding.enabled:
            change_input(block, draw_independently)
        else:
            for layer in layers:
                if isinstance(layer, ColumnParallelLinear):
                    change_output(layer, draw_independently)
                elif isinstance(layer, RowParallelLinear):
                    change_input(layer, draw_alike)
        around_forward(block, self.dropout_rng.discard_rank_state, self.dropout_rng.use_common_state)

    def _make_region(
        self, parent: nn.Module, layers: Sequence[ColumnParallelLinear | RowParallelLinear]
    ) -> None:
        region = ParallelRegion(self.sharding, layers)
        change_input(parent, region.begin)
        parent.register_forward_hook(lambda *_: region.end(), always_call=True)

    def _sum_replicated_grads(self, part: str, paths: Sequence[str], model: ModelToShard) -> None:
        """Sum the gradients of `part`'s replicated weights, which a rank uses on its tokens alone."""
        grad_sum = ReplicatedGradSum([self.axis])
        for path in paths:
            module = model.module.get_submodule(path)
            names = [name for name, role in model.layers[path][1].items() if not is_sharded(role)]
            if not isinstance(module, ColumnParallelLinear | RowParallelLinear):  # these see all tokens
                grad_sum.add(module, *names)
                grad_sums = self._grad_sums.setdefault(module, [])
                grad_sums.append(grad_sum)
                if len(grad_sums) == 1:
                    _use_summed_weights(module, names, grad_sums)
        around_forward(model.module.get_submodule(part), grad_sum.begin, grad_sum.end)

    def _last_norm(self, model: ModelToShard) -> str:
        norms = [
            path
            for path, (section, roles) in model.layers.items()
            if section == "head" and any(role.kind == "norm" for role in roles.values())
        ]
        if not norms:
            raise ValueError(
                f"sequence parallelism ends at the norm in the head, and this {type(model.module).__name__} "
                "has none there; use sequence_parallel=False"
            )
        return norms[-1]

    # --- logits ------------------------------------------------------------------------------------------

    def cross_entropy(
        self, logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, **options: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return cross_entropy(logits, targets, self.axis, vocab_size, **options)  # type: ignore[arg-type]

    def vocab_shard(self, vocab_size: int) -> VocabShard | None:
        return vocab_shard(self.axis, vocab_size)

    def gather_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        return comm.gather(logits, self.axis, -1, vocab_size)


def _forward_with_shape(
    sharding: SequenceSharding, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    sharding.set_batch_shape(*kwargs.pop(_SHAPE, sharding.shape))
    return forward(*args, **kwargs)


def _sums_grads(roles: Mapping[str, Role]) -> bool:
    return any(role.sum_grads for role in roles.values())


def _use_summed_weights(
    module: nn.Module, names: Sequence[str], grad_sums: Sequence[ReplicatedGradSum]
) -> None:
    """During a forward of `module`, its weights are those that the sum of the running block makes of them."""
    parameters: dict[str, nn.Parameter] = {}

    def replace(*_: Any) -> None:
        grad_sum = next((one for one in grad_sums if one.is_begun), grad_sums[0])
        for name in names:
            parameter = module._parameters[name]
            assert parameter is not None
            parameters[name] = parameter
            module._parameters[name] = grad_sum.weight(parameter)  # type: ignore[assignment]

    def restore(*_: Any) -> None:
        for name, parameter in parameters.items():
            module._parameters[name] = parameter
        parameters.clear()

    module.register_forward_pre_hook(replace)
    module.register_forward_hook(restore, always_call=True)
