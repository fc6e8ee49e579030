"""The messages of one step, as one rank sends and receives them.

A message is named by the action whose result it is. What is sent where, and in which order, follows from the
schedule (`Schedule.queues`). A receive is posted before the action that needs it, and after the receives of
all that the same rank sends before, because messages of a route arrive in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hpnb.pipeline_parallel.boundary import Boundary, StepBoundaries
from hpnb.pipeline_parallel.rank_schedule import RankSchedule
from hpnb.pipeline_parallel.schedule import Action
from hpnb.pipeline_parallel.transfers import MessageQueue, PendingReceive, Route, TensorSpec

CORRECTION: TensorSpec = (torch.Size(), torch.float64)  # of a loss's correction


class StepMessages:
    """Results that actions of this step hand on, to another rank or to this one.

    Args:
        sends_correction: whether the gradient of `rank_schedule.correction_microbatch` carries the correction
            of the loss.

    Attributes:
        largest: bytes of the largest message that this rank has sent.
    """

    def __init__(
        self,
        rank_schedule: RankSchedule,
        queues: Mapping[Route, MessageQueue],
        boundaries: StepBoundaries,
        sends_correction: bool,
    ) -> None:
        self._rank_schedule, self._schedule = rank_schedule, rank_schedule.schedule
        self._queues, self._boundaries, self._sends_correction = queues, boundaries, sends_correction
        self._local: dict[Action, list[torch.Tensor]] = {}  # from a stage of this rank to another of it
        self._pending: dict[Action, PendingReceive] = {}
        self._posted = dict.fromkeys(queues, 0)  # receives posted so far
        self.largest = 0

    def carries_correction(self, action: Action) -> bool:
        """Whether the gradient that `action` takes, and the one that it gives, carries the correction."""
        return self._sends_correction and action.microbatch == self._rank_schedule.correction_microbatch

    def post_receives(self, action: Action, blocking: bool) -> None:
        """Post the receive of what `action` needs from another rank, and of all that this rank sends before.

        Args:
            blocking: `action` is the next one: where a shape is not known yet, wait for the sender's.
                Otherwise leave its receive for the call in which it is the next one.
        """
        source = self._schedule.source(action)
        if source is None or source not in self._rank_schedule.message_index:
            return
        route, index = self._rank_schedule.message_index[source]
        while self._posted[route] <= index:
            message = self._schedule.queues[route][self._posted[route]]
            specs = self._specs_of(message, blocking)
            if specs is None:  # not known yet: tried again when it is the turn of `action`
                return
            self._pending[message] = self._queues[route].post_receive(specs)
            self._posted[route] += 1

    def take(self, source: Action) -> list[torch.Tensor]:
        """The result of `source`, which another action needs now, from another rank or from this one.

        Where each rank has a GPU, kernels that are launched from here on wait for it. On a CPU, where ranks
        share a GPU, and in a first step this process does.
        """
        if source in self._pending:
            return self._pending.pop(source).wait()
        return self._local.pop(source)

    def give(self, action: Action, tensors: list[torch.Tensor]) -> None:
        """Hand on the result of `action`."""
        if action in self._rank_schedule.message_index:
            self._queue_of(action).send(tensors)
            self.largest = max(self.largest, sum(tensor.nbytes for tensor in tensors))
        else:
            self._local[action] = tensors

    def send_shape(self, action: Action, boundary: Boundary) -> None:
        """Send the shapes of what forward `action` gives, unless the next stage knows them."""
        if self._boundaries.is_known(action.stage, action.microbatch, boundary):
            return
        self._boundaries.learn(action.stage, action.microbatch, boundary)
        if action in self._rank_schedule.message_index:
            self._queue_of(action).send_object(boundary)

    def flush(self) -> None:
        """All is sent: wait until the sent tensors may be freed."""
        for queue in self._queues.values():
            queue.flush()

    def _queue_of(self, action: Action) -> MessageQueue:
        return self._queues[self._rank_schedule.message_index[action][0]]

    def _specs_of(self, message: Action, blocking: bool) -> Sequence[TensorSpec] | None:
        """Shape and dtype of the tensors of `message`; None if they cannot be known yet."""
        stage, microbatch = message.stage, message.microbatch
        if message.op == "F":
            boundary = self._boundaries.get(stage, microbatch)
            if boundary is None and blocking:
                received: Boundary = self._queue_of(message).receive_object()
                self._boundaries.learn(stage, microbatch, received)
                return received.specs
            return None if boundary is None else boundary.specs
        boundary = self._boundaries.get(stage - 1, microbatch)
        if boundary is None:
            return None
        specs = boundary.gradient_specs
        return [*specs, CORRECTION] if self.carries_correction(message) else specs
