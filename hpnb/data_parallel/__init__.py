"""Data parallelism: replicas that sum their gradients, and ZeRO, which shards what they would replicate.

    stage 0   DataParallel     everything is replicated: ddp.py, reducer.py, split_reducer.py, buckets.py
    stage 1   ZeroOptimizer    optimizer state is sharded: zero.py, zero_checks.py, zero_reduce_scatter.py,
                               zero_bucket.py, shard_layout.py
    stage 2   ZeroOptimizer    gradients too
    stage 3   fully_shard      parameters too: fsdp.py, fsdp_hooks.py, fsdp_units.py, fsdp_prefetch.py,
                               fsdp_reductions.py, fsdp_capture.py, fsdp_checks.py, copied_hooks.py,
                               flat_params.py, parameter_hooks.py, shard_layout.py

Read two files of hpnb/ first: `gradients.py`, on what a hook owner and a sink are, and `background.py`, which
runs collectives beside the computation. `replicas.py` makes replicas equal at the start. `compare_replicas`
says which parameters and gradients differ between them later, when they should not.
"""

from hpnb.data_parallel.compare_replicas import compare_replicas
from hpnb.data_parallel.ddp import DataParallel, global_mean
from hpnb.data_parallel.fsdp import fully_shard, load_full_state_dict, no_sync, sink
from hpnb.data_parallel.reducer import Reducer
from hpnb.data_parallel.replicas import broadcast
from hpnb.data_parallel.zero import ZeroOptimizer

__all__ = [
    "DataParallel",
    "Reducer",
    "ZeroOptimizer",
    "broadcast",
    "compare_replicas",
    "fully_shard",
    "global_mean",
    "load_full_state_dict",
    "no_sync",
    "sink",
]
