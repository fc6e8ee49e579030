"""Tensor parallelism: the ranks of an axis share every matrix of a model.

    model = hpnb.tensor_parallel.parallelize(model, mesh.tp, mode="1d", sequence_parallel=True)

What to read for what:

    mode.py                                  what the modes decide about a model: read this first
    parallelize.py, model_checks.py          all of this applied to a model; which models are refused
    replaced_layers.py                       layers to replace that carry what the new ones would not run
    tp_1d.py, tp_1d_linear.py                1D: Megatron's column- and row-parallel layers
    tp_1d_regions.py, parallel_region.py     where 1D's regions begin and end; what their columns read
    sequence_parallel.py                     1D: tokens are sharded between two regions
    split_heads.py, sharded_linear.py        which shard a rank gets; the base class of layers with shards
    grouped_queries.py                       the heads of a key-value head stay with it
    async_all_reduce.py                      the backward's all-reduce overlaps the weight gradients
    tp_2d.py, summa.py, tp_2d_linear.py      2D: SUMMA products on a q x q grid, and their autograd
    tp_25d.py                                2.5D: d such grids, each with other samples
    tp_3d.py, tp_3d_matmul.py                3D: the matrix product on an l x l x l cube
    tp_grid.py, tp_grid_layers.py            what 2D, 2.5D and 3D have in common
    tp_grid_checks.py, activation_layout.py  what sizes a grid needs; how hidden states lie on it
    batch_arguments.py                       masks and the like, split as the grid splits the batch
    async_weight_grads.py                    weight gradients that are summed while the backward goes on
    per_backward_list.py                     what the nodes of one backward note for each other
    vocab_embedding.py                       an embedding that is sharded along the vocabulary
    vocab_cross_entropy.py                   the loss of logits that are sharded along the vocabulary
    sharded_logits.py, lazy_logits.py        how a model uses that loss; outputs that gather logits when read
    sharded_layer_norm.py, replicated_grad_sum.py     norms of a sharded width; gradients of replicated norms
    compare_gradients.py                     a check of the first backward: equal gradients on all ranks
    summed_weights.py                        when a replicated weight goes through the sum of its gradient
    block_dropout.py                         where a block draws from this rank's random state
    module_hooks.py                          forward hooks that a copy of the model gets too
"""

from hpnb.tensor_parallel.parallelize import (
    axes,
    full_gradients,
    full_state_dict,
    load_full_state_dict,
    parallelize,
)
from hpnb.tensor_parallel.vocab_cross_entropy import cross_entropy

__all__ = [
    "axes",
    "cross_entropy",
    "full_gradients",
    "full_state_dict",
    "load_full_state_dict",
    "parallelize",
]
