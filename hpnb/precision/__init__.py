"""16-bit training: half the bytes, and the matrix units of a GPU. Two dangers, and what is done about each.

Small updates vanish. bf16 has 8 significant bits, so w + u == w for every |u| below |w| / 512. Hence either
weights stay float32 and only matmuls are 16-bit (autocast), or the optimizer steps float32 *masters*:

    g32 = float(g16) * c        w32 = step(w32, g32)        w16 = round(w32)

Small gradients vanish. fp16 ends at 6e-8 below and at 65504 above. Hence the loss is multiplied by a scale,
which the gradients inherit, and divided out in float32. Where a gradient becomes inf or nan the step is
skipped, on all ranks, and the scale shrinks. Clipping is folded into the same factor:

    c = 1/scale * min(1, max_norm / (norm + 1e-6))          norm of the gradients, scale divided out

Micikevicius et al. 2018, *Mixed Precision Training* (arXiv 1710.03740), sections 3.1 and 3.2. bf16 has the
range of float32 and needs no scale.
"""

from hpnb.precision.loss_scaler import LossScaler
from hpnb.precision.masters import Masters
from hpnb.precision.policies import PrecisionPolicy, best_16_bit, policy
from hpnb.precision.stepping import OptimizerStepResult, step

__all__ = ["LossScaler", "Masters", "OptimizerStepResult", "PrecisionPolicy", "best_16_bit", "policy", "step"]
