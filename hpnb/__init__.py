"""Hybrid parallel training, taught in notebooks and run for real.

    import hpnb
    hpnb.launch(lambda: hpnb.rank(), ranks=4)        # [0, 1, 2, 3]: one result per rank

Run code on several processes
    launch(fn, ranks=4)              four processes for one call; Ranks(4).run(fn): they keep their state
    rank, world_size, device         inside fn: who and where this process is
    RankError, RankInterrupt         what a failed or interrupted call raises, with every rank's stack
    %load_ext hpnb                   the cell magic %%ranks; `%%ranks?` explains it
    launch_from_torch                join what torchrun has started; DistCoordinator: rank 0 first, print once
    get_dist_logger                  log lines of chosen ranks; disable_existing_loggers: the others
    ranks                            choose_device, default_ranks, usable_cores

Train a model in any layout
    HybridParallelPlugin             what to parallelize: tp_size, pp_size, zero_stage, precision, ...
    TorchDDPPlugin, LowLevelZeroPlugin, GeminiPlugin     the same with fewer arguments
    Booster(plugin=plugin)           boost, execute_pipeline, backward; save and load checkpoints
    Trainer                          epochs of steps, with hooks; HybridAdam: an Adam for all layouts
    CosineAnnealingWarmupLR, LinearWarmupLR              learning-rate schedules
    Hook, Metric                     base classes of your own hooks
    LossHook, AccuracyHook, F1Hook, ThroughputHook       metrics
    LRSchedulerHook, CheckpointHook, MetricsByEpochHook, MemoryHook, TimelineHook

One strategy at a time
    Layout(dp=2, tp=2), Mesh(layout) process groups along axes; Axis: one of them; ParallelLayout: sizes
    comm                             collectives with gradients along an axis
    DataParallel, ZeroOptimizer, fully_shard             replicas; ZeRO 1, 2; ZeRO 3 (data_parallel has more)
    Pipeline                         stages of a model; pipeline_parallel: schedules.make, Costs, Builder
    context_parallel                 parallelize, shard_batch, ring_attention, ulysses_attention
    expert_parallel                  parallelize, plan_dispatch, balancing_loss, SelectionBias
    tensor_parallel                  parallelize, full_state_dict, cross_entropy
    precision                        step (clips, skips overflows), Masters, LossScaler
    placement                        which part of a parameter a rank has

Models and data
    models                           vit, gpt2, roles, register (a model of your own)
    data                             beans, cifar10, mrpc, text, Loader, ImageTransform, collate_*

Measure, predict, draw
    record                           timeline, memory, traffic: what a step did
    theory                           the same, predicted; planner: the best layout of a cluster
    plot                             timeline, memory, mesh, compare, show
    lesson                           what the notebooks call

`help(hpnb.launch)` and so on have the details and an example. Commands: python -m hpnb --help and
python -m hpnb.bench --help.
"""

import sys as _sys
import typing as _typing

if _typing.TYPE_CHECKING:
    from hpnb import (
        comm,
        context_parallel,
        data,
        data_parallel,
        expert_parallel,
        lesson,
        models,
        pipeline_parallel,
        placement,
        plot,
        precision,
        ranks,
        record,
        tensor_parallel,
        theory,
    )
    from hpnb.data_parallel import DataParallel, ZeroOptimizer
    from hpnb.data_parallel.fsdp import fully_shard
    from hpnb.hybrid.booster import Booster
    from hpnb.hybrid.plugins import HybridParallelPlugin
    from hpnb.hybrid.presets import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
    from hpnb.hybrid.torchrun.coordinator import DistCoordinator
    from hpnb.hybrid.torchrun.dist_logger import disable_existing_loggers, get_dist_logger
    from hpnb.hybrid.torchrun.launch_from_torch import launch_from_torch
    from hpnb.hybrid.training.events import Hook, Metric
    from hpnb.hybrid.training.hooks import CheckpointHook, LRSchedulerHook, MetricsByEpochHook
    from hpnb.hybrid.training.hybrid_adam import HybridAdam
    from hpnb.hybrid.training.lr_schedulers import CosineAnnealingWarmupLR, LinearWarmupLR
    from hpnb.hybrid.training.metrics import AccuracyHook, F1Hook, LossHook, ThroughputHook
    from hpnb.hybrid.training.recording_hooks import MemoryHook, TimelineHook
    from hpnb.hybrid.training.trainer import Trainer
    from hpnb.mesh import Axis, Layout, Mesh, ParallelLayout
    from hpnb.pipeline_parallel import Pipeline
    from hpnb.ranks import RankError, RankInterrupt, Ranks, device, launch, rank, world_size

__version__ = "0.1.0"

__all__ = [
    "AccuracyHook",
    "Axis",
    "Booster",
    "CheckpointHook",
    "CosineAnnealingWarmupLR",
    "DataParallel",
    "DistCoordinator",
    "F1Hook",
    "GeminiPlugin",
    "Hook",
    "HybridAdam",
    "HybridParallelPlugin",
    "LRSchedulerHook",
    "Layout",
    "LinearWarmupLR",
    "LossHook",
    "LowLevelZeroPlugin",
    "MemoryHook",
    "Mesh",
    "Metric",
    "MetricsByEpochHook",
    "ParallelLayout",
    "Pipeline",
    "RankError",
    "RankInterrupt",
    "Ranks",
    "ThroughputHook",
    "TimelineHook",
    "TorchDDPPlugin",
    "Trainer",
    "ZeroOptimizer",
    "comm",
    "context_parallel",
    "data",
    "data_parallel",
    "device",
    "disable_existing_loggers",
    "expert_parallel",
    "fully_shard",
    "get_dist_logger",
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
    "ranks",
    "record",
    "tensor_parallel",
    "theory",
    "world_size",
]

# Where each name is. A file is read when a name of it is first used: `import hpnb` takes milliseconds, and
# ranks, which never draw, need not import what draws.
_FROM = {
    "Axis Layout Mesh ParallelLayout": "hpnb.mesh",
    "RankError RankInterrupt Ranks device launch rank world_size": "hpnb.ranks",
    "DataParallel ZeroOptimizer fully_shard": "hpnb.data_parallel",
    "Pipeline": "hpnb.pipeline_parallel",
    "Booster": "hpnb.hybrid.booster",
    "HybridParallelPlugin": "hpnb.hybrid.plugins",
    "GeminiPlugin LowLevelZeroPlugin TorchDDPPlugin": "hpnb.hybrid.presets",
    "DistCoordinator": "hpnb.hybrid.torchrun.coordinator",
    "disable_existing_loggers get_dist_logger": "hpnb.hybrid.torchrun.dist_logger",
    "launch_from_torch": "hpnb.hybrid.torchrun.launch_from_torch",
    "Hook Metric": "hpnb.hybrid.training.events",
    "CheckpointHook LRSchedulerHook MetricsByEpochHook": "hpnb.hybrid.training.hooks",
    "HybridAdam": "hpnb.hybrid.training.hybrid_adam",
    "CosineAnnealingWarmupLR LinearWarmupLR": "hpnb.hybrid.training.lr_schedulers",
    "AccuracyHook F1Hook LossHook ThroughputHook": "hpnb.hybrid.training.metrics",
    "MemoryHook TimelineHook": "hpnb.hybrid.training.recording_hooks",
    "Trainer": "hpnb.hybrid.training.trainer",
}
_MODULE_OF = {name: module for names, module in _FROM.items() for name in names.split()}


def __getattr__(name: str) -> object:
    import importlib

    if name in _MODULE_OF:
        _import_torch()
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value  # the next look-up is an ordinary one
        return value
    if name in __all__ or name in ("hybrid", "mesh"):
        _import_torch()
        return importlib.import_module(f"hpnb.{name}")
    raise AttributeError(f"module 'hpnb' has no attribute {name!r}")


def _import_torch() -> None:
    """Import torch, as most of hpnb does. Ctrl-C waits until the end, because half of it cannot be used."""
    import importlib
    import signal
    import threading

    handler = signal.getsignal(signal.SIGINT)
    if (
        "torch" in _sys.modules
        or not callable(handler)
        or threading.current_thread() is not threading.main_thread()
    ):
        return
    interrupts: list[tuple[_typing.Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *interrupt: interrupts.append(interrupt))
    try:
        importlib.import_module("torch")
    finally:
        signal.signal(signal.SIGINT, handler)
    if interrupts:
        handler(*interrupts[0])


def __dir__() -> list[str]:
    # help() would import every room and print every method of every class below the index above.
    asks = _sys._getframe(1).f_back
    if asks and asks.f_back and "pydoc" in (asks.f_globals["__name__"], asks.f_back.f_globals["__name__"]):
        return ["__doc__", "__name__", "__path__", "__version__"]
    return sorted([*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"])


def load_ipython_extension(shell: _typing.Any) -> None:
    """`%load_ext hpnb` gives the cell magic `%%ranks`."""
    from hpnb.ranks.cell_magic import RanksMagics
    from hpnb.ranks.forkserver import start_ahead

    start_ahead()
    if "RanksMagics" not in shell.magics_manager.registry:  # %reload_ext keeps the ranks that are there
        shell.register_magics(RanksMagics)


if "IPython" in _sys.modules:  # in a notebook, the server of ranks imports torch while the reader reads on
    from hpnb.ranks.forkserver import start_ahead as _start_ahead

    _start_ahead()
