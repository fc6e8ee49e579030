"""A server of ranks started ahead, in a notebook's kernel: only there, unnoticed by ranks, never left."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hpnb
from hpnb.ranks import forkserver

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc"),
    pytest.mark.sampled(2, of="servers that start ahead"),  # each starts interpreters that import everything
]

AS_A_KERNEL = """
import os, sys, time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.kernel = object()
from hpnb.ranks import forkserver
"""


def run_script(body: str, folder: Path) -> subprocess.Popen[str]:
    file = folder / "script.py"
    file.write_text(textwrap.dedent(body))
    searched = [str(Path(hpnb.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, searched))}
    return subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True, env=env)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], forkserver.ForkServer]]:
    """Starts a server ahead, as if this were a kernel that has not wanted ranks yet.

    To be called by a test: pytest changes a variable between a fixture and its test.
    """
    (tmp_path / "sets_a_variable.py").write_text("import os\nos.environ['HPNB_BY_IMPORT'] = 'yes'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HPNB_BEFORE", "there")
    monkeypatch.setattr(forkserver, "_server", None)
    monkeypatch.setattr(forkserver, "in_notebook", lambda: True)
    monkeypatch.setattr(forkserver, "_loaded", list)  # what the tests have imported takes it seconds
    started = []

    def begin() -> forkserver.ForkServer:
        forkserver.start_ahead("sets_a_variable", "huggingface_hub.constants")
        assert forkserver._server is not None
        started.append(forkserver._server)
        return forkserver._server

    yield begin
    for server in {*started, forkserver._server}:
        if server is not None:
            server.close()


def test_only_a_kernel_starts_a_server_before_ranks_are_wanted(tmp_path: Path) -> None:
    script = run_script(
        """
        import multiprocessing, os
        from pathlib import Path
        import hpnb.lesson
        from hpnb.ranks.forkserver import start_ahead

        def children():
            return len(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())

        def as_child(queue):
            start_ahead()
            queue.put(children())

        print("script", children())
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        hpnb.load_ipython_extension(shell)
        print("terminal", children())
        shell.kernel = object()
        fork = multiprocessing.get_context("fork")
        queue = fork.SimpleQueue()
        child = fork.Process(target=as_child, args=(queue,))
        child.start()
        print("child of a kernel", queue.get())
        child.join()
        hpnb.load_ipython_extension(shell)
        print("kernel", children())
        hpnb.load_ipython_extension(shell)
        print("kernel again", children())

        def in_a_rank():
            import hpnb.lesson
            start_ahead()
            return children()

        print("ranks", hpnb.launch(in_a_rank, ranks=2, device="cpu"))
        """,
        tmp_path,
    )
    out, _ = script.communicate(timeout=120)
    assert out.splitlines() == [
        "script 0",
        "terminal 0",
        "child of a kernel 0",
        "kernel 1",
        "kernel again 1",
        "ranks [0, 0]",
    ]


def test_ranks_come_from_the_server_that_started_ahead(start: Callable[[], forkserver.ForkServer]) -> None:
    ahead = start()
    with hpnb.Ranks(2, device="cpu") as ranks:
        assert ranks.run(os.getppid) == [ahead._process.pid] * 2
        assert ranks.run(lambda: "sets_a_variable" in sys.modules) == [True, True]


def test_a_server_that_stands_ready_imports_what_is_wanted_later(
    start: Callable[[], forkserver.ForkServer], tmp_path: Path
) -> None:
    """`import hpnb` starts it, and transformers is imported cells later: by both at the same time."""
    (tmp_path / "wanted_later.py").write_text("")
    ahead = start()
    forkserver.start_ahead("wanted_later")
    with hpnb.Ranks(1, device="cpu") as ranks:
        assert ranks.run(os.getppid) == [ahead._process.pid]
        assert ranks.run(lambda: "wanted_later" in sys.modules) == [True]


def test_a_server_imports_what_ranks_want_and_their_caller_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Outside a notebook, too: else every rank would import transformers for itself."""
    (tmp_path / "wanted_by_ranks.py").write_text("import os\nPID = os.getpid()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(forkserver, "_server", None)
    monkeypatch.setattr(forkserver, "_wanted", set())
    monkeypatch.setattr(forkserver, "_loaded", list)
    forkserver.start_ahead("wanted_by_ranks")
    assert forkserver._server is None  # no notebook
    with hpnb.Ranks(2, device="cpu") as ranks:
        server = forkserver._server
        assert server is not None
        assert ranks.run(lambda: sys.modules["wanted_by_ranks"].PID) == [server._process.pid] * 2
    server.close()


def test_a_change_of_surroundings_makes_it_out_of_date(
    start: Callable[[], forkserver.ForkServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ahead = start()
    assert ahead.is_as_new()
    with monkeypatch.context() as patch:
        patch.setenv("HPNB_BEFORE", "another")
        assert not ahead.is_as_new()
    with monkeypatch.context() as patch:
        patch.delenv("HPNB_BEFORE")
        assert not ahead.is_as_new()
    with monkeypatch.context() as patch:
        patch.setenv("HPNB_AFTER", "new")
        assert not ahead.is_as_new()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        assert not ahead.is_as_new()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path / "more"), *sys.path])
        assert not ahead.is_as_new()
    assert ahead.is_as_new()
    monkeypatch.setenv("HPNB_BY_IMPORT", "yes")  # as importing the same module here would have it
    assert ahead.is_as_new()
    monkeypatch.setenv("HPNB_BY_IMPORT", "no")
    assert not ahead.is_as_new()


@pytest.mark.sampled(1, of="kernel")
def test_a_variable_set_before_the_first_ranks_reaches_them_and_what_they_import(
    start: Callable[[], forkserver.ForkServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> tuple[str | None, int]:
        from huggingface_hub import constants  # reads the variable once, when it is imported

        return os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT"), constants.HF_HUB_DOWNLOAD_TIMEOUT

    ahead = start()
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "77")
    with hpnb.Ranks(2, device="cpu") as ranks:
        assert ranks.run(look) == [("77", 77)] * 2
        assert not exists(ahead._process.pid)
        # From now on it is the server of all ranks, whatever changes: they are told where the caller stands.
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "78")
        assert ranks.run(look) == [("78", 77)] * 2
        assert hpnb.launch(os.getppid, ranks=1, device="cpu") == ranks.run(os.getppid)[:1]


def test_a_folder_entered_before_the_first_ranks_is_theirs(
    start: Callable[[], forkserver.ForkServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def look() -> tuple[str, int]:
        import nearby  # type: ignore[import-not-found]

        return os.getcwd(), nearby.ANSWER

    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "nearby.py").write_text("ANSWER = 42\n")
    monkeypatch.syspath_prepend("")  # the folder that one stands in, as a kernel has it
    ahead = start()
    monkeypatch.chdir(folder)
    with hpnb.Ranks(2, device="cpu") as ranks:
        assert ranks.run(look) == [(str(folder), 42)] * 2
        assert not exists(ahead._process.pid)


def test_it_leaves_with_a_kernel_that_ends_and_does_not_keep_it_waiting(tmp_path: Path) -> None:
    (tmp_path / "takes_long.py").write_text("import time\ntime.sleep(60)\n")
    body = "forkserver.start_ahead('takes_long')\nprint(forkserver._server._process.pid)\n"
    script = run_script(AS_A_KERNEL + body, tmp_path)
    out, _ = script.communicate(timeout=50)
    assert script.returncode == 0
    assert not exists(int(out))


def test_it_leaves_when_the_kernel_is_killed_while_it_imports(tmp_path: Path) -> None:
    from test_ranks import wait_until

    (tmp_path / "takes_a_while.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(2)\n")
    body = "forkserver.start_ahead('takes_a_while')\nprint(forkserver._server._process.pid, flush=True)\n"
    script = run_script(AS_A_KERNEL + body + "time.sleep(60)", tmp_path)
    assert script.stdout is not None
    pid = int(script.stdout.readline())
    assert exists(pid)
    script.kill()
    script.communicate()
    assert wait_until(lambda: not exists(pid), 30)


@pytest.mark.sampled(1, of="kernel")
def test_in_a_kernel_the_server_imports_while_the_notebook_does() -> None:
    from test_ranks import children_of, wait_until
    from test_ranks_in_kernel import Kernel, kernel_pid

    kernel = Kernel()
    try:
        kernel.cell("import os")
        assert children_of(kernel_pid(kernel)) == []
        kernel.cell("import hpnb, sys\nbefore_torch = 'torch' not in sys.modules")
        assert len(children_of(kernel_pid(kernel))) == 1
        assert kernel.text("before_torch") == "True"
        kernel.cell("from hpnb import Booster, lesson, plot, theory")
        servers = children_of(kernel_pid(kernel))
        assert len(servers) == 1
        parents = kernel.text("hpnb.launch(os.getppid, ranks=2, device='cpu')")
        assert parents == str(servers * 2)  # what imports set in os.environ makes it no other
        drawing = "import sys\nhpnb.launch(lambda: 'hpnb.plot' in sys.modules, ranks=1, device='cpu')"
        assert kernel.text(drawing) == "[False]"
        os.kill(kernel_pid(kernel), 9)
        assert wait_until(lambda: not exists(servers[0]), 30)
    finally:
        kernel.client._cleanup_kernel()
