"""Layouts by name: dp4, zero1, zero2, zero3, pp4, tp4, dp2xpp2, dp2xtp2, tp2xpp2, and one GPU alone."""

from __future__ import annotations

import re

from hpnb.mesh import ParallelLayout


def kind_of(layout: ParallelLayout) -> str:
    """Which programs contend: "one", "dp", "zero1", "pp", "tp", "dp-pp", "dp-tp", "tp-pp", ..."""
    axes = [axis for axis in ("dp", "tp", "pp") if getattr(layout, axis) > 1]
    if layout.zero_stage and axes == ["dp"]:
        return f"zero{layout.zero_stage}"
    return "-".join(axes) or "one"


def usual_layouts(ranks: int) -> list[str]:
    """The usual layouts of so many ranks, in the order in which they are measured.

    Raises:
        ValueError: an odd number of ranks above 1, or none.
    """
    if ranks == 1:
        return ["one"]
    if ranks < 1 or ranks % 2:
        raise ValueError(f"ranks={ranks}: the usual layouts are for 1, 2 or a multiple of 2; name your own")
    n, half = ranks, ranks // 2
    two = [] if ranks == 2 else [f"dp{half}xpp2", f"dp{half}xtp2", f"tp2xpp{half}"]
    return ["one", f"dp{n}", "zero1", "zero2", "zero3", f"pp{n}", f"tp{n}", *two]


def parse_layout(name: str, ranks: int) -> ParallelLayout:
    """The layout of that name, such as "dp2xpp2"; "zero2" has all ranks along dp.

    Raises:
        ValueError: a name of no layout, or of a layout for another number of ranks.
    """
    if name == "one":
        return ParallelLayout()
    if match := re.fullmatch(r"zero([123])", name):
        return ParallelLayout(dp=ranks, zero_stage=int(match[1]))
    matches = [re.fullmatch(r"(dp|pp|tp)([1-9]\d*)", part) for part in name.split("x")]
    sizes = {match[1]: int(match[2]) for match in matches if match}
    if len(sizes) < len(matches):
        raise ValueError(
            f"{name!r} is no layout; use one, zero1, zero2, zero3, or sizes such as dp{ranks} or dp2xpp2"
        )
    layout = ParallelLayout(dp=sizes.get("dp", 1), pp=sizes.get("pp", 1), tp=sizes.get("tp", 1))
    if layout.world_size != ranks:
        raise ValueError(
            f"{name} is of {layout.world_size} ranks, and there are {ranks}; use dp{ranks}, pp{ranks} or "
            f"tp{ranks}"
        )
    return layout
