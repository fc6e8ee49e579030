"""Record README's moving picture: notebook 02 in JupyterLab, from a guess to what was measured, and a slider.

    python tests/record_readme.py            # writes images/notebook_in_jupyterlab.gif, in a few minutes

Cells run for real, on the ranks that this machine has. Nothing is drawn by hand: each frame is a screenshot
of the browser that test_browser.py drives. Needs selenium, Pillow, chromium and chromedriver.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from test_browser import _KERNEL, _ask, _shown, _until, running_browser, running_lab

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "notebooks" / "02_vit_pipeline_parallel.ipynb"
PICTURE = ROOT / "images" / "notebook_in_jupyterlab.gif"
GUESS = 20  # percent; a reader's first thought may be far from it
WIDTH, HEIGHT = 960, 720  # of what the browser shows
COLORS = 96
PATIENCE = 400.0  # seconds for a cell

# Cells are known by what is in them, so that a page may grow others.
_QUESTION = 'lesson.predict("02.bubble"'
_ANSWER = 'lesson.reveal("02.bubble"'
_EXPLORER = "lesson.explorers.pipeline_bubble()"
_FIND = """
const at = text => page.content.widgets.findIndex(
    cell => cell.model.type === 'code' && cell.model.sharedModel.source.includes(text));
"""


@dataclass
class Film:
    """Screenshots, and how many seconds each is shown."""

    browser: Any
    frames: list[Image.Image] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def take(self, seconds: float) -> None:
        shot = Image.open(io.BytesIO(self.browser.get_screenshot_as_png())).convert("RGB")
        self.frames.append(shot)
        self.seconds.append(seconds)

    def write(self, path: Path) -> None:
        """One palette for all frames, without dithering, so that what does not change costs nothing."""
        width, height = self.frames[0].size
        sheet = Image.new("RGB", (width, height * len(self.frames)))
        for nth, frame in enumerate(self.frames):
            sheet.paste(frame, (0, nth * height))
        palette = sheet.quantize(COLORS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        flat = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self.frames]
        milliseconds = [round(1000 * seconds) for seconds in self.seconds]
        flat[0].save(
            path, save_all=True, append_images=flat[1:], duration=milliseconds, loop=0, optimize=True
        )


def cell_at(browser: Any, text: str) -> int:
    """The number of the code cell that holds `text`."""
    found = int(_ask(browser, _FIND + f"return at({json.dumps(text)})"))
    assert found >= 0, f"{PAGE.name} has no cell with {text}"
    return found


def run(browser: Any, cell: int) -> None:
    """Run one cell and return at once."""
    _ask(
        browser,
        f"page.content.activeCellIndex = {cell}; app.commands.execute('notebook:run-cell'); return true",
    )


def wait(browser: Any, cell: int) -> None:
    """Until a cell has run and the kernel is idle; its outputs are drawn a moment later."""
    ran = (
        f"const model = page.content.widgets[{cell}].model;"
        f"return model.executionCount !== null && (() => {{ {_KERNEL} }})() === 'idle'"
    )
    _until(lambda: _ask(browser, ran) is True, PATIENCE, f"cell {cell} has not run")
    time.sleep(1.5)


def show(browser: Any, script: str, below: int = 12) -> None:
    """Scroll the element that `script` returns to the top of the page, `below` pixels under it."""
    _ask(
        browser,
        "const box = page.content.node.querySelector('.jp-WindowedPanel-outer') ?? page.content.node;"
        f"const element = (() => {{ {script} }})();"
        "box.scrollTop += element.getBoundingClientRect().top - box.getBoundingClientRect().top "
        f"- {below}; return true",
    )
    time.sleep(0.4)


def record(browser: Any, address: str) -> Film:
    browser.get(f"{address}/lab/tree/{PAGE.name}?reset")
    _until(lambda: _ask(browser, _KERNEL) == "idle", 120, "no kernel became idle")
    browser.find_element("css selector", ".jp-Notebook .jp-Cell").click()
    _ask(browser, "await app.commands.execute('notebook:clear-all-cell-outputs'); return true")
    _ask(
        browser,
        "app.shell.mode = 'single-document'; app.shell.collapseLeft(); app.shell.collapseRight();"
        "const toggle = 'application:toggle-side-tabbar';"
        "for (const side of ['left', 'right']) await app.commands.execute(toggle, {side});"
        "await app.commands.execute('statusbar:toggle'); return true",
    )
    question, answer, explorer = (cell_at(browser, text) for text in (_QUESTION, _ANSWER, _EXPLORER))
    for cell in range(question):  # what comes before is needed, and not shown
        run(browser, cell)
    wait(browser, max(n for n in range(question) if _is_code(browser, n)))

    _ask(  # badges need a network; without one they would be broken pictures
        browser,
        "for (const image of page.content.node.querySelectorAll('img'))"
        "  if (image.complete && !image.naturalWidth) image.remove();"
        "return true",
    )
    film = Film(browser)
    show(browser, "return page.content.widgets[0].node")
    film.take(1.8)
    code = "page.content.widgets.find(cell => cell.model.type === 'code')"
    show(browser, f"return {code}.node.querySelector('table')", 24)
    film.take(1.4)
    show(browser, f"return page.content.widgets[{question}].node")
    film.take(1.6)
    for written in ("", *(str(GUESS)[: n + 1] for n in range(len(str(GUESS))))):
        _ask(
            browser,
            f"const s = page.content.widgets[{question}].model.sharedModel;"
            f"s.setSource(s.source.replace(/guess=\\w*/, 'guess={written}')); return true",
        )
        time.sleep(0.2)
        film.take(0.35)
    film.seconds[-1] = 1.0
    run(browser, question)
    wait(browser, question)
    film.take(2.0)

    show(browser, f"return page.content.widgets[{answer}].node")
    film.take(1.2)
    run(browser, answer)
    time.sleep(0.4)
    film.take(1.0)  # [*]: the ranks are at work
    wait(browser, answer)
    outputs = f"page.content.widgets[{answer}].node.querySelectorAll('.jp-OutputArea-output')"
    show(browser, f"return {outputs}[0].querySelector('img')", 40)
    film.take(3.5)
    revealed = f"[...{outputs}].find(output => output.textContent.includes('guess'))"
    show(browser, f"return {revealed}", HEIGHT // 2)
    film.take(3.0)

    run(browser, explorer)
    wait(browser, explorer)
    box = browser.find_elements("css selector", ".widget-vbox:has(.widget-image):has(.widget-html)")[-1]
    browser.execute_script("arguments[0].scrollIntoView({block: 'start'})", box)
    time.sleep(0.5)
    film.take(1.5)
    slider = next(
        line for line in box.find_elements("css selector", ".widget-hslider") if "microbatches" in line.text
    )
    handle = slider.find_element("css selector", ".noUi-handle")
    for nth in range(6):
        before = _shown(box)
        handle.send_keys("\ue014")  # the right arrow
        _until(lambda before=before: _shown(box) != before, 30, "nothing was redrawn")  # type: ignore[misc]
        time.sleep(1.2 if nth < 5 else 6)  # the full picture follows the coarse one, once the slider rests
        film.take(0.6)
    film.seconds[-1] = 2.5
    return film


def _is_code(browser: Any, cell: int) -> bool:
    return bool(_ask(browser, f"return page.content.widgets[{cell}].model.type === 'code'"))


def main(path: Path, frames: Path | None) -> None:
    with tempfile.TemporaryDirectory() as base:
        wrap = Path(base) / "settings" / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
        with running_lab(Path(base), [PAGE]) as address:
            settings = {**json.loads(wrap.read_text()), "codeCellConfig": {"lineWrap": True}}
            wrap.write_text(json.dumps(settings))
            with running_browser(Path(base)) as browser:
                size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
                browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                film = record(browser, address)
    path.parent.mkdir(parents=True, exist_ok=True)
    film.write(path)
    if frames is not None:
        frames.mkdir(parents=True, exist_ok=True)
        for nth, frame in enumerate(film.frames):
            frame.save(frames / f"{nth:02}.png")
    print(f"{path}  {len(film.frames)} frames, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main(PICTURE, Path(sys.argv[1]) if len(sys.argv) > 1 else None)
