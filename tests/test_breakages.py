"""The list of breakages stays in step with the source; `pytest --slow` runs them all."""

from __future__ import annotations

import ast

import pytest
from breakages import BREAKAGES, Breakage, broken_source, caught_by


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.name)
def test_a_breakage_is_one_wrong_line_that_still_parses(breakage: Breakage) -> None:
    ast.parse(broken_source(breakage))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.name)
def test_a_breakage_is_noticed(breakage: Breakage) -> None:
    assert caught_by(breakage) is not None
