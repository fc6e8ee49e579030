"""`python -m hpnb.bench experts`: the exposed all-to-all of a DualPipe-V step, predicted and replayed."""

from __future__ import annotations

import pytest

from hpnb.bench import experts
from hpnb.theory.links import Link


@pytest.mark.timeout(600)
def test_pairs_hide_messages_in_the_prediction_and_in_the_replay(capsys: pytest.CaptureFixture[str]) -> None:
    size = experts.Size(hidden=32, layers=4, tokens=16, samples=12, microbatches=6)
    link = Link(1e-5, 2e8)
    predicted, replayed = experts.compare(link, size)
    for result in (predicted, replayed):
        assert result.apart.exposed == pytest.approx(result.apart.sent)
        assert result.paired.sent == pytest.approx(result.apart.sent)
        assert result.paired.compute == pytest.approx(result.apart.compute)
        assert all(a < b for a, b in zip(result.paired.exposed, result.apart.exposed, strict=True))
        assert all(exposed >= -1e-12 for exposed in result.paired.exposed)
    # Without the exchange of sizes, and with even routing: the same number of large messages.
    assert 0.3 < sum(predicted.apart.sent) / sum(replayed.apart.sent) < 1.2
    printed = capsys.readouterr().out
    assert "replayed from measured CPU time: no message was timed" in printed
    assert "predicted, in pairs" in printed
