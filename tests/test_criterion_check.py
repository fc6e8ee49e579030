"""A scalar criterion that is no mean over the targets that are not -100 is refused, or warned of, in the
first training step; what is such a mean, or cannot be judged, passes without a word. Looking
changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hpnb
from hpnb.pipeline_parallel.criterion_check import check_is_mean
from hpnb.pipeline_parallel.halves_check import warn_if_no_mean

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

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


def masked_mean(o: torch.Tensor, b: Batch) -> Any:
    per_target = F.cross_entropy(*_flat(o, b), reduction="none").view(b["labels"].shape)
    mask = (b["labels"] % 2 == 0).to(D)
    return (per_target * mask).sum() / mask.sum()


def variance_too(o: torch.Tensor, b: Batch) -> Any:
    return mean(o, b) + 0.1 * o.var()


def sum_over_a_constant(o: torch.Tensor, b: Batch) -> Any:
    return summed(o, b) / 16


def root(o: torch.Tensor, b: Batch) -> Any:
    return (o[..., 0] - b["labels"]).pow(2).mean().sqrt()


def two_tasks(o: torch.Tensor, b: Batch) -> Any:
    return mean(o, b) + 0.5 * o[..., 0].pow(2).mean()


def median(o: torch.Tensor, b: Batch) -> Any:
    return F.cross_entropy(*_flat(o, b), reduction="none").median()


def drawn(o: torch.Tensor, b: Batch) -> Any:
    return F.cross_entropy(F.dropout(o.flatten(0, -2), 0.5), b["labels"].flatten())


def in_place(o: torch.Tensor, b: Batch) -> Any:
    with torch.no_grad():
        o.div_(2)
        b["labels"].clamp_(max=3)
    return mean(o, b)


def sends(o: torch.Tensor, b: Batch) -> Any:
    most = o.detach().amax()
    dist.all_reduce(most)
    return sample_weights(o, b) + 0 * most


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES).double()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, o: torch.Tensor, b: Batch) -> Any:
        self.calls += 1
        return F.cross_entropy(self.norm(o.flatten(0, -2)), b["labels"].flatten())


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
PASSING = (mean, smoothed, equal_weights, sum_over_count, remapped, without_weight)
WARNED = (sample_weights, masked_mean, variance_too, sum_over_a_constant, root, median)


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


def _compare(criterion: Any, outputs: Any, inputs: Any, causal: bool = False) -> list[str]:
    """What is said of the criterion, which has to leave everything as it is."""
    copies = [x.detach().clone() for x in (outputs, *inputs.values())]
    versions, states = [x._version for x in (outputs, *inputs.values())], torch.get_rng_state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_no_mean(criterion, outputs, inputs, causal)
    assert [x._version for x in (outputs, *inputs.values())] == versions
    assert all(map(torch.equal, copies, (outputs, *inputs.values())))
    assert torch.equal(states, torch.get_rng_state())
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("criterion", WARNED)
def test_other_values_are_warned_of(criterion: Any, tokens: bool) -> None:
    (said,) = _compare(criterion, *_microbatch(tokens))
    assert "no mean over targets: of 6 samples" in said
    assert "return (sum, count)" in said


def test_two_tasks_are_warned_of_where_their_counts_differ() -> None:
    assert _compare(two_tasks, *_microbatch(True)) == []
    assert len(_compare(two_tasks, *_microbatch(True, ignored=-100))) == 1


def test_halves_may_have_as_much_weight_by_chance() -> None:
    outputs, inputs = _microbatch(False)
    inputs["w"] = torch.tensor([1.0, 2, 3, 1, 2, 3], dtype=D)
    assert len(_compare(sample_weights, outputs, inputs)) == 1


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("criterion", [mean, smoothed, sum_over_count, drawn, in_place])
def test_means_and_random_losses_are_not_warned_of(criterion: Any, tokens: bool) -> None:
    outputs, inputs = _microbatch(tokens, ignored=-100)
    assert _compare(criterion, outputs, inputs) == []


@pytest.mark.parametrize("causal", [False, True])
def test_neither_are_means_over_shifted_labels(causal: bool) -> None:
    shifts = lambda o, b: F.cross_entropy(o[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten())  # noqa: E731
    assert _compare(shifts, *_microbatch(True, ignored=-100), causal) == []


def test_a_criterion_with_a_state_is_not_called_to_its_end() -> None:
    criterion = Remembers()
    before = {name: value.clone() for name, value in criterion.state_dict().items()}
    assert _compare(criterion, *_microbatch(True)) == []
    assert all(torch.equal(before[name], value) for name, value in criterion.state_dict().items())


@pytest.mark.parametrize("samples", [1, 2])
def test_one_sample_says_nothing(samples: int) -> None:
    assert len(_compare(sample_weights, *_microbatch(False, samples))) == samples - 1


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


@pytest.mark.parametrize(("way", "layout"), LAYOUTS)
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


@pytest.mark.parametrize(("way", "layout"), [one for one in LAYOUTS if one[0] != "backward"])
def test_training_warns_once_of_other_values(pool: hpnb.Ranks, way: str, layout: dict[str, Any]) -> None:
    for rank, said in enumerate(pool.run(_train, way, masked_mean, layout)):
        assert len(said) == (0 if layout and rank == 0 else 1)  # on the rank that has the outputs
        assert all("no mean over targets" in one for one in said)


def _two_tasks_of(model: nn.Module) -> tuple[Any, torch.Tensor]:
    """(a batch with the ratio of samples to targets, the loss of one process)."""
    g = torch.Generator().manual_seed(0)
    x, labels = torch.randn(SAMPLES, 4, generator=g, dtype=D), torch.tensor([0, -100, -100, 3, 4, -100])
    outputs = model(x)
    loss = F.cross_entropy(outputs, labels) + 0.5 * outputs[:, 0].pow(2).mean()
    return (x, SAMPLES / 3, labels), loss


def _train_two_tasks(layout: dict[str, Any]) -> float | None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, CLASSES)).double()
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", **layout))
    batch, _ = _two_tasks_of(model)
    if booster.plugin.dp_size > 1:
        batch = tuple(x[hpnb.rank() :: 2] if isinstance(x, torch.Tensor) else x for x in batch)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def criterion(o: torch.Tensor, b: Any) -> Any:
        squares = o[:, 0].pow(2)
        return b[1] * F.cross_entropy(o, b[2], reduction="sum") + 0.5 * squares.sum(), len(squares)

    for _ in range(2):
        optimizer.zero_grad()
        loss = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"]
        optimizer.step()
    return None if loss is None else float(loss)


@pytest.mark.parametrize("layout", [{}, {"pp_size": 2, "num_microbatches": 3}])
def test_two_tasks_with_other_counts_are_exact_by_a_ratio(pool: hpnb.Ranks, layout: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, CLASSES)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        _, loss = _two_tasks_of(model)
        loss.backward()
        optimizer.step()
    for of_rank in pool.run(_train_two_tasks, layout):
        assert of_rank is None or of_rank == pytest.approx(loss.item(), abs=1e-12)


def test_the_comparison_sends_nothing(pool: hpnb.Ranks) -> None:
    assert pool.run(_train, "execute_pipeline", sends, {}) == [[], []]


def halved_class_weights(o: torch.Tensor, b: Batch) -> Any:
    return class_weights(o, b) / 2


def test_a_backward_warns_of_class_weights_in_a_loss_that_is_divided(pool: hpnb.Ranks) -> None:
    for said in pool.run(_train, "backward", halved_class_weights, {}):
        assert len(said) == 1
        assert "class weights from 0.2 to 3" in said[0]


@pytest.mark.parametrize("criterion", [ignored_zero, summed])
def test_a_backward_refuses_sums_and_ignored_targets(criterion: Any) -> None:
    with pytest.raises(hpnb.RankError, match=REFUSED[criterion]):
        hpnb.launch(_train, "backward", criterion, {}, ranks=2, device="cpu", timeout=120)


# --- labels of -100 that the forward of a plain backward may not see ---------------------------------------


def _backward(case: str) -> tuple[list[str], torch.Tensor]:
    """What two steps of 8 samples say, and the weights after them. Rank 0 lacks 3 of 4 labels."""
    torch.manual_seed(0)
    model: Any = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plugin = hpnb.TorchDDPPlugin("fp64")
    booster = hpnb.Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(8, 4, generator=g, dtype=D), torch.randint(0, CLASSES, (8,), generator=g)
    if case != "all labels":
        y[[0, 2, 6]] = -100
    rank, ranks = plugin.mesh.dp.rank, plugin.dp_size
    x, y = x[rank::ranks], y[rank::ranks]
    n = y.ne(-100).sum()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            logits = model(x, labels=y) if case == "given" else model(x)
            loss: Any = F.cross_entropy(logits, y, label_smoothing=0.1 if case == "smoothed" else 0.0)
            if case == "pair":
                loss = F.cross_entropy(logits, y, reduction="sum"), n
            if case == "small counts":
                loss = 0.01 * F.cross_entropy(logits, y, reduction="sum"), 0.01 * n.double()
            booster.backward(loss, optimizer)
            optimizer.step()
    said = [str(w.message) for w in caught if "targets" in str(w.message)]
    return said, model.unwrap().up.weight.detach().clone()


@pytest.mark.parametrize("case", ["alone", "smoothed"])
def test_a_backward_warns_of_missing_labels_that_forward_has_not_seen(pool: hpnb.Ranks, case: str) -> None:
    (said, _), (quiet, _) = pool.run(_backward, case)
    assert len(said) == 1
    assert "a cross entropy over 1 targets, and 3 more are -100" in said[0]
    assert "forward counted 4" in said[0]
    assert quiet == []  # none are missing there


@pytest.mark.parametrize("case", ["all labels", "given", "pair", "small counts"])
def test_a_backward_of_counted_labels_is_that_of_one_process(pool: hpnb.Ranks, case: str) -> None:
    """Also where all counts together are below 1."""
    results = pool.run(_backward, case)
    with hpnb.Ranks(1, device="cpu", timeout=60) as alone:
        ((_, wanted),) = alone.run(_backward, case if case == "all labels" else "alone")
    for said, weights in results:
        assert said == []
        assert float((weights - wanted).abs().max()) < 1e-12


def test_two_forwards_of_a_backward_are_counted_together(pool: hpnb.Ranks) -> None:
    """Labels of two batches, which a model has not seen: warned of where some are missing."""

    def two(missing: int) -> list[str]:
        plugin = hpnb.TorchDDPPlugin("fp64")
        booster, net = hpnb.Booster(plugin=plugin), Net().double()
        model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.5))
        labels = torch.arange(12).view(2, 6) % CLASSES
        labels[1, : missing * hpnb.rank()] = -100
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outputs = [model(x=torch.ones(6, 4, dtype=D)) for _ in range(2)]
            losses = [F.cross_entropy(o, y) for o, y in zip(outputs, labels, strict=True)]
            booster.backward(sum(losses) / 2, optimizer)
        return [str(w.message) for w in caught if "targets" in str(w.message)]

    assert pool.run(two, 0) == [[], []]
    quiet, said = pool.run(two, 2)
    assert quiet == []
    assert len(said) == 1
    assert "over 10 targets, and 2 more are -100" in said[0]
    assert "forward counted 12" in said[0]


def test_one_process_and_one_microbatch_may_return_anything() -> None:
    with hpnb.Ranks(1, device="cpu", timeout=60) as ranks:
        assert ranks.run(_train, "execute_pipeline", class_weights, {})[0] == []
