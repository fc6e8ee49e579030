"""How large a GPT-2 is, in numbers alone: nothing is built to count its parameters and FLOPs.

              hidden  layers  heads    mlp  vocab_size  length   parameters
    laptop       100       4      5    400         509     128         0.5 M
    124m         768      12     12   3072       50257    1024         124 M
    355m        1024      24     16   4096       50257    1024         355 M
    774m        1280      36     20   5120       50257    1024         774 M
    1.5b        1600      48     25   6400       50257    1024        1558 M

The last four are those of Radford et al. 2019, "Language models are unsupervised multitask learners", table
2. It says 117 M to 1542 M; the models that were released have 124 M to 1558 M. Five heads and 509 tokens,
both prime, do not divide on a laptop, as 25 heads and 50257 tokens do not at full size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpnb.theory.transformer import Block


@dataclass(frozen=True)
class GPT2Size:
    """The shape of a GPT-2.

    Attributes:
        hidden, layers, heads: of the transformer; a head is hidden / heads wide.
        mlp: neurons of an MLP.
        vocab_size: how many tokens the vocabulary has.
        length: positions, the longest sequence.

    Raises:
        ValueError: a size below 1, or sizes that do not divide.
    """

    hidden: int
    layers: int
    heads: int
    mlp: int
    vocab_size: int
    length: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                raise ValueError(f"GPT2Size {name}={size} is not a size; use 1 or more")
        self.block()  # refuses heads that do not divide hidden

    def block(self, batch: int = 1, length: int | None = None, bytes_per_value: int = 2) -> Block:
        """One of the blocks, for `batch` sequences of `length` tokens, as hpnb.theory counts it."""
        length = self.length if length is None else length
        return Block(self.hidden, self.heads, length, batch, self.mlp / self.hidden, bytes_per_value)

    def parameters(self, classes: int | None = None) -> int:
        """V h for tokens, s h for positions, the blocks, and 2 h for the last norm.

        The output layer is tied to the embedding and counts once. A classifier adds c h.
        """
        embedding = (self.vocab_size + self.length) * self.hidden
        head = 2 * self.hidden + (classes or 0) * self.hidden
        return embedding + self.layers * self.block().parameters + head

    def training_flops(self, batch: int, length: int | None = None, classes: int | None = None) -> int:
        """Matmul FLOPs of forward and backward of `batch` sequences, nothing recomputed.

        blocks          24 b s h^2 + 4 b s^2 h each, at mlp = 4 h     three times
        logits          2 b s h V, or 2 b s h c of a classifier       three times

        A classifier takes the logits of all tokens, and then those of the last. Looking up is no matmul.

        Args:
            length: tokens of a sequence, by default as many as there are positions.
        """
        length = self.length if length is None else length
        outputs = self.vocab_size if classes is None else classes
        blocks = self.layers * self.block(batch, length).training_flops
        return blocks + 3 * (2 * batch * length * self.hidden * outputs)

    @classmethod
    def of(cls, config: Any) -> GPT2Size:
        """The size that a transformers GPT2Config describes."""
        return cls(
            config.n_embd,
            config.n_layer,
            config.n_head,
            config.n_inner if config.n_inner is not None else 4 * config.n_embd,
            config.vocab_size,
            config.n_positions,
        )


GPT2_SIZES = {
    "laptop": GPT2Size(hidden=100, layers=4, heads=5, mlp=400, vocab_size=509, length=128),
    "124m": GPT2Size(hidden=768, layers=12, heads=12, mlp=3072, vocab_size=50257, length=1024),
    "355m": GPT2Size(hidden=1024, layers=24, heads=16, mlp=4096, vocab_size=50257, length=1024),
    "774m": GPT2Size(hidden=1280, layers=36, heads=20, mlp=5120, vocab_size=50257, length=1024),
    "1.5b": GPT2Size(hidden=1600, layers=48, heads=25, mlp=6400, vocab_size=50257, length=1024),
}
