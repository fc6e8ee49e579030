"""What every test gets: no network, no display, no trace in the user's home; and who is skipped."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

# Before anything imports transformers or matplotlib, which read these once.
_home = tempfile.mkdtemp(prefix="hpnb-tests-")
os.environ["HPNB_HOME"] = _home
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run full sweeps")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        _skip(items, "slow", "a full sweep; run it with --slow")
    if any("gpu" in item.keywords for item in items):
        import torch

        gpus = torch.cuda.device_count()  # asks the driver; CUDA stays uninitialised, so ranks can be forked
        if gpus < 2:
            _skip(items, "gpu", f"needs at least 2 CUDA GPUs; here: {gpus}")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if marker in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_unconfigure() -> None:
    shutil.rmtree(_home, ignore_errors=True)
