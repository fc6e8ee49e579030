"""The ways of a pipeline's messages: which step takes which, and the one through the CPUs' memory."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from test_pipeline import batch, model, pair_loss

import hpnb
from hpnb import Layout, Mesh
from hpnb.pipeline_parallel import schedules, step_queues
from hpnb.pipeline_parallel.transfers import HostQueue


def messages_in_order() -> list[torch.Tensor]:
    """Rank 0 sends three messages, one of them without numbers; rank 1 expects them before it takes one."""
    axis, sent = Mesh(Layout(pp=2)).pp, [torch.arange(6.0).view(2, 3), torch.ones(0, 3), torch.tensor(7)]
    queue = HostQueue(axis, (0, 1), torch.device("cpu"))
    if axis.rank == 0:
        for tensor in sent:
            queue.send([tensor, -tensor])
        queue.flush()
        return sent
    coming = [queue.post_receive([(t.shape, t.dtype)] * 2) for t in sent]
    received = [pending.wait() for pending in coming]
    for tensor, negative in received:
        assert torch.equal(negative, -tensor)
    return [tensor for tensor, _ in received]


def test_messages_through_host_memory_arrive_in_order() -> None:
    sent, received = hpnb.launch(messages_in_order, ranks=2, device="cpu")
    for a, b in zip(sent, received, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def train(as_on_gpus: bool) -> tuple[list[float], list[int], dict[str, torch.Tensor]]:
    """Losses of five steps, of which the third and fourth evaluate; messages of each through the host."""
    sends = [0]
    send = HostQueue.send

    def counting(queue: HostQueue, tensors: Any) -> None:
        sends[-1] += 1
        send(queue, tensors)

    with patch.object(step_queues, "collectives_on_streams", lambda _: as_on_gpus):
        pipe = hpnb.Pipeline(model(), Mesh(Layout(pp=2)).pp, schedules.make("1f1b", 2, 4), pair_loss)
    losses, counts = [], []
    with patch.object(HostQueue, "send", counting):
        for forward_only in (False, False, True, True, False):
            sends[-1] = 0
            losses.append(pipe.step(batch(8, 0), forward_only=forward_only).loss.item())
            counts.append(sends[-1])
    return losses, counts, {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}


def test_the_first_step_of_a_mode_goes_through_host_memory_and_computes_the_same() -> None:
    with hpnb.Ranks(2, device="cpu") as ranks:
        through_host, directly = ranks.run(train, True), ranks.run(train, False)
    for rank, (a, b) in enumerate(zip(through_host, directly, strict=True)):
        losses, counts, grads = a
        assert losses == b[0]
        assert all(torch.equal(grads[name], grad) for name, grad in b[2].items())
        assert counts == [4, 0, 4 if rank == 0 else 0, 0, 0]  # activations, or gradients
        assert b[1] == [0] * 5
