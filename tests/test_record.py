"""The measured side against what is known beforehand: bytes by formula, memory by hand, time by sleeping."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hpnb
from hpnb import Layout, Mesh, comm
from hpnb.ranks import shared_gpu_group
from hpnb.ranks.process_group import new_group
from hpnb.record import CATEGORIES, Event, MemoryProfile, Timeline, ring_bytes
from hpnb.record.recorder import waiting

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

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


# --- traffic ---------------------------------------------------------------------------------


def count_each(shared_gpu_backend: bool) -> dict[str, tuple[float, float, float, float]]:
    """{call: (bytes and calls on tp, bytes and calls elsewhere)} of calls made through torch.distributed."""
    mesh = Mesh(Layout(dp=2, tp=2))
    g, p, me = mesh.tp.group, 2, mesh.tp.rank
    if shared_gpu_backend:
        shared_gpu_group.register_backend()
        g = new_group(mesh.tp.ranks, "tp", shared_gpu_group.BACKEND)
    to, root = mesh.tp.ranks[1 - me], mesh.tp.ranks[0]
    x = torch.ones(12)  # 48 bytes
    lists = [torch.empty(12) for _ in range(p)]
    calls = {
        "all_reduce": lambda: dist.all_reduce(x, group=g),
        "all_reduce async": lambda: dist.all_reduce(x, group=g, async_op=True).wait(),
        "all_gather": lambda: dist.all_gather(lists, x, group=g),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(24), x, group=g),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(6), x, group=g),
        "broadcast": lambda: dist.broadcast(x, root, group=g),
        "reduce": lambda: dist.reduce(x, root, group=g),
        "gather": lambda: dist.gather(x, lists if me == 0 else None, root, group=g),
        "scatter": lambda: dist.scatter(torch.empty(12), lists if me == 0 else None, root, group=g),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(12), x, group=g),
        "uneven all_to_all": lambda: dist.all_to_all_single(
            torch.empty(14 if me == 0 else 10), x, *([7, 7] if me == 0 else [5, 5], [7, 5]), group=g
        ),
        "send": lambda: dist.send(x, to, group=g) if me == 0 else dist.recv(x, to, group=g),
        "barrier": lambda: dist.barrier(g),
    }
    found = {}
    for name, call in calls.items():
        with hpnb.record.traffic() as t:
            call()
        found[name] = (t.bytes["tp"], t.calls["tp"], t.bytes["dp"], t.total - t.bytes["tp"])
    return found


@pytest.mark.parametrize("shared_gpu_backend", [False, True])
def test_every_collective_is_counted_by_the_formula(pool: Pool, shared_gpu_backend: bool) -> None:
    expected = {
        "all_reduce": 48.0,
        "all_reduce async": 48.0,
        "all_gather": 48.0,
        "all_gather_into_tensor": 48.0,
        "reduce_scatter_tensor": 24.0,
        "broadcast": 24.0,
        "reduce": 24.0,
        "gather": 48.0,
        "scatter": 48.0,
        "all_to_all_single": 24.0,
        "barrier": 0.0,
    }
    for rank, found in enumerate(pool(4).run(count_each, shared_gpu_backend)):
        first = rank % 2 == 0
        sent = {"send": 48.0 if first else 0.0, "uneven all_to_all": 20.0 if first else 28.0}
        assert found == {name: (n, 1, 0, 0) for name, n in {**expected, **sent}.items()}


def roots() -> dict[str, int]:
    """The peer that is noted of one call each, with the second rank of a group as its root."""
    mesh = Mesh(Layout(dp=2, tp=2))
    g, root, me = mesh.tp.group, mesh.tp.ranks[1], mesh.tp.rank
    x = torch.ones(4)
    lists = [torch.empty(4) for _ in range(2)] if me == 1 else None
    calls = {
        "broadcast": lambda: dist.broadcast(x, root, group=g),
        "reduce": lambda: dist.reduce(x, root, group=g),
        "gather": lambda: dist.gather(x, lists, root, group=g),
        "scatter": lambda: dist.scatter(torch.empty(4), lists, root, group=g),
        "all_reduce": lambda: dist.all_reduce(x, group=g),
    }
    found = {}
    for name, call in calls.items():
        with hpnb.record.traffic() as t:
            call()
        (message,) = t.messages
        found[name] = message.peer
    return found


def test_a_timeline_is_shown_in_one_line() -> None:
    events = tuple(Event(rank, 0, "F", i, float(i), i + 0.5) for rank in range(4) for i in range(100))
    assert repr(Timeline(events)) == "<Timeline, measured: 400 events of 4 ranks in 99.5 s>"


def test_the_root_of_a_collective_is_noted(pool: Pool) -> None:
    for rank, found in enumerate(pool(4).run(roots)):
        root = rank // 2 * 2 + 1
        assert found == {"broadcast": root, "reduce": root, "gather": root, "scatter": root, "all_reduce": -1}


def count_comm(ranks: int) -> dict[str, tuple[dict[str, float], list[tuple[str, float]]]]:
    """Bytes of hpnb.comm, forward and backward: what the meter counts beside what the recorder notes."""
    axis = Mesh(Layout(pp=ranks)).pp
    x = torch.ones(ranks * 2, ranks, dtype=torch.float64, requires_grad=True)
    ops = {
        "replicate": lambda: comm.replicate(x, axis),
        "all_reduce": lambda: comm.all_reduce(x, axis),
        "all_gather": lambda: comm.all_gather(x, axis, 0),
        "reduce_scatter": lambda: comm.reduce_scatter(x, axis, 0),
        "gather": lambda: comm.gather(x, axis, 0),
        "split": lambda: comm.split(x, axis, 0),
        "all_to_all": lambda: comm.all_to_all(x, axis, 0, 1),
        "broadcast": lambda: comm.broadcast(x, axis),
        "reduce": lambda: comm.reduce(x, axis),
    }
    found = {}
    for name, op in ops.items():
        with hpnb.record.timeline() as recorder, hpnb.record.traffic() as t:
            op().sum().backward()
        noted = [(e.op, e.bytes) for e in recorder.events()]
        found[name] = (dict(t.bytes), noted)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_comm_moves_what_its_table_says(pool: Pool, ranks: int) -> None:
    n = ranks * 2 * ranks * 8.0
    ring, share = 2 * (ranks - 1) * n / ranks, (ranks - 1) * n / ranks
    expected = {
        "replicate": ring,
        "all_reduce": ring,
        "all_gather": 2 * share * ranks,
        "reduce_scatter": 2 * share,
        "gather": share * ranks,
        "split": share,
        "all_to_all": 2 * share,
        "broadcast": 2 * share,
        "reduce": 2 * share,
    }
    for found in pool(ranks).run(count_comm, ranks):
        for name, (counted, noted) in found.items():
            assert counted == {"pp": pytest.approx(expected[name], rel=1e-12)}, name
            assert sum(nbytes for _, nbytes in noted) == pytest.approx(expected[name], rel=1e-12), name


def test_traffic_counts_groups_of_no_mesh_as_world_and_others_of_pytorch_too(pool: Pool) -> None:
    def count() -> tuple[dict[str, float], dict[str, float]]:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4, bias=False))
        with hpnb.record.traffic() as t:
            model(torch.ones(2, 4)).sum().backward()
            dist.all_reduce(torch.ones(2))
        return dict(t.bytes), dict(t.calls)

    for found, calls in pool(2).run(count):
        assert found["world"] == 64 + 8
        assert calls["world"] >= 2


def test_a_group_of_one_sends_nothing() -> None:
    assert ring_bytes("all_reduce", 100, 1) == 0
    assert ring_bytes("send", 100, 1) == 100


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("allreduce", 10, 2), "'allreduce' is no communication; use all_gather, all_reduce"),
        (("all_reduce", 10, 0), "over ranks=0 sends nothing; use 1 rank or more"),
        (("all_gather", -4, 2), "nbytes=-4"),
    ],
)
def test_what_no_ring_can_send_is_refused(arguments: tuple[str, float, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ring_bytes(*arguments)


# --- timeline --------------------------------------------------------------------------------


def test_a_timeline_inside_another_records_for_both(pool: Pool) -> None:
    """The outer one gets the collectives and the spans, and its open span leaves out the same waits."""

    def record() -> tuple[list[str], list[str], list[str]]:
        axis = Mesh(Layout(dp=2)).dp
        with hpnb.record.timeline() as outer:
            comm.all_reduce(torch.ones(4), axis)
            with outer.span("step"), hpnb.record.timeline() as inner:
                comm.all_gather(torch.ones(4), axis, dim=0)
                with inner.span("F"), waiting():
                    pass
            comm.all_reduce(torch.ones(4), axis)
        timelines = inner.gather(), outer.gather()
        return *([e.op for e in t.by_rank[0]] for t in timelines), [e.op for e in inner.events()]

    for inside, around, _ in pool(2).run(record):
        assert Counter(inside) == {"all_gather": 1, "F": 2}
        assert Counter(around) == {"all_reduce": 2, "all_gather": 1, "F": 2, "step": 2}


def one_slow_rank() -> Timeline:
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    x = torch.ones(8)
    comm.all_reduce(x, axis)  # the first call connects
    with hpnb.record.timeline() as recorder:
        for _ in range(2):
            with recorder.span("compute"):
                time.sleep(0.12 if axis.rank == 1 else 0.02)
            comm.all_reduce(x, axis)
    return recorder.gather()


def test_the_slow_rank_has_the_shortest_collective(pool: Pool) -> None:
    timelines = pool(3).run(one_slow_rank)
    assert timelines[0] == timelines[2]
    tl = timelines[0]
    assert tl.ranks == (0, 1, 2)
    assert [e.op for e in tl.by_rank[1]] == ["compute", "all_reduce"] * 2
    reduced = {r: sum(e.duration for e in tl.by_rank[r] if e.op == "all_reduce") for r in tl.ranks}
    assert min(reduced, key=lambda r: reduced[r]) == 1
    assert reduced[0] > 0.15
    split = tl.split_waits()
    waits = {r: sum(e.duration for e in split.by_rank[r] if e.op == "wait") for r in tl.ranks}
    moves = {r: sum(e.duration for e in split.by_rank[r] if e.op == "move") for r in tl.ranks}
    assert waits[1] < 0.02 < 0.15 < waits[0]
    for rank in tl.ranks:
        assert waits[rank] + moves[rank] == pytest.approx(reduced[rank])
    assert {e.bytes for e in split.events if e.op == "move"} == {2 * 2 / 3 * 32}


def test_only_the_named_collectives_are_split_and_without_a_group_all_ranks_meet() -> None:
    tl = Timeline(
        (
            Event(0, -1, "all_reduce", -1, 1.0, 5.0),
            Event(1, -1, "all_reduce", -1, 3.0, 5.0),
            Event(0, -1, "all_gather", -1, 5.0, 7.0, "tp", 8.0, (0, 1)),
            Event(1, -1, "all_gather", -1, 6.0, 7.0, "tp", 8.0, (0, 1)),
            Event(1, -1, "loading", -1, 7.0, 8.0),  # no collective: it meets nobody
        )
    )

    def cut(split: Timeline, op: str) -> list[tuple[int, float, float]]:
        return [(e.rank, e.start, e.end) for e in split.events if e.op == op]

    named, every = tl.split_waits("all_reduce"), tl.split_waits()
    assert cut(named, "wait") == [(0, 1.0, 3.0), (1, 3.0, 3.0)]
    assert cut(named, "move") == [(0, 3.0, 5.0), (1, 3.0, 5.0)]
    assert cut(named, "all_gather") == cut(tl, "all_gather")
    assert cut(every, "wait") == [(0, 5.0, 6.0), (1, 6.0, 6.0)]
    assert cut(every, "all_reduce") == cut(tl, "all_reduce")
    assert cut(every, "loading") == cut(named, "loading") == [(1, 7.0, 8.0)]


def picture() -> Timeline:
    """One rank works 2 of 3 s, the other 2 of 4 s; they hold two and one activations."""
    return Timeline(
        (
            Event(0, 0, "F", 0, 0.0, 1.0),
            Event(0, 0, "F", 1, 1.0, 1.5),
            Event(0, 0, "B", 0, 2.5, 3.0),
            Event(1, 1, "F", 0, 1.0, 2.0),
            Event(1, 1, "I", 0, 2.0, 2.5),
            Event(1, 1, "W", 0, 4.5, 5.0),
            Event(1, 1, "all_reduce", -1, 5.0, 6.0, "dp", 10.0, (0, 1)),
        ),
        "simulated",
    )


def test_bubbles_and_memory_of_a_known_picture() -> None:
    tl = picture()
    assert tl.makespan == 6.0
    assert tl.bubble_fraction == pytest.approx(1 - 4 / 12)
    assert tl.bubble_rate == pytest.approx((4 - 2) / 4)  # rank 1's own span is 4, of which 2 is work
    assert tl.peak_in_flight(0) == 2
    assert tl.peak_in_flight(1) == 1
    assert tl.in_flight(1) == [(1.0, 1), (5.0, 0)]  # held until W, not until I
    assert tl.shifted(10.0).start == 10.0
    assert Timeline(()).makespan == 0.0
    assert Timeline(()).bubble_rate == 0.0


def test_the_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    trace = json.loads(picture().to_chrome_trace(tmp_path / "trace.json").read_text())
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == 7
    for e in spans:  # the Trace Event Format's requirements for a complete event
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid"} <= e.keys()
        assert isinstance(e["ts"], float)
        assert e["dur"] >= 0
    assert [e["name"] for e in spans if e["pid"] == 1] == ["1F0", "1I0", "1W0", "all_reduce"]
    threads = [e for e in trace["traceEvents"] if e["name"] == "thread_name"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in threads}
    assert {names[e["pid"], e["tid"]] for e in spans} == {"compute", "dp"}
    first = next(e for e in spans if e["name"] == "0B0")
    assert (first["ts"], first["dur"]) == (2.5e6, 0.5e6)


def test_a_span_of_any_name_is_computing_unless_it_says_otherwise(tmp_path: Path) -> None:
    with hpnb.record.timeline() as recorder:
        with recorder.span("my forward"), recorder.span("layer 3"):
            time.sleep(0.01)
        with recorder.span("optimizer", microbatch=0):
            time.sleep(0.01)
        with recorder.span("shuffle", axis="dp"):
            pass
        with recorder.span("all_reduce"):
            pass
    tl = recorder.gather()
    assert {e.op for e in tl.events if e.is_compute} == {"my forward", "layer 3", "optimizer"}
    assert {e.op for e in tl.events if not e.is_compute} == {"shuffle", "all_reduce"}
    overlapping = [("outer", 0.0, 4.0), ("inner", 1.0, 2.0), ("next", 3.0, 6.0)]
    events = [Event(0, -1, op, -1, start, end) for op, start, end in overlapping]
    named = Timeline((*events, Event(0, -1, "sent", -1, 6.0, 8.0, bytes=1.0)))
    assert named.work(0) == 6.0  # what overlaps counts once
    assert named.bubble_fraction == pytest.approx(2 / 8)
    trace = json.loads(tl.to_chrome_trace(tmp_path / "trace.json").read_text())
    labels = [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert "my forward" in labels
    assert not [label for label in labels if "-1" in label]
    assert [label for label in labels if label.startswith("optimizer") and label.endswith(" 0")]


# --- memory ----------------------------------------------------------------------------------


def profile_a_step(steps: int = 1) -> tuple[MemoryProfile, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(32, 64)
    with hpnb.record.memory(model, optimizer) as recorder:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return recorder.profile(), model


def test_memory_by_category_is_exact_on_the_cpu() -> None:
    profile, model = profile_a_step()
    parameters = sum(p.nbytes for p in model.parameters())
    assert profile.peak_of("parameters") == parameters
    assert profile.peak_of("gradients") == parameters
    # AdamW keeps two moments a parameter, and a count of 4 bytes a tensor.
    assert profile.peak_of("optimizer") == 2 * parameters + 4 * 4
    # Saved: the input, the ReLU's result (twice, as one storage), and what square saves.
    assert profile.peak_of("activations") == 4 * (32 * 64 + 32 * 128 + 32 * 10)
    last = profile.samples[-1]
    assert (last.parameters, last.gradients, last.optimizer) == (parameters, parameters, 2 * parameters + 16)
    assert last.activations == 4 * 32 * 64  # only the batch, which the caller still holds
    assert profile.at_peak.total == profile.peak
    assert sum(getattr(profile.at_peak, name) for name in CATEGORIES) == profile.peak


def test_recording_memory_names_operators_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of all operators took as long as the rest of the recorder."""
    x, named = torch.ones(8, 8), []
    monkeypatch.setattr(torch._ops.OpOverload, "__str__", lambda op: named.append(op) or op._name)
    with hpnb.record.memory([], budget=1e9) as recorder:
        y = x @ x
        z = y @ y
    assert not named
    assert recorder.peak_operator == "after aten::mm"
    assert recorder.profile().peak == y.nbytes + z.nbytes


def test_a_block_inside_another_records_for_both() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(32, 64)
    with hpnb.record.memory(model, optimizer) as outer, hpnb.record.memory(model, optimizer) as inner:
        model(batch).square().mean().backward()
        optimizer.step()
    for name in CATEGORIES:
        assert outer.profile().peak_of(name) == inner.profile().peak_of(name) > 0, name
    assert outer.profile().peak == inner.profile().peak
    with hpnb.record.memory(model) as later:  # and what is over records nothing any more
        model(batch)
    assert later.profile().peak_of("activations") > 0


def test_nothing_is_kept_alive_by_being_watched() -> None:
    one, _ = profile_a_step(1)
    three, _ = profile_a_step(3)
    assert three.samples[-1].total == one.samples[-1].total
    assert three.samples[-1].temporary == one.samples[-1].temporary


def test_watching_does_not_change_what_is_computed() -> None:
    def train(watched: bool) -> torch.Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

        def step() -> None:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.arange(10.0, dtype=torch.float64).reshape(2, 5)).square().mean().backward()
                optimizer.step()

        if watched:
            with hpnb.record.memory(model, optimizer):
                step()
        else:
            step()
        return torch.cat([p.flatten() for p in model.parameters()])

    assert torch.equal(train(True), train(False))


def test_an_unknown_category_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="it has parameters, gradients, optimizer, activations, temporary"):
        MemoryProfile(()).peak_of("weights")


def test_gradients_set_by_hand_are_gradients_and_what_dies_later_is_not_recorded() -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    big = torch.ones(1000)
    with hpnb.record.memory(model, optimizer) as recorder:
        model.weight.grad = torch.ones(8, 8)  # as a split backward does, without a hook
        optimizer.step()
        optimizer.zero_grad()
        big = big + 1
    profile = recorder.profile()
    assert profile.peak_of("gradients") == 256
    assert profile.samples[-1].gradients == 0
    assert profile.samples[-1].temporary == 4000
    del big
    assert recorder.profile() == profile


def test_tensors_that_an_optimizer_lists_count_in_the_category_that_it_says() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hpnb.record.memory(model, optimizer) as recorder:
        masters, shard = torch.ones(100), torch.ones(10)
        vars(optimizer)["tensors_by_category"] = lambda: {"optimizer": [masters], "gradients": [shard]}
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert recorder.profile().samples[-1].optimizer == masters.nbytes == 400
    assert recorder.profile().samples[-1].gradients == shard.nbytes + 64


def test_a_storage_that_is_resized_counts_as_it_is() -> None:
    model = nn.Linear(4, 4, bias=False)
    with hpnb.record.memory(model) as recorder:
        x = torch.ones(100)
        x.untyped_storage().resize_(0)
        x.view(-1)  # seen again
        kept = torch.ones(5)
    assert recorder.profile().samples[-1].temporary == kept.nbytes
    assert recorder.profile().peak_of("temporary") == 400


def test_an_inplace_error_is_still_an_error_while_watched() -> None:
    layer = nn.Linear(3, 3)
    with hpnb.record.memory(layer):
        y = torch.sigmoid(layer(torch.ones(2, 3)))
        z = y.square()
        y.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_dtensors_are_counted_as_what_they_are_made_of(pool: Pool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def measure() -> tuple[float, int, int]:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Linear(8, 8, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        with hpnb.record.traffic() as t:
            whole = model.weight.redistribute(mesh, [Replicate()])
        with hpnb.record.memory(model) as recorder:
            whole.sum().backward()
        profile = recorder.profile()
        return t.total, profile.peak_of("parameters"), profile.peak_of("gradients")

    for sent, parameters, gradients in pool(2).run(measure):
        assert sent == 128  # an all-gather of 256 bytes over 2 ranks
        assert parameters == 128
        assert gradients == 128


def test_a_pipeline_is_recorded_as_its_stages(pool: Pool) -> None:
    def measure() -> tuple[int, int]:
        net = nn.Sequential(nn.Linear(8, 8, False), nn.Linear(8, 8, False))
        mesh = hpnb.Mesh(hpnb.Layout(pp=2))
        pipe = hpnb.Pipeline(net, mesh.pp, "1f1b", lambda outputs, _: outputs.mean())
        with hpnb.record.memory(pipe) as recorder:  # type: ignore[arg-type]
            pipe.step((torch.ones(8, 8),))
        profile = recorder.profile()
        return profile.peak_of("parameters"), profile.peak_of("gradients")

    assert pool(2).run(measure) == [(256, 256)] * 2


def test_likely_mistakes_with_memory_get_a_sentence() -> None:
    model = nn.Linear(4, 4)
    mistakes: list[tuple[tuple[object, ...], dict[str, object], str]] = [
        ((model.parameters(),), {}, "a Parameter is no model; record.memory takes a torch.nn.Module"),
        (("gpt2",), {}, "a str is no model"),
        ((model, model.parameters()), {}, "a generator is no optimizer"),
        ((model, torch.optim.Adam), {}, "the class Adam is no optimizer"),
        ((model,), {"budget": "1GB"}, "budget='1GB' is a text; give bytes"),
        ((model,), {"device": "gpu"}, "device='gpu' is not here; use 'cpu'"),
    ]
    for positional, named, sentence in mistakes:
        with (
            pytest.raises((TypeError, ValueError), match=re.escape(sentence)),
            hpnb.record.memory(*positional, **named),  # type: ignore[arg-type]
        ):
            pass


@pytest.mark.one_gpu
def test_memory_adds_up_to_the_allocators_peak_on_cuda() -> None:
    def measure() -> tuple[int, MemoryProfile, int]:
        device = hpnb.device()
        model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(512, 1024, device=device)

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        step()  # workspaces and optimizer state exist from now on
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated()
        with hpnb.record.memory(model, optimizer) as recorder:
            step()
        return peak, recorder.profile(), sum(p.nbytes for p in model.parameters())

    for peak, profile, parameters in hpnb.launch(measure, ranks=2, device="cuda", timeout=120):
        assert profile.peak == pytest.approx(peak, rel=0.01)
        assert parameters <= profile.peak_of("parameters") <= parameters + 512 * 4
        assert all(getattr(s, name) >= 0 for s in profile.samples for name in CATEGORIES)


@pytest.mark.one_gpu
def test_what_was_freed_on_cuda_is_not_temporary() -> None:
    def measure() -> MemoryProfile:
        model = nn.Linear(8, 8).to(hpnb.device())
        held = [torch.ones(1 << 27, dtype=torch.uint8, device=hpnb.device()) for _ in range(2)]
        with hpnb.record.memory(model) as recorder:
            torch.ones(1, device=hpnb.device())
            held.clear()
            torch.ones(1, device=hpnb.device())
        return recorder.profile()

    for profile in hpnb.launch(measure, ranks=2, device="cuda", timeout=120):
        assert profile.peak > 1 << 28
        assert profile.samples[-1].total < 1 << 26


@pytest.mark.gpu
def test_spans_on_cuda_are_of_the_device() -> None:
    def measure() -> Timeline:
        axis = Mesh(Layout(dp=hpnb.world_size())).dp
        x = torch.ones(1 << 20, device=hpnb.device())
        a = torch.ones(4096, 4096, device=hpnb.device())
        comm.all_reduce(x, axis)
        a @ a  # libraries are loaded on first use
        with hpnb.record.timeline() as recorder:
            with recorder.span("compute"):
                for _ in range(50 if axis.rank else 5):
                    a @ a
            comm.all_reduce(x, axis)
        return recorder.gather()

    tl = hpnb.launch(measure, ranks=2, device="cuda", timeout=120)[0]
    compute, reduce = ({e.rank: e for e in tl.events if e.op == op} for op in ("compute", "all_reduce"))
    assert compute[1].duration > 3 * compute[0].duration
    assert reduce[0].duration > reduce[1].duration
    assert abs(reduce[0].end - reduce[1].end) < 1e-3


def test_what_is_apart_and_what_waits_is_cut_out_of_the_spans_around_it() -> None:
    from hpnb.record.recorder import separate_compute, waiting

    with hpnb.record.timeline() as recorder, recorder.span("B", microbatch=2):
        with separate_compute():
            with waiting():
                pass
            with waiting():
                pass
    told = [(e.op, e.microbatch) for e in recorder.events()]
    assert sorted(told) == [("B", 2)] * 2 + [("compute", -1)] * 3
    by_start = sorted(recorder.events(), key=lambda e: e.start)
    assert [e.op for e in by_start] == ["B", "compute", "compute", "compute", "B"]
    assert all(a.end <= b.start for a, b in itertools.pairwise(by_start))


def test_traffic_counts_what_torch_distributed_does_not_see() -> None:
    from hpnb.record.traffic import count_send

    count_send("pp", 1.0, (0, 1))  # nobody counts
    with hpnb.record.traffic() as outer, hpnb.record.traffic() as inner:
        count_send("pp", 10.0, (0, 1))
    count_send("pp", 1.0, (0, 1))
    assert (outer.bytes["pp"], inner.calls["pp"], inner.messages[0].peer) == (10.0, 1, 1)
