"""What the ranks need to write files together: a group of their own, agreement, and a thread to do it in.

    training    step   [copy]  step      step      step
    files                 `-- write, in a thread, with messages among CPUs -- rename

A save has two parts. What the next step would change is copied at once: on a GPU by a stream beside it, and
the optimizer's next step waits for the copies, not the host. The rest runs along with training, and its
messages have a group of their own (gloo), so they meet none of training's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hpnb.hybrid.checkpoint import atomic
from hpnb.ranks.process_group import new_group

_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def files_group() -> dist.ProcessGroup:
    """The group of all ranks in which files are spoken about; all ranks ask for it at one point."""
    world = dist.group.WORLD
    assert world is not None, "a Booster has made a mesh"
    if world not in _groups:
        _groups[world] = new_group(None, "files", backend="gloo")
    return _groups[world]


def gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """What every rank has, in order of rank."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group)
    return found


def agree(error: BaseException | None, group: dist.ProcessGroup) -> None:
    """Go on where no rank has an error; else all of them raise, each its own or what the first one says."""
    told = gathered(None if error is None else (type(error).__name__, str(error)), group)
    if error is not None:
        raise error
    for rank, one in enumerate(told):
        if one is not None:
            name, text = one
            raise (ValueError if name == "ValueError" else RuntimeError)(f"rank {rank}: {text}")


def attempt(work: Callable[[], Any], group: dist.ProcessGroup) -> Any:
    """What `work` returns here, if it succeeds on all ranks. It sends nothing itself."""
    found, error = None, None
    try:
        found = work()
    except Exception as raised:
        error = raised
    agree(error, group)
    return found


# --- a folder that appears whole (atomic.py), by all ranks --------------------------------------------------


def begin(path: Path, group: dist.ProcessGroup, replaces: Collection[str] | None = None) -> None:
    """Make the folder that ranks write into before it is `path`."""
    attempt(lambda: atomic.begin(path, replaces) if group.rank() == 0 else None, group)


def complete(
    path: Path,
    told: Mapping[str, Any],
    group: dist.ProcessGroup,
    keep: int | None = None,
    carries: Callable[[str], bool] | None = None,
) -> None:
    """All files are written: seal the folder with `told` in its manifest, and give it its name.

    Args:
        carries: which of the files that are at `path` stay.
    """
    part, me, size = atomic.part_of(path), group.rank(), group.size()
    names = gathered(atomic.listing(part) if me == 0 else None, group)[0]
    sums = attempt(lambda: {name: atomic.checksum(part / name) for name in names[me::size]}, group)
    everyone = gathered(sums, group)

    def seal() -> None:
        if me == 0:
            atomic.seal(part, {name: one for theirs in everyone for name, one in theirs.items()}, told)
            if carries is not None:
                atomic.carry_over(path, carries)
            atomic.commit(path)
            if keep is not None:
                atomic.keep_newest(path, keep)

    attempt(seal, group)


def verified(path: Path, group: dist.ProcessGroup) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at `path`, or the newest in it, and its manifest; its files are as they were written.

    Raises:
        FileNotFoundError, ValueError: there is none, or they are not.
    """
    folder: Path = attempt(lambda: atomic.find(path), group)
    attempt(lambda: atomic.verify(folder, group.rank(), group.size()), group)
    return folder, atomic.manifest(folder)


# --- beside training ----------------------------------------------------------------------------------------


_Kind = tuple[tuple[int, ...], torch.dtype, bool]  # shape, dtype, whether it comes from a GPU


class Copies:
    """Copies of tensors in the memory of the CPU, for whoever writes them while training goes on.

    To touch new memory takes seven times as long as to copy into memory that was touched before, and to pin
    it longer still. So the copies of one save serve the next: a run that saves in the background keeps the
    size of its checkpoint in the memory of the CPU.

    Args:
        device: where most of the tensors are.
        before: those of a save that is done, whose memory is taken over.
    """

    def __init__(self, device: torch.device, before: Copies | None = None) -> None:
        self._free: dict[_Kind, list[torch.Tensor]] = {} if before is None else before._made
        self._made: dict[_Kind, list[torch.Tensor]] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._events: list[torch.cuda.Event] = []

    def of(self, tensor: torch.Tensor, soon: bool = False) -> torch.Tensor:
        """A copy. On a GPU it is complete after `wait`; the tensor may be changed after the optimizer's next
        step has begun, or if it is needed `soon`, at once."""
        tensor = tensor.detach()
        made = self._memory(tensor)
        if self._stream is None or not tensor.is_cuda:
            return made.copy_(tensor)
        with torch.cuda.stream(torch.cuda.current_stream() if soon else self._stream):
            made.copy_(tensor, non_blocking=True)
        if not soon:
            tensor.record_stream(self._stream)
        return made

    def hold(self, optimizer: Optimizer | None) -> None:
        """All copies have been asked for; `optimizer` shall not step before they are made."""
        self._free = {}
        if self._stream is None:
            return
        self._events = [torch.cuda.current_stream().record_event(), self._stream.record_event()]
        if optimizer is None:
            torch.cuda.current_stream().wait_event(self._events[-1])
            return

        def before_step(*_: Any) -> None:
            torch.cuda.current_stream().wait_event(self._events[-1])
            handle.remove()

        handle = optimizer.register_step_pre_hook(before_step)

    def _memory(self, tensor: torch.Tensor) -> torch.Tensor:
        kind = tuple(tensor.shape), tensor.dtype, tensor.is_cuda
        free = self._free.get(kind)
        pinned = tensor.is_cuda and self._stream is not None
        made = free.pop() if free else torch.empty(kind[0], dtype=kind[1], pin_memory=pinned)
        self._made.setdefault(kind, []).append(made)
        return made

    def wait(self) -> None:
        """Until all copies are made."""
        for event in self._events:
            event.synchronize()


class Saving:
    """A save that is under way, or done.

    Args:
        work: what is to be done.
        background: in a thread. It is joined when the process ends, so a save that was begun is ended.
    """

    def __init__(self, work: Callable[[], None], background: bool) -> None:
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if not background:
            work()
            return

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="hpnb-save")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is on the disk. All ranks call it.

        Raises:
            Exception: what went wrong, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
