"""The messages of one step, as one rank sends and receives them.

What is sent where, and in which order, follows from the schedule (`Schedule.queues`). A receive is posted
before the action that needs it, and after the receives of everything that was sent before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hpnb.pipeline_parallel.boundary import Boundary, StepBoundaries
from hpnb.pipeline_parallel.rank_schedule import RankSchedule
from hpnb.pipeline_parallel.schedule import Action
from hpnb.pipeline_parallel.transfers import Arrival, MessageQueue, Pair, Shape

CORRECTION = torch.Size(), torch.float64  # the shape and dtype of a loss's correction


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
        queues: Mapping[Pair, MessageQueue],
        boundaries: StepBoundaries,
        sends_correction: bool,
    ) -> None:
        self._part, self._schedule = rank_schedule, rank_schedule.schedule
        self._queues, self._boundaries, self._sends_correction = queues, boundaries, sends_correction
        self._local: dict[Action, list[torch.Tensor]] = {}  # from a stage of this rank to another of it
        self._arrivals: dict[Action, Arrival] = {}
        self._posted = dict.fromkeys(queues, 0)
        self.largest = 0

    def carries_correction(self, action: Action) -> bool:
        """Whether the gradient that `action` takes, and the one that it gives, carries the correction."""
        return self._sends_correction and action.microbatch == self._part.correction_microbatch

    def post_receives(self, action: Action, urgent: bool) -> None:
        """Post the receives of what `action` needs from another rank, and of all that is sent before it.

        Args:
            urgent: `action` is the next one: where a shape is not known yet, wait for the sender's.
        """
        for need in self._schedule.needs(action):
            if need not in self._part.message_index:
                continue
            pair, index = self._part.message_index[need]
            if pair[1] != self._part.rank:
                continue
            while self._posted[pair] <= index:
                message = self._schedule.queues[pair][self._posted[pair]]
                shapes = self._shapes_of(message, urgent)
                if shapes is None:
                    return
                self._arrivals[message] = self._queues[pair].post(shapes)
                self._posted[pair] += 1

    def take(self, action: Action) -> list[torch.Tensor]:
        """The result of `action`, which another one needs now."""
        if action in self._arrivals:
            return self._arrivals.pop(action).wait()
        return self._local.pop(action)

    def give(self, action: Action, tensors: list[torch.Tensor]) -> None:
        """Hand on the result of `action`."""
        if action in self._part.message_index:
            self._queue_of(action).send(tensors)
            self.largest = max(self.largest, sum(tensor.nbytes for tensor in tensors))
        else:
            self._local[action] = tensors

    def announce(self, action: Action, boundary: Boundary) -> None:
        """Send the shapes of what forward `action` gives, unless the next stage knows them."""
        if self._boundaries.is_known(action.stage, action.microbatch, boundary):
            return
        self._boundaries.learn(action.stage, action.microbatch, boundary)
        if action in self._part.message_index:
            self._queue_of(action).send_object(boundary)

    def flush(self) -> None:
        """All is sent: wait until it is read."""
        for queue in self._queues.values():
            queue.flush()

    def _queue_of(self, action: Action) -> MessageQueue:
        return self._queues[self._part.message_index[action][0]]

    def _shapes_of(self, message: Action, urgent: bool) -> Sequence[Shape] | None:
        """The shapes of what `message` consists of; None if they cannot be known yet."""
        stage, microbatch = message.stage, message.microbatch
        if message.op == "F":
            boundary = self._boundaries.get(stage, microbatch)
            if boundary is None and urgent:
                received: Boundary = self._queue_of(message).receive_object()
                self._boundaries.learn(stage, microbatch, received)
                return received.shapes
            return None if boundary is None else boundary.shapes
        boundary = self._boundaries.get(stage - 1, microbatch)
        if boundary is None:
            return None
        return boundary.gradient_shapes + [CORRECTION] * self.carries_correction(message)
