"""What notebook 05 says of the steps that gpt2_zero.py measures: numbers and words for its prose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hpnb.lesson.predictions.outcome import GOOD
from hpnb.lesson.programs.gpt2_zero import StepMeasurement
from hpnb.lesson.programs.gpt2_zero_predictions import ZeroConfig, predict_memory
from hpnb.lesson.programs.layer_times import ranges_overlap
from hpnb.lesson.tables import number
from hpnb.lesson.values import record
from hpnb.models import GPT2Size
from hpnb.theory.step_memory import Moment


def record_steps(
    runs: Mapping[ZeroConfig, StepMeasurement], parts: Mapping[ZeroConfig, Mapping[str, float]]
) -> None:
    """Record what the page says of measured steps beside the `parts` that are predicted of them.

    Ratios of both (05.off), what recomputation adds (05.recompute), whether ZeRO-0 and ZeRO-3 overlap
    (05.ranges), how much shorter or longer steps are than ZeRO-0's (05.changed), seconds of and after the
    update (05.update, 05.after), how many times as long as predicted both take with ZeRO-1 and 2 (05.late),
    where most of the excess over the prediction lies (05.excess), and what offloading adds (05.offload).
    """
    medians = {c: run.seconds[1] for c, run in runs.items()}
    totals = {c: sum(part.values()) for c, part in parts.items()}
    off = {str(c): medians[c] / totals[c] for c in runs}
    low, *_, high = sorted(off, key=off.__getitem__)
    hold = sum(GOOD[0] <= ratio <= GOOD[1] for ratio in off.values())
    record("05.off", {"low": off[low], "high": off[high], "highest": high, "of": len(off), "hold": hold})
    added = [medians[ZeroConfig(stage, -1)] - medians[ZeroConfig(stage)] for stage in range(4)]
    record("05.recompute", {"least": min(added), "most": max(added)}, "s")
    together = ranges_overlap(*(runs[ZeroConfig(stage)].seconds for stage in (0, 3)))
    record("05.ranges", "overlap: either may be faster" if together else "do not overlap")
    base = ZeroConfig(0)
    changed = {f"zero-{z}": _change_in_words(medians[base], medians[ZeroConfig(z)]) for z in (1, 2, 3)}
    predicted_1 = _change_in_words(totals[base], totals[ZeroConfig(1)])
    record("05.changed", {**changed, "zero-1-predicted": predicted_1})
    record("05.update", {str(c): runs[c].parts["update"] for c in map(ZeroConfig, range(4))}, "s")
    after = {str(c): run.parts["exposed after the update"] for c, run in runs.items()}
    predicted = parts[ZeroConfig(2)]["exposed after the update"]
    record("05.after", {**after, "predicted": predicted}, "s")
    late = [
        _late_seconds(runs[c].parts) / _late_seconds(parts[c])
        for c in runs
        if c.stage in (1, 2) and not c.offload
    ]
    record("05.late", {"least": min(late), "most": max(late)})
    record("05.excess", _excess_in_words([(runs[c].parts, parts[c]) for c in runs if not c.offload]))
    record("05.offload", _offload_in_words(medians, totals))


def _late_seconds(parts: Mapping[str, float]) -> float:
    """Of the update and of the communication after it."""
    return parts["update"] + parts["exposed after the update"]


def _excess_in_words(steps: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> str:
    """For prose: a sentence on where steps, (measured, predicted) parts, exceed their predictions."""
    total = sum(sum(measured.values()) - sum(predicted.values()) for measured, predicted in steps)
    late = sum(_late_seconds(measured) - _late_seconds(predicted) for measured, predicted in steps)
    if total <= 0:
        return "All bars together are no longer than predicted."
    where = "before the update" if total - late > late else "in the update and after it"
    return f"In the bars, most of the excess lies {where}."


def _change_in_words(before: float, after: float) -> str:
    """For prose: how much "shorter" or "longer" a step is, such as "15.7 ms shorter"."""
    if after == before:
        return "no longer"
    return f"{number(abs(after - before), 's')} {'shorter' if after < before else 'longer'}"


def _offload_in_words(medians: Mapping[ZeroConfig, float], totals: Mapping[ZeroConfig, float]) -> str:
    """For prose: a sentence on what offloading adds to a step with ZeRO-3 and recomputation."""
    kept, offloaded = ZeroConfig(3, -1), ZeroConfig(3, -1, offload=True)
    if offloaded not in medians:
        return "This run does not offload."
    measured, predicted = (number(took[offloaded] - took[kept], "s") for took in (medians, totals))
    return (
        f"In this run, offloading added {measured} to a step with ZeRO-3 and recomputation, predicted as "
        f"{predicted}."
    )


def record_shape(size: GPT2Size, dtype: torch.dtype) -> None:
    """Record under 05.shape what formulas of the page need of a model."""
    shape = {"bytes": dtype.itemsize, "hidden": size.hidden, "vocabulary": size.vocab_size}
    record("05.shape", shape)


def record_worked(xl: Moment, here: Moment) -> None:
    """Record under 05.worked two predicted peaks by category: of XL on two ranks with ZeRO-1, and of the
    page's model with ZeRO-0.
    """
    columns = {"xl-on-two-ranks-zero-1": vars(xl), "this-page-zero-0": vars(here)}
    for category in vars(xl):
        values = {column: moment[category] for column, moment in columns.items()}
        record(f"05.worked.{category}", values, "B")


def limit_in_words(floor: float, step: float) -> dict[str, str]:
    """For prose: whether "computing" or "launching", `floor` seconds, sets the time of a step, in "word".

    Where it is launching, the step does not show how long computing takes. So both are "equal" not at "about"
    the tokens that the step suggests, but at "more than" these.
    """
    computes = step > 2 * floor
    return {
        "word": "computing" if computes else "launching",
        "equal": "about" if computes else "more than",
    }


def record_depths(
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    predicted: Mapping[ZeroConfig, int],
    measured: Mapping[ZeroConfig, int],
    ranks: int,
    bucket_mb: float,
    workspace: float,
) -> None:
    """Record million parameters of the measured depths, 05.millions, and when steps of the predicted depths
    are fullest, 05.fullest; both depths are what `deepest_models` returned.
    """
    block = size.block().parameters
    for config, layers in predicted.items():
        deep = replace(size, layers=max(layers, 1))  # where not even one block fits: the step of one
        step = predict_memory(deep, rows, dtype, config, ranks, bucket_mb, workspace)
        parameters = size.parameters() + (measured[config] - size.layers) * block
        record("05.millions", {f"zero-{config.stage}": parameters / 1e6})
        record("05.fullest", {f"zero-{config.stage}": step.fullest.name})
