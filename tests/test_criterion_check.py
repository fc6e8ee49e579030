"""A scalar criterion that is no mean over the targets that are not -100 is refused, or warned of, in the
first training step; what is such a mean, or cannot be judged, passes without a word."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hpnb
from hpnb.pipeline_parallel.criterion_check import check_is_mean

D = torch.float64
CLASSES, SAMPLES, TOKENS = 5, 6, 7
WEIGHTS = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0], dtype=D)
Batch = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pool() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(2, device="cpu", timeout=120) as ranks:
        yield ranks


def _flat(o: torch.Tensor, b: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return o.flatten(0, -2), b["labels"].flatten()


def class_weights(o: torch.Tensor, b: Batch) -> Any:
    return F.cross_entropy(*_flat(o, b), weight=WEIGHTS)


def class_weights_and_a_term(o: torch.Tensor, b: Batch) -> Any:
    return F.cross_entropy(*_flat(o, b), weight=WEIGHTS) + 0.1 * o.pow(2).mean()


def ignored_zero(o: torch.Tensor, b: Batch) -> Any:
    return nn.CrossEntropyLoss(ignore_index=0)(*_flat(o, b))


def summed(o: torch.Tensor, b: Batch) -> Any:
    return F.cross_entropy(*_flat(o, b), reduction="sum")


def sample_weights(o: torch.Tensor, b: Batch) -> Any:
    per_target = F.cross_entropy(*_flat(o, b), reduction="none").view(b["labels"].shape)
    per_sample = per_target.flatten(1).mean(1) if per_target.dim() > 1 else per_target
    return (b["w"] * per_sample).sum() / b["w"].sum()


def mean(o: torch.Tensor, b: Batch) -> Any:
    return F.cross_entropy(*_flat(o, b))


def smoothed(o: torch.Tensor, b: Batch) -> Any:
    return F.cross_entropy(*_flat(o, b), label_smoothing=0.1) / 2


def equal_weights(o: torch.Tensor, b: Batch) -> Any:
    return F.cross_entropy(*_flat(o, b), weight=torch.full((CLASSES,), 2.0, dtype=D))


def sum_over_count(o: torch.Tensor, b: Batch) -> Any:
    n = b["labels"].ne(-100).sum()
    return F.cross_entropy(*_flat(o, b), weight=WEIGHTS, reduction="sum") / n


def corrected_ignore(o: torch.Tensor, b: Batch) -> Any:
    return ignored_zero(o, b) * b["labels"].ne(0).sum() / b["labels"].numel()


def remapped(o: torch.Tensor, b: Batch) -> Any:
    labels = b["labels"].masked_fill(b["labels"].eq(-100), 4).flatten()
    return F.cross_entropy(o.flatten(0, -2), labels, ignore_index=4)


def without_weight(o: torch.Tensor, b: Batch) -> Any:
    labels = b["labels"].masked_fill(b["labels"].eq(-100), 4).flatten()
    weight = torch.tensor([1.0, 1, 1, 1, 0], dtype=D)
    return F.cross_entropy(o.flatten(0, -2), labels, weight=weight)


def exact_tuple(o: torch.Tensor, b: Batch) -> Any:
    labels = b["labels"].flatten()
    return F.cross_entropy(*_flat(o, b), weight=WEIGHTS, reduction="sum"), WEIGHTS[labels].sum()


REFUSED = {class_weights: "class weights from 0.2 to 3", class_weights_and_a_term: "class weights",
           ignored_zero: "ignore_index=0, which leaves out", summed: r"reduction='sum'"}  # fmt: skip
PASSING = (mean, smoothed, equal_weights, sum_over_count, remapped, without_weight, sample_weights)


def _microbatch(tokens: bool, samples: int = SAMPLES, ignored: int | None = None) -> tuple[Any, Batch]:
    g = torch.Generator().manual_seed(3)
    shape = (samples, TOKENS) if tokens else (samples,)
    labels = torch.randint(0, CLASSES, shape, generator=g)
    labels[0] = 0
    if ignored is not None and tokens:
        labels[:2, 2:] = ignored
    outputs = torch.randn(*shape, CLASSES, generator=g, dtype=D).requires_grad_()
    return outputs, {"labels": labels, "w": torch.rand(samples, generator=g, dtype=D) + 0.1}


def _check(criterion: Any, outputs: Any, inputs: Any) -> list[str]:
    value = criterion(outputs, inputs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_is_mean(value, inputs, causal=False)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("criterion", REFUSED)
def test_sums_and_other_cross_entropies_are_refused(criterion: Any, tokens: bool) -> None:
    with pytest.raises(ValueError, match=REFUSED[criterion]) as error:
        _check(criterion, *_microbatch(tokens))
    assert "return (sum, count)" in str(error.value)


@pytest.mark.parametrize("criterion", [class_weights, class_weights_and_a_term, ignored_zero, summed])
def test_the_graph_says_it_of_one_sample(criterion: Any) -> None:
    with pytest.raises(ValueError, match=REFUSED[criterion]):
        _check(criterion, *_microbatch(True, samples=1))


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("criterion", PASSING)
def test_means_pass(criterion: Any, tokens: bool) -> None:
    outputs, inputs = _microbatch(tokens)
    labels = inputs["labels"]
    if criterion in (remapped, without_weight):
        labels[labels == 4] = 3
        labels.view(SAMPLES, -1)[1] = -100
    assert _check(criterion, outputs, inputs) == []


def test_a_cross_entropy_that_something_multiplies_may_be_the_mean() -> None:
    assert "ignore_index=0" in _check(corrected_ignore, *_microbatch(True))[0]


@pytest.mark.parametrize("dtype", [D, torch.float32, torch.bfloat16])
def test_means_over_unequal_counts_pass_in_every_dtype(dtype: torch.dtype) -> None:
    outputs, inputs = _microbatch(True, ignored=-100)
    assert _check(mean, outputs.detach().to(dtype).requires_grad_(), inputs) == []


def test_an_ignored_index_that_does_not_occur_is_a_warning() -> None:
    outputs, inputs = _microbatch(True)
    said = _check(lambda o, b: F.cross_entropy(*_flat(o, b), ignore_index=-1), outputs, inputs)
    assert len(said) == 1
    assert "ignore_index=-1" in said[0]


def test_shifted_labels_are_another_question() -> None:
    outputs, inputs = _microbatch(True, ignored=-100)
    shifts = lambda o, b: F.cross_entropy(o[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten())  # noqa: E731
    assert _check(shifts, outputs, inputs) == []


# --- in training ------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor, labels: Any = None, w: Any = None) -> torch.Tensor:
        return self.up(x)


def _train(way: str, criterion: Any, layout: dict[str, Any]) -> list[str]:
    torch.manual_seed(0)
    model: nn.Module = Net().double()
    if layout.get("pp_size", 1) > 1:
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, CLASSES)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plugin = hpnb.HybridParallelPlugin(precision="fp64", **layout)
    booster = hpnb.Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    inputs = _microbatch(True)[1]
    g = torch.Generator().manual_seed(hpnb.rank() if plugin.dp_size > 1 else 0)
    x = torch.randn(SAMPLES, TOKENS, 4, generator=g, dtype=D)
    mapping: Any = {"x": x, **inputs}
    batch = (x, inputs["labels"]) if layout.get("pp_size", 1) > 1 else mapping
    by_names = lambda o, b: criterion(o, b if isinstance(b, dict) else {"labels": b[1]})  # noqa: E731
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            if way == "execute_pipeline":
                booster.execute_pipeline(iter([batch]), model, by_names, optimizer)
            elif way == "backward":
                booster.backward(by_names(model(**mapping), mapping), optimizer)
            optimizer.step()
        if way == "Trainer":
            trainer = hpnb.Trainer(booster, model, optimizer, by_names, display_progress=False)
            trainer.fit([mapping, mapping], 2)
    return [str(w.message) for w in caught if "targets" in str(w.message)]


LAYOUTS = [("execute_pipeline", {}), ("Trainer", {}), ("backward", {}),
           ("execute_pipeline", {"pp_size": 2, "num_microbatches": 2})]  # fmt: skip


@pytest.mark.parametrize(("way", "layout"), [one for one in LAYOUTS if one[0] != "backward"])
def test_training_refuses_class_weights(way: str, layout: dict[str, Any]) -> None:
    with pytest.raises(hpnb.RankError) as error:
        hpnb.launch(_train, way, class_weights, layout, ranks=2, device="cpu", timeout=120)
    assert "return (sum, count)" in str(error.value)


@pytest.mark.parametrize(("way", "layout"), LAYOUTS)
def test_training_with_a_mean_or_a_tuple_says_nothing(
    pool: hpnb.Ranks, way: str, layout: dict[str, Any]
) -> None:
    for criterion in (mean, smoothed, exact_tuple):
        assert pool.run(_train, way, criterion, layout) == [[], []]


def test_a_backward_that_sees_no_targets_warns_of_class_weights(pool: hpnb.Ranks) -> None:
    for said in pool.run(_train, "backward", class_weights, {}):
        assert len(said) == 1
        assert "class weights from 0.2 to 3" in said[0]


def test_one_process_and_one_microbatch_may_return_anything() -> None:
    with hpnb.Ranks(1, device="cpu", timeout=60) as ranks:
        assert ranks.run(_train, "execute_pipeline", class_weights, {})[0] == []
