"""Mistakes in programs of one's own that once went unseen: each is right now, or one sentence."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_pools import RankPools
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hpnb
from hpnb.background import Pending
from hpnb.hybrid.checkpoint import atomic, manifest
from hpnb.models import Anatomy, Part
from hpnb.models.role import linear, norm
from hpnb.tensor_parallel.async_all_reduce import DeferredWeightGrad

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

EXACT = 1e-12


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def message_of(failed: pytest.ExceptionInfo[hpnb.RankError]) -> str:
    """What the exception says, without the traceback, which repeats lines of the test."""
    return failed.value.summary


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2, **off))


def words(lengths: tuple[int, ...] = (8, 3, 6, 8)) -> dict[str, torch.Tensor]:
    """Sequences of 8 tokens, of which so many have labels."""
    ids = torch.randint(17, (len(lengths), 8), generator=torch.Generator().manual_seed(1))
    hidden = torch.arange(8) >= torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "labels": ids.masked_fill(hidden, -100)}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    worst = max(float((a[name] - b[name]).norm()) for name in a)
    return worst / max(float(b[name].norm()) for name in b)


# --- labels that are shifted already -----------------------------------------------------------------------


def without_shift(outputs: Any, inputs: Any) -> torch.Tensor:
    logits = outputs.logits if hasattr(outputs, "logits") else outputs
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


def with_shift(outputs: Any, inputs: Any) -> torch.Tensor:
    logits = outputs.logits if hasattr(outputs, "logits") else outputs
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def step_of_gpt2(criterion: Any, batch: Any, **how: Any) -> tuple[float, dict[str, torch.Tensor]]:
    plugin = hpnb.HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp64")
    booster = hpnb.Booster(plugin=plugin)
    model = gpt2()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    result = booster.execute_pipeline(iter([batch]), model, criterion, optimizer, **how)
    loss = model.last_step.loss.item()
    assert (result["loss"] is None) == (hpnb.rank() == 0)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if name != "lm_head.weight"}
    # The same criterion once more, and forward alone.
    booster.execute_pipeline(iter([batch]), model, criterion, None, **how)
    return loss, gradients


def layered() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 17)).double()


def step_of_layers(criterion: Any, batch: Any, **how: Any) -> tuple[float, dict[str, torch.Tensor]]:
    schedule = hpnb.pipeline_parallel.schedules.make("1f1b", 2, 2)
    pipe = hpnb.Pipeline(layered(), hpnb.Mesh(hpnb.Layout(pp=2)).pp, schedule, criterion, **how)
    loss = pipe.step(batch).loss.item()
    return loss, {name: p.grad for name, p in pipe.named_parameters()}


def by_one_process(model: nn.Module, criterion: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    outputs = model(batch["input_ids"])
    loss = criterion(outputs, batch)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.sampled(2, cover=True)
@pytest.mark.parametrize("shifts", [False, True], ids=["shifted already", "shifts itself"])
@pytest.mark.parametrize("known", [True, False], ids=["GPT-2", "layers"])
def test_labels_that_are_shifted_already_are_stated_and_checked(
    pools: RankPools, shifts: bool, known: bool
) -> None:
    criterion, batch = (with_shift if shifts else without_shift), words()
    step, model = (step_of_gpt2, gpt2().double()) if known else (step_of_layers, layered())
    loss, gradients = by_one_process(model, criterion, batch)
    found = pools[2].run(step, criterion, batch, causal=shifts)
    assert found[0][0] == found[1][0] == pytest.approx(loss, rel=EXACT)
    assert distance(found[0][1] | found[1][1], gradients) < EXACT
    for stated in (None, not shifts):
        if stated is None and shifts == known:  # what the model says is right
            assert pools[2].run(step, criterion, batch)[0][0] == found[0][0]
            continue
        with pytest.raises(hpnb.RankError) as failed:
            pools[2].run(step, criterion, batch, causal=stated)
        shifted, all_labels = "9 of 21", "11 of 25"
        counted, instead = (all_labels, shifted) if shifts else (shifted, all_labels)
        assert f"{counted} targets, would have to be {instead}: pass causal" in message_of(failed)
        assert f"pass causal={shifts} to execute_pipeline or Pipeline" in message_of(failed)


def own_loss(outputs: Any, inputs: Any) -> torch.Tensor:
    return outputs.logits.square().mean()


def sums(outputs: Any, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    count = inputs["labels"].ne(-100).sum()
    return without_shift(outputs, inputs) * count, count


def test_a_loss_whose_weights_are_right_or_that_takes_no_labels_is_left_alone(pools: RankPools) -> None:
    even = words((8, 3, 3, 8))  # 11 targets in each microbatch, shifted or not 9
    assert pools[2].run(step_of_gpt2, without_shift, even)[0][0] == pytest.approx(
        by_one_process(gpt2().double(), without_shift, even)[0], rel=EXACT
    )
    pools[2].run(step_of_gpt2, own_loss, words())
    pools[2].run(step_of_gpt2, None, words())
    loss, _ = by_one_process(gpt2().double(), without_shift, words())
    assert pools[2].run(step_of_gpt2, sums, words())[0][0] == pytest.approx(loss, rel=EXACT)


# --- a model without values --------------------------------------------------------------------------------


def step_from_meta(knobs: dict[str, Any], fill: str, folder: str = "") -> float:
    """The loss of a step of a model that was made on the meta device."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(gpt2().config)
    model.tie_weights()
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", num_microbatches=2, **knobs))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if fill == "file":
        booster.load_model(boosted, folder)
    if fill == "ones":
        with torch.no_grad():
            for p in boosted.parameters():
                p.fill_(0.1)
    if knobs.get("pp_size", 1) == 1 and fill != "pipeline":
        loss = boosted(**words()).loss
        booster.backward(loss, optimizer)
        return loss.item()
    booster.execute_pipeline(iter([words()]), boosted, None, optimizer)
    return boosted.last_step.loss.item()


@pytest.mark.parametrize(
    "knobs", [{"pp_size": 2}, {"tp_size": 2}, {"zero_stage": 3}, {"zero_stage": 1}], ids=str
)
def test_a_model_from_the_meta_device_does_not_train_from_zeros(
    pools: RankPools, knobs: dict[str, Any], tmp_path: Path
) -> None:
    if knobs.get("zero_stage") == 1:  # by microbatches, without stages
        with pytest.raises(hpnb.RankError) as failed:
            pools[2].run(step_from_meta, knobs, "pipeline")
        assert "booster.load_model(model, folder)" in message_of(failed)
    with pytest.raises(hpnb.RankError) as failed:
        pools[2].run(step_from_meta, knobs, "nothing")
    assert "were on the meta device, which holds no values, and are all zero: fill the model" in message_of(
        failed
    )
    model = gpt2().double()
    model.save_pretrained(tmp_path)
    expected = model(**words()).loss.item()
    assert pools[2].run(step_from_meta, knobs, "file", str(tmp_path)) == pytest.approx(
        [expected] * 2, rel=1e-6
    )
    assert pools[2].run(step_from_meta, knobs, "ones")[0] > 0


def llama_step_from_meta(knobs: dict[str, Any], folder: str, remake: bool) -> float:
    """The loss of a step of a Llama, whose rotary table is in no state dict."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    if remake:
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", num_microbatches=2, **knobs))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.load_model(boosted, folder)
    booster.execute_pipeline(iter([words()]), boosted, None, optimizer)
    return boosted.last_step.loss.item()


@pytest.mark.parametrize("knobs", [{"pp_size": 2}, {"tp_size": 2}, {"zero_stage": 3}], ids=str)
def test_a_rotary_table_on_the_meta_device_is_refused_with_what_to_do(
    pools: RankPools, knobs: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=gpt2().config.vocab_size, **sizes)).double()
    model.save_pretrained(tmp_path)
    with pytest.raises(hpnb.RankError) as failed:
        pools[2].run(llama_step_from_meta, knobs, str(tmp_path), False)
    assert "rotary_emb.inv_freq is on the meta device" in message_of(failed)
    assert "model.model.rotary_emb = type(model.model.rotary_emb)(config)" in message_of(failed)
    expected = model(**words()).loss.item()
    assert pools[2].run(llama_step_from_meta, knobs, str(tmp_path), True) == pytest.approx(
        [expected] * 2, rel=1e-6
    )


def step_of_pipeline_from_meta(fill: bool) -> float:
    with torch.device("meta"):
        model = layered()
    schedule = hpnb.pipeline_parallel.schedules.make("1f1b", 2, 2)
    pipe = hpnb.Pipeline(model, hpnb.Mesh(hpnb.Layout(pp=2)).pp, schedule, without_shift)
    if fill:
        hpnb.placement.load_full_state_dict(pipe.module, layered().state_dict(), strict=False)
    return pipe.step(words()).loss.item()


def test_a_pipeline_of_a_model_from_the_meta_device_is_filled_before(pools: RankPools) -> None:
    expected = by_one_process(layered(), without_shift, words())[0]
    assert pools[2].run(step_of_pipeline_from_meta, True)[0] == pytest.approx(expected, rel=EXACT)
    with pytest.raises(hpnb.RankError) as failed:
        pools[2].run(step_of_pipeline_from_meta, False)
    assert "are all zero: fill the model before its first step" in message_of(failed)


# --- overlap that was switched off -------------------------------------------------------------------------


def order_of_backward(overlap: bool) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Waits for reduce-scatters and computations of weight gradients, in the order of one backward."""
    plugin = hpnb.HybridParallelPlugin(
        tp_size=2, precision="fp64", enable_sequence_parallelism=True, enable_sequence_overlap=overlap
    )
    booster = hpnb.Booster(plugin=plugin)
    model = gpt2()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss, order = model(**words()).loss, []
    wait, compute = Pending.wait, DeferredWeightGrad.compute

    def noted_wait(self: Pending) -> None:
        if self._block is not None:
            order.append("wait")
        wait(self)

    def noted_compute(self: DeferredWeightGrad, *needs: bool) -> Any:
        order.append("compute")
        return compute(self, *needs)

    Pending.wait, DeferredWeightGrad.compute = noted_wait, noted_compute  # type: ignore[method-assign]
    try:
        booster.backward(loss, optimizer)
    finally:
        Pending.wait, DeferredWeightGrad.compute = wait, compute  # type: ignore[method-assign]
    return order, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_sequence_overlap_can_be_switched_off(pools: RankPools) -> None:
    (on, gradients), *_ = pools[2].run(order_of_backward, True)
    (off, same), *_ = pools[2].run(order_of_backward, False)
    regions = 4  # two in each of two blocks, and each has a column- and a row-parallel layer
    assert on == ["compute", "compute", "wait"] * regions
    assert off == ["wait", "compute", "compute"] * regions
    assert all(torch.equal(same[name], gradient) for name, gradient in gradients.items())


# --- a save in the background, of a Booster that is kept ----------------------------------------------------

kept: list[Any] = []


def save_slowly_and_return(folder: Path, fails: bool) -> float:
    commit = atomic.commit

    def slow_commit(*args: Any) -> None:
        time.sleep(1.0)
        if fails:
            raise OSError("the disk is gone")
        commit(*args)

    atomic.commit = slow_commit  # type: ignore[assignment]
    booster, model = hpnb.Booster(plugin=hpnb.TorchDDPPlugin(precision="fp32")), gpt2()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.save(folder, model, optimizer, background=True)
    kept.append(booster)
    return time.monotonic()


def test_a_save_of_a_booster_that_a_global_keeps_is_finished_or_fails_the_call(tmp_path: Path) -> None:
    hpnb.launch(save_slowly_and_return, tmp_path / "good-1", False, ranks=2, device="cpu", timeout=60)
    assert manifest.is_complete(tmp_path / "good-1")
    with pytest.raises(hpnb.RankError) as failed:
        hpnb.launch(save_slowly_and_return, tmp_path / "bad-1", True, ranks=2, device="cpu", timeout=60)
    assert "the disk is gone" in message_of(failed)


# --- wrapped by others before ------------------------------------------------------------------------------


def boost_wrapped(how: str) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "FSDP2":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    elif how == "FSDP2 inside":
        fully_shard(model[1], mesh=init_device_mesh("cpu", (2,)))
    elif how == "DDP":
        model = DistributedDataParallel(model)
    else:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == dist.get_world_size()
        if how == "accelerate":
            model, optimizer = accelerator.prepare(model, optimizer)
        else:
            optimizer = accelerator.prepare(optimizer)
    hpnb.Booster(plugin=hpnb.TorchDDPPlugin(precision="fp32")).boost(model, optimizer)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "FSDP2",
            "this model is wrapped in torch's FSDPModule already, and gradients would be reduced twice",
        ),
        ("FSDP2 inside", "its module 1 is wrapped in torch's FSDPModule already"),
        ("FSDP2", "boost a new model, because fully_shard changes a model in place"),
        (
            "DDP",
            "DistributedDataParallel already, and gradients would be reduced twice; boost the model without",
        ),
        ("accelerate", "this model is wrapped in torch's DistributedDataParallel already"),
        (
            "accelerate's optimizer",
            "boost takes an optimizer of torch.optim, not accelerate's AcceleratedOptimizer",
        ),
    ],
)
def test_what_reduces_gradients_already_is_refused(pools: RankPools, how: str, said: str) -> None:
    if how.startswith("accelerate"):
        pytest.importorskip("accelerate", reason="accelerate is no dependency")
    with pytest.raises(hpnb.RankError) as failed:
        pools[2].run(boost_wrapped, how)
    assert said in message_of(failed)


# --- another learning rate on resume -----------------------------------------------------------------------


def resume_with_another_rate(folder: str, knobs: dict[str, Any]) -> tuple[list[float], float]:
    """Rates after a load, and how far a step at a rate of 0, set after it, moves the weights."""

    def boosted(lr: float) -> Any:
        booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", **knobs))
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        scheduler = hpnb.CosineAnnealingWarmupLR(optimizer, 10)
        model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
        return booster, model, optimizer, scheduler

    def step(booster: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        booster.execute_pipeline(iter([words()]), model, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    first = boosted(0.1)
    step(*first)
    first[0].save(folder, *first[1:])
    booster, model, optimizer, scheduler = second = boosted(0.3)
    booster.load(folder, model, optimizer, scheduler)
    rates = [optimizer.param_groups[0]["lr"] / first[2].param_groups[0]["lr"]]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups[0]["lr"], scheduler.base_lrs = 0.0, [0.3]
    step(*second)
    moved = max(
        float((a - b).abs().max()) for a, b in zip(before, model.parameters(), strict=True) if a.numel()
    )
    rates.append(optimizer.param_groups[0]["lr"] / scheduler.rate(2, 0.3))
    return rates, moved


@pytest.mark.parametrize("knobs", [{"zero_stage": 1}, {"zero_stage": 3}, {"pp_size": 2}], ids=str)
def test_a_load_restores_rates_and_others_are_set_after_it(
    pools: RankPools, knobs: dict[str, Any], tmp_path: Path
) -> None:
    for rates, moved in pools[2].run(resume_with_another_rate, str(tmp_path / "step-1"), knobs):
        assert rates == pytest.approx([1.0, 1.0])
        assert moved == 0.0


# --- a convolution beside tensor parallelism ---------------------------------------------------------------


class ConvolvedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(width), nn.Conv1d(width, width, 3, padding=1)
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Convolved(nn.Module):
    """(B, s, 6) -> (B, 5); convolutions look at neighbouring tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Linear(6, 8), nn.ModuleList(ConvolvedBlock(8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class ConvolvedParts(Anatomy):
    def embed(self, inputs: Any) -> Any:
        return self.embedding[0].module(inputs["x"])

    def run(self, block: Any, hidden: Any, inputs: Any) -> Any:
        return block.module(hidden)

    def finish(self, hidden: Any, inputs: Any) -> Any:
        return self.head[0].module(hidden.mean(1))


def convolved_parts(net: Convolved) -> Anatomy:
    blocks = tuple(Part(f"layers.{i}", layer) for i, layer in enumerate(net.layers))
    return ConvolvedParts((Part("embed", net.embed),), blocks, (Part("head", net.head),))


def convolved_roles(net: Convolved) -> dict[str, Any]:
    page = [*linear("embed", "embedding"), *linear("head", "head")]
    for i in range(len(net.layers)):
        page += [*norm(f"layers.{i}.norm"), *norm(f"layers.{i}.conv")]  # both replicated
        page += [*linear(f"layers.{i}.up", "column", 32), *linear(f"layers.{i}.down", "row", 32)]
    return dict(page)


def loss_of_classes(outputs: Any, inputs: Any) -> torch.Tensor:
    return F.cross_entropy(outputs, inputs["labels"])


def steps_of_convolved(**knobs: Any) -> list[float]:
    hpnb.models.register(Convolved, convolved_parts, convolved_roles)
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", max_norm=0.1, **knobs))
    model = Convolved()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    x = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(3):
        batch = {"x": x, "labels": torch.arange(4)}
        result = booster.execute_pipeline(iter([batch]), boosted, loss_of_classes, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found += [float(result["loss"]), float(optimizer.last_step.norm)]
    return found


def test_a_replicated_convolution_is_exact_and_refused_where_tokens_are_split(pools: RankPools) -> None:
    (alone,) = pools[1].run(steps_of_convolved)
    assert alone[4] < alone[0]
    for found in pools[2].run(steps_of_convolved, tp_size=2):
        assert found == pytest.approx(alone, rel=EXACT)
    with pytest.raises(hpnb.RankError) as failed:
        pools[2].run(steps_of_convolved, tp_size=2, enable_sequence_parallelism=True)
    assert "layers.0.conv is a Conv1d with kernel_size=(3,), and with sequence parallelism" in message_of(
        failed
    )
