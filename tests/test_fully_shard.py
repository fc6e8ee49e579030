"""fully_shard against one process on the whole batch, in float64; its bytes, memory, and what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from rank_pools import RankPools
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hpnb
from hpnb import Layout, Mesh, placement, precision
from hpnb.data_parallel import DataParallel, fsdp_hooks
from hpnb.data_parallel.fsdp import fully_shard, load_full_state_dict, no_sync
from hpnb.data_parallel.fsdp_hooks import FSDPState, fsdp_state_of
from hpnb.mesh import Axis
from hpnb.theory import model_states

D = torch.float64
LR = 0.05  # large enough that a skipped step shows
Tensors = dict[str, torch.Tensor]


class Block(nn.Module):
    """A residual block; `again` computes its inner layer under a checkpoint."""

    def __init__(self, width: int, again: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 24), nn.Linear(24, width)
        self.again = again

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        narrow = self.norm.weight.dtype
        inner = lambda x: self.down(torch.tanh(self.up(self.norm(x.to(narrow)).to(x.dtype))))  # noqa: E731
        return {"x": x + (checkpoint(inner, x, use_reentrant=False) if self.again else inner(x))}


class Net(nn.Module):
    """Embedding tied to the head, blocks, and by `kind` what can go wrong with them."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(11, 6)
        nn.init.normal_(self.embed.weight, std=0.3)  # steps that do not magnify what was rounded
        self.blocks = nn.ModuleList(Block(6, kind == "checkpoint inside") for _ in range(3))
        self.rare = nn.ModuleList([Block(6), Block(6)])
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.zeros(6))
        self.to(D)
        if "frozen" in kind:  # inside a unit, the first and the last of it, and a whole unit
            for part in (self.blocks[0].up, self.blocks[1].norm, self.blocks[1].down, self.blocks[2]):
                part.requires_grad_(False)
        if kind == "two dtypes":
            for block in (*self.blocks, *self.rare):
                block.norm.float()  # type: ignore[operator,union-attr]
        if kind != "unused":
            self.rare.requires_grad_(False)

    def forward(self, x: torch.Tensor, rare: bool = False) -> torch.Tensor:
        h = self.embed(x).sum(1) + self.offset
        for block in self.blocks:
            for _ in range(2 if "twice" in self.kind else 1):
                if self.kind in ("checkpoint", "reentrant"):
                    run = lambda h, block=block: block(h)["x"]  # noqa: E731
                    h = checkpoint(run, h, use_reentrant=self.kind == "reentrant")
                else:
                    h = block(h)["x"]
        if "twice" in self.kind:
            h = self.blocks[0](h)["x"]
        if rare:
            h = self.rare[0](h)["x"]
        return self.head(h)


def batches(steps: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(11)
    return [(torch.randint(11, (size, 4), generator=g), torch.randn(size, 11, dtype=D, generator=g))
            for _ in range(steps)]  # fmt: skip


def distance(found: Tensors, wanted: Tensors) -> float:
    """The largest relative distance; a tensor that hardly moves is held to the typical norm."""
    assert found.keys() == wanted.keys()
    typical = sum(float(t.norm()) for t in wanted.values()) / len(wanted)
    assert typical > 0
    return max(float((found[n] - wanted[n]).norm() / max(wanted[n].norm(), 0.01 * typical)) for n in wanted)


def dp() -> Axis:
    return Mesh(Layout(dp=hpnb.world_size())).dp


def whole_gradients(model: nn.Module, axis: Axis | None) -> Tensors:
    """Of every parameter that has one; gathered if `axis`."""
    return {n: g.clone() for n, g in placement.full_gradients(model, [] if axis is None else [axis]).items()}


def train(
    model: nn.Module,
    axis: Axis | None,
    optimizer: torch.optim.Optimizer,
    rare: Any = lambda step: False,
    accumulate: int = 1,
    quiet: bool = False,
    clip: float = 0.0,
    ragged: bool = False,
    keep: bool = False,
) -> tuple[list[float], Tensors, Tensors]:
    """(losses, last gradients, weights) after three steps; `axis` None is the one process."""
    losses, gradients = [], {}
    for step, (x, y) in enumerate(batches(3, 72)):
        x, y = x.to(next(model.buffers()).device), y.to(next(model.buffers()).device)
        if ragged and step == 2:
            x, y = x[:3], y[:3]  # fewer samples than ranks
        optimizer.zero_grad(set_to_none=not keep)
        total, parts = 0.0, list(zip(x.chunk(accumulate), y.chunk(accumulate), strict=True))
        for i, (mx, my) in enumerate(parts):
            mine = slice(None) if axis is None else slice(axis.rank, None, axis.size)
            count = len(mx) if ragged or axis is None else len(mx[mine])
            wait = axis is not None and quiet and i < len(parts) - 1
            with no_sync(model) if wait else contextlib.nullcontext():
                out = model(mx[mine], rare(step))
                loss = (out - my[mine]).square().sum() / count / accumulate
                loss.backward()
            total += loss.item()
        gradients = whole_gradients(model, axis)
        result = precision.step(optimizer, [axis] if axis else (), max_norm=clip)
        assert not clip or (result.norm is not None and result.norm > 2 * clip)
        losses.append(total)
    if axis is None:
        return losses, gradients, {n: t.detach().clone() for n, t in model.state_dict().items()}
    means = torch.tensor(losses, dtype=D, device=hpnb.device())
    torch.distributed.all_reduce(means, group=axis.group)
    means /= 1 if ragged else axis.size
    return means.tolist(), gradients, placement.full_state_dict(model, [axis])


def compare(kind: str, options: dict[str, Any], how: dict[str, Any], alone: bool = False) -> float:
    """The largest distance of losses, gradients and weights from those of one process.

    If `alone`, each rank is the only one of its axis.
    """
    axis = Mesh(Layout(tp=hpnb.world_size())).dp if alone else dp()
    torch.manual_seed(0)
    serial = Net(kind)
    torch.manual_seed(axis.rank)  # ranks must not rely on starting equal
    model = Net(kind)
    if axis.rank == 0:
        model.load_state_dict(serial.state_dict())
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)  # before: it must stay attached
    objects = list(model.parameters())
    assert fully_shard(model, axis, **options) is model
    assert names == [n for n, _ in model.named_parameters(remove_duplicate=False)]
    everywhere = kind != "unused"
    used = (lambda step: False) if everywhere else (lambda step: step == 1 and axis.rank == 0)
    found = train(model, axis, optimizer, used, **how)
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    how = {k: v for k, v in how.items() if k != "quiet"}
    wanted_optimizer = torch.optim.SGD(serial.parameters(), LR, momentum=0.9)
    if everywhere:
        wanted = train(serial, None, wanted_optimizer, **how)
    else:
        wanted = train_rare(serial, wanted_optimizer, axis.size)
    found = found[0], on_cpu(found[1]), on_cpu(found[2])
    losses = float((torch.tensor(found[0]) - torch.tensor(wanted[0])).norm() / torch.tensor(wanted[0]).norm())
    weights = {n: t for n, t in wanted[2].items() if n != "offset"}
    return max(losses, distance(found[1], wanted[1]), distance({n: found[2][n] for n in weights}, weights))


def on_cpu(tensors: Tensors) -> Tensors:
    return {name: t.cpu() for name, t in tensors.items()}


def train_rare(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int
) -> tuple[list[float], Tensors, Tensors]:
    """One process, where what would be rank 0's samples take the rare block in the second step."""
    losses, gradients = [], {}
    for step, (x, y) in enumerate(batches(3, 72)):
        optimizer.zero_grad()
        parts = [(model(x[r::ranks], step == 1 and r == 0) - y[r::ranks]).square() for r in range(ranks)]
        loss = sum(part.sum() / len(part) for part in parts) / ranks
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        gradients = whole_gradients(model, None)
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, {n: t.detach().clone() for n, t in model.state_dict().items()}


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("plain", {}, {}),
    ("plain", {"prefetch": 0}, {"clip": 0.1}),
    ("plain", {"prefetch": 3, "reshard_after_forward": False}, {"accumulate": 2}),
    ("plain", {"cpu_offload": True}, {"accumulate": 2}),
    ("plain", {}, {"accumulate": 3, "quiet": True, "clip": 0.1}),
    ("plain", {}, {"accumulate": 2, "keep": True}),
    ("plain", {"units": ["blocks.0", "blocks.1", "blocks.1.up", "head"]}, {}),
    ("plain", {"average": False}, {"ragged": True}),
    ("frozen", {}, {}),
    ("frozen", {"prefetch": 2}, {"accumulate": 2, "quiet": True}),
    ("twice", {}, {}),
    ("frozen twice", {"prefetch": 0}, {}),
    ("checkpoint", {}, {}),
    ("checkpoint inside", {}, {"accumulate": 2, "quiet": True}),
    ("reentrant", {}, {}),
    ("unused", {"find_unused_parameters": True}, {}),
]


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    shared = RankPools()
    yield shared
    shared.close()


@pytest.fixture
def two(pools: RankPools) -> hpnb.Ranks:
    return pools[2]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_to_one_process(pools: RankPools, ranks: int, half: int) -> None:
    assert off(pools[ranks], cases=CASES[half::2]) == {}


def off(pool: hpnb.Ranks, alone: bool = False, cases: Sequence[Any] = CASES) -> dict[str, float]:
    """The cases that are not what one process computes."""
    found = {str(case): max(pool.run(compare, *case, alone)) for case in cases}
    return {case: distance for case, distance in found.items() if not distance < 1e-12}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("alone", [False, True])
def test_equal_to_one_process_on_two(two: hpnb.Ranks, alone: bool) -> None:
    assert off(two, alone) == {}


def test_a_unit_of_two_dtypes(two: hpnb.Ranks) -> None:
    assert max(two.run(compare, "two dtypes", {"prefetch": 2}, {})) < 1e-6
    assert max(two.run(compare, "two dtypes", {}, {"accumulate": 2, "quiet": True})) < 1e-6


@pytest.mark.one_gpu
def test_equal_to_one_process_on_gpus() -> None:
    with hpnb.Ranks(2, device="cuda", timeout=120) as pool:
        assert off(pool) == {}


# --- the comparison notices --------------------------------------------------------------------


def broken(what: str) -> float:
    """The distance, or inf for an error, when a part is left out."""
    from hpnb.data_parallel.flat_params import FlatParam
    from hpnb.data_parallel.fsdp_hooks import FSDPState

    def only_once(self: FlatParam) -> None:
        unsharded_now = self.is_unsharded or getattr(self, "_was", False)
        self._was = True  # type: ignore[attr-defined]
        if unsharded_now and not self.is_unsharded:
            self._flat.untyped_storage().resize_(self._flat_bytes)
            self._flat.zero_()
            self.is_unsharded = True
        else:
            unshard(self)

    def early(self: FlatParam, unsharded: torch.Tensor) -> None:
        first, self.has_gradients = self.missing == self.num_trained, True
        self.missing = 0 if first else -1
        if first:
            self._on_complete(self)

    def frees(self: FSDPState, unit: Any, *args: Any) -> None:
        before(self, unit, *args)
        unit.reshard()

    unshard, before, on_gradient = FlatParam.unshard, FSDPState._before_backward, FlatParam._count_gradient
    options = {}
    try:
        if what == "second gather":
            FlatParam.unshard = only_once  # type: ignore[method-assign]
        elif what == "all gradients":
            FlatParam._count_gradient = early  # type: ignore[method-assign]
        elif what == "whole until used":
            FSDPState._before_backward = frees  # type: ignore[method-assign]
        elif what == "average":
            options = {"average": False}
        return compare("plain", options, {})
    except RuntimeError:
        return float("inf")
    finally:
        FlatParam.unshard, FSDPState._before_backward = unshard, before  # type: ignore[method-assign]
        FlatParam._count_gradient = on_gradient  # type: ignore[method-assign]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", ["second gather", "all gradients", "whole until used", "average"])
def test_the_comparison_notices_what_is_left_out(two: hpnb.Ranks, what: str) -> None:
    assert max(two.run(broken, "nothing")) < 1e-12
    assert min(two.run(broken, what)) > 1e-3


# --- models of transformers, as they are -------------------------------------------------------


def small(which: str) -> tuple[nn.Module, Tensors]:
    """A small model in float64 and a batch of 8."""
    import transformers

    g = torch.Generator().manual_seed(3)
    torch.manual_seed(5)
    if "vit" in which:
        sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
        vit = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=5)
        batch = {"pixel_values": torch.randn(8, 3, 16, 16, generator=g, dtype=D)}
        return transformers.ViTForImageClassification(vit).to(D), batch
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    gpt = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=31, n_positions=12, **dropout)
    return transformers.GPT2LMHeadModel(gpt).to(D), {"input_ids": torch.randint(31, (8, 12), generator=g)}


def compare_transformers(which: str) -> tuple[float, int]:
    """The distance from one process after two steps, and the number of units."""
    axis = dp()
    serial, batch = small(which)
    model, _ = small(which)
    fully_shard(model, axis)
    if "checkpoint" in which:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    weights = []
    for it, share in ((serial.train(), slice(None)), (model.train(), slice(axis.rank, None, axis.size))):
        optimizer = torch.optim.SGD(it.parameters(), LR, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            it(**{k: v[share] for k, v in batch.items()}).logits.square().mean().backward()
            optimizer.step()
        weights.append(placement.full_state_dict(it, [axis] if it is model else []))
    state = fsdp_state_of(model)
    assert state is not None
    return distance(weights[1], weights[0]), len(state.units)


@pytest.mark.parametrize("which", ["vit", "gpt2", "vit checkpoint", "gpt2 checkpoint"])
def test_transformers_as_they_are(two: hpnb.Ranks, which: str) -> None:
    for distance, units in two.run(compare_transformers, which):
        assert distance < 1e-12
        assert units == 4


def generate() -> tuple[list[int], list[int], int]:
    """Tokens that a model and its sharded twin write, and bytes that are whole afterwards."""
    axis = dp()
    serial, batch = small("gpt2")
    model, _ = small("gpt2")
    fully_shard(model, axis)
    ids = batch["input_ids"][:1, :4]
    found = [it.eval().generate(ids, max_new_tokens=6, do_sample=False).tolist()[0]  # type: ignore[operator]
             for it in (serial, model)]  # fmt: skip
    state = fsdp_state_of(model)
    assert state is not None
    return found[0], found[1], sum(f._flat.untyped_storage().nbytes() for f in state.flat_params)


def test_writes_text(two: hpnb.Ranks) -> None:
    for wanted, found, whole in two.run(generate):
        assert wanted == found
        assert len(found) == 10
        assert whole == 0


class Tower(nn.Module):
    """Equal blocks, and a root that is not one of them; nothing needs padding."""

    def __init__(self, depth: int = 6, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x


# --- gradients that do not come, or not always -------------------------------------------------


class Every(Tower):
    """Returns what every block has computed."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[override]
        found = [self.stem(x)]
        for block in self.blocks:
            found.append(torch.tanh(block(found[-1])) + found[-1])
        return found


class Partly(Tower):
    """Parameters that nothing uses: in a unit, in the root, and a whole unit."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(32, 32)
        self.blocks[2].spare = nn.Linear(32, 32)
        self.more = nn.ModuleList([nn.Linear(32, 32)])


def missing(accumulate: bool) -> tuple[str, float]:
    """What is said of parameters without a gradient; the distance of a step after that."""
    axis = dp()
    torch.manual_seed(0)
    model, serial = Partly(), Tower()
    serial.load_state_dict({n: t for n, t in model.state_dict().items() if n in serial.state_dict()})
    fully_shard(model, axis)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    own = x.chunk(axis.size)[axis.rank]
    if accumulate:
        with no_sync(model):
            model(own).square().mean().backward()
    try:
        model(own).square().mean().backward()
        said = ""
    except RuntimeError as error:
        said = str(error)
    for n, p in model.named_parameters():
        p.grad = None
        p.requires_grad_("spare" not in n and "more" not in n)
    serial(x).square().mean().backward()
    model(own).square().mean().backward()
    return said, distance(whole_gradients(model, axis), whole_gradients(serial, None))


@pytest.mark.parametrize("accumulate", [False, True])
def test_parameters_without_a_gradient_are_refused(two: hpnb.Ranks, accumulate: bool) -> None:
    """As in ZeRO 1 and 2: a zero in place of none would decay the weight."""
    for said, off in two.run(missing, accumulate):
        assert said.startswith(
            "6 of 20 parameters got no gradient in this backward: spare.weight, spare.bias"
        )
        assert "find_unused_parameters=True" in said
        assert off < 1e-5


def thawed() -> list[float]:
    """Distances of gradients from one process, while blocks are frozen and thawed again."""
    axis = dp()
    torch.manual_seed(0)
    model, serial = Tower(), Tower()
    serial.load_state_dict(model.state_dict())
    model.blocks[0].requires_grad_(False)
    fully_shard(model, axis)
    x, found = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)), []
    for frozen in (True, False, True):
        for it, mine in ((serial, x), (model, x.chunk(axis.size)[axis.rank])):
            for block in (it.blocks[0], it.blocks[3].weight):
                block.requires_grad_(not frozen)  # type: ignore[operator]
            for p in it.parameters():
                p.grad = None
            it(mine).square().mean().backward()
        found.append(distance(whole_gradients(model, axis), whole_gradients(serial, None)))
    return found


def test_parameters_can_be_frozen_and_thawed(two: hpnb.Ranks) -> None:
    assert max(max(off) for off in two.run(thawed)) < 1e-5


# --- bytes and memory --------------------------------------------------------------------------


def sizes(model: nn.Module) -> tuple[int, int]:
    """Bytes of the blocks and of the root."""
    block = sum(p.nbytes for n, p in model.named_parameters() if n.startswith("blocks"))
    return block, sum(p.nbytes for p in model.parameters()) - block


def count_bytes(options: dict[str, Any], every: bool = False) -> list[float]:
    """Bytes that left this rank, in (p-1)/p of the blocks', for two steps and a forward without gradient."""
    axis, model = dp(), Every() if every else Tower()
    blocks, root = sizes(model)
    fully_shard(model, axis, **options)
    found = []
    for step in range(3):
        with hpnb.record.traffic() as t, torch.set_grad_enabled(step < 2):
            y = sum(t.sum() for t in model(torch.ones(1, 32)))
            if step < 2:
                y.backward()
        found.append((t.bytes["dp"] * axis.size / (axis.size - 1) - (2 if step < 2 else 1) * root) / blocks)
    return found


def test_bytes_are_those_of_two_gathers_and_a_reduce_scatter(two: hpnb.Ranks, pools: RankPools) -> None:
    for options, each in [({}, 3), ({"prefetch": 2}, 3), ({"reshard_after_forward": False}, 2)]:
        assert two.run(count_bytes, options) == [[each, each, 1]] * 2
        assert two.run(count_bytes, options, True) == [[each, each, 1]] * 2
    assert pools[4].run(count_bytes, {}) == [[3, 3, 1]] * 4


def whole_units(state: FSDPState) -> tuple[int, ...]:
    """Which units, without the root, have memory for their whole parameters."""
    units = enumerate(state.units[1:])
    return tuple(i for i, u in units if any(f._flat.untyped_storage().nbytes() for f in u.flat_params))


class Whole(TorchDispatchMode):
    """How many units are whole at once, at any operator."""

    def __init__(self, state: FSDPState) -> None:
        super().__init__()
        self.state, self.most = state, 0

    def now(self) -> int:
        return len(whole_units(self.state))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.most = max(self.most, self.now())
        return func(*args, **(kwargs or {}))


def count_whole(prefetch: int, frozen: bool) -> list[int]:
    """The most units that are whole at once in each of two steps, and how many are afterwards."""
    axis, model = dp(), Tower()
    if frozen:
        for block in list(model.blocks)[1:]:
            block.weight.requires_grad_(False)  # type: ignore[union-attr,operator]
    fully_shard(model, axis, prefetch=prefetch)
    state = fsdp_state_of(model)
    assert state is not None
    found = []
    for _ in range(2):
        with Whole(state) as whole:
            y = model(torch.ones(1, 32)).sum()
            between = whole.now()
            y.backward()
        found += [whole.most, between]
    with torch.no_grad(), Whole(state) as whole:
        model(torch.ones(1, 32))
    everything = sum(f._flat.untyped_storage().nbytes() for f in state.flat_params)
    return [*found, whole.most, everything]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_no_more_units_are_whole_than_are_at_hand(two: hpnb.Ranks, prefetch: int, frozen: bool) -> None:
    # The first forward does not know the order yet; its backward does.
    each = prefetch + 1
    assert two.run(count_whole, prefetch, frozen) == [[each, 0, each, 0, each, 0]] * 2


def pairs() -> list[tuple[int, ...]]:
    """Which two units are whole together, in turn, in a second step."""
    axis, model = dp(), Tower()
    fully_shard(model, axis)
    state = fsdp_state_of(model)
    assert state is not None
    found: list[tuple[int, ...]] = []

    class Pairs(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            now = whole_units(state)
            if len(now) > 1 and found[-1:] != [now]:
                found.append(now)
            return func(*args, **(kwargs or {}))

    for _ in range(2):
        found.clear()
        with Pairs():
            model(torch.ones(1, 32)).sum().backward()
    return found


def test_the_unit_that_travels_is_the_next_one(two: hpnb.Ranks) -> None:
    forth = [(i, i + 1) for i in range(5)]
    assert two.run(pairs) == [forth + forth[-2::-1]] * 2


def weigh() -> tuple[Any, int, int, int]:
    """The profile of two steps with AdamW, elements and tensors of the model, and bytes of a block."""
    axis, model = dp(), Tower(16, 64)
    elements, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    fully_shard(model, axis)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with hpnb.record.memory(model, optimizer) as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
    return recorder.profile(), elements, tensors, 4 * (64 * 64 + 64)


def test_memory_is_that_of_stage_3(two: hpnb.Ranks) -> None:
    for profile, elements, tensors, block in two.run(weigh):
        said = model_states(elements, 2, 3, weight_bytes=4, gradient_bytes=4, optimizer_bytes=8)
        steps = 4 * tensors  # AdamW counts steps, one float32 a tensor
        assert profile.peak_of("parameters") == said.parameters
        assert profile.peak_of("gradients") == said.gradients
        assert profile.peak_of("optimizer") == said.optimizer + steps
        # The root and at most two blocks are whole, one more in gradients and on the wire; of 16 blocks.
        assert profile.peak < said.total + steps + 7 * block


def weigh_masters() -> tuple[Any, int, int]:
    """The same in bfloat16 with masters: the profile, elements and tensors."""
    axis, model = dp(), Tower(4, 64).to(torch.bfloat16)
    elements, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    fully_shard(model, axis)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    precision.Masters(optimizer)
    with hpnb.record.memory(model, optimizer) as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 64, dtype=torch.bfloat16)).float().sum().backward()
            precision.step(optimizer, [axis], max_norm=1.0)
    return recorder.profile(), elements, tensors


def test_masters_of_shares_weigh_16_bytes(two: hpnb.Ranks) -> None:
    for profile, elements, tensors in two.run(weigh_masters):
        said = model_states(elements, 2, 3)
        assert profile.peak_of("parameters") == said.parameters
        assert profile.peak_of("optimizer") == said.optimizer + 4 * tensors
        assert profile.samples[-1].gradients == said.gradients


def drop_in_a_cycle() -> int:
    """Shards that are alive after a module in a cycle was dropped and collected once."""
    axis, model = dp(), Tower(2, 64)
    fully_shard(model, axis)
    shards = [weakref.ref(p) for p in model.parameters()]
    model.itself = [model]  # as a model has it whose forward is a partial of its own
    gc.collect()
    gc.disable()
    try:
        del model
        gc.collect()
        return sum(shard() is not None for shard in shards)
    finally:
        gc.enable()


def test_one_collection_frees_a_dropped_module_with_its_shards(two: hpnb.Ranks) -> None:
    assert two.run(drop_in_a_cycle) == [0, 0]


# --- dtypes ------------------------------------------------------------------------------------


def mixed(options: dict[str, Any]) -> tuple[float, set[torch.dtype], torch.dtype]:
    """How far gradients are from float32's, the dtypes of parameters and gradients, and of the output."""
    axis = dp()
    torch.manual_seed(0)
    serial = Tower()
    model = Tower()
    model.load_state_dict(serial.state_dict())
    fully_shard(model, axis, **options)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    serial(x).square().mean().backward()
    y = model(x.chunk(axis.size)[axis.rank])
    y.float().square().mean().backward()
    kinds = {t.dtype for p in model.parameters() for t in (p, p.grad) if t is not None}
    return distance(whole_gradients(model, axis), whole_gradients(serial, None)), kinds, y.dtype


@pytest.mark.parametrize("communication_dtype", [None, torch.float32])
@pytest.mark.parametrize("offload", [False, True])
def test_computes_in_16_bits_from_float32(
    two: hpnb.Ranks, communication_dtype: torch.dtype | None, offload: bool
) -> None:
    options = {
        "dtype": torch.bfloat16, "communication_dtype": communication_dtype, "cpu_offload": offload
    }  # fmt: skip
    for off, kinds, out in two.run(mixed, options):
        assert 1e-4 < off < 0.03  # bfloat16 has 8 bits
        assert kinds == {torch.float32}
        assert out == torch.bfloat16


# --- optimizers, clipping, precision -----------------------------------------------------------


def adam(options: dict[str, Any]) -> float:
    axis = dp()
    torch.manual_seed(0)
    serial, model = Net(), Net()
    model.load_state_dict(serial.state_dict())
    fully_shard(model, axis)
    assert any(not p.numel() for p in model.parameters())  # a share can be empty
    wanted = train(serial, None, torch.optim.AdamW(serial.parameters(), **options))
    found = train(model, axis, torch.optim.AdamW(model.parameters(), **options))
    return distance(found[2], wanted[2] | {"offset": found[2]["offset"]})


@pytest.mark.parametrize("how", ["foreach", "fused", "capturable"])
def test_optimizers_take_shares(two: hpnb.Ranks, how: str) -> None:
    options = {"foreach": False} if how == "capturable" else {how: True}
    assert max(two.run(adam, options)) < 1e-6


# --- state -------------------------------------------------------------------------------------


def trained(full: Tensors | None, steps: int, meta: bool = False) -> Tensors:
    """The whole model after steps from `full`."""
    axis = dp()
    torch.manual_seed(axis.rank)
    with torch.device("meta" if meta else "cpu"):
        model = fully_shard(Net(), axis)
    assert not any(p.is_meta for p in model.parameters())
    if full is not None:
        load_full_state_dict(model, full)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for x, y in batches(3, 72)[:steps]:
        optimizer.zero_grad()
        mine = slice(axis.rank, None, axis.size)
        (model(x[mine]) - y[mine]).square().sum(1).mean().backward()
        optimizer.step()
    return placement.full_state_dict(model, [axis])


def test_state_goes_to_another_number_of_ranks(two: hpnb.Ranks, pools: RankPools) -> None:
    start = two.run(trained, None, 0)[0]
    assert start["head.weight"].shape == (11, 6)
    first = two.run(trained, start, 2)[0]
    again = two.run(trained, start, 2, True)[0]
    assert all(torch.equal(first[n], again[n]) for n in first)
    untied = {n: t for n, t in start.items() if n != "head.weight"}  # one name of a tied parameter is enough
    for full in (start, untied):
        states = pools[3].run(trained, full, 2, True)
        assert all(distance(state, first | {"offset": state["offset"]}) < 1e-12 for state in states)
        assert all(torch.equal(states[0][n], state[n]) for state in states for n in state)
    assert distance({"w": first["blocks.0.up.weight"]}, {"w": start["blocks.0.up.weight"]}) > 1e-3


# --- failure -----------------------------------------------------------------------------------


class Fails(Tower):
    """Raises what it is told to, where it is told to."""

    error: BaseException | None = None
    where = "forward"

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.error is not None and self.where == "backward":
            x.register_hook(self.fail)  # when `last` has its gradients
        elif self.error is not None:
            self.fail()
        return self.last(x)

    def fail(self, *_: object) -> None:
        assert self.error is not None
        raise self.error


def survives(where: str, error: BaseException, look: bool) -> tuple[list[str], float]:
    """What is not a share after an error, and how far the next step is from one without."""
    axis = dp()
    torch.manual_seed(0)
    model, other = fully_shard(Fails(), axis), fully_shard(Fails(), axis)
    load_full_state_dict(other, placement.full_state_dict(model, [axis]))
    shapes = {n: p.shape for n, p in model.named_parameters()}
    x = torch.ones(2, 32)
    model(x).sum().backward()
    for p in model.parameters():
        p.grad = None
    model.error, model.where = error, where
    with contextlib.suppress(type(error)):
        model(x).sum().backward()
    model.error = None
    wrong = []
    if look:
        model.state_dict()
        wrong = [n for n, p in model.named_parameters() if p.shape != shapes[n]]
    for p in model.parameters():
        p.grad = None
    for it in (model, other):
        it(x).square().sum().backward()
    return wrong, distance(whole_gradients(model, axis), whole_gradients(other, axis))


@pytest.mark.sampled(2, cover=True)
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_leaves_the_module_usable(two: hpnb.Ranks, where: str, error: BaseException) -> None:
    for look in (True, False):  # at the state, or straight on
        assert two.run(survives, where, error, look) == [([], 0.0)] * 2


def nested() -> float:
    """A part that is sharded by itself, in a whole that is: the distance from one process."""
    axis = dp()
    torch.manual_seed(0)
    serial, model = Net(), Net()
    model.load_state_dict(serial.state_dict())
    fully_shard(model.blocks[1], axis)
    fully_shard(model, axis)
    found = train(model, axis, torch.optim.SGD(model.parameters(), LR), accumulate=2, quiet=True)
    wanted = train(serial, None, torch.optim.SGD(serial.parameters(), LR), accumulate=2)
    return distance(found[1] | found[2], wanted[1] | wanted[2] | {"offset": found[2]["offset"]})


def test_nested(two: hpnb.Ranks) -> None:
    assert max(two.run(nested)) < 1e-12


def refuse(what: str) -> str:
    axis, model = dp(), Net()
    try:
        if what == "twice":
            fully_shard(fully_shard(model, axis), axis)
        elif what == "wrapped":
            DataParallel(model, axis, find_unused_parameters=True)
            fully_shard(model, axis)
        elif what == "unit":
            fully_shard(model, axis, units=["block.0"])
        elif what == "prefetch":
            fully_shard(model, axis, prefetch=-1)
        elif what == "dtype":
            fully_shard(model, axis, dtype=torch.int8)
        elif what == "empty":
            fully_shard(nn.ReLU(), axis)
        elif what == "no_sync":
            with no_sync(model):
                pass
        elif what == "tied":
            model.blocks[0].up.weight = model.blocks[1].up.weight  # type: ignore[union-attr]
            fully_shard(model.blocks[0], axis)
            fully_shard(model, axis)
        elif what == "differ":
            fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + axis.rank))), axis)
        elif what == "list":
            fully_shard(Nested(), axis, units=["layers.0"])
        elif what == "one moved":
            fully_shard(model, axis).blocks[1].float()
            model(torch.zeros(1, 1, dtype=torch.long))
        elif what == "sparse":
            table = fully_shard(nn.Sequential(nn.Embedding(4, 4, sparse=True)), axis)
            table(torch.tensor([1])).sum().backward()
        elif what == "moved":
            fully_shard(model, axis).float()(torch.zeros(1, 1, dtype=torch.long))
        elif what == "state":
            load_full_state_dict(fully_shard(model, axis), {"more": torch.zeros(1)})
        elif what == "buffer":
            model.register_buffer("mask", torch.ones(2, device="meta"), persistent=False)
            fully_shard(model, axis)
        elif what == "shape":
            state = model.state_dict() | {"head.bias": torch.zeros(3)}
            load_full_state_dict(fully_shard(model, axis), state)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


# What each error names: modules, parameters, numbers, and what to call or pass instead.
REFUSALS = {
    "twice": ["Net", "already"],
    "wrapped": ["embed.weight", "DataParallel"],
    "unit": ["'block.0'", "'embed', 'blocks', 'blocks.0'"],
    "prefetch": ["prefetch=-1"],
    "dtype": ["dtype=torch.int8", "torch.bfloat16"],
    "empty": ["ReLU"],
    "no_sync": ["Net", "fully_shard"],
    "tied": ["blocks.0.up.weight"],
    "differ": ["along dp", "rank 0 has None", "rank 1 has ('2.weight', (4, 4)"],
    "list": ["unit 'layers.0' is a ModuleList", "'layers.0.0'"],
    "moved": ["embed.weight", "after fully_shard"],
    "one moved": ["blocks.1.", "after fully_shard"],
    "sparse": ["0.weight", "sparse=False"],
    "state": ["offset, embed.weight, "],
    "buffer": ["mask", "meta device"],
    "shape": ["head.bias", "(11,)", "(3,)"],
}


@pytest.mark.parametrize("what", REFUSALS)
def test_an_error_names_what_is_wrong_on_every_rank(two: hpnb.Ranks, what: str) -> None:
    for message in two.run(refuse, what):
        assert all(part in message for part in REFUSALS[what]), message


# Options of fully_shard: the values of ranks 0 and 1.
DIFFERENT_OPTIONS: dict[str, tuple[Any, Any]] = {
    "units": (["blocks.0", "blocks.1"], ["blocks.0"]),
    "dtype": (torch.float32, None),
    "communication_dtype": (torch.float32, torch.float64),
    "reshard_after_forward": (True, False),
    "prefetch": (1, 2),
    "average": (True, False),
    "find_unused_parameters": (True, False),
    "cpu_offload": (False, True),
}


@pytest.mark.parametrize("option", DIFFERENT_OPTIONS)
def test_options_that_differ_between_ranks_are_refused_on_every_rank(two: hpnb.Ranks, option: str) -> None:
    def shard(values: tuple[Any, Any]) -> str:
        axis = dp()
        try:
            fully_shard(Net(), axis, **{option: values[axis.rank]})
        except ValueError as error:
            return str(error)
        return "nothing"

    a, b = DIFFERENT_OPTIONS[option]
    expected = f"{option}={a} on rank 0 of axis dp, and {option}={b} on rank 1; pass the same on every rank"
    assert two.run(shard, (a, b)) == [expected] * 2


def test_tensors_are_found_in_what_modules_return() -> None:
    @dataclasses.dataclass
    class Output:
        loss: torch.Tensor
        rest: tuple[object, ...]

    a, b, c = (torch.ones(n) for n in (1, 2, 3))
    output = {"x": [Output(a, (b, None, types.MappingProxyType({"c": c})))], "y": "text"}
    assert [len(t) for t in fsdp_hooks.tensors_in(output)] == [1, 2, 3]


def test_units_are_the_items_of_the_outermost_lists() -> None:
    from hpnb.data_parallel.fsdp_units import assign_parameters, find_units

    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    model = nn.ModuleDict({"a": nn.ModuleList([inner, nn.ModuleList([nn.Linear(2, 2)])]), "b": inner[2]})
    units = find_units(model, None)
    assert list(units) == ["a.0", "a.1.0"]
    dealt = {name: list(parameters) for name, parameters in assign_parameters(model, units).items()}
    tied = ["a.0.2.weight", "a.0.2.bias"]  # also under b, which is outside
    assert dealt == {
        "": tied, "a.0": ["a.0.0.weight", "a.0.0.bias"], "a.1.0": ["a.1.0.weight", "a.1.0.bias"]
    }  # fmt: skip
    assert list(find_units(inner, None)) == ["0", "1", "2"]
    assigned = assign_parameters(inner, find_units(inner, None))
    assert list(assigned) == ["", "0", "2"]  # what has no parameters is no unit


# --- habits from elsewhere -----------------------------------------------------------------------------


class Nested(nn.Module):
    """Two lists of experts a layer: the inner lists have no forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = sum(torch.tanh(expert(x)) for expert in layer)  # type: ignore[assignment]
        return x


def test_lists_of_lists_are_sharded_by_what_computes(two: hpnb.Ranks) -> None:
    def run() -> float:
        axis = Mesh(Layout(dp=2)).dp
        torch.manual_seed(0)
        serial, model = Nested(), Nested()
        model.load_state_dict(serial.state_dict())
        fully_shard(model, axis)
        x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        model(x.chunk(2)[axis.rank]).square().mean().backward()
        serial(x).square().mean().backward()
        for p in (*model.parameters(), *serial.parameters()):
            with torch.no_grad():
                p -= p.grad  # type: ignore[operator]
        found = placement.full_state_dict(model, [axis])
        return max(float((found[n] - t).norm() / t.norm()) for n, t in serial.state_dict().items())

    assert max(two.run(run)) < 1e-12
