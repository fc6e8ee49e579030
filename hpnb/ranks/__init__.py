"""Run a function on N processes, from a cell. Imports nothing of models or meshes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpnb.lazy_names import lazy_names

if TYPE_CHECKING:
    from hpnb.ranks.current_rank import device, rank, world_size
    from hpnb.ranks.devices import DeviceChoice, choose_device, default_ranks, usable_cores
    from hpnb.ranks.errors import RankError, RankInterrupt
    from hpnb.ranks.pool import Ranks, launch

__all__ = [
    "DeviceChoice",
    "RankError",
    "RankInterrupt",
    "Ranks",
    "choose_device",
    "default_ranks",
    "device",
    "launch",
    "rank",
    "usable_cores",
    "world_size",
]

# Read when first used, because they import torch: a notebook starts its server of ranks before that.
_FROM = dict.fromkeys(("device", "rank", "world_size"), "current_rank")
_FROM |= dict.fromkeys(("DeviceChoice", "choose_device", "default_ranks", "usable_cores"), "devices")
_FROM |= dict.fromkeys(("RankError", "RankInterrupt"), "errors") | dict.fromkeys(("Ranks", "launch"), "pool")

__getattr__ = lazy_names(__name__, _FROM)
