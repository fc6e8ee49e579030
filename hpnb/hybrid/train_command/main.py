"""`python -m hpnb train`: starts ranks for a run file, or uses those of torchrun, and returns an exit code.

0      trained, and saved
1      a rank failed
2      the file, or what was asked for, cannot be run; nothing was started
130    Ctrl-C: a checkpoint was saved, unless it came twice
143    SIGTERM, as Slurm and Kubernetes send it: a checkpoint was saved

Under torchrun a rank that was stopped by a signal returns 0, because torchrun would start the run again
otherwise. Its other codes are the same, and torchrun itself exits with 1 if a rank has failed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from hpnb.hybrid.torchrun.launch_from_torch import RANK_VARIABLES
from hpnb.hybrid.train_command.run_file import RunFile, load
from hpnb.hybrid.training.resuming import saved
from hpnb.hybrid.training.stop_hook import started_file
from hpnb.ranks import RankError, RankInterrupt, launch

_LONGEST = 20 * 86400.0  # seconds that a run may take
FAILED, REFUSED, INTERRUPTED, TERMINATED = 1, 2, 130, 143


def run(path: str, ranks: int | None = None, overrides: Sequence[str] = ()) -> int:
    """Train what the file at `path` says, with overrides such as "layout.tp_size=2", on so many ranks, by
    default one a GPU, or 1; under torchrun there are some already. Returns the exit code."""
    under_torchrun = os.environ.keys() >= set(RANK_VARIABLES)
    try:
        file = load(path, overrides)
        file.check_folder(inside=not under_torchrun)
        if under_torchrun:
            if ranks is not None:
                raise ValueError("--ranks starts ranks, and torchrun has started them; leave --ranks out")
        else:
            gpus = torch.cuda.device_count()
            ranks = max(1, gpus) if ranks is None else ranks
            if ranks < 1:
                raise ValueError(f"--ranks {ranks} trains nothing; use 1 or more")
            file.check_ranks(ranks)
            if not saved(file.folder):
                file.check_length(ranks)
    except (ValueError, OSError) as error:
        if under_torchrun:
            _tell_torchrun(error)
            if os.environ["LOCAL_RANK"] != "0":  # all ranks have read the same file
                return REFUSED
        return _print_error(error, REFUSED)
    if under_torchrun:
        return _run_under_torchrun(file)
    assert ranks is not None
    return _run_on_new_ranks(file, ranks, "auto")


def _run_under_torchrun(file: RunFile) -> int:
    from hpnb.hybrid.train_command.train import train

    try:
        train(file)
    except (ValueError, OSError) as error:
        _tell_torchrun(error)
        return _print_error(error, FAILED)
    # Also if it was stopped: another code would make torchrun on other machines start the run again.
    return 0


def _run_on_new_ranks(file: RunFile, ranks: int, device: str) -> int:
    from hpnb.hybrid.train_command.train import train

    with tempfile.TemporaryDirectory() as folder, _stop_on_signal(Path(folder, "stop")) as stop:
        try:
            results = launch(train, file, stop.flag, ranks=ranks, device=device, timeout=_LONGEST)
        except RankInterrupt:
            print("hpnb train: interrupted; what was saved before is there", file=sys.stderr)
            return INTERRUPTED
        except RankError as error:
            if error.error in ("ValueError", "OSError", "FileNotFoundError"):  # a sentence for the user
                sentence = error.summary.partition(f" raised {error.error}: ")[2]
                return _print_error(sentence or error.summary, FAILED)
            return _print_error(error, FAILED)
    return stop.exit_code if results[0].stopped else 0


@dataclass
class _Stop:
    """A file at which the ranks look, and the exit code of a run that was stopped."""

    flag: Path
    exit_code: int = TERMINATED  # stays if ranks got a SIGTERM and this process no signal


@contextmanager
def _stop_on_signal(flag: Path) -> Iterator[_Stop]:
    """Ranks are in sessions of their own and get no Ctrl-C: the first one here, or a SIGTERM, touches `flag`,
    at which they look; a second Ctrl-C ends them."""
    stop = _Stop(flag)

    def ask(number: int, frame: FrameType | None) -> None:
        if not flag.exists():
            stop.exit_code = INTERRUPTED if number == signal.SIGINT else TERMINATED
        flag.touch()
        when = (
            "this step, the next one or this evaluation" if started_file(flag).exists() else "the first step"
        )
        again = ""
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            again = "; Ctrl-C again ends it at once"
        print(f"\nhpnb train: stops after {when}, with a checkpoint{again}", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell_torchrun(error: object) -> None:
    """Leave the sentence where torchrun looks for it, so that its summary at the end of the log has it."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        info = {"message": f"hpnb train: {error}", "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": info}))


def _print_error(error: object, code: int) -> int:
    print(f"hpnb train: {error}", file=sys.stderr, flush=True)
    return code
