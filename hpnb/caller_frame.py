"""Where a warning points: at the line of the caller's program that led to it, and not at one of hpnb's."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

_LIBRARIES = tuple(f"{Path(module).parent}/" for module in (__file__, torch.__file__))


def warn_caller(message: str) -> None:
    """Warn at the innermost line outside of hpnb and PyTorch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
