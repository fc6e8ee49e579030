"""ZeRO stage 3, or fully sharded data parallelism: every rank holds 1/N of each parameter, and gathers a
block just before it computes.

    compute          [root][ block 0 ][ block 1 ][ block 2 ]   [ block 2' ][ block 1' ][ block 0' ]
    all-gather       root 0 [   1   ]  [   2   ]      [  2  ]   [   1   ]    [   0   ]
    reduce-scatter                                                     [  2  ]     [  1  ]    0  root

The root is what lies in no block, such as embeddings. It stays unsharded from its forward to the end of the
backward. While a block computes, the next one is gathered. After it, its full parameters are freed. In the
backward (') its gradients are summed, and each rank keeps its shard. With N ranks and P parameters, which are
B bytes in the dtype of the computation:

    memory    16 P/N bytes in mixed precision, the full root, and `prefetch` + 1 full blocks
    traffic   3 (N-1)/N B: two all-gathers and a reduce-scatter, where replicas all-reduce 2 (N-1)/N B

With `replicas` the ranks are a grid (HSDP): N shard the parameters, usually those of a node, and R nodes hold
the same. A shard's gradient is then all-reduced over its R ranks, 2 (R-1)/R B/N bytes between nodes.

    fsdp_hooks.py        gathers, frees and reduces around forwards and backwards; copied_hooks.py for copies
    fsdp_units.py        which parameters are gathered together
    fsdp_prefetch.py     which unit is gathered ahead
    flat_params.py       the flat parameter of a unit; shard_layout.py says where each tensor lies in it
    fsdp_reductions.py   the reductions that are in flight
    fsdp_capture.py      gathers as parts of CUDA graphs
    parameter_hooks.py   hooks that users have registered on parameters

After Rajbhandari et al. 2020, *ZeRO* (arXiv 1910.02054), sections 5.3 and 7, and Zhao et al. 2023, *PyTorch
FSDP* (arXiv 2304.11277).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from hpnb.background import Background
from hpnb.data_parallel.flat_params import FSDPPolicy
from hpnb.data_parallel.fsdp_hooks import FSDPState, fsdp_state_of
from hpnb.data_parallel.fsdp_units import find_units
from hpnb.data_parallel.replicas import broadcast, check_replicas
from hpnb.data_parallel.split_reducer import is_expert
from hpnb.gradients import GradientSink
from hpnb.mesh import Axis, Mesh, axis_of
from hpnb.meta_device import fill_buffers
from hpnb.placement import load_full_state_dict as load_full_state_dict  # re-exported
from hpnb.ranks.current_rank import device as this_device

M = TypeVar("M", bound=nn.Module)


def fully_shard(
    module: M,
    axis: Axis | Mesh,
    *,
    replicas: Axis | None = None,
    expert_axes: tuple[Axis | None, Axis] | None = None,
    units: Iterable[nn.Module | str] | None = None,
    dtype: torch.dtype | None = None,
    communication_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    prefetch: int = 1,
    average: bool = True,
    find_unused_parameters: bool = False,
    cpu_offload: bool = False,
) -> M:
    """Shard the parameters of `module` over the ranks of `axis`. It is changed in place and returned.

    Names, order and Parameter objects stay, so an optimizer that has not stepped yet stays attached. A
    parameter's data becomes this rank's elements (n,), and its .grad the mean over the ranks of theirs. The
    module goes to `hpnb.device()`, unit by unit, with the values of the axis's rank 0. Buffers are
    replicated, and equal at the start only. Earlier gradients are dropped. All ranks call this with the same
    options, and run the same units. Make master weights (`hpnb.precision`) after it.

    A hook of a parameter's `register_hook` gets this rank's full gradient before the sum over the ranks, in
    the dtype of the computation. One of `register_post_accumulate_grad_hook` runs after the sum, when .grad
    is this rank's elements of it (`parameter_hooks.py`).

    Whatever looks at a parameter's shape, or at all gradients, silently sees this rank's elements only. So:

    - clip and scale by `hpnb.precision.step(optimizer, [axis], ...)`, which asks all ranks. torch's
      clip_grad_norm_ and GradScaler decide on each rank separately.
    - Do not use Adafactor or Muon, which need full matrices. `hpnb.ZeroOptimizer` gives them.
    - Make an optimizer's groups by p.dim() before this call.
    - Call the module and not its parts; the loss may use only tensors that its forward returns. Step after
      the backward.
    - Name blocks in `units` instead of sharding them one by one before, as FSDP2 asks for. That gives the
      same gradients, but each block is then a root: it is not prefetched, and stays unsharded from its
      forward to the end of the backward.

    The weights move to any number of ranks, by `hpnb.placement.full_state_dict` and `load_full_state_dict`.
    The state_dict of a plain optimizer does not: it is this rank's shard, to be saved by each rank and loaded
    by the same rank of as many ranks. The state of one process or of another number of ranks is accepted by
    load_state_dict and fails in the next step ("size of tensor a must match"). A Booster with zero_stage=3
    saves and loads the optimizer on any number of ranks.

    A copy.deepcopy of the module holds the same shards, for an average of weights (EMA). It can be gathered
    and saved, and cannot compute.

    A model on the meta device gets zeros, to be filled by `load_full_state_dict`. It never exists in full.

    Args:
        axis: the data axis `mesh.dp`, or a Mesh, whose `dp` is taken.
        replicas: ranks that hold the same shard, for shards within a node and replicas over nodes:
            `replicas, axis = mesh.dp.split(nodes, gpus_per_node)`. Gradients are the mean over both.
        expert_axes: (replicas, axis) of experts, if they are sharded over `mesh.ep`. Other ranks hold other
            experts, so they are sharded over `mesh.edp` or a part of it, with replicas over the rest or None;
            needs average=False.
        units: what is gathered together, modules or their names. By default the items of every outermost
            nn.ModuleList, or if there is none of every outermost nn.Sequential. The rest is the root's.
        dtype: to compute in; parameters keep theirs. Inputs of the module that are floats are converted.
        communication_dtype: to sum gradients in; by default that in which they are computed.
        reshard_after_forward: free a unit between its forward and its backward. False saves a third of the
            traffic and frees nothing before the backward.
        prefetch: how many units ahead to gather.
        average: False sums gradients instead, for losses that are divided by the global count already.
        find_unused_parameters: the ranks may use different parameters. Then all units are gathered at the
            start and reduced at the end, and the ranks agree on what none used, whose gradient stays None.
            Without it a parameter without a gradient is refused in the backward.
        cpu_offload: shards, gradients and so the optimizer's step are on the CPU.

    Raises:
        ValueError: nothing to shard, or already sharded or wrapped; experts without expert_axes; replicas
            that are ranks of `axis` too; a unit that is not there, or has no forward; ranks whose modules or
            options differ; a dtype that is no float; prefetch below 0.
        RuntimeError: in the backward, if parameters got no gradient and find_unused_parameters is off.

    >>> def shard():
    ...     model = hpnb.fully_shard(torch.nn.Linear(8, 8, bias=False), hpnb.Mesh(hpnb.Layout(dp=2)).dp)
    ...     return sum(p.numel() for p in model.parameters())
    >>> hpnb.launch(shard, ranks=2, device="cpu")
    [32, 32]
    """
    axis = axis_of(axis, "dp")
    _check_replica_axis(axis, replicas)
    module_of, refusal = dict[str, nn.Module](), None
    try:
        _check_options(module, dtype, communication_dtype, prefetch)
        module_of = find_units(module, units)
    except ValueError as error:  # perhaps on this rank alone
        refusal = str(error)
    options = {
        "units": list(module_of),
        "replicas": 1 if replicas is None else replicas.size,
        "dtype": dtype,
        "communication_dtype": communication_dtype,
        "reshard_after_forward": reshard_after_forward,
        "prefetch": prefetch,
        "average": average,
        "find_unused_parameters": find_unused_parameters,
        "cpu_offload": cpu_offload,
    }
    check_replicas(dict(module.named_parameters()), axis, options, replicas, refusal)
    device = this_device()

    def make_policy(replicas: Axis | None) -> FSDPPolicy:
        background = None if replicas is None or replicas.size == 1 else Background(replicas, device)
        return FSDPPolicy(device, dtype, communication_dtype, average, cpu_offload, background)

    policy, experts = make_policy(replicas), None
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if names := [name for name, tensor in tensors if is_expert(tensor)]:
        if expert_axes is None or average:
            raise ValueError(
                f"{len(names)} tensors, {names[0]} first, are of experts that other ranks do not have: pass "
                "expert_axes=(None, mesh.edp) and average=False"
            )
        experts = expert_axes[1], make_policy(expert_axes[0])
    _broadcast_buffers(module, (replicas, axis), expert_axes or (), device)
    FSDPState(  # lives in the module's hooks, and `fsdp_state_of` returns it
        module,
        axis,
        module_of,
        policy,
        prefetch=prefetch,
        reshard_after_forward=reshard_after_forward,
        find_unused=find_unused_parameters,
        experts=experts,
    )
    return module


def sink(module: nn.Module) -> GradientSink:
    """The GradientSink of a sharded module, to be set as a pipeline's `gradients`.

    Raises:
        ValueError: `module` is not sharded.
    """
    state = fsdp_state_of(module)
    if state is None:
        raise ValueError(f"this {type(module).__name__} is not sharded; call fully_shard first")
    return state


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate: backwards inside keep full gradients on this rank; the next one outside sends their sum.

    Until then they are not in .grad, and no zero_grad reaches them.

    Raises:
        ValueError: nothing in `module` is sharded.
    """
    states = [state for m in module.modules() if (state := fsdp_state_of(m)) is not None]
    if not states:
        raise ValueError(f"nothing in {type(module).__name__} is sharded; call fully_shard first")
    before = [state.sync for state in states]
    for state in states:
        state.sync = False
    try:
        yield
    finally:
        for state, sync in zip(states, before, strict=True):
            state.sync = sync


def _check_options(
    module: nn.Module, dtype: torch.dtype | None, communication_dtype: torch.dtype | None, prefetch: int
) -> None:
    for what, kind in (("dtype", dtype), ("communication_dtype", communication_dtype)):
        if kind is not None and not kind.is_floating_point:
            raise ValueError(f"{what}={kind} is not a floating-point dtype; use torch.bfloat16, say")
    if prefetch < 0:
        raise ValueError(f"prefetch={prefetch} is not a number of units; 0 gathers each when it is needed")
    if fsdp_state_of(module) is not None:
        raise ValueError(f"{type(module).__name__} is sharded already")


def _check_replica_axis(axis: Axis, replicas: Axis | None) -> None:
    if replicas is not None and len(both := set(axis.ranks) & set(replicas.ranks)) > 1:
        raise ValueError(
            f"ranks {', '.join(map(str, sorted(both)))} are on both axes, {axis.name} of {axis.size} ranks "
            f"and {replicas.name} of {replicas.size}; take two parts of one, as of mesh.dp.split(2, 4)"
        )


def _broadcast_buffers(
    module: nn.Module, axes: Sequence[Axis | None], expert_axes: Sequence[Axis | None], device: torch.device
) -> None:
    """Send buffers over replicas first and then over shards, so that the values of one rank reach all."""
    experts = {name for name, buffer in module.named_buffers() if is_expert(buffer)}
    fill_buffers(module, device)
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[key] = buffer.to(device)
    for of_experts, along in ((False, axes), (True, expert_axes)):
        buffers = [b for name, b in module.named_buffers() if (name in experts) == of_experts]
        for axis in along:
            if axis is not None:
                broadcast(buffers, axis)
