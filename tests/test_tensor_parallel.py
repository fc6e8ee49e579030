"""1D tensor parallelism against one process in float64: loss, gradients, weights; bytes, memory, masks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tensor_cases import (
    Run,
    apart,
    causal_loss,
    classifier_case,
    gpt2,
    images,
    lm_case,
    own_loss,
    serial,
    text,
    train,
    vit,
    vit_case,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import ImageClassifierOutput, SequenceClassifierOutput

import hpnb
from hpnb import Layout, Mesh, comm, record, tensor_parallel
from hpnb.background import Background, Pending
from hpnb.hybrid import recompute
from hpnb.models import Anatomy, Part, Role, register
from hpnb.models.role import linear, norm
from hpnb.placement import placement_of
from hpnb.tensor_parallel import cross_entropy, full_gradients, full_state_dict, parallelize
from hpnb.tensor_parallel.async_all_reduce import DeferredWeightGrad
from hpnb.tensor_parallel.replicated_grad_sum import ReplicatedGradSum
from hpnb.tensor_parallel.sequence_parallel import SequenceSharding
from hpnb.tensor_parallel.tp_1d_linear import RowParallelLinear

D = torch.float64
CASES = {
    "vit": vit_case,
    "vit, 5 heads": lambda: vit_case(heads=5, hidden=40),
    "gpt2": lm_case,
    "gpt2, 5 heads, 7 words": lambda: lm_case(heads=5, hidden=40, words=7),
    "gpt2, untied": lambda: lm_case(tie=False),
    "gpt2, no padding": lambda: lm_case(padded=False),
    "gpt2 classifies": classifier_case,
}


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], hpnb.Ranks]]:
    """One pool of each size, for all tests of this file."""
    with ExitStack() as stack:
        yield cache(lambda size: stack.enter_context(hpnb.Ranks(size, device="cpu", timeout=120)))


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(pools: Callable[[int], hpnb.Ranks], request: pytest.FixtureRequest) -> hpnb.Ranks:
    return pools(request.param)


@pytest.fixture(scope="module")
def four(pools: Callable[[int], hpnb.Ranks]) -> hpnb.Ranks:
    return pools(4)


def tensor_axis() -> hpnb.Axis:
    return Mesh(Layout(tp=hpnb.world_size())).tp


# --- parity ---


@cache
def expected(name: str, accumulate: int = 1) -> Run:
    return serial(CASES[name](), accumulate=accumulate)


def parity(
    name: str, sequence: bool, accumulate: int, again: bool, expected: Run, reentrant: bool = False
) -> float:
    torch.set_num_threads(1)
    case = CASES[name]()
    model = parallelize(case.build(), tensor_axis(), "1d", sequence)
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    ours = train(model, case, own_loss, full_gradients, full_state_dict, accumulate=accumulate)
    return apart(ours, expected)


@pytest.mark.sampled(5, cover=True)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_process(ranks: hpnb.Ranks, name: str, sequence: bool) -> None:
    assert max(ranks.run(parity, name, sequence, 1, False, expected(name))) < 1e-12


@pytest.mark.sampled(2, cover=True)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_accumulation_and_recomputation(four: hpnb.Ranks, name: str, sequence: bool) -> None:
    assert max(four.run(parity, name, sequence, 2, True, expected(name, 2))) < 1e-12


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_recomputation_that_reenters_autograd(four: hpnb.Ranks, name: str) -> None:
    assert max(four.run(parity, name, True, 1, True, expected(name), True)) < 1e-12


def test_one_rank_is_the_model_itself(pools: Callable[[int], hpnb.Ranks]) -> None:
    assert pools(1).run(parity, "gpt2", True, 1, False, expected("gpt2"))[0] < 1e-12


@pytest.mark.one_gpu
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["vit", "gpt2", "gpt2 classifies"])
def test_on_gpus(name: str, sequence: bool) -> None:
    assert (
        max(hpnb.launch(parity, name, sequence, 2, True, expected(name, 2), ranks=2, device="cuda")) < 1e-12
    )


def two_forwards_then_two_backwards() -> float:
    """Two batches of other lengths are alive, and blocks are computed again: each with its own length."""
    case = lm_case()
    model = parallelize(case.build(), tensor_axis(), "1d", True)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    losses = [model(**text(step)).loss for step in (0, 2)]
    for loss in losses:
        loss.backward()
    plain = case.build()
    for step in (0, 2):
        causal_loss(plain(**text(step)), text(step)).backward()
    ours, theirs = full_gradients(model), {n: p.grad for n, p in plain.named_parameters()}
    return max(float((ours[n] - g).norm() / g.norm()) for n, g in theirs.items() if g is not None)


def test_lengths_do_not_mix(four: hpnb.Ranks) -> None:
    assert max(four.run(two_forwards_then_two_backwards)) < 1e-11


class Recomputed(nn.Module):
    """A block that is checkpointed from outside, as by torch's checkpoint_wrapper: its hooks run again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def offloaded_batches_of_equal_tokens() -> float:
    """Batches of 4 x 12 and 8 x 6 tokens are alive at once, and what is kept for the backward is copied."""
    torch.set_num_threads(1)
    case = lm_case()
    batches = [{"input_ids": text(0, rows)["input_ids"][:, :1].repeat(1, length)} for rows, length in SHAPES]
    for batch in batches:
        batch["input_ids"] = (batch["input_ids"] + torch.arange(batch["input_ids"].size(1))) % 53
        batch["labels"] = batch["input_ids"]
    model, plain = parallelize(case.build(), tensor_axis(), "1d", sequence_parallel=True), case.build()
    blocks = model.get_submodule("transformer.h")
    for i, block in enumerate(list(blocks.children())):
        blocks.register_module(str(i), Recomputed(block))
    with torch.autograd.graph.saved_tensors_hooks(
        torch.clone, torch.clone
    ):  # save_on_cpu copies on a GPU only
        losses = [model(**batch).loss for batch in batches]
    for loss in losses:
        loss.backward()
    for batch in batches:
        causal_loss(plain(**batch), batch).backward()
    theirs = {n: p.grad for n, p in plain.named_parameters()}
    ours = {name.replace(".block.", "."): grad for name, grad in full_gradients(model).items()}
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - g).norm() / g.norm()) for n, g in theirs.items() if g is not None)


SHAPES = ((4, 12), (8, 6))


def test_recomputed_blocks_know_their_batch_though_it_was_offloaded(four: hpnb.Ranks) -> None:
    assert max(four.run(offloaded_batches_of_equal_tokens)) < 1e-11


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(6, 8), nn.ModuleList(OwnBlock() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))  # type: ignore[no-any-return]


def own_anatomy(model: OwnModel) -> Anatomy:
    blocks = tuple(Part(f"layers.{i}", layer) for i, layer in enumerate(model.layers))
    return OwnAnatomy(
        (Part("embed", model.embed),), blocks, (Part("norm", model.norm), Part("head", model.head))
    )


class OwnAnatomy(Anatomy):  # only its parts are asked for
    embed = run = finish = cast(Any, None)


def own_roles(model: OwnModel) -> dict[str, Role]:
    table = [*linear("embed", "embedding"), *norm("norm"), *linear("head", "head")]
    for i in range(len(model.layers)):
        table += [*norm(f"layers.{i}.norm"), *linear(f"layers.{i}.up", "column", 16)]
        table += linear(f"layers.{i}.down", "row", 16)
    return dict(table)


def recomputed_own_model() -> float:
    """As above, of a model whose blocks recompute their forward without their hooks."""
    torch.set_num_threads(1)
    register(OwnModel, own_anatomy, own_roles)
    torch.manual_seed(1)
    plain = OwnModel().to(D)
    model = parallelize(copy.deepcopy(plain), tensor_axis(), "1d", sequence_parallel=True)
    recompute.enable_recomputation(model, "full")
    batches = [torch.randn(*shape, 6, dtype=D) for shape in SHAPES]
    losses = [model(batch).square().mean() for batch in batches]
    for loss in losses:
        loss.backward()
    for batch in batches:
        plain(batch).square().mean().backward()
    ours, theirs = full_gradients(model), {n: p.grad for n, p in plain.named_parameters()}
    return max(float((ours[n] - g).norm() / g.norm()) for n, g in theirs.items() if g is not None)


def test_recomputed_blocks_of_an_own_model_know_their_batch(four: hpnb.Ranks) -> None:
    assert max(four.run(recomputed_own_model)) < 1e-11


class ScaledBlock(OwnBlock):
    """Has a parameter outside of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class DenseBeforeNorm(OwnModel):
    """Its head is dense, norm, head; `dense_first` says whether dense is defined before the norm."""

    dense_first = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ScaledBlock() for _ in range(2))
        last_norm = self.norm
        del self.norm
        if self.dense_first:
            self.dense, self.norm = nn.Linear(8, 8), last_norm
        else:
            self.norm, self.dense = last_norm, nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(self.dense(x)).mean(1))  # type: ignore[no-any-return]


class NormBeforeDense(DenseBeforeNorm):
    dense_first = False


def dense_anatomy(model: DenseBeforeNorm) -> Anatomy:
    plain = own_anatomy(model)
    return OwnAnatomy(plain.embedding, plain.blocks, (Part("dense", model.dense), *plain.head))


def dense_roles(model: DenseBeforeNorm) -> dict[str, Role]:
    scales = {f"layers.{i}.scale": Role("norm", 0) for i in range(len(model.layers))}
    if model.dense_first:
        return {**own_roles(model), **dict(linear("dense", "head")), **scales}
    return {**own_roles(model), **dict([*norm("dense.0"), *linear("dense.1", "head")]), **scales}


def gradient_errors(model_class: type[DenseBeforeNorm], sequence: bool, recomputes: bool) -> dict[str, float]:
    """By parameter: the relative distance of its gradient from that of one process."""
    torch.set_num_threads(1)
    register(model_class, dense_anatomy, dense_roles)
    torch.manual_seed(1)
    plain = model_class().to(D)
    model = parallelize(copy.deepcopy(plain), tensor_axis(), "1d", sequence)
    if recomputes:
        recompute.enable_recomputation(model, "full")
    x = torch.randn(4, 4, 6, dtype=D)
    for net in (model, plain):
        net(x).square().mean().backward()
    return errors(full_gradients(model), plain)


def errors(gradients: dict[str, torch.Tensor], plain: nn.Module) -> dict[str, float]:
    theirs = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert gradients.keys() == theirs.keys()
    # The gradient of a bias of keys is 0, up to rounding.
    return {name: float((gradients[name] - g).norm() / max(g.norm(), 1e-3)) for name, g in theirs.items()}


@pytest.mark.sampled(3, cover=True)
@pytest.mark.parametrize(("sequence", "recomputes"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("model_class", [DenseBeforeNorm, NormBeforeDense])
def test_gradients_of_a_blocks_parameter_and_of_a_head_before_the_last_norm(
    four: hpnb.Ranks, model_class: type[DenseBeforeNorm], sequence: bool, recomputes: bool
) -> None:
    for found in four.run(gradient_errors, model_class, sequence, recomputes):
        assert max(found.values()) < 1e-12, found


def errors_of_a_copy(name: str, sequence: bool, recomputes: bool) -> dict[str, float]:
    """As above, of a sharded model's copy, of the model after that, and of the copy again."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if name == "own":
        register(DenseBeforeNorm, dense_anatomy, dense_roles)
        plain: nn.Module = DenseBeforeNorm().to(D)
        batch = {"x": torch.randn(4, 4, 6, dtype=D)}
    else:
        plain, batch = CASES[name]().build(), CASES[name]().batch(0)

    def loss_of(net: nn.Module) -> torch.Tensor:
        outputs = net(**batch)
        if name == "own":
            return outputs.square().mean()  # type: ignore[no-any-return]
        return CASES[name]().loss(outputs, batch)

    model = parallelize(copy.deepcopy(plain), tensor_axis(), "1d", sequence)
    if recomputes:
        recompute.enable_recomputation(model, "full")
    copied = copy.deepcopy(model)
    model.eval()  # the copy stays in training mode
    loss_of(plain).backward()
    found = {}
    for label, net in (("copied", copied), ("model", model.train()), ("copied again", copied)):
        net.zero_grad()
        loss_of(net).backward()
        found |= {f"{label}: {n}": error for n, error in errors(full_gradients(net), plain).items()}
    return found


@pytest.mark.sampled(3, cover=True)
@pytest.mark.parametrize(("sequence", "recomputes"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", ["vit", "gpt2", "own"])
def test_a_copy_of_a_model_has_the_gradients_of_one_process(
    pools: Callable[[int], hpnb.Ranks], name: str, sequence: bool, recomputes: bool
) -> None:
    for found in pools(2).run(errors_of_a_copy, name, sequence, recomputes):
        assert max(found.values()) < 1e-12, max(found, key=lambda key: found[key])


def dropout_of_a_copy(sequence: bool) -> tuple[bool, bool]:
    """Whether a copy in training mode, of a model in eval mode, draws as a model that was not copied; and
    whether the model draws nothing."""
    torch.set_num_threads(1)
    model = parallelize(gpt2(dropout=0.3), tensor_axis(), "1d", sequence)
    outputs = []
    copied = copy.deepcopy(model)
    for net, other in ((model, copied), (copied, model)):
        net.train()
        other.eval()
        torch.manual_seed(7)
        outputs.append(net(**text(0)).logits)
    state = torch.get_rng_state()
    model(**text(0))
    return torch.equal(*outputs), torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("sequence", [False, True])
def test_a_copy_draws_its_dropout(pools: Callable[[int], hpnb.Ranks], sequence: bool) -> None:
    assert pools(2).run(dropout_of_a_copy, sequence) == [(True, True)] * 2


class ListBlock(OwnBlock):
    """Has scales that no module is called for, in lists of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.full((8,), 0.5), torch.full((8,), 2.0)])
        self.lists = nn.ModuleList([nn.ParameterDict({"shift": torch.full((8,), 0.1)})])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.down(F.gelu(self.up(self.norm(x))))
        return x + self.scales[0] * inner * self.scales[1] + self.lists[0]["shift"] * x  # type: ignore[index]


class ListModel(OwnModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ListBlock() for _ in range(2))


def list_roles(model: OwnModel) -> dict[str, Role]:
    names = ("scales.0", "scales.1", "lists.0.shift")
    return own_roles(model) | {f"layers.{i}.{name}": Role("norm", 0) for i in range(2) for name in names}


def list_errors(sequence: bool, recomputes: bool) -> list[dict[str, float]]:
    """Of the model, and of a copy of it: by parameter, the distance of its gradient from one process's."""
    torch.set_num_threads(1)
    register(ListModel, own_anatomy, list_roles)
    torch.manual_seed(1)
    plain = ListModel().to(D)
    model = parallelize(copy.deepcopy(plain), tensor_axis(), "1d", sequence)
    names = [name for name, _ in model.named_parameters()]
    if recomputes:
        recompute.enable_recomputation(model, "full")
    copied = copy.deepcopy(model)
    x = torch.randn(4, 4, 6, dtype=D)
    for net in (model, copied, plain):
        net(x).square().mean().backward()
    assert [name for name, _ in model.named_parameters()] == names
    return [errors(full_gradients(net), plain) for net in (model, copied)]


@pytest.mark.parametrize(("sequence", "recomputes"), [(False, False), (True, False), (True, True)])
def test_gradients_of_lists_of_parameters_in_a_block(
    four: hpnb.Ranks, sequence: bool, recomputes: bool
) -> None:
    for of_rank in four.run(list_errors, sequence, recomputes):
        for found in of_rank:
            assert max(found.values()) < 1e-12, found


class UncalledBlock(OwnBlock):
    """Has a layer that it calls, or reads the weights of, or does not use."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads, self.scale = reads, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.reads == "call":
            return x + self.scale(x)  # type: ignore[no-any-return]
        return x if self.reads == "nothing" else x + F.linear(x, self.scale.weight, self.scale.bias)


class UncalledModel(OwnModel):
    def __init__(self, reads: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(UncalledBlock(reads) for _ in range(2))


def uncalled_roles(model: OwnModel) -> dict[str, Role]:
    return own_roles(model) | dict(pair for i in range(2) for pair in linear(f"layers.{i}.scale", "head"))


def backward_of_reads(reads: str, sequence: bool) -> str | float:
    torch.set_num_threads(1)
    register(UncalledModel, own_anatomy, uncalled_roles)
    torch.manual_seed(1)
    plain = UncalledModel(reads).to(D)
    model = parallelize(copy.deepcopy(plain), tensor_axis(), "1d", sequence)
    x = torch.randn(4, 4, 6, dtype=D)
    plain(x).square().mean().backward()
    try:
        model(x).square().mean().backward()
    except ValueError as error:
        return str(error)
    theirs = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    ours = full_gradients(model)
    return max(float((ours[name] - g).norm() / g.norm()) for name, g in theirs.items())


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("reads", ["call", "nothing", "weights"])
def test_with_sequence_parallelism_a_layer_that_is_not_called_is_refused(
    four: hpnb.Ranks, reads: str, sequence: bool
) -> None:
    for found in four.run(backward_of_reads, reads, sequence):
        if sequence and reads == "weights":
            assert "is used without a call of layers.1.scale" in str(found)
        else:
            assert isinstance(found, float), found
            assert found < 1e-12


def add_bias_on_every_rank(layer: RowParallelLinear, old: nn.Module, transposed: bool, sharding: Any) -> None:
    row_parallel_init(layer, old, transposed, sharding)
    layer.adds_bias = True


row_parallel_init = RowParallelLinear.__init__
BREAKAGES: dict[str, tuple[type, str, Any]] = {
    "backward all-reduce": (
        SequenceSharding,
        "_start_all_reduce",
        lambda self, grad: (grad, Pending(), grad),
    ),
    "replicated gradients": (ReplicatedGradSum, "weight", lambda self, weight: weight),
    "bias on every rank": (RowParallelLinear, "__init__", add_bias_on_every_rank),
}


def broken(what: str) -> float:
    """Parity with one thing broken."""
    case = lm_case()
    with mock.patch.object(*BREAKAGES[what]):
        model = parallelize(case.build(), tensor_axis(), "1d", what == "replicated gradients")
        return apart(train(model, case, own_loss, full_gradients, full_state_dict), serial(case))


@pytest.mark.parametrize("what", BREAKAGES)
def test_what_is_broken_shows(pools: Callable[[int], hpnb.Ranks], what: str) -> None:
    assert min(pools(2).run(broken, what)) > 1e-3


# --- loss ---


def losses(options: dict[str, Any], words: int) -> tuple[float, float]:
    axis = tensor_axis()
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 6, words, generator=g, dtype=D) * 5
    targets = torch.randint(0, words, (4, 6), generator=g)
    targets[1, 2:], targets[3] = -100, -100
    whole = logits.clone().requires_grad_()
    z_loss = options.get("z_loss", 0.0)
    wanted = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="sum",
                             label_smoothing=options.get("label_smoothing", 0.0))  # fmt: skip
    wanted = wanted + z_loss * whole.logsumexp(-1)[targets != -100].square().sum()
    wanted.backward()
    share = comm.split_sizes(words, axis.size)
    first = sum(share[: axis.rank])
    own = logits[..., first : first + share[axis.rank]].clone().requires_grad_()
    total, count = cross_entropy(own, targets, axis, words, **options)
    total.backward()
    assert int(count) == int((targets != -100).sum())
    assert own.grad is not None
    assert whole.grad is not None
    part = whole.grad[..., first : first + share[axis.rank]]
    return abs(float(total - wanted)) / float(wanted), float((own.grad - part).norm() / whole.grad.norm())


@pytest.mark.parametrize("words", [53, 3])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"label_smoothing": 0.2, "z_loss": 0.1}]
)
def test_cross_entropy(four: hpnb.Ranks, options: dict[str, float], words: int) -> None:
    for loss, gradient in four.run(losses, options, words):
        assert loss < 1e-14
        assert gradient < 1e-14


def no_targets() -> tuple[float, int, float]:
    axis = tensor_axis()
    logits = torch.randn(2, 3, comm.split_sizes(9, axis.size)[axis.rank], dtype=D, requires_grad=True)
    total, count = cross_entropy(logits, torch.full((2, 3), -100), axis, 9)
    total.backward()
    assert logits.grad is not None
    ids = torch.zeros(1, 4, dtype=torch.long)
    model = parallelize(gpt2(words=9), axis)
    mean = model(input_ids=ids, labels=torch.full_like(ids, -100), num_items_in_batch=0).loss
    return float(total), int(count), float(logits.grad.abs().sum()) + float(mean)


def test_no_targets_count_for_nothing(four: hpnb.Ranks) -> None:
    assert four.run(no_targets) == [(0.0, 0, 0.0)] * 4


def outside_of_the_vocabulary() -> list[str]:
    axis, said = tensor_axis(), []
    logits = torch.randn(2, comm.split_sizes(9, axis.size)[axis.rank])
    for target in (9, -1):
        with pytest.raises(ValueError) as error:
            cross_entropy(logits, torch.tensor([0, target]), axis, 9)
        said.append(str(error.value))
    model = parallelize(gpt2(words=9), axis)
    with pytest.raises(ValueError) as error:
        model(input_ids=torch.tensor([[0, 9]]))
    return [*said, str(error.value)]


def test_ids_outside_of_the_vocabulary_raise(four: hpnb.Ranks) -> None:
    assert four.run(outside_of_the_vocabulary)[0] == [
        "9 is not in the vocabulary; use targets of 0 to 8, or -100 to ignore",
        "-1 is not in the vocabulary; use targets of 0 to 8, or -100 to ignore",
        "9 is not in the vocabulary; use token ids of 0 to 8",
    ]


def refused_losses() -> list[str]:
    axis, said = tensor_axis(), []
    own = comm.split_sizes(9, axis.size)[axis.rank]
    for logits, targets, options in (
        (torch.randn(2, own + 1), torch.zeros(2, dtype=torch.long), {}),
        (torch.randn(2, own), torch.zeros(3, dtype=torch.long), {}),
        (torch.randn(2, own), torch.zeros(2, dtype=torch.long), {"label_smoothing": 1.5}),
    ):
        with pytest.raises(ValueError) as error:
            cross_entropy(logits, targets, axis, 9, **options)
        said.append(str(error.value))
    return said


def test_cross_entropy_refuses(four: hpnb.Ranks) -> None:
    shape, targets, smoothing = four.run(refused_losses)[0]
    assert "logits of 4" in shape
    assert "9 has 3" in shape
    assert "(3,)" in targets
    assert "(2,)" in targets
    assert "1.5" in smoothing


# --- outputs ---


def read_logits() -> tuple[float, float, float, float, float]:
    model, batch = parallelize(gpt2(), tensor_axis()), text(0)
    plain = gpt2()(**batch).logits
    with record.traffic() as before, torch.no_grad():
        outputs = model(**batch)
    with record.traffic() as reading:
        logits = outputs.logits
    with record.traffic() as again:
        assert outputs["logits"] is logits
        assert outputs[1] is logits
        assert outputs.to_tuple()[1] is logits
    gathered = sum(m.bytes for m in before.messages if m.op == "all_gather")
    with torch.no_grad():
        first = model(**batch, return_dict=False)[1]
    return (
        gathered,
        reading.bytes["tp"],
        again.total,
        float((logits - plain).abs().max()),
        float((first - plain).abs().max()),
    )


def test_logits_are_gathered_when_read(four: hpnb.Ranks) -> None:
    gathered, reading, again, off, tuples = four.run(read_logits)[0]
    assert gathered == 0
    assert again == 0
    assert off < 1e-13
    assert tuples < 1e-13
    assert reading == 3 / 4 * 8 * 11 * 4 * 14 * 8  # 53 words over 4 ranks are padded to 4 x 14, of 8 bytes


def gradient_through_logits() -> float:
    model, batch = parallelize(gpt2(), tensor_axis()), text(0)
    model(**batch).logits.square().mean().backward()
    plain = gpt2()
    plain(**batch).logits.square().mean().backward()
    ours = full_gradients(model)
    return max(
        float((ours[n] - p.grad).norm() / p.grad.norm())
        for n, p in plain.named_parameters()
        if p.grad is not None
    )


def test_a_loss_of_whole_logits_has_its_gradient(four: hpnb.Ranks) -> None:
    assert max(four.run(gradient_through_logits)) < 1e-11


# --- bytes and memory ---


def block_traffic(sequence: bool) -> tuple[float, int, int]:
    """Bytes of hidden states that a block's forward and backward send, and the vectors' beside them."""
    axis, model = tensor_axis(), vit()
    parallelize(model, axis, "1d", sequence)
    found = hpnb.models.anatomy(model)
    second = found.blocks[1].module
    hidden = torch.randn(8, 17, 48, dtype=D)
    if sequence:
        hidden = hidden.view(1, -1, 48)[:, : comm.split_sizes(8 * 17, axis.size)[axis.rank]]
        with torch.no_grad():
            model(**images(0))  # so that the shape is known
    hidden = hidden.clone().requires_grad_()
    with record.traffic() as t:
        second(hidden, None).square().sum().backward()
    vectors = sum(p.numel() for p in second.parameters() if not placement_of(p).cuts) * 8
    own = [m.bytes for m in t.messages if m.op == "all_reduce"] if sequence else []
    return t.bytes["tp"] - sum(own), len(own), vectors


@pytest.mark.parametrize("sequence", [False, True])
def test_bytes_of_a_block(ranks: hpnb.Ranks, sequence: bool) -> None:
    found = ranks.run(block_traffic, sequence)
    t, (sent, vectors, _) = len(found), found[0]
    tokens = -(-8 * 17 // t) * t if sequence else 8 * 17  # messages are padded to equal shares
    assert sent == pytest.approx(4 * 2 * (t - 1) / t * tokens * 48 * 8, rel=1e-15)
    assert vectors == (1 if sequence else 0)  # norms and biases of a block go in one message


def parameters_held() -> tuple[int, int, int, int]:
    model = parallelize(gpt2(heads=5, hidden=40), tensor_axis())
    held = sum(p.numel() for p in model.parameters())
    roles = hpnb.models.roles(gpt2(heads=5, hidden=40))
    plain = dict(gpt2(heads=5, hidden=40).named_parameters())
    cut = sum(
        p.numel() for n, p in plain.items() if roles[n].cut_dim is not None or roles[n].vocabulary is not None
    )
    return held, cut, sum(p.numel() for p in plain.values()), tensor_axis().rank


def test_memory_of_weights(four: hpnb.Ranks) -> None:
    """5 heads over 4 ranks are 2, 1, 1, 1; 53 words 14, 13, 13, 13; 160 neurons 40 each."""
    for held, cut, every, rank in four.run(parameters_held):
        heads, words = (2, 14) if rank == 0 else (1, 13)
        attention = 2 * (heads * 8 * (4 * 40 + 3))
        neurons = 2 * (40 * (2 * 40 + 1))
        assert held == every - cut + attention + neurons + words * 40


# --- composition ---


def with_data_parallel(stage: int, sequence: bool) -> float:
    """dp 2 x tp 2: distinct samples on each replica, a clipped norm that counts everything once."""
    mesh = Mesh(Layout(dp=2, tp=2))
    case = lm_case(padded=False)
    model = parallelize(case.build(), mesh.tp, "1d", sequence)
    if stage:
        optimizer: Any = hpnb.ZeroOptimizer(
            model.parameters(), torch.optim.SGD, mesh.dp, stage=stage, lr=0.2, momentum=0.9
        )
        runs: nn.Module = model
    else:
        runs = hpnb.DataParallel(model, mesh.dp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    plain = case.build()
    reference = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    worst = 0.0
    for step in range(2):
        batch = text(step, padded=False)
        mine = {name: value.chunk(2)[mesh.dp.rank] for name, value in batch.items()}
        optimizer.zero_grad()
        runs(**mine).loss.backward()
        norm = hpnb.precision.step(optimizer, [mesh.dp, mesh.tp], max_norm=0.5)
        reference.zero_grad()
        causal_loss(plain(**batch), batch).backward()
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
        found = norm.norm if hasattr(norm, "norm") else norm
        worst = max(worst, abs(float(found) - float(wanted)) / float(wanted))
    ours, theirs = full_state_dict(model), plain.state_dict()
    return max(worst, *(float((ours[n] - w).norm() / w.norm()) for n, w in theirs.items()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("stage", "sequence"), [(0, False), (0, True), (1, True), (2, False)])
def test_beside_data_parallelism(four: hpnb.Ranks, stage: int, sequence: bool) -> None:
    assert max(four.run(with_data_parallel, stage, sequence)) < 1e-6


def from_meta() -> tuple[float, int]:
    """A model that nobody holds whole: cut on meta, filled from a mapping that is read one by one."""
    full = gpt2().state_dict()

    class Files(dict[str, torch.Tensor]):
        reads = 0

        def __getitem__(self, name: str) -> torch.Tensor:
            Files.reads += 1
            return super().__getitem__(name)

    with torch.device("meta"):
        model = gpt2_on_meta()
    parallelize(model, tensor_axis())
    before = list(model.parameters())  # as an optimizer that was made now would have them
    tensor_parallel.load_full_state_dict(model, Files(full))
    assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
    found = full_state_dict(model)
    return max(float((found[n] - w).abs().max()) for n, w in full.items()), Files.reads


def gpt2_on_meta() -> nn.Module:
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel(gpt2().config).to(D)  # type: ignore[arg-type]
    model.tie_weights()
    return model


def test_a_checkpoint_without_a_whole_model(four: hpnb.Ranks) -> None:
    for off, reads in four.run(from_meta):
        assert off == 0
        assert reads == len(list(gpt2().parameters()))


def optimizer_made_before() -> float:
    case = lm_case()
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    parallelize(model, tensor_axis())
    for step in range(2):
        optimizer.zero_grad()
        model(**case.batch(step)).loss.backward()
        optimizer.step()
    wanted = serial(case).weights
    return max(float((w - wanted[n]).norm() / wanted[n].norm()) for n, w in full_state_dict(model).items())


def test_an_optimizer_made_before_holds_the_parts(four: hpnb.Ranks) -> None:
    assert max(four.run(optimizer_made_before)) < 1e-12


# --- dropout ---


def masks(sequence: bool, seed: int) -> dict[str, torch.Tensor]:
    """Which elements each dropout of the first block keeps, in the order of the forward."""
    torch.manual_seed(seed)
    model = parallelize(gpt2(dropout=0.5), tensor_axis(), "1d", sequence)
    kept: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Any:
        return lambda module, args, output: kept.__setitem__(name, (output == 0) & (args[0] != 0))

    block = model.transformer.h[0]  # type: ignore[union-attr,index]
    model.transformer.drop.register_forward_hook(watch("embedding"))  # type: ignore[union-attr]
    block.attn.resid_dropout.register_forward_hook(watch("attention"))  # type: ignore[union-attr]
    block.mlp.dropout.register_forward_hook(watch("mlp"))  # type: ignore[union-attr]
    model.set_attn_implementation("eager")  # type: ignore[operator]
    plain = F.dropout

    def dropout(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = plain(x, *args, **kwargs)
        if x.dim() == 4:
            kept.setdefault("probabilities", ((y == 0) & (x != 0))[..., -1:, :])  # causal: the last sees all
        return y

    F.dropout = dropout  # type: ignore[assignment]
    try:
        torch.manual_seed(seed)
        loss = model(**text(0, padded=False)).loss
        loss.backward()
    finally:
        F.dropout = plain
    kept["loss"] = loss.detach()
    kept["next"] = torch.rand(3)
    return kept


@pytest.mark.parametrize("sequence", [False, True])
def test_masks(four: hpnb.Ranks, sequence: bool) -> None:
    found = four.run(masks, sequence, 7)
    again = four.run(masks, sequence, 7)
    other = four.run(masks, sequence, 8)
    for name in found[0]:
        assert all(torch.equal(a[name], b[name]) for a, b in zip(found, again, strict=True)), name
    assert all(float(a["loss"]) == float(found[0]["loss"]) for a in found)
    assert float(other[0]["loss"]) != float(found[0]["loss"])
    assert all(torch.equal(a["next"], found[0]["next"]) for a in found)  # the generator is common again
    alike = ["embedding"] if sequence else ["embedding", "attention", "mlp"]
    for name in ("embedding", "attention", "mlp", "probabilities"):
        same = [x[name][..., :2, :5].equal(found[0][name][..., :2, :5]) for x in found[1:]]
        assert all(same) if name in alike else not any(same), name
        assert 0.3 < float(torch.cat([x[name].flatten() for x in found]).double().mean()) < 0.7


def computed_again(sequence: bool) -> float:
    """The same masks when blocks are computed again for the backward."""
    found = []
    for again in (False, True):
        model = parallelize(gpt2(dropout=0.3), tensor_axis(), "1d", sequence)
        if again:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        torch.manual_seed(3)
        model(**text(0)).loss.backward()
        found.append(full_gradients(model))
    return max(float((found[1][name] - g).norm() / g.norm()) for name, g in found[0].items())


@pytest.mark.parametrize("sequence", [False, True])
def test_masks_are_the_same_when_computed_again(four: hpnb.Ranks, sequence: bool) -> None:
    assert max(four.run(computed_again, sequence)) < 1e-10


def order(sequence: bool) -> list[str]:
    """What a backward of one block does, one after the other."""
    done: list[str] = []

    def note(kind: Any, name: str, word: str) -> Any:
        original = getattr(kind, name)
        return mock.patch.object(kind, name, lambda *a, **k: (done.append(word), original(*a, **k))[1])

    model = parallelize(vit(), tensor_axis(), "1d", sequence)
    model(**images(0))
    block = hpnb.models.anatomy(model).blocks[1].module
    shape = (1, comm.split_sizes(8 * 17, 4)[hpnb.rank()], 48) if sequence else (8, 17, 48)
    hidden = torch.randn(shape, dtype=D, requires_grad=True)
    loss = block(hidden, None).sum()
    with ExitStack() as stack:
        for kind, name, word in (
            (Background, "all_reduce", "send"),
            (Background, "reduce_scatter", "send"),
            (Pending, "wait", "wait"),
            (DeferredWeightGrad, "compute", "weight"),
        ):
            stack.enter_context(note(kind, name, word))
        loss.backward()
    return done


@pytest.mark.parametrize("sequence", [False, True])
def test_weights_come_while_the_gradient_travels(four: hpnb.Ranks, sequence: bool) -> None:
    """The MLP's two weights, then the attention's four, each between the start of the sum and the wait."""
    expected = ["send", *["weight"] * 2, "wait", "send", *["weight"] * 4, "wait"]
    assert four.run(order, sequence)[0] == expected


def seeded_apart() -> None:
    model = parallelize(gpt2(dropout=0.1), tensor_axis())
    torch.manual_seed(hpnb.rank())
    model(**text(0))


def test_seeds_that_differ_are_refused(four: hpnb.Ranks) -> None:
    with pytest.raises(hpnb.RankError, match=r"torch\.manual_seed with the same seed"):
        four.run(seeded_apart)


# --- errors ---


def refused(mode: str, sequence: bool, depth: int, heads: int) -> str:
    with pytest.raises(ValueError) as error:
        parallelize(vit(heads=heads), tensor_axis(), mode, sequence, depth)
    return str(error.value)


@pytest.mark.parametrize(
    ("ranks", "mode", "sequence", "depth", "heads", "words"),
    [
        (3, "1d", False, 1, 2, "2 heads, which 3 ranks cannot share; use at most 2"),
        (3, "2d", False, 1, 4, "2d needs q x q ranks, and 3 is not of that form; 1 would do, or 4"),
        (3, "3d", False, 1, 4, "3 is no cube; 1 = 1 x 1 x 1 would do, or 8"),
        (3, "2.5d", False, 2, 4, "2.5d needs 2 x q x q ranks, and 3 is not of that form; 2 would do, or 8"),
        (1, "4d", False, 1, 4, "no tensor-parallel mode '4d'; use 1d, 2d, 2.5d, 3d"),
        (1, "1d", False, 2, 4, "mode '1d' has no depth"),
        (1, "2d", True, 1, 4, "sequence_parallel goes with mode='1d'"),
        (1, "1d", False, 0, 4, "depth=0 is not a count"),
    ],
)
def test_refused(
    pools: Callable[[int], hpnb.Ranks],
    ranks: int,
    mode: str,
    sequence: bool,
    depth: int,
    heads: int,
    words: str,
) -> None:
    assert words in pools(ranks).run(refused, mode, sequence, depth, heads)[0]


def refused_models() -> list[str]:
    axis, said = tensor_axis(), []
    model = parallelize(vit(), axis)
    trained = vit()
    trained(**images(0)).loss.backward()
    for again, kind in ((model, ValueError), (trained, ValueError), (nn.Linear(2, 2), TypeError)):
        with pytest.raises(kind) as error:
            parallelize(again, axis)
        said.append(str(error.value))
    with pytest.raises(ValueError) as error:
        full_state_dict(vit())
    return [*said, str(error.value)]


def test_models_that_are_refused(pools: Callable[[int], hpnb.Ranks]) -> None:
    twice, gradient, unknown, uncut = pools(1).run(refused_models)[0]
    assert "parallelize" in twice
    assert "has a gradient" in gradient
    assert "does not know the parts of a Linear" in unknown
    assert "has not been sharded" in uncut


class FusedBlock(OwnBlock):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)


def refused_fused_attention(mode: str) -> str:
    def with_attention(model: OwnModel) -> dict[str, Role]:
        path = "layers.0.attention"
        fused = Role("column", 0, 1, units=2, fused=3)
        biased = {f"{path}.in_proj_bias": Role("column", 0, bias=True, units=2, fused=3)}
        return (
            own_roles(model) | {f"{path}.in_proj_weight": fused} | biased
            | dict(linear(f"{path}.out_proj", "row", 2))
        )  # fmt: skip

    register(OwnModel, own_anatomy, with_attention)
    model = OwnModel()
    model.layers[0] = FusedBlock()
    with pytest.raises(ValueError) as error:
        parallelize(model, tensor_axis(), mode)
    return str(error.value)


@pytest.mark.parametrize(("mode", "size"), [("1d", 2), ("2d", 4)])
def test_an_attention_of_pytorch_is_named(pools: Callable[[int], hpnb.Ranks], mode: str, size: int) -> None:
    said = pools(size).run(refused_fused_attention, mode)[0]
    assert said.startswith("layers.0.attention is an nn.MultiheadAttention")


def full_weights_of_a_boosted_model(stage: int) -> tuple[float, str]:
    plugin = hpnb.HybridParallelPlugin(tp_size=2, zero_stage=stage, precision="fp64")
    model, wanted = gpt2(), gpt2().state_dict()
    boosted, *_ = hpnb.Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        full = full_state_dict(boosted)
    except ValueError as error:
        return 0.0, str(error)
    assert full.keys() == wanted.keys()
    return max(float((full[name] - tensor).abs().max()) for name, tensor in wanted.items()), ""


def test_the_full_weights_of_a_boosted_model(pools: Callable[[int], hpnb.Ranks], four: hpnb.Ranks) -> None:
    assert pools(2).run(full_weights_of_a_boosted_model, 0) == [(0.0, "")] * 2
    for _, said in four.run(full_weights_of_a_boosted_model, 3):
        assert "is sharded along dp too" in said
        assert "booster.save_model" in said


# --- under a pipeline --------------------------------------------------------------------------------------


STAGED = {
    "gpt2": lambda: lm_case(layers=4),
    "gpt2 classifies": lambda: classifier_case(layers=4),
    "vit": vit_case,
}


def pipelined(name: str, style: str, sequence: bool, chunks: int) -> float:
    """pp 2 x tp 2, microbatches of unequal rows: gradients and weights of this rank's stages."""
    from hpnb.pipeline_parallel import schedules
    from hpnb.pipeline_parallel.stages import full_state_dict as whole

    mesh = Mesh(Layout(pp=2, tp=2))
    case = STAGED[name]()
    model = parallelize(case.build(), mesh.tp, "1d", sequence)
    schedule = schedules.make(style, 2 * chunks, 3, chunks)
    pipe = hpnb.Pipeline(model, mesh.pp, schedule, lambda outputs, inputs: loss_of_a_stage(outputs, inputs))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        losses.append(float(pipe.step(case.batch(step)).loss))
        optimizer.step()
    wanted = serial(case)
    found = whole(pipe.module, mesh.pp, [mesh.tp])
    off = [abs(a - b) / abs(b) for a, b in zip(losses, wanted.losses, strict=True)]
    return max(*off, *(float((found[n] - w).norm() / w.norm()) for n, w in wanted.weights.items()))


def loss_of_a_stage(outputs: Any, inputs: Any) -> torch.Tensor:
    if isinstance(outputs, ImageClassifierOutput | SequenceClassifierOutput):
        return F.cross_entropy(outputs.logits, inputs["labels"])
    loss: torch.Tensor = outputs.loss  # of cut logits
    return loss


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "style", "sequence", "chunks"),
    [
        ("vit", "1f1b", False, 1),
        ("vit", "zb-h1", True, 1),
        ("gpt2", "zb-v", True, 2),
        ("gpt2", "gpipe", False, 1),
        ("gpt2 classifies", "interleaved", True, 2),
    ],
)
def test_under_a_pipeline(four: hpnb.Ranks, name: str, style: str, sequence: bool, chunks: int) -> None:
    assert max(four.run(pipelined, name, style, sequence, chunks)) < 1e-12
