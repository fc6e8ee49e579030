"""Notebook 05's explorer: what a step of a sharded GPT holds and takes, by size, ranks, stage and link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpnb.lesson.explorers.explorer import Explorer, explorer
from hpnb.lesson.explorers.knobs import Challenge, Choice, Slider
from hpnb.lesson.tables import number
from hpnb.record import CATEGORIES
from hpnb.theory import LINKS, Block, shard_seconds, step_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RATE = {"bf16": 400e12, "float32": 50e12}  # FLOP/s
_WIDTH = {"bf16": 2, "float32": 4}
HOST_BANDWIDTHS = {"none": 0.0, "PCIe 4": 25e9, "PCIe 5": 50e9, "NVLink-C2C": 400e9}  # bytes/s each way
_VOCABULARY, _ROW, _CAPACITY, _HEAD = 50_257, 1024, 80e9, 128
_MEMORY, _HOST = 3e12, 200e9  # bytes/s of the device's memory and of the host's


def shape(billions: float) -> tuple[int, int]:
    """(layers, width) of a GPT of about so many parameters: 128 times as wide as deep, heads of 128."""
    hidden = max(_HEAD, round((billions * 1e9 * _HEAD / 12) ** (1 / 3) / _HEAD) * _HEAD)
    return max(1, round(billions * 1e9 / 12 / hidden**2)), hidden


def sharded_step() -> Explorer:
    """Notebook 05: memory and seconds of a step on 80 GB devices.

    Rows of 1,024 tokens, 50,257 words, 400 TFLOP/s in bf16 and 50 in float32. By parameters, ranks, stage,
    share of blocks computed again, rows of a rank, wire between ranks, link to the host, and precision.
    """
    from hpnb import plot

    def draw(
        billions: float, ranks: int, stage: int, again: float, rows: int, wire: str, offload: str,
        precision: str, fast: bool,
    ) -> tuple[Figure, str, dict[str, Any]]:  # fmt: skip
        layers, hidden = shape(billions)
        width, rate = _WIDTH[precision], _RATE[precision]
        block = Block(hidden, hidden // _HEAD, _ROW, rows, bytes_per_value=width)
        recompute, host_bandwidth = round(again * layers), HOST_BANDWIDTHS[offload]
        root = (_VOCABULARY + _ROW + 2) * hidden
        parameters = layers * block.parameters + root
        memory = step_memory(
            block,
            layers,
            _VOCABULARY,
            _ROW,
            ranks,
            stage,
            recompute=recompute,
            offload=bool(host_bandwidth),
            mlp_copies=2,
        )
        forward = (layers * block.forward_flops + 2 * rows * _ROW * hidden * _VOCABULARY) / rate
        spent = shard_seconds(
            forward, 2 * forward, 28 * parameters / _MEMORY, block_bytes=width * block.parameters,
            root_bytes=width * root, layers=layers, ranks=ranks, stage=stage, link=LINKS[wire],
            recompute=recompute, host_bandwidth=host_bandwidth or None, host_seconds=28 * parameters / _HOST,
        )  # fmt: skip
        full, took = memory.fullest, sum(spent.values())
        figure = plot.step_bill(
            {name: getattr(full, name) for name in CATEGORIES},
            spent,
            _CAPACITY,
            text=not fast,
            title=f"simulated · {parameters / 1e9:.3g} B parameters in {layers} blocks of {hidden:,}, "
            f"{ranks} ranks on {wire}, stage {stage}, {rows} x {_ROW:,} tokens a rank",
        )
        fits = memory.peak <= _CAPACITY
        alt = (
            f"Two bars. A rank holds {number(memory.peak, 'B')} at its fullest ({full.name}), which "
            f"{'fits' if fits else 'does not fit'} 80 GB; a step takes {number(took, 's')}, "
            f"{100 * spent['computing'] / took:.0f} % of it computing."
        )
        readings = {
            "peak (B)": memory.peak,
            "fullest at": full.name,
            "fits 80 GB": fits,
            "step (s)": took,
            "step over computing": took / spent["computing"],
            "tokens a step": f"{ranks * rows * _ROW:,}",
            "_as_asked": billions >= 30 and ranks <= 64 and wire == "InfiniBand NDR" and precision == "bf16",
            "_tokens": ranks * rows * _ROW,
        }
        return figure, alt, readings

    return explorer(
        draw,
        {
            "billions": Slider(0.1, 200.0, 13.0, log=True, unit="B"),
            "ranks": Choice((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), 64),
            "stage": Choice((0, 1, 2, 3), 1),
            "again": Slider(0.0, 1.0, 0.0, 0.25),
            "rows": Choice((1, 2, 4, 8, 16, 32), 4),
            "wire": Choice(tuple(LINKS), "InfiniBand NDR"),
            "offload": Choice(tuple(HOST_BANDWIDTHS), "none"),
            "precision": Choice(tuple(_RATE), "bf16"),
        },
        Challenge(
            "30 B parameters or more in bf16 on at most 64 ranks of InfiniBand NDR, at most 1,000,000 tokens "
            "a step: it fits 80 GB, and a step takes at most 1.25 times its computing.",
            lambda read: (
                bool(read["_as_asked"])
                and bool(read["fits 80 GB"])
                and read["step over computing"] <= 1.25
                and read["_tokens"] <= 1_000_000
            ),
        ),
    )
