"""Explorers: knobs, pictures and challenges; what each notebook's explorer reads."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text

import hpnb
from hpnb import lesson, plot, theory
from hpnb.lesson.explorers.knobs import Knobs
from hpnb.lesson.explorers.layout_choice import ANSWER as ANSWER_08
from hpnb.lesson.explorers.overlapped_backward import GRADIENT_BYTES, PARAMETERS
from hpnb.lesson.explorers.overlapped_backward import KNOBS as KNOBS_01
from hpnb.lesson.explorers.sharded_step import gpt_shape
from hpnb.lesson.explorers.tensor_modes import ANSWER as ANSWER_03
from hpnb.lesson.explorers.tensor_modes import block_timeline, mode_readings
from hpnb.lesson.tables import number
from hpnb.mesh import AXES
from hpnb.models import SIZES
from hpnb.pipeline_parallel import schedules

# --- an explorer -------------------------------------------------------------------------------------

drawn: list[bool] = []


def sketch(ranks: int, bandwidth: float, mode: str) -> tuple[dict[str, Any], Callable[[bool], Any]]:
    if mode == "none":
        raise ValueError("mode 'none' moves nothing")
    if mode == "bug":
        raise KeyError("oops")

    def draw(fast: bool) -> Any:
        fig, (ax,) = hpnb.plot.new_figure([0.6], title=f"{ranks} ranks")
        ax.plot([0, ranks], [0, bandwidth])
        drawn.append(fast)
        return fig, f"a line to {ranks} & more"

    return {"time (s)": ranks / bandwidth, "odd": ranks % 2 == 1}, draw


KNOBS: Knobs = {
    "ranks": lesson.Slider(2, 8, 4),
    "bandwidth": lesson.Slider(1e3, 1e6, 2e3, log=True, unit="B/s"),
    "mode": lesson.Choice(["ring", "none", "bug"], "ring"),
}
QUICK = lesson.Challenge("Under 1 ms.", lambda at: at["time (s)"] < 1e-3)


def sketched() -> lesson.Explorer:
    return lesson.Explorer(KNOBS, sketch, QUICK, {"bandwidth": 1e6}, ("ranks", "time (s)"))


def move(shown: lesson.Explorer, **values: Any) -> None:
    """Move knobs as a reader does, one after the other."""
    for name, value in values.items():
        shown.controls[name].value = value


def meets(shown: lesson.Explorer, **values: Any) -> bool:
    """Whether the challenge is met with these knobs elsewhere."""
    return shown.challenge.met(shown.read(**values))


def test_an_explorer_follows_its_knobs() -> None:
    shown = sketched()
    first = shown.image.value
    assert shown.values == {"ranks": 4, "bandwidth": 2e3, "mode": "ring"}
    assert bytes(first).startswith(b"\x89PNG")
    assert shown.readings == {"time (s)": 0.002, "odd": False}
    assert "time <b>2.00 ms</b> · odd <b>no</b>" in shown.reading.value
    assert "a line to 4 &amp; more" in shown.reading.value
    drawn.clear()
    assert shown.read(ranks=6)["time (s)"] == 0.003
    assert drawn == []  # reading alone draws nothing
    move(shown, ranks=3)
    assert shown.readings["time (s)"] == 0.0015
    assert shown.image.value != first
    assert drawn == [False]  # in full, where no event loop could do so later
    move(shown, ranks=4)
    assert shown.image.value == first


def test_a_challenge_is_judged_at_every_setting() -> None:
    shown = sketched()
    assert shown.status.value == "<div>Challenge: Under 1 ms: <b>open</b></div>"
    assert not shown.solved
    move(shown, bandwidth=1e6)
    assert shown.status.value == "<div>Challenge: Under 1 ms: <b>met</b></div>"
    move(shown, bandwidth=1e3)
    assert "<b>open</b> (but met before)" in shown.status.value
    assert shown.solved


def test_an_error_while_moving_is_one_sentence_under_the_last_good_picture() -> None:
    shown = sketched()
    first = shown.image.value
    move(shown, mode="none")
    assert "mode &#x27;none&#x27; moves nothing" in shown.reading.value
    assert shown.image.value == first
    move(shown, mode="bug")
    assert "KeyError: &#x27;oops&#x27;" in shown.reading.value
    move(shown, mode="ring")
    assert "2.00 ms" in shown.reading.value
    still = {**KNOBS, "mode": lesson.Choice(["none"], "none")}
    with pytest.raises(ValueError, match="moves nothing"):  # at the first setting it is the author's
        lesson.Explorer(still, sketch, QUICK, {}, ("ranks", "time (s)"))


def test_stops_of_a_slider_are_round_and_hold_its_ends_and_its_value() -> None:
    assert lesson.Slider(1, 100, 3, log=True).stops[:8] == (1, 2, 3, 4, 5, 6, 8, 10)
    assert lesson.Slider(1e-6, 1e-5, 2e-6, log=True).stops[:4] == (1e-6, 1.3e-6, 1.6e-6, 2e-6)
    assert lesson.Slider(1, 256, 4, step=0.30103, log=True).stops == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert lesson.Slider(0.0, 1.0, 0.33, step=0.25).stops == (0.0, 0.25, 0.33, 0.5, 0.75, 1.0)


def test_an_explorer_in_a_kernel_moves_coarsely_then_in_full(tmp_path: Path) -> None:
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook

    from hpnb.lesson.pages.execute import execute

    cells = [
        "import asyncio, hpnb\nfrom hpnb import lesson\n"
        "def readings(ranks):\n"
        "    def draw(fast):\n"
        "        calls.append(fast)\n"
        "        fig, (ax,) = hpnb.plot.new_figure([0.6], title=f'{ranks} ranks')\n"
        "        return fig, f'{ranks} ranks'\n"
        "    return {'ranks': ranks}, draw\n"
        "calls = []\n"
        "shown = lesson.Explorer(\n"
        "    {'ranks': lesson.Slider(2, 8, 4)}, readings,\n"
        "    lesson.Challenge('Five.', lambda at: at['ranks'] == 5),\n"
        "    {'ranks': 5}, ('ranks', 'ranks')).display()",
        "first = shown.image.value; calls.clear()\n"
        "slider = shown.widget.children[0].children[0]\n"
        "slider.value = 5; slider.value = 6\n"
        "coarse, seen = shown.image.value, list(calls)\n"
        "await asyncio.sleep(0.6)\n"
        "print(seen, calls, coarse != first, shown.image.value != coarse, shown.readings)",
        "def f(x): ...\n"
        "here = lesson.banner(2)\nlesson.check(lesson.Exercise('00.1', 'f', 1, lambda f: []), f)",
        "print([v.status for v in _oh.values() if hasattr(v, 'status') and hasattr(v, 'findings')])",
    ]
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in cells]), tmp_path / "a.ipynb")
    assert execute(tmp_path / "a.ipynb", tmp_path / "b.ipynb") is None
    first, second, third, fourth = [c.outputs for c in nbformat.read(tmp_path / "b.ipynb", 4).cells]
    view, static = [out.data for out in first]
    assert "application/vnd.jupyter.widget-view+json" in view
    assert view["text/plain"] == "An explorer; its knobs are ranks. Run the notebook to move them."
    assert '<img alt="As it opens: 4 ranks Answer, ranks 5: 5 ranks"' in static["text/html"]
    assert second[0].text == "[True, True] [True, True, False] True True {'ranks': 6}\n"
    assert "<table" in third[0].data["text/html"]
    assert [out.output_type for out in third] == ["display_data", "stream"]  # nothing is shown twice
    assert fourth[0].text == "['not yet']\n"
    assert json.dumps(static).count(str(tmp_path)) == 0


# --- the explorers of the notebooks ------------------------------------------------------------------

GOOD_03 = ANSWER_03
GOOD_08 = ANSWER_08

# {explorer: changes of its answer after which the challenge is not met}
CHALLENGES: dict[str, list[dict[str, Any]]] = {
    "all_reduce_cost": [
        {"algorithm": "ring"},
        {"algorithm": "tree"},
        {"latency": 5.0},
        {"bandwidth": 500.0},
        {"ranks": 32},
    ],
    "overlapped_backward": [{"ranks": 63}, {"matmul": 320}, {"tokens": 51000}, {"link": "NVLink 4"}],
    "pipeline_bubble": [{"transfer": 0.0}, {"weight_grad": 0.5}, {"microbatches": 13}, {"ranks": 3}],
    "tensor_modes": [{"link": "NVLink 4"}, {"ranks": 4}, {"hidden": 12288}],
    "layouts_on_nodes": [{"between": "InfiniBand NDR"}, {"node": 16}, {"dp": 2}],
    "sharded_step": [{"stage": 2, "sequences": 4}, {"stage": 2, "recompute": 1.0}, {"recompute": 0.0}],
    "uneven_layers": [{"head": 4.4}, {"ranks": 3}, {"microbatches": 9}],
    "kept_by_rank": [{"tokens": 4096}, {"ranks": 4}],
    "layout_choice": [{"zero": 0}, {"cap": 80}, {"tp": 2}],
    "cluster_layouts": [
        {"batch": 512},
        {"recompute": "yes"},
        {"zero": 1, "batch": 512},
        {"node": 16},
        {"batch": 9216},
    ],
    "ring_or_ulysses": [
        {"sequence": 32_768},
        {"kv_heads": 16},
        {"kv_heads": 4},
        {"cp": 16},
        {"link": "NVLink 4"},
    ],
    "expert_layer": [{"experts": 32}, {"ep": 8}, {"ep": 2}, {"imbalance": 1.3}, {"link": "NVLink 4"}],
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CHALLENGES)
def test_a_challenge_is_hard_and_can_be_met(name: str) -> None:
    with pytest.MonkeyPatch.context() as on_the_way:  # pictures are drawn, and only the last becomes a file
        on_the_way.setattr(plot, "png", lambda figure, **_: b"")
        shown = getattr(lesson.explorers, name)()
        assert not shown.solved
        for change in CHALLENGES[name]:
            assert not meets(shown, **{**shown.answer, **change}), change
        move(shown, **shown.answer)
    assert shown.solved
    shown._redraw_or_raise(fast=False)
    assert bytes(shown.image.value).startswith(b"\x89PNG")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CHALLENGES)
def test_without_widgets_opening_trade_off_and_answer_are_shown(name: str) -> None:
    shown = getattr(lesson.explorers, name)()
    figure, alt = shown.static_figure()
    headings = [text.get_text() for text in figure.texts]
    assert len(headings) == len(figure.axes) == 3
    assert all(
        str(value) in headings[2].replace(",", "")
        for value in shown.answer.values()
        if isinstance(value, str)
    )
    assert alt.startswith("As it opens: ")
    assert "Answer" in alt
    assert not shown.solved  # nothing has moved
    assert len(plot.png(figure)) < 150_000
    knob, reading = shown.trade
    assert reading in shown.readings
    assert knob in shown.values


def test_every_notebook_has_its_explorer() -> None:
    assert set(CHALLENGES) == set(lesson.explorers.__all__)


def titles_of(shown: lesson.Explorer, **values: Any) -> list[str]:
    """The texts of the figure at a setting."""
    figure = shown._evaluate(**{**shown.values, **values})[1](False)[0]
    return [" ".join(text.get_text().split()) for text in figure.findobj(Text)]


def test_notebook_01_wants_buckets_of_one_size_only() -> None:
    shown = lesson.explorers.overlapped_backward()
    sizes = (25, 32, 50, 63, 75, 100, 160, 1000)
    assert [size for size in sizes if meets(shown, tokens=50_000, bucket=size)] == [50, 63, 75]
    assert 50_000 in KNOBS_01["tokens"].stops  # type: ignore[union-attr]
    assert SIZES["l16"].parameters(classes=3) == PARAMETERS
    nbytes = GRADIENT_BYTES / 2**20
    for size, tokens, count in ((25, 10_000, 24), (50, 50_000, 12)):
        title = " ".join(titles_of(shown, bucket=size, tokens=tokens))
        assert f"{tokens:,} tokens" in title
        assert f"{count} buckets of {nbytes / count:.1f} MiB" in title


def test_notebook_02_opens_on_the_longest_warm_up_and_wants_a_trade() -> None:
    shown = lesson.explorers.pipeline_bubble()
    assert shown.readings["bubble of ranks × makespan (%)"] == pytest.approx(12.1, abs=0.05)
    assert shown.readings["of the longest span (%)"] == pytest.approx(2.44, abs=0.005)
    counts = {"dualpipe-v": (8, 13)}  # the fewest microbatches that it takes
    settings = [(name, m) for name in schedules.NAMES for m in range(*counts.get(name, (1, 13)))]
    good = [(name, m) for name, m in settings if meets(shown, schedule=name, microbatches=m)]
    assert good == [("zb-h1", 12)]
    move(shown, schedule="dualpipe-v", ranks=8, microbatches=8)
    assert "needs two microbatches a rank" in shown.reading.value


def test_notebook_03_says_what_theory_says_and_no_batch_helps_1d() -> None:
    shown = lesson.explorers.tensor_modes()
    block, link = theory.Block(8192, 64, 2048, 16), theory.LINKS["NVLink 4"]
    took = theory.block_seconds(block, "2d", 16, link, 400e12)
    assert shown.readings["compute / sending"] == took.compute / took.communication
    assert shown.readings["sent (B)"] == theory.block_sent(block, "2d", 16).bytes()
    assert shown.read(mode="2.5d")["sent (B)"] == theory.block_sent(block, "2.5d", 16, 4).bytes()
    kept = 16 * block.parameters / 16 + theory.activation_bytes(block, "1d", 16, 1, True)
    assert shown.read(mode="1d+sp")["kept and states (B)"] == kept
    for mode, ranks in (("1d", 16), ("1d+sp", 16), ("3d", 64)):
        taken = theory.block_seconds(block, mode[:2], ranks, link, 400e12, 1, mode == "1d+sp")
        assert shown.read(mode=mode, ranks=ranks)["block (s)"] == pytest.approx(taken.total)
    settings = itertools.product(("1d", "1d+sp", "2d", "2.5d"), (1, 8, 64))
    good = [(m, b) for m, b in settings if meets(shown, **{**GOOD_03, "mode": m, "batch": b})]
    assert good == [("2d", 8)]
    states = 16 * block.parameters / 16
    for mode, stays in (("2d", 1.34e9), ("1d", states + theory.activation_bytes(block, "1d", 16))):
        headings = [title for title in titles_of(shown, mode="2d") if title.startswith(mode)]
        assert len(headings) == 1
        assert f"keeps {number(stays, 'B')} a rank" in headings[0]
    move(shown, mode="2d", ranks=8)
    assert "4 or 9" in shown.reading.value


@pytest.mark.parametrize(("mode", "ranks"), [("1d", 8), ("1d+sp", 8), ("2d", 16), ("2.5d", 8), ("3d", 8)])
def test_notebook_03_draws_all_that_a_block_sends(mode: str, ranks: int) -> None:
    readings, _ = mode_readings(mode, ranks, 1024, 256, 8, "PCIe 5 x16")
    tl = block_timeline(theory.Block(1024, 8, 256, 8), mode, ranks, theory.LINKS["PCIe 5 x16"])
    assert sum(e.bytes for e in tl.events if not e.is_compute) == pytest.approx(readings["sent (B)"])
    assert tl.makespan == pytest.approx(readings["block (s)"])


def test_notebook_04_wants_the_pipeline_outside() -> None:
    shown = lesson.explorers.layouts_on_nodes()
    orders = [" > ".join(order) for order in itertools.permutations(AXES)]
    assert shown.readings["step (s)"] > 5 * min(shown.read(order=order)["step (s)"] for order in orders)
    sizes = [
        (32, 1, 1),
        (8, 4, 1),
        (8, 2, 2),
        (4, 8, 1),
        (4, 4, 2),
        (4, 2, 4),
        (4, 1, 8),
        (2, 4, 4),
        (2, 2, 8),
    ]
    settings = itertools.product(sizes, orders)
    good = {
        (dp, pp, tp, order.split(" > ")[0])
        for (dp, pp, tp), order in settings
        if meets(shown, dp=dp, pp=pp, tp=tp, order=order)
    }
    assert good == {(4, 4, 2, "pp")}
    move(shown, dp=16, pp=4, tp=2)
    assert "16 x 4 x 2 are 128 ranks; 2 to 64 can be drawn" in shown.reading.value


@pytest.mark.parametrize("billions", [0.1, 1.5, 13.0, 175.0])
def test_notebook_05_makes_models_of_the_size_that_is_asked_for(billions: float) -> None:
    layers, hidden = gpt_shape(billions)
    assert 0.85 <= 12 * layers * hidden**2 / (billions * 1e9) <= 1.2
    assert hidden % 128 == 0


def test_notebook_06_opens_on_the_uniform_cut_and_no_pipeline_beats_its_head() -> None:
    shown = lesson.explorers.uneven_layers()
    assert shown.readings["bubble (%)"] == pytest.approx(44.0, abs=0.05)
    settings = itertools.product(("uniform", "by parameters", "by time"), schedules.NAMES)
    good = [(cut, name) for cut, name in settings if meets(shown, cut=cut, schedule=name)]
    assert good == [("by time", "dualpipe-v")]
    most = (24 + 4.5 + 0.1) / 4.5
    for ranks in (6, 8):
        read = shown.read(head=4.5, ranks=ranks, cut="by time", microbatches=32, schedule="zb-h2")
        assert read["as fast as so many devices"] <= most


def test_notebook_07_wants_five_ranks_sequence_parallelism_and_recomputed_attention() -> None:
    shown = lesson.explorers.kept_by_rank()
    settings = itertools.product((4, 5, 8), ("replicated", "sharded"), ("nothing", "attention", "blocks"))
    good = [s for s in settings if meets(shown, tokens=8192, ranks=s[0], between=s[1], recomputed=s[2])]
    assert good == [(5, "sharded", "attention")]
    with pytest.raises(ValueError, match="5 heads cannot be split over 8 ranks"):
        shown.read(heads=5, ranks=8)


def test_notebook_08_says_what_it_draws() -> None:
    titles = titles_of(lesson.explorers.layout_choice(), **GOOD_08)
    assert any(title.startswith("predicted · GPT-2 XL on 32 ranks") for title in titles)
    assert "predicted; with stages, microbatches of 2 unless named" in titles  # without, there is one


def test_notebook_09_reads_the_layout_that_meets_its_challenge() -> None:
    at = lesson.explorers.cluster_layouts().read(batch=2304, recompute="no")
    assert at["MFU (%)"] == pytest.approx(35.4, abs=0.05)
    assert at["layout"] == "dp 16 x pp 16 x tp 8"
    assert at["memory (B)"] == pytest.approx(66e9, rel=0.01)


def test_notebook_10_opens_on_ulysses_and_wants_a_ring_of_few_kv_heads() -> None:
    shown = lesson.explorers.ring_or_ulysses()
    assert shown.readings["less exposed"] == "Ulysses"
    settings = itertools.product((16_384, 32_768, 65_536), (8, 16, 32))
    assert [at for at in settings if meets(shown, sequence=at[0], kv_heads=at[1])] == [(65_536, 8)]
    assert shown.read(**shown.answer)["less exposed"] == "ring"
    assert shown.read(cp=64)["Ulysses (ms)"] == "needs 64 heads"
    with pytest.raises(ValueError, match="16 heads do not divide into groups of 32"):
        shown.read(heads=16, kv_heads=32)


def test_notebook_11_opens_on_narrow_experts_far_away_and_wants_wide_ones_on_few_ranks() -> None:
    shown = lesson.explorers.expert_layer()
    assert shown.readings["messages (ms)"] > 3 * shown.readings["layer (ms)"] / 5
    settings = itertools.product((16, 32, 64), (2, 4, 8), (1, 4))
    good = {(e, ep) for e, ep, k in settings if meets(shown, experts=e, ep=ep, top_k=k, imbalance=1.2)}
    assert good == {(16, 4)}
    one, four = (shown.read(ep=4, top_k=k)["times the ideal"] for k in (1, 4))
    assert one == pytest.approx(four, rel=0.03)  # k is in computing and in messages
    with pytest.raises(ValueError, match="8 experts are too few for ep 64"):
        shown.read(experts=8)
