"""Figures that one page draws, a module a notebook; `hpnb.plot` has what several share, and the builders.

from hpnb.lesson.figures import vit_pipeline as figures
plot.show(figures.u_curve(...), alt="...")
"""
