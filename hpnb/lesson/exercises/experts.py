"""Notebook 11: dispatch and combine of several experts a token, a balancing loss, and who reduces what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import hpnb
from hpnb import Layout
from hpnb.lesson.exercises.checker import Finding, WrongAnswer, exercise
from hpnb.lesson.exercises.findings import expect_tensor, is_number, normal, off_by, run_on_ranks
from hpnb.lesson.programs.experts import ComparedLayer, ExpertLayer, compare_layer, expert_axis
from hpnb.lesson.show import worst_of

# --- dispatch and combine -----------------------------------------------------------------------------

_LAYERS = (  # (ranks, experts, experts of a token, tokens of a rank)
    (2, 4, 1, 6), (2, 4, 2, 5), (3, 9, 3, 7), (3, 6, 2, 1),
)  # fmt: skip


def _compare(layer: ExpertLayer, num_experts: int, k: int, tokens: int) -> ComparedLayer:
    def checked(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return expect_tensor(layer(x, *rest), x.shape, "it returned")

    assert expert_axis().size == hpnb.world_size()
    return compare_layer(checked, num_experts, k, tokens)


@exercise("11.1", "dispatch and combine", 25)
def dispatch_and_combine(layer: ExpertLayer) -> Iterator[Finding]:
    for ranks, num_experts, k, tokens in _LAYERS:
        text = f"{ranks} ranks, {num_experts} experts, {k} of them a token, {tokens} tokens a rank"
        compared = run_on_ranks(_compare, layer, num_experts, k, tokens, ranks=ranks, case=text)
        distances = compared[0].distances
        words = ", ".join(f"{what} {off_by(distance)}" for what, distance in distances.items())
        yield Finding(worst_of(distances.values()) < 1e-12, f"{text}: {words}")


# --- the balancing loss -------------------------------------------------------------------------------

_ROUTERS = (  # (what is special, tokens, experts, k, how much the router prefers expert 0)
    ("an even router", 64, 4, 1, 0.0), ("a router that prefers expert 0", 64, 4, 1, 2.0),
    ("two experts a token", 48, 8, 2, 1.0), ("one token", 1, 4, 2, 0.0),
)  # fmt: skip


def balance_of(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E sum_e f_e P_e of one process, (), and its gradient with respect to the logits (n, E)."""
    logits = logits.detach().clone().requires_grad_()
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(k, -1).indices
    counts = torch.bincount(chosen.flatten(), minlength=logits.size(1)).to(logits)
    loss = logits.size(1) * (counts / len(logits) * probabilities.mean(0)).sum()
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


@exercise("11.2", "the balancing loss", 20)
def balancing_loss(balance: Callable[[torch.Tensor, int], Any]) -> Iterator[Finding]:
    for what, tokens, num_experts, k, preference in _ROUTERS:
        logits = normal(tokens, num_experts, seed=tokens + k)
        logits[:, 0] += preference
        loss, gradient = balance_of(logits, k)
        answer = balance(logits.clone(), k)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise WrongAnswer(f"{what}: it returned {type(answer).__name__}; (loss, gradient) is wanted")
        value = float(answer[0]) if isinstance(answer[0], torch.Tensor) else answer[0]
        if not is_number(value):
            raise WrongAnswer(f"{what}: the loss is {value!r}, and a number is wanted")
        right = abs(value - float(loss)) < 1e-12 * abs(float(loss))
        yield Finding(right, f"{what}: the loss is {float(loss):.6f}, you say {value:.6f}")
        answered = answer[1]
        if not isinstance(answered, torch.Tensor) or answered.shape != gradient.shape:
            raise WrongAnswer(f"{what}: the gradient has one number for each logit, {tuple(gradient.shape)}")
        distance = float((answered - gradient).norm() / gradient.norm())
        yield Finding(distance < 1e-10, f"{what}: the gradient is {off_by(distance)}")


# --- who reduces what ---------------------------------------------------------------------------------

_LAYOUTS = (Layout(dp=4, ep=2), Layout(dp=4, ep=4), Layout(dp=8, ep=2), Layout(dp=4, pp=2, ep=2),
            Layout(dp=6, pp=2, ep=3), Layout(dp=4, ep=1))  # fmt: skip


@exercise("11.3", "which ranks reduce what", 20)
def who_reduces(reduces: Callable[[int, int, int, int], Any]) -> Iterator[Finding]:
    for layout in _LAYOUTS:
        text = f"dp {layout.dp}, pp {layout.pp}, ep {layout.ep}"
        wrong = []
        for rank in range(layout.world_size):
            answer = reduces(rank, layout.dp, layout.pp, layout.ep)
            for what, axis in (("router", "dp"), ("expert", "edp")):
                try:
                    ranks, divisor = answer[what]
                    ranks = sorted(int(r) for r in ranks)
                except (KeyError, TypeError, ValueError):
                    wanted = '{"router": (ranks, divisor), "expert": (ranks, divisor)}'
                    raise WrongAnswer(f"{text}: it returned {answer!r}; {wanted} is wanted") from None
                group = next(list(group) for group in layout.groups(axis) if rank in group)
                if (ranks, divisor) != (group, layout.dp):
                    wrong.append(f"rank {rank}, {what}: ranks {group} add up, divided by {layout.dp}; "
                                 f"you say ranks {ranks} and {divisor}")  # fmt: skip
        yield Finding(not wrong, f"{text}: {wrong[0] if wrong else 'right on all ranks'}")
