"""What of a model counts heads besides its weights.

Tensor parallelism leaves a rank n of the a heads of an attention, and the weights of these. The module around
them has numbers of its own, such as the width at which it splits q, k and v:

    for attention in hpnb.models.attentions(model):
        ...                                          # cut the weights at attention.path
        attention.resize(n)                          # heads as wide as before, n of them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """One attention of a model.

    Attributes:
        path: its module's dotted path in the model.
        heads: how many heads it computes with now.
        resize: makes it compute with another number of heads of the same width. It leaves the weights alone,
            and what their own modules say of their shapes, such as the nf of transformers' Conv1D.
            ValueError for fewer than 1.
    """

    path: str
    heads: int
    resize: Callable[[int], None]


def check_heads(path: str, heads: int) -> None:
    if heads < 1:
        raise ValueError(f"{path} cannot compute with {heads} heads; 1 is the least")
