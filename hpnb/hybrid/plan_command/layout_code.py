"""A layout as one word, which the table prints and `--explain` reads.

dp8-pp4-tp2-zero1-interleaved2-mb2-full-sp: ZeRO 1, 2 chunks a rank, microbatches of 2 samples, blocks
recomputed, sequence parallel. dp4-cp2-ep4-mb1-ulysses: context parallel with Ulysses instead of a ring, and
experts over 4 of the dp x cp = 8 ranks. dp8-mb2-selective: the attention alone is recomputed.
"""

from __future__ import annotations

import re
from typing import Any

from hpnb.mesh import ParallelLayout

_RECOMPUTED = {"full": "full", "attention": "selective"}


def layout_code(layout: ParallelLayout) -> str:
    """Sizes above 1, ZeRO stage, schedule with its chunks, samples of a microbatch, recomputation."""
    words = [
        f"{axis}{size}" for axis in ("dp", "pp", "cp", "tp", "ep") if (size := getattr(layout, axis)) > 1
    ] or ["dp1"]
    if layout.zero_stage:
        words.append(f"zero{layout.zero_stage}")
    if layout.pp > 1:
        words.append(f"interleaved{layout.chunks}" if layout.chunks > 1 else layout.schedule)
    words.append(f"mb{layout.microbatch_size}")
    words += [_RECOMPUTED[layout.recomputation]] if layout.recomputation else []
    words += ["sp"] * layout.sequence_parallel
    words += [layout.context_parallel] * (layout.cp > 1 and layout.context_parallel != "ring")
    return "-".join(words)


def parse_layout_code(code: str) -> ParallelLayout:
    """The layout of a word."""
    sizes: dict[str, Any] = {}

    def add(name: str, value: object, word: str) -> None:
        if name in sizes:
            raise ValueError(f"{code!r} says {name.replace('_', ' ')} twice; leave one out, as {word}")
        sizes[name] = value

    rest = code.strip().lower()
    while rest:
        match = re.match(
            r"(dp|pp|cp|tp|ep|zero|mb|interleaved)(\d+)(?:-|$)|(1f1b|gpipe|zb-h1|zb-v|dualpipe-v|full|selective|sp|ulysses|all-gather)(?:-|$)",
            rest,
        )
        if match is None:
            raise ValueError(
                f"{code!r} is no layout, from {rest!r} on; write it as dp8-pp4-tp2-zero1-1f1b-mb2-full-sp"
            )
        word, number, switch = match.groups()
        text = match[0].rstrip("-")
        if word == "interleaved":
            add("schedule", "interleaved", text)
            add("chunks", int(number), text)
        elif word:
            add({"zero": "zero_stage", "mb": "microbatch_size"}.get(word, word), int(number), text)
        elif switch in ("full", "selective"):
            add("recomputation", "full" if switch == "full" else "attention", text)
        elif switch == "sp":
            add("sequence_parallel", True, text)
        elif switch in ("ulysses", "all-gather"):
            add("context_parallel", switch, text)
        else:
            add("schedule", switch, text)
        rest = rest[match.end() :]
    return ParallelLayout(**{"microbatch_size": 1, **sizes})
