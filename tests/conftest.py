"""What every test gets: no network, no display, no trace in the user's home; and who is skipped."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator

import pytest

# The seed that draws the cases of sweeps: fixed, so that a commit that passes today passes tomorrow.
SEED = 0

# Before anything imports transformers or matplotlib, which read these once.
_home = tempfile.mkdtemp(prefix="hpnb-tests-")
os.environ["HPNB_HOME"] = _home
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"

# Before anything imports nbformat, whose jsonschema makes 39 grammars for formats that no notebook has.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

# Containers often forbid files of bytecode. A hundred processes import hpnb here, and without such files each
# of them compiles it, for half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Ranks and other tests want the cores, and two threads that share theirs wait for each other."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_interrupts() -> None:
    """The shell lets what it starts in the background ignore Ctrl-C, and tests wait for what it does."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def servers_import_what_ranks_would() -> None:
    """The first step of an optimizer imports torch._dynamo, for two seconds of a rank, and functions of
    tests import pytest. A server that is idle imports the former, but servers of tests are never idle."""
    if "torch" in sys.modules:
        from hpnb.ranks import forkserver

        forkserver.start_ahead("torch._dynamo", "pytest", "_pytest.assertion.rewrite")


@pytest.fixture(scope="module")
def launches_on_a_pool() -> Iterator[None]:
    """hpnb.launch, and `with hpnb.Ranks`, take ranks that stay until the file's last test, where a file asks
    for it: one whose functions leave nothing behind on a rank."""
    from rank_pools import RankPools

    import hpnb

    pools = RankPools()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hpnb, "launch", pools.launch)
        patch.setattr(hpnb, "Ranks", pools.open)
        yield
    pools.close()


@pytest.fixture(scope="session", autouse=True)
def checks_on_a_pool() -> Iterator[None]:
    """hpnb.models.check launches six times, and tells the ranks all of the model that it checks."""
    if "torch" not in sys.modules:
        yield
        return
    from rank_pools import RankPools

    from hpnb.hybrid import check_model

    pools = RankPools()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_model, "launch", pools.launch)
        yield
    pools.close()


@pytest.fixture(scope="module", autouse=True)
def transformers_as_it_is() -> Iterator[None]:
    """What the tests of a file replace in transformers is not replaced for those of the next file."""
    yield
    if plan_models := sys.modules.get("plan_models"):
        plan_models.restore_replaced()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run full sweeps")
    parser.addoption("--draw", type=int, default=SEED, help="which cases of sweeps are run without --slow")


def pytest_report_header(config: pytest.Config) -> str:
    return f"sweeps: {'all' if config.getoption('--slow') else '--draw ' + str(config.getoption('--draw'))}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        _skip(items, "slow", "a full sweep; run it with --slow")
        named = any("::" in argument for argument in config.args)  # whoever names a test wants it
        if not named and (left_out := _not_drawn(items, config.getoption("--draw"))):
            items[:] = [item for item in items if item not in left_out]
            config.hook.pytest_deselected(items=list(left_out))
    if any("gpu" in item.keywords or "one_gpu" in item.keywords for item in items):
        import torch

        gpus = torch.cuda.device_count()  # asks the driver; CUDA stays uninitialised, so ranks can be forked
        if not gpus:
            _skip(items, "one_gpu", "needs a CUDA GPU")
        if gpus < 2:
            _skip(items, "gpu", f"needs at least 2 CUDA GPUs; here: {gpus}")


def pytest_collection_finish() -> None:
    """A garbage collection would walk all that was imported, for half a second each."""
    gc.freeze()


def _not_drawn(items: list[pytest.Item], seed: int) -> set[pytest.Item]:
    """Of each test marked `sampled(n)`, all cases but n that the seed draws; the same in every worker.

    Cases that are marked slow would be skipped, so they are not drawn from.
    Tests of a file that are marked `sampled(n, of="name")` alike are cases of one sweep.
    With `sampled(n, cover=True)` every value of every parameter is drawn, so there may be more than n cases.
    """
    sweeps: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "slow" not in item.keywords and (marker := item.get_closest_marker("sampled")):
            file, _, test = item.nodeid.partition("::")
            sweeps[f"{file}::{marker.kwargs.get('of') or test.partition('[')[0]}"].append(item)
    left_out: set[pytest.Item] = set()
    for name, cases in sweeps.items():
        marker = cases[0].get_closest_marker("sampled")
        assert marker is not None
        (count,), draw = marker.args, random.Random(f"{name} {seed}")
        if marker.kwargs.get("cover"):
            drawn = _covering(draw.sample(cases, len(cases)), count)
        else:
            drawn = draw.sample(cases, min(count, len(cases)))
        left_out |= set(cases) - set(drawn)
    return left_out


def _covering(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """The first `count` cases, and instead of some of them, or beside them, the cases that it takes for every
    value of every parameter to stand in one."""
    values = {
        case: {(name, repr(value)) for name, value in case.callspec.params.items()}  # type: ignore[attr-defined]
        for case in cases
    }
    missing, drawn = set[tuple[str, str]]().union(*values.values()), list[pytest.Item]()
    while missing:
        drawn.append(max(cases, key=lambda case: len(values[case] & missing)))
        missing -= values[drawn[-1]]
    others = [case for case in cases if case not in drawn]
    return drawn + others[: max(0, count - len(drawn))]


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if marker in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries call what they have made at import a leak, at the end of the process
    shutil.rmtree(_home, ignore_errors=True)
