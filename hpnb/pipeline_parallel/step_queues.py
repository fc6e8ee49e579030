"""Which queues carry the messages of a step between the GPUs of a pipeline.

    first training step, first evaluation     through the memory of the CPUs, over gloo
    steps with shapes that are new            over process groups, NCCL, until slots are large enough
    all others                                by copy engines between GPUs of one node, otherwise over NCCL

CUDA loads a kernel at its first launch, and may wait until the GPU is idle to do so (CUDA C++ Programming
Guide, "Lazy Loading"). A receive over NCCL is a kernel as well, which runs until the sender has come. So a
rank that has posted a receive and then launches a new kernel waits for the sender. If the sender waits in the
same way for a message of this rank, neither goes on. In a first step nearly all kernels are new, so its
messages take a way on which no kernel waits. On CPUs, and where ranks share a GPU, there is one set of
queues.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from hpnb.mesh import Axis
from hpnb.pipeline_parallel.symmetric_transfers import SymmetricTransfers
from hpnb.pipeline_parallel.transfers import HostQueue, MessageQueue, Route, TensorSpec, make_queues
from hpnb.ranks.current_rank import collectives_on_streams


class StepQueues:
    """The queues of a pipeline's `routes`. All ranks of the world construct it with the same routes."""

    def __init__(self, axis: Axis, routes: Collection[Route], device: torch.device) -> None:
        routes = sorted(routes)
        self.host: Mapping[Route, MessageQueue] = {}
        if collectives_on_streams(device):
            self.host = {route: HostQueue(axis, route, device) for route in routes if axis.rank in route}
        self.groups = make_queues(axis, routes, device)
        self.symmetric = SymmetricTransfers(axis, routes, device)
        self._modes_seen = set[bool]()  # of steps that have run: whether they trained

    def choose(self, trains: bool, shapes_known: bool) -> Mapping[Route, MessageQueue]:
        """The queues for the next step, the same on all ranks.

        Args:
            trains: whether the step has backwards.
            shapes_known: whether a step with the same shapes has run.
        """
        if trains not in self._modes_seen:
            self._modes_seen.add(trains)
            return self.host or self.groups
        return self.symmetric.queues if shapes_known and self.symmetric.queues else self.groups

    def reserve(self, messages: Sequence[Sequence[TensorSpec]]) -> None:
        """Let `messages`, those that this rank sends or receives, fit the slots of the copy engines."""
        self.symmetric.reserve(messages)
