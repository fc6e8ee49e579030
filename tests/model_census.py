"""Which of the architectures that transformers publishes plans for train exactly: a census.

    python tests/model_census.py --write               # all of them: half an hour on two cores
    python tests/model_census.py --names LlamaConfig MixtralConfig --layouts pp2 tp2

Every architecture is built tiny from its configuration's class (`tiny_models.py`) and trained on six layouts
and on one process (`model_parity.py`). Each training is one call of a pool of ranks, with a time limit. A
model that also has a classifier's head is trained with that one on `SECOND_HEAD`. `--write` makes the table
in hpnb/bench/results/MODELS.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import transformers
from model_parity import LAYOUTS, Outcome, compare, errors_of, train_serial
from rank_pools import RankPools
from tiny_models import Architecture, planned

from hpnb.bench.result_files import RESULTS, current_commit
from hpnb.files import write_text
from hpnb.ranks.errors import RankError

PAGE = RESULTS / "MODELS.md"
TIMEOUT = 120.0  # seconds for one training
SECOND_HEAD = "pp2-tp2"
STATUSES = ("exact", "refused", "wrong", "fails")


def examine(pools: RankPools, architecture: Architecture, layouts: Sequence[str]) -> list[Outcome]:
    """One outcome a layout, and one for a second head."""
    if not architecture.models:
        reason = f"transformers has no model for {architecture.name} alone, so there is nothing to register"
        return [Outcome(architecture.name, "", name, "refused", reason) for name in layouts]
    outcomes = []
    first = next(iter(architecture.models))
    for head in architecture.models:
        names = [name for name in layouts if head == first or name == SECOND_HEAD]
        try:
            (serial,) = pools[1].run(train_serial, architecture, head)
            (other,) = pools[1].run(train_serial, architecture, head, True)
        except RankError as error:
            what = str(error).splitlines()[0].partition(" raised ")[2]
            reason = (
                f"{architecture.models[head].__name__} does not run on input_ids alone ({what}); "
                "register its parts with hpnb.models.register, which take the batch that it needs"
            )
            outcomes += [Outcome(architecture.name, head, name, "refused", reason) for name in names]
            continue
        rounding = max(errors_of([other], serial))
        outcomes += [compare(pools, architecture, head, name, serial, rounding) for name in names]
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--names", nargs="+", choices=planned(), metavar="NAME", help="by default all")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, help="by default all")
    parser.add_argument("--write", action="store_true", help="the table MODELS.md beside the other results")
    chosen = parser.parse_args()
    pools, commit, outcomes = RankPools(TIMEOUT), current_commit(), list[Outcome]()
    try:
        for name in chosen.names or planned():
            begin = time.perf_counter()
            for outcome in examine(pools, planned()[name], chosen.layouts or tuple(LAYOUTS)):
                outcomes.append(replace(outcome, commit=commit))
                print(describe(outcome), flush=True)
            print(f"{time.perf_counter() - begin:.1f} s", flush=True)
    finally:
        pools.close()
    print(summary(outcomes))
    if chosen.write:
        write_text(PAGE, page(outcomes))


def describe(outcome: Outcome) -> str:
    losses, gradients, weights = (f"{error:.0e}" for error in outcome.errors)
    errors = f"losses {losses}, gradients {gradients}, weights {weights}"
    where = f"{outcome.architecture:36} {outcome.head:26} {outcome.layout:14} {outcome.status:8}"
    return f"{where} {errors if outcome.status == 'exact' else outcome.reason}"


# --- the table ---------------------------------------------------------------------------------------------


def status_of(outcomes: Sequence[Outcome]) -> str:
    """Of an architecture: the worst of its layouts, exact only where all are. One that is refused because it
    recomputes does not count, since the model trains without."""
    counted = [one for one in outcomes if one.status != "refused" or not LAYOUTS[one.layout].recomputation]
    return max((outcome.status for outcome in counted or outcomes), key=STATUSES.index)


def by_architecture(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.architecture, []).append(outcome)
    return groups


def summary(outcomes: Sequence[Outcome]) -> str:
    statuses = [status_of(of_one) for of_one in by_architecture(outcomes).values()]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in STATUSES)
    return f"{len(statuses)} architectures: {counts}"


def page(outcomes: Sequence[Outcome]) -> str:
    commits = " and ".join(dict.fromkeys(outcome.commit for outcome in outcomes))
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, commit {commits}"
    lines = [
        "# Which models of transformers train exactly",
        "",
        f"{summary(outcomes)}. These are the configurations with a tensor and a pipeline plan.",
        "`python tests/model_census.py --write` makes this table. Each model is built tiny and trains three",
        "steps in float64 on the CPU; its losses, gradients and weights are compared with those of one",
        "process. A number is the largest relative error. The last column says which share of the matrices,",
        "embeddings included, is sharded by tensor parallelism; the rest is replicated.",
        "",
        f"{versions}.",
        "",
        f"| configuration | head | {' | '.join(LAYOUTS)} | sharded by tp |",
        f"| --- | --- | {' | '.join('---' for _ in LAYOUTS)} | --- |",
    ]
    notes: dict[str, int] = {}
    for name, of_one in by_architecture(outcomes).items():
        for head in dict.fromkeys(outcome.head for outcome in of_one):
            cells = {outcome.layout: _cell(outcome, notes) for outcome in of_one if outcome.head == head}
            shares = [
                o.sharded for o in of_one if o.head == head and o.status == "exact" and "tp" in o.layout
            ]
            share = f"{min(shares):.0%}" if shares else ""
            values = " | ".join(cells.get(layout, "") for layout in LAYOUTS)
            lines.append(f"| {name} | {head or 'none'} | {values} | {share} |")
    lines += ["", "## Why not", "", *(f"{number}. {reason}" for reason, number in notes.items()), ""]
    return "\n".join(lines)


def _cell(outcome: Outcome, notes: dict[str, int]) -> str:
    if outcome.status == "exact":
        return f"{max(outcome.errors):.0e}"
    reason = outcome.reason.partition(" raised ")[2].partition("Error: ")[2] or outcome.reason
    return f"{outcome.status} ({notes.setdefault(reason, len(notes) + 1)})"


if __name__ == "__main__":
    main()
