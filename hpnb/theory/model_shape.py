"""The size of a transformer in numbers, grouped queries, gated MLPs and other vocabularies included.

A block of hidden size h has H query heads and K key-value heads of d values, and an MLP of n inner values:

    q 2 T h H d      k, v 4 T h K d      out 2 T h H d      MLP 4 T h n, gated 6 T h n       forward FLOPs
    scores and weighted values     4 T s H d                              of T tokens in sequences of s

K = H, d = h / H and n = 4 h is a GPT-2. Where a block has E experts, each is an MLP, a router of h E weights
sends every token to k of them, and the MLP's FLOPs are k times as many. Ainslie et al. 2023 (arXiv
2305.13245) for grouped queries, Shazeer 2020 (arXiv 2002.05202) for gated MLPs, Jiang et al. 2024 (arXiv
2401.04088) for Mixtral.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

IMAGE_CHANNELS = 3


@dataclass(frozen=True)
class ModelShape:
    """A transformer.

    Attributes:
        kv_heads, head_size: key-value heads, and values of a head.
        mlp: inner values of an MLP, which is one expert where there are experts.
        outputs: the vocabulary size, or the classes of a classifier.
        embedding_parameters: of everything before the blocks.
        head_parameters: of the output layer; 0 if it is tied to the embedding.
        gated: an MLP has two matrices in, whose results are multiplied.
        causal: a token attends to those before it alone, and every token has outputs.
        qkv_bias, out_bias, mlp_bias, norm_bias: which parts have biases.
        norms: of a block, and qk_norm: two more of a head's values.
        positions: the longest sequence; an image has exactly so many tokens.
        experts, chosen: of every block, and those of them that a token goes to; 0 experts is one MLP.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    outputs: int
    embedding_parameters: int
    head_parameters: int
    positions: int
    gated: bool = False
    causal: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    norms: int = 2
    qk_norm: bool = False
    experts: int = 0
    chosen: int = 1

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_size", "mlp", "outputs", "positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self.name}: {name}={getattr(self, name)} is not a size; use 1 or more")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.name}: {self.heads} heads do not divide into groups for {self.kv_heads} key-value "
                f"heads; use a divisor of {self.heads}"
            )
        if self.experts and not 1 <= self.chosen <= self.experts:
            raise ValueError(
                f"{self.name}: a token cannot go to {self.chosen} of {self.experts} experts; use 1 to "
                f"{self.experts}"
            )

    @cached_property
    def attention_weights(self) -> int:
        """Parameters of a block's attention matrices."""
        return self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)

    @cached_property
    def mlp_weights(self) -> int:
        """Parameters of the matrices of an MLP, or of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.mlp

    @cached_property
    def expert_parameters(self) -> int:
        """Of all experts of a block: what expert parallelism shards."""
        return self.experts * self.mlp_weights

    @cached_property
    def dense_weights(self) -> int:
        """Parameters of the matrices that every token passes: attention and MLP, or attention and router."""
        return self.attention_weights + (self.experts * self.hidden if self.experts else self.mlp_weights)

    @cached_property
    def active_weights(self) -> int:
        """Parameters of the matrices of a block that one token passes."""
        return self.dense_weights + (self.chosen * self.mlp_weights if self.experts else 0)

    @cached_property
    def block_parameters(self) -> int:
        h, d = self.hidden, self.head_size
        biases = (
            self.qkv_bias * d * (self.heads + 2 * self.kv_heads)
            + self.out_bias * h
            + self.mlp_bias * ((1 + self.gated) * self.mlp + h)
        )
        norms = self.norms * h * (1 + self.norm_bias) + 2 * d * self.qk_norm
        return self.dense_weights + self.expert_parameters + biases + norms

    @cached_property
    def parameters(self) -> int:
        """All of them; a tied table counts once."""
        ends = self.embedding_parameters + self.head_parameters + self.hidden * (1 + self.norm_bias)
        return self.layers * self.block_parameters + ends

    @property
    def active_parameters(self) -> int:
        """Those that one token passes."""
        idle = self.experts - self.chosen if self.experts else 0
        return self.parameters - self.layers * idle * self.mlp_weights

    @property
    def tied(self) -> bool:
        return self.head_parameters == 0

    def output_tokens(self, sequence: int) -> int:
        """Tokens of a sample that have outputs."""
        return sequence if self.causal else 1

    def block_forward_flops(self, samples: float, sequence: int) -> float:
        """Matmul FLOPs of a block. A causal mask skips nothing here."""
        tokens = samples * sequence
        linear = 2.0 * tokens * self.active_weights
        return linear + 4.0 * tokens * sequence * self.heads * self.head_size

    def training_flops(self, samples: float, sequence: int) -> float:
        """Matmul FLOPs of forward and backward, nothing recomputed, the outputs' included."""
        head = 6.0 * samples * self.output_tokens(sequence) * self.hidden * self.outputs
        return 3 * self.layers * self.block_forward_flops(samples, sequence) + head
