"""Where the forward of one block draws from this rank's random state, and whether it draws at all.

A model with an nn.Dropout, or with the rates that transformers has, draws in training mode. A class that is
registered, or has a plan, may call F.dropout, or PyTorch's attention with a dropout_p, which no module shows.
Then each block's first forward in training mode shows it:

    first forward      changes random states as if it drew, and looks at the generator before each change
    if nothing drew    the generator gets back the state that it had before the block; later forwards of the
                       block leave it alone
    if a rank drew     all ranks go on so, with the masks that it would have with an nn.Dropout

The ranks agree on it in one all-reduce of a number, after that forward. The masks that a first forward draws
are right already, and a checkpoint that recomputes it draws them again.
"""

from __future__ import annotations

import inspect
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hpnb.dropout_rng import DropoutRng
from hpnb.models.registry import is_not_built_in


class BlockDropout:
    """The hooks of one block, or of a part of the embedding on a grid.

    Args:
        draws: whether it draws in training mode; None if its first forward must show it.
    """

    def __init__(self, block: nn.Module, rng: DropoutRng, draws: bool | None) -> None:
        self.block, self.rng = block, rng
        self._draws = draws
        self._before: torch.Tensor | None = None  # during that forward: the generator's state in front of it
        self._expected: torch.Tensor | None = None  # and its state if nothing draws
        self._drew = False
        self._num_noted = 0  # rank states that were noted for a CUDA graph in front of it

    def begin(self) -> None:
        """The forward begins."""
        self.rng.discard_rank_state()
        self._before = None
        if self._draws is None and self.block.training and self.rng.axis.size > 1:
            self._before = self._expected = self.rng.generator().get_state()
            self._drew, self._num_noted = False, self.rng.count_noted()

    def begin_sharded(self) -> None:
        """The forward of something that is sharded from end to end begins."""
        self.begin()
        self.use_rank_state()

    def use_rank_state(self) -> None:
        """What is sharded begins."""
        if not self.block.training or self._draws is False:
            return
        if self._before is None:
            self.rng.use_rank_state()
        else:
            self._look()
            self.rng.try_rank_state()
            self._expected = self.rng.generator().get_state()

    def use_common_state(self) -> None:
        """What is replicated begins."""
        if self._before is None:
            self.rng.use_common_state()
        else:
            self._look()
            self.rng.use_common_state()
            self._expected = self.rng.generator().get_state()

    def end(self) -> None:
        """The forward is over, or has failed."""
        self.use_common_state()
        before, self._before, self._expected = self._before, None, None
        if before is None or sys.exception() is not None:
            return
        drew = torch.tensor(int(self._drew), device=self.rng.device)
        dist.all_reduce(drew, dist.ReduceOp.MAX, group=self.rng.axis.group)
        self._draws = bool(drew)
        if self._draws:
            self.rng.check_seeds(before)
        else:
            self.rng.generator().set_state(before)
            self.rng.forget_noted(self._num_noted)  # or a capture would wait for states that do not come

    def _look(self) -> None:
        assert self._expected is not None
        self._drew |= not torch.equal(self.rng.generator().get_state(), self._expected)


def draws_in_training(model: nn.Module) -> bool | None:
    """Whether `model` does; None if only a forward can show it."""
    return True if has_dropout(model) else None if is_not_built_in(model) else False


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
