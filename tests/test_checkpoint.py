"""What one layout saves another loads, bit for bit; and what is killed, damaged or full does no harm."""

from __future__ import annotations

import copy
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hybrid_cases import CLASSES, LOSSES, Case, D, batch, build, distance, mine, weights
from preloaded_python import run_program
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import hpnb
from hpnb.bench import checkpoint as bench
from hpnb.hybrid.checkpoint import hf_names, manifest, weight_files
from hpnb.hybrid.checkpoint import save_weights as written

Weights = dict[str, torch.Tensor]
Pools = dict[int, hpnb.Ranks]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    made: Pools = {}
    yield made
    for pool in made.values():
        pool.close()


def on(pools: Pools, ranks: int) -> hpnb.Ranks:
    """A pool of so many ranks."""
    if ranks not in pools:
        pools[ranks] = hpnb.Ranks(ranks, device="cpu", timeout=120)
    return pools[ranks]


# --- models -------------------------------------------------------------------------------------------------


class Scores(nn.Module):
    """A model of nobody's library, with a weight used twice, a buffer, and a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 9).to(D)
        self.norm = nn.BatchNorm1d(9).to(D)
        self.middle = nn.Linear(9, 9).to(D)
        self.again = nn.Linear(9, 9, bias=False).to(D)
        self.again.weight = self.middle.weight
        self.scale = nn.Parameter(torch.ones((), dtype=D))
        self.last = nn.Linear(9, CLASSES).to(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x).tanh())
        found: torch.Tensor = self.last(self.scale * self.again(self.middle(x).relu()))
        return found


def layers() -> nn.Sequential:
    torch.manual_seed(8)
    made: list[nn.Module] = [nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, CLASSES)]
    return nn.Sequential(*made).to(D)


def odd() -> nn.Module:
    """5 heads and 29 words."""
    torch.manual_seed(9)
    config = GPT2Config(
        vocab_size=29, n_positions=16, n_embd=20, n_layer=4, n_head=5, n_inner=36, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    made: nn.Module = GPT2LMHeadModel(config).to(D).train()
    return made


OWN: dict[str, Callable[[], nn.Module]] = {"odd": odd, "module": Scores, "layers": layers}
PLAIN = ("module", "layers")


def made(kind: str, dropout: float = 0.0) -> nn.Module:
    return OWN[kind]() if kind in OWN else build(kind, dropout=dropout)


def data(kind: str, step: int, rows: int) -> Any:
    if kind not in PLAIN:
        return batch("gpt2" if kind == "odd" else kind, step, rows)
    g = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, 6, generator=g, dtype=D), torch.randint(0, CLASSES, (rows,), generator=g)


def loss(outputs: Any, inputs: Any) -> torch.Tensor:
    return F.cross_entropy(outputs, inputs[1]) if isinstance(inputs, tuple) else outputs.loss  # type: ignore[no-any-return]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    decay = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]


@dataclass
class Run:
    """A Booster at work on a rank."""

    booster: hpnb.Booster
    model: Any
    optimizer: Any

    def step(self, number: int, kind: str, rows: int = 8) -> float | None:
        self.optimizer.zero_grad()
        given = data(kind, number, rows)
        dp = self.booster.plugin.mesh.dp
        if isinstance(given, tuple):
            share = rows // dp.size
            given = tuple(t[dp.rank * share :][:share] for t in given)
        else:
            given = mine(given, dp)
        found = self.booster.execute_pipeline(iter([given]), self.model, loss, self.optimizer)["loss"]
        self.optimizer.step()
        return None if found is None else float(found)


def begin(case: Case, **knobs: Any) -> Run:
    torch.set_num_threads(1)
    booster = hpnb.Booster(plugin=case.plugin(**knobs))
    model = made(case.kind)
    optimizer = case.optimize(model)
    model, optimizer, *_ = booster.boost(model, optimizer)
    return Run(booster, model, optimizer)


# --- a model's own files ------------------------------------------------------------------------------------

SAVED = [
    Case("vit", dp=2),
    Case("vit", dp=4, zero=1),
    Case("gpt2 classifies", dp=4, zero=2),
    Case("gpt2", dp=2, tp=2, zero=3),
    Case("gpt2", pp=4, microbatches=4),
    Case("gpt2", dp=2, pp=2, style="interleaved", chunks=2, microbatches=2, zero=3),
    Case("vit", dp=2, pp=2, style="zb-v", chunks=2, microbatches=2, zero=2),
    Case("odd", tp=2, pp=2, microbatches=2),
    Case("odd", tp=4, sequence=True),
    Case("vit", tp=4, tp_mode="2d"),
    Case("gpt2 classifies", dp=2, pp=2, microbatches=2, zero=1),
    Case("module", dp=2, zero=1),
    Case("layers", dp=2, pp=2, microbatches=2, zero=3),
    Case("gpt2", dp=2, pp=2, tp=2, microbatches=2, zero=1),
]


def save_whole(case: Case, folder: Path) -> Weights:
    run = begin(case)
    run.step(0, case.kind)
    run.booster.save_model(run.model, folder, shard=True, size_per_shard="9KB")
    return weights(run.model)


def whole_file(folder: Path) -> Weights:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def name(case: Case) -> str:
    ways = (f"{case.style}" if case.pp > 1 else "", case.tp_mode if case.tp > 1 else "", f"zero{case.zero}")
    return "-".join([case.kind, f"{case.dp}x{case.pp}x{case.tp}", *filter(None, ways)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", SAVED, ids=map(name, SAVED))
def test_a_saved_model_is_an_ordinary_one(pools: Pools, case: Case, tmp_path: Path) -> None:
    whole = on(pools, case.ranks).run(save_whole, case, tmp_path / "model")[0]
    files = sorted(f.name for f in (tmp_path / "model").iterdir())
    if case.kind in PLAIN:
        assert "config.json" not in files
        state = whole_file(tmp_path / "model")
        found = made(case.kind)
        assert not found.load_state_dict(state, strict=False).unexpected_keys
    else:
        assert sum(f.endswith(".safetensors") for f in files) > 2
        assert {"config.json", "model.safetensors.index.json"} <= set(files)
        kind: Any = type(made(case.kind))
        found, told = kind.from_pretrained(tmp_path / "model", output_loading_info=True)
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]
        assert not told["mismatched_keys"]
    for key, value in found.state_dict().items():
        assert value.dtype == whole[key].dtype
        assert torch.equal(value, whole[key]), key


# --- a run goes on ------------------------------------------------------------------------------------------

GLOBAL, SAMPLES = 8, 28  # samples a step, and an epoch: the last batch of four has 4


@dataclass
class Seen:
    """What a rank saw; of a whole model the same on all ranks."""

    losses: list[float | None]
    scales: list[float]
    weights: Weights
    state: dict[str, Any]
    rates: list[float]
    loaded: Any  # (weights, state of the optimizer) before the first step


def go(
    case: Case,
    steps: int,
    source: Path | None = None,
    target: Path | None = None,
    at: int = -1,
    dropout: float = 0.0,
    shards: str = "5GB",
    **knobs: Any,
) -> Seen:
    """Train until `steps` steps are done, from `source` if there is one, and save after step `at`."""
    torch.set_num_threads(1)
    torch.manual_seed(0 if source is None else 999)
    booster = hpnb.Booster(plugin=case.plugin(**knobs))
    plugin = booster.plugin
    model: Any = made(case.kind, dropout)
    if source is not None:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
    optimizer: Any = torch.optim.AdamW(groups(model), lr=0.02, eps=1e-3)
    scheduler: Any = hpnb.CosineAnnealingWarmupLR(optimizer, total_steps=24, warmup_steps=4)
    given = data(case.kind, 0, SAMPLES)
    rows = [{key: t[i] for key, t in given.items()} for i in range(SAMPLES)]
    loader: Any = plugin.prepare_dataloader(rows, GLOBAL // plugin.mesh.dp.size, shuffle=True, seed=3)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
    done, losses, scales, rates, loaded = 0, [], [], [], None
    if source is not None:
        done = booster.load(source, model, optimizer, scheduler, loader)["done"]
        loaded = copy.deepcopy((weights(model), optimizer.state_dict()["state"]))
    while done < steps:
        loader.set_epoch(done * GLOBAL // (4 * GLOBAL))
        for inputs in loader:
            optimizer.zero_grad()
            criterion = LOSSES[case.loss] if case.loss != "own" else loss
            found = booster.execute_pipeline(iter([inputs]), model, criterion, optimizer)["loss"]
            optimizer.step()
            scheduler.step()
            done += 1
            losses.append(None if found is None else float(found))
            scales.append(float(optimizer.last_step.scale or 0))
            rates.append(optimizer.param_groups[0]["lr"])
            if done == at:
                extra = {"done": done}
                booster.save(target, model, optimizer, scheduler, loader, extra, size_per_shard=shards)
            if done == steps:
                break
    return Seen(losses, scales, weights(model), optimizer.state_dict(), rates, loaded)


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


ON_THE_SAME = [
    (Case("gpt2", dp=2, pp=2, microbatches=2, zero=1), {"precision": "bf16", "dropout": 0.2}),
    (Case("vit", dp=2, tp=2, sequence=True, zero=2),
     {"precision": "fp16", "dropout": 0.2, "initial_scale": 2.0**24, "growth_interval": 3}),
    (Case("gpt2", pp=2, tp=2, style="interleaved", chunks=2, microbatches=2, loss="pair"), {"dropout": 0.2}),
    (Case("gpt2 classifies", dp=4, zero=3), {"precision": "bf16", "dropout": 0.2}),
    (Case("vit", dp=2, pp=2, style="zb-v", chunks=2, microbatches=2), {"dropout": 0.2}),
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("case", "knobs"), ON_THE_SAME, ids=[name(case) for case, _ in ON_THE_SAME])
def test_on_the_same_layout_it_goes_on_bit_for_bit(
    pools: Pools, case: Case, knobs: dict[str, Any], tmp_path: Path
) -> None:
    """With dropout, in the middle of the third epoch."""
    pool = on(pools, case.ranks)
    whole = pool.run(go, case, 14, target=tmp_path / "saved", at=10, **knobs)
    resumed = pool.run(go, case, 14, source=tmp_path / "saved", **knobs)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours.losses == theirs.losses[10:]
        assert ours.scales == theirs.scales[10:]
        assert ours.rates == theirs.rates[10:]
        assert same(ours.weights, theirs.weights)
        assert same(ours.state, theirs.state)
    if knobs.get("precision") == "fp16":
        assert len(set(whole[0].scales)) > 3  # some steps were skipped
    finals = [one.losses for one in whole if one.losses[-1] is not None]
    assert all(a != b for a, b in zip(finals[0], finals[0][1:], strict=False))


CHAINS = {
    "zero 0 to 2 to 3": [Case("vit", dp=4), Case("vit", dp=4, zero=2), Case("vit", dp=4, zero=3)],
    "pp to tp to V": [
        Case("gpt2", pp=4, microbatches=4),
        Case("gpt2", tp=4),
        Case("gpt2", dp=2, pp=2, style="zb-v", chunks=2, microbatches=2, zero=1),
        Case("gpt2"),
    ],
    "1 to 4 and a grid": [
        Case("vit"),
        Case("vit", dp=2, tp=2, zero=3),
        Case("vit", tp=4, tp_mode="2d"),
        Case("vit", dp=2, pp=2, style="interleaved", chunks=2, microbatches=2, zero=3),
    ],
    "odd heads": [
        Case("odd", tp=4),
        Case("odd", pp=2, tp=2, microbatches=2),
        Case("odd", dp=2, tp=2, zero=1),
    ],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_on_other_layouts_it_goes_on_too(pools: Pools, chain: list[Case], tmp_path: Path) -> None:
    """What is loaded is what was saved, to the bit; and two steps later all is as on one process."""
    serial = on(pools, 1).run(go, Case(chain[0].kind), 2 * len(chain))[0]
    source, before = None, None
    for leg, case in enumerate(chain):
        target = tmp_path / f"leg-{leg}"
        found = on(pools, case.ranks).run(go, case, 2 * leg + 2, source, target, 2 * leg + 2)
        for one in found:
            if before is not None:
                assert same(one.loaded, (before.weights, before.state["state"]))
            for ours, theirs in zip(one.losses, serial.losses[2 * leg :], strict=False):
                assert ours is None or ours == pytest.approx(theirs, rel=1e-10)
        source, before = target, found[0]
    assert before is not None
    assert distance(before.weights, serial.weights) < 1e-10


# --- 16 bits, and what others have written ------------------------------------------------------------------


def masters_of(case: Case, folder: Path, precision: str) -> tuple[Weights, Weights]:
    """(16-bit weights, masters by name) after two steps."""
    run = begin(case, precision=precision)
    for step in range(2):
        run.step(step, case.kind)
    run.booster.save_model(run.model, folder)
    numbered = run.optimizer.state_dict()["masters"]
    whole = made(case.kind)
    order = [p for group in case.optimize(whole).param_groups for p in group["params"]]
    called = {id(p): name for name, p in whole.named_parameters()}
    return weights(run.model), {called[id(order[number])]: t for number, t in numbered.items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2", dp=2, tp=2, zero=1), Case("gpt2", dp=2, pp=2, microbatches=2), Case("vit", dp=4, zero=3),
    ],
    ids=name,
)  # fmt: skip
def test_masters_are_what_is_saved(pools: Pools, case: Case, tmp_path: Path) -> None:
    short, masters = on(pools, 4).run(masters_of, case, tmp_path / "model", "bf16")[0]
    kind: Any = type(made(case.kind))
    found = kind.from_pretrained(tmp_path / "model").state_dict()
    for key, master in masters.items():
        assert found[key].dtype == torch.float32
        assert torch.equal(found[key], master), key
        assert torch.equal(found[key].bfloat16(), short[key])
    assert any(not torch.equal(found[key], short[key].float()) for key in masters)


def take(case: Case, path: Path, step: bool = False) -> Weights:
    """What a model of zeros has after a load."""
    run = begin(case)
    with torch.no_grad():
        for p in run.model.parameters():
            p.zero_()
    if step:  # with ZeRO 3 a forward leaves its traces
        run.step(0, case.kind)
    run.booster.load_model(run.model, path)
    return weights(run.model)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case",
    [
        Case("vit", dp=2, tp=2, zero=1), Case("vit", dp=4, zero=3), Case("odd", tp=4, sequence=True),
        Case("gpt2", dp=2, pp=2, style="zb-v", chunks=2, microbatches=2), Case("gpt2", tp=4, tp_mode="2d"),
    ],
    ids=name,
)  # fmt: skip
def test_what_others_have_saved_is_loaded_into_any_layout(pools: Pools, case: Case, tmp_path: Path) -> None:
    source: Any = made(case.kind)
    wanted = source.state_dict()
    source.save_pretrained(tmp_path / "theirs", max_shard_size="9KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    save_file({n: t for n, t in wanted.items() if n != "lm_head.weight"}, tmp_path / "names.safetensors")
    torch.save(wanted, tmp_path / "names.bin")
    for path in ("theirs", "names.safetensors", "names.bin"):
        for found in on(pools, 4).run(take, case, tmp_path / path, case.zero == 3):
            assert same(found, {n: t for n, t in wanted.items() if n in found})
            assert found.keys() >= wanted.keys() - {"lm_head.weight"}


def headless(path: Path) -> Weights:
    run = begin(Case("gpt2", dp=2, tp=2))
    run.booster.load_model(run.model, path)
    return weights(run.model)


def test_a_model_saved_without_its_head_is_completed(pools: Pools, tmp_path: Path) -> None:
    """Names without "transformer.", and a head that is tied: from_pretrained knows them."""
    source: Any = made("gpt2")
    source.transformer.save_pretrained(tmp_path / "base")
    found = on(pools, 4).run(headless, tmp_path / "base")[0]
    assert same(found, {n: t for n, t in source.state_dict().items() if n in found})


def beside(folder: Path) -> tuple[list[str], bool]:
    """Model and optimizer in one folder, in both orders, twice."""
    run = begin(Case("vit", dp=2, tp=2, zero=1))
    for step in range(2):
        run.step(step, "vit")
        run.booster.save_model(run.model, folder, size_per_shard="9KB" if step == 0 else "1GB")
        run.booster.save_optimizer(run.optimizer, folder)
    run.booster.save_model(run.model, folder)
    before = weights(run.model), run.optimizer.state_dict()
    run.step(2, "vit")
    run.booster.load_model(run.model, folder)
    run.booster.load_optimizer(run.optimizer, folder)
    names = sorted(file.name for file in folder.iterdir())
    return names, same(before, (weights(run.model), run.optimizer.state_dict()))


def test_a_model_and_its_optimizer_may_share_a_folder(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "tokenizer.json").write_text("{}")
    names, alike = on(pools, 4).run(beside, tmp_path / "both")[0]
    assert alike
    assert names == ["config.json", "manifest.json", "model.safetensors", "state", "tokenizer.json"]


# --- what is refused ----------------------------------------------------------------------------------------


SHARD, PIECES = "*-00002-of*.safetensors", "rank-*.safetensors"


def to_a_file(change: Callable[[bytes], bytes | None]) -> Callable[[str], Callable[[Path], None]]:
    """Of the files of a pattern the first; None takes it away."""

    def damage(pattern: str) -> Callable[[Path], None]:
        def do(folder: Path) -> None:
            file = sorted(folder.rglob(pattern))[0]
            new = change(file.read_bytes())
            file.unlink()
            if new is not None:
                file.write_bytes(new)

        return do

    return damage


@to_a_file
def flipped(content: bytes) -> bytes:
    """One bit, two thirds into the file."""
    at = len(content) * 2 // 3
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


@to_a_file
def cut_short(content: bytes) -> bytes:
    return content[:-40]


@to_a_file
def gone(content: bytes) -> None:
    return None


def nothing(folder: Path) -> None:
    pass


def of_another_version(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace('"version": 2', '"version": 3').replace('"checksum"', '"sum"'))


def foreign(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "weights.h5").write_text("not ours")


def damaged_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def sealed_anew(folder: Path) -> None:
    """For damage that a checksum does not show: whoever made the file made it so."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != manifest.MANIFEST]
    sums = {file.relative_to(folder).as_posix(): manifest.file_sum(file) for file in files}
    manifest.seal(folder, sums, {"order": 1})


def another_index(folder: Path) -> None:
    (folder / "state" / "index.json").write_text("[]")
    sealed_anew(folder)


# What is done to a checkpoint, what of it is then loaded, and what is said.
DAMAGED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a bit of a weight": (flipped(SHARD), "all", "has other contents than"),
    "a bit of the state": (flipped(PIECES), "all", "has other contents than were written"),
    "a weight cut short": (cut_short(SHARD), "all", "bytes, and"),
    "the state cut short": (cut_short(PIECES), "all", "were written"),
    "a missing file": (gone(PIECES), "all", "which was written there"),
    "no manifest": (gone("manifest.json"), "all", "no complete checkpoint, because it has no manifest"),
    "half a manifest": (damaged_manifest, "all", "manifest.json is not that of a checkpoint"),
    "a newer version": (of_another_version, "all", "version 3 of the format, and this"),
    "another index": (another_index, "all", "is no index of a state"),
    "something foreign": (foreign, "all", "no complete checkpoint"),
    "nothing": (shutil.rmtree, "all", "is not there; give a folder"),
    "a bit of a model": (flipped(SHARD), "model", "has another"),
    "a model cut short": (cut_short(SHARD), "model", "cannot be read"),
    "a missing shard": (gone(SHARD), "model", "where its index has"),
    "a foreign model": (lambda f: foreign(f / "model"), "model", "has no weights"),
    "another model": (nothing, "other model", "lacks lm_head.weight"),
    "other shapes": (nothing, "other shapes", "shape"),
    "another optimizer": (nothing, "other optimizer", "is of AdamW, and this is SGD"),
    "another schedule": (nothing, "other schedule", "WarmupLR, and this is a StepLR"),
    "other groups": (nothing, "other groups", "has groups of"),
    "another batch": (nothing, "other batch", "global_batch=8, this loader has 16"),
}  # fmt: skip


BIT = "a bit of the state"  # only a checksum shows it: always tried

# On a rank: a run that a refusal has left as it was serves for the next one, and its state is known.
KEPT: dict[str, tuple[Run, Any, Any, Any]] = {}


def one_step_later(what: str) -> tuple[Run, Any, Any]:
    kind = "vit" if what != "other model" else "gpt2"
    case = Case(kind, dp=2, zero=1)
    torch.set_num_threads(1)
    booster = hpnb.Booster(plugin=case.plugin())
    model: Any = build(kind, hidden=24 if what == "other shapes" else 16)
    made_of: Any = torch.optim.SGD if what == "other optimizer" else torch.optim.AdamW
    optimizer: Any = made_of(model.parameters() if what == "other groups" else groups(model), lr=0.02)
    scheduler: Any = hpnb.CosineAnnealingWarmupLR(optimizer, total_steps=24, warmup_steps=4)
    if what == "other schedule":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    rows = [{key: t[i] for key, t in data(kind, 0, SAMPLES).items()} for i in range(SAMPLES)]
    size = 8 if what == "other batch" else 4
    loader: Any = booster.plugin.prepare_dataloader(rows, size, shuffle=True, seed=3)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
    run = Run(booster, model, optimizer)
    run.step(1, kind)
    return run, scheduler, loader


def refused(folder: Path, what: str, fails: str = "") -> tuple[str, bool]:
    """(what is said, whether all is as it was) on a rank.

    Args:
        fails: what raises an OSError on rank 1: "weights" that are read, or the "loader" that is set.
    """
    key = "all" if what == "model" else what

    def state(run: Run, scheduler: Any, loader: Any) -> Any:
        everything = (weights(run.model), run.optimizer.state_dict(), scheduler.state_dict())
        return copy.deepcopy((*everything, loader.state_dict(), torch.get_rng_state()))

    if key not in KEPT:
        made = one_step_later(what)
        KEPT[key] = (*made, state(*made))
    run, scheduler, loader, before = KEPT[key]
    torch.set_rng_state(before[-1])
    said = "nothing"
    patch = pytest.MonkeyPatch()
    if fails and hpnb.rank() == 1:
        weights_are_read = (weight_files.WeightFiles, "read_chunk")
        target = weights_are_read if fails == "weights" else (type(loader), "load_state_dict")
        patch.setattr(*target, fail_once(patch))
    try:
        if what == "model":
            run.booster.load_model(run.model, folder / "model")
        else:
            run.booster.load(folder, run.model, run.optimizer, scheduler, loader)
    except (ValueError, OSError, RuntimeError) as error:
        said = str(error)
    finally:
        patch.undo()
    as_before = same(before, state(run, scheduler, loader))
    if not as_before:
        del KEPT[key]
    return said, as_before


def fail_once(patch: pytest.MonkeyPatch) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        patch.undo()
        raise OSError(5, "Input/output error")

    return fail


@pytest.fixture(scope="module")
def sound(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "run"
    on(pools, 2).run(go, Case("vit", dp=2, zero=1), 2, target=folder, at=2, shards="9KB")
    return folder


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(wrong, marks=[pytest.mark.sampled(1)] if wrong != BIT else []) for wrong in DAMAGED],
)
def test_what_does_not_fit_is_said_on_all_ranks_and_nothing_is_loaded(
    pools: Pools, sound: Path, wrong: str, tmp_path: Path
) -> None:
    damage, what, words = DAMAGED[wrong]
    folder = tmp_path / "run"
    shutil.copytree(sound, folder)
    damage(folder)
    for said, as_before in on(pools, 2).run(refused, folder, what):
        assert words in said
        assert "\n" not in said
        assert as_before


@pytest.mark.sampled(2, cover=True)
@pytest.mark.parametrize(("what", "fails"), [("all", "weights"), ("model", "weights"), ("all", "loader")])
def test_a_read_error_on_one_rank_is_raised_on_all_and_nothing_is_loaded(
    pools: Pools, sound: Path, what: str, fails: str
) -> None:
    errors = on(pools, 2).run(refused, sound, what, fails)
    assert all("Input/output error" in said for said, _ in errors)
    assert "rank 1: " in errors[0][0]
    assert [as_before for _, as_before in errors] == [True] * 2


def test_the_checkpoint_that_is_damaged_is_sound(pools: Pools, sound: Path) -> None:
    for said, as_before in on(pools, 2).run(refused, sound, "all"):
        assert (said, as_before) == ("nothing", False)


def not_saved(folder: Path) -> list[str]:
    """What cannot be saved, and where."""
    run = begin(Case("vit", dp=2, tp=2))
    path = folder / "full"
    asked: list[Callable[[], object]] = [
        lambda: run.booster.save(path, run.model, extra={"thing": Case()}),
        lambda: run.booster.save(path, run.model, dataloader=[1, 2]),
        lambda: run.booster.save(path, run.model, keep=0),
        lambda: run.booster.save(path, run.model, size_per_shard="5 apples"),
        lambda: run.booster.save(folder, run.model),
        lambda: run.booster.save(folder / "file" / "in it", run.model),
        lambda: run.booster.save_model(run.model, folder / "file"),
        lambda: run.booster.save_model(run.model.module, path),
    ]
    said = []
    for ask in asked:
        try:
            ask()
            said.append("nothing")
        except (ValueError, RuntimeError, OSError) as error:
            said.append(str(error))
    return said


def test_what_cannot_be_saved_is_said_on_all_ranks(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    words = ["extra holds a Case at ['thing'], which is not safe", "a list as dataloader has no state_dict",
             "keep=0 would keep no checkpoint", "'5 apples' is no size", "is a folder with file in it",
             "file is a file, and a folder is to", "is a file, and a", "is not boosted"]  # fmt: skip
    for said in on(pools, 4).run(not_saved, tmp_path):
        for one, word in zip(said, words, strict=True):
            assert word in one
            assert "\n" not in one
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


# --- a disk that is full on one rank ------------------------------------------------------------------------


def onto_a_full_disk(folder: Path, full: int, background: bool) -> tuple[str, bool, bool]:
    """Files of rank `full` may not grow any more in the second save."""
    run = begin(Case("vit", dp=2, tp=2, zero=1))
    run.step(0, "vit")
    run.booster.save(folder, run.model, run.optimizer, extra="good")
    good = weights(run.model), run.optimizer.state_dict()
    run.step(1, "vit")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if hpnb.rank() == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    said = "nothing"
    try:
        run.booster.save(folder, run.model, run.optimizer, extra="bad", background=background)
        run.booster.wait()
    except Exception as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    extra = run.booster.load(folder, run.model, run.optimizer)
    as_good = extra == "good" and same(good, (weights(run.model), run.optimizer.state_dict()))
    run.booster.save(folder, run.model, run.optimizer, extra="better")
    return said, as_good, run.booster.load(folder, run.model, run.optimizer) == "better"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("full", "background"), [(0, False), (1, False), (2, True)])
def test_a_full_disk_on_one_rank_is_said_on_all(
    pools: Pools, full: int, background: bool, tmp_path: Path
) -> None:
    for said, as_good, better in on(pools, 4).run(onto_a_full_disk, tmp_path / "run", full, background):
        assert "File too large" in said
        assert "\n" not in said
        assert as_good
        assert better


# --- beside training, and again and again -------------------------------------------------------------------


def beside_training(case: Case, folder: Path, knobs: dict[str, Any]) -> tuple[bool, bool, list[str]]:
    """Steps while a save is written do not show in it; and of four saves two stay."""
    run = begin(case, **knobs)
    run.step(0, case.kind)
    held = threading.Event()
    write = written.write_weights

    def slowly(*args: Any) -> Any:
        held.wait(60)
        return write(*args)

    written.write_weights = slowly
    try:
        box = [(weights(run.model), run.optimizer.state_dict())]
        dist.broadcast_object_list(box)  # ranks have statistics of their own, and the first one's are saved
        saving = run.booster.save(folder / "step-1", run.model, run.optimizer, background=True)
        for step in (1, 2):
            run.step(step, case.kind)
        was_under_way = not saving.done
        held.set()
        run.booster.wait()
    finally:
        written.write_weights = write
    run.booster.load(folder / "step-1", run.model, run.optimizer)
    as_it_was = same(box[0], (weights(run.model), run.optimizer.state_dict()))
    for step in (2, 9, 10):  # whose copies lie where those of the first have lain
        run.step(step, case.kind)
        box = [(weights(run.model), run.optimizer.state_dict())]
        dist.broadcast_object_list(box)
        run.booster.save(folder / f"step-{step}", run.model, run.optimizer, background=True, keep=2)
        run.step(step + 1, case.kind)
    run.booster.load(folder, run.model, run.optimizer)
    as_it_was &= same(box[0], (weights(run.model), run.optimizer.state_dict()))
    return was_under_way, as_it_was, sorted(file.name for file in folder.iterdir())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "knobs"),
    [(Case("vit", dp=2, tp=2, zero=2), {"precision": "bf16"}),
     (Case("gpt2", dp=2, pp=2, style="zb-v", chunks=2, microbatches=2, zero=3), {}),
     (Case("module", dp=4), {})],
    ids=["16 bits", "pipeline", "buffers"],
)  # fmt: skip
def test_training_goes_on_while_a_save_is_written(
    pools: Pools, case: Case, knobs: dict[str, Any], tmp_path: Path
) -> None:
    for under_way, as_it_was, names in on(pools, 4).run(beside_training, case, tmp_path, knobs):
        assert under_way
        assert as_it_was
        assert names == ["step-10", "step-9"]


def draw_beside_a_save(folder: Path) -> tuple[list[float], list[float]]:
    """(six random numbers, the same six, of which three are drawn while transformers writes)."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11))
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp32"))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    began, drew, save = threading.Event(), threading.Event(), GPT2LMHeadModel.save_pretrained

    def slowly(*args: Any, **options: Any) -> None:
        began.set()
        drew.wait(60)
        save(*args, **options)

    torch.manual_seed(5)
    expected = [torch.rand(()).item() for _ in range(6)]
    hf_names._formats.clear()
    GPT2LMHeadModel.save_pretrained = slowly
    try:
        torch.manual_seed(5)
        saving = booster.save(folder / "step-1", model, optimizer, background=True)
        assert began.wait(60)
        drawn = [torch.rand(()).item() for _ in range(3)]
        drew.set()
        saving.wait()
    finally:
        GPT2LMHeadModel.save_pretrained = save
    return expected, drawn + [torch.rand(()).item() for _ in range(3)]


def test_a_save_in_the_background_leaves_random_numbers_alone(pools: Pools, tmp_path: Path) -> None:
    ((expected, drawn),) = on(pools, 1).run(draw_beside_a_save, tmp_path)
    assert drawn == expected


@pytest.mark.slow  # a save beside training is tested above
def test_the_benchmark_takes_turns(pools: Pools, tmp_path: Path) -> None:
    """What it measures is not asserted; that a save in the background is one, is."""
    windows, saved = on(pools, 4).run(bench.measure, str(tmp_path), 1, 2, 16, 2, 1)[0]
    assert {way: len(found) for way, found in windows.items()} == dict.fromkeys(bench.WAYS, 2)
    assert saved == sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert all(one.wall > one.call > 0 and one.cpu > 0 for way in bench.WAYS[1:] for one in windows[way])


def killed(folder: Path, *what: str) -> list[str]:
    """What is left of each of its lives."""
    program = Path(__file__).with_name("checkpoint_killed.py")
    ended = run_program(program, str(folder / "lives"), "1", *what, folder=folder)
    lives = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr
    assert len(lives) == (17 if what else 26), ended.stdout
    assert all("as it should" in life and "NOT" not in life for life in lives), ended.stdout
    assert any("killed at 0" in life for life in lives)  # by a clock
    return [life.partition("left ")[2] for life in lives]


@pytest.mark.slow  # test_chaos_saves.py kills saves too
@pytest.mark.sampled(1, of="killed")
def test_a_model_that_is_killed_while_it_is_saved_is_the_one_before(tmp_path: Path) -> None:
    """16 times, each in place of the last: what loads is wholly the old one or wholly the new."""
    left = killed(tmp_path, "model")
    assert any("'.hpnb-save-model'" in names for names in left)  # killed in the save
    assert any("'.hpnb-save-model'" not in names for names in left)  # after it


@pytest.mark.slow  # test_chaos_saves.py kills saves too
@pytest.mark.sampled(1, of="killed")
def test_a_run_that_is_killed_has_its_last_checkpoint(tmp_path: Path) -> None:
    """25 times, at moments of a clock and at every phase of a save (checkpoint_killed.py)."""
    left = killed(tmp_path)
    assert any("'last.part'" in names and "'last'" in names for names in left)  # killed while it was written
    assert any("'last.old'" in names and "'last'" not in names for names in left)  # between the two renames
    assert any("'last.old'" in names and "'last'" in names for names in left)  # after them
    assert left[-1].count("step-") <= 4  # two that are kept, one more or half of one; earlier halves are gone
