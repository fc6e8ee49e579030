"""JupyterLab in a real browser: a notebook runs from top to bottom, and a slider redraws its figure.

Needs selenium, chromium and chromedriver (Debian: apt-get install chromium chromium-driver); skipped without.
Screenshots go to the folder HPNB_SCREENSHOTS, if that is set.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
# The explorer of each is on the page when all cells have run. The short page has nothing else.
SHORT = "short"
EXPLORED = {
    SHORT: (pytest.mark.slow,),
    "00_ranks_and_collectives": (pytest.mark.slow,),
    "02_vit_pipeline_parallel": (pytest.mark.slow,),
    "08_gpt2_hybrid_parallel": (pytest.mark.slow,),
}
SHOWN = "lesson.explorers.all_reduce_cost()"
_SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # all cells are in the page, seen or not
    "apputils-extension/themes": {"adaptive-theme": False},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
_CHROMIUM, _DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (_CHROMIUM and _DRIVER), reason="needs chromium and chromedriver"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pages = [ROOT / "notebooks" / f"{name}.ipynb" for name in EXPLORED if name != SHORT]
    pages.append(tmp_path_factory.mktemp("page") / f"{SHORT}.ipynb")
    cells = [nbformat.v4.new_code_cell(source) for source in ("from hpnb import lesson", SHOWN)]
    # Without a kernel's name JupyterLab asks for one.
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), pages[-1])
    with running_lab(tmp_path_factory.mktemp("lab"), pages) as address:
        yield address


@contextmanager
def running_lab(base: Path, notebooks: Sequence[Path]) -> Iterator[str]:
    """The address of a JupyterLab whose root holds copies of the notebooks; its files are below `base`."""
    settings = base / "settings" / "@jupyterlab"
    for name, content in _SETTINGS.items():
        file = settings / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    root = base / "notebooks"
    root.mkdir()
    for path in notebooks:
        if path.exists():
            shutil.copy(path, root)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"HPNB_HOME": str(base / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "CI": "true"}
    flags = [
        f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--ServerApp.open_browser=False",
        "--IdentityProvider.token=", f"--ServerApp.root_dir={root}", "--ServerApp.allow_root=True",
        "--LabApp.expose_app_in_browser=True", f"--LabApp.user_settings_dir={base / 'settings'}",
        f"--LabApp.workspaces_dir={base / 'workspaces'}", "--LabApp.news_url=",
    ]  # fmt: skip
    log = (base / "log").open("w")
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *flags],
        env={
            **os.environ,
            **told,
            "JUPYTER_CONFIG_DIR": str(base / "config"),
            "JUPYTER_DATA_DIR": str(base / "data"),
        },
        cwd=root,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _until(lambda: _answers(address) or server.poll() is not None, 120, "JupyterLab did not start")
        assert server.poll() is None, (base / "log").read_text()[-2000:]
        yield address
    finally:
        server.terminate()
        server.wait(60)
        log.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    with running_browser(tmp_path) as driver:
        yield driver


@contextmanager
def running_browser(base: Path) -> Iterator[Any]:
    """Chromium without a window; its profile is below `base`."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = _CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--window-size=1280,1600", f"--user-data-dir={base / 'profile'}"):  # fmt: skip
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(_DRIVER))
    driver.set_script_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.mark.parametrize("page", [pytest.param(name, marks=marks) for name, marks in EXPLORED.items()])
def test_a_reader_runs_it_and_moves_a_slider(lab: str, browser: Any, page: str) -> None:
    browser.get(f"{lab}/lab/tree/{page}.ipynb?reset")
    _until(lambda: _ask(browser, _KERNEL) == "idle", 90, "no kernel became idle")
    browser.find_element(
        "css selector", ".jp-Notebook .jp-Cell"
    ).click()  # commands are for what has the focus
    _ask(browser, "await app.commands.execute('notebook:clear-all-cell-outputs'); return true")
    _ask(browser, "app.commands.execute('notebook:run-all-cells'); return true")
    _until(lambda: _ask(browser, _LEFT) == 0, 400, lambda: f"cells have not run: {_ask(browser, _UNRUN)}")
    assert _ask(browser, _ERRORS) == []

    explorers = browser.find_elements("css selector", ".widget-vbox:has(.widget-image):has(.widget-html)")
    assert explorers, "no explorer on the page"
    explorer = explorers[-1]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", explorer)
    moved = 0
    for handle in explorer.find_elements("css selector", ".noUi-handle"):
        before = _shown(explorer)
        handle.send_keys("\ue014")  # the right arrow
        try:
            _until(lambda before=before: _shown(explorer) != before, 15, "nothing was redrawn")  # type: ignore[misc]
        except AssertionError:
            continue  # this knob stands at its end, or the picture does not depend on it at this setting
        moved += 1
        time.sleep(1)  # the full picture follows the coarse one
        break
    assert moved, "no slider changes figure and readings"
    assert _loaded(browser, explorer), "the figure is broken"
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        _ask(
            browser, f"await app.commands.execute('apputils:change-theme', {{theme: '{theme}'}}); return true"
        )
        time.sleep(1)
        assert _loaded(browser, explorer), f"the figure is broken in {theme}"
        if folder := os.environ.get("HPNB_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            for nth, figure in enumerate(
                [explorer, *browser.find_elements("css selector", ".jp-OutputArea-output img")[:4]]
            ):
                browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", figure)
                time.sleep(0.3)
                browser.save_screenshot(f"{folder}/{page}_{theme.split()[1].lower()}_{nth}.png")


# --- what the page is asked ------------------------------------------------------------------------------

_KERNEL = "return page?.sessionContext.session?.kernel?.status ?? 'none'"
_CELLS = """
const cells = [...page.content.model.cells].filter(c => c.type === 'code');
const meant = c => (c.getMetadata('tags') ?? []).includes('raises-exception');
const outputs = c => [...Array(c.outputs.length).keys()].map(i => c.outputs.get(i).toJSON());
const said = cells.filter(c => !meant(c)).flatMap(outputs);
"""
_LEFT = _CELLS + f"const idle = (() => {{ {_KERNEL} }})() === 'idle';" + (
    "return cells.filter(c => c.executionCount === null).length + (idle ? 0 : 1)"
)  # fmt: skip
_UNRUN = (
    _CELLS + "return cells.filter(c => c.executionCount === null).map(c => c.sharedModel.source.slice(0, 80))"
)
_ERRORS = _CELLS + (
    "return said.filter(o => o.output_type === 'error' || o.name === 'stderr').map(o => o.ename ?? o.text)"
)


def _ask(browser: Any, script: str) -> Any:
    """What an async function of `app`, JupyterLab's own application, and the notebook's `page` returns."""
    wrapped = (
        "const done = arguments[0]; const app = window.jupyterapp; (async () => {"
        "const page = app && [...app.shell.widgets('main')].find(widget => widget.sessionContext);"
        f"{script} }})().then(done, e => done('' + e));"
    )
    return browser.execute_async_script(wrapped)


def _shown(explorer: Any) -> tuple[str, str]:
    """Where its picture is, and its readings."""
    image = explorer.find_element("css selector", ".widget-image")
    return image.get_attribute("src"), explorer.find_element("css selector", ".widget-html-content").text


def _loaded(browser: Any, explorer: Any) -> bool:
    image = explorer.find_element("css selector", ".widget-image")
    return bool(
        browser.execute_script("return arguments[0].complete && arguments[0].naturalWidth > 300", image)
    )


def _answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(f"{address}/api", timeout=2).status == 200
    except OSError:
        return False


def _until(met: Any, seconds: float, otherwise: Any) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, otherwise() if callable(otherwise) else otherwise
        time.sleep(0.25)
