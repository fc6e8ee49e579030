"""What a model must be like for 2D, 2.5D and 3D: hidden size and heads divide by the sides of the grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from hpnb.models import Role
from hpnb.tensor_parallel.activation_layout import before_and_after
from hpnb.tensor_parallel.mode import ModelToShard


@dataclass(frozen=True)
class GridRequirements:
    """What a grid asks of a model's sizes.

    Attributes:
        description: such as "2d grid (2 x 2)".
        hidden_ranks: the ranks that share the hidden size between the layers of a block.
        inner_ranks: the ranks that share the width, and the heads, between a column and its row.
        extra_divisors: (role, shape) -> what else of a matrix must divide: what it is, its size, by what.
    """

    description: str
    hidden_ranks: int
    inner_ranks: int
    extra_divisors: Callable[[Role, Sequence[int]], Iterable[tuple[str, int, int]]]

    def check(self, model: ModelToShard) -> None:
        """Raises ValueError, with the numbers and what comes nearest, if `model` cannot be sharded so."""
        for attention in model.attentions:
            self._check_divides(attention.path, attention.heads, "heads", self.inner_ranks)
        for path in model.layers:
            self._check_layer(path, model)
        for path, module in model.module.named_modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm) and path not in model.layers:
                raise ValueError(
                    f"{path} has no weight to shard, and would norm the shard of the width that a rank of "
                    f"a {self.description} has; use mode='1d'"
                )

    def _check_layer(self, path: str, model: ModelToShard) -> None:
        (section, roles), module = model.layers[path], model.module.get_submodule(path)
        for attribute, role in roles.items():  # vectors too, such as a class token
            if role.kind in ("embedding", "norm"):
                name = f"{path}.{attribute}" if path else attribute
                shape = model.shapes[name]
                if not shape:
                    raise ValueError(
                        f"{name} is a scalar, and a {self.description} shards every parameter that makes "
                        "hidden states along the width; use mode='1d'"
                    )
                self._check_divides(name, shape[role.out_dim], "values along the width", self.hidden_ranks)
        weight = roles.get("weight")
        if weight is None:
            return
        if weight.kind in ("column", "row"):
            self._check_matrix(path, weight, model.shapes[f"{path}.weight"])
        elif weight.kind == "norm" and not (isinstance(module, nn.LayerNorm) and section != "block"):
            self._check_norm(path, module, model)
        bias = roles.get("bias")
        if weight.vocabulary is not None and section == "head" and bias and bias.vocabulary is None:
            raise ValueError(f"{path}.bias has a value a token, and its role must say so: vocabulary=0")

    def _check_matrix(self, path: str, role: Role, shape: Sequence[int]) -> None:
        if role.in_dim is None:
            raise ValueError(f"{path} has no dim of inputs, which a {self.description} shards; use mode='1d'")
        before, after = before_and_after(role, self.hidden_ranks, self.inner_ranks)
        self._check_divides(path, role.units, "pieces that must stay whole", self.inner_ranks)
        self._check_divides(path, shape[role.in_dim], "inputs", before)
        self._check_divides(path, shape[role.out_dim] // role.fused, "outputs", after)
        for what, size, divisor in self.extra_divisors(role, shape):
            self._check_divides(path, size, what, divisor)

    def _check_norm(self, path: str, module: nn.Module, model: ModelToShard) -> None:
        if not isinstance(module, nn.LayerNorm):
            raise ValueError(
                f"{path} is a {type(module).__name__}, and a {self.description}, which shards the width, "
                "knows only nn.LayerNorm; use mode='1d'"
            )
        inputs = {
            model.shapes[f"{other}.weight"][role.in_dim]
            for other, (_, roles) in model.layers.items()
            if (role := roles.get("weight")) is not None and role.kind == "column" and role.in_dim is not None
        }
        if inputs and tuple(module.normalized_shape) not in {(h,) for h in inputs}:
            raise ValueError(
                f"{path} norms {tuple(module.normalized_shape)}, not the {max(inputs)} values of a token, "
                f"which is what a {self.description} shards; use mode='1d'"
            )

    def _check_divides(self, path: str, size: int, what: str, divisor: int) -> None:
        if size % divisor:
            below, above = size // divisor * divisor, (size // divisor + 1) * divisor
            near = f"{below} or {above}" if below else str(above)
            raise ValueError(
                f"{path} has {size} {what}, and a {self.description} needs a multiple of {divisor}; {near} "
                "would work, or mode='1d'"
            )
