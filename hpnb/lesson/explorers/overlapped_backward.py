"""The explorer of notebook 01: gradient buckets of a ViT-L/16 that travel during the backward."""

from __future__ import annotations

import math

from hpnb.lesson.explorers.explorer import Challenge, Evaluation, Explorer, Picture
from hpnb.lesson.explorers.knobs import Choice, Knobs, Slider
from hpnb.lesson.programs.step_timing import Backward
from hpnb.lesson.tables import number
from hpnb.theory import LINKS, even_buckets, seconds

PARAMETERS = 303_304_707  # of ViT-L/16 with 3 classes
GRADIENT_BYTES = 2 * PARAMETERS

KNOBS: Knobs = {
    "bucket": Slider(5.0, 1000.0, 25.0, log=True, unit="MiB"),
    "tokens": Slider(1_000, 100_000, 10_000, 1_000),
    "matmul": Slider(50.0, 1000.0, 400.0, log=True, unit="TFLOP/s"),
    "link": Choice(tuple(LINKS), "Ethernet 100 Gb"),
    "ranks": Slider(2, 128, 64, 1),
}
ANSWER = {"bucket": 50, "tokens": 50_000}
CHALLENGE = Challenge(
    "64 ranks on Ethernet 100 Gb, 400 TFLOP/s, at most 50,000 tokens per rank: under 6.5 % exposed.",
    lambda at: (
        (at["ranks"], at["link"], at["matmul"]) == (64, "Ethernet 100 Gb", 400)
        and (at["tokens"] <= 50_000 and at["exposed (%)"] < 6.5)
    ),
)


def overlapped_backward() -> Explorer:
    """Notebook 01: a ViT-L/16 whose 16-bit gradients travel during the backward.

    By bucket, tokens, matmul rate, link and ranks. The backward makes gradients at a constant rate. The knob
    is the most that a bucket may hold, in MiB (2^20 bytes), which `DataParallel(bucket_mb=)` means too; the
    gradients are split into as few equal buckets as that allows.
    """
    return Explorer(
        KNOBS,
        _readings,
        CHALLENGE,
        ANSWER,
        trade=("bucket", "exposed (%)"),
        trade_names=("10,000 tokens per rank", "50,000 tokens per rank"),
        goal=6.5,
        trade_title="simulated · exposed share of the step, by bucket limit",
    ).display()


def _readings(bucket: float, tokens: int, matmul: float, link: str, ranks: int) -> Evaluation:
    backward = 4 * tokens * PARAMETERS / (matmul * 1e12)  # seconds
    forward, chosen = backward / 2, LINKS[link]
    count = math.ceil(GRADIENT_BYTES / (bucket * 2**20))
    ready, sizes = even_buckets(GRADIENT_BYTES, GRADIENT_BYTES / count, backward)
    step = Backward(forward, forward + backward, tuple(forward + at for at in ready), sizes)
    tl, exposed = step.on(chosen, ranks), step.share(chosen, ranks)
    bucket_seconds = seconds("all_reduce", sizes[0], ranks, chosen)
    readings = {
        "step (s)": tl.makespan,
        "exposed (%)": 100 * exposed,
        "a bucket's all-reduce (s)": bucket_seconds,
        "its latency (%)": 100 * seconds("all_reduce", 0.0, ranks, chosen) / bucket_seconds,
        "ρ (FLOP/B)": f"{matmul * 1e12 / chosen.bandwidth:,.0f}",
    }

    def draw(fast: bool) -> Picture:
        from hpnb import plot

        buckets = f"{count} buckets of {number(sizes[0] / 2**20, 'MiB')}" if count > 1 else "one bucket"
        figure = plot.timeline(
            tl,
            exposed=True,
            bubble=None,
            text=not fast,
            axis_labels={0: "each rank"},
            title=f"ViT-L/16, {ranks} ranks on {link}, {tokens:,} tokens per rank at "
            f"{number(matmul)} TFLOP/s, {buckets}",
        )
        return figure, (
            f"Forward and backward of one rank above the all-reduces of {buckets}; "
            f"{100 * exposed:.1f} % of the step is exposed communication."
        )

    return readings, draw
