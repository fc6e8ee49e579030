"""What functions, cells, closures and tensors keep on their way to ranks."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rank_pools import RankPools

from hpnb.ranks.caller_globals import global_names


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def counter() -> tuple[Callable[[], None], Callable[[], int]]:
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    def get() -> int:
        return count

    return add, get


def test_closures_that_share_a_variable_share_it_on_ranks(pools: RankPools) -> None:
    add, get = counter()

    def run(add: Callable[[], None], get: Callable[[], int]) -> int:
        add()
        return get()

    assert pools[2].run(run, add, get) == [1, 1]

    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n > 0 and even(n - 1)

    def is_itself(n: int) -> bool:
        return even(n) and even.__closure__ is not None and even.__closure__[0].cell_contents is odd

    assert pools[2].run(is_itself, 6) == [True, True]


def test_tensors_and_parameters_keep_their_attributes(pools: RankPools) -> None:
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    tensor.name_of_mine, parameter.no_decay = "t", True  # type: ignore[attr-defined]
    layer = torch.nn.Linear(2, 2)
    layer.weight.no_decay = layer.weight  # type: ignore[assignment]

    def attributes() -> tuple[object, ...]:
        return tensor.name_of_mine, parameter.no_decay, layer.weight.no_decay is layer.weight  # type: ignore

    assert pools[2].run(attributes) == [("t", True, True)] * 2
    assert pools[2].run(lambda: parameter)[1].no_decay


# --- globals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("x = 1\nx", set()),
        ("if a: x = 1\nx", {"a", "x"}),
        ("if a: x = 1\nelse: x = 2\nx", {"a"}),
        ("if a:\n  x = 1\n  x", {"a"}),
        ("if a:\n  x = 1\nelif b:\n  x = 2\nelse:\n  raise E\nx", {"a", "b", "E"}),
        ("a and (x := 1)\nx", {"a", "x"}),
        ("for i in s: x = i\nx, i", {"s"}),
        ("for i in s:\n  if i: break\n  x = i\nx", {"s", "x"}),
        ("while True:\n  x = 1\n  if a: break\nx", {"a"}),
        ("try:\n  import x\nexcept ImportError:\n  x = None\nx", {"ImportError"}),
        ("with c as f:\n  x = 1\nf, x", {"c"}),
        ("x = 1\nif a: y\nx", {"a", "y"}),
    ],
)
def test_a_name_that_a_cell_may_read_before_it_binds_it(text: str, read: set[str]) -> None:
    assert global_names(compile(text, "<cell>", "exec")) == read


def test_a_name_that_some_ranks_bind_and_one_that_all_delete_come_from_the_caller(
    pools: RankPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "rate", 0.5, raising=False)
    bind = "import hpnb\nif hpnb.rank() == 0:\n    rate = 0.1\nrate"
    assert pools[2].run_cell(bind) == [0.1, 0.5]
    pools[2].run_cell("del rate")
    assert pools[2].run_cell("rate") == [0.5, 0.5]


STEP = 1


def test_what_the_caller_reassigns_during_a_call_is_sent_with_the_next(
    pools: RankPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait() -> int:
        time.sleep(0.5)
        return STEP

    timer = threading.Timer(0.2, monkeypatch.setitem, (globals(), "STEP", 2))
    timer.start()
    assert pools[2].run(wait) == [1, 1]
    timer.join()
    assert pools[2].run(wait) == [2, 2]


def test_ranks_outlive_the_folder_that_they_were_in(
    pools: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    with monkeypatch.context() as inside:
        inside.chdir(tmp_path / "gone")
        pools[2].run(os.getcwd)
    (tmp_path / "gone").rmdir()
    assert pools[2].run(os.getcwd) == [os.getcwd()] * 2
