"""torchrun that imports everything once, and forks its ranks from there.

    python forked_torchrun.py <options of torchrun> script.py <arguments>

Agent, rendezvous, signals and restarts are torchrun's. But torchrun starts a Python for every rank, and each
imports transformers, for seconds. tests/test_launch_hybrid.py tests that way.
"""

import sys

from torch.distributed.run import main

import hpnb.hybrid.train_command.train  # noqa: F401

if __name__ == "__main__":
    main(["--start-method", "fork", "--run-path", *sys.argv[1:]])
