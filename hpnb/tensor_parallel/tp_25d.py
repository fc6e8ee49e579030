"""2.5D tensor parallelism of a whole model, on d x q x q ranks: d 2D grids with their own samples.

    hidden states (b, s, h)     batch over depth and down, hidden size across: (b / (d q), s, h / q)
    matrix (in, out)            in down, out across: (in / q, out / q), equal on all d grids

(Wang et al. 2021, "Tesseract", arXiv 2105.14500.) Everything else is as in 2D (`tp_2d.py`), on a batch d
times smaller: a rank sends a d-th of the activations, and in addition, for gradients of weights, norms and
biases,

    depth      2 (d-1)/d * (12 w + 13 h/q)

The sums of weight gradients overlap the rest of a block's backward (`async_weight_grads.py`). Activations are
a p-th, p = d q^2; parameters and gradients are a q^2-th.
"""

from __future__ import annotations

from hpnb.tensor_parallel.tp_2d import TensorParallel2D


class TensorParallel25D(TensorParallel2D):
    """d x q x q ranks, "tp.0" over depth, "tp.1" down and "tp.2" across. All ranks make it at once."""

    name = "2.5d"
    defers_weight_grads = True

    def describe(self) -> str:
        return f"2.5d grid (depth {self.axes[0].size} x {self.down.size} x {self.across.size})"
