"""Dropout under tensor parallelism: masks agree on activations that are replicated, and differ on cut ones.

    replicated    every rank of the axis drops the same elements, or their copies of a token drift apart
    cut           every rank drops elements of its own, or heads 0, 4, 8, ... would share one mask

All ranks of an axis are seeded alike (`torch.manual_seed(seed)` on each), and draw alike: that is right for
what is replicated. `DropoutRng.own` lends PyTorch's generator a state of this rank's own. It follows from the
state that all have in common and from the rank: so the generator remains all there is to seed, to save and to
restore, and activation checkpointing, which sets it back, sees the same masks again.

    state of all     s0 --> s1 --> s2 --> ...       one draw further each time
    lent to rank r   hash(s1, r), then hash(s2, r), ...
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpnb.mesh import Axis


class DropoutRng:
    """One for a model: whether this rank draws by itself at the moment.

    Args:
        device: whose generator the dropouts draw from.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device
        self._common: torch.Tensor | None = None  # the state of all, while this rank draws by itself
        self._agreed = False

    def own(self) -> None:
        """From here on this rank draws by itself. A second call does nothing."""
        if self._common is not None or self.axis.size == 1:
            return
        generator = self._generator()
        if not self._agreed:
            self._check(generator)
        torch.rand((), device=self.device)  # one further, so that the next own state is another
        self._common = generator.get_state()
        seen = hashlib.blake2b(self._common.numpy().tobytes(), digest_size=7, salt=b"%d" % self.axis.rank)
        generator.manual_seed(int.from_bytes(seen.digest(), "little"))

    def common(self) -> None:
        """From here on all ranks of the axis draw alike again."""
        if self._common is not None:
            self._generator().set_state(self._common)
            self._common = None

    def forget(self) -> None:
        """A forward ended early, and somebody else has put the generator back."""
        self._common = None

    def _generator(self) -> torch.Generator:
        if self.device.type == "cuda":
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            return torch.cuda.default_generators[index]
        return torch.default_generator

    def _check(self, generator: torch.Generator) -> None:
        """Once: ranks that are not seeded alike would drop different elements of the same activation."""
        state = hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=7).digest()
        mine = torch.tensor(int.from_bytes(state, "little"), device=self.device)
        every = [torch.empty_like(mine) for _ in range(self.axis.size)]
        dist.all_gather(every, mine, group=self.axis.group)
        if len({int(state) for state in every}) > 1:
            raise ValueError(
                f"the {self.axis.size} ranks of axis {self.axis.name} have different random states, so their "
                "copies of an activation would be dropped out differently; call torch.manual_seed with the "
                "same seed on all of them"
            )
        self._agreed = True


def drops(model: nn.Module) -> bool:
    """Whether a forward of `model` in training mode may draw: a Dropout, or an attention that has one."""
    rates = [m.p for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    for module in model.modules():
        found: Any = getattr(module, "attention_dropout", 0.0)  # transformers' attentions that have no module
        rates.append(found if isinstance(found, float) else 0.0)
    return any(rate > 0 for rate in rates)
