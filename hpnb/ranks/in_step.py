"""After a failed call: are the ranks that are left still in step?

Ranks that stay must agree on which message comes next. If one of them has started a send or a collective that
nobody has answered, the next call would get the data of that one, so ranks have to exchange messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hpnb.ranks.caller_globals import KnownGlobals
from hpnb.ranks.output import Output
from hpnb.ranks.pack_call import pack_call
from hpnb.ranks.processes import RankProcesses
from hpnb.ranks.worker import Done

_FINISHING = 30.0  # seconds for what a failed call has begun in the background, such as a save
_CHECK = 3.0  # seconds that ranks in step need at most to exchange them


def are_in_step(processes: RankProcesses, known: Sequence[KnownGlobals]) -> bool:
    """Whether messages between all ranks arrive as sent, after each has finished its background work."""
    return finish_begun_work(processes, known) and _all_return(check_groups, processes, known, _CHECK)


def finish_begun_work(processes: RankProcesses, known: Sequence[KnownGlobals]) -> bool:
    """Let each rank finish what `finish_before_return` got in a call that has raised; whether all did."""
    return _all_return(_nothing, processes, known, _FINISHING)


def _all_return(
    fn: Callable[[], None], processes: RankProcesses, known: Sequence[KnownGlobals], seconds: float
) -> bool:
    if processes.gone:
        return False
    members = range(len(known))
    call, _ = pack_call(known, {}, set(), {"fn": fn, "args": (), "kwargs": {}})
    processes.send(members, call, seconds)
    returned: set[int] = set()
    deadline, output = time.monotonic() + seconds, Output()
    try:
        while len(returned) < len(known) and time.monotonic() < deadline:
            replies = processes.poll(deadline - time.monotonic(), output)
            returned |= {rank for rank, reply in replies if isinstance(reply, Done)}
            if any(not isinstance(reply, Done) for _, reply in replies):
                return False
    finally:
        output.finish()
    return len(returned) == len(known)


def _nothing() -> None:
    """A call that returns has finished what was begun before it."""


def check_groups() -> None:
    """On every rank: return only if each group that this rank belongs to is in step.

    A group is in step if a collective and a message between every two ranks of it arrive as they were sent.
    Groups with GPUs are asked by messages of the CPU, except for the barrier of all ranks.
    """
    dist.barrier()
    for group in dist.distributed_c10d._world.pg_map:  # in the order in which all ranks have made them
        if "cpu:" not in dist.get_backend_config(group):
            continue  # it would connect its GPUs first, which may take seconds
        ranks, me = dist.get_process_group_ranks(group), dist.get_rank()
        sent = {other: torch.tensor([me, other]) for other in ranks if other != me}
        received = {other: torch.zeros(2, dtype=torch.int64) for other in sent}
        works = [dist.isend(tensor, other, group) for other, tensor in sent.items()]
        works += [dist.irecv(tensor, other, group) for other, tensor in received.items()]
        count = torch.ones(1)
        dist.all_reduce(count, group=group)
        for work in works:
            if work is not None:
                work.wait()
        wrong = [other for other, tensor in received.items() if tensor.tolist() != [other, me]]
        if wrong or count.item() != len(ranks):
            raise RuntimeError(f"rank {me} got an earlier message from {wrong or 'the group'}")
