"""Steps that others measured and published: `planner` is fitted to one, and compared with the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from hpnb.mesh import ParallelLayout
from hpnb.theory.cluster import Cluster, GPTRun, cluster_parts, refusal
from hpnb.theory.links import Link

# Datasheets: peak of 16-bit matmuls without sparsity, memory and its bandwidth, each direction of NVLink, and
# one network card a GPU. Latencies are orders of magnitude, as in LINKS.
DGX_A100 = Cluster(8, 8, 312e12, 80e9, 2.039e12, Link(3e-6, 300e9, "NVLink 3"), Link(10e-6, 25e9, "HDR"), 8)
DGX_H100 = Cluster(8, 8, 989e12, 80e9, 3.35e12, Link(3e-6, 450e9, "NVLink 4"), Link(10e-6, 50e9, "NDR"), 8)


@dataclass(frozen=True)
class PublishedRun:
    """A run that others have measured: `tflops` of a GPU, recomputed FLOPs included where there are any.

    Attributes:
        microbatch_size, chunks: samples of a microbatch, and chunks of a GPU; None where the source does not
            say.
        zero_stage: 1 if the optimizer is sharded over dp.
        cluster: what it ran on, with the peak as the share of the peak.
    """

    name: str
    run: GPTRun
    gpus: int
    pp: int
    tp: int
    tflops: float
    microbatch_size: int | None = None
    chunks: int | None = None
    zero_stage: int = 0
    cluster: Cluster = DGX_A100

    @cached_property
    def plan(self) -> ParallelLayout:
        """Its layout. Where the source does not say, one sample, and the fastest number of chunks."""
        cluster = replace(self.cluster, gpus=self.gpus)
        counts = range(1, self.run.layers // self.pp + 1) if self.chunks is None else (self.chunks,)
        layouts = (
            ParallelLayout(
                self.gpus // self.pp // self.tp, self.pp, self.tp, microbatch_size=self.microbatch_size or 1,
                zero_stage=self.zero_stage, schedule="interleaved" if v > 1 else "1f1b", chunks=v,
            )
            for v in counts
        )  # fmt: skip
        able = [layout for layout in layouts if refusal(self.run, cluster, layout) is None]
        return min(able, key=lambda layout: sum(cluster_parts(self.run, cluster, layout).values()))


# Narayanan et al. 2021 (arXiv 2104.04473), table 1: A100 of 80 GB, sequences of 2,048, a vocabulary of
# 51,200, full recomputation. Microbatches and chunks are those of the script that the authors published with
# it (Megatron-LM, examples/sc21/run_table_1.sh); 39.1B and 1T have one chunk there, without interleaving.
MEGATRON = tuple(
    PublishedRun(f"{billions}B", GPTRun(hidden, layers, heads, batch), gpus, pp, tp, measured, size, chunks)
    for billions, heads, hidden, layers, tp, pp, gpus, batch, size, chunks, measured in (
        (1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
        (3.6, 32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
        (7.5, 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142),
        (18.4, 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
        (39.1, 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138),
        (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
        (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148),
        (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
        (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163),
        (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163),
    )
)

# Megatron-Core r0.8.0 (README of github.com/NVIDIA/Megatron-LM, July 2024): H100, sequences of 4,096, a
# vocabulary of 131,072, dp 48; TFLOP/s are of the model. It names neither microbatches nor chunks nor
# recomputation. Optimizers were sharded; gradients, weights, tp and pp were sent while GPUs computed. Its
# models have an output layer of their own, which `GPTRun.parameters` leaves out.
MEGATRON_CORE = tuple(
    PublishedRun(
        f"{billions}B", GPTRun(hidden, layers, heads, batch, 4096, 131072, False, True),
        gpus, pp, tp, measured, zero_stage=1, cluster=DGX_H100,
    )
    for billions, heads, hidden, layers, tp, pp, gpus, batch, measured in (
        (1.7, 16, 2048, 24, 1, 1, 48, 192, 408.8),
        (7.1, 32, 4096, 30, 2, 1, 96, 192, 465.9),
        (16, 48, 6144, 32, 4, 1, 192, 192, 489.1),
        (32, 56, 7168, 48, 8, 1, 384, 192, 459.6),
        (70, 64, 8192, 84, 8, 2, 768, 384, 419.7),
        (119, 80, 10240, 92, 8, 4, 1536, 768, 420.5),
        (177, 96, 12288, 96, 8, 6, 2304, 1152, 432.8),
        (314, 128, 16384, 96, 8, 8, 3072, 1536, 474.4),
        (462, 144, 18432, 112, 8, 16, 6144, 3072, 459.9),
    )
)  # fmt: skip

# Dubey et al. 2024 (Llama 3, arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on
# 16,384 H100s. So one GPU, with its share of host, network and software, stops a run once in 5.8 years.
LLAMA_3_EACH = 54 * 86400 * 16384 / 419
# Narayanan et al. 2021 (arXiv 2104.04473, section 5.10): a model of 1e12 parameters has a checkpoint of
# 13.8 TB, and 384 hosts wrote theirs at 273 GB/s.
CHECKPOINT_BYTES, WRITTEN, WRITERS = 13.8, 273e9, 384 * 8  # a parameter; bytes/s, of so many GPUs
