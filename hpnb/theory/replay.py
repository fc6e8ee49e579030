"""The same step on another link: recorded compute, recomputed communication.

Each rank repeats what it recorded: its compute takes as long as it took, and so does what lay between two
events. A collective begins when the last of its group has come and takes what `hpnb.theory` says of the new
link. A send does not wait for its receiver, and a receive ends when the message is there, or at once if it
was there before. What comes out is a Timeline like any other, labelled "simulated".

Where ranks share a GPU and computed by turns, the times between two events are the turns of other ranks, and
are left out. The label is then "replayed from measured GPU time" and the link's name.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

from hpnb.record import Event, Timeline, ring_bytes
from hpnb.theory.communication import OPS, seconds
from hpnb.theory.links import Link


def replay(recorded: Timeline, link: Link, algorithm: str = "ring") -> Timeline:
    """What `recorded` would have been if its ranks had been joined by `link`.

    Args:
        recorded: events of all ranks, as `hpnb.record.timeline` collects them.
        link: latency in seconds a message, bandwidth in bytes/s a rank.
        algorithm: of the all-reduces; other collectives go round a ring.

    Raises:
        ValueError: the record lacks a rank that took part in a communication, or the receives of its sends,
            as the record of a pipeline's step does.
    """
    by_turns = recorded.source == "measured by turns"
    todo = {rank: deque(events) for rank, events in recorded.by_rank.items()}
    before = {rank: events[0].start for rank, events in recorded.by_rank.items()}
    clock = dict.fromkeys(before, 0.0) if by_turns else dict(before)
    exchanges = _exchanges(recorded)
    arrivals: dict[tuple[str, int, int], deque[float]] = {}  # by axis, sender and receiver
    receiving: dict[int, tuple[str, int, int]] = {}
    waiting: dict[tuple[object, ...], dict[int, Event]] = {}
    seen: Counter[tuple[object, ...]] = Counter()
    done: list[Event] = []
    ready = deque(todo)
    while ready:
        rank = ready.popleft()
        while todo[rank]:
            event = todo[rank][0]
            if event.op == "receive" and not arrivals.get(_edge(event)):
                receiving[rank] = _edge(event)
                break  # this rank goes on when the message is sent
            todo[rank].popleft()
            # `before` is the end of the previous event as recorded, to keep what lay between.
            start = clock[rank] + (0.0 if by_turns else max(0.0, event.start - before[rank]))
            before[rank] = event.end
            if len(event.group) < 2:
                clock[rank] = start + event.duration
                done.append(replace(event, start=start, end=clock[rank]))
                continue
            if event.op in ("send", "receive") and (event.axis, event.group) not in exchanges:
                edge = _edge(event)
                if event.op == "send":
                    clock[rank] = start + communication_seconds(event, link, algorithm)
                    arrivals.setdefault(edge, deque()).append(clock[rank])
                    if receiving.get(edge[2]) == edge:
                        ready.append(edge[2])
                        del receiving[edge[2]]
                else:
                    clock[rank] = max(start, arrivals[edge].popleft())
                done.append(replace(event, start=start, end=clock[rank]))
                continue
            kind = (event.axis, event.group)
            seen[rank, kind] += 1
            call = waiting.setdefault((kind, seen[rank, kind]), {})
            call[rank] = replace(event, start=start)
            if len(call) < len(event.group):
                break  # this rank goes on when the others have come
            begin = max(e.start for e in call.values())
            for other, e in call.items():
                clock[other] = begin + communication_seconds(e, link, algorithm)
                done.append(replace(e, end=clock[other]))
                ready.append(other)
            break
    if any(arrivals.values()):
        sender, receiver = next(edge for edge, times in arrivals.items() if times)[1:]
        raise ValueError(
            f"the record has sends from rank {sender} that rank {receiver} does not receive in it, as in the "
            "step of a pipeline; simulate its schedule instead, with Costs(transfer=seconds of a message)"
        )
    if any(todo.values()) or len(done) < len(recorded.events):
        missing = {r for call in waiting.values() for e in call.values() for r in e.group} - todo.keys()
        raise ValueError(
            f"the record holds ranks {sorted(todo)} and a communication needs {sorted(missing) or 'another'} "
            "as well; gather the timeline from all ranks"
        )
    return Timeline(tuple(done), f"replayed from measured GPU time, {link.name}" if by_turns else "simulated")


def _exchanges(recorded: Timeline) -> set[tuple[str, tuple[int, ...]]]:
    """(axis, group) of sends that all ranks of a group make at once, as around a ring, without receives."""
    senders: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    received = {(event.axis, event.group) for event in recorded.events if event.op == "receive"}
    for event in recorded.events:
        if event.op == "send":
            senders.setdefault((event.axis, event.group), set()).add(event.rank)
    return {call for call, ranks in senders.items() if ranks == set(call[1]) and call not in received}


def _edge(event: Event) -> tuple[str, int, int]:
    """(axis, sender, receiver) of a send or a receive."""
    peer = next((r for r in event.group if r != event.rank), event.rank)
    return (event.axis, event.rank, peer) if event.op == "send" else (event.axis, peer, event.rank)


def communication_seconds(event: Event, link: Link, algorithm: str = "ring") -> float:
    """Seconds of a recorded communication on another link."""
    ranks = len(event.group)
    op = "send" if event.op == "receive" else event.op
    if op not in OPS:  # a barrier: an all-reduce of nothing
        return seconds("all_reduce", 0.0, ranks, link)
    nbytes = event.bytes / ring_bytes(op, 1.0, ranks)  # of the tensor; the event has what a ring moves
    return seconds(op, nbytes, ranks, link, algorithm if op == "all_reduce" else "ring")
