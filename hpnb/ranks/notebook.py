"""Is this process the kernel of a notebook? Needs no torch: it is asked before that is there."""

from __future__ import annotations

import sys


def in_notebook() -> bool:
    """True in the kernel of a notebook; not in a terminal, IPython's included."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None
