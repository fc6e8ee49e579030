"""The table of layouts as a picture, made of the same files: `python -m hpnb.bench chart`.

It shows, for each task, the run that covers most layouts, and for each layout hpnb's best program above the
fastest of PyTorch's. What it shows is in the PNG once more as text, with the names of the files, so a test
can tell whether it is stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from hpnb import plot
from hpnb.bench import layouts, result_files, tables
from hpnb.bench.results import BenchmarkRun, LayoutResult
from hpnb.plot.standings import Standing, StandingGroup, StandingPanel
from hpnb.plot.units import number

PEERS = 3  # of a layout at most; the table has all
ROWS = 50  # a longer picture does not fit on a screen, so it has fewer peers


@dataclass(frozen=True)
class Chart:
    """What is drawn.

    Attributes:
        sources: names of the files whose figures it shows.
    """

    panels: tuple[StandingPanel, ...]
    caption: str
    sources: tuple[str, ...]

    def figure(self) -> Figure:
        return plot.standings(
            self.panels, "TFLOP/s/GPU", "hpnb's speed over it",
            ("hpnb's best program", "PyTorch's programs", "matmul alone, in the same run"),
            "hpnb beside PyTorch's own programs, layout by layout", self.caption,
        )  # fmt: skip

    def words(self) -> str:
        """What it shows, a line a layout."""
        lines = []
        for panel in self.panels:
            lines.append(f"{panel.title}; {'; '.join(panel.notes)}")
            lines += [_line(group) for group in panel.groups]
        return "\n".join([*lines, self.caption])

    def text(self) -> dict[str, str]:
        drawn = f"matplotlib {matplotlib.__version__}"
        return {"Source": ", ".join(self.sources), "Description": self.words(), "Software": drawn}


def chart(folder: Path = result_files.RESULTS) -> Chart:
    """Of the newest results of a folder, with up to PEERS of each layout, as ROWS allow.

    Raises:
        ValueError: there are no results, or a file that is none.
    """
    named = result_files.named(folder)
    runs = chosen(list(named.values()))
    if not runs:
        raise ValueError(result_files.describe_empty(folder))
    ran = [len(tables.peers(result)) for run in runs for result in run.layouts.values()]
    peers = _fitting(ran)
    said = "Speed over it: median [quartiles] of rounds in which both took turns; above 1 hpnb is faster."
    if max(ran) > peers:
        few = "the fastest" if peers == 1 else f"the {peers} fastest"
        said += f" Of PyTorch's programs {few} of a layout."
    sources = dict.fromkeys(name for run in runs for name in result_files.sources(named, run.key))
    return Chart(tuple(panel(run, peers) for run in runs), said, tuple(sources))


def chosen(runs: Sequence[BenchmarkRun]) -> list[BenchmarkRun]:
    """The run of each task that covers most layouts, among `result_files.newest`; of several the one on most
    GPUs, and the newest."""
    best: dict[str, BenchmarkRun] = {}
    order = sorted(
        result_files.newest(runs),
        key=lambda one: (len(one.layouts), one.ranks, not one.forward_samples, one.date),
    )
    for run in order:
        if run.layouts:
            best[run.what] = run
    return [best[what] for what in sorted(best)]


def panel(run: BenchmarkRun, peers: int) -> StandingPanel:
    """Rows of a run, in the usual order of layouts."""
    usual = [] if run.ranks > 1 and run.ranks % 2 else layouts.usual_layouts(run.ranks)
    order = sorted(run.layouts, key=lambda name: usual.index(name) if name in usual else len(usual))
    notes = (run.title.removeprefix(f"{run.what}: "),
             f"measured {tables.stamp(run)}, with torch {run.versions['torch']}")  # fmt: skip
    groups = tuple(_group(run.layouts[name], peers) for name in order)
    return StandingPanel(f"{run.what} on {run.ranks} x {run.device}", groups, notes)


def show(results: Path, out: Path) -> None:
    made = chart(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(plot.png(made.figure(), text=made.text()))
    print(f"{out}  from {', '.join(made.sources)}")


def _fitting(ran: Sequence[int]) -> int:
    """How many peers a layout has room for, where so many ran in each; a line says it where none did."""
    for peers in range(PEERS, 1, -1):
        if sum(1 + max(1, min(peers, all_of_them)) for all_of_them in ran) <= ROWS:
            return peers
    return 1


def _group(result: LayoutResult, peers: int) -> StandingGroup:
    best, ran = result.fastest(ours=True), tables.peers(result)
    bars = [Standing("hpnb: none ran", None, ours=True)]
    if best is not None:
        share = f"{result.share(best.name):.0%} of matmul"
        bars = [Standing(best.name, result.tflops(best.name), share, ours=True)]
    for one in ran[:peers]:
        beside = tables.ratio(result, best, one) if best is not None else ""
        bars.append(Standing(one.name, result.tflops(one.name), beside))
    if not ran:
        bars.append(Standing(f"PyTorch: {tables.no_peers(result)}", None))
    return StandingGroup(result.layout, tuple(bars), result.matmul / 1e12)


def _line(group: StandingGroup) -> str:
    shown = (
        bar.name if bar.value is None else f"{bar.name} {number(bar.value)} {bar.words}".rstrip()
        for bar in group.bars
    )
    return f"{group.name}: {'; '.join(shown)}; matmul {number(group.ceiling or 0.0)}"
