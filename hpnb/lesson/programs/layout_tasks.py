"""Training tasks whose layouts notebook 08 chooses among: GPT-2 XL on nodes of 8 GPUs."""

from __future__ import annotations

from hpnb.models import GPT2_SIZES
from hpnb.theory import LINKS, LayerCost, LayoutTask

NODE, RATE = 8, 400e12  # ranks of a node; FLOP/s of a rank
_ADAM_SECONDS = 28 / 3e12  # for each parameter: bytes over the memory's bandwidth


def gpt2_xl_task(samples: int, between: str = "") -> LayoutTask:
    """GPT-2 XL at 400 TFLOP/s a rank; a layer's kernels take 0.1 ms a microbatch whatever its samples.

    A sample has 1,024 tokens. `between` nodes, whose ranks have NVLink 4, is a link of `hpnb.theory.LINKS`;
    "" is one node.
    """
    size = GPT2_SIZES["1.5b"]
    block = size.block()
    head = LayerCost(1e-4, 6 * size.length * size.hidden * size.vocab_size / RATE)
    layer = LayerCost(1e-4, block.training_flops / RATE)
    return LayoutTask(
        block, size.layers, size.vocab_size, samples, layer, head, _ADAM_SECONDS, LINKS["NVLink 4"],
        LINKS[between] if between else None, NODE,
    )  # fmt: skip
