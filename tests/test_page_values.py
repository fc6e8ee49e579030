"""Numbers in prose come from the run, claims are checked, and `show` shows what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hpnb
from hpnb import lesson, plot
from hpnb.lesson import values
from hpnb.lesson.pages import committed, numbers_in_prose, paired
from hpnb.lesson.show import describe, show
from hpnb.lesson.values import Value, flatten
from hpnb.pipeline_parallel import Costs, schedules
from hpnb.plot.curves import CurvePanel, Series, curves, looks

PAGE = """\
# %% [markdown]
# # A page
# On {{00.hardware}} it took
# {{00.step}}, which is {{00.step:.2f}} seconds; {{00.sent.tp}} were sent by {{00.who}}.
# tp against dp: {{00.race.tp-1.measured}}; revealed {{00.knee}}, predicted {{00.knee.predicted}}.

# %%
from hpnb import lesson
lesson.record("00.step", 0.304, "s")
lesson.record("00.sent", {"dp": (3, "B"), "tp": 4_000_000}, "B")
lesson.record("00.who", "tp")
lesson.claim("tp sends more", (4_000_000, ">", 3))

# %%
lesson.show(predicted={"tp 1": 1.0}, measured={"tp 1": 1.5}, unit="s", key="00.race")
lesson.predict("00.knee", "How many tokens?", rule_of_thumb=100)
lesson.reveal("00.knee", 1400, predicted=1300)
"""


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: str(capsys.readouterr().out)


# --- a page --------------------------------------------------------------------------------------------


def test_a_run_writes_its_numbers_into_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "00_a"
    text = path.with_suffix(".py")
    text.write_text(PAGE)
    assert committed.main([str(path)]) == 0
    nb = paired.read(path)
    for source in (nb.cells[0].source, text.read_text()):
        assert '<data value="00.step">304 ms</data>' in source
        assert '<data value="00.step:.2f">0.30</data> seconds' in source
        for number in ("4.00 MB", ">tp<", "1.50 s", "1,400", "1,300"):
            assert number in source
        assert "{{" not in source
    assert nb.metadata["hpnb"]["claims"]["tp sends more"] == {"holds": True, "numbers": [4e6, ">", 3]}
    assert len(nb.cells[1].outputs) == 1  # the claim; records leave nothing behind
    assert committed.main([str(path), "--check"]) == 0

    # another number in the prose is seen, and the next fill corrects it, without a run
    text.write_text(text.read_text().replace("304 ms", "999 ms"))
    assert committed.main([str(path), "--pair"]) == 0
    assert committed.main([str(path), "--check"]) == 0
    assert "304 ms" in text.read_text()
    values_of_run = numbers_in_prose.values_beside(path)
    assert numbers_in_prose.differences('<data value="00.step">999 ms</data>', values_of_run)
    assert numbers_in_prose.differences("{{00.none}}", values_of_run)
    assert not numbers_in_prose.differences('<data value="00.step">304 ms</data>', values_of_run)

    # a reader's run says where it differs, for numbers that the prose tells
    said()
    values._page.cache_clear()
    lesson.record("00.step", 0.412, "s")
    assert said().startswith("00.step here: 412 ms; on the page: 304 ms (")
    lesson.record("00.step", 0.3041, "s")
    lesson.record("00.untold", 5)
    assert said() == ""
    values._page.cache_clear()

    # a claim that the run does not support is no page
    nb.metadata["hpnb"]["claims"]["tp sends more"]["holds"] = False
    paired.write(nb, path)
    assert committed.main([str(path), "--check"]) == 1
    assert "does not support: tp sends more" in said()


def test_filling_twice_is_filling_once_and_leaves_other_braces() -> None:
    run = {"00.a": Value(0.002, "s"), "00.b": Value(12)}
    text = '$x^{{2}}$ {{00.a}} {{00.a:.1f}} {{00.c}} <data\n#   value="00.b">old\n# words</data>'
    filled = numbers_in_prose.fill(text, run)
    assert filled.startswith(
        '$x^{{2}}$ <data value="00.a">2.00 ms</data> <data value="00.a:.1f">0.0</data> {{00.c}}'
    )
    assert filled.endswith('<data value="00.b">12</data>')
    assert numbers_in_prose.fill(filled, run) == filled


def test_a_claim_says_its_numbers_and_does_not_raise(said: Callable[[], str]) -> None:
    lesson.claim("less", (4, "<", 8))
    assert "✓ less (4 < 8)" in said()
    lesson.claim("less", (9, "<", 8), otherwise="Ranks share cores.")
    assert "not 9 < 8" in (shown := said())
    assert "Ranks share cores." in shown
    lesson.claim("no number", (float("nan"), "<", 8))
    assert "✗" in said()
    with pytest.raises(ValueError, match="relation"):
        lesson.claim("less", (9, "≪", 8))


def test_recorded_objects_have_their_numbers() -> None:
    tl = schedules.make("gpipe", 2, 4).simulate(Costs(1.0, 1.0, 1.0))
    found = {key: (f"{item.value:.6g}", item.unit) for key, item in flatten("00.t", tl).items()}
    assert found == {"00.t.makespan": ("15", "s"), "00.t.bubble": ("20", "%"), "00.t.in-flight": ("4", "")}
    traffic = hpnb.record.Traffic({"dp": 10.0}, {"dp": 1.0})
    assert flatten("00.t", traffic) == {"00.t.dp": Value(10.0, "B"), "00.t.total": Value(10.0, "B")}
    assert flatten("00.t", {"dp 2 x tp 2 (s)": 1.0}, "s") == {"00.t.dp-2-x-tp-2": Value(1.0, "s")}
    with pytest.raises(ValueError, match="no key"):
        flatten("step", 1.0)
    with pytest.raises(TypeError):
        flatten("00.t", object())


# --- show ----------------------------------------------------------------------------------------------


def test_a_table_of_sources_has_a_ratio(said: Callable[[], str]) -> None:
    show(predicted={"step (s)": 1.0, "sent (B)": 3000, "new": None},
         counted={"sent (B)": 3000}, measured={"step (s)": 1.5, "new": 2.0},
         columns={"idle (%)": {"step (s)": 12.3}}, title="The step is late")  # fmt: skip
    title, head, _, step, sent, new = said().splitlines()
    assert title == "The step is late"
    assert head.split() == ["predicted", "counted", "measured", "ratio", "idle"]
    assert step.split() == ["step", "1.00", "s", "-", "1.50", "s", "1.50", "12.3", "%"]
    assert sent.split()[-2:] == ["exact", "-"]
    assert new.split() == ["new", "-", "-", "2.00", "-", "-"]
    show(simulated={"a": 2.0}, replayed={"a": 1.0}, unit="s")
    assert "replayed / simulated" in said()
    for wrong in ({}, {"guessed": {"a": 1}}, {"measured": {"a": 1}, "guessed": {"a": 1}}):
        with pytest.raises(TypeError, match="predicted"):
            show(**wrong)
    with pytest.raises(TypeError, match="cannot show int"):
        show(3)


def test_parity_is_the_worst_of_the_ranks(said: Callable[[], str]) -> None:
    ranks = [{"by hand": {"loss": 0.0, "weights": w}} for w in (1e-16, 3e-16)]
    parity = lesson.Parity.worst_of(ranks)
    assert (parity.worst, parity.equal) == (3e-16, True)
    assert not lesson.Parity({"a": {"loss": 1e-3}}).equal
    for distances in ({"loss": 0.0, "weights": float("nan")}, {"loss": float("nan"), "weights": 0.0}):
        broken = lesson.Parity.worst_of([{"a": {"loss": 0.0, "weights": 0.0}}, {"a": distances}])
        assert (broken.worst, broken.equal) == (float("inf"), False)
    show(parity)
    assert "3e-16" in said()


def test_errors_traffic_and_source_are_shown(said: Callable[[], str]) -> None:
    stack = (
        '  Cell In[2], line 5, in f\n    comm.all_reduce(x)\n  File "torch/d.py", line 3, in g\n    work()\n'
    )
    show(hpnb.RankError("stuck", rank=0, stacks={0: stack, 1: stack.replace("(x)", "(y)")}))
    assert "comm.all_reduce(y)" in said()
    show({"right": hpnb.record.Traffic({"tp": 4e6}, {"tp": 3.0})})
    assert "4.00 MB in 3 calls" in said()
    show(flatten)
    assert said().startswith("def flatten(")


class Shown:
    """What is handed to `hpnb.plot.show`."""

    def __init__(self) -> None:
        self.alts: list[str] = []

    def __call__(self, figure: Any, alt: str) -> None:
        self.alts.append(alt)


def test_alt_texts_are_made_from_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown()
    monkeypatch.setattr(plot, "show", shown)
    tl = schedules.make("gpipe", 2, 4).simulate(Costs(1.0, 1.0, 1.0))
    show({"predicted": tl, "run": tl}, in_flight=True, title="GPipe holds 4")
    (alt,) = shown.alts
    assert alt.count("20.0 %") == 2
    assert alt.startswith("GPipe holds 4. predicted, simulated: 2 ranks, 15.0 s")
    assert "at most 4 in flight" in alt
    sample = hpnb.record.memory_profile.MemorySample
    profile = hpnb.record.MemoryProfile(
        (sample(0.0, parameters=10), sample(1.0, parameters=10, activations=30))
    )
    show(profile)
    assert "rank 0 peaks at 40 B, 75 % of it activations" in shown.alts[-1]
    look = looks(["loss", "other"])
    series = [
        Series(name, (1, 2, 3), (3.0, 2.0, y), look[name]) for name, y in (("loss", 1.5), ("other", 2.5))
    ]
    show(curves([CurvePanel(series, ylabel="loss", xlabel="step")], title="It falls"))
    assert shown.alts[-1] == "It falls. loss over step; loss goes from 3 to 1.5; other goes from 3 to 2.5."
    bars = plot.compare({"step": 1.0, "sent": 2.0}, {"step": 3.0, "sent": 2.5}, "s", title="Late")
    assert "step" in (alt := describe(bars))
    assert "3.00" in alt
