"""ViT and GPT-2 of transformers, where they may be split, and the role of each of their weights.

    model = hpnb.models.vit("laptop", classes=3)             # a ViTForImageClassification, seeded
    model = hpnb.models.gpt2("laptop")                       # a GPT2LMHeadModel
    anatomy = hpnb.models.anatomy(model)
    [block.name for block in anatomy.blocks]                 # "transformer.h.0", ...: a pipeline splits here
    hpnb.models.roles(model)["transformer.h.0.mlp.c_fc.weight"]    # column: tensor parallelism splits dim 1
    hpnb.models.attentions(model)[0].resize(2)               # after a split: it computes with 2 heads
    torch.optim.AdamW(hpnb.models.decay_groups(model, 0.1), lr=1e-3)

    large = hpnb.models.GPT2_SIZES["1.5b"]
    large.parameters(), large.training_flops(batch=64)       # nothing is built

The strategies read these and nothing else of a model: they never look for a weight by a piece of its name.
`hpnb.models.register` adds a model of your own, and `hpnb.models.check(model, batch)` checks it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpnb.lazy_names import lazy_names
from hpnb.models.gpt2_size import GPT2_SIZES, GPT2Size
from hpnb.models.role import Role
from hpnb.models.vit_size import SIZES, ViTSize

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from torch import nn

    from hpnb.models.gpt2_chunked_loss import chunk_loss
    from hpnb.models.gpt2_model import gpt2
    from hpnb.models.linear_cross_entropy import chunked_cross_entropy
    from hpnb.models.model_anatomy import Anatomy, Attention, Part, root_parameters, tied
    from hpnb.models.patch_matmul import use_patch_matmul
    from hpnb.models.placeholder_sample import accept_empty_batch
    from hpnb.models.registry import anatomy, attentions, decay_groups, register, roles
    from hpnb.models.vit_model import vit

    def check(model: nn.Module, batch: Mapping[str, Any], ranks: int = 2, timeout: float = 120.0) -> str: ...


__all__ = [
    "GPT2_SIZES",
    "SIZES",
    "Anatomy",
    "Attention",
    "GPT2Size",
    "Part",
    "Role",
    "ViTSize",
    "accept_empty_batch",
    "anatomy",
    "attentions",
    "check",
    "chunk_loss",
    "chunked_cross_entropy",
    "decay_groups",
    "gpt2",
    "register",
    "roles",
    "root_parameters",
    "tied",
    "use_patch_matmul",
    "vit",
]

# These import transformers, so they are imported when they are first used. Sizes and roles need no import.
_FROM = {
    "check": "hpnb.hybrid.check_model",  # above this package, because it runs every strategy
    "accept_empty_batch": "placeholder_sample",
    "chunk_loss": "gpt2_chunked_loss",
    "gpt2": "gpt2_model",
    "chunked_cross_entropy": "linear_cross_entropy",
    "use_patch_matmul": "patch_matmul",
    "vit": "vit_model",
}
_FROM |= dict.fromkeys(("Anatomy", "Attention", "Part", "root_parameters", "tied"), "model_anatomy")
_FROM |= dict.fromkeys(("anatomy", "attentions", "decay_groups", "register", "roles"), "registry")

__getattr__ = lazy_names(__name__, _FROM)
