"""Titles of figures on pages 02, 03, 04, 10 and 11 say what a run recorded, also where it is another one."""

from __future__ import annotations

from hpnb.lesson.programs import (
    experts_words,
    long_contexts,
    vit_hybrid,
    vit_pipeline_words,
    vit_tensor_predictions,
)
from hpnb.record import Event, Timeline

FALLING, RISING = [3.0, 2.0, 1.0, 0.5], [1.0, 2.0, 3.0, 4.0]


def timeline(*works: float) -> Timeline:
    """One rank behind the other, each computing for so long."""
    ends = [sum(works[: rank + 1]) for rank in range(len(works))]
    events = (
        Event(r, r, "F", 0, end - work, end) for r, (end, work) in enumerate(zip(ends, works, strict=True))
    )
    return Timeline(tuple(events), "measured")


def test_page_02_names_the_stage_that_works_longest() -> None:
    assert vit_pipeline_words.busiest_title(timeline(1.0, 2.0)) == "Others wait for stage 1"
    assert vit_pipeline_words.busiest_title(timeline(3.0, 2.0)) == "Others wait for stage 0"
    title = vit_pipeline_words.heavy_title
    assert title({"uniform": 1.0, "heavy": 2.0}) == "One heavy stage delays every microbatch"
    assert "no longer" in title({"uniform": 2.0, "heavy": 1.0})
    walk = vit_pipeline_words.walk_title
    assert walk(timeline(1.0, 1.0)) == "One microbatch: one rank works at a time"
    both = Timeline(tuple(Event(r, r, "F", 0, 0.0, 1.0) for r in range(2)), "measured")
    assert walk(both) == "One microbatch: ranks are idle for 0 % of the time"


def test_page_03_says_which_copies_diverge() -> None:
    title = vit_tensor_predictions.copies_title
    losses, apart = {"right": FALLING, "a": FALLING, "b": FALLING}, {"right": [0.0], "a": [0.1], "b": [0.1]}
    assert title(losses, apart) == "The loss falls in all runs, but copies diverge in the faulty ones"
    some = title({**losses, "b": RISING}, {**apart, "b": [0.0]})
    assert some == "Only the losses of right and a fall, but copies diverge in 1 of 3 runs"
    assert title(losses, {key: [0.0] for key in losses}).endswith("and no copies diverge")


def test_page_04_names_the_axis_whose_step_grows_most() -> None:
    title = vit_hybrid.grows_most_title
    assert "tp's step grows" in title({"dp": [1.0, 2.0], "tp": [1.0, 3.0]})
    assert "dp's step grows" in title({"dp": [1.0, 4.0], "tp": [1.0, 3.0]})
    swapped, both = vit_hybrid.swapped_title, {"correct": FALLING, "swapped": FALLING}
    assert swapped(both, {"swapped": [0.3]}) == "Both losses fall, but swapped copies diverge"
    assert swapped(both, {"swapped": [0.0]}) == "Both losses fall, and swapped copies do not diverge"
    one = swapped({**both, "swapped": RISING}, {"swapped": [0.3]})
    assert one == "Only the loss of correct falls, and swapped copies diverge"


def test_page_10_says_where_ulysses_sends_fewer_bytes_and_which_checkpoint_differs() -> None:
    sent = {"ring, 8": 3.0, "Ulysses, 8": 1.0, "ring, 1": 1.0, "Ulysses, 1": 2.0}
    title = long_contexts.fewest_bytes_title
    assert title(sent) == "Ulysses sends fewer bytes than the ring with 8, not with 1"
    assert title({**sent, "Ulysses, 1": 0.5}) == "Ulysses sends fewer bytes than the ring"
    assert title({**sent, "Ulysses, 8": 4.0}) == "The ring sends no more than Ulysses"
    rows, losses = {"a": [1.0, 1.0], "b": [1.0, 0.0]}, {"a": FALLING, "b": FALLING}
    tells = long_contexts.rows_title
    assert tells(losses, rows) == "Both losses fall; rows of wpe without a gradient tell"
    assert tells(losses, {**rows, "b": [1.0, 1.0]}) == "Both losses fall; as many rows of wpe are trained"
    reloaded = long_contexts.reloaded_title
    assert reloaded({"a": 0.0, "b": 0.1}) == "Measured: one process computes other logits after b"
    assert reloaded({"a": 0.0, "b": 0.0}).endswith("the same logits from both checkpoints")


def test_page_11_follows_loads_and_gradients() -> None:
    title = experts_words.waiting_title
    assert title([1.0, 2.0], popular=1).endswith("the one with the popular expert")
    assert title([3.0, 2.0], popular=1).endswith("wait for rank 0")
    chosen = [[[2], [2]], [[2], [0]]]
    assert experts_words.dispatch_title(chosen, 4, popular=2).endswith("a popular expert loads it")
    assert experts_words.dispatch_title(chosen, 4, popular=0).endswith("here rank 1 gets most")
    even = [[[2], [2]], [[0], [0]]]
    assert experts_words.dispatch_title(even, 4, popular=2).endswith("here ranks 0 and 1 get most")
    loads = {"no balancing": [1.0, 3.0], "loss": [3.0, 1.0], "bias": [3.0, 1.0]}
    assert experts_words.loads_title(loads, 1).endswith("in each run; balancing ends that")
    assert experts_words.loads_title({**loads, "bias": [1.5, 1.0]}, 1).endswith("loads end more even")
    assert "with bias, loads end no more even" in experts_words.loads_title({**loads, "bias": [3.0, 4.0]}, 1)
    hardly = {"no balancing": [1.0, 3.0], "loss": [3.0, 2.99]}
    assert experts_words.loads_title(hardly, 1).endswith("with loss, loads end no more even than without")
    assert experts_words.loads_title({**hardly, "loss": [3.0, 2.5]}, 1).endswith("loads end more even")
    fewer = experts_words.capacity_title
    assert "drops fewer rows at 1.25" in fewer({"free": [0.4], "bias": [0.1]}, 0, 1.25)
    assert "drops no fewer rows at 1.25" in fewer({"free": [0.1], "bias": [0.1]}, 0, 1.25)
    losses = {"edp": FALLING, "dp": FALLING}
    fault = experts_words.fault_title
    assert fault(losses, {"edp": 0, "dp": 2}).endswith(
        "both losses fall; gradients of experts without a token tell"
    )
    assert fault(losses, {"edp": 0, "dp": 0}).endswith("do not tell")
    assert experts_words.unused_title({"edp": 0, "dp": 2}) == "Unused experts have no gradient if edp"
    assert experts_words.unused_title({"edp": 1, "dp": 2}) == "Unused experts have gradients in both runs"
    assert experts_words.used_title(9, 36) == "25 % of the experts' weights work on a token"
