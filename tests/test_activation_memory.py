"""What a layer of GPT-2 keeps for its backward: published rows, what is beyond them, tensors counted."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hpnb import lesson
from hpnb.lesson import LayerMemory, layer_memory, measure_layers
from hpnb.models import GPT2Size
from hpnb.theory import ACTIVATION_ROWS, ActivationRow, Block, published_activation_bytes

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


@pytest.fixture(scope="module")
def measured() -> dict[str, LayerMemory]:
    found = measure_layers(SIZE, batch=2, ranks=2, device="cpu")
    return {one.row.name: one for one in found}


@pytest.mark.parametrize("row", ACTIVATION_ROWS, ids=lambda row: row.name)
def test_a_layer_keeps_what_is_predicted(measured: dict[str, LayerMemory], row: ActivationRow) -> None:
    found = measured[row.name]
    assert found.ratio == pytest.approx(1.0, abs=0.01)  # every byte has a name; 5 % would do
    for name, nbytes in found.terms.items():  # and each name is needed, or small
        without = found.measured / (found.predicted - nbytes)
        assert abs(without - 1) > 0.01 or nbytes < 0.01 * found.measured, name


def test_the_order_of_the_rows(measured: dict[str, LayerMemory]) -> None:
    """Each measure saves more than the one before, and full recomputation most."""
    whole, tp, both, tp_again, both_again, full = (measured[row.name].measured for row in ACTIVATION_ROWS)
    assert whole > tp > both
    assert tp > tp_again > both_again > full
    assert full == 2 * 2 * 96 * 160


@pytest.mark.parametrize(("fused_attention", "fused_gelu"), [(True, True), (False, False)])
def test_other_kernels(fused_attention: bool, fused_gelu: bool) -> None:
    rows = [ACTIVATION_ROWS[0], ACTIVATION_ROWS[2]]
    found = measure_layers(
        SIZE, 2, 2, rows=rows, fused_attention=fused_attention, fused_gelu=fused_gelu, device="cpu"
    )
    for one in found:
        assert one.ratio == pytest.approx(1.0, abs=0.01)
        assert (one.predicted < one.formula) == fused_attention


def test_the_table(measured: dict[str, LayerMemory], capsys: pytest.CaptureFixture[str]) -> None:
    layer_memory(list(measured.values()))
    said = capsys.readouterr().out
    assert "tensor + sequence parallel + selective recomputation" in said
    assert lesson.number(measured["no parallelism"].measured, "B") in said
    assert "masks of two dropouts, 2 bytes wide" in said


@pytest.mark.one_gpu
def test_on_gpus() -> None:
    """Masks of a byte, statistics of four; the allocator rounds blocks up to 512 bytes."""
    size = GPT2Size(hidden=768, layers=3, heads=12, mlp=3072, vocab_size=64, length=256)
    for fused in (False, True):
        for one in measure_layers(size, 4, 2, fused_attention=fused):
            assert one.ratio == pytest.approx(1.0, abs=0.05), one
