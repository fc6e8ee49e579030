"""Files that are replaced in one step, and locks between processes."""

from __future__ import annotations

import os
import select
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpnb import files


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    files.write_text(path, "old")

    def fail(draft: Path) -> None:
        draft.write_text("ne")
        assert path.read_text() == "old"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.replace_file(path, fail)
    assert path.read_text() == "old"
    files.write_text(path, "new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["run.json"], "drafts are left behind"
    (plain := tmp_path / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode), "others may read it too"


HOLD = """
import sys
from pathlib import Path
from typing import Any
from hpnb import files
with files.locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    first, second = (
        subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdin=-1, stdout=-1) for _ in range(2)
    )
    try:
        outputs = [process.stdout for process in (first, second) if process.stdout is not None]
        ready = _readable(outputs)
        assert len(ready) == 1
        time.sleep(0.3)
        assert _readable(outputs) == ready, "both processes have the lock"
        holder = first if outputs[0] in ready else second
        holder.communicate()  # closes its input, so it ends
        assert len(_readable([o for o in outputs if o not in ready])) == 1
    finally:
        for process in (first, second):
            process.kill()
            process.wait()


def _readable(outputs: list[Any]) -> list[Any]:
    return list(select.select(outputs, [], [], 60)[0])


def test_a_home_that_cannot_be_written_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HPNB_HOME", str(tmp_path / "home"))
    assert files.writable_home() == tmp_path / "home"
    assert (tmp_path / "home").is_dir()
    monkeypatch.setenv("HPNB_HOME", "/proc/no/such/place")
    assert files.writable_home() is None
