"""Layout: numbers that are a bijection. Mesh: groups that talk to the right ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hpnb
from hpnb import Layout, Mesh, ParallelLayout
from hpnb.hybrid.checkpoint.agreement import files_group
from hpnb.ranks.process_group import collective_timeout


@pytest.fixture(scope="module")
def four() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(4, device="cpu", timeout=60) as ranks:
        yield ranks


@pytest.mark.parametrize("order", list(itertools.permutations(("dp", "pp", "tp"))))
def test_ranks_and_coordinates_are_inverse_in_any_order(order: tuple[str, ...]) -> None:
    layout = Layout(dp=2, pp=3, tp=4, order=order)
    assert [layout.rank(**layout.coordinates(r)) for r in range(24)] == list(range(24))
    for axis in order:
        groups = layout.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(24))
        for group in groups:
            others = [{k: v for k, v in layout.coordinates(r).items() if k != axis} for r in group]
            assert all(other == others[0] for other in others)
            assert [layout.coordinates(r)[axis] for r in group] == list(range(getattr(layout, axis)))


def test_tp_is_innermost_by_default_and_dp_outermost() -> None:
    layout = Layout(dp=2, pp=2, tp=2)
    assert layout.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert Layout(dp=2, tp=2, order=("tp", "pp", "dp")).groups("dp") == [(0, 1), (2, 3)]


def test_a_layout_that_cannot_be_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="dp=0 is not a count"):
        Layout(dp=0)
    with pytest.raises(ValueError, match="must name dp, pp and tp once"):
        Layout(order=("dp", "pp"))
    with pytest.raises(ValueError, match="rank 8 is outside"):
        Layout(2, 2, 2).coordinates(8)
    with pytest.raises(ValueError, match="tp=2 is outside"):
        Layout(2, 2, 2).rank(tp=2)
    with pytest.raises(RuntimeError, match="a Mesh needs running ranks"):
        Mesh(Layout())


def test_a_parallel_layout_is_a_layout_that_also_says_how_a_step_runs() -> None:
    layout = ParallelLayout(2, 4, 1, 8, 1, schedule="zb-h1", order=("tp", "pp", "dp"))
    assert isinstance(layout, Layout)
    assert layout.mesh_layout == Layout(2, 4, 1, ("tp", "pp", "dp"))
    assert layout.groups("dp") == layout.mesh_layout.groups("dp")
    assert layout.world_size == 8
    assert str(layout) == "dp 2 x pp 4, zb-h1, ZeRO 1"
    assert str(ParallelLayout()) == "1 rank"


@pytest.mark.parametrize(
    ("layout", "samples", "microbatches"),
    [
        (ParallelLayout(dp=4), 6, 1),
        (ParallelLayout(pp=2), 64, 8),
        (ParallelLayout(pp=4), 6, 6),
        (ParallelLayout(pp=2, microbatch_size=4), 10, 3),
        (ParallelLayout(pp=2, num_microbatches=5, microbatch_size=4), 10, 5),
        (ParallelLayout(pp=4, microbatch_size=4, schedule="dualpipe-v"), 4, 8),
    ],
    ids=str,
)
def test_microbatches_of_a_batch(layout: ParallelLayout, samples: int, microbatches: int) -> None:
    assert layout.count_microbatches(samples) == microbatches


@pytest.mark.parametrize(
    "field",
    [{"dp": 0}, {"num_microbatches": 0}, {"microbatch_size": True}, {"chunks": None}, {"zero_stage": 4},
     {"recomputation": True}, {"tp_mode": "4d"}, {"tp_depth": 0}],
    ids=str,
)  # fmt: skip
def test_a_parallel_layout_refuses_values_by_the_name_of_their_field(field: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        ParallelLayout(**field)  # type: ignore[arg-type]


def sums_by_axis(layout: Layout) -> dict[str, float]:
    """What an all-reduce of the rank's number gives along each axis, and along the folded tp axis."""
    mesh = Mesh(layout)
    axes = {name: getattr(mesh, name) for name in ("dp", "pp", "tp")}
    if mesh.tp.size == 4:
        axes |= {axis.name: axis for axis in mesh.tp.split(2, 2)}
    found = {}
    for name, axis in axes.items():
        assert axis.ranks[axis.rank] == hpnb.rank()
        assert dist.get_world_size(axis.group) == axis.size
        assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
        total = torch.tensor(float(hpnb.rank()))
        dist.all_reduce(total, group=axis.group)
        found[name] = total.item()
    return found


@pytest.mark.parametrize(
    "layout", [Layout(dp=2, tp=2), Layout(tp=4), Layout(2, 2, order=("pp", "tp", "dp")), Layout(dp=4)]
)
def test_every_axis_talks_to_its_own_ranks(four: hpnb.Ranks, layout: Layout) -> None:
    for rank, found in enumerate(four.run(sums_by_axis, layout)):
        for name in ("dp", "pp", "tp"):
            assert found[name] == sum(next(g for g in layout.groups(name) if rank in g))
        if layout.tp == 4:  # outermost first: rows are tp.1, columns tp.0
            assert found["tp.0"] == rank % 2 * 2 + 2
            assert found["tp.1"] == rank // 2 * 4 + 1


def test_a_mesh_that_does_not_fit_says_what_would(four: hpnb.Ranks) -> None:
    def messages() -> list[str]:
        found = []
        for layout in (Layout(dp=2, pp=2, tp=2), Layout(pp=3)):
            try:
                Mesh(layout)
            except ValueError as error:
                found.append(str(error))
        try:
            Mesh(Layout(tp=4)).tp.split(3, 2)
        except ValueError as error:
            found.append(str(error))
        return found

    too_large, uneven, grid = four.run(messages)[0]
    assert "needs 2 x 2 x 2 = 8 ranks, and 4 are running; Layout(dp=1, pp=2, tp=2) would fit" in too_large
    assert "needs 1 x 3 x 1 = 3 ranks, and 4 are running" in uneven
    assert grid == "axis tp has 4 ranks and cannot be folded into 3 x 2 = 6; the sizes must multiply to 4"


def test_a_mesh_where_an_axis_belongs_says_so(four: hpnb.Ranks) -> None:
    def message() -> str:
        try:
            hpnb.comm.all_reduce(torch.ones(1), Mesh(Layout(dp=4)))  # type: ignore[arg-type]
        except AttributeError as error:
            return str(error)
        return ""

    assert "pass an axis, such as mesh.dp" in four.run(message)[0]


# --- time-outs -------------------------------------------------------------------------------


def timeout_of(group: dist.ProcessGroup) -> float:
    backend: Any = group._get_backend(torch.device("cpu"))
    return float(backend.options._timeout.total_seconds())


def group_timeouts() -> dict[str, float]:
    """{group: seconds} of every group that hpnb makes on a CPU."""
    mesh = Mesh(Layout(tp=4))
    axes = (mesh.dp, mesh.pp, mesh.tp, *mesh.tp.split(2, 2), mesh.tp.among([0, 1, 2]))
    groups = {axis.name + str(axis.ranks): axis.group for axis in axes} | {"files": files_group()}
    return {name: timeout_of(group) for name, group in groups.items()}


def test_no_collective_of_a_launch_gives_up_before_the_launch(four: hpnb.Ranks) -> None:
    for timeouts in four.run(group_timeouts):
        assert len(timeouts) == 7
        assert min(timeouts.values()) >= 24 * 3600, timeouts  # torch's defaults are 600 and 1800


def test_smaller_groups_inherit_the_timeout_of_a_program_that_made_its_own_ranks() -> None:
    seconds = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=seconds)
    try:
        assert collective_timeout() == seconds
        assert timeout_of(Mesh(Layout()).tp.group) == timeout_of(files_group()) == 77
    finally:
        dist.destroy_process_group()
