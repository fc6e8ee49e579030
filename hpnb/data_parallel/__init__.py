"""Data parallelism: replicas that agree on gradients, and ZeRO, which deals out what they would all hold.

    stage 0   DataParallel     data_parallel.py, reducer.py, buckets.py
    stage 1   ZeroOptimizer    the optimizer's states are dealt out: zero.py, zero_sink.py, zero_bucket.py
    stage 2   ZeroOptimizer    and the gradients
    stage 3   fully_shard      and the parameters: fully_shard.py, sharded.py, unit.py, flat.py
"""

from hpnb.data_parallel.data_parallel import DataParallel, broadcast, global_mean
from hpnb.data_parallel.fully_shard import fully_shard, load_full_state_dict, no_sync, sink
from hpnb.data_parallel.reducer import Reducer
from hpnb.data_parallel.zero import ZeroOptimizer

__all__ = [
    "DataParallel",
    "Reducer",
    "ZeroOptimizer",
    "broadcast",
    "fully_shard",
    "global_mean",
    "load_full_state_dict",
    "no_sync",
    "sink",
]
