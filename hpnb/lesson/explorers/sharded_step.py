"""The explorer of notebook 05: memory and seconds of a sharded GPT's step."""

from __future__ import annotations

from hpnb.lesson.explorers.explorer import Challenge, Evaluation, Explorer, Picture
from hpnb.lesson.explorers.knobs import Choice, Knobs, Slider
from hpnb.lesson.tables import number
from hpnb.record import CATEGORIES
from hpnb.theory import LINKS, Block, step_memory, zero_step_seconds

_RATES = {"bf16": 400e12, "float32": 50e12}  # FLOP/s
_VALUE_BYTES = {"bf16": 2, "float32": 4}
HOST_BANDWIDTHS = {"none": 0.0, "PCIe 4": 25e9, "PCIe 5": 50e9, "NVLink-C2C": 400e9}  # bytes/s each way
_VOCABULARY, _LENGTH, _CAPACITY, _HEAD_WIDTH = 50_257, 1024, 80e9, 128
_DEVICE_MEMORY_RATE, _HOST_MEMORY_RATE = 3e12, 200e9  # bytes/s
_ADAM_BYTES = 28  # read and written for each parameter

KNOBS: Knobs = {
    "billions": Slider(0.1, 200.0, 13.0, log=True, unit="B"),
    "ranks": Choice((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), 64),
    "stage": Choice((0, 1, 2, 3), 1),
    "recompute": Slider(0.0, 1.0, 0.0, 0.25),
    "sequences": Choice((1, 2, 4, 8, 16, 32), 4),
    "link": Choice(tuple(LINKS), "InfiniBand NDR"),
    "offload": Choice(tuple(HOST_BANDWIDTHS), "none"),
    "precision": Choice(tuple(_RATES), "bf16"),
}
ANSWER = {"billions": 32, "stage": 3, "recompute": 0.5, "sequences": 8}
CHALLENGE = Challenge(
    "30 B parameters or more in bf16 on at most 64 ranks of InfiniBand NDR, at most 1,000,000 tokens "
    "a step: it fits 80 GB, and a step takes at most 1.25 times its computing time.",
    lambda at: (
        (at["billions"] >= 30 and at["ranks"] <= 64 and at["precision"] == "bf16")
        and (at["link"] == "InfiniBand NDR" and at["ranks"] * at["sequences"] * _LENGTH <= 1_000_000)
        and (at["fits 80 GB"] and at["step time / computing time"] <= 1.25)
    ),
)


def sharded_step() -> Explorer:
    """Notebook 05: memory and seconds of a step on 80 GB GPUs.

    Sequences of 1,024 tokens, a vocabulary of 50,257, 400 TFLOP/s in bf16 and 50 in float32. By parameters,
    ranks, ZeRO stage, share of blocks recomputed, sequences of a rank, links between ranks and to the CPU,
    precision.
    """
    trade = ("sequences", "step time / computing time")
    return Explorer(KNOBS, _readings, CHALLENGE, ANSWER, trade=trade, goal=1.25).display()


def gpt_shape(billions: float) -> tuple[int, int]:
    """(layers, hidden size) of a GPT of about so many parameters: 128 times as wide as deep, heads of 128."""
    hidden = max(
        _HEAD_WIDTH, round((billions * 1e9 * _HEAD_WIDTH / 12) ** (1 / 3) / _HEAD_WIDTH) * _HEAD_WIDTH
    )
    return max(1, round(billions * 1e9 / 12 / hidden**2)), hidden


def _readings(
    billions: float,
    ranks: int,
    stage: int,
    recompute: float,
    sequences: int,
    link: str,
    offload: str,
    precision: str,
) -> Evaluation:
    layers, hidden = gpt_shape(billions)
    width, rate = _VALUE_BYTES[precision], _RATES[precision]
    block = Block(hidden, hidden // _HEAD_WIDTH, _LENGTH, sequences, bytes_per_value=width)
    recomputed, host_bandwidth = round(recompute * layers), HOST_BANDWIDTHS[offload]
    root = (_VOCABULARY + _LENGTH + 2) * hidden
    parameters = layers * block.parameters + root
    memory = step_memory(
        block, layers, _VOCABULARY, _LENGTH, ranks, stage,
        recompute=recomputed, offload=bool(host_bandwidth), mlp_copies=2,
    )  # fmt: skip
    forward = (layers * block.forward_flops + 2 * sequences * _LENGTH * hidden * _VOCABULARY) / rate
    adam_bytes = _ADAM_BYTES * parameters
    spent = zero_step_seconds(
        forward, 2 * forward, adam_bytes / _DEVICE_MEMORY_RATE, block_bytes=width * block.parameters,
        root_bytes=width * root, layers=layers, ranks=ranks, stage=stage, link=LINKS[link],
        recompute=recomputed, host_bandwidth=host_bandwidth or None, host_seconds=adam_bytes /
        _HOST_MEMORY_RATE,
    )  # fmt: skip
    fullest, took, fits = memory.fullest, sum(spent.values()), memory.peak <= _CAPACITY
    readings = {
        "peak (B)": memory.peak,
        "fullest at": fullest.name,
        "fits 80 GB": fits,
        "step (s)": took,
        "step time / computing time": took / spent["computing"],
        "tokens a step": f"{ranks * sequences * _LENGTH:,}",
    }

    def draw(fast: bool) -> Picture:
        from hpnb.lesson.figures import gpt2_data_parallel

        figure = gpt2_data_parallel.step_bill(
            {name: getattr(fullest, name) for name in CATEGORIES},
            spent,
            _CAPACITY,
            text=not fast,
            title=f"simulated · {parameters / 1e9:.3g} B parameters in {layers} blocks of {hidden:,}, "
            f"{ranks} ranks on {link}, ZeRO-{stage}, {sequences} x {_LENGTH:,} tokens a rank",
        )
        return figure, (
            f"Two bars. A rank needs {number(memory.peak, 'B')} at its fullest ({fullest.name}), which "
            f"{'fits' if fits else 'does not fit'} 80 GB; a step takes {number(took, 's')}, "
            f"{100 * spent['computing'] / took:.0f} % of it computing."
        )

    return readings, draw
