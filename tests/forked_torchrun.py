"""torchrun that imports everything once, and forks its ranks from there.

    python forked_torchrun.py <options of torchrun> script.py <arguments>

Agent, rendezvous, signals and restarts are torchrun's. But torchrun starts a Python for every rank, and each
imports transformers, for seconds. tests/test_launch_hybrid.py tests that way.
"""

import sys
from typing import Any

from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.distributed.run import main

import hpnb.hybrid.train_command.train  # noqa: F401

_close = MultiprocessContext._close


def close_at_once(context: MultiprocessContext, *how: Any, **options: Any) -> None:
    """A forked rank that has returned waits until its result is read, which a stopped agent never does."""
    context._worker_finished_event.set()
    _close(context, *how, **options)


if __name__ == "__main__":
    MultiprocessContext._close = close_at_once  # type: ignore[method-assign]
    main(["--start-method", "fork", "--run-path", *sys.argv[1:]])
