"""GPUs as their datasheets describe them, and nodes of them, as a `Cluster` for predictions.

Peaks are dense 16-bit matmuls with float32 sums, in FLOP/s; bytes are decimal; a link's bandwidth is one
direction. A datasheet says what hardware cannot exceed. What programs reach is a share of it:

    matmuls   0.69 of the peak, as products alone on an H200; of a whole step on Hopper and Blackwell, which
              power limits, 0.585, fitted to a GPT-2 XL on one H200
    memory    0.8 of the bandwidth, for compiled element-wise kernels
    links     0.66 of the line rate and 20 us a message: all-reduces of four H200s, 298 of 450 GB/s

The latency counts a ring's six messages, as `fit_link` does. `plan_messages` counts a tree's four, for which
it would be 30 us; with that, published steps are predicted as well (mean error 4.8 %).

`python -m hpnb plan --measure` measures peak, memory bandwidth and the link within a node. It leaves the
network between nodes and what a step reaches of a matmul's rate.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from hpnb.theory.cluster import Cluster
from hpnb.theory.links import Link

MATMUL_SHARE, HOPPER_SHARE, MEMORY_SHARE, LINK_SHARE, LATENCY = 0.69, 0.585, 0.8, 0.66, 20e-6


@dataclass(frozen=True)
class GPU:
    """One kind of GPU, in the node in which it is usually sold.

    Attributes:
        peak: dense 16-bit matmul FLOP/s.
        memory, memory_bandwidth: bytes, and bytes/s.
        link: bytes/s in one direction, from a GPU to the others of its node.
        per_node: GPUs of a node.
        network: bytes/s in one direction of one network card.
        cards: network cards of a node.
        dtype: the 16-bit dtype that it trains in.
        matmul_share, memory_share, link_share: what programs reach of the peaks.
        latency: seconds of a message within a node.
        network_share, network_latency: of the network between nodes, which --measure does not see.
    """

    name: str
    peak: float
    memory: float
    memory_bandwidth: float
    link: float
    link_name: str
    per_node: int = 8
    network: float = 50e9
    cards: int = 8
    dtype: str = "bf16"
    matmul_share: float = MATMUL_SHARE
    memory_share: float = MEMORY_SHARE
    link_share: float = LINK_SHARE
    latency: float = LATENCY
    network_share: float = LINK_SHARE
    network_latency: float = 1.5 * LATENCY

    def cluster(self, gpus: int, per_node: int | None = None) -> Cluster:
        """So many of them, in nodes."""
        node = self.per_node if per_node is None else per_node
        for name, count in (("gpus", gpus), ("per_node", node)):
            if count < 1:
                raise ValueError(f"{name}={count} is not a count; use 1 or more")
        if gpus > node and gpus % node:
            raise ValueError(
                f"{gpus} GPUs do not fill nodes of {node}; use {gpus // node * node} or "
                f"{(gpus // node + 1) * node} GPUs, or other nodes with --per-node"
            )
        cards = self.cards if per_node is None else max(1, self.cards * node // self.per_node)
        inside = Link(self.latency, self.link * self.link_share, self.link_name)
        between = Link(self.network_latency, self.network * self.network_share, "network")
        return Cluster(
            gpus, min(node, gpus), self.peak, self.memory, self.memory_bandwidth * self.memory_share,
            inside, between, min(cards, min(node, gpus)), self.matmul_share,
        )  # fmt: skip


_PCIE_3, _PCIE_4 = 15.75e9, 31.5e9  # x16, each direction

GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA T4 datasheet: 65 TFLOPS FP16, 16 GB GDDR6, 320 GB/s, PCIe 3 x16; no bf16 (Turing)
        GPU("t4", 65e12, 16e9, 320e9, _PCIE_3, "PCIe 3 x16", 4, 6.25e9, 1, "fp16"),
        # NVIDIA A10 datasheet: 125 TFLOPS BF16 (250 with sparsity), 24 GB, 600 GB/s, PCIe 4 64 GB/s both ways
        GPU("a10", 125e12, 24e9, 600e9, _PCIE_4, "PCIe 4 x16", 4, 12.5e9, 1),
        # NVIDIA L4 datasheet: 242 TFLOPS BF16 with sparsity, so 121 dense; 24 GB, 300 GB/s, PCIe 4 x16
        GPU("l4", 121e12, 24e9, 300e9, _PCIE_4, "PCIe 4 x16", 8, 12.5e9, 1),
        # NVIDIA A100 datasheet, SXM: 312 TFLOPS BF16, 1,555 and 2,039 GB/s, NVLink 600 GB/s both ways; HDR
        GPU("a100-40", 312e12, 40e9, 1.555e12, 300e9, "NVLink 3", 8, 25e9, 8),
        GPU("a100", 312e12, 80e9, 2.039e12, 300e9, "NVLink 3", 8, 25e9, 8),
        # NVIDIA H100 datasheet, SXM: 1,979 TFLOPS BF16 with sparsity, 80 GB, 3.35 TB/s, NVLink 900 GB/s; NDR
        GPU("h100", 989e12, 80e9, 3.35e12, 450e9, "NVLink 4", 8, 50e9, 8, "bf16", HOPPER_SHARE),
        # NVIDIA H800 datasheet, SXM: as H100, with NVLink of 400 GB/s both ways
        GPU("h800", 989e12, 80e9, 3.35e12, 200e9, "NVLink 4", 8, 50e9, 8, "bf16", HOPPER_SHARE),
        # NVIDIA H200 datasheet, SXM: as H100, with 141 GB and 4.8 TB/s
        GPU("h200", 989e12, 141e9, 4.8e12, 450e9, "NVLink 4", 8, 50e9, 8, "bf16", HOPPER_SHARE),
        # NVIDIA HGX B200 datasheet: of eight 36 PFLOPS BF16 with sparsity, 1.44 TB, 62 TB/s; NVLink 1.8 TB/s
        GPU("b200", 2.25e15, 180e9, 7.7e12, 900e9, "NVLink 5", 8, 50e9, 8, "bf16", HOPPER_SHARE),
        # NVIDIA Ada whitepaper, RTX 4090: 165.2 TFLOPS FP16 with FP32 sums, 24 GB, 1,008 GB/s, PCIe 4 x16
        GPU("rtx4090", 165.2e12, 24e9, 1.008e12, _PCIE_4, "PCIe 4 x16", 8, 3.125e9, 1),
    )
}
_OTHER_NAMES = {"a100-80": "a100", "4090": "rtx4090", "rtx-4090": "rtx4090"}


def find_gpu(name: str) -> GPU:
    """The GPU of that name, in any case."""
    key = name.lower().replace(" ", "-").replace("_", "-")
    key = _OTHER_NAMES.get(key, key)
    if key not in GPUS:
        near = difflib.get_close_matches(key, GPUS, 1)
        hint = f"use {near[0]}; " if near else ""
        raise ValueError(
            f"no datasheet of a GPU {name!r}; {hint}there are {', '.join(GPUS)}, and `measured` after "
            "`python -m hpnb plan --measure`"
        )
    return GPUS[key]
