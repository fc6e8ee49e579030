"""Which of the architectures that transformers publishes plans for train exactly: a census.

    python -m hpnb.bench models --write                # all of them: half an hour on two cores
    python -m hpnb.bench models --names LlamaConfig,MixtralConfig --layouts pp2,tp2

Every architecture is built tiny from its configuration's class (`tiny_models.py`) and trained on four layouts
and on one process (`model_parity.py`). Each training is one call of a pool of ranks, with a time limit.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import hpnb
from hpnb.bench.model_parity import LAYOUTS, Outcome, compare, errors_of, train_serial
from hpnb.bench.tiny_models import Architecture, planned
from hpnb.ranks.errors import RankError

TIMEOUT = 120.0  # seconds for one training
SECOND_HEAD = "pp2-tp2"  # on which a model with another head is trained too


class Pools:
    """`pools[n]` is a pool of n ranks on the CPU, a new one after a failure."""

    def __init__(self) -> None:
        self._pools: dict[int, hpnb.Ranks] = {}

    def __getitem__(self, ranks: int) -> hpnb.Ranks:
        if ranks not in self._pools or not self._pools[ranks].alive:
            self._pools[ranks] = hpnb.Ranks(ranks, device="cpu", timeout=TIMEOUT)
        return self._pools[ranks]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def examine(pools: Pools, architecture: Architecture, layouts: Sequence[str]) -> list[Outcome]:
    """One outcome a head and layout."""
    if not architecture.models:
        reason = "transformers has no model that takes this configuration alone"
        return [Outcome(architecture.name, "", name, "refused", reason) for name in layouts]
    outcomes = []
    for head in architecture.models:
        try:
            (serial,) = pools[1].run(train_serial, architecture, head)
            (other,) = pools[1].run(train_serial, architecture, head, True)
        except RankError as error:
            reason = f"its own forward on one process needs more than tokens: {str(error).splitlines()[0].partition(': ')[2]}"
            outcomes += [Outcome(architecture.name, head, name, "refused", reason) for name in layouts]
            continue
        rounding = max(errors_of([other], serial))
        first = head == next(iter(architecture.models))
        for name in layouts if first else [name for name in layouts if name == SECOND_HEAD]:
            outcomes.append(compare(pools, architecture, head, LAYOUTS[name], serial, rounding))
    return outcomes


def run(names: Sequence[str], layouts: Sequence[str], out: str) -> None:
    table = planned()
    pools = Pools()
    with open(out, "a") as file:
        for name in names or table:
            begin = time.perf_counter()
            outcomes = examine(pools, table[name], layouts)
            for outcome in outcomes:
                file.write(json.dumps(asdict(outcome)) + "\n")
                print(outcome.architecture, outcome.head, outcome.layout, outcome.status, *(f"{e:.0e}" for e in outcome.errors), f"{outcome.sharded:.0%}", outcome.reason[:400], flush=True)
            file.flush()
            print(f"{time.perf_counter() - begin:.1f} s", flush=True)
    pools.close()


if __name__ == "__main__":
    run(sys.argv[2].split(",") if len(sys.argv) > 2 and sys.argv[2] else (), tuple(LAYOUTS), sys.argv[1])
