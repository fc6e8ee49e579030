"""What notebook 04 needs: traffic by pairs, a step on nodes, a step along each axis, leaves, figures."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.text import Text

import hpnb
from hpnb import Layout, Mesh, comm, lesson, plot, theory
from hpnb.lesson import Exercise, check
from hpnb.lesson.exercises import vit_hybrid_parallel as notebook_04
from hpnb.lesson.figures import vit_hybrid as figures
from hpnb.lesson.programs import rank_traffic, vit_hybrid
from hpnb.lesson.programs.step_timing import Backward, time_backward
from hpnb.models import ViTSize
from hpnb.pipeline_parallel import schedules
from hpnb.placement import Cut, Placement
from hpnb.record import Event, Message, Timeline
from hpnb.theory import LINKS, REPLAY_LINK

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

AXES = ("dp", "pp", "tp")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPNB_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


# --- who sends to whom -------------------------------------------------------------------------------


def messages() -> list[Message]:
    """On a rank: an all-reduce along dp, a send down pp, something tiny, something among one rank."""
    mesh = Mesh(Layout(dp=2, pp=2, tp=1))
    with hpnb.record.traffic() as t:
        comm.all_reduce(torch.ones(1000), mesh.dp)
        comm.all_reduce(torch.ones(1), mesh.dp)
        comm.all_reduce(torch.ones(1000), mesh.tp)  # of one rank
        if mesh.pp.rank == 0:
            comm.send(torch.ones(500), mesh.pp, 1)
        else:
            comm.receive((500,), mesh.pp, 0)
    return list(t.messages)


def test_what_was_sent_falls_on_pairs_of_ranks() -> None:
    found = rank_traffic.recorded_traffic(hpnb.launch(messages, ranks=4, device="cpu"), least=1000)
    assert found == {
        (0, 2): {"dp": 4000.0}, (2, 0): {"dp": 4000.0}, (1, 3): {"dp": 4000.0}, (3, 1): {"dp": 4000.0},
        (0, 1): {"pp": 2000.0}, (2, 3): {"pp": 2000.0},
    }  # fmt: skip
    assert [rank_traffic.bytes_between_nodes(found, node) for node in (1, 2, 4)] == [20000, 16000, 0]


def test_a_ring_goes_on_to_the_next_of_its_group_and_a_pipeline_has_ends() -> None:
    ring = [[Message("tp", "all_reduce", 10.0 * (rank + 1), (0, 1, 2))] for rank in range(3)]
    assert rank_traffic.recorded_traffic(ring) == {
        (0, 1): {"tp": 10.0},
        (1, 2): {"tp": 20.0},
        (2, 0): {"tp": 30.0},
    }
    assert rank_traffic.predicted_traffic(Layout(tp=3), {"tp": 5.0}).keys() == {(0, 1), (1, 2), (2, 0)}
    assert rank_traffic.predicted_traffic(Layout(pp=3), {"pp": 5.0}).keys() == {
        (0, 1),
        (1, 2),
        (2, 1),
        (1, 0),
    }
    both = rank_traffic.predicted_traffic(Layout(dp=2, pp=2), {"dp": 1.0, "pp": 2.0})
    assert (both[0, 2], both[0, 1]) == ({"dp": 1.0}, {"pp": 2.0})


def test_a_step_on_nodes_is_made_of_the_links_that_its_axes_cross() -> None:
    job = rank_traffic.TransformerOnNodes(
        32, 4096, 5e5, 16, 4e14, 8, LINKS["NVLink 4"], LINKS["Ethernet 100 Gb"]
    )
    usual, worst = Layout(4, 2, 4), Layout(4, 2, 4, order=("tp", "pp", "dp"))
    assert [job.link(usual, axis).name for axis in AXES] == ["Ethernet 100 Gb", "NVLink 4", "NVLink 4"]
    assert [job.link(worst, axis).name for axis in AXES] == ["NVLink 4", "NVLink 4", "Ethernet 100 Gb"]
    parts = job.seconds(usual)
    assert parts["compute"] == pytest.approx(6 * job.parameters * 5e5 / 32 / 4e14)
    assert parts["bubble"] == pytest.approx((parts["compute"] + parts["tp"]) / 16)
    sent, p = job.sent(usual), job.parameters
    assert sent["dp"] == pytest.approx(2 * 3 / 4 * 2 * p / 8)
    assert sent["pp"] == pytest.approx(2 * 125000 * 4096)
    assert sent["tp"] == pytest.approx(4 * 16 * 2 * 3 / 4 * 2 * 125000 * 4096)
    assert job.seconds(worst)["tp"] > 20 * parts["tp"]
    alone = job.seconds(Layout(dp=2))
    assert alone["tp"] == alone["pp"] == alone["bubble"] == 0 < alone["dp"]
    assert job.states(Layout(pp=2, tp=4)) == pytest.approx(16 * p / 8)


# --- exercises ---------------------------------------------------------------------------------------


def findings(exercise: Exercise, answer: Any) -> list[str]:
    """What is off."""
    return [finding.text for finding in check(exercise, answer).findings if not finding.ok]


def sends_what_it_lacks(n: int, old: int, new: int) -> list[tuple[int, int, int, int]]:
    return [(old - 1, 0, 0, 1)]


@pytest.mark.parametrize(
    ("exercise", "answer", "words"),
    [
        (notebook_04.coordinates, lambda rank, sizes, order: rank, "rank 0 is at .*'dp': 0.*, you say 0"),
        (notebook_04.place_axes, lambda job: "dp", "'dp' does not name dp, pp and tp once each"),
        (
            notebook_04.place_axes,
            lambda job: ("tp", "pp", "dp"),
            "tp > pp > dp sends .* between nodes, the best",
        ),
        (notebook_04.reshard, lambda n, old, new: 3, "3 is no list of"),
        (notebook_04.reshard, lambda n, old, new: [(0, 1, 2)], "is no list of"),
        (notebook_04.reshard, lambda n, old, new: [], "rank 0 needs 0 to 6 and lacks row 3"),
        (notebook_04.reshard, lambda n, old, new: [(9, 0, 0, 1)], "names a rank that does not exist"),
        (notebook_04.reshard, sends_what_it_lacks, "rank 3 cannot send row 0; it has 9 to 12"),
    ],
)
def test_what_an_answer_lacks_is_said_in_numbers(exercise: Exercise, answer: Any, words: str) -> None:
    assert any(re.search(words, off) for off in findings(exercise, answer)), findings(exercise, answer)


def test_no_job_is_placed_by_bytes_alone_and_none_by_habit() -> None:
    assert check(notebook_04.place_axes, lambda task: task.best_order()).status == "passed"
    for order in permutations(AXES):
        assert check(notebook_04.place_axes, lambda job, order=order: order).status == "failed"
    by_bytes = check(notebook_04.place_axes, lambda job: sorted(job.sent, key=job.sent.get))
    assert by_bytes.status == "failed"


def test_records_of_faults_fall_all_and_differ_in_what_instruments_say() -> None:
    found = hpnb.launch(notebook_04.records, ranks=4, device="cpu", timeout=120)[0]
    said = {fault: run for run, fault in found}
    assert sorted(said) == ["correct", "not reduced", "same samples", "swapped"]
    assert all(run.losses[-1] < run.losses[0] for run in said.values())
    assert said["correct"].distances == {"dp": 0.0, "tp": 0.0} == said["same samples"].distances
    assert said["swapped"].distances["dp"] > 1e-6 < said["not reduced"].distances["dp"]
    assert [said[f].same_samples["dp"] for f in ("correct", "swapped", "not reduced", "same samples")] == [
        False, False, False, True,
    ]  # fmt: skip
    assert all(run.same_samples["tp"] for run in said.values())
    correct, swapped = said["correct"].collectives, said["swapped"].collectives
    assert (correct["dp"], correct["tp"]) == (swapped["tp"], swapped["dp"])
    assert said["not reduced"].collectives["dp"] == 0


# --- on ranks ----------------------------------------------------------------------------------------

_SMALL = ViTSize(hidden=32, layers=4, heads=4, mlp=64, patch=8, image=16)


@pytest.mark.slow  # notebook 04 records them, too
def test_a_step_along_each_axis_sends_what_is_predicted() -> None:
    card = lesson.MachineCard("a machine", "cpu", 2, 1e-4, 1e9, 1e11, "float32", (1,), (1.0,))
    with hpnb.Ranks(2, device="cpu", timeout=120) as ranks:
        schedule = schedules.make("1f1b", 2, 4)
        steps = vit_hybrid.record_axes(ranks, _SMALL, 8, torch.float32, schedule, 8)
    gradient, hidden, layers = 4.0 * _SMALL.parameters(classes=3), 4.0 * 8 * 5 * 32, 4
    assert steps.sent == {"dp": gradient, "pp": hidden, "tp": 4 * layers * hidden}
    slow = replace(card.link, bandwidth=1e5)
    fast_steps, slow_steps = steps.simulate(card.link), steps.simulate(slow)
    assert list(steps.seconds) == list(fast_steps) == ["dp", "pp", "tp"]
    assert all(fast_steps[axis] < slow_steps[axis] for axis in AXES)
    all_reduces = 4 * layers * theory.seconds("all_reduce", hidden, 2, slow)
    assert slow_steps["dp"] > theory.seconds("all_reduce", gradient, 2, slow) * 0.99
    assert slow_steps["tp"] == pytest.approx(all_reduces, rel=0.2)
    vit_hybrid.add_to_ledger("a ViT", card, steps, steps.sent, steps.seconds)
    rows = lesson.ledger.rows()
    assert [row.layout for row in rows] == [str(Layout(**{axis: 2})) for axis in AXES]
    assert all(row.quantities["sent (B)"][0] == row.quantities["sent (B)"][1] for row in rows)


def test_steps_of_ranks_that_share_a_gpu_are_replayed_without_the_turns_of_others() -> None:
    """A clock would say 9 s: three turns of each rank, one after the other."""
    events = []
    for rank, turns in enumerate(((0, 5), (3, 8))):
        first, second = turns
        events += [
            Event(rank, -1, "F", -1, first, first + 0.5),
            Event(rank, -1, "all_reduce", -1, first + 0.5, 9 - 1, "tp", 1e6, (0, 1)),
            Event(rank, -1, "I", -1, second + 0.2, second + 1.0),
        ]
    tp = Timeline(tuple(events), "measured by turns")
    alone = Backward(0.5, 1.3, (1.3,), (1e6,))
    steps = vit_hybrid.AxisSteps(
        {"dp": alone.on(REPLAY_LINK, 2), "pp": tp, "tp": tp}, alone, {}, schedules.make("1f1b", 2, 4), 1.0
    )
    reduce = theory.seconds("all_reduce", 1e6, 2, REPLAY_LINK)
    assert steps.source == "replayed"
    assert tp.makespan == pytest.approx(9.0)
    assert steps.seconds["tp"] == pytest.approx(0.5 + reduce + 0.8)
    assert steps.seconds["dp"] == pytest.approx(1.3 + reduce)


class CountedTurns:
    """How many turns are taken on a GPU, turns inside them not counted."""

    def __init__(self) -> None:
        self.depth = self.count = 0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self.count += not self.depth
        self.depth += 1
        yield
        self.depth -= 1

    taking = released = contextlib.nullcontext


def test_a_backward_alone_is_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two turns other ranks compute, and the time until the end would contain theirs."""
    turns = CountedTurns()
    monkeypatch.setattr("hpnb.record.recorder.gpu_turns", lambda: turns)
    model = torch.nn.Linear(4, 4)
    alone = time_backward(model, lambda: model(torch.ones(2, 4)).sum(), repeats=2)
    assert turns.count == 3  # the warm-up and two repeats
    assert 0 < alone.forward < alone.end


def distances_along_the_axes() -> tuple[float, float]:
    mesh = Mesh(Layout(dp=2, tp=2))
    copies = [torch.full((3,), 1.0 + 0.5 * mesh.tp.rank), torch.ones(2)]
    return notebook_04.largest_distance(copies, mesh.dp), notebook_04.largest_distance(copies, mesh.tp)


def test_copies_are_compared_along_one_axis() -> None:
    for along_dp, along_tp in hpnb.launch(distances_along_the_axes, ranks=4, device="cpu"):
        assert along_dp == 0
        assert along_tp == pytest.approx((3 * 0.25 / 5) ** 0.5)


def batches_of_a_replica(leaves: Any) -> list[list[int]]:
    dp = Mesh(Layout(dp=2)).dp
    return [batch["labels"].tolist() for batch in vit_hybrid.leaf_batches(leaves, 8, dp, epochs=2)]


def test_replicas_get_halves_of_the_batches_of_one_process() -> None:
    leaves = vit_hybrid.in_memory(hpnb.data.beans("train", size=20, image_size=32, kind="generated"))
    full = [batch["labels"].tolist() for batch in vit_hybrid.leaf_batches(leaves, 8, epochs=2)]
    halves = hpnb.launch(batches_of_a_replica, leaves, ranks=2, device="cpu")
    assert [a + b for a, b in zip(*halves, strict=True)] == full
    assert len(full) == 4
    weights = hpnb.models.vit(vit_hybrid.SMALL, classes=3, dtype=torch.float64).state_dict()
    loss, accuracy = vit_hybrid.evaluate(vit_hybrid.SMALL, weights, leaves)
    assert 0 < loss < 3
    assert 0 <= accuracy <= 100


# --- figures -----------------------------------------------------------------------------------------


def test_an_atlas_has_a_square_for_each_pair_and_says_what_crosses() -> None:
    traffic = rank_traffic.predicted_traffic(Layout(2, 2, 2), {"dp": 3e6, "pp": 2e3, "tp": 9e6})
    fig = figures.atlas({"a": traffic, "b": traffic}, 4, {"a": {"compute": 1.0, "tp": 0.5}}, title="t")
    (squares,) = [c for c in fig.axes[0].collections if c.get_label() == "bytes"]
    assert len(squares.get_paths()) == len(traffic) == 24
    words = [text.get_text() for text in fig.axes[0].texts]
    assert {axis: words.count(axis) for axis in AXES} == {"dp": 8, "pp": 8, "tp": 8}
    assert fig.axes[0].get_xlabel() == "receiver\n24.0 MB between nodes"
    faces = [tuple(color) for color in squares.get_facecolor()]
    assert len(set(faces)) == 3
    assert len(fig.axes) == 3  # the bar
    plain = figures.atlas({"a": traffic}, 4, text=False)
    assert not [t for t in plain.axes[0].texts if t.get_text() in AXES]


def test_orders_are_bars_in_units_of_compute_and_a_long_one_is_cut() -> None:
    steps = {"a": {"compute": 2.0, "dp": 0.5}, "b": {"compute": 2.0, "tp": 6.0}}
    fig = figures.orders(steps, 1.3, "t")
    (ax,) = fig.axes
    ends = {
        (c.get_label(), round(path.vertices[:, 1].min())): path.vertices[:, 0].max()
        for c in ax.collections
        for path in c.get_paths()
    }
    assert ends["dp", 0] == pytest.approx(1.25)
    assert ends["tp", 1] == pytest.approx(1.6)
    assert [text.get_text()[:4] for text in ax.texts] == ["1.25", "4.00"]
    (goal,) = [line for line in ax.get_lines() if line.get_label() == "goal"]
    assert set(goal.get_xdata()) == {1.3}
    assert fig.get_label() == "a: 1.25; b: 4.00"


def test_ratios_of_a_step_compare_what_they_say() -> None:
    ratio, near = vit_hybrid.record_ratios({"dp": 1.0}, {"dp": 4.0}, {"dp": [2.0, 12.0]})
    assert (ratio, near) == ({"dp": 4.0}, {"dp": 0.5})


def test_seconds_that_a_slower_link_adds_do_not_depend_on_what_else_a_step_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(vit_hybrid, "record", lambda key, value, unit="": recorded.update({key: value}))
    simulated = {"tp": [102.0, 104.0, 122.0], "dp": [2.0, 3.0, 12.0]}
    added, middle = vit_hybrid.record_added(simulated)
    assert added == {"dp": 10.0, "tp": 20.0}
    assert middle == {"dp": 1.0, "tp": 2.0}
    assert recorded["04.added-least"] == "dp"


def test_what_is_not_compute_is_compared_along_pp_and_tp(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(vit_hybrid, "record", lambda key, value, unit="": recorded.update({key: value}))
    busy, predicted = {"pp": 4.0, "tp": 6.0}, {"pp": 5.0, "tp": 8.0}
    simulated, measured = {"pp": [6.0, 9.0], "tp": [11.0, 99.0]}, {"pp": 7.0, "tp": 9.0}
    off = vit_hybrid.record_rest(3.0, 1.0, busy, predicted, simulated, measured)
    assert off == {"pp": 1.0, "tp": -2.0}
    assert recorded["04.rest.tp.simulated"] == {"step": 11.0, "rest": 5.0}
    assert recorded["04.rest.pp.predicted"] == {"step": 5.0, "rest": 2.0}
    assert recorded["04.rest.signs"] == (
        "Along tp, compute is 3.00 s longer than predicted and the rest 2.00 s shorter."
        " Along pp, compute is 1.00 s longer than predicted and the rest 1.00 s longer."
        " Along tp the two errors partly cancel in the ratio."
    )
    vit_hybrid.record_rest(3.0, 1.0, busy, predicted, simulated, {"pp": 7.0, "tp": 12.0})
    assert "cancel" not in recorded["04.rest.signs"]


@pytest.mark.parametrize("source", ["measured", "measured by turns"])
def test_recorded_steps_say_who_computes_longer_and_where_the_link_is_from(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(vit_hybrid, "record", lambda key, value, unit="": recorded.update({key: value}))
    events = tuple(Event(rank, -1, "F", -1, 0.0, 2.0 + rank) for rank in range(2))
    timelines = {axis: Timeline(events, source if axis == "tp" else "measured") for axis in AXES}
    alone = Backward(0.5, 1.5, (1.0,), (8.0,))
    steps = vit_hybrid.AxisSteps(
        timelines, alone, dict.fromkeys(AXES, 1.0), schedules.make("1f1b", 2, 2), 8.0
    )
    card: Any = SimpleNamespace(latency=1e-5, bandwidth=1e9)
    assert vit_hybrid.record_steps(card, steps) == dict.fromkeys(AXES, 3.0)
    assert recorded["04.others"] == 1.0  # rank 0's 2 s over 2 microbatches
    assert recorded["04.source"] == ("measured" if source == "measured" else "measured, tp replayed")
    others = {axis: Timeline(events, "replayed from measured CPU time") for axis in ("dp", "pp")}
    assert replace(steps, timelines={**timelines, **others}).source != "measured"
    assert set(steps.by_source) == ({"measured"} if source == "measured" else {"measured", "replayed"})
    assert recorded["04.link"]["from"] == (
        "measured as in notebook 00" if source == "measured" else "assumed"
    )


def test_what_each_rank_holds_is_drawn_as_it_is_placed() -> None:
    layout = Layout(dp=2, pp=2)
    norm = Placement("vit.layers.0.layernorm_before.weight", (4,))
    halves = [
        Placement("vit.layers.0.mlp.fc1.weight", (8, 4), (Cut("tp", 0, ((4, 8),)),)),
        Placement("vit.layers.0.mlp.fc2.weight", (4, 8), (Cut("tp", 1, ((4, 8),)),)),
    ]
    first, second = [norm, *halves], [Placement("classifier.weight", (3, 4))]
    ranks = [vit_hybrid.RankParts((r // 2, r // 2 + 1, 2), second if r % 2 else first) for r in range(4)]
    fig = figures.stored_parts(ranks, layout)
    (ax,) = fig.axes
    drawn = {c.get_label(): [p.get_extents() for p in c.get_paths()] for c in ax.collections}
    up, down = drawn["shard along tp"][:2]
    everywhere = drawn["on other ranks"]
    full = next(box for box in everywhere if box.x1 == up.x1 and box.y1 == up.y1)
    assert (up.width, up.height) == pytest.approx((full.width / 2, full.height))  # outputs across
    assert (down.width, down.height) == pytest.approx((full.width, full.height / 2))  # inputs down
    assert len(drawn["shard along tp"]) == 4
    assert len(drawn["in full"]) == 4  # two norms, two heads
    assert len(drawn["samples of the replica"]) == 4
    assert "rank 3: dp 1, pp 1, tp 0, samples 1 to 1, 12 weights" in fig.get_label()


def _hold(layout: Layout) -> tuple[int, vit_hybrid.RankParts]:
    return hpnb.rank(), vit_hybrid.stored_parts(layout)


def test_ranks_hold_their_stage_and_shards() -> None:
    held = dict(hpnb.launch(_hold, Layout(pp=2, tp=2), ranks=4, device="cpu"))
    names = [{p.name for p in held[r].placements} for r in range(4)]
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert not names[0] & names[2]
    rows = [
        p.cuts[0].ranges for r in (0, 1) for p in held[r].placements if p.name.endswith("0.mlp.fc1.weight")
    ]
    assert rows == [((0, 96),), ((96, 192),)]
    assert held[3].samples == (0, 32, 32)


def test_guessing_is_as_good_as_the_most_common_class() -> None:
    leaves: Any = [{"labels": label} for label in (0, 1, 1, 2)]
    assert vit_hybrid.record_guess(leaves) == 50


def test_lines_of_axes_over_a_slower_link() -> None:
    fig = figures.slower_link(
        [1, 10, 100], {"dp": [0.1, 0.1, 0.9], "tp": [0.1, 0.3, 2.0]}, {"dp": 0.11, "tp": 0.1}
    )
    lines = {line.get_label(): line for line in fig.axes[0].get_lines()}
    assert list(lines["tp"].get_ydata()) == [0.1, 0.3, 2.0]  # s
    dots = {axis: lines[f"{axis} measured"].get_xydata()[0] for axis in ("dp", "tp")}
    assert dots["dp"][1] == 0.11
    assert dots["dp"][0] < dots["tp"][0] < 1  # beside each other, left of the curves
    assert {t.get_text() for t in fig.axes[0].texts} == {"dp  +800 ms", "tp  +1.90 s"}


def test_a_loss_curve_takes_the_colour_of_its_layout() -> None:
    fig = plot.by_layout([("dp 2", [3.0, 2.0]), ("tp 2", [1.5, 1.0])], [3.0, 2.0, 1.5, 1.0])
    lines = {line.get_label(): line for line in fig.axes[0].get_lines()}
    assert list(lines["tp 2"].get_ydata()) == [2.0, 1.5, 1.0]  # from the last step before
    assert list(lines["tp 2"].get_xdata()) == [2, 3, 4]
    assert lines["dp 2"].get_color() != lines["tp 2"].get_color()
    assert list(lines["one process"].get_ydata()) == [3.0, 2.0, 1.5, 1.0]
    assert any("in the colour of its layout" in text.get_text() for text in fig.findobj(Text))
    one = plot.by_layout([("killed", [3.0, 2.0]), ("resumed", [1.5])], run="leg by leg")  # of one layout
    assert any("leg by leg" in text.get_text() for text in one.findobj(Text))
    assert not any("in the colour of its layout" in text.get_text() for text in one.findobj(Text))
    for legs, alone, words in (([], [], "no series"), ([("a", [1.0])], [1.0, 2.0], "one process has 2"),
                               ([("a", [float("nan")])], [], "not finite")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            plot.by_layout(legs, alone)
