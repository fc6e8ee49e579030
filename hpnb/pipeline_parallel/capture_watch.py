"""What keeps a stage from being captured although PyTorch would capture it, seen in an eager step before.

A graph repeats the launches of the step in which it was captured. That is wrong where a stage

    communicates                        a graph would not wait for the other ranks' threads, as those of gloo;
                                        the collectives of tensor parallelism and ZeRO 3 over NCCL are
                                        kernels, and are captured (`graph_agreement.py`)
    draws random numbers on the CPU     a layer that is skipped at random would be skipped always; watched
                                        are the global generators of random, NumPy and PyTorch
    recomputes with dropout             the recomputation has to draw the numbers of its forward again

What PyTorch refuses itself shows in the capture: above all Python that waits for a value of the GPU, as
.item() does, and may act on it.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.utils.checkpoint

from hpnb.dropout_rng import RankStateStart, noting_rank_states
from hpnb.mesh import Axis
from hpnb.record.recorder import Recorder, recording


class CaptureWatch:
    """Watches eager forwards.

    Args:
        captured: axes whose collectives are captured.

    Attributes:
        reasons: {stage: why it cannot be captured}, the first reason of each.
        rank_states: {(stage, microbatch): where states of this rank begin in its forward}, for dropouts of
            tensor parallelism (`CapturedRankStates`).
    """

    def __init__(self, device: torch.device, captured: Sequence[Axis] = ()) -> None:
        self._device, self.reasons = device, dict[int, str]()
        self._captured = {axis.ranks for axis in captured}
        self.rank_states: dict[tuple[int, int], list[RankStateStart]] = {}

    @contextmanager
    def forward(self, stage: int, microbatch: int) -> Iterator[None]:
        """Around the forward of a stage, and its loss."""
        recomputes: list[bool] = []
        states, offset = _cpu_states(), self._offset()
        recorder = Recorder(aligned=False)

        def snapshot(*args: Any) -> Any:
            recomputes.append(True)
            return original(*args)

        original = torch.utils.checkpoint.get_device_states
        with (
            patch.object(torch.utils.checkpoint, "get_device_states", snapshot),
            recording(recorder),
            noting_rank_states() as starts,
        ):
            yield
        self.rank_states[stage, microbatch] = [(rng, at - offset) for rng, at in starts]
        for event in recorder.communications(0):
            if event.group not in self._captured:
                where = f"{event.op} along {event.axis}" if event.axis else event.op
                self._note(
                    stage,
                    f"it communicates within the stage ({where}), and only the collectives of tensor "
                    "parallelism and ZeRO 3, in a group with the backends cpu:gloo,cuda:nccl, can be "
                    "captured",
                )
        if states != _cpu_states():
            self._note(stage, "it draws random numbers on the CPU, which a graph would repeat")
        if recomputes and offset != self._offset():
            self._note(stage, "it recomputes activations and draws random numbers, as dropout does")

    def _note(self, stage: int, reason: str) -> None:
        self.reasons.setdefault(stage, reason)

    def _offset(self) -> int:
        """How many random numbers have been drawn on the GPU."""
        if self._device.type != "cuda":
            return int.from_bytes(torch.get_rng_state().numpy().tobytes()[:16], "little")
        return torch.cuda.default_generators[torch.cuda.current_device()].get_offset()


def _cpu_states() -> tuple[object, ...]:
    """Of the generators that everybody shares."""
    name, keys, *others = np.random.get_state(legacy=True)
    of_numpy = name, np.asarray(keys).tobytes(), *others
    return random.getstate(), of_numpy, torch.get_rng_state().numpy().tobytes()


def describe_failure(error: BaseException) -> str:
    """Why a capture failed, and in which line of the model."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if "/torch/" not in frame.filename]
    where = f"{outside[-1].filename.rsplit('/', 1)[-1]}, line {outside[-1].lineno}" if outside else "PyTorch"
    line = next(iter(str(error).strip().splitlines()), "no message")[:200]
    if "when stream is capturing" in line:
        return f"Python waits there for a value of the GPU, and may act on it ({where}); use torch.where"
    return f"capturing it raised {type(error).__name__} ({where}): {line}"
