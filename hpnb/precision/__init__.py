"""16-bit training: half the bytes, the matrix units of a GPU, and two dangers that this package averts.

Small updates vanish. bf16 has 8 significant bits, so w + u == w for every |u| below |w| / 512. So either
weights stay float32 and only matmuls are 16-bit (autocast), or the optimizer steps float32 *master weights*:

    g32 = float(g16) * c        w32 = step(w32, g32)        w16 = round(w32)

Small gradients vanish. fp16 ends at 6e-8 below and at 65504 above. So the loss is multiplied by a scale,
which the gradients inherit, and which is divided out in float32. If a gradient becomes inf or nan, all ranks
skip the step and the scale shrinks. Clipping is part of the same factor:

    c = factor/scale * min(1, max_norm / (norm + 1e-6))          norm of the unscaled gradients

Micikevicius et al. 2018, *Mixed Precision Training* (arXiv 1710.03740), sections 3.1 and 3.2. bf16 has the
range of float32 and needs no scale.
"""

from hpnb.precision.loss_scaler import LossScaler
from hpnb.precision.masters import Masters
from hpnb.precision.optimizer_step import OptimizerStepResult, step
from hpnb.precision.policies import PrecisionPolicy, best_16_bit, policy, precision_name

__all__ = ["LossScaler", "Masters", "OptimizerStepResult", "PrecisionPolicy", "best_16_bit", "policy",
           "precision_name", "step"]  # fmt: skip
