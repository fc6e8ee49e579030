"""What ranks warn of is shown once, and a failing cell begins with its own lines.

pytest tests/test_ranks_warnings.py
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from rank_pools import RankPools

import hpnb
from hpnb.ranks import repeated_warnings
from hpnb.ranks.repeated_warnings import RepeatedWarnings

WARNING = ["a.py:3: UserWarning: so", "  warn('so')"]
OTHER = ["a.py:9: FutureWarning: no more"]


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def test_the_first_rank_shows_a_warning_of_all() -> None:
    filtered = RepeatedWarnings(first=0)
    assert filtered.filter(1, WARNING) == []
    assert filtered.filter(0, ["before", *WARNING, "after"]) == [
        (0, "before"), (0, WARNING[0]), (0, WARNING[1]), (0, "after"),
    ]  # fmt: skip
    assert filtered.filter(2, [*WARNING, "mine"]) == [(2, "mine")]
    assert filtered.finish() == [(0, "2 other ranks gave the warning of a.py:3")]
    assert filtered.finish() == []


def test_a_warning_of_one_rank_alone_comes_before_its_next_line() -> None:
    filtered = RepeatedWarnings(first=0)
    assert filtered.filter(1, OTHER) == []
    assert filtered.holds
    assert filtered.filter(1, ["next"]) == [(1, OTHER[0]), (1, "next")]
    assert filtered.filter(0, OTHER) == []
    assert filtered.filter(2, WARNING) == []
    assert filtered.finish() == [
        (2, WARNING[0]), (2, WARNING[1]), (1, "1 other rank gave the warning of a.py:9"),
    ]  # fmt: skip


def test_a_warning_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    filtered = RepeatedWarnings(first=0)
    filtered.filter(1, OTHER)
    assert filtered.late() == []
    monkeypatch.setattr(repeated_warnings, "HOLD", 0.0)
    assert filtered.late() == [(1, OTHER[0])]
    assert not filtered.holds


def test_a_rank_that_repeats_itself_is_shown_and_so_are_other_lines() -> None:
    filtered = RepeatedWarnings(first=0)
    filtered.filter(0, WARNING)
    assert filtered.filter(0, WARNING) == [(0, line) for line in WARNING]
    assert filtered.filter(1, ["12:30: no Warning here"]) == [(1, "12:30: no Warning here")]


def test_a_message_of_several_lines_is_one_warning() -> None:
    long = ["a.py:5: UserWarning: first line", "second line", "  the_source()"]
    filtered = RepeatedWarnings(first=0)
    assert filtered.filter(1, long) == []
    assert filtered.filter(0, [*long, "and then"]) == [(0, line) for line in (*long, "and then")]
    assert filtered.filter(2, [*long, "  more"]) == [(2, "  more")]
    assert filtered.filter(3, [long[0], "another line", long[2]]) == [
        (3, line) for line in (long[0], "another line", long[2])
    ]


def test_a_line_that_warns_of_several_things_loses_none() -> None:
    filtered, shown = RepeatedWarnings(first=0), []
    said = [["a.py:5: UserWarning: value", str(value), "  warn(value)"] for value in (1, 2, 3)]
    for warning in said:
        shown += filtered.filter(1, warning)
    shown += filtered.finish()
    assert shown == [(1, line) for warning in said for line in warning]


def test_all_of_a_pool_warn_once(pools: RankPools, capfd: pytest.CaptureFixture[str]) -> None:
    cell = "import warnings\nwarnings.warn('all of us')\nwarnings.warn(f'number {hpnb.rank()}')"
    pools[2].run_cell("import hpnb\n" + cell, "cell-7")
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if "all of us" in line and "Warning" in line] == [
        "[rank 0] cell-7:3: UserWarning: all of us"
    ]
    assert "[rank 0] 1 other rank gave the warning of cell-7:3" in lines
    for rank in (0, 1):
        assert f"[rank {rank}] cell-7:4: UserWarning: number {rank}" in lines


@pytest.mark.parametrize("awaits", [False, True])
def test_the_traceback_of_a_cell_begins_with_its_own_line(pools: RankPools, awaits: bool) -> None:
    cell = "def f(x):\n    return 1 // x\nf(0)"
    if awaits:
        cell = "async def f(x):\n    return 1 // x\nawait f(0)"
    with pytest.raises(hpnb.RankError) as error:
        pools[2].run_cell(cell, "cell-8")
    assert error.value.traceback.splitlines()[1].strip() == 'File "cell-8", line 3, in <module>'
    assert f"Rank {1 - error.value.rank}: the same as rank {error.value.rank}" in str(error.value)


def test_ranks_that_raised_the_same_stand_beside_the_first() -> None:
    stacks = {0: "in a barrier", 1: "line 5\nRuntimeError", 2: "line 5\nRuntimeError"}
    text = str(hpnb.RankError("rank 1 raised", rank=1, traceback=stacks[1], stacks=stacks))
    assert text.index("Rank 2: the same as rank 1") < text.index("Rank 0:\nin a barrier")


def test_help_says_what_an_interrupt_does() -> None:
    text = inspect.getdoc(hpnb.Ranks) or ""
    assert "Ctrl-C" in text
    assert "RankInterrupt" in text
