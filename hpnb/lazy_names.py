"""Names of a package that are imported when they are first used, since what they import takes seconds.

    __getattr__ = lazy_names(__name__, {"Pipeline": "pipeline"})    # Pipeline of the module pipeline
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_names(package: str, module_of: Mapping[str, str]) -> Callable[[str], object]:
    """The function `__getattr__` of a package (PEP 562).

    Args:
        module_of: {a public name: the module of the package that defines it, or "hpnb.x.y", one elsewhere}.
    """

    def __getattr__(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of[name]
        module = module if module.startswith("hpnb.") else f"{package}.{module}"
        value = getattr(importlib.import_module(module), name)
        setattr(sys.modules[package], name, value)  # the next look-up is an ordinary one
        return value

    return __getattr__
