"""The same, inside a real Jupyter kernel: cells, %%ranks, stored outputs, Ctrl-C."""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook


class Kernel:
    """A kernel that takes one cell after another, and gives back what a notebook would store."""

    def __init__(self) -> None:
        self.book = new_notebook()
        self.client = NotebookClient(self.book, timeout=60, allow_errors=True)
        self.client.create_kernel_manager()
        self.client.start_new_kernel()
        self.client.start_new_kernel_client()

    def cell(self, source: str) -> Any:
        cell = new_code_cell(source)
        self.book.cells.append(cell)
        try:
            return self.client.execute_cell(cell, len(self.book.cells) - 1)
        except CellExecutionError:
            return cell

    def text(self, source: str) -> str:
        """All of a cell's text output."""
        parts = []
        for out in self.cell(source).outputs:
            data = out.get("data", {}).get("text/plain", "")
            parts.append(out.get("text") or data or "\n".join(out.get("traceback", [])))
        return "".join(parts)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.cell("import hpnb, os, time, torch, torch.distributed as dist\n%load_ext hpnb")
    yield kernel
    kernel.client._cleanup_kernel()


def test_a_function_defined_in_a_cell_runs(kernel: Kernel) -> None:
    kernel.cell("factor = 10\nclass Thing:\n    def __init__(self, n): self.n = n * factor")
    kernel.cell("def make(): return Thing(hpnb.rank())")
    kernel.cell("things = hpnb.launch(make, ranks=2)")
    assert kernel.text("[type(t) is Thing and t.n for t in things]") == "[0, 10]"


def test_an_error_shows_the_cell_and_not_the_library(kernel: Kernel) -> None:
    shown = kernel.text(
        "def fail():\n    if hpnb.rank() == 1:\n        return 1 / 0  # the line\n    dist.barrier()\n"
        "hpnb.launch(fail, ranks=2)"
    )
    assert "RankError: rank 1 of 2 raised ZeroDivisionError" in shown
    assert "return 1 / 0  # the line" in shown
    assert "Cell In[" in shown
    assert "line 3" in shown
    assert "    dist.barrier()" in shown
    assert "ranks/pool.py" not in shown
    assert kernel.text("1 + 1") == "2"


def test_ranks_magic_keeps_state_and_picks_members(kernel: Kernel) -> None:
    assert "started 2 ranks on" in kernel.text("%%ranks 2\nmine = hpnb.rank() * factor")
    both = kernel.text("%%ranks 2\nmine + 1")
    assert sorted(both.splitlines()) == ["[rank 0] 1", "[rank 1] 11"]
    assert kernel.text("%%ranks 1,\nmine").splitlines() == ["[rank 1] 10"]
    shown = kernel.text("%%ranks --out gathered\nprint('printed')\nmine")
    assert sorted(shown.splitlines()) == ["[rank 0] printed", "[rank 1] printed"]
    assert kernel.text("gathered") == "[0, 10]"
    kernel.cell("factor = 5")
    assert "[rank 1] 15" in kernel.text("%%ranks\nmine + factor")


def test_a_failure_on_all_ranks_keeps_them_and_a_hang_ends_them(kernel: Kernel) -> None:
    kernel.cell("%%ranks 2\nkept = 1")
    shown = kernel.text("%%ranks\nx = 1\nkept / 0")
    assert "raised ZeroDivisionError" in shown
    assert "line 3" in shown
    assert "kept / 0" in shown
    assert "[rank 0] 1" in kernel.text("%%ranks\nkept")
    begin = time.monotonic()
    hang = "if hpnb.rank() == 0:\n    dist.barrier()\nelse:\n    time.sleep(60)"
    shown = kernel.text("%%ranks 2 --timeout 1\n" + hang)
    assert time.monotonic() - begin < 15
    assert "rank 1 was still at work" in shown
    assert "time.sleep(60)" in shown
    assert "started 2 ranks" in kernel.text("%%ranks 2\npass")


def test_a_cell_need_not_pickle_its_last_value_nor_get_what_it_binds_itself(kernel: Kernel) -> None:
    kernel.cell("import threading\ni = threading.Lock()")
    assert "<unlocked" in kernel.text("%%ranks 2\nimport threading\nthreading.Lock()")
    assert "[rank 0] 1" in kernel.text("%%ranks 2\nfor i in range(2): pass\ni")
    shown = kernel.text("%%ranks 2\nraise ValueError('x')")
    assert f"Cell In[{len(kernel.book.cells)}], line 2" in shown
    assert "timeout=-5" in kernel.text("%%ranks 2 --timeout -5\npass")


def test_what_the_magic_does_not_know_it_says(kernel: Kernel) -> None:
    assert "rank 0 alone is written '0,'" in kernel.text("%%ranks 0\npass")
    assert "give a count" in kernel.text("%%ranks two\npass")
    assert "rank 5 does not exist; the ranks are 0 to 1" in kernel.text("%%ranks 5,\npass")
    assert "ranks 2, 3 do not exist" in kernel.text("%%ranks 1,2,3\npass")
    assert "rank 1 is named twice" in kernel.text("%%ranks 1,1\npass")
    assert sorted(kernel.text("%%ranks 0, 1\nhpnb.rank()").splitlines()) == ["[rank 0] 0", "[rank 1] 1"]
    assert kernel.text("%%ranks 1, --timeout 30\nhpnb.rank()").splitlines() == ["[rank 1] 1"]
    assert "SyntaxError" in kernel.text("%%ranks 2\nx = = 1")
    assert "'abc' is no number of seconds" in kernel.text("%%ranks 2 --timeout abc\npass")
    assert "--out a.b: give the name of a variable" in kernel.text("%%ranks 2 --out a.b\n1")


def test_a_rank_that_would_not_be_there_starts_nothing(kernel: Kernel) -> None:
    """Also where the ranks before have ended: their number is the one that a cell without one gets."""
    kernel.cell("%%ranks 2\nkept = 1")
    kernel.cell("%%ranks 2 --timeout 1\nimport time\ntime.sleep(60)")
    shown = kernel.text("%%ranks 1,2\npass")
    assert "rank 2 does not exist; the ranks are 0 to 1; %%ranks 3 starts 3 of them" in shown
    assert "started" not in shown
    assert "their variables are gone: kept" in kernel.text("%%ranks 0,1\npass")  # not said before


@pytest.mark.parametrize("limit", ["--start-timeout 0", "--hang-timeout 0", "--timeout -1"])
def test_a_limit_that_is_refused_ends_no_ranks(limit: str, kernel: Kernel) -> None:
    kernel.cell("%%ranks 2\nkept = 1")
    assert "give seconds, a number above 0" in kernel.text(f"%%ranks 3 {limit}\npass")
    assert "[rank 1] 1" in kernel.text("%%ranks 2\nkept")


def test_what_no_cell_can_send_or_parse_is_said_in_terms_of_cells(kernel: Kernel) -> None:
    kernel.cell("import threading\nlock = threading.Lock()\n%load_ext hpnb")
    shown = kernel.text("%%ranks 1\nx = = 1")
    assert "SyntaxError" in shown
    assert "started" not in shown
    assert "started 1 rank on cpu" in kernel.text("%%ranks 1 --device cpu\npass")
    shown = kernel.text("%%ranks 1\nlock")
    assert "the global lock (a lock) cannot be pickled" in shown
    assert "make it in the cell that uses it" in shown
    assert "Rank 0" not in shown  # whose line would be one of IPython's
    kernel.cell("%%ranks 2\npass")


def test_the_help_says_what_a_cell_may_say(kernel: Kernel) -> None:
    payload = kernel.text("print(get_ipython().find_cell_magic('ranks').__doc__)")
    for option in ("--device", "--timeout", "--hang-timeout", "--out", "input()", "await", "0,2"):
        assert option in payload


def test_commands_and_await_run_on_ranks_and_other_magics_are_refused(kernel: Kernel) -> None:
    kernel.cell("greeting = 'hello'")
    kernel.cell("%%ranks 2\nme = hpnb.rank()")
    shown = kernel.text("%%ranks\n\n!echo $greeting {me * 2}\nlines = !echo x; echo y\nlines")
    assert "[rank 1] hello 2" in shown
    assert "[rank 0] hello 0" in shown
    assert "[rank 1] ['x', 'y']" in shown
    cell = "%%ranks\nimport asyncio\nawait asyncio.sleep(0.01)\ny = await asyncio.sleep(0.01, me + 1)\ny"
    assert sorted(kernel.text(cell).splitlines()) == ["[rank 0] 1", "[rank 1] 2"]
    assert "line 4" in kernel.text("%%ranks\n!true\n\nme / 0")
    assert "cell without %%ranks" in kernel.text("%%ranks\n%timeit me")
    assert "first line" in kernel.text("%%ranks\n%%time\nme")
    assert "Wall time" in kernel.text("%%time\n%%ranks\nme")
    assert "SyntaxError" in kernel.text("%%ranks\n!true\nx = = 1")
    assert "[rank 1] 1" in kernel.text("%%ranks\nme")  # a refusal costs nothing


def test_exit_and_get_ipython_say_that_ranks_have_none(kernel: Kernel) -> None:
    kernel.cell("%%ranks 2\nkept = 1\ndef inside(): return get_ipython()")
    for call in ("exit()", "quit()"):
        assert "exit() on rank 0: it would end one rank" in kernel.text(f"%%ranks 2\n{call}")
    assert "get_ipython() on rank 0: ranks have no IPython" in kernel.text("%%ranks 2\nget_ipython()")
    assert "ranks have no IPython" in kernel.text("%%ranks 2\ninside()")
    assert "[rank 1] 1" in kernel.text("%%ranks\nkept")
    kernel.cell("globals()['exit'] = 5")  # a variable of that name is sent as any other
    assert "[rank 1] 5" in kernel.text("%%ranks\nexit")
    kernel.cell("del globals()['exit']")


def test_variables_stay_or_a_line_says_that_they_are_gone(kernel: Kernel) -> None:
    kernel.cell("%%ranks 2\nweights = [hpnb.rank()]")
    kernel.cell("%reload_ext hpnb")
    assert "[rank 1] [1]" in kernel.text("%%ranks\nweights")
    shown = kernel.text("%%ranks\nif hpnb.rank() == 1:\n    raise KeyError('only here')")
    assert "rank 1 of 2 raised KeyError" in shown
    assert "[rank 1] [1]" in kernel.text("%%ranks\nweights")
    assert "device='tpu'" in kernel.text("%%ranks 3 --device tpu\npass")
    assert "[rank 1] [1]" in kernel.text("%%ranks\nweights")
    shown = kernel.text("%%ranks 1\npass")
    assert "2 ranks" in shown
    assert "weights" in shown
    assert "rank 1 alone of the 2 would have been %%ranks 1, with a comma" in shown
    assert "with a comma" not in kernel.text("%%ranks 2\npass")


def test_a_line_names_what_is_the_notebooks_copy_again(kernel: Kernel) -> None:
    kernel.cell("weight, unused = torch.zeros(1), 1")
    kernel.cell("%%ranks 2\nweight += 1")
    shown = kernel.text("%%ranks 1\nweight")
    again = next(line for line in shown.splitlines() if "notebook's copy again" in line)
    assert again.endswith("what ranks have changed in it: weight")
    assert "[rank 0] tensor([0.])" in shown
    timer = threading.Timer(1.5, lambda: os.kill(kernel_pid(kernel), 2))
    timer.start()
    assert "RankInterrupt: interrupted" in kernel.text("%%ranks\nweight += 1\ntime.sleep(60)")
    assert "what ranks have changed in it: weight" in kernel.text("%%ranks\nweight")


def test_a_function_on_ranks_sees_what_the_notebook_reassigns(kernel: Kernel) -> None:
    kernel.cell("lr = 1.0")
    kernel.cell("%%ranks 2\ndef show(): return lr")
    kernel.cell("lr = 2.0")
    assert sorted(kernel.text("%%ranks\nshow()").splitlines()) == ["[rank 0] 2.0", "[rank 1] 2.0"]


def pictures(cell: Any) -> list[tuple[int, int]]:
    """(width, height) of the PNGs among the outputs of a cell."""
    found = [out.data["image/png"] for out in cell.outputs if "image/png" in out.get("data", {})]
    headers = [base64.b64decode(png)[16:24] for png in found]
    return [(int.from_bytes(header[:4]), int.from_bytes(header[4:])) for header in headers]


def test_figures_of_a_cell_are_pictures_of_its_first_rank(kernel: Kernel) -> None:
    draw = "import matplotlib.pyplot as plt\nfig, ax = plt.subplots(figsize=({}, 2))\nax.plot([1, 2])\n"
    shown = kernel.cell(f"%%ranks 2\n{draw.format(3)}fig")
    texts = "".join(out.get("text", "") for out in shown.outputs)
    assert len(pictures(shown)) == 1
    assert "[rank 0] Figure" not in texts, "a picture and its repr"
    assert "[rank 1] <Figure" in texts or "[rank 1] Figure" in texts
    # plt.show() closes, and what is open at the end is shown; sizes tell which is which.
    both = kernel.cell(f"%%ranks 1,\n{draw.format(6)}plt.show()\n{draw.format(2)}None")
    (wide, _), (narrow, _) = pictures(both)
    assert wide > narrow
    assert pictures(kernel.cell("%%ranks\nplt.get_fignums()")) == []
    assert pictures(kernel.cell("%%ranks\n_ = ax.figure, 1")) == []
    free = "from matplotlib.figure import Figure\nfree = Figure()\nfree.subplots()\nfree"
    assert len(pictures(kernel.cell(f"%%ranks --out figures\n{free}"))) == 1
    assert kernel.text("[type(figure).__name__ for figure in figures]") == "['Figure', 'Figure']"
    shows = "import hpnb\nfor _ in range(2):\n    hpnb.plot.show(free, alt='axes')\n1"
    assert len(pictures(kernel.cell(f"%%ranks\n{shows}"))) == 2


def test_a_stored_bar_keeps_its_last_state_only(kernel: Kernel) -> None:
    cell = kernel.cell(
        "def bar():\n    from tqdm import tqdm\n    for i in tqdm(range(20), ascii=True):\n"
        "        time.sleep(0.03)\n    print('done')\nhpnb.launch(bar, ranks=2);"
    )
    bars = [out for out in cell.outputs if out.output_type == "display_data"]
    assert len(bars) == 1
    lines = bars[0].data["text/plain"].splitlines()
    assert [line[:8] for line in lines] == ["[rank 0]", "[rank 1]"]
    assert all("20/20" in line for line in lines)
    stream = "".join(out.text for out in cell.outputs if out.output_type == "stream")
    assert sorted(stream.splitlines()) == ["[rank 0] done", "[rank 1] done"]
    assert all(out.get("name") != "stderr" for out in cell.outputs)


def test_an_interrupt_stops_the_ranks_and_the_kernel_stays(kernel: Kernel) -> None:
    manager = kernel.client.km
    assert manager is not None
    pids = kernel.text("hpnb.launch(os.getpid, ranks=2)")
    assert pids
    kernel.cell("kept_here = 41")
    timer = threading.Timer(1.5, lambda: os.kill(kernel_pid(kernel), 2))
    timer.start()
    begin = time.monotonic()
    shown = kernel.text("hpnb.launch(time.sleep, 600, ranks=2)")
    assert time.monotonic() - begin < 15
    assert "RankInterrupt: interrupted" in shown
    assert kernel.text("kept_here + 1") == "42"
    assert kernel.text("hpnb.launch(hpnb.rank, ranks=2)") == "[0, 1]"


def test_an_interrupt_of_a_fit_that_saves_leaves_the_ranks_their_variables(kernel: Kernel) -> None:
    kernel.cell("%%ranks 2\nfrom hpnb.ranks import stop_request\nkept = 7")
    threading.Timer(1.5, lambda: os.kill(kernel_pid(kernel), 2)).start()
    shown = kernel.text(
        "%%ranks\nstop_request.announce(saves=True)  # as a StopHook does\n"
        "while not stop_request.is_asked(): time.sleep(0.01)\n"
        "stop_request.take(); stop_request.withdraw()\nraise stop_request.Stopped('stopped after step 3')"
    )
    assert "with a checkpoint; a second Ctrl-C or interrupt ends it at once" in shown
    assert "RankInterrupt: interrupted; stopped after step 3" in shown
    assert sorted(kernel.text("%%ranks\nkept").splitlines()) == ["[rank 0] 7", "[rank 1] 7"]


def kernel_pid(kernel: Kernel) -> int:
    assert kernel.client.km is not None
    return int(kernel.client.km.provisioner.pid)


def test_killing_the_kernel_leaves_no_process(kernel: Kernel) -> None:
    """The last test of this kernel."""
    from test_ranks import children_of, wait_until

    kernel.cell("pool = hpnb.Ranks(2, device='cpu')")
    pid = kernel_pid(kernel)
    children = children_of(pid)
    assert len(children) >= 3
    os.kill(pid, 9)
    assert wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
