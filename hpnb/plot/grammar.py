"""One visual grammar: a thing has the same colour and hatch on every page.

Colours are Okabe and Ito's for operations and Paul Tol's for axes and memory: they stay apart for the
common forms of colour blindness, and hatches (operations, memory) or line styles (axes) repeat what they
say. Orange and green make up a split backward, vermillion an unsplit one; reddish purple is collective
communication, yellow point-to-point.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hpnb.record import CATEGORIES, Event

Line = Literal["-", "--", "-.", ":"]


@dataclass(frozen=True, slots=True)
class OpStyle:
    """How one kind of thing looks.

    Attributes:
        color: of the face, "#RRGGBB".
        hatch: matplotlib's hatch pattern, "" for none.
        label: the words of the legend.
        line: line style, where the thing is drawn as a line.
    """

    color: str
    hatch: str
    label: str
    line: Line = "-"

    @property
    def edge(self) -> str:
        """A darker shade of the face, for outlines and hatches."""
        return mix(self.color, "#000000", 0.28)


INK = "#1F2933"  # text, and whatever else must stand out
SOFT = "#5F6B7A"  # secondary text and axes
RULE = "#D5DAE1"  # rules and grids
CARD = "#FFFFFF"  # every figure is an opaque card, so a dark page cannot swallow its text
ALARM = "#D55E00"  # the one thing that a figure wants seen
DPI = 100  # CSS pixels an inch of a figure
TITLE_ID = "title"  # the gid of texts that say what a figure shows


def mix(color: str, other: str, share: float) -> str:
    """`color` with `share` (0 to 1) of `other` in it, both "#RRGGBB"."""
    channels = ((int(color[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02X}" for a, b in channels)


def ink_on(color: str) -> str:
    """Black or white, whichever has the higher contrast (WCAG) against `color`."""
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#FFFFFF"


STYLE: dict[str, OpStyle] = {
    "F": OpStyle("#56B4E9", "", "forward"),  # activations of one microbatch through one stage
    "I": OpStyle("#E69F00", "//", "input gradient"),  # what the stage before is waiting for
    "W": OpStyle("#009E73", "..", "weight gradient"),  # nobody waits for it: it can fill a bubble
    "B": OpStyle("#D55E00", "\\\\", "backward"),  # input and weight gradient in one, unsplit
    "compute": OpStyle("#5B6776", "", "compute"),  # work outside a schedule
    "idle": OpStyle("#F3F5F7", "///", "idle"),  # a rank computes nothing, within the makespan
    "host_wait": OpStyle("#882255", "--", "host wait"),  # rank and input are ready, and no kernel is launched
    "communication": OpStyle("#CC79A7", "", "communication"),  # any other exchange between ranks
    "all_reduce": OpStyle("#CC79A7", "", "all-reduce"),  # everybody ends with the sum
    "reduce_scatter": OpStyle("#B05A8A", "\\\\", "reduce-scatter"),  # everybody ends with a slice of the sum
    "all_gather": OpStyle("#E9B4D1", "//", "all-gather"),  # everybody ends with all slices
    "all_to_all": OpStyle("#8F3B6B", "xx", "all-to-all"),  # everybody sends everybody a slice
    "broadcast": OpStyle("#DDA0C4", "--", "broadcast"),  # everybody ends with one rank's tensor
    "reduce": OpStyle("#C06A9A", "++", "reduce"),  # one rank ends with the sum
    "gather": OpStyle("#E3A9CB", "||", "gather"),  # one rank ends with all slices
    "scatter": OpStyle("#D794BB", "oo", "scatter"),  # one rank deals out its slices
    "barrier": OpStyle("#8A8F98", "xx", "barrier"),  # nobody goes on before the last has come
    "send": OpStyle("#F0E442", "", "send"),  # to one rank, a pipeline's neighbour
    "recv": OpStyle("#F7EE8E", "//", "receive"),  # from one rank, a pipeline's neighbour
    "wait": OpStyle("#F7E3EE", "xx", "wait"),  # inside a collective, before the last rank has come
    "move": OpStyle("#CC79A7", "", "move"),  # inside a collective, after the last rank has come
}

AXIS: dict[str, OpStyle] = {
    "dp": OpStyle("#004488", "", "dp"),  # data parallel: other samples, same weights
    "pp": OpStyle("#997700", "", "pp", "--"),  # pipeline parallel: other layers
    "tp": OpStyle("#994455", "", "tp", ":"),  # tensor parallel: a slice of every layer
    "cp": OpStyle("#117733", "", "cp", "-."),  # context parallel: other tokens of the same sequences
}

CATEGORY: dict[str, OpStyle] = {
    "parameters": OpStyle("#4477AA", "", "parameters"),  # weights and buffers of the model
    "gradients": OpStyle("#EE6677", "//", "gradients"),  # what backward leaves in .grad
    "optimizer": OpStyle("#228833", "\\\\", "optimizer"),  # momenta, variances, fp32 masters
    "activations": OpStyle("#CCBB44", "..", "activations"),  # kept from forward for backward
    "temporary": OpStyle("#BBBBBB", "xx", "temporary"),  # everything else, such as a kernel's workspace
}
assert tuple(CATEGORY) == CATEGORIES

# Series that are none of the above (the algorithms of one chart): colour, marker and line style differ.
SERIES: tuple[tuple[str, str, Line], ...] = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#AA4499", "D", ":"),
    ("#8C6D00", "v", "-"),
)


def style_of(op: str) -> OpStyle:
    """The style of an operation; a communication that the grammar does not list looks like any other."""
    if op in STYLE:
        return STYLE[op]
    plain = STYLE["communication"]
    return OpStyle(plain.color, plain.hatch, op.replace("_", "-"))


def styles_of(events: Iterable[Event]) -> dict[str, OpStyle]:
    """{op: its style} of all that `events` name, in the order of a legend.

    Computing that has a name of its own ("optimizer") is grey as "compute" is; shade and hatch tell one name
    from the next.
    """
    computes: dict[str, bool] = {}
    for e in events:
        computes[e.op] = computes.get(e.op, False) or e.is_compute
    named = sorted(op for op in computes if op not in STYLE and computes[op])
    plain = STYLE["compute"]
    greys = {
        op: OpStyle(mix(plain.color, CARD, 0.18 * (k % 5)), ("//", "..", "\\", "xx", "++")[k % 5], op)
        for k, op in enumerate(named)
    }
    others = sorted(computes.keys() - STYLE.keys() - greys.keys())
    return {op: style_of(op) for op in STYLE if op in computes} | greys | {op: style_of(op) for op in others}


def axis_style(axis: str) -> OpStyle:
    """The style of a mesh axis; "tp.0" looks like "tp", and an unknown axis is grey."""
    if axis in AXIS:
        return AXIS[axis]
    parent = AXIS.get(axis.split(".")[0])
    return OpStyle(parent.color if parent else SOFT, "", axis, parent.line if parent else "-")
