"""The machine card is measured once and predicts; a replay keeps what ranks did and changes the wire."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpnb import lesson
from hpnb.lesson.home import home
from hpnb.record import Event, Timeline
from hpnb.theory import Link, fit_link, seconds

WIRE = Link(latency=0.5, bandwidth=10.0)


def collective(rank: int, start: float, end: float, group: tuple[int, ...], op: str = "all_reduce") -> Event:
    return Event(rank, -1, op, -1, start, end, "dp", 30.0, group)


def test_a_replay_begins_a_collective_when_the_last_has_come() -> None:
    recorded = Timeline(
        (
            Event(0, -1, "compute", -1, 0.0, 1.0),
            collective(0, 1.25, 9.0, (0, 1)),  # a quarter of a second lay between, and stays
            Event(0, -1, "compute", -1, 9.0, 10.0),
            Event(1, -1, "compute", -1, 0.0, 3.0),
            collective(1, 3.0, 9.0, (0, 1)),
        )
    )
    replayed = lesson.replay(recorded, WIRE)
    assert replayed.source == "simulated"
    cost = seconds("all_reduce", 30.0, 2, WIRE)  # 30 bytes leave each of 2 ranks: the tensor has 30
    assert cost == 2 * 0.5 + 30.0 / 10.0
    ends = {(e.rank, e.op): (e.start, e.end) for e in replayed.events if e.op != "compute"}
    assert ends == {(0, "all_reduce"): (1.25, 3.0 + cost), (1, "all_reduce"): (3.0, 3.0 + cost)}
    last = max((e for e in replayed.events if e.op == "compute"), key=lambda e: e.start)
    assert (last.start, last.end) == (3.0 + cost, 4.0 + cost)


def test_a_replay_of_what_was_measured_by_turns_leaves_out_the_turns_of_others() -> None:
    recorded = Timeline(
        (
            Event(0, -1, "compute", -1, 0.0, 1.0),
            Event(1, -1, "compute", -1, 1.0, 3.0),  # its turn comes after that of rank 0
            collective(0, 1.0, 3.0, (0, 1)),
            collective(1, 3.0, 3.5, (0, 1)),
            Event(0, -1, "compute", -1, 5.0, 6.0),  # after another turn of rank 1
        ),
        "measured by turns",
    )
    replayed = lesson.replay(recorded, WIRE)
    assert replayed.source == f"replayed from measured GPU time, {WIRE.name}"
    assert replayed.makespan == 2.0 + seconds("all_reduce", 30.0, 2, WIRE) + 1.0


def test_a_replay_matches_calls_by_order_and_sends_by_pair() -> None:
    chain = [
        collective(0, 0.0, 1.0, (0, 1), "send"),
        collective(1, 0.0, 1.0, (0, 1), "receive"),
        collective(1, 1.0, 2.0, (1, 2), "send"),
        collective(2, 0.0, 2.0, (1, 2), "receive"),
        collective(0, 2.0, 2.5, (0, 1, 2)),
        collective(1, 2.0, 2.5, (0, 1, 2)),
        collective(2, 2.0, 2.5, (0, 1, 2)),
    ]
    replayed = lesson.replay(Timeline(tuple(chain)), WIRE)
    hop = seconds("send", 30.0, 2, WIRE)
    final = seconds("all_reduce", 30.0 * 3 / 4, 3, WIRE)
    assert replayed.makespan == pytest.approx(2 * hop + final)
    assert len(replayed.events) == len(chain)


def test_a_record_without_all_its_ranks_cannot_be_replayed() -> None:
    with pytest.raises(ValueError, match=r"holds ranks \[0\] and a communication needs \[1\] as well"):
        lesson.replay(Timeline((collective(0, 0.0, 1.0, (0, 1)),)), WIRE)


def test_a_send_of_a_pipeline_does_not_wait_for_its_receiver() -> None:
    """1F1B: rank 0 sends two activations before it receives a gradient."""
    forward, backward = (0, 1), (1, 0)
    first = [("compute", ()), ("send", forward), ("compute", ()), ("send", forward), ("receive", backward)]
    second = [
        ("receive", forward),
        ("compute", ()),
        ("send", backward),
        ("receive", forward),
        ("compute", ()),
    ]
    events = [
        Event(rank, -1, op, -1, float(i), i + 1.0, "pp" if group else "", 30.0 * bool(group), group)
        for rank, ops in enumerate((first, second))
        for i, (op, group) in enumerate(ops)
    ]
    hop = seconds("send", 30.0, 2, WIRE)
    ends = {(e.rank, e.op): e.end for e in lesson.replay(Timeline(tuple(events)), WIRE).events}
    assert ends[1, "receive"] == ends[0, "send"] == 2 + 2 * hop
    assert ends[0, "receive"] == ends[1, "send"] == 1 + hop + 1 + hop
    sends = tuple(e for e in events if e.op != "receive")  # all that a pipeline's step records
    with pytest.raises(ValueError, match="simulate its schedule instead"):
        lesson.replay(Timeline(sends), WIRE)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sends_around_a_ring_begin_together(ranks: int) -> None:
    group = tuple(range(ranks))
    events = [Event(rank, -1, "compute", -1, 0.0, rank + 1.0) for rank in group]
    events += [collective(rank, rank + 1.0, 9.0, group, "send") for rank in group]
    assert lesson.replay(Timeline(tuple(events)), WIRE).end == ranks + seconds("send", 30.0, ranks, WIRE)


def test_a_card_is_measured_once_and_makes_sense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPNB_HOME", str(tmp_path))
    card = lesson.machine_card(2, device="cpu")
    assert (card.ranks, card.device) == (2, "cpu")
    assert len(card.sizes) == len(card.seconds) > 10
    assert card.rho == card.matmul / card.bandwidth
    assert min(card.seconds) > 0
    fitted = fit_link(card.sizes, card.seconds, 2)
    assert (card.latency, card.bandwidth) == (fitted.latency, fitted.bandwidth)
    assert card.predicted(1e6) == seconds("all_reduce", 1e6, 2, fitted)
    (file,) = home().glob("machine-card-*.json")
    written = file.stat().st_mtime_ns
    assert lesson.machine_card(2, device="cpu") == card
    assert file.stat().st_mtime_ns == written
    assert lesson.machine_card(2, device="cpu", refresh=True).seconds != card.seconds
