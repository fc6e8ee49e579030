"""Numbers as people read them: one unit for a whole axis, three digits for a value."""

from __future__ import annotations

TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def time_unit(seconds: float) -> tuple[float, str]:
    """(seconds in one unit, its name): the largest unit of which `seconds` is at least one."""
    return next(
        ((size, name) for size, name in TIMES if abs(seconds) >= size * 0.9995),
        TIMES[0 if not seconds else -1],
    )


def bytes_unit(count: float) -> tuple[float, str]:
    """(bytes in one unit, its name), in powers of 1000."""
    return next(((size, name) for size, name in BYTES if abs(count) >= size * 0.9995), BYTES[-1])


def number(value: float) -> str:
    """Three significant digits, never in exponents between 0.001 and a million."""
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    if abs(value) >= 999.5:  # which three digits would show as 1.00e+03
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def seconds(value: float) -> str:
    """0.00123 as "1.23 ms"."""
    size, name = time_unit(value)
    return f"{number(value / size)} {name}"


def byte_count(value: float) -> str:
    """1230000 as "1.23 MB"; whole bytes below 1000."""
    size, name = bytes_unit(value)
    return f"{value:g} B" if size == 1.0 else f"{number(value / size)} {name}"
