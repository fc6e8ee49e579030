"""Every process group that hpnb makes, all with the timeout of the group of all ranks.

torch ends a process whose collective waits longer than its group's timeout, and gives a new group its own
default (10 minutes over NCCL, 30 over gloo) whatever the group of all ranks has. Inside `hpnb.launch` and
`Ranks` the launch must time out first, because it can report every rank's stack. So there the group of all
ranks waits for a week, and every smaller group inherits that. Under torchrun nobody else watches for hangs;
smaller groups inherit whatever timeout the program has chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpnb.ranks.current_rank import inside_rank

LONGER_THAN_ANY_LAUNCH = timedelta(days=7)


def new_group(
    members: Sequence[int] | None, name: str, backend: str | None = None, options: Any = None
) -> dist.ProcessGroup:
    """A process group of `members` (global ranks; None: all of them), which all call it, and nobody else.

    Args:
        name: what traffic on the group is counted under.
        backend, options: as for torch.distributed.new_group; by default those of the group of all ranks.
    """
    timeout = collective_timeout()
    if options is not None and timeout is not None:
        options._timeout = timeout  # torch warns where the two differ
    group = dist.new_group(
        None if members is None else list(members),
        timeout=timeout,
        backend=backend,
        pg_options=options,
        # Only the members meet, so a mesh costs a rank the groups it is in, and not every group in the world.
        use_local_synchronization=members is not None,
        group_desc=name,
    )
    assert isinstance(group, dist.ProcessGroup), "every rank that asks is a member"
    return group


def collective_timeout() -> timedelta | None:
    """How long a collective may wait in the group of all ranks; None where torch does not say."""
    if inside_rank():
        return LONGER_THAN_ANY_LAUNCH
    world = dist.group.WORLD
    assert world is not None, "no process group is up"
    for device in ("cpu", "cuda"):
        try:
            timeout = world._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):  # no backend for this kind of device
            continue
        if isinstance(timeout, timedelta):
            return timeout
    return None
