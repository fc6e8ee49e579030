"""Sizes and counts as the doctor says them."""

from __future__ import annotations

GIB = 2**30


def size(nbytes: int | None) -> str:
    """ "23.5 GiB", "64 MiB", or "unknown"; memory is made in powers of two."""
    if nbytes is None:
        return "unknown"
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.0f} MiB"


def count(number: int, noun: str) -> str:
    """ "1 core", "2 cores"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
