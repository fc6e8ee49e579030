"""1D tensor parallelism of a whole model: which layers are column- and row-parallel, and what lies between.

    embedding                  vocabulary sharded, the rest replicated: hidden states equal on all ranks
    [split tokens]             with sequence parallelism, before the first block
    block                      norm, [q k v | attention | o], residual, norm, [up | f | down], residual
    [gather tokens]            with sequence parallelism, after the last norm
    head                       vocabulary sharded, logits stay so; a classifier is replicated

[q k v | attention | o] and [up | f | down] are regions (`parallel_region.py`). A region begins before its
column-parallel layers and ends after its row-parallel layer; nothing is sent in between. What does not divide
is split unevenly: 25 heads over 4 ranks are 7, 6, 6 and 6 (`split_heads.py`). The mathematics and the bytes
are in `tp_1d_linear.py` and `sequence_parallel.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from hpnb import comm
from hpnb.dropout_rng import DropoutRng
from hpnb.mesh import Axis
from hpnb.models import Role
from hpnb.models.in_place_cross_entropy import VocabShard
from hpnb.models.registry import is_not_built_in
from hpnb.placement import Cut
from hpnb.ranks.current_rank import device as this_device
from hpnb.split_sizes import split_sizes
from hpnb.tensor_parallel.block_dropout import BlockDropout, draws_in_training
from hpnb.tensor_parallel.compare_gradients import compare_first_gradient
from hpnb.tensor_parallel.mode import ModelToShard, TensorParallelMode
from hpnb.tensor_parallel.module_hooks import (
    after_forward,
    around_forward,
    before_forward,
    change_input,
    change_output,
)
from hpnb.tensor_parallel.parallel_region import ParallelRegion
from hpnb.tensor_parallel.replicated_grad_sum import ReplicatedGradSum
from hpnb.tensor_parallel.sequence_parallel import WITHOUT_IT, SequenceSharding
from hpnb.tensor_parallel.split_heads import is_transposed, split_evenly, split_units
from hpnb.tensor_parallel.summed_weights import EndOfForward, SummedWeights, reader_of
from hpnb.tensor_parallel.tp_1d_linear import ColumnParallelLinear, RowParallelLinear
from hpnb.tensor_parallel.tp_1d_regions import (
    find_regions,
    is_sharded,
    sum_partial_gradients,
    sum_partial_outputs,
)
from hpnb.tensor_parallel.vocab_cross_entropy import cross_entropy, vocab_shard
from hpnb.tensor_parallel.vocab_embedding import VocabParallelEmbedding

_SHAPE_ARGUMENT = "hpnb_batch_shape"  # keyword of a recomputed forward: (b, s), for sequence parallelism


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
            self._check_matrices(model)
            self._last_norm(_head_paths(model), model)

    def _check_convolutions(self, model: ModelToShard) -> None:
        """A convolution in a block would see this rank's tokens alone, without their neighbours."""
        for path, (section, _) in model.layers.items():
            module = model.module.get_submodule(path)
            if section == "block" and isinstance(module, _ConvNd) and max(module.kernel_size) > 1:
                raise ValueError(
                    f"{path} is a {type(module).__name__} with kernel_size={module.kernel_size}, and with "
                    f"sequence parallelism a rank has some of the tokens that it looks at; {WITHOUT_IT}"
                )

    def _check_matrices(self, model: ModelToShard) -> None:
        """A linear layer gathers tokens and sums. A module that multiplies by itself has its tokens alone."""
        for path, (section, roles) in model.layers.items():
            weight, module = roles.get("weight"), model.module.get_submodule(path)
            if section != "block" or (weight is not None and weight.kind in ("column", "row")):
                continue
            sharded = [
                n
                for n, r in roles.items()
                if r.kind == "row" or (r.kind == "column" and r.in_dim is not None)
            ]
            if sharded or (weight is not None and weight.partial_outputs):
                what = f"multiplies by its shards of {' and '.join(sharded)} by itself"
                if not sharded:
                    what = "gives each rank some outputs for its heads alone (partial_outputs)"
                raise ValueError(
                    f"{path} ({type(module).__name__}) {what}, and with sequence parallelism each rank has "
                    "other tokens there, so a sum over the ranks would add different tokens; let it call an "
                    f"nn.Linear for each matrix, or {WITHOUT_IT}"
                )

    def _check_units(self, units: int, what: str, path: str) -> None:
        if units < self.axis.size:
            works = f"use at most {units} {'rank' if units == 1 else 'ranks'} along {self.axis.name}"
            if units == 1 and what != "heads":  # 1 is the default of Role.units, too
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

    def replaces(self, roles: Mapping[str, Role]) -> bool:
        role = roles.get("weight")
        return role is not None and self.axis.size > 1 and is_sharded(role)

    def replace_layer(self, path: str, old: nn.Module, model: ModelToShard) -> nn.Module | None:
        section, roles = model.layers[path]
        if not self.replaces(roles):
            return None
        role = roles["weight"]
        if role.vocabulary is not None and section == "embedding":
            assert isinstance(old, nn.Embedding)
            return VocabParallelEmbedding(old, model.vocab_size_of(path), self.axis)
        if role.vocabulary is not None or role.kind == "column":
            return ColumnParallelLinear(old, is_transposed(roles))
        return RowParallelLinear(old, is_transposed(roles), self.sharding)

    # --- hooks -------------------------------------------------------------------------------------------

    def connect(self, model: ModelToShard) -> None:
        if self.axis.size == 1:
            return
        if self.sharding.enabled:
            change_input(model.anatomy.blocks[0].module, self.sharding.split_tokens)
        draws = draws_in_training(model.module)
        for block in model.anatomy.blocks:
            self._connect_block(block.name, block.module, model, draws)
        vocab_size = model.vocab_size
        if self.sharding.enabled:
            heads = _head_paths(model)
            norm = self._last_norm(heads, model)
            for path in heads[: heads.index(norm) + 1]:
                self._sum_replicated_grads(path, [path], model)
            head_is_replicated = vocab_size is None
            gather_tokens = partial(self.sharding.gather_tokens, head_is_replicated=head_is_replicated)
            change_output(model.module.get_submodule(norm), gather_tokens)
        for path, (section, _) in model.layers.items():
            head = model.module.get_submodule(path)
            if section == "head" and isinstance(head, ColumnParallelLinear):
                if not self.sharding.enabled:  # with it, the backward of gather_tokens sums already
                    head.region = region = ParallelRegion(path, self.sharding, [head])
                    change_input(head, region.begin)
                    head.register_forward_hook(region.end, always_call=True)
                if not model.lazy_logits:
                    change_output(head, partial(comm.gather, axis=self.axis, dim=-1, total=vocab_size))

    def _connect_block(self, name: str, block: nn.Module, model: ModelToShard, draws: bool | None) -> None:
        paths = [path for path in model.layers if path == name or path.startswith(name + ".")]
        if self.sharding.enabled:
            self._sum_replicated_grads(name, paths, model)
            if block is not model.anatomy.blocks[0].module:  # the hook of split_tokens sets it there
                change_input(block, self.sharding.recall_batch_shape)
            self._pass_batch_shape(block, model)
        else:
            self._sum_replicated_grads(name, [p for p in paths if _sums_grads(model.layers[p][1])], model)
            if is_not_built_in(model.module):
                compare_first_gradient(name, block, self.axis)
        for region in find_regions(model, paths, self.sharding):
            self._connect_region(region, model.module.get_submodule(region.path), block)
        for path in paths:
            module, roles = model.module.get_submodule(path), model.layers[path][1]
            sum_partial_outputs(module, roles, self.axis)
            sum_partial_gradients(module, roles, self.axis)
        if draws is not False:
            self._connect_dropout(block, [model.module.get_submodule(path) for path in paths], draws)

    def _pass_batch_shape(self, block: nn.Module, model: ModelToShard) -> None:
        """Give (b, s) to a forward that is recomputed in a backward, when another batch was the last one.

        Checkpointing keeps a forward's arguments, so (b, s) is a keyword argument. A block's own hook adds
        it. Who takes it depends on what is recomputed:

            hpnb.hybrid.recompute        block.forward, without the block's hooks: `_forward_with_shape` does
            transformers' blocks         the forward of their class, which passes keyword arguments on to the
                                         attention: a hook on the attention does
            a checkpoint around a block  the block with its hooks, where `recall_batch_shape` restores (b, s)
        """
        checkpoints_itself = hasattr(block, "gradient_checkpointing")

        def add_shape(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if block.training and (not checkpoints_itself or block.gradient_checkpointing):
                return args, {**kwargs, _SHAPE_ARGUMENT: self.sharding.shape}
            return None

        block.register_forward_pre_hook(add_shape, with_kwargs=True)
        if not checkpoints_itself:
            block.forward = partial(_forward_with_shape, self.sharding, block.forward)  # deepcopy follows it
            return

        def take_shape(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            self.sharding.set_batch_shape(*kwargs.pop(_SHAPE_ARGUMENT, self.sharding.shape))
            return args, kwargs

        modules = set(block.modules())
        for attention in model.attentions:
            module = model.module.get_submodule(attention.path)
            if module in modules:
                module.register_forward_pre_hook(take_shape, with_kwargs=True, prepend=True)

    def _connect_dropout(self, block: nn.Module, layers: Sequence[nn.Module], draws: bool | None) -> None:
        """Dropouts of sharded activations use this rank's state: with sequence parallelism all of a block,
        else those between a column- and a row-parallel layer."""

        dropout = BlockDropout(block, self.dropout_rng, draws)
        if self.sharding.enabled:
            before_forward(block, dropout.use_rank_state)
        else:
            for layer in layers:
                if isinstance(layer, ColumnParallelLinear):
                    after_forward(layer, dropout.use_rank_state)
                elif isinstance(layer, RowParallelLinear):
                    before_forward(layer, dropout.use_common_state)
        around_forward(block, dropout.begin, dropout.end)

    def _connect_region(self, region: ParallelRegion, module: nn.Module, block: nn.Module) -> None:
        """Let the layers of `region`, which are in `module`, share their inputs."""
        for layer in region.layers:
            layer.region = region
        rows = [layer for layer in module.children() if isinstance(layer, RowParallelLinear)]
        if self.sharding.enabled and module is not block and rows == [region.row]:
            module.register_forward_pre_hook(region.gather_arguments, with_kwargs=True)
            module.register_forward_hook(region.check_output)
        module.register_forward_hook(region.end, always_call=True)

    def _sum_replicated_grads(self, path: str, layers: Sequence[str], model: ModelToShard) -> None:
        """Sum the gradients of replicated weights, which a rank uses on some tokens or heads alone.

        Args:
            path: the block or head layer with whose forward the sum begins and ends.
            layers: paths of the modules in it that have the weights.
        """
        grad_sum = ReplicatedGradSum([self.axis])
        forward_end = EndOfForward(grad_sum)
        for layer in layers:
            module = model.module.get_submodule(layer)
            names = [name for name, role in model.layers[layer][1].items() if not is_sharded(role)]
            if not isinstance(module, ColumnParallelLinear | RowParallelLinear):  # which get all tokens
                grad_sum.add(module, *names)
                grad_sums = self._grad_sums.setdefault(module, [])
                grad_sums.append(grad_sum)
                if len(grad_sums) == 1:
                    weights = SummedWeights(layer, module, names, grad_sums)
                    reader = model.module.get_submodule(reader_of(layer, model.module))
                    reader.register_forward_pre_hook(weights.replace)
                    reader.register_forward_hook(weights.restore, always_call=True)
                    forward_end.weights.append(weights)
        around_forward(model.module.get_submodule(path), grad_sum.begin, forward_end.call)

    def _last_norm(self, heads: Sequence[str], model: ModelToShard) -> str:
        norms = [p for p in heads if any(role.kind == "norm" for role in model.layers[p][1].values())]
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
    sharding.set_batch_shape(*kwargs.pop(_SHAPE_ARGUMENT, sharding.shape))
    return forward(*args, **kwargs)


def _head_paths(model: ModelToShard) -> list[str]:
    """Paths of the head's layers in the order of its parts, which a model may define in another order."""
    paths = [path for path, (section, _) in model.layers.items() if section == "head"]
    names = [part.name for part in model.anatomy.head]
    return list(dict.fromkeys(p for n in names for p in paths if p == n or p.startswith(n + ".")))


def _sums_grads(roles: Mapping[str, Role]) -> bool:
    return any(role.sum_grads for role in roles.values())
