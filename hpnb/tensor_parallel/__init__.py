"""Tensor parallelism: the ranks of an axis share every matrix of a model.

    model = hpnb.tensor_parallel.parallelize(model, mesh.tp, mode="1d", sequence_parallel=True)

Where to read what: `column_row.py` (1D and sequence parallelism), `vocabulary.py` and `cross_entropy.py` (a
vocabulary that is cut), `summa.py` and `grid.py` (2D and 2.5D), `cube.py` (3D), `overlap.py` (communication
beside weight gradients), `partial_gradients.py`, `randomness.py` (dropout), `parallelize.py`.
"""

from hpnb.tensor_parallel.cross_entropy import cross_entropy
from hpnb.tensor_parallel.parallelize import (
    axes,
    full_gradients,
    full_state_dict,
    load_full_state_dict,
    parallelize,
)

__all__ = [
    "axes",
    "cross_entropy",
    "full_gradients",
    "full_state_dict",
    "load_full_state_dict",
    "parallelize",
]
