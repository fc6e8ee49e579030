"""Sentences and numbers of notebook 10 about its replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpnb import theory
from hpnb.lesson.machine_card import MachineCard
from hpnb.lesson.programs.context_replay import Replayed, predict_parts
from hpnb.lesson.programs.step_timing import fall_in_words
from hpnb.lesson.programs.vit_pipeline_words import listed
from hpnb.lesson.values import record
from hpnb.theory.context import Attention


def ratios_beside(
    seconds: Mapping[str, Sequence[float]], lengths: Sequence[int], border: float
) -> list[dict[str, float]]:
    """Packed Ulysses' seconds over the ring's, at lengths below the border and at the others: the "least" and
    the "most" of both. The shortest length counts as below the border, and the longest as above.
    """
    ratios = [p / r for p, r in zip(seconds["Ulysses, packed"], seconds["ring"], strict=True)]
    below = min(max(sum(length < border for length in lengths), 1), len(lengths) - 1)
    return [{"least": min(part), "most": max(part)} for part in (ratios[:below], ratios[below:])]


def wins_in_words(seconds: Mapping[str, Sequence[float]], lengths: Sequence[int]) -> str:
    """For prose: at which lengths Ulysses has fewer predicted seconds than the ring."""
    packed, plain = (
        [n for n, r, u in zip(lengths, seconds["ring"], seconds[way], strict=True) if u < r]
        for way in ("Ulysses, packed", "Ulysses")
    )
    if not packed and not plain:
        return "the ring exposes least at every length"
    at = [f"at {listed(wins)}" if wins else "at no length" for wins in (packed, plain)]
    return f"packed Ulysses exposes less than the ring {at[0]} tokens, and unpacked Ulysses {at[1]}"


def winners_in_words(
    predicted: Mapping[str, Sequence[float]], replayed: Sequence[Replayed], lengths: Sequence[int]
) -> str:
    """For prose: where the ring beats packed Ulysses in the replay, and where the card says otherwise.

    Lengths at which the bars of the two touch do not count.
    """
    touching = _touching(replayed, lengths)
    card = [r <= u for r, u in zip(predicted["ring"], predicted["Ulysses, packed"], strict=True)]
    rings = {n: times.ring <= times.packed
             for n, times in zip(lengths, replayed, strict=True) if n not in touching}  # fmt: skip
    if not rings:
        return "So it can't judge the card's prediction either"
    won = {way: [n for n, ring in rings.items() if ring == (way == "the ring")]
           for way in ("packed Ulysses", "the ring")}  # fmt: skip
    where = "at all other lengths" if touching else "at every length"
    parts = [f"{way} wins {where if len(wins) == len(rings) else f'at {listed(wins)} tokens'}"
             for way, wins in won.items() if wins]  # fmt: skip
    said = f"In the replay {', and '.join(parts)}"
    wrong = [n for n, ring in zip(lengths, card, strict=True) if rings.get(n, ring) != ring]
    if not wrong:
        return f"{said}, as the card predicts"
    return f"{said}. So the card names the wrong winner at {listed(wrong)} tokens"


def least_exposed_in_words(seconds: Mapping[str, Sequence[float]]) -> str:
    """The title of a figure of replayed medians: at how many lengths the ring exposes least of all ways."""
    least = [times[0] <= min(times) for times in zip(seconds["ring"], *seconds.values(), strict=True)]
    if all(least):
        return "In the replay's medians, the ring exposes least at every length"
    return f"In the replay's medians, the ring exposes least at {sum(least)} of {len(least)} lengths"


def fewest_bytes_title(sent: Mapping[str, float]) -> str:
    """The title of a table of {"ring, 8 kv heads": bytes, "Ulysses, 8 kv heads": ...}."""
    heads = [row.removeprefix("ring, ") for row in sent if row.startswith("ring, ")]
    fewer = [n for n in heads if sent[f"Ulysses, {n}"] < sent[f"ring, {n}"]]
    if not fewer:
        return "The ring sends no more than Ulysses"
    return "Ulysses sends fewer bytes than the ring" + (
        ""
        if fewer == heads
        else f" with {listed(fewer)}, not with {listed([n for n in heads if n not in fewer])}"
    )


def rows_title(losses: Mapping[str, Sequence[float]], rows: Mapping[str, Sequence[float]]) -> str:
    """The title of a figure of two runs: losses, and the norm of the gradient of each row of wpe."""
    trained = [sum(norm > 0 for norm in row) for row in rows.values()]
    tell = (
        "rows of wpe without a gradient tell"
        if trained[0] != trained[1]
        else "as many rows of wpe are trained"
    )
    return f"{fall_in_words(losses)}; {tell}"


def reloaded_title(off: Mapping[str, float]) -> str:
    """What {run: distance of the logits that one process computes from its checkpoint} says."""
    differ = [run for run, distance in off.items() if not distance < 1e-5]
    if not differ:
        return "Measured: one process computes the same logits from both checkpoints"
    return f"Measured: one process computes other logits after {listed(differ)}"


def touching_in_words(replayed: Sequence[Replayed], lengths: Sequence[int]) -> str:
    """For prose: at which lengths the quartiles of the ring and of packed Ulysses overlap."""
    at = _touching(replayed, lengths)
    if not at:
        return "The bars of the two touch at no length"
    if len(at) == len(lengths):
        return "The bars of the two touch at every length, so this run can't say which is faster"
    return f"The bars of the two touch at {listed(at)} tokens; there, this run can't say which is faster"


def _touching(replayed: Sequence[Replayed], lengths: Sequence[int]) -> list[int]:
    at = []
    for length, times in zip(lengths, replayed, strict=True):
        (ring_low, ring_high), (low, high) = (times.quartiles[way] for way in ("ring", "Ulysses, packed"))
        if ring_low <= high and low <= ring_high:
            at.append(length)
    return at


def source_in_words(replayed: Replayed) -> str:
    """For a title: where the seconds of messages come from."""
    return "computing and messages were timed" if replayed.timed else "messages take what the card says"


def covers_in_words(replayed: Sequence[Replayed], lengths: Sequence[int]) -> str:
    """For prose: at which lengths a ring's step computes for at least as long as its message takes."""
    covers = [
        times.parts["computing of a forward step"] >= times.parts["message of a ring"] for times in replayed
    ]
    count = sum(covers)
    if count in (0, len(covers)):
        return "at every length" if count else "at none of these lengths"
    if all(covers[-count:]):
        return f"from {lengths[-count]:,} tokens on"
    return f"at {listed([n for n, covered in zip(lengths, covers, strict=True) if covered])} tokens"


def parts_over_card(
    replayed: Sequence[Replayed], shapes: Sequence[Attention], ranks: int, card: MachineCard
) -> list[dict[str, float]]:
    """For each shape, replayed over predicted seconds of the parts of `predict_parts`."""
    predicted = [predict_parts(shape, ranks, card) for shape in shapes]
    return [
        {part: times.parts[part] / took for part, took in parts.items()}
        for times, parts in zip(replayed, predicted, strict=True)
    ]


def record_replay(
    replayed: Sequence[Replayed],
    predicted: Mapping[str, Sequence[float]],
    dots: Mapping[str, Sequence[float]],
    shapes: Sequence[Attention],
    ranks: int,
    card: MachineCard,
) -> None:
    """Record what the page's text says of the replay: {way: exposed seconds for each shape} are `predicted`
    by the card, and replayed in `dots`.
    """
    lengths, ends = [shape.sequence for shape in shapes], {"first": 0, "last": -1}
    for end, i in ends.items():
        record(f"10.at-{end}", {way: seconds[i] for way, seconds in dots.items()}, "s")
    record("10.lengths", {end: lengths[i] for end, i in ends.items()})
    record("10.touch", touching_in_words(replayed, lengths))
    record("10.covered", {end: 100 * replayed[i].covered for end, i in ends.items()}, "%")
    record("10.covers", covers_in_words(replayed, lengths))
    record("10.last-message", (100 * replayed[0].last / replayed[0].messages, "%"))
    tokens = theory.context.tokens_to_overlap(shapes[0], card.matmul, card.link)
    record("10.dotted", round(ranks * tokens))
    facts = {"overlap": round(tokens), "rho": round(card.rho), "heads": shapes[0].heads}
    record("10.card", facts | {"latency": (card.link.latency, "s")})
    off = {
        way: [max(p / t, t / p) for p, t in zip(predicted[way], times, strict=True)]
        for way, times in dots.items()
    }
    record("10.off", {way: max(factors) for way, factors in off.items()})
    worst = off["ring"].index(max(off["ring"]))  # here the ring's dot is farthest off
    record("10.farthest", lengths[worst])
    over = parts_over_card(replayed, shapes, ranks, card)
    record("10.over", {"first": over[0], "last": over[-1], "worst": over[worst]})
