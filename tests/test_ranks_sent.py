"""What functions, cells, closures and tensors keep on their way to ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from rank_pools import RankPools


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
