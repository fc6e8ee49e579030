"""What one transformer block computes and moves: FLOPs, parameters, bytes.

An (m, k) matrix times a (k, n) matrix is m n k multiplications and as many additions: 2 m k n FLOPs. With b
sequences of s tokens, hidden size h, a heads and an MLP of r h (r = 4 below), a block's matmuls are

    qkv                (b s, h) @ (h, 3h)                       6 b s h^2
    scores             (s, h/a) @ (h/a, s), b a times           2 b s^2 h
    weighted values    (s, s) @ (s, h/a),   b a times           2 b s^2 h
    projection         (b s, h) @ (h, h)                        2 b s h^2
    mlp up             (b s, h) @ (h, 4h)                       8 b s h^2
    mlp down           (b s, 4h) @ (4h, h)                      8 b s h^2
    forward                                                    24 b s h^2 + 4 b s^2 h

The backward of each is two matmuls of the same size, one for either operand's gradient: backward = 2 forward.
Norms, softmax, GELU, dropout and residual sums are left out: O(b s h + b a s^2) FLOPs, though many bytes.

Sources: Narayanan et al. 2021 (arXiv 2104.04473), section 5 and appendix. Williams, Waterman & Patterson,
"Roofline", Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Matmul:
    """`count` products of (m, k) by (k, n). Bytes: both operands are read once and the result written once,
    the least that any kernel can move when nothing of them is in cache yet."""

    name: str
    m: int
    k: int
    n: int
    count: int = 1
    bytes_per_value: int = 2

    @property
    def flops(self) -> int:
        return 2 * self.count * self.m * self.k * self.n

    @property
    def bytes(self) -> int:
        values = self.m * self.k + self.k * self.n + self.m * self.n
        return self.bytes_per_value * self.count * values


@dataclass(frozen=True)
class Block:
    """A pre-norm transformer block: attention and MLP with biases, and two layer norms.

    Attributes:
        mlp_ratio: r, of the MLP's width to hidden; no whole number where the width is no multiple.

    Raises:
        ValueError: a size below 1, or heads that do not divide hidden.
    """

    hidden: int
    heads: int
    sequence: int
    batch: int = 1
    mlp_ratio: float = 4
    bytes_per_value: int = 2

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1 and (name != "mlp_ratio" or size <= 0):
                raise ValueError(f"Block {name}={size} is not a size; use 1 or more")
        if self.hidden % self.heads:
            able = [n for n in range(1, self.hidden + 1) if self.hidden % n == 0]
            near = sorted(sorted(able, key=lambda n: abs(n - self.heads))[:2])
            raise ValueError(
                f"hidden {self.hidden} does not divide into {self.heads} heads; "
                f"{' or '.join(map(str, near))} would work"
            )

    @property
    def mlp(self) -> int:
        """Inner values of the MLP, r h."""
        return round(self.mlp_ratio * self.hidden)

    @property
    def parameters(self) -> int:
        """12 h^2 + 13 h at mlp_ratio 4: (4 + 2 r) h^2 weights, (5 + r) h biases, 4 h in two norms."""
        h = self.hidden
        return 4 * h**2 + 2 * h * self.mlp + 5 * h + self.mlp + 4 * h

    @property
    def matmuls(self) -> tuple[Matmul, ...]:
        """The forward's matmuls in order. Scores are written and read back, as without a fused kernel."""
        b, s, h, a, f = self.batch, self.sequence, self.hidden, self.heads, self.mlp
        d, size = h // a, self.bytes_per_value
        return (
            Matmul("qkv", b * s, h, 3 * h, 1, size),
            Matmul("scores", s, d, s, b * a, size),
            Matmul("weighted values", s, s, d, b * a, size),
            Matmul("projection", b * s, h, h, 1, size),
            Matmul("mlp up", b * s, h, f, 1, size),
            Matmul("mlp down", b * s, f, h, 1, size),
        )

    @property
    def forward_flops(self) -> int:
        """24 b s h^2 + 4 b s^2 h at mlp_ratio 4. A causal mask skips nothing here."""
        return sum(matmul.flops for matmul in self.matmuls)

    @property
    def backward_flops(self) -> int:
        return 2 * self.forward_flops

    @property
    def training_flops(self) -> int:
        """Forward and backward, nothing recomputed."""
        return self.forward_flops + self.backward_flops


def model_parameters(layers: int, hidden: int, vocab_size: int, sequence: int) -> int:
    """P = 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)): blocks, token and position embeddings.

    Narayanan et al. 2021, section 5. The output layer is the token embedding; a last norm is not counted.
    """
    return layers * (12 * hidden**2 + 13 * hidden) + (vocab_size + sequence) * hidden


def model_flops(
    layers: int, hidden: int, vocab_size: int, sequence: int, batch: int, recompute: bool = False
) -> int:
    """Matmul FLOPs of one training step of a GPT, the logits' among them.

        72 B s l h^2 (1 + s/(6 h) + V/(12 l h))         forward and backward: 3 forwards
        96 B s l h^2 (1 + s/(6 h) + V/(16 l h))         with every block's forward computed again: 4

    The second is Narayanan et al. 2021, section 5 and appendix. The logits cost 2 B s h V forward and are not
    recomputed, so 6 B s h V in both.
    """
    forward = Block(hidden, heads=1, sequence=sequence, batch=batch).forward_flops  # heads cost no FLOPs
    return layers * (4 if recompute else 3) * forward + 6 * batch * sequence * hidden * vocab_size
