"""Layouts by name: dp4, zero1, zero2, zero3, pp4, tp4, dp2xpp2, dp2xtp2, tp2xpp2, and one GPU alone."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Ranks along each axis, and the stage of ZeRO over those of dp."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    zero: int = 0

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def kind(self) -> str:
        """Which programs contend: "one", "dp", "zero1", "pp", "tp", "dp-pp", "dp-tp", "tp-pp", ..."""
        axes = [axis for axis in ("dp", "tp", "pp") if getattr(self, axis) > 1]
        if self.zero and axes == ["dp"]:
            return f"zero{self.zero}"
        return "-".join(axes) or "one"


def names(ranks: int) -> list[str]:
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


def shape(name: str, ranks: int) -> Shape:
    """The shape of a layout by its name, such as "dp2xpp2"; "zero2" has all ranks along dp.

    Raises:
        ValueError: a name of no layout, or one of another number of ranks.
    """
    if name == "one":
        return Shape()
    if match := re.fullmatch(r"zero([123])", name):
        return Shape(dp=ranks, zero=int(match[1]))
    parts = [re.fullmatch(r"(dp|pp|tp)([1-9]\d*)", part) for part in name.split("x")]
    found = {match[1]: int(match[2]) for match in parts if match}
    if len(found) < len(parts):
        raise ValueError(
            f"{name!r} is no layout; use one, zero1, zero2, zero3, or sizes such as dp{ranks} or dp2xpp2"
        )
    made = Shape(**found)
    if made.ranks != ranks:
        raise ValueError(f"{name} is of {made.ranks} ranks, and there are {ranks}; use {_near(ranks)}")
    return made


def _near(ranks: int) -> str:
    return ", ".join(f"{axis}{ranks}" for axis in ("dp", "pp", "tp"))
