"""Slots: the memory of one microbatch in flight, which graphs reuse for one microbatch after another.

    actions   F0 F1 F2 B0 F3 B1 F4 B2 ...        at most 3 microbatches are in flight
    slots      0  1  2  0  0  1  1  2            F3 takes the memory that B0 has freed

A graph reads and writes fixed addresses, so every microbatch that is in flight together with another needs
memory of its own, and graphs of its own. A microbatch occupies a slot from its F to its W (or B). The slots
of a rank are as many as it has microbatches in flight at once, counted over all its stages, which is what an
eager step keeps as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpnb.pipeline_parallel.action import Action

StageMicrobatch = tuple[int, int]  # a stage, and a microbatch that passes through it


def assign_slots(actions: Sequence[Action]) -> dict[StageMicrobatch, int]:
    """{(stage, microbatch): slot} for one rank's actions, with as few slots as possible.

    A stage prefers slots that it has used before: each pair of a stage and a slot has graphs of its own.
    """
    last_action = {(a.stage, a.microbatch): a for a in actions if a.op != "F"}  # the later of I and W
    slots: dict[StageMicrobatch, int] = {}
    free: set[int] = set()
    used_by: dict[int, set[int]] = {}  # {stage: the slots it has used}
    count = 0
    for action in actions:
        key = action.stage, action.microbatch
        if action.op == "F":
            used = used_by.setdefault(action.stage, set())
            candidates = free & used or free
            slot = min(candidates, default=count)
            count = max(count, slot + 1)
            free.discard(slot)
            used.add(slot)
            slots[key] = slot
        if last_action.get(key) is action:
            free.add(slots[key])
    return slots
