"""Schedules against their definitions, closed forms and published rates, and lists broken on purpose."""

from __future__ import annotations

import csv
import graphlib
import itertools
import json
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from hpnb.pipeline_parallel import Action, Costs, Schedule, ScheduleError, schedules
from hpnb.pipeline_parallel.simulate import replay
from hpnb.record import Event, Timeline

PUBLISHED = Path(__file__).parent / "published" / "zero_bubble.csv"
ONE, MANY, V = ("gpipe", "1f1b", "zb-h1", "zb-h2"), ("interleaved", "breadth-first"), ("zb-v", "dualpipe-v")


def make(name: str, ranks: int, m: int, chunks: int | None = None) -> Schedule:
    v = chunks or (1 if name in ONE else 2)
    return schedules.make(name, ranks * v, m, v)


def every(ranks: range = range(1, 9), ms: range = range(1, 18)) -> Iterator[Schedule]:
    """All names x ranks x microbatches, with 1 to 3 chunks where that is free."""
    for name in schedules.NAMES:
        for p in ranks:
            for m in ms:
                for v in (1, 2, 3) if name in MANY else (None,):
                    if name != "dualpipe-v" or m >= 2 * p:
                        yield make(name, p, m, v)


def exact(name: str, p: int, m: int, v: int, f: int, i: int, w: int) -> tuple[Any, Any]:
    """(longest rank's idle time inside its span, makespan) where a rank's whole share costs f, i, w."""
    seconds = {"F": Fraction(f, v), "I": Fraction(i, v), "W": Fraction(w, v), "B": Fraction(i + w, v)}
    tl = make(name, p, m, v).replay(lambda a: seconds[a.op], Fraction(0))  # type: ignore[arg-type, return-value]
    rank = max(tl.ranks, key=tl.span)
    return tl.span(rank) - tl.work(rank), tl.makespan


# --- the data --------------------------------------------------------------------------------------


def test_an_action_is_written_and_read() -> None:
    action = Action(12, "W", 3)
    assert str(action) == "12W3"
    assert Action.parse("12W3") == action
    for wrong in ("", "F0", "0F", "0f0", "0X0", "0F0 0F1", "-1F0"):
        with pytest.raises(ValueError, match="is no action"):
            Action.parse(wrong)


def test_rows_may_be_written_in_three_ways() -> None:
    one = Schedule(["0F0 0B0", "1F0 1B0"])
    assert one == Schedule([["0F0", "0B0"], ["1F0", "1B0"]])
    assert one == Schedule([[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "F", 0), "1B0"]])
    assert (one.ranks, one.stages, one.microbatches, one.chunks, one.splits) == (2, 2, 1, 1, False)
    assert (one.rank_of, one.stages_of(1), one.name) == ({0: 0, 1: 1}, (1,), "custom")


def test_what_an_action_needs() -> None:
    s = Schedule(["0F0 0I0 0W0", "1F0 1B0", "2F0 2I0 2W0"])
    needs = {str(a): " ".join(map(str, s.needs(a))) for a in s.positions}
    assert needs == {"0F0": "", "0I0": "0F0 1B0", "0W0": "0I0", "1F0": "0F0", "1B0": "1F0 2I0",
                     "2F0": "1F0", "2I0": "2F0", "2W0": "2I0"}  # fmt: skip
    s.check()


def test_queues_are_in_the_senders_order_without_hops_on_a_rank() -> None:
    s = Schedule(["0F0 0F1 3F1 3F0 3B1 3B0 0B1 0B0", "1F0 1F1 2F1 2F0 2B1 2B0 1B0 1B1"])
    s.check()
    sent = {pair: " ".join(map(str, row)) for pair, row in s.queues.items()}
    assert sent == {(0, 1): "0F0 0F1 3B1 3B0", (1, 0): "2F1 2F0 1B0 1B1"}


def test_a_schedule_travels_without_what_follows_from_it() -> None:
    s = make("zb-v", 4, 8)
    before = len(pickle.dumps(s))
    s.simulate(Costs())
    assert pickle.loads(pickle.dumps(s)) == s
    assert len(pickle.dumps(s)) == before


# --- the generators --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "p", "m", "chunks", "rows"),
    [
        ("gpipe", 2, 2, 1, ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]),
        ("1f1b", 2, 3, 1, ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
        ("1f1b", 3, 1, 1, ["0F0 0B0", "1F0 1B0", "2F0 2B0"]),
        ("interleaved", 2, 2, 2, ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"]),
        (
            "interleaved", 2, 3, 2,
            ["0F0 0F1 2F0 2F1 0F2 2B0 2B1 2F2 0B0 0B1 2B2 0B2",
             "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2 1B2"],
        ),
        ("breadth-first", 2, 2, 2, ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"]),
        ("zb-h1", 2, 3, 1, ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]),
        (
            "zb-h2", 2, 4, 1,
            ["0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
             "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3"],
        ),
        (
            "zb-v", 2, 3, 2,
            ["0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
             "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2"],
        ),
        (
            "dualpipe-v", 2, 4, 2,
            ["0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
             "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3"],
        ),
    ],
)  # fmt: skip
def test_lists_drawn_by_hand(name: str, p: int, m: int, chunks: int, rows: list[str]) -> None:
    assert make(name, p, m, chunks).actions == Schedule(rows).actions


def test_every_schedule_can_be_run_and_does_all_the_work_once() -> None:
    for s in every():
        s.check()
        p, m, v = s.ranks, s.microbatches, s.chunks
        assert s.stages == p * v
        for rank in range(p):
            mine = (rank, 2 * p - 1 - rank) if s.name in V else tuple(range(rank, p * v, p))
            assert s.stages_of(rank) == mine
            done = Counter(a.op for a in s.actions[rank])
            assert done["F"] == v * m == done["B"] + done["I"]
            assert done["W"] == done["I"]


def test_messages_arrive_with_one_queue_a_direction_and_nothing_is_left_over() -> None:
    """The executor's side, without any of check's code: what is needed is taken in the sender's order."""
    for s in every(range(1, 6), range(1, 12)):
        taken, sent = dict.fromkeys(s.queues, 0), dict.fromkeys(s.queues, 0)
        done: set[Action] = set()
        steps, moved = [0] * s.ranks, True
        while moved:
            moved = False
            for rank, row in enumerate(s.actions):
                if steps[rank] == len(row):
                    continue
                a = row[steps[rank]]
                last = s.stages - 1
                source = {"F": a.stage - 1 if a.stage else None, "W": None}.get(
                    a.op, a.stage + 1 if a.stage < last else None
                )
                if source is not None and (home := s.rank_of[source]) != rank:
                    queue = s.queues[home, rank]
                    ops = ("F",) if a.op == "F" else ("I", "B")
                    (at,) = [i for i, b in enumerate(queue) if b.stage == source and b.op in ops
                             and b.microbatch == a.microbatch]  # fmt: skip
                    taken[home, rank] = max(taken[home, rank], min(at + 1, sent[home, rank]))
                    if sent[home, rank] <= at:
                        continue
                steps[rank] += 1
                done.add(a)
                for (home, to), queue in s.queues.items():
                    while home == rank and sent[home, to] < len(queue) and queue[sent[home, to]] in done:
                        sent[home, to] += 1
                moved = True
        assert steps == [len(row) for row in s.actions]
        assert taken == sent == {pair: len(queue) for pair, queue in s.queues.items()}


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    for p in range(1, 6):
        for m in range(1, 9):
            assert make("interleaved", p, m, 1).actions == make("1f1b", p, m).actions
            assert make("breadth-first", p, m, 1).actions == make("gpipe", p, m).actions


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("2f2b", 4, 8), "choose one of gpipe, 1f1b, interleaved, breadth-first, zb-h1, zb-h2, zb-v, dual"),
        (("1f1b", 4, 0), "microbatches=0 must be a whole number, 1 or more"),
        (("1f1b", 0, 4), "stages=0 must be"),
        (("1f1b", 4, 2.5), "microbatches=2.5 must be"),
        (("interleaved", 4, 4, 0), "chunks=0 must be"),
        (("gpipe", 8, 4, 2), "gpipe has one chunk a rank: use chunks=1, not 2"),
        (("zb-h1", 8, 4, 4), "use chunks=1, not 4"),
        (("zb-v", 8, 4), "use chunks=2, not 1"),
        (("dualpipe-v", 9, 20, 3), "use chunks=2, not 3"),
        (("interleaved", 6, 4, 4), "use 4 or 8 stages"),
        (("interleaved", 2, 4, 4), "use 4 stages"),
        (("zb-v", 5, 4, 2), "use 4 or 6 stages"),
        (("dualpipe-v", 8, 7, 2), "on 4 ranks needs two microbatches a rank: use 8 or more, not 7"),
    ],
)
def test_what_the_definition_does_not_allow(arguments: tuple[str, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        schedules.make(*arguments)


def test_large_schedules() -> None:
    for chunks in (1, 4):
        tl = schedules.make("interleaved", 64, 128, chunks).simulate(Costs())
        assert len(tl.events) == 64 * 128 * 2
        assert tl.makespan == 3 * (128 * chunks + 64 // chunks - 1)
    for name in ("zb-h2", "zb-v", "dualpipe-v"):
        assert schedules.make(name, 32, 256, 1 if name in ONE else 2).microbatches == 256


# --- what they take --------------------------------------------------------------------------------


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (10, 11, 7), (3, 5, 2)])
def test_closed_forms(f: int, i: int, w: int) -> None:
    for p in range(1, 6):
        for m in (2 * p, 4 * p):
            for name in ("gpipe", "1f1b"):
                assert exact(name, p, m, 1, f, i, w) == ((p - 1) * (f + i + w), (m + p - 1) * (f + i + w))
            for v in (2, 3):
                idle = Fraction((p - 1) * (f + i + w), v)
                assert exact("interleaved", p, m, v, f, i, w) == (idle, m * (f + i + w) + idle)
                assert exact("breadth-first", p, m, v, f, i, w) == (idle, m * (f + i + w) + idle)
            less = (p - 1) * (f + i - w)
            assert exact("zb-h1", p, m, 1, f, i, w) == (less, m * (f + i + w) + less)
            assert exact("zb-h2", p, m, 1, f, i, w)[0] == (p - 1) * (f + i - 2 * w)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "delay"), [("zb-h1", 1), ("zb-h2", 2)])
def test_the_forms_of_zb_h1_and_zb_h2_hold_if_w_is_at_most_f(name: str, delay: int) -> None:
    differ = {
        (f, i, w)
        for p in (2, 3, 4)
        for f, i, w in itertools.product(range(1, 6), repeat=3)
        if exact(name, p, 4 * p, 1, f, i, w)[0] != max(0, (p - 1) * (f + i - delay * w))
    }
    assert differ  # so the condition is needed,
    assert all(w > f for f, _, w in differ)  # and it is enough


def test_gpipe_and_1f1b_take_their_time_with_any_number_of_microbatches() -> None:
    for p in range(1, 7):
        for m in range(1, 15):
            for name in ("gpipe", "1f1b"):
                assert exact(name, p, m, 1, 3, 5, 2)[1] == (m + p - 1) * 10


def test_a_v_shape_leaves_nothing_or_half_of_zb_h1_where_all_costs_are_equal() -> None:
    for p in range(1, 7):
        for m in (2 * p - 1, 2 * p, 2 * p + 1, 4 * p):
            assert exact("zb-v", p, m, 2, 1, 1, 1)[0] == 0
        for m in (2 * p, 2 * p + 1, 4 * p):
            assert exact("dualpipe-v", p, m, 2, 1, 1, 1)[0] == Fraction(p - 1, 2)
            assert exact("dualpipe-v", p, m, 2, 10, 11, 9)[0] == Fraction(12 * (p - 1), 2)


def test_a_shorter_last_group_never_makes_interleaved_slower_than_1f1b() -> None:
    for p in range(1, 6):
        for m in range(1, 13):
            for v in (2, 3):
                assert exact("interleaved", p, m, v, 2, 3, 1)[1] <= exact("1f1b", p, m, 1, 2, 3, 1)[1]


def most(s: Schedule, rank: int) -> int:
    """Chunks that `rank` may hold, by the definition."""
    p, m, v = s.ranks, s.microbatches, s.chunks
    enough = {
        "1f1b": p - rank,
        "interleaved": 2 * (p - rank - 1) + (v - 1) * p + 1 if v > 1 else p - rank,
        "zb-h1": p,
        "zb-h2": 2 * p - 1,
        "zb-v": 2 * p,
        "dualpipe-v": 2 * p + 1,
    }
    return min(m * v, enough.get(s.name, m * v))


def test_peak_in_flight() -> None:
    for s in itertools.chain(every(range(1, 6), range(1, 11)), every(range(6, 9), range(16, 17))):
        tl = s.simulate(Costs(1.0, 1.3, 0.6, 0.2))
        for rank in range(s.ranks):
            peak = tl.peak_in_flight(rank)
            assert peak <= most(s, rank)
            if s.microbatches == 2 * s.ranks:
                assert peak == most(s, rank), (s.name, s.ranks, s.microbatches, rank)


def test_the_exercise_at_p_4_m_8() -> None:
    plain = make("1f1b", 4, 8).simulate(Costs())
    assert plain.makespan == 33
    assert [plain.peak_in_flight(r) for r in range(4)] == [4, 3, 2, 1]
    assert make("interleaved", 4, 8).simulate(Costs()).bubble_fraction == pytest.approx(9 / 57, abs=1e-12)
    split = make("zb-h1", 4, 8).simulate(Costs())
    assert (split.makespan, max(map(split.peak_in_flight, range(4)))) == (27, 4)


def published() -> list[dict[str, str]]:
    lines = (line for line in PUBLISHED.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return list(csv.DictReader(lines))


@pytest.mark.parametrize("row", published(), ids=lambda row: f"{row['model']}-{row['microbatches']}")
def test_published_rates(row: dict[str, str]) -> None:
    """Qi et al., arXiv 2401.10241, tables 5 and 9."""
    costs = Costs(*(float(row[name]) / 1000 for name in ("F", "I", "W", "transfer")))
    for name in ("1f1b", "zb-h1", "zb-h2"):
        tl = schedules.make(name, int(row["stages"]), int(row["microbatches"])).simulate(costs)
        assert tl.bubble_rate == pytest.approx(float(row[f"rate_{name.replace('-', '_')}"]), abs=1e-4)


def test_one_schedule_two_bubbles() -> None:
    row = next(r for r in published() if (r["model"], r["microbatches"]) == ("6.2B", "24"))
    tl = make("zb-h2", 8, 24).simulate(Costs(*(float(row[name]) for name in ("F", "I", "W", "transfer"))))
    assert (round(100 * tl.bubble_rate, 1), round(100 * tl.bubble_fraction, 1)) == (7.0, 10.0)


# --- the simulator ---------------------------------------------------------------------------------


def test_a_simulation_by_hand() -> None:
    """Costs by stage, a transfer between ranks, and none on the turn of a V."""
    s = Schedule(["0F0 3F0 3B0 0I0 0W0", "1F0 2F0 2B0 1B0"], "by hand")
    tl = s.simulate(Costs([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4], 0.5))
    times = {f"{e.stage}{e.op}{e.microbatch}": (e.rank, e.start, e.end) for e in tl.events}
    assert times == {"0F0": (0, 0, 1), "1F0": (1, 1.5, 3.5), "2F0": (1, 3.5, 6.5), "3F0": (0, 7, 11),
                     "3B0": (0, 11, 23), "2B0": (1, 23.5, 33.5), "1B0": (1, 33.5, 41.5), "0I0": (0, 42, 47),
                     "0W0": (0, 47, 48)}  # fmt: skip
    assert tl.source == "simulated"
    assert {(e.axis, e.bytes) for e in tl.events} == {("", 0.0)}


def test_fractions_stay_exact_without_a_transfer() -> None:
    s, third, tenth = make("1f1b", 4, 8), Fraction(1, 3), Fraction(1, 10)
    timelines = s.simulate(Costs(third, third, third)), s.replay(lambda _: tenth), replay(s, lambda _: tenth)  # type: ignore[arg-type, return-value]
    for tl, makespan in zip(timelines, (11, Fraction(22, 10), Fraction(22, 10)), strict=True):
        assert (tl.makespan, type(tl.makespan)) == (makespan, Fraction)


def test_only_the_methods_of_a_schedule_refuse_a_deadlock() -> None:
    stuck = Schedule(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    for attempt in (stuck.simulate, lambda: stuck.replay(lambda _: 1.0)):
        with pytest.raises(ScheduleError):
            attempt()
    assert [e.op for e in replay(stuck, lambda _: 1.0).events] == ["F", "F"]


def test_a_replay_names_its_source() -> None:
    tl = make("1f1b", 2, 3).replay(lambda a: 1.0 + a.stage, source="replayed from measured CPU time")
    assert tl.source == "replayed from measured CPU time"
    assert tl.work(1) == 2 * tl.work(0) == 12


def test_every_action_is_one_event_and_none_overlap(tmp_path: Path) -> None:
    for s in every(range(1, 5), range(1, 10)):
        tl = s.simulate(Costs(0.7, 1.1, 0.4, 0.3))
        for rank, row in enumerate(s.actions):
            events = tl.by_rank[rank]
            assert [Action(e.stage, e.op, e.microbatch) for e in events] == list(row)  # type: ignore[arg-type]
            assert all(a.end <= b.start for a, b in itertools.pairwise(events))
    trace = json.loads(tl.to_chrome_trace(tmp_path / "trace.json").read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == len(tl.events)


def test_costs_are_checked() -> None:
    for wrong in (-1.0, float("nan"), float("inf"), None, "1", [1.0, -1.0], [1.0, None], torch.ones(2)):
        for name in ("forward", "input_grad", "weight_grad", "transfer"):
            with pytest.raises(ValueError, match=f"{name}=.*: a cost is a number of seconds, 0 or more"):
                Costs(**{name: wrong})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="input_grad has 3 costs and the schedule 4 stages; give 4"):
        make("1f1b", 4, 4).simulate(Costs(1.0, [1.0] * 3))
    assert hash(Costs([1.0, 2.0])) == hash(Costs((1.0, 2.0)))


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v", "zb-h1"])
def test_costs_are_read_off_a_timeline(name: str) -> None:
    s = make(name, 2, 6)
    n = s.stages
    costs = Costs([1.0 + k for k in range(n)], [2.0 + k for k in range(n)], [0.5 + k for k in range(n)], 0.25)
    found = Costs.measured(s.simulate(costs), transfer=0.25)
    for attribute in ("forward", "input_grad", "weight_grad"):
        assert getattr(found, attribute) == pytest.approx(getattr(costs, attribute), abs=1e-12)
    assert found.transfer == 0.25


def test_costs_of_an_unsplit_backward_are_its_median() -> None:
    durations = (3.0, 1.0, 50.0)
    events = [Event(0, 0, op, k, 0.0, d) for k, d in enumerate(durations) for op in "FB"]
    assert Costs.measured(Timeline(tuple(events))) == Costs([3.0], [3.0], [0.0])
    with pytest.raises(ValueError, match="lacks a forward or a backward of stage 0"):
        Costs.measured(Timeline(tuple(e for e in events if e.op == "F")))
    with pytest.raises(ValueError, match="no F, I, W or B"):
        Costs.measured(Timeline((Event(0, -1, "compute", -1, 0.0, 1.0),)))


# --- check -----------------------------------------------------------------------------------------


def fault(*rows: str) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        Schedule(rows).check()
    error = caught.value
    assert str(error) == f"rank {error.rank}, step {error.step}: {error.reason}" + (
        f"\n{error.grid}" if error.grid else ""
    )
    if error.grid:
        assert "[" in error.grid.splitlines()[1 + error.rank]
    with pytest.raises(ScheduleError):  # nor can it be simulated
        Schedule(rows).simulate(Costs())
    again = pickle.loads(pickle.dumps(error))
    assert vars(again) == vars(error)
    return error


@pytest.mark.parametrize(
    ("rows", "rank", "step", "reason"),
    [
        ([], 0, 0, "the schedule has no ranks"),
        (["0F0 0B0", ""], 1, 0, "this rank has nothing to do; leave it out or give it a stage"),
        (["0F0 0B0 1F0", "1F0 1B0"], 1, 0, "1F0 is of stage 1, which is on rank 0 (from step 2)"),
        (["0F0 0B0", "2F0 2B0"], 1, 0,
         "stage 2 is here and stage 1 on no rank; number the stages without a gap"),
        (["0F0 0B0 0B0", "1F0 1B0"], 0, 2, "0B0 comes twice, first at step 1"),
        (["0F0 0F0 0B0", "1F0 1B0"], 0, 1, "0F0 comes twice, first at step 0"),
        (["0F0 0I0 0W0 0B0", "1F0 1B0"], 0, 3, "0B0 computes again what 0I0 does, first at step 1"),
        (["0F0 0B0 0W0", "1F0 1B0"], 0, 2, "0W0 computes again what 0B0 does, first at step 1"),
        (["0F0 0I0", "1F0 1B0"], 0, 1,
         "0I0 is here, and 0W0 is missing: nobody computes that weight gradient"),
        (["0F0 0W0", "1F0 1B0"], 0, 0,
         "0F0 is here, and 0I0 is missing: nobody receives what 1B0 (rank 1, step 1) sends"),
        (["0F0 0B0", "1B0"], 1, 0,
         "1B0 is here, and 1F0 is missing: nobody receives what 0F0 (rank 0, step 0) sends"),
        (["0F0 0B0", "1F0"], 1, 0,
         "1F0 is here, and 1B0 is missing: nobody sends what 0B0 (rank 0, step 1) waits for"),
        (["0F0 0B0 0F1 0B1", "1F0 1B0"], 1, 2,
         "1F1 is missing: nobody receives what 0F1 (rank 0, step 2) sends"),
        (["0F0 0B0", "1F0 1B0 1F1 1B1"], 0, 2,
         "0F1 is missing: nobody sends what 1F1 (rank 1, step 2) waits for"),
        (["0F0 0F2 0B0 0B2"], 0, 4, "0F1 is missing"),
        (["0B0 0F0", "1F0 1B0"], 0, 0, "0B0 needs 0F0, which this rank does later, at step 1"),
        (["0F0 0W0 0I0", "1F0 1B0"], 0, 1, "0W0 needs 0I0, which this rank does later, at step 2"),
        (["0F0 3B0 3F0 0B0", "1F0 2F0 2B0 1B0"], 0, 1,
         "3B0 needs 3F0, which this rank does later, at step 2"),
        (["0F0 3F0 3B0 0B0", "1F0 2F0 1B0 2B0"], 1, 2,
         "1B0 needs 2B0, which this rank does later, at step 3"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], 0, 1,
         "a circle: rank 0 waits at step 1 with 0B0 for 1B0, rank 1's step 2; "
         "rank 1 waits at step 1 with 1F1 for 0F1, rank 0's step 2"),
        # Rank 0 waits too, but for the circle of the other two.
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"], 1, 1,
         "a circle: rank 1 waits at step 1 with 1B0 for 2B0, rank 2's step 2; "
         "rank 2 waits at step 1 with 2F1 for 1F1, rank 1's step 2"),
        (["2F1 2B1 2F0 2B0", "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], 1, 1,
         "a circle: rank 1 waits at step 1 with 0B0 for 1B0, rank 2's step 2; "
         "rank 2 waits at step 1 with 1F1 for 0F1, rank 1's step 2"),
    ],
)  # fmt: skip
def test_a_fault_is_named(rows: list[str], rank: int, step: int, reason: str) -> None:
    error = fault(*rows)
    assert (error.rank, error.step, error.reason) == (rank, step, reason)


def test_actions_that_are_none() -> None:
    for wrong in (Action(0, "X", 0), Action(-1, "F", 0), Action(0, "F", -1)):  # type: ignore[arg-type]
        with pytest.raises(ScheduleError, match="is no action: op is F, I, W or B"):
            Schedule([["0F0", wrong, "0B0"]]).check()


def test_lists_in_another_order_than_the_neighbours_may_be_fine() -> None:
    Schedule(["0F0 0F1 0B0 0B1", "1F1 1F0 1B1 1B0"]).check()
    Schedule(["0F0 0F1 0I1 0I0 0W0 0W1", "1F0 1F1 1B0 1B1"]).check()


def acyclic(s: Schedule) -> bool:
    """Whether list order and the definition of F, I, W, B leave an order at all, by the standard library."""
    graph: dict[str, set[str]] = {}
    have = {str(a) for row in s.actions for a in row}
    for row in s.actions:
        for before, a in zip([None, *row], row, strict=False):
            k = a.microbatch
            needs = {f"{a.stage - 1}F{k}"}
            if a.op == "W":
                needs = {f"{a.stage}I{k}"}
            elif a.op != "F":
                needs = {f"{a.stage}F{k}", f"{a.stage + 1}I{k}", f"{a.stage + 1}B{k}"}
            graph[str(a)] = (needs & have) | ({str(before)} if before else set())
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return False
    return True


def test_check_finds_every_circle_and_only_those() -> None:
    random.seed(0)
    verdicts: Counter[bool] = Counter()
    for name in schedules.NAMES:
        for _ in range(150):
            rows = [list(row) for row in make(name, 3, 6).actions]
            row = random.choice(rows)
            i = random.randrange(len(row) - 3)
            j = i + random.randint(1, 3)
            row[i], row[j] = row[j], row[i]
            s = Schedule(rows)
            right = acyclic(s)
            verdicts[right] += 1
            if right:
                s.check()
                continue
            with pytest.raises(ScheduleError) as caught:
                s.check()
            assert caught.value.step < len(rows[caught.value.rank])
    assert min(verdicts[True], verdicts[False]) > 200


def test_dropping_or_doubling_any_action_is_found() -> None:
    for name in schedules.NAMES:
        s = make(name, 2, 4)
        for rank, row in enumerate(s.actions):
            for step, action in enumerate(row):
                less = [list(r) for r in s.actions]
                del less[rank][step]
                more = [list(r) for r in s.actions]
                more[rank].append(action)
                for rows, word in ((less, f"{action} is missing"), (more, f"{action} comes twice")):
                    with pytest.raises(ScheduleError) as caught:
                        Schedule(rows).check()
                    assert caught.value.rank == rank
                    if action.op != "I":  # W without its I may as well lack its B
                        assert word in caught.value.reason


# --- the grid --------------------------------------------------------------------------------------


def test_a_grid() -> None:
    assert str(make("1f1b", 2, 3)).splitlines() == [
        "step    0   1   2   3   4   5   6   7",
        "rank 0 0F0 0F1  .  0B0 0F2 0B1  .  0B2",
        "rank 1  .  1F0 1B0 1F1 1B1 1F2 1B2  .",
    ]


def test_a_grid_of_lists_that_wait_for_each_other() -> None:
    rows = ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]
    marked = [
        "step     0     1     2     3",
        "rank 0  0F0  [0B0]  0F1   0B1",
        "rank 1  1F0  [1F1]  1B0   1B1",
    ]
    assert str(Schedule(rows)).splitlines() == marked
    assert fault(*rows).grid.splitlines() == marked


def test_a_wide_grid_shows_both_ends_and_the_fault() -> None:
    s = make("1f1b", 4, 200)
    lines = str(s).splitlines()
    assert max(map(len, lines)) <= 165
    assert all(" ... " in line for line in lines)
    assert "0F0" in lines[1]
    assert lines[1].endswith("0B199")
    rows = [list(map(str, row)) for row in s.actions]
    at, later = rows[2].index("2F100"), rows[2].index("2B100")
    rows[2][at], rows[2][later] = "2B100", "2F100"
    error = fault(*map(" ".join, rows))
    assert (error.rank, error.step) == (2, at)
    assert max(map(len, error.grid.splitlines())) <= 190
    assert "[2B100]" in error.grid
    assert error.grid.count("...") == 2 * 5  # on both sides of the fault, in the header too


def test_anything_can_be_printed() -> None:
    for rows in ([], [""], ["0F0"], ["0B0"], ["3W7", "0F0"]):
        assert "step" in str(Schedule(rows))
    assert len(str(schedules.make("interleaved", 64, 64, 4)).splitlines()) == 17
