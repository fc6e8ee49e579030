"""The backend of matplotlib in `%%ranks` cells: plt.show() draws what is open for the notebook."""

from __future__ import annotations

from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas

from hpnb.ranks.cell_figures import keep_open_figures as show

__all__ = ["FigureCanvas", "show"]
