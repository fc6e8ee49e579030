"""What one transformer layer keeps for its backward: the six published rows, and what they leave out.

In units of s b h bytes, values of 2 bytes, t ranks (Korthikanti et al. 2022, arXiv 2205.05198, table 2):

    no parallelism                                          34 + 5 a s/h
    tensor parallel                                         10 + 24/t + 5 a s/(h t)
    tensor + sequence parallel                              34/t + 5 a s/(h t)
    tensor parallel + selective recomputation               10 + 24/t
    tensor + sequence parallel + selective recomputation    34/t
    full recomputation                                      2

5 a s/h is what attention writes without a fused kernel: softmax, the mask of its dropout, and what dropout
returns, 2 + 1 + 2 bytes for every of a s^2 b scores. A real layer keeps a little more or less than the
formula. `beyond` names every difference, so that the sum is what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpnb.theory.transformer import Block

Recompute = Literal["", "attention", "full"]
BETWEEN, INSIDE, SCORES = "between the pairs", "inside the pairs", "scores"


@dataclass(frozen=True)
class ActivationRow:
    """One row of the table.

    Attributes:
        name: as published.
        parallel: whether the layer is sharded t ways.
        sequence: whether tokens are sharded between its matrices.
        recompute: what the backward recomputes.
    """

    name: str
    parallel: bool = False
    sequence: bool = False
    recompute: Recompute = ""

    def published(self, block: Block, ranks: int = 1) -> float:
        """Bytes on a rank."""
        return sum(self.parts(block, ranks, 1.0).values())

    def parts(self, block: Block, ranks: int, heads_ratio: float) -> dict[str, float]:
        """{what: bytes} on a rank: the formula in its three parts.

        Args:
            heads_ratio: the rank's heads, over an even share.
        """
        t = self._ranks(ranks)
        sbh = float(block.sequence * block.batch * block.hidden)
        if self.recompute == "full":
            return {BETWEEN: 2 * sbh, INSIDE: 0.0, SCORES: 0.0}
        scores = 0.0 if self.recompute else 5 * block.heads * block.sequence / block.hidden * sbh
        return {
            BETWEEN: 10 * sbh / (t if self.sequence else 1),
            INSIDE: (16 + 8 * heads_ratio) * sbh / t,  # of the 24, attention has q, k, v and its output
            SCORES: scores * heads_ratio / t,
        }

    def beyond(
        self,
        block: Block,
        ranks: int = 1,
        *,
        device: str = "cuda",
        fused_attention: bool = False,
        fused_gelu: bool = True,
    ) -> dict[str, float]:
        """{what: bytes} that this library's GPT-2 layer keeps beyond the formula; negative if less.

        Args:
            device: "cuda" or "cpu", where PyTorch keeps a dropout's mask, and a norm's statistics, in the
                values' dtype.
            fused_attention: scaled_dot_product_attention by a flash kernel, instead of one matmul after the
            other.
            fused_gelu: one operator, nn.GELU; False is transformers' gelu_new, written out in Python.
        """
        t = self._ranks(ranks)
        if self.recompute == "full":
            return {}
        tokens, h, mlp = block.sequence * block.batch, block.hidden, block.mlp
        between = tokens / t if self.sequence else tokens
        scores = block.heads * block.sequence * tokens / t  # a s^2 b, of this rank's heads
        extra = {"statistics of two norms": 4.0 * between * (2 if device == "cpu" else 4)}
        if device == "cpu":
            extra["masks of two dropouts, 2 bytes wide"] = 2.0 * between * h
        if fused_attention and not self.recompute:
            extra["scores that a flash kernel does not write"] = -5.0 * scores
            extra["its sum for each head and token"] = 4.0 * block.heads * tokens / t
        elif device == "cpu" and not self.recompute:
            extra["mask of the attention's dropout, 2 bytes wide"] = scores
        if not fused_gelu:
            extra["gelu_new's steps"] = 3 * 2.0 * tokens * mlp / t
        if self.sequence:
            extra["inputs of column layers, not cut"] = 2 * 2.0 * tokens * h * (1 - 1 / t)
        return extra

    def _ranks(self, ranks: int) -> int:
        if ranks < 1:
            raise ValueError(f"{ranks} ranks share nothing; use 1 or more")
        return ranks if self.parallel else 1


_SELECTIVE = " + selective recomputation"
ACTIVATION_ROWS: tuple[ActivationRow, ...] = (
    ActivationRow("no parallelism"),
    ActivationRow("tensor parallel", True),
    ActivationRow("tensor + sequence parallel", True, True),
    ActivationRow("tensor parallel" + _SELECTIVE, True, False, "attention"),
    ActivationRow("tensor + sequence parallel" + _SELECTIVE, True, True, "attention"),
    ActivationRow("full recomputation", recompute="full"),
)
