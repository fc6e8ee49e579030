"""Random states of dropout: masks agree on replicated activations and differ on sharded ones.

    replicated    every rank of the axis drops the same elements, or the ranks' copies of a token diverge
    sharded       every rank drops elements independently, or the first heads of all ranks (0, 4, 8 and 12 of
                  16 heads over 4 ranks) would share one mask

All ranks of an axis start from one seed (`torch.manual_seed(seed)` on each) and draw alike, which is right
for replicated activations. `DropoutRng.use_rank_state` gives PyTorch's generator a state of this rank alone.
It is a hash of the common state and the rank, so the generator stays the only thing to seed, save and
restore, and activation checkpointing, which restores the generator, draws the same masks again.

    common state        s0 --> s1 --> s2 --> ...       advances by one draw each time
    state of rank r     hash(s1, r), then hash(s2, r), ...

(Megatron-LM keeps the second state in a tracker beside the generator: `CudaRNGStatesTracker`.)
"""

from __future__ import annotations

import hashlib
import inspect

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hpnb.mesh import Axis


class DropoutRng:
    """Switches PyTorch's generator between the common state and this rank's state.

    Args:
        device: whose generator the dropouts draw from.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device
        self._common_state: torch.Tensor | None = None  # kept while this rank's state is in use
        self._seeds_agree = False

    def use_rank_state(self) -> None:
        """From here on this rank draws independently. A second call does nothing."""
        if not self._seeds_agree and self.axis.size > 1:
            self.check_seeds(self.generator().get_state())
        self.try_rank_state()

    def try_rank_state(self) -> None:
        """`use_rank_state` where perhaps nothing draws, so that other seeds may be right."""
        if self._common_state is not None or self.axis.size == 1:
            return
        generator = self.generator()
        torch.rand((), device=self.device)  # advance, so that the next rank state differs from this one
        self._common_state = generator.get_state()
        digest = hashlib.blake2b(
            self._common_state.numpy().tobytes(), digest_size=7, salt=b"%d" % self.axis.rank
        ).digest()
        generator.manual_seed(int.from_bytes(digest, "little"))

    def use_common_state(self) -> None:
        """From here on all ranks of the axis draw alike again."""
        if self._common_state is not None:
            self.generator().set_state(self._common_state)
            self._common_state = None

    def discard_rank_state(self) -> None:
        """Start afresh, after a forward that ended early, when somebody else has restored the generator."""
        self._common_state = None

    def generator(self) -> torch.Generator:
        """What dropouts draw from."""
        if self.device.type == "cuda":
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            return torch.cuda.default_generators[index]
        return torch.default_generator

    def check_seeds(self, common_state: torch.Tensor) -> None:
        """The first time: ranks that are not seeded alike would drop different elements of one replicated
        activation."""
        if self._seeds_agree:
            return
        digest = hashlib.blake2b(common_state.numpy().tobytes(), digest_size=7).digest()
        state = torch.tensor(int.from_bytes(digest, "little"), device=self.device)
        states = [torch.empty_like(state) for _ in range(self.axis.size)]
        dist.all_gather(states, state, group=self.axis.group)
        if len({int(state) for state in states}) > 1:
            raise ValueError(
                f"the {self.axis.size} ranks of axis {self.axis.name} have different random states, so their "
                "copies of an activation would be dropped out differently; call torch.manual_seed with the "
                "same seed on all of them"
            )
        self._seeds_agree = True


def has_dropout(model: nn.Module) -> bool:
    """Whether a forward of `model` in training mode draws: it has a Dropout, or a module with a rate, such as
    the attention_dropout of transformers. A class that a user registers may draw without: see `BlockDropout`.
    """
    rates = [m.p for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    rates += [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if "dropout" in name and isinstance(value, float)
    ]
    return any(rate > 0 for rate in rates)


def may_draw(model: nn.Module) -> bool:
    """Whether a forward of `model` in training mode may draw: it has dropouts, or a module of a class that is
    neither PyTorch's nor transformers' calls a dropout of torch.nn.functional, at whatever rate."""
    return has_dropout(model) or any(_calls_dropout(module) for module in model.modules())


def _calls_dropout(module: nn.Module) -> bool:
    names: set[object] = set()
    for kind in type(module).__mro__:
        if not kind.__module__.startswith(("torch.", "transformers.")):
            for method in filter(inspect.isfunction, vars(kind).values()):
                names.update(method.__code__.co_names)
                for constant in method.__code__.co_consts:  # among them the names of keyword arguments
                    names.update(constant if isinstance(constant, tuple) else ())
    called = names & _DROPOUTS  # a Dropout that is called by the same name is a module, and has a rate
    return any(not isinstance(getattr(module, str(name), None), nn.Module) for name in called)


_DROPOUTS = {name for name in dir(F) if name.endswith("dropout") or name[:-2].endswith("dropout")} | {
    "dropout_p"
}
