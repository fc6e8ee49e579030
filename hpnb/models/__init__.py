"""ViT as transformers has it, where it may be cut, and what each of its weights is.

    model = hpnb.models.vit("laptop", classes=3)             # a ViTForImageClassification, seeded
    found = hpnb.models.anatomy(model)
    [block.name for block in found.blocks]                   # "vit.layers.0", ...: a pipeline cuts between
    hpnb.models.roles(model)["vit.layers.0.mlp.fc1.weight"]  # column: tensor parallelism cuts its dim 0
    torch.optim.AdamW(hpnb.models.decay_groups(model, 0.1), lr=1e-3)

    large = hpnb.models.SIZES["l16"]
    large.parameters(classes=1000), large.training_flops(batch=64, classes=1000)    # nothing is built

The strategies read these and nothing else of a model: they never look for a weight by a piece of its name.
"""

from hpnb.models.cut import Anatomy, Part, tied
from hpnb.models.known import anatomy, decay_groups, roles
from hpnb.models.no_rows import accept_no_rows
from hpnb.models.role import Role
from hpnb.models.vit_model import vit
from hpnb.models.vit_size import SIZES, ViTSize

__all__ = [
    "SIZES",
    "Anatomy",
    "Part",
    "Role",
    "ViTSize",
    "accept_no_rows",
    "anatomy",
    "decay_groups",
    "roles",
    "tied",
    "vit",
]
