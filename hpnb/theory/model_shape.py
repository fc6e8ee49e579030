"""The size of a transformer in numbers: grouped queries, latent attention, gated MLPs and experts included.

A block of hidden size h has H query heads and K key-value heads of d values, and an MLP of n inner values:

    q 2 T h H d      k, v 4 T h K d      out 2 T h H d      MLP 4 T h n, gated 6 T h n       forward FLOPs
    scores and weighted values     4 T s H d                              of T tokens in sequences of s

K = H, d = h / H and n = 4 h is a GPT-2. Where a block has E experts, each is an MLP, a router of h E weights
sends every token to k of them, and the MLP's FLOPs are k times as many. DeepSeek adds shared experts, which
every token passes, and its first blocks have one MLP instead of experts.

Latent attention computes queries from a vector of q_lora_rank values, and keys and values from one of
kv_lora_rank. A head's query and key have d values, of which all heads share the key's last r, which rotate;
its value has v. Written as weights of a block, with Q and L for the ranks:

    q down h Q, up Q H d      k, v down h (L + r), up L H (d - r + v)      out H v h
    scores and weighted values     2 T s H (d + v)

A module of multi-token prediction (MTP), for the token after the next, is one more block behind a projection
of 2 h^2 weights, with three RMS norms. Embedding and outputs are the model's, and work once more.

Ainslie et al. 2023 (arXiv 2305.13245) for grouped queries, Shazeer 2020 (arXiv 2002.05202) for gated MLPs,
Jiang et al. 2024 (arXiv 2401.04088) for Mixtral, DeepSeek-AI 2024 (arXiv 2405.04434) for latent attention,
DeepSeek-AI 2024 (arXiv 2412.19437, section 2.2) for MTP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        shared_mlp: inner values of the experts that every token passes besides.
        wide_router: it computes in float32, so that a float32 copy of its input is kept.
        dense_layers, dense_mlp: the first blocks, which have no experts but one MLP of so many inner values.
        beside_experts: it describes blocks without experts of a model that has some elsewhere.
        kv_lora_rank: of latent attention; 0 is another attention.
        q_lora_rank: of latent attention; 0 computes queries from hidden values.
        rope_head_size: of a head's values in latent attention, those that rotate.
        value_head_size: of a head's values that are weighted; 0 is head_size.
        shards_attention: False where tensor parallelism leaves a copy of the attention on every rank.
        mtp_modules: of multi-token prediction, behind the blocks. Every rank of tp has their projections.
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
    shared_mlp: int = 0
    wide_router: bool = False
    dense_layers: int = 0
    dense_mlp: int = 0
    beside_experts: bool = False
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    rope_head_size: int = 0
    value_head_size: int = 0
    shards_attention: bool = True
    mtp_modules: int = 0

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
        if self.dense_layers and not (self.experts and self.dense_mlp and self.dense_layers < self.layers):
            raise ValueError(
                f"{self.name}: {self.dense_layers} of {self.layers} blocks without experts need an MLP "
                f"(dense_mlp={self.dense_mlp}), and the others {self.experts} experts; use experts=0 for a "
                "model without any"
            )

    # --- blocks ----------------------------------------------------------------------------------------

    @cached_property
    def dense_block(self) -> ModelShape:
        """The model as if all its blocks were like the first `dense_layers`."""
        return replace(self, experts=0, chosen=1, shared_mlp=0, mlp=self.dense_mlp or self.mlp,
                       dense_layers=0, dense_mlp=0, beside_experts=self.experts > 0)  # fmt: skip

    def dense_blocks(self, start: int, stop: int) -> int:
        """How many of the blocks from `start` to `stop`, which does not count, have no experts."""
        return max(0, min(stop, self.dense_layers) - start)

    @property
    def blocks(self) -> int:
        """All of them, those of MTP modules included, which come last."""
        return self.layers + self.mtp_modules

    @property
    def expert_layers(self) -> int:
        """Blocks with experts."""
        return self.blocks - self.dense_layers if self.experts else 0

    # --- one block: of models with `dense_layers`, one with experts --------------------------------------

    @property
    def value_size(self) -> int:
        """Values of a head that are weighted and added up."""
        return self.value_head_size or self.head_size

    @property
    def rotated_values(self) -> int:
        """Values of a token's queries and keys that rotate. In latent attention all heads share the key's."""
        if self.kv_lora_rank:
            return (self.heads + 1) * self.rope_head_size
        return (self.heads + self.kv_heads) * self.head_size

    def attention_values(self, tp: int) -> float:
        """Values of a token that attention keeps for its backward, on a tensor-parallel rank.

        They are queries, keys, values and outputs of the heads. Latent attention keeps its vectors before and
        after their norms, and what of a key does not rotate twice: as the up projection gives it, and in the
        key itself.
        """
        share = self.head_share(tp)
        if not self.kv_lora_rank:
            return (self.heads + self.kv_heads) * (self.head_size + self.value_size) * share
        heads = self.heads * (3 * self.head_size - self.rope_head_size + 2 * self.value_size)
        return heads * share + 2 * (self.q_lora_rank + self.kv_lora_rank)

    @property
    def score_size(self) -> float:
        """Mean size of a head's key and value: attention takes 4 T s H of them, forward."""
        return (self.head_size + self.value_size) / 2

    @cached_property
    def attention_weights(self) -> int:
        """Parameters of a block's attention matrices."""
        h, d, v = self.hidden, self.head_size, self.value_size
        if not self.kv_lora_rank:
            return h * (d + v) * (self.heads + self.kv_heads)
        queries = 0 if self.q_lora_rank else h * self.heads * d
        return self._latent_weights + queries + self.up_weights + self.heads * v * h

    @property
    def up_weights(self) -> int:
        """Of the matrices that give heads from latent attention's vectors."""
        key_value = self.head_size - self.rope_head_size + self.value_size
        return self.heads * (self.q_lora_rank * self.head_size + self.kv_lora_rank * key_value)

    @property
    def _latent_weights(self) -> int:
        """Of the matrices that give latent attention's vectors, which all heads read."""
        latent = self.q_lora_rank + self.kv_lora_rank + self.rope_head_size
        return self.hidden * latent if self.kv_lora_rank else 0

    @property
    def replicated_weights(self) -> int:
        """Parameters of the matrices of a block that tensor parallelism leaves on every rank."""
        attention = self._latent_weights if self.shards_attention else self.attention_weights
        return attention + self.experts * self.hidden  # and a router

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
        """Parameters of the matrices that every token passes: attention and MLP, or attention, router and
        shared experts."""
        shared = (3 if self.gated else 2) * self.hidden * self.shared_mlp
        others = self.experts * self.hidden + shared if self.experts else self.mlp_weights
        return self.attention_weights + others

    def rank_weights(self, tp: int) -> float:
        """Of `dense_weights`, those of the tensor-parallel rank with most heads."""
        latent = self.replicated_weights - self.experts * self.hidden
        rest = self.dense_weights - self.attention_weights - self.experts * self.hidden
        attention = (self.attention_weights - latent) * self.head_share(tp)
        return attention + rest / tp + self.replicated_weights

    @property
    def reduced_values(self) -> tuple[int, int]:
        """Values of a token that tensor parallelism sums over its ranks in a block, forward and backward.

        Chosen and shared experts are summed one after the other, and so are the gradients of what they read
        and, in float32, of the weights of a token's experts.
        """
        h = self.hidden
        mlp = h * (2 if self.experts and self.shared_mlp else 1)
        forward, backward = mlp, mlp + (2 * self.chosen if self.experts else 0)
        if self.shards_attention:
            latent = (self.q_lora_rank or h) + self.kv_lora_rank + self.rope_head_size
            forward, backward = forward + h, backward + (latent if self.kv_lora_rank else h)
        return forward, backward

    @property
    def allows_sequence_parallel(self) -> bool:
        """Whether all matrices of a block are sharded, so that tokens between them can be."""
        return not (self.experts or self.kv_lora_rank) and self.shards_attention

    def head_share(self, tp: int) -> float:
        """Share of the heads of the tensor-parallel rank with most."""
        return -(-self.kv_heads // tp) / self.kv_heads if self.shards_attention else 1.0

    @cached_property
    def active_weights(self) -> int:
        """Parameters of the matrices of a block that one token passes."""
        return self.dense_weights + (self.chosen * self.mlp_weights if self.experts else 0)

    @cached_property
    def block_parameters(self) -> int:
        h, d, latent = self.hidden, self.head_size, self.q_lora_rank + self.kv_lora_rank
        inner = self.shared_mlp if self.experts else self.mlp
        qkv = d * (self.heads + 2 * self.kv_heads)
        biases = (
            self.qkv_bias * (latent + self.rope_head_size if self.kv_lora_rank else qkv)
            + self.out_bias * h
            + self.mlp_bias * ((1 + self.gated) * inner + h)
        )
        norms = self.norms * h * (1 + self.norm_bias) + 2 * d * self.qk_norm + latent
        return self.dense_weights + self.expert_parameters + biases + norms

    # --- the model -------------------------------------------------------------------------------------

    @property
    def mtp_weights(self) -> int:
        """Parameters of the projections of MTP modules."""
        return self.mtp_modules * 2 * self.hidden**2

    @property
    def mtp_parameters(self) -> int:
        """Of MTP modules, all but their blocks: projections and norms."""
        return self.mtp_weights + self.mtp_modules * 3 * self.hidden

    @property
    def end_parameters(self) -> int:
        """Of what is in no block; a tied table counts once."""
        ends = self.embedding_parameters + self.head_parameters + self.hidden * (1 + self.norm_bias)
        return ends + self.mtp_parameters

    @cached_property
    def parameters(self) -> int:
        """All of them; a tied table counts once."""
        return self.over_blocks("block_parameters") + self.end_parameters

    def over_blocks(self, name: str) -> int:
        """Sum of a property over all blocks."""
        total: int = (self.blocks - self.dense_layers) * getattr(self, name)
        return total + (self.dense_layers and self.dense_layers * getattr(self.dense_block, name))

    @property
    def model_expert_parameters(self) -> int:
        """Of the experts of all blocks."""
        return self.expert_layers * self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Those that one token passes."""
        idle = self.experts - self.chosen if self.experts else 0
        return self.parameters - self.expert_layers * idle * self.mlp_weights

    @property
    def tied(self) -> bool:
        return self.head_parameters == 0

    @property
    def shares_table(self) -> bool:
        """Whether the last stage reads the embedding's table, too."""
        return self.tied or self.mtp_modules > 0

    def output_tokens(self, sequence: int) -> int:
        """Tokens of a sample that have outputs."""
        return sequence if self.causal else 1

    def block_forward_flops(self, samples: float, sequence: int) -> float:
        """Matmul FLOPs of a block. A causal mask skips nothing here."""
        tokens = samples * sequence
        linear = 2.0 * tokens * self.active_weights
        return linear + 4.0 * tokens * sequence * self.heads * self.score_size

    def training_flops(self, samples: float, sequence: int) -> float:
        """Matmul FLOPs of forward and backward, nothing recomputed, the outputs' included."""
        head = 6.0 * samples * self.output_tokens(sequence) * self.hidden * self.outputs
        head = (1 + self.mtp_modules) * head + 6.0 * samples * sequence * self.mtp_weights
        blocks = (self.blocks - self.dense_layers) * self.block_forward_flops(samples, sequence)
        if self.dense_layers:
            blocks += self.dense_layers * self.dense_block.block_forward_flops(samples, sequence)
        return 3 * blocks + head
