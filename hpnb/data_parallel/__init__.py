"""Data parallelism: replicas that agree on gradients."""

from hpnb.data_parallel.data_parallel import DataParallel, broadcast
from hpnb.data_parallel.reducer import Reducer

__all__ = ["DataParallel", "Reducer", "broadcast"]
