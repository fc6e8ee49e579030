"""What keeps a stage from being captured, seen in an eager step before.

A graph repeats the launches of the step in which it was captured. That is wrong, or impossible, where a stage

    waits for a value of the GPU        .item(), or an `if` on a tensor: the next microbatch may differ
    communicates                        collectives of other ranks must be launched in the same order
    draws random numbers on the CPU     a layer that is skipped at random would be skipped always
    recomputes with dropout             the recomputation draws the numbers of its forward again

PyTorch finds some of these only while it captures, and a capture that fails leaves a generator and an
allocator in the midst of it. So the last eager steps are watched.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint

from hpnb.record.recorder import Recorder, recording

_SYNCHRONIZES = "called a synchronizing CUDA operation"


class CaptureWatch:
    """Watches eager actions.

    Attributes:
        reasons: {stage: why it cannot be captured}, the first reason of each.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.reasons = device, dict[int, str]()

    @contextmanager
    def forward(self, stage: int) -> Iterator[None]:
        """Around the forward of a stage, and its loss."""
        recomputes: list[bool] = []
        states, offset = _cpu_states(), self._offset()
        recorder = Recorder(aligned=False)

        def snapshot(*args: Any) -> Any:
            recomputes.append(True)
            return original(*args)

        original = torch.utils.checkpoint.get_device_states
        with patch.object(torch.utils.checkpoint, "get_device_states", snapshot), recording(recorder):
            with self.backward(stage):
                yield
        if recorder.communications(0):
            self._note(stage, f"it communicates within the stage ({recorder.communications(0)[0].op})")
        if states != _cpu_states():
            self._note(stage, "it draws random numbers on the CPU, which a graph would repeat")
        if recomputes and offset != self._offset():
            self._note(stage, "it recomputes activations and draws random numbers, as dropout does")

    @contextmanager
    def backward(self, stage: int) -> Iterator[None]:
        """Around I or B."""
        if self._device.type != "cuda":
            yield
            return
        mode = torch.cuda.get_sync_debug_mode()
        with ExitStack() as stack:
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            stack.callback(torch.cuda.set_sync_debug_mode, mode)
            yield
        for warning in caught:
            if _SYNCHRONIZES in str(warning.message):
                where = f"{warning.filename.rsplit('/', 1)[-1]}, line {warning.lineno}"
                self._note(stage, f"Python waits for a value of the GPU ({where}), and may act on it")
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def _note(self, stage: int, reason: str) -> None:
        self.reasons.setdefault(stage, reason)

    def _offset(self) -> int:
        """How many random numbers have been drawn on the GPU."""
        if self._device.type != "cuda":
            return int.from_bytes(torch.get_rng_state().numpy().tobytes()[:16], "little")
        return torch.cuda.default_generators[torch.cuda.current_device()].get_offset()


def _cpu_states() -> tuple[object, ...]:
    return random.getstate(), torch.get_rng_state().numpy().tobytes()
