"""The base classes of layers whose parameters are sharded: they take over those of the layer they replace."""

from __future__ import annotations

from torch import nn


class ShardedLayer(nn.Module):
    """Replaces an nn.Linear or a Conv1D and takes over its Parameters, of which this rank has a shard."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.register_parameter("weight", old.get_parameter("weight"))
        self.register_parameter("bias", getattr(old, "bias", None))
        self.train(old.training)

    def extra_repr(self) -> str:
        return f"shard={tuple(self.weight.shape)}, bias={self.bias is not None}"


class ShardedLinear(ShardedLayer):
    """A linear layer whose weight is (out, in), or (in, out) if `transposed`.

    Attributes:
        adds_bias: whether this rank adds the bias. If not, another rank does; all compute its gradient.
    """

    def __init__(self, old: nn.Module, transposed: bool, adds_bias: bool = True) -> None:
        super().__init__(old)
        self.transposed, self.adds_bias = transposed, adds_bias

    def extra_repr(self) -> str:
        shape = tuple(self.weight.shape) if self.transposed else tuple(self.weight.shape[::-1])
        return f"in={shape[0]}, out={shape[1]}, bias={self.bias is not None}"
