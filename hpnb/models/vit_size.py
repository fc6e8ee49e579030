"""How large a ViT is, in numbers alone: nothing is built to count its parameters and FLOPs.

              hidden  layers  heads    mlp  patch  image     tokens   parameters
    laptop        64       8      4    256      8     32         17         0.4 M
    b16          768      12     12   3072     16    224        197          86 M
    l16         1024      24     16   4096     16    224        197         307 M

b16 and l16 are ViT-B/16 and ViT-L/16 of Dosovitskiy et al. 2021 (arXiv 2010.11929), table 1, with the
rounded parameters. An image of n x n pixels becomes (n / patch)^2 patches, and one class token goes in front.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpnb.theory.transformer import Block

CHANNELS = 3


@dataclass(frozen=True)
class ViTSize:
    """The shape of a ViT.

    Attributes:
        hidden, layers, heads: of the transformer; a head is hidden / heads wide.
        mlp: neurons of an MLP.
        patch, image: sides of both, in pixels.

    Raises:
        ValueError: a size below 1, or sizes that do not divide.
    """

    hidden: int
    layers: int
    heads: int
    mlp: int
    patch: int
    image: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                raise ValueError(f"ViTSize {name}={size} is not a size; use 1 or more")
        if self.image % self.patch:
            below, above = (self.image // self.patch * self.patch + i for i in (0, self.patch))
            near = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"image={self.image} is no multiple of {self.patch} (patches); {near} would work"
            )
        self.block()  # refuses heads that do not divide hidden

    @property
    def tokens(self) -> int:
        """(image / patch)^2 + 1 per image."""
        return (self.image // self.patch) ** 2 + 1

    def block(self, batch: int = 1, bytes_per_value: int = 2) -> Block:
        """One of the blocks, for `batch` images, as hpnb.theory counts it."""
        return Block(self.hidden, self.heads, self.tokens, batch, self.mlp / self.hidden, bytes_per_value)

    def parameters(self, classes: int) -> int:
        """3 p^2 h + h for patches, h for the class token, s h for positions, the blocks, 2 h for the last
        norm, and c h + c for the classifier."""
        h, c = self.hidden, classes
        embedding = CHANNELS * self.patch**2 * h + h + h + self.tokens * h
        return embedding + self.layers * self.block().parameters + 2 * h + c * h + c

    def training_flops(self, batch: int, classes: int) -> int:
        """Matmul FLOPs of forward and backward of `batch` images, nothing recomputed.

        patches          2 b (s-1) 3 p^2 h     twice: pictures need no gradient
        blocks           24 b s h^2 + 4 b s^2 h each, at mlp = 4 h     three times
        classifier       2 b h c               three times
        """
        patches = 2 * batch * (self.tokens - 1) * CHANNELS * self.patch**2 * self.hidden
        blocks = self.layers * self.block(batch).training_flops
        return 2 * patches + blocks + 3 * (2 * batch * self.hidden * classes)

    @classmethod
    def of(cls, config: Any) -> ViTSize:
        """The size that a transformers ViTConfig describes."""
        return cls(
            config.hidden_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.intermediate_size,
            config.patch_size,
            config.image_size,
        )


SIZES = {
    "laptop": ViTSize(hidden=64, layers=8, heads=4, mlp=256, patch=8, image=32),
    "b16": ViTSize(hidden=768, layers=12, heads=12, mlp=3072, patch=16, image=224),
    "l16": ViTSize(hidden=1024, layers=24, heads=16, mlp=4096, patch=16, image=224),
}
