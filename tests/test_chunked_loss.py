"""A loss in chunks: the loss and the gradients of all logits at once, in the memory of a few of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hybrid_cases import Case, off, train
from rank_pools import RankPools

import hpnb
from hpnb.hybrid import compile_blocks
from hpnb.models import (
    GPT2Size,
    chunk_loss,
    chunked_cross_entropy,
    gpt2,
    in_place_cross_entropy,
    linear_cross_entropy,
)
from hpnb.models.gpt2_chunked_loss import ChunkedHead

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

D = torch.float64
N, H, V = 23, 6, 31


def operands(dtype: torch.dtype = D) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, H, generator=g, dtype=D).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=g, dtype=D).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=g)
    targets[::4] = -100
    return hidden, weight, targets


def apart(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    assert a is not None
    assert b is not None
    return float((a.double() - b.double()).norm() / b.double().norm())


# --- the function ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
def test_it_is_the_loss_of_all_logits(chunk: int, recompute: bool) -> None:
    hidden, weight, targets = operands()
    wanted = F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    (wanted * 0.3).backward()
    ours, own_weight, _ = operands()
    found = chunked_cross_entropy(ours, own_weight, targets, chunk, recompute=recompute)
    (found * 0.3).backward()
    assert abs(float((found - wanted).detach() / wanted.detach())) < 1e-12
    assert apart(ours.grad, hidden.grad) < 1e-12
    assert apart(own_weight.grad, weight.grad) < 1e-12


@pytest.mark.sampled(3, cover=True)
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("recompute", [False, True])
def test_columns_that_are_no_words_and_two_passes_change_nothing(
    rows: int, backend: str | None, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: 31 words become 32 rows of the weight, and logits become their gradient in place."""
    torch.compiler.reset()  # PyTorch counts compilations
    monkeypatch.setattr(linear_cross_entropy, "ROWS", {"cpu": rows})
    for dtype, close in ((D, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        hidden, weight, targets = operands(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        wanted = F.cross_entropy((hidden @ weight.t()).to(wide), targets, reduction="sum")
        (wanted * 0.3).backward()
        ours, own_weight, _ = operands(dtype)
        found = chunked_cross_entropy(ours, own_weight, targets, 5, recompute=recompute, backend=backend)
        (found * 0.3).backward()
        assert found.dtype == wide
        assert abs(float((found - wanted).detach() / wanted.detach())) < close
        assert apart(ours.grad, hidden.grad) < close
        assert apart(own_weight.grad, weight.grad) < close


def test_a_column_taken_for_a_word_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "ROWS", {"cpu": 8})
    monkeypatch.setattr(in_place_cross_entropy, "_mask_padding", lambda logits, vocab_size: logits.clone())
    hidden, weight, targets = operands()
    wanted = F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    found = chunked_cross_entropy(hidden, weight, targets, 5, backend="eager")
    assert abs(float((found - wanted).detach() / wanted.detach())) > 1e-4


def test_a_gradient_may_be_asked_of_one_alone() -> None:
    for frozen in (0, 1):
        given = operands()
        given[frozen].requires_grad_(False)
        chunked_cross_entropy(*given, 4).backward()
        assert given[frozen].grad is None
        assert float(given[1 - frozen].grad.norm()) > 0  # type: ignore[union-attr]
    with torch.no_grad():
        assert not chunked_cross_entropy(*operands(), 4).requires_grad


def test_no_token_and_no_target_count_nothing() -> None:
    hidden, weight, targets = operands()
    for some, of in ((hidden[:0], targets[:0]), (hidden, torch.full_like(targets, -100))):
        weight.grad = hidden.grad = None
        found = chunked_cross_entropy(some, weight, of, 4)
        found.backward()
        assert found.item() == 0
        assert float(weight.grad.norm()) == 0  # type: ignore[union-attr]


def test_weight_gradients_of_16_bits_are_summed_in_32() -> None:
    """512 chunks of equal gradients: summed in bfloat16 they would stop growing at 256 times one of them."""
    n = 512
    hidden = torch.full((n, 8), 1 / 64, dtype=torch.bfloat16)
    weight = torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)
    chunked_cross_entropy(hidden, weight, torch.zeros(n, dtype=torch.long), 1).backward()
    wanted = torch.full((4, 8), n / 64 / 4)
    wanted[0] -= n / 64
    assert apart(weight.grad, wanted) < 1e-3
    in_16 = sum(
        (torch.tensor(1 / 256, dtype=torch.bfloat16) for _ in range(n)), torch.zeros((), dtype=torch.bfloat16)
    )
    assert float(in_16) < 0.6 * n / 256


@pytest.mark.parametrize("recompute", [False, True])
def test_what_the_backward_brings_is_not_rounded_to_16_bits(recompute: bool) -> None:
    """The factor lies between two bfloat16, 0.26 % from either: so much all gradients would be off."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(255, 32, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(64, 32, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(64, (255,), generator=generator)

    def gradients(factor: float) -> list[torch.Tensor]:
        loss = factor * chunked_cross_entropy(hidden, weight, targets, 128, recompute=recompute)
        return [grad.double() for grad in torch.autograd.grad(loss, (hidden, weight))]

    factor = 1.5 + 1 / 256
    for scaled, plain in zip(gradients(factor), gradients(1.0), strict=True):
        assert float((scaled * plain).sum() / plain.square().sum()) == pytest.approx(factor, rel=5e-4)


def test_autocast_computes_in_16_bits_and_gives_gradients_of_32() -> None:
    hidden, weight, targets = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_cross_entropy(hidden, weight, targets, 4)
    found.backward()
    ours = hidden.detach().bfloat16(), weight.detach().bfloat16().requires_grad_()
    wanted = F.cross_entropy((ours[0] @ ours[1].t()).float(), targets, reduction="sum")
    wanted.backward()
    assert (found.dtype, weight.grad.dtype) == (torch.float32, torch.float32)  # type: ignore[union-attr]
    assert abs(float(found - wanted)) < 1e-4 * float(wanted)
    assert apart(weight.grad, ours[1].grad) < 1e-2


def test_shapes_that_do_not_fit() -> None:
    hidden, weight, targets = operands()
    with pytest.raises(
        ValueError, match=r"hidden \(23, 6\), weight \(31, 6\) and targets \(22,\) do not fit"
    ):
        chunked_cross_entropy(hidden, weight, targets[1:], 4)
    with pytest.raises(ValueError, match="chunk=0 is no number of tokens"):
        chunked_cross_entropy(hidden, weight, targets, 0)


@pytest.mark.parametrize("target", [31, -1])
@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_target_outside_of_the_vocabulary_is_refused(target: int, backend: str | None) -> None:
    hidden, weight, targets = operands()
    targets[3] = target
    with pytest.raises(
        ValueError, match=rf"{target} is not in the vocabulary; use targets of 0 to 30, or -100"
    ):
        chunked_cross_entropy(hidden, weight, targets, 4, backend=backend)


# --- a model -----------------------------------------------------------------------------------------------

SIZE = GPT2Size(hidden=20, layers=2, heads=5, mlp=80, vocab_size=53, length=16)


def rows() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 53, (3, 11), generator=g)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def test_a_model_gives_its_loss_and_no_logits() -> None:
    model, chunked, batch = gpt2(SIZE, dtype=D), chunk_loss(gpt2(SIZE, dtype=D), 7), rows()
    unlabelled = {name: t for name, t in batch.items() if name != "labels"}
    logits = model(**unlabelled).logits
    wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    wanted.backward()
    found = chunked(**batch)
    found.loss.backward()
    assert abs(float(found.loss - wanted)) < 1e-12
    for ours, theirs in zip(chunked.parameters(), model.parameters(), strict=True):
        if float(theirs.grad.norm()) > 1e-9:  # type: ignore[union-attr]
            assert apart(ours.grad, theirs.grad) < 1e-12
    assert not hasattr(found, "logits")
    with pytest.raises(AttributeError, match=r"keeps no logits: read outputs\.loss"):
        _ = found.logits
    assert chunked(**batch, return_dict=False)[0] == found.loss
    assert torch.equal(chunked(**unlabelled).logits, logits)  # without labels
    with torch.no_grad():
        tested = chunked(**batch)  # without gradients
        assert torch.equal(tested.logits, logits)
        assert abs(float(tested.loss - wanted)) < 1e-12
    copied = copy.deepcopy(chunked)
    copied.zero_grad()
    copied(**batch).loss.backward()
    assert apart(copied.lm_head.weight.grad, model.lm_head.weight.grad) < 1e-12


@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)])
def test_the_mean_loss_over_no_target_is_zero(count: Any) -> None:
    batch = rows()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    counted = {} if count is None else {"num_items_in_batch": count}
    loss = chunk_loss(gpt2(SIZE, dtype=D), 7)(**batch, **counted).loss
    assert loss.item() == 0


def test_what_keeps_its_logits() -> None:
    with pytest.raises(TypeError, match="is for a GPT2LMHeadModel, not for a GPT2ForSequenceClassification"):
        chunk_loss(gpt2(SIZE, classes=2), 4)
    with pytest.raises(ValueError, match="loss_chunk=0 is no number of tokens"):
        chunk_loss(gpt2(SIZE), 0)
    with pytest.raises(ValueError, match="in chunks already"):
        chunk_loss(chunk_loss(gpt2(SIZE), 4), 4)
    with pytest.raises(ValueError, match="a loss in chunks needs a label for each token"):
        chunk_loss(gpt2(SIZE), 4)(**rows(), logits_to_keep=2)
    own = gpt2(SIZE)
    own.loss_function = lambda logits, labels, **_: F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    with pytest.raises(ValueError, match=r"no num_items_in_batch and no shift_labels.*use loss_chunk=0"):
        chunk_loss(own, 4)  # in silence it would be a sum of the chunks' means
    with pytest.raises(ValueError, match=r"leave loss_chunk out with tp_mode='2d'"):
        hpnb.HybridParallelPlugin(tp_size=4, tp_mode="2d", loss_chunk=64)
    with pytest.raises(ValueError, match="loss_chunk=-1 "):
        hpnb.HybridParallelPlugin(loss_chunk=-1)


# --- memory ------------------------------------------------------------------------------------------------


def peak(chunk: int, recompute: bool = False) -> int:
    """Bytes above parameters and gradients, of one step of a model with more words than anything."""
    n, words = 512, 4001
    model = gpt2(GPT2Size(hidden=16, layers=1, heads=2, mlp=64, vocab_size=words, length=n))
    ids = torch.randint(0, words, (1, n), generator=torch.Generator().manual_seed(1))
    if chunk:
        chunk_loss(model, chunk, recompute)
    with hpnb.record.memory(model) as recorder:
        model(input_ids=ids, labels=ids).loss.backward()
    return max(s.activations + s.temporary for s in recorder.profile().samples)


@pytest.mark.parametrize("recompute", [False, True])
def test_logits_are_never_all_in_memory(recompute: bool) -> None:
    logits = 512 * 4001 * 4
    whole = peak(0)
    assert whole > 2 * logits  # they, and their gradient
    few = {chunk: peak(chunk, recompute) for chunk in (32, 128)}
    assert few[128] < logits
    assert few[32] < 0.5 * logits
    # What grows with the chunk is a few times its own logits.
    assert 1 < (few[128] - few[32]) / (96 * 4001 * 4) < 4


def test_what_waits_for_the_backward() -> None:
    """The gradient of the weight, or only what goes into the layer."""
    held = {}
    for recompute in (False, True):
        hidden, weight, targets = operands(torch.float32)
        with hpnb.record.memory([]) as recorder:
            waiting = [
                chunked_cross_entropy(hidden, weight, targets, 4, recompute=recompute) for _ in range(3)
            ]
        held[recompute] = recorder.profile().samples[-1].activations
        assert len(waiting) == 3
    extra = held[False] - held[True]
    assert held[False] >= 3 * (V * H + N * H) * 4
    assert math.isclose(extra, 3 * (V * H + N * H) * 4 - held[True], rel_tol=0.0, abs_tol=held[True] * 2)


# --- in a Booster ---------------------------------------------------------------------------------------

TWO = (
    Case("gpt2", dp=2, direct=True, rows=7),
    Case("gpt2", dp=2, zero=3, microbatches=3, accumulate=2),
    Case("gpt2", pp=2, microbatches=3, clip=0.5),
    Case("gpt2", pp=2, style="zb-v", chunks=2, microbatches=3, rows=5),
    Case("gpt2", pp=2, style="zb-h1", zero=3, microbatches=3),
    Case("gpt2", pp=2, style="gpipe", microbatches=4, rows=2),  # and microbatches without samples
    Case("gpt2", tp=2, direct=True, rows=7),
    Case("gpt2", tp=2, sequence=True, microbatches=2, again="full"),
)
FOUR = (
    Case("gpt2", dp=2, pp=2, zero=2, style="dualpipe-v", chunks=2, microbatches=4, clip=0.5),
    Case("gpt2", pp=2, tp=2, style="interleaved", chunks=2, microbatches=2, sequence=True, zero=1),
    Case("gpt2", dp=2, tp=2, zero=2, microbatches=2, accumulate=2, again="attention"),
)  # fmt: skip


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    made = RankPools(timeout=120)
    yield made
    made.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", [*TWO, *FOUR], ids=str)
def test_every_layout_is_one_process_with_all_its_logits(pools: RankPools, case: Case) -> None:
    assert off(case, pools[case.ranks].run(train, case, {"loss_chunk": 5})) < 1e-11


# A pipeline, which test_fast.py compiles too, and words cut.
@pytest.mark.slow  # compiled and on ranks it is tested, each alone
@pytest.mark.parametrize("case", [TWO[3], TWO[7]], ids=["pp", "tp"])
def test_compiled_it_is_one_process_too(case: Case) -> None:
    """Words cut over ranks whose three numbers are combined; 53 words as 27 and 26, each with rows to 32."""

    def fast(case: Case) -> Any:
        compile_blocks.ON_CPUS, linear_cross_entropy.ROWS = "aot_eager", {"cpu": 16}
        try:
            return train(case, {"loss_chunk": 5, "enable_jit_fused": True})
        finally:
            compile_blocks.ON_CPUS, linear_cross_entropy.ROWS = None, {}

    with hpnb.Ranks(2, timeout=120) as ranks:
        assert off(case, ranks.run(fast, case)) < 1e-11


def test_a_chunk_that_is_forgotten_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above sees a fault."""

    def lossy(case: Case) -> Any:
        plain = ChunkedHead.__call__
        ChunkedHead.__call__ = lambda self, hidden: plain(self, hidden) * 1.001  # type: ignore[method-assign]
        try:
            return train(case, {"loss_chunk": 5})
        finally:
            ChunkedHead.__call__ = plain  # type: ignore[method-assign]

    with hpnb.Ranks(2, timeout=120) as ranks:
        assert off(TWO[0], ranks.run(lossy, TWO[0])) > 1e-5


def test_outputs_under_a_pipeline_have_no_logits() -> None:
    def step() -> list[str]:
        plugin = hpnb.HybridParallelPlugin(pp_size=2, precision="fp32", num_microbatches=2, loss_chunk=5)
        booster = hpnb.Booster(plugin=plugin)
        model: Any = gpt2(SIZE)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        said = []
        for train_it in (True, False):
            found = booster.execute_pipeline(
                iter([rows()]), model, None, optimizer if train_it else None, return_outputs=True
            )
            outputs = found["outputs"]
            said.append("nothing" if outputs is None else " ".join(outputs.keys()))
        return said

    first, last = hpnb.launch(step, ranks=2, timeout=60)
    assert first == ["nothing", "nothing"]
    assert "logits" not in last[0]
    assert "logits" in last[1]  # evaluated
