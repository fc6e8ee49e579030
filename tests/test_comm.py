"""Every conversion of hpnb.comm against the same computation on one process, in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from rank_pools import gpu_ranks

import hpnb
from hpnb import Layout, Mesh, comm

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

D = torch.float64

Pool = Callable[[int], hpnb.Ranks]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """The ranks that the tests of this file share, by their number."""
    pools: dict[int, hpnb.Ranks] = {}
    with contextlib.ExitStack() as stack:

        def start(size: int) -> hpnb.Ranks:
            if size not in pools or not pools[size].alive:
                pools[size] = stack.enter_context(hpnb.Ranks(size, device="cpu", timeout=60))
            return pools[size]

        yield start


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).norm() <= 1e-12 * (1 + b.norm()))


def tensors(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    made = (torch.randn(*shape, dtype=D, generator=g, device="cpu") for shape in ((length, 3), (4, 3, 3)))
    x, w = (t.to(hpnb.device()) for t in made)
    return x, w


def column_row(length: int) -> None:
    """replicate and all_reduce: each rank multiplies by its own weight, the results add up."""
    tp = Mesh(Layout(tp=hpnb.world_size())).tp
    x, w = (t.clone().requires_grad_() for t in tensors(length))
    y = comm.all_reduce(torch.tanh(comm.replicate(x, tp) @ w[tp.rank]), tp)
    (y**2).sum().backward()

    xs, ws = (t.clone().requires_grad_() for t in tensors(length))
    ys = sum(torch.tanh(xs @ ws[r]) for r in range(tp.size))
    assert isinstance(ys, torch.Tensor)
    (ys**2).sum().backward()
    assert close(y, ys)
    assert close(x.grad, xs.grad)
    assert close(w.grad[tp.rank], ws.grad[tp.rank])
    assert xs.grad.norm() > 1


def sequence(length: int) -> None:
    """all_gather then reduce_scatter on a sharded dim, any length; gather at the end."""
    tp = Mesh(Layout(tp=hpnb.world_size())).tp
    full, w = tensors(length)
    x = comm.split(full, tp, 0).clone().requires_grad_()
    assert x.size(0) == comm.split_sizes(length, tp.size)[tp.rank]
    w = w.clone().requires_grad_()
    partial = torch.tanh(comm.all_gather(x, tp, 0, total=length) @ w[tp.rank])
    mine = comm.reduce_scatter(partial, tp, 0)
    y = comm.gather(mine, tp, 0, total=length)
    (y**2 * torch.arange(length)[:, None]).sum().backward()

    xs, ws = full.clone().requires_grad_(), tensors(length)[1].requires_grad_()
    ys = sum(torch.tanh(xs @ ws[r]) for r in range(tp.size))
    assert isinstance(ys, torch.Tensor)
    (ys**2 * torch.arange(length)[:, None]).sum().backward()
    assert close(y, ys)
    assert close(x.grad, comm.split(xs.grad, tp, 0))
    assert close(w.grad[tp.rank], ws.grad[tp.rank])


def others(length: int) -> None:
    """split, all_to_all, broadcast, reduce and exchange, each with its backward."""
    tp = Mesh(Layout(tp=hpnb.world_size())).tp
    p, me = tp.size, tp.rank
    full = torch.arange(length * 2 * p, dtype=D).reshape(length, 2 * p)

    x = full.clone().requires_grad_()
    y = comm.split(x, tp, 0)
    (y * (me + 1)).sum().backward()
    scale = torch.cat([torch.full((n,), r + 1.0, dtype=D) for r, n in enumerate(comm.split_sizes(length, p))])
    assert close(x.grad, scale[:, None].expand_as(full))

    rows = torch.arange(4.0 * p * p, dtype=D).reshape(2 * p, 2 * p)
    x = rows.chunk(p, 0)[me].clone().requires_grad_()
    y = comm.all_to_all(x, tp, split_dim=1, concat_dim=0)
    assert close(y, rows.chunk(p, 1)[me])
    (y * rows.chunk(p, 1)[me]).sum().backward()
    assert close(x.grad, rows.chunk(p, 0)[me])

    x = torch.full((3,), float(me), dtype=D, requires_grad=True)
    y = comm.broadcast(x, tp, source=p - 1)
    assert close(y, torch.full((3,), p - 1.0, dtype=D))
    (y * (me + 1)).sum().backward()
    assert close(x.grad, torch.full((3,), p * (p + 1) / 2 if me == p - 1 else 0.0, dtype=D))

    x = torch.full((3,), float(me), dtype=D, requires_grad=True)
    y = comm.reduce(x, tp, to=0)
    assert close(y, torch.full((3,), p * (p - 1) / 2 if me == 0 else 0.0, dtype=D))
    (y * 7).sum().backward()
    assert close(x.grad, torch.full((3,), 7.0, dtype=D))


def point_to_point() -> None:
    pp = Mesh(Layout(pp=2)).pp
    full, w = tensors(4)
    w = w.clone().requires_grad_()
    if pp.rank == 0:
        comm.send(torch.tanh(full @ w[0]), pp, to=1).backward()
    else:
        h = comm.receive((4, 3), pp, source=0, dtype=D)
        (torch.tanh(h @ w[1]) ** 2).sum().backward()
    ws = tensors(4)[1].requires_grad_()
    (torch.tanh(torch.tanh(full @ ws[0]) @ ws[1]) ** 2).sum().backward()
    assert close(w.grad[pp.rank], ws.grad[pp.rank])
    assert w.grad[pp.rank].norm() > 0.1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_conversions_equal_one_process(pool: Pool, ranks: int) -> None:
    pool(ranks).run(column_row, 5)
    for length in (4, 7, 12):  # 7 divides by none of them
        pool(ranks).run(sequence, length)
    pool(ranks).run(others, 7)


@pytest.mark.one_gpu
def test_conversions_equal_one_process_on_gpus() -> None:
    def run() -> None:
        with torch.device(hpnb.device()):
            column_row(5)
            for length in (4, 7, 12):
                sequence(length)
            others(7)

    def pair() -> None:
        with torch.device(hpnb.device()):
            point_to_point()
            second_derivatives()
            results_can_be_viewed_and_changed()
            integers_travel()

    hpnb.launch(run, ranks=gpu_ranks(), device="cuda", timeout=120)
    hpnb.launch(pair, ranks=2, device="cuda", timeout=120)


def test_send_and_receive_carry_the_gradient_back(pool: Pool) -> None:
    pool(2).run(point_to_point)


def second_derivatives() -> None:
    """The gradient of a gradient's norm, through replicate and all_reduce."""
    tp = Mesh(Layout(tp=2)).tp
    full, weights = tensors(3)

    def penalty(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((gradient**2).sum(), x)
        return second

    x = full.clone().requires_grad_()
    y = comm.all_reduce(torch.tanh(comm.replicate(x, tp) @ weights[tp.rank]), tp)
    xs = full.clone().requires_grad_()
    ys = torch.tanh(xs @ weights[0]) + torch.tanh(xs @ weights[1])
    assert close(penalty(x, y), penalty(xs, ys))


def results_can_be_viewed_and_changed() -> None:
    tp = Mesh(Layout(tp=2)).tp
    x = torch.ones(2, 4, requires_grad=True)
    assert comm.gather(x, tp, -1).view(-1).numel() == 16
    assert comm.reduce_scatter(x, tp, 1).view(-1).numel() == 4
    comm.gather(x, tp, 0).relu_().sum().backward()
    comm.reduce_scatter(x, tp, 0).mul_(2).sum().backward()


def integers_travel() -> list[int]:
    pp = Mesh(Layout(pp=2)).pp
    if pp.rank == 0:
        comm.send(torch.tensor([5, 7]), pp, to=1)
        return [5, 7]
    return list(comm.receive((2,), pp, source=0, dtype=torch.int64).tolist())


def meshes_share_groups() -> bool:
    first = Mesh(Layout(dp=2))
    return all(Mesh(Layout(dp=2)).dp.group is first.dp.group for _ in range(30))


def test_second_derivatives_views_integers_and_many_meshes(pool: Pool) -> None:
    two = pool(2)
    two.run(second_derivatives)
    two.run(results_can_be_viewed_and_changed)
    assert two.run(integers_travel) == [[5, 7]] * 2
    assert two.run(meshes_share_groups) == [True] * 2


def test_split_sizes_differ_by_at_most_one_and_add_up() -> None:
    assert comm.split_sizes(25, 4) == (7, 6, 6, 6)
    assert comm.split_sizes(2, 4) == (1, 1, 0, 0)
    for total in range(20):
        for ranks in range(1, 6):
            dealt = comm.split_sizes(total, ranks)
            assert sum(dealt) == total
            assert max(dealt) - min(dealt) <= 1


def test_what_cannot_be_split_or_reached_is_refused(pool: Pool) -> None:
    def messages() -> list[str]:
        tp = Mesh(Layout(tp=2)).tp
        found = []
        for wrong in (
            lambda: comm.all_to_all(torch.ones(3, 2), tp, split_dim=0, concat_dim=1),
            lambda: comm.send(torch.ones(1), tp, to=tp.rank),
            lambda: comm.gather(torch.ones(3), tp, 0, total=9),
        ):
            try:
                wrong()
            except ValueError as error:
                found.append(str(error))
        return found

    split, peer, share = pool(2).run(messages)[1]
    assert "dim 0 of (3, 2) over 2 ranks; its size must be a multiple of 2" in split
    assert "rank 1 of axis tp has no peer 1" in peer
    assert "holds 3 of dim 0, but an even split of 9 over 2 ranks gives it 4" in share
