"""The explorer of notebook 10: whether a ring or Ulysses exposes less, by sequence, heads, ranks and link."""

from __future__ import annotations

from hpnb.lesson.explorers.explorer import Challenge, Evaluation, Explorer, Picture
from hpnb.lesson.explorers.knobs import Choice, Knobs, Slider
from hpnb.lesson.tables import number
from hpnb.theory import LINKS, context

RATE = 400e12  # FLOP/s of attention in 16 bits, about what FlashAttention-2 and 3 reach on an H100
SHARE = "exposed / computing (%)"  # of the way that exposes less
_LENGTHS = tuple(1 << k for k in range(12, 21))

KNOBS: Knobs = {
    "sequence": Slider(4096, 1 << 20, 32_768, step=0.30103, log=True, unit="tokens"),
    "heads": Choice((16, 32, 64), 32),
    "kv_heads": Choice((1, 2, 4, 8, 16, 32), 32),
    "cp": Choice((2, 4, 8, 16, 32, 64), 8),
    "link": Choice(tuple(LINKS), "InfiniBand NDR"),
}
ANSWER = {"sequence": 65_536, "kv_heads": 8}
CHALLENGE = Challenge(
    "32 heads, at least 8 kv heads, cp 8, InfiniBand NDR, at most 65,536 tokens: an exposed time of at most "
    "5 % of the computing time.",
    lambda at: (
        (at["heads"] == 32 and at["kv_heads"] >= 8 and at["cp"] == 8 and at["link"] == "InfiniBand NDR")
        and (at["sequence"] <= 65_536 and at[SHARE] <= 5)
    ),
)


def ring_or_ulysses() -> Explorer:
    """Notebook 10: exposed time of a ring and of Ulysses, by sequence length, heads, kv heads, cp and link.

    One sequence, heads of 128 values in bfloat16, and 400 TFLOP/s of attention.
    """
    title = "exposed / computing, of the way that exposes less, over sequence"
    shown = Explorer(
        KNOBS, _readings, CHALLENGE, ANSWER, trade=("sequence", SHARE), trade_title=title, goal=5
    )
    return shown.display()


def ring_exposes_less_from(heads: int, kv_heads: int, cp: int, link: str) -> int:
    """Tokens a rank from which on, up to a million, a ring exposes less than Ulysses; see `exposed`."""

    def ring_is_best(tokens: int) -> bool:
        ways, _ = exposed(cp * tokens, heads, kv_heads, cp, link)
        return min(ways, key=lambda way: ways[way]) == "ring"

    high = 1 << 20
    low = next((high >> k for k in range(1, 21) if not ring_is_best(high >> k)), 0)
    high = 2 * low or 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if ring_is_best(middle) else (middle, high)
    return high


def exposed(sequence: int, heads: int, kv_heads: int, cp: int, link: str) -> tuple[dict[str, float], float]:
    """({way: exposed seconds}, seconds in which a rank computes), of one attention, forward and backward.
    Ulysses is missing where there are fewer heads than ranks.

    Raises:
        ValueError: heads that are no multiple of kv_heads.
    """
    shape = context.Attention(sequence, heads, kv_heads)
    step = context.ring_step_seconds(shape, cp, RATE)
    ways = {"ring": context.ring_exposed(shape, cp, LINKS[link], step).total}
    if heads >= cp:
        ways["Ulysses"] = context.ulysses_exposed(shape, cp, LINKS[link]).total
    return ways, cp * step.total


def _readings(sequence: float, heads: int, kv_heads: int, cp: int, link: str) -> Evaluation:
    sequence = round(sequence)
    ways, computing = exposed(sequence, heads, kv_heads, cp, link)
    best = min(ways, key=lambda way: ways[way])
    readings = {
        "less exposed": best,
        SHARE: 100 * ways[best] / computing,
        "computing (ms)": 1e3 * computing,
        "ring (ms)": 1e3 * ways["ring"],
        "Ulysses (ms)": 1e3 * ways["Ulysses"] if "Ulysses" in ways else f"needs {cp} heads",
    }

    def draw(fast: bool) -> Picture:
        from hpnb.lesson.figures import long_contexts

        rows = [exposed(length, heads, kv_heads, cp, link) for length in _LENGTHS]
        figure = long_contexts.exposed_times(
            _LENGTHS,
            {way: [values[way] for values, _ in rows] for way in ways},
            computing=[seconds for _, seconds in rows],
            marked=sequence,
            marked_as="the sequence of the knob",
            text=not fast,
            title=f"predicted · {cp} ranks over {link}, {heads} heads, {kv_heads} kv heads",
        )
        return figure, (
            f"Exposed seconds over sequence length for {' and '.join(ways)}; at {sequence:,} tokens {best} "
            f"exposes {number(ways[best], 's')} beside {number(computing, 's')} of computing."
        )

    return readings, draw
