"""The pieces of a model that has been cut: a pipeline runs them one by one, without the model's own forward.

What the model's forward would have told the blocks comes from the batch, which every stage has; and the
outputs of the head have cut logits, as those of the model have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hpnb.models.model_anatomy import Anatomy, Inputs, Part


@dataclass(frozen=True)
class TensorParallelAnatomy(Anatomy):
    """An anatomy around another.

    Attributes:
        inner: of the model as if it had not been cut.
        begin: told how many rows and tokens a batch has, before a block runs on it; None if nobody asks.
        outputs: what is done to the model's outputs: (outputs, inputs) -> outputs; None leaves them.
    """

    inner: Anatomy = field(kw_only=True)
    begin: Callable[[int, int], None] | None = field(kw_only=True)
    outputs: Callable[[Any, Inputs], Any] | None = field(kw_only=True)

    def embed(self, inputs: Inputs) -> torch.Tensor:
        return self._own.embed(inputs)

    def run(self, block: Part, hidden: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        if self.begin is not None:
            self.begin(*self.inner.tokens(inputs))
        return self._own.run(block, hidden, inputs)

    def finish(self, hidden: torch.Tensor, inputs: Inputs) -> Any:
        if self.begin is not None:
            self.begin(*self.inner.tokens(inputs))
        found = self._own.finish(hidden, inputs)
        return found if self.outputs is None else self.outputs(found, inputs)

    def tokens(self, inputs: Inputs) -> tuple[int, int]:
        return self.inner.tokens(inputs)

    @property
    def _own(self) -> Anatomy:
        """The inner one with the parts that this one has: a pipeline's layer has some of them."""
        return replace(self.inner, embedding=self.embedding, blocks=self.blocks, head=self.head)


def around(
    inner: Anatomy,
    begin: Callable[[int, int], None] | None,
    outputs: Callable[[Any, Inputs], Any] | None,
) -> TensorParallelAnatomy:
    return TensorParallelAnatomy(
        inner.embedding, inner.blocks, inner.head, inner.tied, causal=inner.causal, inner=inner, begin=begin,
        outputs=outputs,
    )  # fmt: skip
