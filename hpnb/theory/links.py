"""A link is two numbers: the latency of a message and the bandwidth of one direction.

A message of n bytes takes latency + n / bandwidth seconds (Hockney, Parallel Computing 20(3), 1994).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A link as one rank sees it: seconds a message, and bytes a second in one direction."""

    latency: float
    bandwidth: float
    name: str = ""

    def __post_init__(self) -> None:
        if not (0 <= self.latency < math.inf and self.bandwidth > 0):
            raise ValueError(
                f"a Link of latency {self.latency} s and bandwidth {self.bandwidth} bytes/s cannot be; "
                "latency must be at least 0 and bandwidth above 0"
            )


# Nominal, for a first guess: nothing here was measured, `fit_link` is for that. Bandwidths are the line rates
# of datasheets, which no program quite reaches. Latencies stand on no datasheet: they are orders of magnitude
# for one message between two ranks, software included. (NCCL's tuning table, hwLat in src/graph/tuning.cc,
# has had 3.4, 5.7 and 9.6 microseconds a ring step of large messages for NVLink, PCIe and network.)
LINKS = {
    # 18 links of 25 GB/s each way a GPU: "900 GB/s" on the datasheet counts both directions
    "NVLink 4": Link(3e-6, 450e9, "NVLink 4"),
    # 32 GT/s a lane, 16 lanes, 128b/130b code, 8 bits a byte: 63 GB/s each way
    "PCIe 5 x16": Link(6e-6, 16 * 32e9 * 128 / 130 / 8, "PCIe 5 x16"),
    # 16 GT/s a lane
    "PCIe 4 x16": Link(6e-6, 16 * 16e9 * 128 / 130 / 8, "PCIe 4 x16"),
    # 400 Gb/s each way a port; one port a GPU is common
    "InfiniBand NDR": Link(10e-6, 400e9 / 8, "InfiniBand NDR"),
    # line rates each way, a whole host's if its ranks share the card; latency as of TCP through the kernel
    "Ethernet 100 Gb": Link(30e-6, 100e9 / 8, "Ethernet 100 Gb"),
    "Ethernet 10 Gb": Link(50e-6, 10e9 / 8, "Ethernet 10 Gb"),
}

# What four H200 reach over NVLink 4 in an all-reduce, fitted to measurements (`hpnb.lesson.machine_card`).
# Replays assume it where ranks share a GPU, because no message between GPUs can be measured there.
REPLAY_LINK = Link(20e-6, 298e9, "NVLink 4 at 298 GB/s")
