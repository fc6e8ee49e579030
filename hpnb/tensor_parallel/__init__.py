"""Tensor parallelism: the ranks of an axis share every matrix of a model.

    model = hpnb.tensor_parallel.parallelize(model, mesh.tp, mode="1d", sequence_parallel=True)

What to read for what:

    tp_1d.py, tp_1d_linear.py                Megatron's column- and row-parallel layers, sequence parallelism
    parallel_region.py                       which tensors columns read, and where their gradients are summed
    async_all_reduce.py                      the backward's all-reduce overlaps the weight gradients
    tp_2d.py, summa.py, tp_2d_linear.py      2D and 2.5D: SUMMA products on a q x q grid, and their autograd
    tp_3d.py, tp_3d_matmul.py                3D: the matrix product on an l x l x l cube
    tp_grid.py, tp_grid_layers.py            what 2D, 2.5D and 3D have in common
    async_weight_grads.py                    weight gradients that are summed while the backward goes on
    vocab_embedding.py                       an embedding that is sharded along the vocabulary
    vocab_cross_entropy.py                   the loss of logits that are sharded along the vocabulary
    sharded_layer_norm.py, layernorm_grads.py     norms of a sharded width; gradients of replicated norms
    compare_gradients.py                     a check of the first backward: equal gradients on all ranks
    summed_weights.py                        when a replicated weight goes through the sum of its gradient
    dropout_rng.py                           random states of dropout
    parallelize.py                           all of this applied to a model
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
