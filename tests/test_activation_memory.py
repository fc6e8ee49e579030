"""What a layer of GPT-2 keeps for its backward: published rows, what is beyond them, tensors counted."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpnb
from hpnb.lesson.programs import layer_memory
from hpnb.models import GPT2Size
from hpnb.theory import ACTIVATION_ROWS, ActivationRow, Block, published_activation_bytes

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

PUBLISHED = Path(__file__).parent / "published" / "activation_memory.csv"
SIZE = GPT2Size(hidden=160, layers=3, heads=10, mlp=640, vocab_size=64, length=96)


def test_formulas_are_the_published_ones() -> None:
    lines = [line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#")]
    published = {row["variant"]: row["bytes_per_layer"] for row in csv.DictReader(lines)}
    assert [row.name for row in ACTIVATION_ROWS] == list(published)
    for block in (Block(1600, 25, 1024, 4), Block(160, 10, 96, 2)):
        sizes = {"s": block.sequence, "b": block.batch, "h": block.hidden, "a": block.heads}
        for t in (1, 2, 5):
            for row in ACTIVATION_ROWS:
                wanted = eval(published[row.name], {"t": t, **sizes})
                assert row.published(block, t) == pytest.approx(wanted, rel=1e-12), row.name
    for row in ACTIVATION_ROWS[:3]:  # which the modes of tensor parallelism are compared with
        wanted = published_activation_bytes(Block(160, 10, 96), 2 if row.parallel else 1, row.sequence)
        assert row.published(Block(160, 10, 96), 2) == pytest.approx(wanted)
    with pytest.raises(ValueError, match="0 ranks share nothing"):
        ACTIVATION_ROWS[0].published(Block(160, 10, 96), 0)


def predicted(
    row: ActivationRow, block: Block, ranks: int, device: str, fused: tuple[bool, bool]
) -> tuple[float, dict[str, float]]:
    """(the published formula, what is beyond it) on `ranks` ranks, or on one if the row is not parallel."""
    count = ranks if row.parallel else 1
    terms = row.beyond(block, count, device=device, fused_attention=fused[0], fused_gelu=fused[1])
    return row.published(block, count), terms


def measured(ranks: hpnb.Ranks, size: GPT2Size, batch: int, row: ActivationRow, *fused: bool) -> int:
    return ranks.run(layer_memory.kept_bytes, size, batch, row, *fused)[0]


@pytest.fixture(scope="module")
def two() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(2, device="cpu") as ranks:
        yield ranks


@pytest.mark.parametrize("row", ACTIVATION_ROWS, ids=lambda row: row.name)
def test_a_layer_keeps_what_is_predicted(two: hpnb.Ranks, row: ActivationRow) -> None:
    kept = measured(two, SIZE, 2, row)
    formula, terms = predicted(row, SIZE.block(2), 2, "cpu", (False, True))
    assert kept / (formula + sum(terms.values())) == pytest.approx(1.0, abs=0.01)  # every byte has a name
    for name, nbytes in terms.items():  # and each name is needed, or small
        without = kept / (formula + sum(terms.values()) - nbytes)
        assert abs(without - 1) > 0.01 or nbytes < 0.01 * kept, name
    parts = layer_memory.predicted_parts(row, SIZE.block(2), 2, "cpu")
    assert sum(parts.values()) == pytest.approx(formula + sum(terms.values()))


def test_on_a_cpu_one_rank_counts_what_nobody_shards(two: hpnb.Ranks) -> None:
    everywhere = [two.run(layer_memory.kept_bytes, SIZE, 1, row) for row in ACTIVATION_ROWS[:2]]
    assert [kept[1] > 0 for kept in everywhere] == [False, True]
    assert everywhere[0][0] > everywhere[1][0]


def test_the_order_of_the_rows(two: hpnb.Ranks) -> None:
    """Each measure saves more than the one before, and full recomputation most."""
    whole, tp, both, tp_again, both_again, full = (measured(two, SIZE, 2, row) for row in ACTIVATION_ROWS)
    assert whole > tp > both
    assert tp > tp_again > both_again > full
    assert full == 2 * 2 * 96 * 160


@pytest.mark.parametrize("fused", [(True, True), (False, False)])
@pytest.mark.parametrize("row", [ACTIVATION_ROWS[0], ACTIVATION_ROWS[2]], ids=lambda row: row.name)
def test_other_kernels(two: hpnb.Ranks, row: ActivationRow, fused: tuple[bool, bool]) -> None:
    kept = measured(two, SIZE, 2, row, *fused)
    formula, terms = predicted(row, SIZE.block(2), 2, "cpu", fused)
    assert kept / (formula + sum(terms.values())) == pytest.approx(1.0, abs=0.01)
    assert (sum(terms.values()) < 0) == fused[0]


@pytest.mark.one_gpu
def test_on_gpus() -> None:
    """Masks of a byte, statistics of four; the allocator rounds blocks up to 512 bytes."""
    size = GPT2Size(hidden=768, layers=3, heads=12, mlp=3072, vocab_size=64, length=256)
    for count in (1, 2):
        with hpnb.Ranks(count) as ranks:
            for row in ACTIVATION_ROWS:
                if row.parallel == (count > 1):
                    for fused in (False, True):
                        kept = measured(ranks, size, 4, row, fused)
                        formula, terms = predicted(row, size.block(4), count, "cuda", (fused, True))
                        assert kept / (formula + sum(terms.values())) == pytest.approx(1.0, abs=0.05), row
