"""What others have measured and published: the planner is fitted to one run and checked by the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpnb.mesh import ParallelLayout
from hpnb.theory.cluster import Cluster, GPTRun
from hpnb.theory.links import Link
from hpnb.theory.planner import cluster_layouts, fastest

# Datasheets: peak of 16-bit matmuls without sparsity, memory and its bandwidth, each direction of NVLink, and
# one network card a GPU. Latencies are orders of magnitude, as in LINKS.
DGX_A100 = Cluster(8, 8, 312e12, 80e9, 2.039e12, Link(3e-6, 300e9, "NVLink 3"), Link(10e-6, 25e9, "HDR"), 8)
DGX_H100 = Cluster(8, 8, 989e12, 80e9, 3.35e12, Link(3e-6, 450e9, "NVLink 4"), Link(10e-6, 50e9, "NDR"), 8)


@dataclass(frozen=True)
class PublishedRun:
    """A run that others have measured: `tflops` of a GPU, recomputed FLOPs included."""

    name: str
    run: GPTRun
    gpus: int
    pp: int
    tp: int
    tflops: float

    @property
    def plan(self) -> ParallelLayout:
        """Its layout. The table does not name microbatches and chunks: one sample, and the fastest number."""
        cluster = replace(DGX_A100, gpus=self.gpus)
        layouts = cluster_layouts(self.run, cluster)
        cut = (self.pp, self.tp)
        return fastest(self.run, cluster, (layout for layout in layouts if (layout.pp, layout.tp) == cut))


# Narayanan et al. 2021 (arXiv 2104.04473), table 1, every second row: A100 of 80 GB, sequences of 2,048, a
# vocabulary of 51,200, full recomputation, interleaved schedule.
MEGATRON = tuple(
    PublishedRun(f"{billions}B", GPTRun(hidden, layers, heads, batch), gpus, pp, tp, measured)
    for billions, heads, hidden, layers, tp, pp, gpus, batch, measured in (
        (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
        (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
        (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
        (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
        (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    )
)

# Dubey et al. 2024 (Llama 3, arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on
# 16,384 H100s. So one GPU, with its share of host, network and software, stops a run once in 5.8 years.
LLAMA_3_EACH = 54 * 86400 * 16384 / 419
# Narayanan et al. 2021 (arXiv 2104.04473, section 5.10): a model of 1e12 parameters has a checkpoint of
# 13.8 TB, and 384 hosts wrote theirs at 273 GB/s.
CHECKPOINT_BYTES, WRITTEN, WRITERS = 13.8, 273e9, 384 * 8  # a parameter; bytes/s, of so many GPUs
