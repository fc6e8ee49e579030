"""A backward in two parts against one in one part, in float64: all gradients, and what is held in between."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import hpnb
from hpnb import Layout, Mesh
from hpnb.gradients import hook_gradients
from hpnb.pipeline_parallel import split_backward, weight_gradient_rules
from hpnb.pipeline_parallel.split_backward import SplitBackward
from hpnb.placement import full_tensors

D = torch.float64
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*padding='same':UserWarning"),
    pytest.mark.filterwarnings("ignore:.*do not obey the gradient layout contract:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*create_graph=True will create a reference cycle:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning"),
]
WAYS = ("off", "fused", "split", "mixed")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other at such sizes take longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = D) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=dtype)


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors of an output that have a gradient."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    values = value.values() if isinstance(value, dict) else value
    return [leaf for v in values if v is not None for leaf in leaves(v)]


def backward(output: Any) -> None:
    """A gradient that differs in every element."""
    found = leaves(output)
    torch.autograd.backward(found, [random(*t.shape, seed=7).to(t.dtype) + t.detach() for t in found])


Gradients = dict[str, torch.Tensor | None]


def gradients(
    model: nn.Module,
    inputs: list[torch.Tensor],
    way: str,
    split: SplitBackward | None,
    run: Callable[..., Any],
) -> Gradients:
    """Of all parameters and inputs, summed over microbatches that are all under way at once."""
    xs = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    outputs = [run(model, x) for x in xs]
    ways = {"off": ["off"], "fused": ["fused"], "split": ["split"], "mixed": ["off", "split", "fused"]}[way]
    mode = [ways[i % len(ways)] if split is not None else "off" for i in range(len(xs))]
    for i, output in enumerate(outputs):
        with in_mode(split, mode[i], i):
            backward(output)
    for i in reversed(range(len(xs))):  # in another order than I
        if mode[i] == "split":
            assert split is not None
            split.add_weight_gradients(i)
            assert not split.pending(i)
    found = {name: p.grad for name, p in model.named_parameters()}
    return {**found, **{f"input {i}": x.grad for i, x in enumerate(xs)}}


def in_mode(split: SplitBackward | None, mode: str, key: int) -> Any:
    if split is None or mode == "off":
        return nullcontext()
    return split.fused() if mode == "fused" else split.deferring(key)


def distance(found: Gradients, wanted: Gradients) -> float:
    """The largest relative distance; a gradient that is zero by symmetry is held to the typical norm."""
    assert found.keys() == wanted.keys()
    assert {n for n in found if found[n] is None} == {n for n in wanted if wanted[n] is None}
    pairs = {n: (found[n], w) for n, w in wanted.items() if w is not None}
    typical = max(float(w.norm()) for _, w in pairs.values())
    off = 0.0
    for name, (mine, theirs) in pairs.items():
        assert mine is not None
        assert not mine.requires_grad
        assert (mine.dtype, mine.shape, mine.layout) == (theirs.dtype, theirs.shape, theirs.layout), name
        off = max(off, float((mine - theirs).norm() / max(theirs.norm(), torch.tensor(1e-3 * typical))))
    return off


def unsplit(model: nn.Module) -> None:
    """Let the modules compute with the forward of their class again."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), split_backward._PatchedForward):
            del module.__dict__["forward"]


def compare(
    model: nn.Module,
    inputs: list[torch.Tensor],
    way: str,
    run: Callable[..., Any] = lambda model, x: model(x),
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> tuple[float, SplitBackward]:
    """Distance of all gradients from those of a copy that is not split, after two steps of accumulation."""
    model.zero_grad()  # a copy has no gradients either
    plain = copy.deepcopy(model)
    unsplit(plain)  # if the model was split before, so is its copy
    split = SplitBackward([model])
    for m in (model, plain):
        prepare(m)
    off = 0.0
    for seed in (1, 2):
        torch.manual_seed(seed)
        wanted = gradients(plain, inputs, "off", None, run)
        torch.manual_seed(seed)
        found = gradients(model, inputs, way, split, run)
        off = max(off, distance(found, wanted))
    return off, split


# --- modules ---------------------------------------------------------------------------------------------


class Raw(nn.Module):
    """Parameters of its own, and weights of others used outside of their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(random(5, 6))
        self.table = nn.Embedding(7, 6)
        self.inside = nn.Linear(6, 6)
        self.outside = nn.Linear(6, 6)
        self.both = nn.Linear(6, 6)
        self.never = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.position + self.table(torch.arange(5) % 3)
        h = torch.tanh(self.inside(h)) @ self.outside.weight
        return self.both(h) + F.linear(h, self.both.weight.t(), self.both.bias)


class Shared(nn.Module):
    """A module used twice, two with one weight, two with one bias, and an input that several need."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(6, 6)
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight
        self.other.bias = self.twice.bias
        self.turned = Conv1D(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        a, b, c = self.twice(x), self.one(x), self.turned(x)
        h = torch.tanh(self.twice(a + b) * self.other(c))
        return self.other(h), {"also": h, "twice": self.twice(h)}


class Ends(nn.Module):
    """A linear whose output a stage passes on in some other form."""

    def __init__(self, end: Callable[[torch.Tensor], Any], kind: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6) if kind is nn.Linear else Conv1D(6, 6)
        self.end = end

    def forward(self, x: torch.Tensor) -> Any:
        return self.end(self.last(self.end_of_first(self.first(x))))

    @staticmethod
    def end_of_first(h: torch.Tensor) -> torch.Tensor:
        return F.relu_(h)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4), nn.GELU(),
            nn.Conv2d(8, 6, 2, padding="same"), nn.Conv2d(6, 6, 3, padding=1, padding_mode="reflect"),
        )  # fmt: skip
        self.line, self.space = nn.Conv1d(6, 5, 3), nn.Conv3d(1, 2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.parts(x)  # (B, 6, 4, 4)
        single = self.line(h[0].flatten(1)).relu_()  # without a batch
        return self.space(self.line(h.flatten(2)).unsqueeze(1).unsqueeze(1).expand(-1, 1, 2, 5, 14)), single


class Asks(nn.Module):
    """A module whose own backward asks autograd for a gradient, of its input and of its weight."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.inner, self.weights = nn.Linear(6, 6), weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, weights = self.inner, self.weights

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return torch.tanh(inner(x))

            @staticmethod
            def backward(ctx: Any, g: torch.Tensor) -> Any:
                with torch.enable_grad():
                    x = ctx.saved_tensors[0].detach().requires_grad_()
                    y = torch.tanh(inner(x))
                wanted = [x, *inner.parameters()] if weights else [x]
                found = torch.autograd.grad(y, wanted, g)
                return *found, *([] if weights else [None, None])

        return Function.apply(x, *inner.parameters())


class Drops(torch.autograd.Function):
    """Passes no gradient on to its second input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.dropped = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Drops.apply(self.used(x), self.dropped(x))
        return y


def linear(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), *more, nn.Linear(6, 6))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "sequential": (lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.LayerNorm(16),
                                         nn.Linear(16, 4, bias=False)), (5, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, batch_first=True), (3, 5, 6)),
    "recurrent": (lambda: nn.Sequential(nn.LSTM(6, 8, 2, batch_first=True), First(), nn.Linear(8, 3)),
                  (3, 5, 6)),
    "raw": (Raw, (3, 5, 6)),
    "shared": (Shared, (3, 5, 6)),
    "convolutions": (Convolutions, (2, 4, 8, 8)),
    "asks for the input's": (lambda: linear(Asks(False)), (3, 6)),
    "asks for all": (lambda: linear(Asks(True)), (3, 6)),
    "dropped": (Dropped, (3, 6)),
    "bilinear": (lambda: nn.Sequential(nn.Linear(6, 6), Squares()), (4, 6)),
}  # fmt: skip


class First(nn.Module):
    def forward(self, x: tuple[torch.Tensor, Any]) -> torch.Tensor:
        return x[0]


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(6, 6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(x, x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_any_module_has_the_same_gradients(name: str, way: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    off, _ = compare(make().to(D), [random(*shape, seed=i) for i in range(4)], way)
    assert off < 1e-12


ENDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda y: y.view(-1, 3),
    "transposed": lambda y: y.transpose(0, 1),
    "slice": lambda y: y[1:, ..., ::2],
    "tuple": lambda y: (y, y[0], y.unbind(-1)[2]),
    "expanded": lambda y: y.sum(),
    "in place": lambda y: F.relu_(y),
    "in place on a part": lambda y: (y[0].mul_(2), y)[1],
    "added in place": lambda y: y.add_(y.detach()),
}


@pytest.mark.parametrize("way", ["fused", "split"])
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("end", ENDS)
def test_a_stage_may_end_in_anything(end: str, kind: type[nn.Module], way: str) -> None:
    torch.manual_seed(0)
    off, _ = compare(Ends(ENDS[end], kind).to(D), [random(4, 3, 6, seed=i) for i in range(2)], way)
    assert off < 1e-12


@pytest.mark.parametrize("way", ["fused", "split"])
@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (2, 2, 3, 6), (0, 6), (2, 0, 6)])
@pytest.mark.parametrize("kind", ["linear", "no bias", "Conv1D"])
def test_inputs_of_any_shape(kind: str, shape: tuple[int, ...], way: str) -> None:
    torch.manual_seed(0)
    last: nn.Module = Conv1D(4, 6) if kind == "Conv1D" else nn.Linear(6, 4, bias=kind == "linear")
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), last).to(D)
    off, _ = compare(model, [random(*shape, seed=i) for i in range(2)], way)
    assert off < 1e-12


@pytest.mark.parametrize("way", ["fused", "split"])
def test_inputs_that_do_not_lie_in_order(way: str) -> None:
    torch.manual_seed(0)
    for turn in (lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[:1].expand(4, -1, -1)):
        run = lambda model, x, turn=turn: model(turn(x)).transpose(0, 2)  # noqa: E731
        off, _ = compare(linear().to(D), [random(4, 4, 6, seed=i) for i in range(2)], way, run)
        assert off < 1e-12
    turned = linear().to(D)
    turned[0].weight = nn.Parameter(random(6, 6).t())
    images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3))
    images = images.to(D, memory_format=torch.channels_last)
    for model, x in ((turned, random(3, 6)), (images, random(2, 3, 8, 8))):
        off, _ = compare(model, [x.to(memory_format=torch.channels_last) if x.dim() == 4 else x], way)
        assert off < 1e-12
        assert [p.grad.stride() for p in model.parameters()] == [p.stride() for p in model.parameters()]


def freeze(which: str) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            p.requires_grad_(not name.endswith(which))

    return prepare


@pytest.mark.parametrize("way", ["fused", "split"])
@pytest.mark.parametrize("which", ["weight", "bias", "2.weight", "0.bias"])
def test_what_is_frozen_gets_no_gradient(which: str, way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), Conv1D(4, 6)).to(D)
    off, split = compare(model, [random(3, 6, seed=i) for i in range(2)], way, prepare=freeze(which))
    assert off < 1e-12
    with split.deferring("last"):
        model(random(3, 6)).sum().backward()
    layers = [layer for layer in model if not isinstance(layer, nn.Tanh) and layer.weight.requires_grad]
    assert split.pending("last") == {p for layer in layers for p in layer.parameters() if p.requires_grad}


@pytest.mark.parametrize("way", ["fused", "split"])
def test_the_first_layer_has_no_gradient_of_its_input(way: str) -> None:
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x.detach())
        if isinstance(model[0], nn.Linear):
            with torch.no_grad():
                model[0].weight.mul_(1)  # the backward does not need it
        return y

    torch.manual_seed(0)
    images = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(2))
    for model, shape in ((linear(), (3, 6)), (images, (2, 2, 5, 5))):
        off, _ = compare(model.to(D), [random(*shape, seed=i) for i in range(2)], way, run)
        assert off < 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_there_is_added_to(way: str) -> None:
    def prepare(model: nn.Module) -> None:
        for i, p in enumerate(model.parameters()):
            p.grad = random(*reversed(p.shape), seed=i).permute(*reversed(range(p.dim())))  # other strides

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Conv1D(4, 8)).to(D)
    kept: list[torch.Tensor] = []
    off, _ = compare(
        model,
        [random(3, 6)],
        way,
        prepare=lambda m: (prepare(m), kept.extend(p.grad for p in m.parameters()))[0],
    )
    assert off < 1e-12
    for p, grad in zip(model.parameters(), kept[:4], strict=True):
        assert p.grad is grad  # a view of a bucket stays one
        assert p.grad.stride() == random(*reversed(p.shape)).permute(*reversed(range(p.dim()))).stride()


# --- models of transformers ------------------------------------------------------------------------------


def vit() -> nn.Module:
    return hpnb.models.vit("laptop", classes=3).to(D).train()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return (
        GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=97, n_positions=24))
        .to(D)
        .train()
    )


def images(n: int) -> list[torch.Tensor]:
    return [random(2, 3, 32, 32, seed=i) for i in range(n)]


def tokens(n: int) -> list[torch.Tensor]:
    return [torch.randint(97, (2, 24), generator=seeded(i)) for i in range(n)]


def logits(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x, use_cache=False).logits if x.dtype == torch.int64 else model(x).logits
    return found


@pytest.mark.parametrize("way", WAYS)
def test_vit_and_gpt2(way: str) -> None:
    off, _ = compare(vit(), images(3), way, logits)
    assert off < 1e-12
    model = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight  # a part is deferred, a part is autograd's
    off, split = compare(model, tokens(3), way, logits)
    assert off < 1e-12
    with split.deferring("last"):
        backward(logits(model, tokens(1)[0]))
    assert model.lm_head.weight in split.pending("last")
    assert model.transformer.wpe.weight not in split.pending("last")


# --- who else has a hand in it ---------------------------------------------------------------------------


def checkpointed(use_reentrant: bool) -> Callable[[nn.Module, torch.Tensor], Any]:
    return lambda model, x: checkpoint(model, x, use_reentrant=use_reentrant)


@pytest.mark.sampled(3, cover=True)
@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(use_reentrant: bool, way: str) -> None:
    torch.manual_seed(0)
    for name in ("sequential", "shared", "attention"):
        make, shape = MODELS[name]
        off, _ = compare(
            make().to(D), [random(*shape, seed=i) for i in range(3)], way, checkpointed(use_reentrant)
        )
        assert off < 1e-12
    for model, inputs in ((vit(), images(3)), (gpt2(), tokens(3))):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        off, _ = compare(model, inputs, way, logits)
        assert off < 1e-12


class Computed(nn.Module):
    """Weights that are computed from others, or that somebody puts aside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(7)).to(D)
        parametrizations.weight_norm(self.layers[0])
        nn.utils.weight_norm(self.layers[1])
        nn.utils.weight_norm(self.layers[2], "bias", None)
        prune.l1_unstructured(self.layers[3], "weight", 0.4)

    def compute_more(self) -> None:
        torch.manual_seed(0)
        parametrizations.weight_norm(self.layers[4])
        parametrizations.weight_norm(self.layers[5], "bias", None)
        parametrizations.spectral_norm(self.layers[6])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_are_computed_are_left_to_autograd(way: str) -> None:
    model, plain = Computed(), Computed()
    split = SplitBackward([model])
    inputs = [random(3, 6, seed=i) for i in range(3)]
    for more in (False, True):
        for m in (model, plain):
            m.zero_grad()
            if more:
                m.compute_more()
        wanted = gradients(plain, inputs, "off", None, lambda m, x: m(x))
        assert distance(gradients(model, inputs, way, split, lambda m, x: m(x)), wanted) < 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_were_exchanged(way: str) -> None:
    torch.manual_seed(0)
    model = linear().to(D)
    plain, split = copy.deepcopy(model), SplitBackward([model])
    inputs = [random(3, 6, seed=i) for i in range(3)]
    for seed in range(2):
        wanted = gradients(plain, inputs, "off", None, lambda m, x: m(x))
        assert distance(gradients(model, inputs, way, split, lambda m, x: m(x)), wanted) < 1e-12
        for m in (model, plain):
            m[2].weight = nn.Parameter(random(6, 6, seed=seed))

    def elsewhere(model: nn.Module, x: torch.Tensor) -> torch.Tensor:  # weights that are no leaves
        computed = {n: 2 * p for n, p in model.named_parameters()}
        return torch.func.functional_call(model, computed, (x,))

    off, _ = compare(model, inputs, way, elsewhere)
    assert off < 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_modules_and_of_parameters(way: str) -> None:
    seen: list[str] = []

    def prepare(model: nn.Module) -> None:
        model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        model[0].register_forward_hook(lambda m, args, y: y + 1)
        model[2].register_full_backward_hook(lambda m, gx, gy: (gx[0] * 3,))
        model[2].register_full_backward_pre_hook(lambda m, gy: (gy[0] * 5,))
        model[4].weight.register_hook(lambda g: (seen.append("weight"), g * 7)[1])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(D)
    off, _ = compare(model, [random(3, 6, seed=i) for i in range(3)], way, prepare=prepare)
    assert off < 1e-12
    assert len(seen) == 2 * 2 * 3


def test_functional_calls_and_transforms_are_autograds() -> None:
    torch.manual_seed(0)
    model = linear().to(D)
    split = SplitBackward([model])
    x = random(3, 6)
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    with split.deferring(0):
        found = torch.func.grad(loss)(parameters, x)
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    assert not split.pending(0)
    model(x).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(found[name], p.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(each[name].sum(0), p.grad, rtol=1e-12, atol=1e-12)


class Marked(torch.Tensor):
    """A kind of tensor, which operators keep."""


def test_unusual_inputs_and_weights_are_autograds() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4).to(D)
    sparse, marked = torch.eye(6, dtype=D).to_sparse(), random(3, 6).as_subclass(Marked)
    complex_model = nn.Linear(6, 4, dtype=torch.complex128)
    complex_x = torch.complex(random(3, 6), random(3, 6, seed=1))
    for layer, x in ((model, sparse), (model, marked), (complex_model, complex_x)):
        layer.zero_grad()
        plain, split = copy.deepcopy(layer), SplitBackward([layer])
        with split.deferring(0):
            y = layer(x)
            y.abs().sum().backward()
        assert not split.pending(0)
        wanted = plain(x)
        wanted.abs().sum().backward()
        assert type(y) is type(wanted)
        assert torch.equal(layer.weight.grad, plain.weight.grad)
        unsplit(layer)


def test_what_is_compiled_is_one_piece() -> None:
    model = linear()
    split = SplitBackward([model])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with split.deferring(0):
        compiled(torch.ones(2, 6)).sum().backward()
    assert not split.pending(0)
    assert all(p.grad is not None for p in model.parameters())


def test_small_modules_may_be_left_to_autograd() -> None:
    """6 FLOPs a weight and row: two for y, two for dx, two for dA."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Conv1D(16, 8), nn.Linear(16, 4)).to(D)
    for rows, deferred in ((9, 0), (10, 1), (19, 1), (20, 2), (39, 2), (40, 3)):
        split = SplitBackward([model], min_flops=6 * 10 * 8 * 16)
        with split.deferring(0):
            model(random(rows, 4)).sum().backward()
        assert len(split.pending(0)) == 2 * deferred


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.Conv2d(3, 8, 4, 4), (2, 3, 12, 16)), (nn.Conv2d(4, 6, 3, 2, 1, 2, 2), (4, 9, 7)),
     (nn.Conv1d(2, 4, 3), (5, 2, 9)), (nn.Conv3d(1, 2, 2, bias=False), (2, 1, 3, 4, 5))],
)  # fmt: skip
def test_flops_of_a_convolution_are_counted_by_its_output(module: Any, shape: tuple[int, ...]) -> None:
    x = random(*shape, dtype=torch.float32)
    flops = 6 * module(x).numel() * module.weight[0].numel()
    for min_flops, deferred in ((flops, True), (flops + 1, False)):
        split = SplitBackward([module], min_flops=min_flops)
        with split.deferring(0):
            module(x).sum().backward()
        assert bool(split.pending(0)) is deferred


def test_only_what_is_asked_for() -> None:
    torch.manual_seed(0)
    model = linear().to(D)
    split, x = SplitBackward([model]), random(3, 6).requires_grad_()
    with split.deferring(0):
        (found,) = torch.autograd.grad(model(x).sum(), x)
        model(x).sum().backward(inputs=[x])
        assert not split.pending(0)
        torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
        assert not split.pending(0)
        model(x).sum().backward(inputs=[model[0].weight, model[0].bias])
    assert split.pending(0) == {model[0].weight, model[0].bias}
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(found, x.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), Conv1D(32, 64), nn.LayerNorm(32)).to(dtype)
    exact = copy.deepcopy(model).to(D)
    inputs = [random(8, 32, seed=i).to(dtype) for i in range(4)]
    run = lambda m, x: m(x)  # noqa: E731
    wanted = gradients(exact, [x.to(D) for x in inputs], "off", None, run)
    plain, off = copy.deepcopy(model), {}
    off["plain"] = {
        n: g.to(D) for n, g in gradients(plain, inputs, "off", None, run).items() if g is not None
    }
    split = SplitBackward([model])
    for way in ("fused", "split"):
        model.zero_grad()
        found = gradients(model, inputs, way, split, run)
        assert all(g is not None and g.dtype == dtype for g in found.values())
        off[way] = {n: g.to(D) for n, g in found.items() if g is not None}
    error = {way: distance(g, wanted) for way, g in off.items()}
    assert 1e-4 < error["plain"] < 0.05  # it does round
    assert error["fused"] < 1.5 * error["plain"]
    assert error["split"] < 1.5 * error["plain"]


@pytest.mark.parametrize("way", WAYS)
def test_autocast(way: str) -> None:
    """What autocast computes is what it computes without the split, to its own rounding of the sum."""

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            assert y.dtype == (torch.bfloat16 if x.dtype == torch.float32 else D)
            return y

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), Conv1D(16, 32), nn.Linear(16, 16))
    inputs = [random(8, 16, seed=i, dtype=torch.float32) for i in range(3)]
    plain = copy.deepcopy(model)
    split = SplitBackward([model])
    wanted = gradients(plain, inputs, "off", None, run)
    found = gradients(model, inputs, way, split, run)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    assert distance(found, wanted) < 1e-6
    images = [random(2, 3, 8, 8, seed=i, dtype=torch.float32) for i in range(3)]
    conv = nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.Flatten(2), nn.Linear(4, 4))
    plain = copy.deepcopy(conv)
    split = SplitBackward([conv])
    assert (
        distance(gradients(conv, images, way, split, run), gradients(plain, images, "off", None, run)) < 1e-6
    )
    off, _ = compare(model.to(D), [random(8, 16)], way, run)  # which leaves float64 alone
    assert off < 1e-12


# --- memory ----------------------------------------------------------------------------------------------


def saved(model: nn.Module, run: Callable[[], Any]) -> int:
    """Bytes that autograd keeps for the backward of `run`, weights left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in own:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = run()
    assert leaves(output)  # alive until here, so that no address is used twice
    return sum(found.values())


def test_no_more_is_saved_than_without() -> None:
    torch.manual_seed(0)
    partly = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    partly[2].weight.requires_grad_(False)  # needs no input
    cases: list[tuple[nn.Module, Callable[[nn.Module], Any]]] = [
        (vit(), lambda m: logits(m, images(1)[0])),
        (gpt2(), lambda m: logits(m, tokens(1)[0])),
        (Convolutions().to(D), lambda m: m(random(2, 4, 8, 8))),
        (partly.to(D), lambda m: m(random(3, 6))),
        (linear().to(torch.float32), lambda m: autocasted(m, random(64, 6, dtype=torch.float32), 3)),
    ]
    for model, run in cases:
        plain = saved(model, lambda: run(model))  # noqa: B023
        SplitBackward([model])
        assert 0 < saved(model, lambda: run(model)) <= plain  # noqa: B023


def autocasted(model: nn.Module, x: torch.Tensor, microbatches: int) -> list[torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return [model(x) for _ in range(microbatches)]


def test_between_i_and_w_only_inputs_and_gradients_of_outputs_are_held() -> None:
    torch.manual_seed(0)
    h, n = 16, 8
    model = nn.Sequential(
        nn.Linear(h, 4 * h), nn.GELU(), Conv1D(h, 4 * h), nn.LayerNorm(h), nn.Linear(h, h, False)
    )
    model = model.to(D)
    trained = 8 * sum(p.numel() for p in model.parameters())
    waits = 8 * n * ((h + 4 * h) + (4 * h + h) + (h + h))  # an x and a dy for each of the three
    split = SplitBackward([model])
    for turn in range(2):
        with hpnb.record.memory(model) as recorder:
            x, g = random(n, h), random(n, h)
            y = model(x)
            with split.deferring(0):
                y.backward(g)
            del y, x, g
            held = recorder.profile().samples[-1].total
            split.add_weight_gradients(0)
            left = recorder.profile().samples[-1].total
        early = (
            8 * 2 * h if turn == 0 else trained
        )  # gradients that are there after I: at first the norm's alone
        assert held == trained + early + waits
        assert left == trained + trained


class Hoards(torch.autograd.Function):
    """Keeps a tensor where autograd does not let go of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.hoard = torch.ones(3)
        HOARDED.append(weakref.ref(ctx.hoard))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


HOARDED: list[weakref.ref[Any]] = []


def test_w_does_not_hold_the_graph() -> None:
    model = nn.Linear(6, 6)
    split = SplitBackward([model])
    y = model(Hoards.apply(torch.ones(2, 6, requires_grad=True))).sum()
    with split.deferring(0):
        y.backward()
    assert HOARDED[-1]() is not None
    del y
    gc.collect()
    assert split.pending(0)
    assert HOARDED[-1]() is None


def test_each_pair_is_freed_when_its_gradient_is_there() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).to(D)
    split = SplitBackward([model])
    inside: list[weakref.ref[Any]] = []
    model.register_forward_hook(lambda m, args, y: inside.append(weakref.ref(y.untyped_storage())))
    for layer in model:
        layer.register_forward_hook(lambda m, args, y: inside.append(weakref.ref(args[0].untyped_storage())))
    alive: list[int] = []

    def count(_: object) -> None:
        alive.append(sum(ref() is not None for ref in inside))

    with split.deferring(0):
        model(random(3, 6)).sum().backward()
    count(None)
    split.add_weight_gradients(0, count)
    assert alive == [4, 3, 3, 2, 2, 1, 1, 0, 0]  # after I, and after each bias and weight
    inside.clear()
    with split.deferring(0):
        model(random(3, 6)).sum().backward()
    split.drop()
    count(None)
    assert alive[-1] == 0


def test_a_newer_split_takes_the_place_of_an_older_one_and_names_stay() -> None:
    model = linear()
    state, names = list(model.state_dict()), [n for n, _ in model.named_modules()]
    split = SplitBackward([model])
    assert [type(m) for m in model] == [nn.Linear, nn.Tanh, nn.Linear]
    assert (list(model.state_dict()), [n for n, _ in model.named_modules()]) == (state, names)
    newer = SplitBackward([model])
    with newer.deferring(0):
        model(torch.ones(2, 6)).sum().backward()
    assert len(newer.pending(0)) == 4
    assert not split.pending(0)


# --- who is told -----------------------------------------------------------------------------------------


def test_each_parameter_is_ready_once_and_then_complete() -> None:
    """W after I, last use after last use: when told, its gradient is what it is at the end."""
    for name in ("raw", "shared"):
        for mode in ("split", "fused"):
            torch.manual_seed(0)
            make, shape = MODELS[name]
            model = make().to(D)
            split = SplitBackward([model])
            told: dict[nn.Parameter, torch.Tensor] = {}

            def ready(p: nn.Parameter) -> None:
                assert p.grad is not None
                assert p not in told  # noqa: B023
                told[p] = p.grad.clone()  # noqa: B023

            output = model(random(*shape))  # no gradient is there yet
            if mode == "fused":
                hooks = hook_gradients(model.parameters(), ready)
                with split.fused():
                    backward(output)
                for hook in hooks:
                    hook.remove()
            else:
                with split.deferring(0):
                    backward(output)
                waiting = split.pending(0)
                of_i = (p for p in model.parameters() if p.grad is not None and p not in waiting)
                told |= {p: p.grad.clone() for p in of_i}  # type: ignore[union-attr]
                assert bool(told) == (name == "raw")  # those that autograd computes in I
                split.add_weight_gradients(0, ready)
                assert waiting <= set(told)
            grown = {p: p.grad for p in model.parameters() if p.grad is not None}
            assert set(told) == set(grown)
            assert len(grown) >= 5
            for p, grad in grown.items():
                assert torch.equal(told[p], grad)
            backward(model(random(*shape)))  # nobody is told afterwards
            assert len(told) == len(grown)


def test_a_fused_backward_tells_early() -> None:
    """The last layers are reduced while the first ones still compute."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    split = SplitBackward([model])
    came: list[object] = []
    model[0].register_full_backward_pre_hook(lambda *_: came.append("first layer"))
    hook_gradients(model.parameters(), lambda p: came.append(p))
    with split.fused():
        model(torch.ones(2, 6)).sum().backward()
    at = came.index("first layer")
    assert {id(p) for p in came[:at]} >= {id(p) for p in model[2].parameters()}
    assert {id(p) for p in came[at + 1 :]} >= {id(p) for p in model[0].parameters()}


def test_microbatches_wait_each_under_its_key() -> None:
    torch.manual_seed(0)
    model = linear().to(D)
    plain, split = copy.deepcopy(model), SplitBackward([model])
    for i in range(3):
        with split.deferring(("stage", i)):
            model(random(3, 6, seed=i)).sum().backward()
    for i in (1, 0):
        plain(random(3, 6, seed=i)).sum().backward()
        split.add_weight_gradients(("stage", i))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=0) if i == 0 else None
    assert split.pending(("stage", 2)) == set(model.parameters())
    with pytest.raises(ValueError, match=r"no weight gradients wait under \('stage', 1\)"):
        split.add_weight_gradients(("stage", 1))
    split.drop()
    assert split.pending(("stage", 2)) == set()
    model.zero_grad()
    with split.deferring(("stage", 2)):
        pass
    split.add_weight_gradients(("stage", 2))
    assert all(p.grad is None for p in model.parameters())


def test_the_mode_holds_on_every_thread() -> None:
    model = linear()
    split = SplitBackward([model])
    with split.deferring(0):
        y = model(torch.ones(2, 6)).sum()
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    assert len(split.pending(0)) == 4


def test_modes_nest() -> None:
    model = nn.Linear(6, 6)
    split, x = SplitBackward([model]), torch.ones(2, 6)
    with split.deferring(0):
        with split.fused():
            model(x).sum().backward()
        assert not split.pending(0)
        with split.deferring(1):
            model(x).sum().backward()
        model(2 * x).sum().backward()
    assert len(split.pending(0)) == len(split.pending(1)) == 2
    model(x).sum().backward()
    before = model.weight.grad.clone()
    split.add_weight_gradients(0)
    assert torch.equal(model.weight.grad, 2 * before)


# --- what is refused -------------------------------------------------------------------------------------


def test_double_backward_is_autograds_or_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), Conv1D(2, 3)).to(D)
    plain, split = copy.deepcopy(model), SplitBackward([model])
    assert torch.autograd.gradgradcheck(model, random(2, 4).requires_grad_())
    for m in (model, plain):  # a gradient penalty
        x = random(2, 4).requires_grad_()
        (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        g.square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or float((p.grad - q.grad).norm()) <= 1e-12 * float(q.grad.norm())
    for mode in (split.fused(), split.deferring(0)):
        with mode, pytest.raises(RuntimeError, match="create_graph=True inside deferring or fused"):
            model(random(2, 4)).sum().backward(create_graph=True)


@pytest.mark.parametrize("what", ["input", "gradient of the output"])
def test_what_w_needs_is_not_changed_before(what: str) -> None:
    model = nn.Linear(6, 6)
    split, x = SplitBackward([model]), torch.ones(2, 6)
    y = model(x)
    g = torch.ones_like(y)
    with split.deferring(0):
        y.backward(g)
    (x if what == "input" else g).mul_(2)
    with pytest.raises(RuntimeError, match=f"the {what} of a Linear was changed in place between I and W"):
        split.add_weight_gradients(0)


# --- copies, and other forwards --------------------------------------------------------------------------


def test_a_copy_computes_with_its_own_weights() -> None:
    model = linear()
    split = SplitBackward([model])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert not torch.equal(twin(torch.ones(2, 6)), model(torch.ones(2, 6)))
    with split.deferring(0):
        twin(torch.ones(2, 6)).sum().backward()
    assert split.pending(0) == set(twin.parameters())
    split.add_weight_gradients(0)
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())
    split = SplitBackward([model])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with split.deferring(0):
        loaded(torch.ones(2, 6)).sum().backward()
    assert not split.pending(0)
    assert all(p.grad is not None for p in loaded.parameters())


def test_a_forward_that_somebody_else_has_set_stays() -> None:
    model = nn.Linear(6, 6)
    forward = model.forward
    model.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]
    split = SplitBackward([model])
    with split.deferring(0):
        model(torch.ones(2, 6)).sum().backward()
    assert not split.pending(0)
    assert float(model.bias.grad[0]) == 4.0


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, 2 * self.weight, self.bias)


def test_rules_are_by_exact_type_and_open(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(weight_gradient_rules.MatmulRule):
        def forward(self, module: Any, x: Any, weight: Any, bias: Any) -> torch.Tensor:
            return super().forward(module, x, 2 * weight, bias)

        def input_gradient(self, module: Any, x: Any, weight: Any, dy: Any) -> torch.Tensor:
            return super().input_gradient(module, x, 2 * weight, dy)

        def weight_gradient(self, module: Any, x: Any, weight: Any, dy: Any) -> torch.Tensor:
            return 2 * super().weight_gradient(module, x, weight, dy)

        def add_weight_gradient(self, grad: Any, module: Any, x: Any, dy: Any) -> None:
            super().add_weight_gradient(grad, module, 2 * x, dy)

    torch.manual_seed(0)
    inputs = [random(3, 6, seed=i) for i in range(3)]
    off, _ = compare(nn.Sequential(Own(6, 6)).to(D), inputs, "split")
    assert off < 1e-12
    model = nn.Sequential(nn.Linear(6, 6), Own(6, 6), nn.LayerNorm(6))
    assert weight_gradient_rules.rule_of(model[1]) is None
    monkeypatch.setitem(weight_gradient_rules.RULES, Own, Doubled(transposed=True))
    assert weight_gradient_rules.rule_of(model[1]) is not None
    for way in WAYS:
        off, _ = compare(copy.deepcopy(model).to(D), inputs, way)
        assert off < 1e-12


# --- sharded modules -------------------------------------------------------------------------------------


def sharded(way: str, first: bool) -> float:
    """Distance of the weights that a sharded module has after three steps from those of one process."""
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)) for _ in range(3))).to(
        D
    )
    serial = copy.deepcopy(model)
    split = SplitBackward([model]) if first else None
    hpnb.fully_shard(model, axis)
    split = split or SplitBackward([model])
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9) for m in (model, serial))
    for step in range(3):
        x = torch.randn(4, 6, dtype=D, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(axis.size)[axis.rank]
        for optimizer, net, part in ((ours, model, mine), (theirs, serial, x)):
            optimizer.zero_grad()
            with split.fused() if way == "fused" and net is model else nullcontext():
                net(part).square().mean().backward()
            optimizer.step()
    whole = full_tensors(model, [axis])[1]
    return max(float((whole(n) - p).norm() / p.norm()) for n, p in serial.named_parameters())


def test_a_sharded_module_computes_with_what_stands_in_it_now() -> None:
    with hpnb.Ranks(2, device="cpu", timeout=60) as pool:
        for way in ("off", "fused"):
            for first in (True, False):
                assert max(pool.run(sharded, way, first)) < 1e-12
