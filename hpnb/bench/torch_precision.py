"""Precision and compilation of PyTorch's programs, each in the form that is fastest for it.

    masters     bf16 weights, and AdamW over float32 copies of them: what hpnb does, in plain PyTorch
    autocast    float32 weights, matmuls in bf16; gradients are float32, and travel as bf16 with DDP
    FSDP2       float32 shards, gathered and reduced as bf16: MixedPrecisionPolicy

PyTorch's optimizers have no masters, so the first form takes the 30 lines of `MasterAdamW`; in a
ZeroRedundancyOptimizer those of `ShardMasterAdamW`. Either each block
is compiled, or the model as one; the loss is compiled in both cases. GPT-2 has a third form: each block, and
the output layer as one with the loss. PyTorch's programs seldom do this, but only then does the compiler see
that a vocabulary of 50,257 is odd, and pads it. On a CPU everything is float32 and nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import hpnb
from hpnb.bench.tasks import TrainingTask
from hpnb.data.tokenizer import IGNORE_INDEX

# "head": blocks, and the output layer with the loss; "async": also overlap matmuls with their gathers
Compiled = Literal["blocks", "head", "async", "model", "no"]


class OptimizerLike(Protocol):
    def step(self) -> Any: ...

    def zero_grad(self) -> Any: ...


class MasterAdamW:
    """AdamW over float32 copies of 16-bit weights; of a DTensor it steps this rank's share.

    PyTorch's fused AdamW wants gradients as wide as weights, so it would take two copies besides: 40 bytes
    a parameter. Compiled, an update is one kernel that reads and writes each number once: 28.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self.parameters = list(parameters)
        self.narrow = [local(p.detach()).view(-1) for p in self.parameters]
        self.wide = [p.float() for p in self.narrow]  # bf16 to float32, so these are copies
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.wide]
        self.lr, self.steps = lr, torch.zeros((), device=self.wide[0].device)
        self._update = compiled(_adamw, dynamic=True)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        tensors = zip(self.narrow, gradients(self.parameters), self.wide, self.moments, strict=True)
        for narrow, grad, wide, moments in tensors:
            self._update(narrow, grad.reshape(-1), wide, *moments, self.steps, self.lr)


class ShardMasterAdamW(torch.optim.Optimizer):
    """Fused AdamW over float32 copies of a rank's 16-bit weights. ZeroRedundancyOptimizer makes it, and then
    moves the weights into buckets, so every step reads `parameter.data` anew."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.narrow = [p for group in self.param_groups for p in group["params"]]
        self.wide = [p.detach().to(torch.float32, copy=True) for p in self.narrow]
        self.optimizer = torch.optim.AdamW([{"params": self.wide}], lr=lr, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for narrow, wide in zip(self.narrow, self.wide, strict=True):
            wide.grad = narrow.grad.float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_copy_(self.narrow, self.wide)


def _adamw(
    narrow: torch.Tensor, grad: torch.Tensor, wide: torch.Tensor, first: torch.Tensor, second: torch.Tensor,
    steps: torch.Tensor, lr: float,
) -> None:  # fmt: skip
    """One update in place, with the defaults of torch.optim.AdamW: betas 0.9 and 0.999, decay 0.01."""
    grad = grad.float()
    first.lerp_(grad, 0.1)
    second.mul_(0.999).addcmul_(grad, grad, value=0.001)
    spread = (second / (1 - 0.999**steps)).sqrt() + 1e-8
    wide.mul_(1 - lr * 0.01).sub_(lr * (first / (1 - 0.9**steps)) / spread)
    narrow.copy_(wide)


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Of this rank's shares, in place of every `p.grad`. What is partial is summed: the gradients of norms,
    as sequence parallelism leaves them, in one message."""
    parameters = list(parameters)
    norms: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        if not isinstance(p, DTensor) or not isinstance(p.grad, DTensor):
            continue
        if p.grad.placements != p.placements and all(one.is_replicate() for one in p.placements):
            norms.setdefault((p.device_mesh, p.grad.placements, p.placements), []).append(p)
        else:
            p.grad = p.grad.redistribute(placements=p.placements)
    for (mesh, before, after), some in norms.items():
        shares = [local(p.grad) for p in some if p.grad is not None]
        flat = torch.cat([share.flatten() for share in shares])
        summed = DTensor.from_local(flat, mesh, before, run_check=False).redistribute(placements=after)
        parts = summed.to_local().split([share.numel() for share in shares])
        for p, part, share in zip(some, parts, shares, strict=True):
            p.grad = DTensor.from_local(part.view_as(share), mesh, after, run_check=False)
    return [local(p.grad) for p in parameters if p.grad is not None]


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> OptimizerLike:
    """Fused, with masters for 16 bits. A fused step takes DTensors of one mesh at a time."""
    parameters = list(parameters)
    if parameters[0].dtype == torch.bfloat16:
        return MasterAdamW(parameters, lr)
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=lr, fused=True)


def autocast(task: TrainingTask) -> torch.autocast:
    return torch.autocast(hpnb.device().type, torch.bfloat16, enabled=task.bits == 16)


def blocks(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def compile_parts(model: Any, how: Compiled) -> None:
    """The blocks, in place, and a language model's loss, of which float32 logits are then never stored."""
    if hpnb.device().type != "cuda" or how in ("no", "model"):
        return
    for block in blocks(model):
        if how == "async":
            block.compile(dynamic=False, options={"_micro_pipeline_tp": True})
        else:
            block.compile(dynamic=False)


def use_loss(model: Any, how: Compiled) -> None:
    """Give a GPT-2 or a ViT a loss below, a GPT-2's compiled where blocks are."""
    if model.config.model_type == "gpt2":
        if how == "head":
            model.loss_function = with_loss(model.lm_head)
        else:
            model.loss_function = compiled(causal_loss) if how == "blocks" else causal_loss
    else:
        model.loss_function = class_loss


def causal_loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    """The mean over the tokens that come next: logits (B, s, V), labels (B, s). Of logits that are split by
    tokens of the vocabulary it runs inside `loss_parallel`."""
    following = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
    wide = torch.promote_types(logits.dtype, torch.float32)  # as transformers computes it
    return F.cross_entropy(logits.to(wide).flatten(0, 1), following.flatten())


def with_loss(head: Any, padding_mask: torch.Tensor | None = None) -> Any:
    """The loss of hidden states, which `head` from now on leaves as they are: compiled, both as one.

    Args:
        padding_mask: added to logits, -inf for rows behind the table that are no words.
    """
    both = compiled(_head_and_loss)
    head.forward = _as_it_is
    return lambda hidden, labels, **_: both(hidden, head.weight, labels, padding_mask)


def _head_and_loss(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, added: torch.Tensor | None
) -> torch.Tensor:
    logits = F.linear(hidden, weight)
    return causal_loss(logits if added is None else logits.float() + added, labels)


def _as_it_is(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def compiled(function: Any, dynamic: bool = False) -> Any:
    """On a GPU.

    Args:
        dynamic: one kernel for tensors of any size.
    """
    return torch.compile(function, dynamic=dynamic) if hpnb.device().type == "cuda" else function


def class_loss(labels: torch.Tensor, logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The mean over images, in float32: of bf16 logits transformers' own is a multiple of 1/32 around 7."""
    return F.cross_entropy(logits.float(), labels)
