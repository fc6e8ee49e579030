"""ZeRO-3 in CUDA graphs: what is gathered, freed and waited for inside a capture belongs to the graph.

    forward graph    gather root | gather 0 | block 0, gather 1 | block 1, gather 2 | ...    root stays
    backward graph                 gather 2 | block 2, gather 1 | ...                        root is freed

The hooks of `fsdp_hooks.py` run in the capture as in an eager step. An all-gather is a kernel of the graph,
in a branch that forks from the compute kernels and joins them where the weights are needed. A full parameter
is in the memory pool of the graph, and where it is freed, later kernels of this graph take its memory. So a
graph needs what an eager forward or backward needs: the root, and `prefetch` + 1 blocks. Each microbatch in
flight has a slot of memory, and thus a root. Graphs keep their memory between steps.

Between two actions nothing stays gathered. Where eager actions keep the block that the next one begins with,
a graph gathers it again. Gradients are summed outside of the graphs, after the last replay of their stage.
The tensors of full gradients stay in memory, because graphs add to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hpnb.data_parallel.flat_params import FlatParam


def why_not_captured(cpu_offload: bool, find_unused: bool) -> str:
    """Why CUDA graphs cannot have the gathers of a module that is sharded with these options; empty if they
    can."""
    if cpu_offload:
        return "its shards are on the CPU (cpu_offload), and every backward waits until copies have arrived"
    if find_unused:
        return "its ranks may use different parameters (find_unused_parameters)"
    return ""


@contextmanager
def capturing_gathers(flat_params: Sequence[FlatParam], reset: Callable[[], None]) -> Iterator[None]:
    """Around the capture of a forward and its backward, which start from shards and end with shards.

    Args:
        reset: frees all units.
    """
    reset()
    try:
        yield
    except BaseException:
        for flat in flat_params:
            flat.forget_gather()
        raise
    finally:
        reset()
