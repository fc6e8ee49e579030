"""Hooks that users have registered, in contrast to hpnb's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_users(hook: Callable[..., Any]) -> bool:
    """Whether `hook`, a function, method, partial or object, was written outside of hpnb."""
    function = getattr(hook, "func", hook)  # of a partial
    return not str(getattr(function, "__module__", "")).startswith("hpnb.")
