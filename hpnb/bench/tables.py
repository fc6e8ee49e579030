"""Tables of what was found: as text while a run goes on, and as Markdown for the README."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpnb.bench.layouts import shape
from hpnb.bench.loss_agreement import times
from hpnb.bench.results import LayoutResult, ProgramResult, Run

_WIDTH = 54


def head(unit: str) -> str:
    """Of the rows below."""
    return (
        f"{'':{_WIDTH}} {'step':>11} {unit + '/s/GPU':>14} {'TFLOP/s/GPU':>12} {'of matmul':>10} "
        f"{'peak':>10} {'bubble':>8} {'simulated':>10}   hpnb's speed over it"
    )


def rows(found: LayoutResult) -> list[str]:
    """A row for each program of a layout; then hpnb's best over the best peer."""
    lines = [f"{found.layout}: products alone {found.matmul / 1e12:.4g} TFLOP/s"]
    best, peer = found.fastest(ours=True), found.fastest(ours=False)
    for entry in found.entries:
        name = f"  {entry.name}"
        seconds = found.shown(entry.name)
        if entry.failed or seconds is None:
            lines.append(f"{name:{_WIDTH}} {entry.failed or 'its rounds were lost with others'}")
            continue
        bubble = ["-", "-"] if entry.bubble is None else [f"{100 * part:.1f} %" for part in entry.bubble]
        line = (
            f"{name:{_WIDTH}} {seconds * 1e3:8.2f} ms {_amount(found.per_gpu(entry.name)):>14} "
            f"{found.tflops(entry.name):12.4g} {found.share(entry.name):10.1%} {_gib(entry.peak):>10} "
            f"{bubble[0]:>8} {bubble[1]:>10}"
        )
        if best is not None and not entry.ours:
            line += f"   {ratio(found, best, entry)}"
        lines.append(line)
    if best is not None and peer is not None:
        lines.append(f"  {best.name} over {peer.name}: {ratio(found, best, peer)}")
    if found.retries:
        lines.append(
            f"  the allocator ran out of memory {found.retries} times during the rounds: times are too long"
        )
    return lines


def families(layouts: Sequence[LayoutResult]) -> list[str]:
    """hpnb's layouts of data parallelism over the best peer of all of them, by medians."""
    kinds = ("dp", "zero1", "zero2", "zero3")
    family = [f for f in layouts if shape(f.layout, f.ranks).kind in kinds]
    peers = [(f, peer) for f in family if (peer := f.fastest(ours=False)) is not None]
    if len(family) < 2 or not peers:
        return []
    where, best = max(peers, key=lambda pair: pair[0].per_gpu(pair[1].name))
    lines = [f"over the best peer of these layouts, {best.name} of {where.layout}:"]
    for f in family:
        if (mine := f.fastest(ours=True)) is not None:
            lines.append(f"  {f.layout:8} {f.per_gpu(mine.name) / where.per_gpu(best.name):.3f}")
    return lines


def markdown(run: Run) -> str:
    """The README's table of a run, with where it was measured."""
    unit = next(iter(run.layouts.values())).unit if run.layouts else "tokens"
    heads = ["layout", "hpnb", f"{unit}/s/GPU", "TFLOP/s/GPU", "of matmul", "peak", "bubble (simulated)",
             "PyTorch's programs: TFLOP/s/GPU, peak, hpnb's speed over it"]  # fmt: skip
    lines = [f"{run.title}; {run.ranks} x {run.device}.", "", _line(heads), _line(["---"] * len(heads))]
    for found in run.layouts.values():
        best, mine = found.fastest(ours=True), [""] * 6
        if best is not None:
            said = best.name.removeprefix("hpnb").lstrip(", ") or "as is"
            bubble = "" if best.bubble is None else f"{best.bubble[0]:.1%} ({best.bubble[1]:.1%})"
            mine = [said, _amount(found.per_gpu(best.name)), f"{found.tflops(best.name):.4g}",
                    f"{found.share(best.name):.0%}", _gib(best.peak), bubble]  # fmt: skip
        lines.append(_line([found.layout, *mine, _beside(found, best)]))
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    lines += ["", f"Measured {stamp(run)}, with {versions}."]
    if run.losses:
        lines += ["", f"Losses of {run.losses['steps']} steps are so many times as far from one GPU's as its "
                  f"own with rows in another order: {'; '.join(_losses(run))}."]  # fmt: skip
    return "\n".join(lines)


def _losses(run: Run) -> Iterator[str]:
    """Of each layout: in multiples of what another order of rows does, and with tp of heads and units."""
    for name, found in run.losses["layouts"].items():
        said = f"{name} {times(found['distance'], run.losses['order']):.2f}"
        if "units" in run.losses and shape(name.split()[0], run.ranks).tp > 1:
            said += (
                f" ({times(found['distance'], run.losses['units']):.2f} of another order of heads and units)"
            )
        yield said


def stamp(run: Run) -> str:
    """When and at which commit; the last day, where there are several."""
    return f"{'until ' if ' and ' in run.commit else ''}{run.date[:10]} at {run.commit}"


def _beside(found: LayoutResult, best: ProgramResult | None) -> str:
    """All peers that ran, the fastest first."""
    said = []
    for one in peers(found):
        beside = "" if best is None else f", {ratio(found, best, one)}"
        said.append(f"{one.name}: {found.tflops(one.name):.4g}, {_gib(one.peak)}{beside}")
    return "<br>".join(said) or no_peers(found)


def peers(found: LayoutResult) -> list[ProgramResult]:
    """All of PyTorch's programs that ran, the fastest first."""
    ran = [one for one in found.entries if not one.ours and not one.failed and found.seconds(one.name)]
    return sorted(ran, key=lambda one: found.per_gpu(one.name), reverse=True)


def no_peers(found: LayoutResult) -> str:
    """What is said where there are none."""
    apart = any(not one.ours and "train the same" in one.failed for one in found.entries)
    return "none that trains the same" if apart else "none ran"


def ratio(found: LayoutResult, ours: ProgramResult, peer: ProgramResult) -> str:
    """How many times as fast as the peer, round by round where both took turns; else of medians."""
    rounds = found.ratio(ours.name, peer.name)
    if rounds is not None:
        return f"{rounds[0]:.3f} [{rounds[1]:.3f}, {rounds[2]:.3f}]"
    return f"{found.per_gpu(ours.name) / found.per_gpu(peer.name):.3f} (of medians)"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _gib(held: int) -> str:
    return f"{held / 2**30:.1f} GiB" if held else "-"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
