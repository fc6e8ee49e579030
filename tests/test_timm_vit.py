"""timm's ViT in every layout: timm's own where it is installed, and a model of the same structure anyway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hybrid_cases
import pytest
import torch
import torch.nn.functional as F
from rank_pools import RankPools
from torch import nn

import hpnb
from hpnb.models import timm_vit
from hpnb.models.compare_parts import run_parts

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

D = torch.float64
HIDDEN, HEADS, CLASSES = 16, 4, 5


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    shared = RankPools(timeout=120)
    yield shared
    shared.close()


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, HIDDEN, 4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.proj(x).flatten(2).mT


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = HEADS, HIDDEN // HEADS, HIDDEN
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> Any:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, s, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, s, self.attn_dim))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc2(F.gelu(self.fc1(x)))


class DropPath(nn.Module):
    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        keep = torch.rand(len(x), 1, 1, dtype=x.dtype, device=x.device) >= self.drop_prob
        return x * keep / (1 - self.drop_prob)


class Block(nn.Module):
    def __init__(self, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(HIDDEN), Attention()
        self.norm2, self.mlp = nn.LayerNorm(HIDDEN), Mlp()
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Representation(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(HIDDEN, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc(x))


class VisionTransformer(nn.Module):
    """As timm has it, with the representation of its first versions."""

    def __init__(
        self, distilled: bool = False, representation_size: int | None = None, drop_path_rate: float = 0.0
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.randn(1, 1, HIDDEN))
        self.dist_token = nn.Parameter(torch.randn(1, 1, HIDDEN)) if distilled else None
        self.pos_embed = nn.Parameter(torch.randn(1, 4 + 1 + distilled, HIDDEN))
        self.blocks = nn.Sequential(*(Block(drop_path_rate * i) for i in range(2)))
        self.norm = nn.LayerNorm(HIDDEN)
        self.pre_logits = Representation(representation_size) if representation_size else nn.Identity()
        self.head = nn.Linear(representation_size or HIDDEN, CLASSES)
        self.head_dist = nn.Linear(HIDDEN, CLASSES) if distilled else None

    def forward(self, x: torch.Tensor) -> Any:
        x = self.patch_embed(x)
        tokens = [t.expand(len(x), -1, -1) for t in (self.cls_token, self.dist_token) if t is not None]
        x = self.norm(self.blocks(torch.cat([*tokens, x], dim=1) + self.pos_embed))
        if self.head_dist is not None:
            return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2
        return self.head(self.pre_logits(x[:, 0]))


def build(**options: Any) -> VisionTransformer:
    torch.manual_seed(1)
    return VisionTransformer(**options).to(D)


def images(samples: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(samples, 3, 8, 8, dtype=D, generator=generator)
    return {"x": x, "labels": torch.arange(samples) % CLASSES}


def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(outputs, batch["labels"])


def step(options: dict[str, Any], knobs: dict[str, Any]) -> tuple[float | None, dict[str, torch.Tensor]]:
    """The loss of one step, and the weights after it."""
    timm_vit.register(VisionTransformer)
    model = build(**options)
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", num_microbatches=2, **knobs))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    result = booster.execute_pipeline(iter([images()]), boosted, loss, optimizer)["loss"]
    optimizer.step()
    gathers = "tp_size" in knobs and "pp_size" not in knobs
    weights = hpnb.tensor_parallel.full_state_dict(boosted.unwrap()) if gathers else {}
    return None if result is None else float(result), weights


GRID, PIPELINE, ROWS = {"tp_size": 4, "tp_mode": "2d"}, {"tp_size": 2, "pp_size": 2}, {"tp_size": 4}


@pytest.mark.parametrize(
    ("options", "layouts"),
    [
        ({"distilled": True}, (GRID, PIPELINE)),
        ({"representation_size": 6}, (GRID,)),
        pytest.param({"representation_size": 6}, (PIPELINE, ROWS), marks=pytest.mark.slow),
        pytest.param({"distilled": True}, (ROWS,), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_distillation_token_and_a_representation_are_exact(
    options: dict[str, Any], layouts: tuple[dict[str, Any], ...]
) -> None:
    timm_vit.register(VisionTransformer)
    hpnb.models.check(build(**options), images())
    alone = build(**options)
    expected = loss(alone(images()["x"]), images())
    expected.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    with hpnb.Ranks(4, device="cpu", timeout=120) as ranks:
        for knobs in layouts:
            for value, weights in ranks.run(step, options, knobs):
                assert value is None or value == pytest.approx(expected.item(), rel=1e-12)
                for name, weight in weights.items():
                    wanted = alone.state_dict()[name]
                    assert (weight - wanted).norm() < 1e-12 * max(1.0, float(wanted.norm())), name


def test_without_a_second_head_nothing_is_drawn_for_its_token() -> None:
    timm_vit.register(VisionTransformer)
    model = build()
    model.pre_logits = nn.Dropout(0.5)
    parts = hpnb.models.anatomy(model)
    torch.manual_seed(3)
    wanted, after = model(images()["x"]), torch.rand(())
    torch.manual_seed(3)
    assert torch.equal(run_parts(parts, images()), wanted)
    assert torch.equal(torch.rand(()), after)


def drop_paths(tp: int) -> float | None:
    return step({"drop_path_rate": 0.5}, {"tp_size": tp} if tp > 1 else {})[0]


CONTEXT: dict[str, dict[str, Any]] = {
    "ring": {"cp_size": 4},
    "ulysses": {"cp_size": 4, "context_parallel": "ulysses"},
    "all-gather, recomputed": {
        "cp_size": 2, "context_parallel": "all-gather", "activation_checkpointing": "full"},
    "dp, ZeRO 1": {"cp_size": 2, "zero_stage": 1},
    "ZeRO 3": {"cp_size": 4, "zero_stage": 3},
    "pp": {"cp_size": 2, "pp_size": 2},
    "pp, Ulysses, split backward": {
        "cp_size": 2, "pp_size": 2, "context_parallel": "ulysses", "pp_style": "zb-h1"},
    "tp": {"cp_size": 2, "tp_size": 2},
    "sequence": {"cp_size": 2, "tp_size": 2, "enable_sequence_parallelism": True},
}  # fmt: skip


def train_in_context(options: dict[str, Any], knobs: dict[str, Any]) -> tuple[float | None, Any]:
    """As `step`, of this data-parallel rank's images; all weights, put together from all ranks."""
    timm_vit.register(VisionTransformer)
    plugin = hpnb.HybridParallelPlugin(precision="fp64", num_microbatches=2, **knobs)
    booster, model = hpnb.Booster(plugin=plugin), build(**options)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    batch = {name: value[plugin.mesh.dp.rank :: plugin.dp_size] for name, value in images().items()}
    value = booster.execute_pipeline(iter([batch]), boosted, loss, optimizer)["loss"]
    optimizer.step()
    return None if value is None else float(value), hybrid_cases.weights(boosted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", CONTEXT)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow, id="plain"),
        pytest.param({"distilled": True}, id="distilled"),  # which has one more token that is no patch
        pytest.param({"representation_size": 6}, marks=pytest.mark.slow, id="repr"),
    ],
)
def test_context_parallelism_is_exact(options: dict[str, Any], layout: str, pools: RankPools) -> None:
    """5 or 6 tokens of an image, on 2 or 4 ranks of cp: loss, gradients and weights of one process."""
    alone = build(**options)
    start = {name: weight.clone() for name, weight in alone.state_dict().items()}
    expected = loss(alone(images()["x"]), images())
    expected.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    wanted = alone.state_dict()
    results = pools[4].run(train_in_context, options, CONTEXT[layout])
    assert any(value is not None for value, _ in results)
    for value, weights in results:
        assert value is None or value == pytest.approx(expected.item(), rel=1e-12)
        ours, theirs = ({n: start[n] - w[n] for n in start} for w in (weights, wanted))
        assert hybrid_cases.distance(ours, theirs) < 1e-12


def train_plainly(knobs: dict[str, Any]) -> tuple[float, Any]:
    """A forward, a loss of its logits, and a backward."""
    timm_vit.register(VisionTransformer)
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", **knobs))
    model = build(distilled=True)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    value = loss(boosted(x=images()["x"]), images())
    booster.backward(value, optimizer)
    optimizer.step()
    return value.item(), hybrid_cases.weights(boosted)


def test_a_plain_loop_with_context_parallelism_is_exact(pools: RankPools) -> None:
    alone = build(distilled=True)
    expected = loss(alone(images()["x"]), images())
    expected.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    for knobs in ({"cp_size": 2}, {"cp_size": 2, "context_parallel": "ulysses"}):
        for value, weights in pools[2].run(train_plainly, knobs):
            assert value == pytest.approx(expected.item(), rel=1e-12)
            assert hybrid_cases.distance(weights, alone.state_dict()) < 1e-12


def boost_in_context(what: str) -> str:
    """What context parallelism says of such a model, or its first step does."""
    timm_vit.register(VisionTransformer)
    model: Any = build(drop_path_rate=0.5 if what == "paths" else 0.0)
    knobs: dict[str, Any] = {"cp_size": 2}
    if what == "not fused":
        model.blocks[0].attn.fused_attn = False
    elif what == "by hand":
        model.blocks[0].attn.forward = lambda x: x
    elif what == "attention":
        model.blocks[1].attn.attn_drop = nn.Dropout(0.25)
    elif what == "pool":
        model.global_pool = "avg"
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", **knobs))
    try:
        boosted, *_ = booster.boost(model)
        batch = {"pixel_values": images()["x"]} if what == "batch" else {"x": images()["x"]}
        boosted(**batch)
    except ValueError as error:
        return str(error)
    return "nothing"


CONTEXT_REFUSALS = {
    "paths": "blocks.1.drop_path drops with probability 0.5, and ranks of context parallelism have the same "
    "samples and draw other random numbers; make the model with drop_path_rate=0, or use cp_size=1",
    "attention": "blocks.1.attn.attn_drop drops with probability 0.25",
    "not fused": "blocks.0.attn has fused_attn=False",
    "by hand": "blocks.0.attn does not call F.scaled_dot_product_attention",
    "pool": "has global_pool='avg', and hpnb.models.timm_vit takes 'token'",
    "batch": "splits the patches of x (B, 3, height, width); this batch has pixel_values",
}


@pytest.mark.parametrize("what", CONTEXT_REFUSALS)
def test_what_context_parallelism_cannot_split_is_refused(pools: RankPools, what: str) -> None:
    for said in pools[2].run(boost_in_context, what):
        assert CONTEXT_REFUSALS[what] in said


def test_paths_are_dropped_alike_on_tensor_parallel_ranks() -> None:
    """They are other paths than one process drops, as a block that draws gives each rank a random state."""
    together = hpnb.launch(drop_paths, 2, ranks=2, device="cpu")
    assert together[0] == together[1]
    undropped = loss(build()(images()["x"]), images()).item()
    assert together[0] != pytest.approx(undropped, rel=1e-3)


def test_an_option_that_the_page_lacks_is_refused() -> None:
    timm_vit.register(VisionTransformer)
    model: Any = build()
    model.global_pool = "avg"
    with pytest.raises(ValueError, match=r"has global_pool='avg', and hpnb.models.timm_vit takes 'token'"):
        hpnb.models.anatomy(model)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {"init_values": 0.1}),
        ("deit_tiny_distilled_patch16_224", {"drop_path_rate": 0.1}),
    ],
)
def test_timm_s_own(name: str, options: dict[str, Any]) -> None:
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": HIDDEN, "depth": 2, "num_heads": HEADS}
    model = timm.create_model(name, num_classes=CLASSES, **sizes, **options).to(D)
    timm_vit.register(type(model))
    hpnb.models.check(model, images())


def train_timm_s_own(name: str, knobs: dict[str, Any]) -> tuple[float | None, Any]:
    model = make_timm_s_own(name)
    timm_vit.register(type(model))
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", num_microbatches=2, **knobs))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    value = booster.execute_pipeline(iter([images()]), boosted, loss, optimizer)["loss"]
    optimizer.step()
    return None if value is None else float(value), hybrid_cases.weights(boosted)


def make_timm_s_own(name: str) -> Any:
    import timm

    torch.manual_seed(1)
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": HIDDEN, "depth": 2, "num_heads": HEADS}
    model = timm.create_model(name, num_classes=CLASSES, **sizes).to(D)
    with torch.no_grad():  # a head of zeros would have no gradients in front of it
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_timm_s_own_with_context_parallelism_is_exact(pools: RankPools, name: str) -> None:
    pytest.importorskip("timm")
    alone = make_timm_s_own(name)
    expected = loss(alone(images()["x"]), images())
    expected.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    for knobs in (CONTEXT["ring"], CONTEXT["ulysses"], CONTEXT["pp"]):
        for value, weights in pools[4].run(train_timm_s_own, name, knobs):
            assert value is None or value == pytest.approx(expected.item(), rel=1e-12)
            assert hybrid_cases.distance(weights, alone.state_dict()) < 1e-12
