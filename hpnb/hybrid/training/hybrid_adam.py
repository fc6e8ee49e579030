"""HybridAdam: PyTorch's Adam and AdamW, one fused kernel for many tensors wherever there is one.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    w = w (1 - lr decay)         AdamW; Adam adds decay w to g instead
    w = w - lr m' / (sqrt(v') + eps)

    m' = m / (1 - b1^t), v' = v / (1 - b2^t) with bias correction, else m and v themselves

"Hybrid" says that weights may lie on GPUs or, offloaded, on the CPU: PyTorch has fused kernels for both. They
read weight, gradient and moments side by side as they lie in memory (on a CPU even where their strides
differ, which would give wrong weights), so they are used where all four lie alike.
Kingma & Ba 2015 (arXiv 1412.6980), algorithm 1; Loshchilov & Hutter 2019 (arXiv 1711.05101), algorithm 2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Adam
from torch.optim.optimizer import ParamsT

# As it is defined: PyTorch exchanges it for one that also runs hooks, which would then run twice.
_torch_step = inspect.unwrap(Adam.step, stop=lambda step: not getattr(step, "hooked", False))


class HybridAdam(Adam):
    """Adam with decoupled weight decay (AdamW), or without.

    Args:
        params, lr, betas, eps: as in torch.optim.AdamW.
        weight_decay: 0 by default, where AdamW has 0.01.
        adamw_mode: False adds the decay to the gradient, as torch.optim.Adam does.
        bias_correction: False leaves moments as they are; they then are too small in the first steps.
        nvme_offload_fraction, nvme_offload_dir: of the old interface; nothing is put on a disk here.

    Raises:
        ValueError: states are to go to a disk, or torch.optim.Adam refuses a number.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = hpnb.HybridAdam([weight], lr=0.1)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight.tolist()
    [0.9000..., 0.9000...]
    """

    elementwise = True  # what happens to an element depends on it alone: a ZeroOptimizer may cut anywhere

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        bias_correction: bool = True,
        *,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> None:
        if nvme_offload_fraction or nvme_offload_dir is not None:
            raise ValueError(
                f"nvme_offload_fraction={nvme_offload_fraction}, nvme_offload_dir={nvme_offload_dir!r}: "
                "states are not put on a disk here; HybridParallelPlugin(zero_stage=1, cpu_offload=True) "
                "keeps them in the CPU's memory"
            )
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=adamw_mode)
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:  # those of another HybridAdam say it themselves
            group.setdefault("bias_correction", bias_correction)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. Returns the closure's loss, if there is one."""
        plain = [g for g in self.param_groups if not g.get("bias_correction", True)]
        if not plain:
            for group in self.param_groups:
                self._choose(group)
            return _torch_step(self, closure)
        if len(plain) < len(self.param_groups):
            raise ValueError(
                f"{len(plain)} of {len(self.param_groups)} groups are without bias correction; it must be "
                "the same for all of them, so make two optimizers"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in plain:
            self._step_uncorrected(group)
        return loss

    def _choose(self, group: dict[str, Any]) -> None:
        """Decided at every step: weights may have moved since the last one, and states been loaded."""
        trained = [p for p in group["params"] if p.grad is not None]
        fused = bool(trained) and all(self._lies_alike(p) for p in trained)
        group["fused"] = fused
        for p in trained:
            count = self.state[p].get("step") if fused and p in self.state else None
            if count is not None and count.device != p.device:  # where a fused kernel counts
                self.state[p]["step"] = count.to(p.device)

    def _lies_alike(self, p: torch.Tensor) -> bool:
        if not p.is_floating_point() or p.device.type not in ("cpu", "cuda"):
            return False
        moments = [self.state[p][name] for name in ("exp_avg", "exp_avg_sq")] if self.state.get(p) else []
        return all(other is not None and other.stride() == p.stride() for other in (p.grad, *moments))

    @torch.no_grad()
    def _step_uncorrected(self, group: dict[str, Any]) -> None:
        b1, b2 = group["betas"]
        lr, decay = float(group["lr"]), group["weight_decay"]
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update(
                    step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p)
                )
            state["step"] += 1
            m, v, g = state["exp_avg"], state["exp_avg_sq"], p.grad
            if group["decoupled_weight_decay"]:
                p.mul_(1 - lr * decay)
            elif decay:
                g = g.add(p, alpha=decay)
            m.lerp_(g, 1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            p.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-lr)
