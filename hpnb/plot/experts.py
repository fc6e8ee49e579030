"""How unequally busy the experts of a mixture are, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from hpnb.plot.curves import CurvePanel, Series, curves, looks


def expert_loads(imbalances: Mapping[str, Sequence[float]], title: str | None = None) -> Figure:
    """The busiest expert's tokens over the mean, of each step; at 1 no rank waits.

    Args:
        imbalances: {run: a number a step}, such as `hpnb.expert_parallel.ExpertLoads.imbalances`.

    Raises:
        ValueError: no steps, or an imbalance below 1.
    """
    low = min((value for run in imbalances.values() for value in run), default=0.0)
    if low < 1:
        raise ValueError(f"an imbalance of {low} cannot be: the busiest expert has 1 mean load or more")
    look = looks(imbalances)
    series = [
        Series(run, range(1, len(values) + 1), values, look[run], label=f"imbalance {run}")
        for run, values in imbalances.items()
    ]
    fig = curves(
        [CurvePanel(series, "busiest expert / mean", xlabel="step")],
        title="the busiest expert sets the pace of its layer" if title is None else title,
    )
    fig.axes[0].set_ylim(bottom=0.9)
    return fig
