"""Run a function on N processes, from a cell. Knows nothing of models or meshes."""

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
