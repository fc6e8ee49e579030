"""What theory predicts for notebook 03: seconds of a block in every mode, its calls and its latencies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from hpnb import theory
from hpnb.lesson.exercises.vit_tensor_parallel import TASKS
from hpnb.lesson.machine_card import MachineCard
from hpnb.lesson.programs.step_timing import fall_in_words
from hpnb.lesson.programs.vit_tensor import ModeSeconds, mean_seconds
from hpnb.lesson.tables import number
from hpnb.lesson.values import record
from hpnb.models import ViTSize
from hpnb.ranks import usable_cores
from hpnb.record import Timeline
from hpnb.theory import Block

LITTLE = 1.5  # times as long with eight times the tokens: tokens do not set such a time
NEAR = 0.05  # by less than that, bytes hardly differ


def predict_modes(measured: ModeSeconds, card: MachineCard, dtype: torch.dtype) -> ModeSeconds:
    """The same by `theory.block_seconds`, at the card's rate times `core_share` and without overlap."""
    rate = core_share(card) * card.matmul
    return {
        (size, images): {
            mode: _predict_block(size.block(images, dtype.itemsize), mode, card, rate) for mode in modes
        }
        for (size, images), modes in measured.items()
    }


def core_share(card: MachineCard) -> float:
    """The part of the time for which a rank has a core: below 1 where ranks are more than the CPU's cores.

    The card's rate is that of a short product, during which a rank mostly has a core to itself.
    """
    return min(1.0, usable_cores() / card.ranks) if card.device == "cpu" else 1.0


def _predict_block(block: Block, mode: str, card: MachineCard, rate: float) -> float:
    grid = mode.removesuffix("+sp")
    return theory.block_seconds(block, grid, card.ranks, card.link, rate, 1, mode != grid).total


def calls_of_modes(size: ViTSize, modes: Sequence[str]) -> dict[str, int]:
    """{mode: collectives that a block calls on 4 ranks, forward and backward}, whatever the sizes."""
    grids = {mode: (mode.removesuffix("+sp"), 4, 1, mode.endswith("+sp")) for mode in modes}
    return {mode: theory.block_sent(size.block(1), *grid).calls for mode, grid in grids.items()}


def latencies_of_modes(ranks: int, depths: Mapping[str, int]) -> dict[str, float]:
    """{mode: link latencies of a block's collectives, one after the other}, whatever the sizes."""
    latency_only, block = theory.Link(1.0, math.inf), Block(1024, 8, 1024, 1)
    return {
        mode: theory.block_sent(block, mode, ranks, depths.get(mode, 1)).seconds(latency_only)
        for mode in ("1d", "2d", "2.5d", "3d")
    }


def slower_than_predicted(recorded: Timeline, block: Block, card: MachineCard) -> dict[str, float]:
    """How many times as long a recorded block in 1D took as the card predicts for it: of computing; of the
    all-reduces, what latency makes of their bytes alone, and what was recorded over that.
    """
    messages = theory.block_sent(block, "1d", card.ranks)
    sums = messages.seconds(card.link)
    return {
        "computing": mean_seconds(recorded, "FIW") * card.ranks * card.matmul / block.training_flops,
        "latency of all-reduces": sums * card.link.bandwidth / messages.bytes(),
        "waiting and the rest": mean_seconds(recorded) / sums,
    }


def record_race(
    seconds: ModeSeconds,
    predicted: ModeSeconds,
    halves: Mapping[str, float],
    card: MachineCard,
    four: MachineCard,
) -> None:
    """Record how the modes' seconds on four ranks differ from their prediction, and what latency explains.

    Args:
        halves: as `vit_tensor.time_halves` has them.
        card, four: of the page's first ranks, and of the four.
    """
    (size, few), (_, many) = min(seconds, key=lambda key: key[1]), max(seconds, key=lambda key: key[1])
    measured, expected = seconds[size, few], predicted[size, few]
    record("03.too-low", {mode: measured[mode] / expected[mode] for mode in measured})
    growth = {mode: seconds[size, many][mode] / measured[mode] for mode in measured}
    for name, took in (("few", measured), ("many", seconds[size, many])):
        record(f"03.{name}", took, "s")  # measured or replayed: the page's table says which
    record("03.growth", growth)
    record("03.alone", dict(zip(("all-reduce", "two-halves"), halves.values(), strict=True)), "s")
    record("03.constant", constant_in_words(growth, many / few))
    latencies = four.predicted(0)  # of no bytes: 6 steps of a ring
    record("03.latency", {"all": (4 * latencies, "s"), "share": (400 * latencies / measured["1d"], "%")})
    record("03.norms", latencies, "s")
    calls = calls_of_modes(size, ("1d", "2d"))
    per_call = (measured["2d"] - measured["1d"]) / (calls["2d"] - calls["1d"])
    record("03.calls", {"more": calls["2d"] - calls["1d"], "seconds": (per_call, "s")})
    record("03.sp-longer", {"few": difference(measured), "many": difference(seconds[size, many])})
    record("03.alpha", alphas_in_words(card, four))
    even = 12 * size.hidden  # 2D sends fewer bytes above
    tokens = {"few": few * size.tokens, "many": many * size.tokens, "even": even, "hidden": size.hidden}
    record("03.tokens", tokens)
    block = size.block(many, 2)  # a ratio of bytes, so the dtype cancels
    sent = {mode: theory.block_sent(block, mode, four.ranks).bytes() for mode in ("1d", "2d")}
    record("03.grid", grid_in_words(seconds[size, many], sent["2d"] / sent["1d"]))
    job = TASKS["few tokens, a slow link"]
    record("03.job", {f"t{t}": job.step_seconds(t) for t in (1, 16)}, "s")
    all_reduce, both_halves = halves.values()
    record("03.four-halves", more_or_less(4 * (both_halves - all_reduce)))
    record("03.rate", core_share(four) * four.matmul, "FLOP/s")


def constant_share(growth: float, factor: float) -> float:
    """The share of a time that is constant, if the rest is proportional to a size, and the time grows by
    `growth` with `factor` times the size. Below 1 all of it is constant.
    """
    return min(1.0, max(0.0, (factor - growth) / (factor - 1)))


def record_formula(card: MachineCard, dtype: torch.dtype) -> None:
    """Record ρ, bytes of a value, and the hidden size from which eight ranks have r = 1 on this link."""
    record("03.rho", card.rho, "FLOP/B")
    record("03.value-bytes", dtype.itemsize)
    record("03.wide", 7 * card.rho * dtype.itemsize / 2 / 4.5)


def record_padding(counted: Mapping[str, float], tokens: int, ranks: int) -> None:
    """Record tokens that the ranks do not divide, and bytes that sequence parallelism sends more than 1D."""
    record("03.padded", {"tokens": tokens, "ranks": ranks})
    record("03.sp-more", counted["1D+SP sends (B)"] - counted["1D sends (B)"], "B")


def record_host(few: Timeline, many: Timeline, factor: float) -> None:
    """Record under 03.host what two recorded blocks say of launches, the second of more
    tokens, `factor` times as many.
    """
    record("03.host", computing_in_words(mean_seconds(few, "FIW"), mean_seconds(many, "FIW"), factor))


def predict_halves(card: MachineCard, size: ViTSize, images: int, dtype: torch.dtype) -> dict[str, float]:
    """What `vit_tensor.time_halves` times, predicted: both take as long."""
    seconds = card.predicted(images * size.tokens * size.hidden * dtype.itemsize)
    return {"all-reduce": seconds, "reduce-scatter, all-gather": seconds}


def copies_title(losses: Mapping[str, Sequence[float]], copies: Mapping[str, Sequence[float]]) -> str:
    """What the losses of all runs and the distances of their copies say; the run "right" has no fault."""
    apart = [case for case, distances in copies.items() if not distances[-1] < 1e-9]
    faulty = [case for case in copies if case != "right"]
    where = "in the faulty ones" if apart == faulty else f"in {len(apart)} of {len(copies)} runs"
    fall = fall_in_words(losses)
    fall = "The loss falls in all runs" if fall.startswith("All") else fall
    return f"{fall}, but copies diverge {where}" if apart else f"{fall}, and no copies diverge"


def growth_title(growth: Mapping[str, float]) -> str:
    """The title of a table of modes whose times grew so with eight times the tokens."""
    least, most = min(growth.values()), max(growth.values())
    if most < LITTLE:
        return "8 times the tokens take hardly longer"
    if most < 8:
        return "8 times the tokens take less than 8 times as long"
    return f"8 times the tokens take {least:.2f} to {most:.2f} times as long"


def constant_in_words(growth: Mapping[str, float], factor: float) -> str:
    """For prose: the part of 2D's and of 1D's time that does not depend on tokens, a whole sentence."""
    shares = {mode: f"{100 * constant_share(growth[mode], factor):.0f} %" for mode in ("2d", "1d")}
    flat = [mode.upper() for mode in shares if growth[mode] <= 1]
    if len(flat) == 2:
        return "Then no part proportional to the tokens shows: 2D and 1D took no longer with more of them."
    if not flat:
        return (
            f"Then the constant is {shares['2d']} of 2D's time with few tokens, and {shares['1d']} of 1D's."
        )
    (other,) = (mode for mode in shares if mode.upper() not in flat)
    constant = f"the constant is {shares[other]} of {other.upper()}'s time with few tokens"
    return f"Then {constant}. {flat[0]} took no longer, so it shows no part proportional to the tokens."


def computing_in_words(few: float, many: float, factor: float) -> str:
    """For prose: whether a block's computing depends on its tokens, whole sentences.

    `few` and `many` are seconds of computing with some tokens, and with `factor` times as many.
    """
    took = f"With 1/{factor:g} of the images, computing took {number(few, 's')}"
    took += f" instead of {number(many, 's')}"
    if many < LITTLE * few:
        return (
            f"{took}, hardly less. So tokens do not set this time: it contains waits for the host, which"
            " launches operations, and the factor says little of kernels."
        )
    share = 100 * constant_share(many / few, factor) * few / many
    if share < 1:
        return f"{took}, so no constant part shows."
    constant = f"about {share:.0f} % of this time does not shrink with the images"
    return f"{took}. So {constant}, such as launching operations."


def difference(seconds: Mapping[str, float]) -> str:
    """How much more or less time sequence parallelism takes than 1D, in words."""
    return more_or_less(seconds["1d+sp"] - seconds["1d"])


def more_or_less(seconds: float) -> str:
    """A difference in words: "2.24 ms more", "1.01 ms less"."""
    return f"{number(abs(seconds), 's')} {'more' if seconds > 0 else 'less'}"


def alphas_in_words(card: MachineCard, four: MachineCard) -> str:
    """The latency of the page's first ranks and of the four, which may be the same ranks."""
    latency = number(four.latency, "s")
    if card.ranks == four.ranks:
        return f"{latency}, as on the page's card"
    waits = ", because ranks wait for cores, too" if core_share(four) < 1 else ""
    return f"{latency}, against {number(card.latency, 's')} with {card.ranks}{waits}"


def grid_in_words(seconds: Mapping[str, float], sent: float) -> str:
    """What 2D takes beside 1D with the larger number of tokens; it sends `sent` times the bytes of 1D."""
    took, other = (number(seconds[mode], "s") for mode in ("2d", "1d"))
    if abs(sent - 1) < NEAR:
        return f"2D sends about as many bytes as 1D, and takes {took} against {other}"
    joined = "but" if (sent < 1) == (seconds["2d"] > seconds["1d"]) else "and"
    return f"2D sends {'fewer' if sent < 1 else 'more'} bytes than 1D, {joined} takes {took} against {other}"


def verdict(predicted: float, measured: float, slower: Mapping[str, float]) -> str:
    """Whether a link is fast enough by a predicted and by a measured ratio of computing to communication, and
    why not by both, by `slower_than_predicted`: whole sentences.
    """
    fast = [ratio >= 1 for ratio in (predicted, measured)]
    words = ["fast enough (r at least 1)" if is_fast else "too slow (r below 1)" for is_fast in fast]
    if fast[0] == fast[1]:
        return f"Both the formula and the run say that the interconnect is {words[0]}."
    computing, *messages = slower.values()
    said = f"The formula says that the interconnect is {words[0]}, and the run says that it is {words[1]}."
    longer = f"took {computing:.2f} times as long as its matrix products alone would"
    if measured < predicted:
        slow_link = math.prod(messages) > 1
        why = "communication took longer than its bytes alone" if slow_link else f"computing {longer}"
        return f"{said} The run's r is smaller because {why}."
    if math.prod(messages) > 1:
        return f"{said} The link was not faster. The run's r is larger because computing {longer}."
    why = "communication took less time than its bytes alone"
    why += f", and computing {longer}" if computing > 1 else ""
    return f"{said} The run's r is larger because {why}."
