"""Tables of results: as text while a run goes on, and as Markdown for the pages that show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpnb.bench.layouts import kind_of, parse_layout
from hpnb.bench.results import BenchmarkRun, LayoutResult, ProgramResult, distance_over_noise

_WIDTH = 54
NOT_TIMED = "not timed: its ranks were lost when another program failed"
ONE_PIECE = ", head and loss as one"  # of programs whose output layer and loss are compiled together


def head(unit: str) -> str:
    """Of the rows below."""
    return (
        f"{'':{_WIDTH}} {'step':>11} {unit + '/s/GPU':>14} {'TFLOP/s/GPU':>12} {'of matmul':>10} "
        f"{'peak':>10} {'bubble':>8} {'simulated':>10}   hpnb's speed over it [quartiles]"
    )


def layout_rows(result: LayoutResult) -> list[str]:
    """A row for each program of a layout; then hpnb's best over the best peer."""
    lines = [f"{result.layout}: matmuls alone {result.matmul / 1e12:.4g} TFLOP/s/GPU"]
    best, peer = result.fastest(ours=True), result.fastest(ours=False)
    for entry in result.entries:
        name = f"  {entry.name}"
        seconds = result.shown(entry.name)
        if entry.failed or seconds is None:
            lines.append(f"{name:{_WIDTH}} {entry.failed or NOT_TIMED}")
            continue
        bubble = ["-", "-"] if entry.bubble is None else [f"{100 * part:.1f} %" for part in entry.bubble]
        line = (
            f"{name:{_WIDTH}} {seconds * 1e3:8.2f} ms {_amount(result.per_gpu(entry.name)):>14} "
            f"{result.tflops(entry.name):12.4g} {result.share(entry.name):10.1%} {_gib(entry.peak):>10} "
            f"{bubble[0]:>8} {bubble[1]:>10}"
        )
        if best is not None and not entry.ours:
            line += f"   {ratio(result, best, entry)}"
        if entry.sent:
            line += f"   {entry.sent / 2**20:.1f} MiB leave a rank"
        if entry.lost:
            line += f"   later rounds failed: {entry.lost}"
        lines.append(line)
    if best is not None and peer is not None:
        lines.append(f"  {best.name} over {peer.name}: {ratio(result, best, peer)}")
    if result.retries:
        lines.append(
            f"  PyTorch's allocator ran out of memory and freed its cache {result.retries} times during the "
            "rounds, so these times are too long"
        )
    return lines


def data_parallel_rows(layouts: Sequence[LayoutResult]) -> list[str]:
    """hpnb's layouts of data parallelism over the best peer of all of them, by medians."""
    kinds = ("dp", "zero1", "zero2", "zero3")
    family = [f for f in layouts if kind_of(parse_layout(f.layout, f.ranks)) in kinds]
    peers = [(f, peer) for f in family if (peer := f.fastest(ours=False)) is not None]
    if len(family) < 2 or not peers:
        return []
    where, best = max(peers, key=lambda pair: pair[0].per_gpu(pair[1].name))
    lines = [f"over the best peer of these layouts, {best.name} of {where.layout}:"]
    for f in family:
        if (best_here := f.fastest(ours=True)) is not None:
            lines.append(f"  {f.layout:8} {f.per_gpu(best_here.name) / where.per_gpu(best.name):.3f}")
    return lines


def summary(runs: Sequence[BenchmarkRun], throughput: bool = True) -> str:
    """One row per layout: hpnb's best program beside the fastest of PyTorch's. Model and GPUs stand once.

    Names are short: without ", head and loss as one", which all of PyTorch's fastest programs of GPT-2 have.

    Args:
        throughput: with the TFLOP/s of both.
    """
    heads = ["model and GPUs", "layout", "hpnb, TFLOP/s/GPU", "PyTorch's", "PyTorch's program",
             "hpnb's speed over it [quartiles]"]  # fmt: skip
    shown = [column for column in range(len(heads)) if throughput or column not in (2, 3)]
    lines = [_line([heads[column] for column in shown]), _line(["---"] * len(shown))]
    for run in runs:
        where = f"{run.what}, {run.ranks} x {run.device.removeprefix('NVIDIA ')}"
        if run.microbatches:
            where += f", {run.microbatches} microbatches"
        if run.forward_samples:
            where += f", forwards of up to {run.forward_samples} samples"
        for number, result in enumerate(run.layouts.values()):
            best, ran = result.fastest(ours=True), peers(result)
            ours = "-" if best is None else f"{result.tflops(best.name):.4g}"
            cells = [where if number == 0 else "", result.layout, ours]
            if ran:
                beside = "-" if best is None else ratio(result, best, ran[0])
                cells += [f"{result.tflops(ran[0].name):.4g}", ran[0].name.replace(ONE_PIECE, ""), beside]
            else:
                cells += ["-", no_peers(result), "-"]
            lines.append(_line([cells[column] for column in shown]))
    return "\n".join(lines)


def markdown(run: BenchmarkRun) -> str:
    """All programs of a run, with where and when it was measured."""
    unit = next(iter(run.layouts.values())).unit if run.layouts else "tokens"
    heads = ["layout", "hpnb", f"{unit}/s/GPU", "TFLOP/s/GPU", "of matmul", "peak", "bubble (simulated)",
             "PyTorch's programs: TFLOP/s/GPU, peak, hpnb's speed over it"]  # fmt: skip
    lines = [f"{run.title}; {run.ranks} x {run.device}.", "", _line(heads), _line(["---"] * len(heads))]
    for result in run.layouts.values():
        best, cells = result.fastest(ours=True), [""] * 6
        if best is not None:
            form = best.name.removeprefix("hpnb").lstrip(", ") or "as is"
            bubble = "" if best.bubble is None else f"{best.bubble[0]:.1%} ({best.bubble[1]:.1%})"
            cells = [form, _amount(result.per_gpu(best.name)), f"{result.tflops(best.name):.4g}",
                    f"{result.share(best.name):.0%}", _gib(best.peak), bubble]  # fmt: skip
        lines.append(_line([result.layout, *cells, _beside(result, best)]))
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    lines += ["", f"Measured {stamp(run)}, with {versions}."]
    if run.losses:
        distances = "; ".join(_losses(run))
        lines += ["", f"How far the losses of {run.losses['steps']} steps are from one GPU's, where 1 is as "
                  f"far as one GPU's with samples in another order: {distances}."]  # fmt: skip
    return "\n".join(lines)


def _losses(run: BenchmarkRun) -> Iterator[str]:
    """In multiples of what another order of samples does, and with tp of one GPU's rounding."""
    for name, losses in run.losses["layouts"].items():
        order = losses.get("order", run.losses["order"])  # of the run that measured this layout
        text = f"{name} {distance_over_noise(losses['distance'], order):.2f}"
        if "rounding" in losses:
            text += f" ({losses['rounding']:.2f} times one GPU's rounding)"
        yield text


def stamp(run: BenchmarkRun) -> str:
    """When and at which commit; the last day, where there are several."""
    return f"{'until ' if ' and ' in run.commit else ''}{run.date[:10]} at {run.commit}"


def _beside(result: LayoutResult, best: ProgramResult | None) -> str:
    """All peers that ran, the fastest first."""
    cells = []
    for one in peers(result):
        beside = "" if best is None else f", {ratio(result, best, one)}"
        fewer = " (later rounds failed)" if one.lost else ""
        cells.append(f"{one.name}: {result.tflops(one.name):.4g}, {_gib(one.peak)}{beside}{fewer}")
    return "<br>".join(cells) or no_peers(result)


def peers(result: LayoutResult) -> list[ProgramResult]:
    """All of PyTorch's programs that ran, the fastest first, as `LayoutResult.fastest` says."""
    return result.ranked(ours=False)


def no_peers(result: LayoutResult) -> str:
    """What is said where there are none."""
    differ = any(not one.ours and "train the same" in one.failed for one in result.entries)
    return "none that trains the same" if differ else "none ran"


def ratio(result: LayoutResult, ours: ProgramResult, peer: ProgramResult) -> str:
    """How many times as fast as the peer, round by round where both took turns; else of medians."""
    rounds = result.ratio(ours.name, peer.name)
    if rounds is not None:
        return f"{rounds[0]:.3f} [{rounds[1]:.3f}, {rounds[2]:.3f}]"
    return f"{result.per_gpu(ours.name) / result.per_gpu(peer.name):.3f} (of medians)"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _gib(held: int) -> str:
    return f"{held / 2**30:.1f} GiB" if held else "-"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
