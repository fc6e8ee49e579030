"""hpnb: hybrid parallel training, taught in notebooks and run for real.

    import hpnb
    hpnb.launch(lambda: hpnb.rank(), ranks=4)     # a cell is a cluster: [0, 1, 2, 3]

The rooms, from the ground up: ranks, record, mesh, comm, background, placement, grad_norm, precision,
gradients, theory, plot, data, models, data_parallel, pipeline_parallel, tensor_parallel, hybrid, lesson,
bench.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hpnb import record
from hpnb.mesh import Axis, Layout, Mesh, ParallelLayout
from hpnb.ranks import RankError, RankInterrupt, Ranks, device, launch, rank, world_size

if TYPE_CHECKING:
    from hpnb import (
        comm,
        data,
        lesson,
        models,
        pipeline_parallel,
        placement,
        plot,
        precision,
        tensor_parallel,
        theory,
    )
    from hpnb.data_parallel import DataParallel, ZeroOptimizer
    from hpnb.data_parallel.fsdp import fully_shard
    from hpnb.hybrid.booster import Booster
    from hpnb.hybrid.plugins import HybridParallelPlugin
    from hpnb.hybrid.presets import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
    from hpnb.hybrid.torchrun.coordinator import DistCoordinator
    from hpnb.hybrid.torchrun.launch_from_torch import launch_from_torch
    from hpnb.hybrid.training.hybrid_adam import HybridAdam
    from hpnb.hybrid.training.lr_schedulers import CosineAnnealingWarmupLR, LinearWarmupLR
    from hpnb.hybrid.training.trainer import Trainer
    from hpnb.pipeline_parallel import Pipeline

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "Booster",
    "CosineAnnealingWarmupLR",
    "DataParallel",
    "DistCoordinator",
    "GeminiPlugin",
    "HybridAdam",
    "HybridParallelPlugin",
    "Layout",
    "LinearWarmupLR",
    "LowLevelZeroPlugin",
    "Mesh",
    "ParallelLayout",
    "Pipeline",
    "RankError",
    "RankInterrupt",
    "Ranks",
    "TorchDDPPlugin",
    "Trainer",
    "ZeroOptimizer",
    "comm",
    "data",
    "device",
    "fully_shard",
    "launch",
    "launch_from_torch",
    "lesson",
    "load_ipython_extension",
    "models",
    "pipeline_parallel",
    "placement",
    "plot",
    "precision",
    "rank",
    "record",
    "tensor_parallel",
    "theory",
    "world_size",
]

# Loaded when first used: ranks never draw, so they need not import what draws.
_LAZY = frozenset(
    {
        "comm",
        "data",
        "lesson",
        "models",
        "pipeline_parallel",
        "placement",
        "plot",
        "precision",
        "tensor_parallel",
        "theory",
    }
)
_FROM = dict.fromkeys(("DataParallel", "ZeroOptimizer", "fully_shard"), "hpnb.data_parallel")
_FROM["Pipeline"] = "hpnb.pipeline_parallel"
_FROM |= {
    "Booster": "hpnb.hybrid.booster",
    "CosineAnnealingWarmupLR": "hpnb.hybrid.training.lr_schedulers",
    "DistCoordinator": "hpnb.hybrid.torchrun.coordinator",
    "GeminiPlugin": "hpnb.hybrid.presets",
    "HybridAdam": "hpnb.hybrid.training.hybrid_adam",
    "HybridParallelPlugin": "hpnb.hybrid.plugins",
    "LinearWarmupLR": "hpnb.hybrid.training.lr_schedulers",
    "LowLevelZeroPlugin": "hpnb.hybrid.presets",
    "TorchDDPPlugin": "hpnb.hybrid.presets",
    "Trainer": "hpnb.hybrid.training.trainer",
    "launch_from_torch": "hpnb.hybrid.torchrun.launch_from_torch",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return importlib.import_module(f"hpnb.{name}")
    if name in _FROM:
        return getattr(importlib.import_module(_FROM[name]), name)
    raise AttributeError(f"module 'hpnb' has no attribute {name!r}")


def load_ipython_extension(shell: object) -> None:
    """`%load_ext hpnb` gives the cell magic `%%ranks`."""
    from hpnb.ranks.cell_magic import RanksMagics
    from hpnb.ranks.forkserver import start_ahead

    start_ahead()
    shell.register_magics(RanksMagics)  # type: ignore[attr-defined]
