"""Hybrid parallelism: data, pipeline and tensor parallelism in one Booster, and a training program around it.

plugins.py             HybridParallelPlugin: what to parallelize; presets.py has it with fewer knobs
colossal_config.py     the same from a configuration of Colossal-AI's first tutorials
refused.py             which options cannot be combined, and why
booster.py             Booster: boost, execute_pipeline, backward; booster_files.py: its files
parallelize_model.py   the order in which the strategies are applied to a model
boost_checks.py        what boost refuses before it changes anything
boosted_model.py       the model on one rank; global_loss.py and model_loss.py: the loss over all ranks
boosted_optimizer.py   the optimizer on one rank (../optimizer_state.py: its state in one process's terms)
describe_stages.py     which stage has what, printed by boost(verbose=True)
compile_blocks.py      torch.compile for a model's blocks; recompute.py: activation checkpointing

checkpoint/            weights in Hugging Face's format, all other state in shards; atomic, from any layout
training/              Trainer and its hooks, metrics, progress bars; HybridAdam, learning-rate schedulers
torchrun/              launch_from_torch, DistCoordinator, get_dist_logger, restarts, several nodes
train_command/         python -m hpnb train: the TOML run file, and the run that it describes
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpnb.lazy_names import lazy_names

if TYPE_CHECKING:
    from hpnb.hybrid.boosted_model import Boosted
    from hpnb.hybrid.booster import Booster
    from hpnb.hybrid.plugins import HybridParallelPlugin
    from hpnb.hybrid.presets import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
    from hpnb.hybrid.refused import REFUSED
    from hpnb.hybrid.stage_manager import StageManager
    from hpnb.hybrid.torchrun.coordinator import DistCoordinator
    from hpnb.hybrid.torchrun.launch_from_torch import launch_from_torch
    from hpnb.hybrid.training.hybrid_adam import HybridAdam
    from hpnb.hybrid.training.lr_schedulers import CosineAnnealingWarmupLR, LinearWarmupLR
    from hpnb.hybrid.training.trainer import Trainer

__all__ = [
    "REFUSED",
    "Boosted",
    "Booster",
    "CosineAnnealingWarmupLR",
    "DistCoordinator",
    "GeminiPlugin",
    "HybridAdam",
    "HybridParallelPlugin",
    "LinearWarmupLR",
    "LowLevelZeroPlugin",
    "StageManager",
    "TorchDDPPlugin",
    "Trainer",
    "launch_from_torch",
]

# Each file is read when a name of it is asked for: to launch takes no transformers.
_FROM = {
    "REFUSED": "refused",
    "Boosted": "boosted_model",
    "Booster": "booster",
    "CosineAnnealingWarmupLR": "training.lr_schedulers",
    "DistCoordinator": "torchrun.coordinator",
    "GeminiPlugin": "presets",
    "HybridAdam": "training.hybrid_adam",
    "HybridParallelPlugin": "plugins",
    "LinearWarmupLR": "training.lr_schedulers",
    "LowLevelZeroPlugin": "presets",
    "StageManager": "stage_manager",
    "TorchDDPPlugin": "presets",
    "Trainer": "training.trainer",
    "launch_from_torch": "torchrun.launch_from_torch",
}

__getattr__ = lazy_names(__name__, _FROM)
