"""Expert parallelism: the experts of a mixture of experts on several ranks (`mesh.ep`).

experts = hpnb.expert_parallel.parallelize(model, mesh.ep)
replica = hpnb.DataParallel(model, mesh.dp_cp, expert_axis=mesh.edp)

router         is the model's own: it says which k experts each token goes to, and with which weights
dispatch       a permutation: rows sorted by expert, an uneven all-to-all, and back to be combined
parallelize    the experts of a model of transformers
load_balance   the balancing loss over all ranks; a selection bias instead of a loss; the imbalance
router_sums    the balancing loss of layers on several pipeline stages
"""

from hpnb.expert_parallel.dispatch import Dispatch, combine_rows, dispatch_rows, plan_dispatch
from hpnb.expert_parallel.load_balance import (
    ExpertLoads,
    SelectionBias,
    balancing_loss,
    imbalance,
    share_balancing_loss,
)
from hpnb.expert_parallel.parallelize import (
    ExpertParallel,
    expert_modules,
    parallelize,
    without_experts,
)

__all__ = [
    "Dispatch",
    "ExpertLoads",
    "ExpertParallel",
    "SelectionBias",
    "balancing_loss",
    "combine_rows",
    "dispatch_rows",
    "expert_modules",
    "imbalance",
    "parallelize",
    "plan_dispatch",
    "share_balancing_loss",
    "without_experts",
]
