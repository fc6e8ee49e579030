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

A CUDA graph cannot hash, and a capture does not let Python read the generator. So an eager forward notes how
far the common state has advanced where each rank state begins (`noting_rank_states`). The graph gets one
generator for each of them (`CapturedRankStates`), which is seeded before each replay with the hash that an
eager forward would take there. Both draw the same masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hpnb.mesh import Axis


class DropoutRng:
    """Switches PyTorch's generator between the common state and this rank's state.

    Args:
        device: whose generator the dropouts draw from.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device
        # Kept while this rank's state is in use; in a capture a generator that has it.
        self._common_state: torch.Tensor | torch.Generator | None = None
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
        if _captured:
            self._common_state = generator.graphsafe_get_state()
            generator.graphsafe_set_state(_captured[-1].take(self))
            return
        if _noted and self.device.type == "cuda":
            _noted[-1].append((self, generator.get_offset()))
        self._common_state = generator.get_state()
        generator.manual_seed(self.rank_seed(self._common_state))

    def use_common_state(self) -> None:
        """From here on all ranks of the axis draw alike again."""
        if isinstance(self._common_state, torch.Tensor):
            self.generator().set_state(self._common_state)
        elif self._common_state is not None:
            self.generator().graphsafe_set_state(self._common_state)
        self._common_state = None

    def discard_rank_state(self) -> None:
        """Start afresh, after a forward that ended early, when somebody else has restored the generator."""
        self._common_state = None

    def rank_seed(self, common_state: torch.Tensor) -> int:
        """The seed of this rank's state that begins at `common_state`."""
        content, salt = common_state.numpy().tobytes(), b"%d" % self.axis.rank
        return int.from_bytes(hashlib.blake2b(content, digest_size=7, salt=salt).digest(), "little")

    @staticmethod
    def count_noted() -> int:
        """How many rank states the forward that is watched has noted."""
        return len(_noted[-1]) if _noted else 0

    @staticmethod
    def forget_noted(count: int) -> None:
        """Forget those after the first `count`, from which nothing was drawn."""
        if _noted:
            del _noted[-1][count:]

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


RankStateStart = tuple[DropoutRng, int]  # whose state begins, and the offset of the common state there

_noted: list[list[RankStateStart]] = []  # of the eager forwards that are watched, the innermost last
_captured: list[CapturedRankStates] = []  # of the capture that runs


@contextmanager
def noting_rank_states() -> Iterator[list[RankStateStart]]:
    """Gives a list, to which each state of this rank that begins inside on a GPU is added."""
    starts: list[RankStateStart] = []
    _noted.append(starts)
    try:
        yield starts
    finally:
        _noted.pop()


class CapturedRankStates:
    """The states of this rank in a CUDA graph of a forward.

    Args:
        starts: as an eager forward has noted them, with offsets from the offset at its beginning.

    Attributes:
        generators: one for each start. The graph has to register them before its capture.
    """

    def __init__(self, starts: Sequence[RankStateStart]) -> None:
        self._starts, self._taken = tuple(starts), 0
        self.generators = [torch.Generator(rng.generator().device) for rng, _ in starts]

    @contextmanager
    def capturing(self, generator: torch.Generator) -> Iterator[None]:
        """Around the capture. Afterwards dropouts draw from `generator`'s present state again."""
        common = generator.graphsafe_get_state()
        _captured.append(self)
        try:
            yield
        finally:
            _captured.pop()
            generator.graphsafe_set_state(common)  # also where a forward has ended early

    def take(self, rng: DropoutRng) -> torch.Generator:
        """The generator of the state that begins now.

        Raises:
            RuntimeError: the eager forward had none there.
        """
        if self._taken == len(self._starts) or self._starts[self._taken][0] is not rng:
            raise RuntimeError("dropouts of tensor parallelism draw where they drew nothing in an eager step")
        self._taken += 1
        return self.generators[self._taken - 1]

    def seed(self) -> None:
        """Before a replay: give each state the seed that an eager forward would take now."""
        for (rng, offset), state in zip(self._starts, self.generators, strict=True):
            common = rng.generator().clone_state()
            common.set_offset(common.get_offset() + offset)
            state.manual_seed(rng.rank_seed(common.get_state()))
