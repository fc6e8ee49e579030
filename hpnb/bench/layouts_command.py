"""`python -m hpnb.bench gpt2-xl` and `vit-l16`: layout after layout, rows and files as they come."""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from collections.abc import Collection, Iterable
from typing import Any

import torch
import transformers

import hpnb
from hpnb import RankError, RankInterrupt
from hpnb.bench import layouts, loss_agreement, result_files, tables, worker
from hpnb.bench.layout_benchmark import LayoutBenchmark, RankPools, pools
from hpnb.bench.layouts import Shape
from hpnb.bench.results import LayoutResult, Run
from hpnb.bench.reversed_units import OtherOrder
from hpnb.bench.tasks import Task, What, task


def main(what: What, options: argparse.Namespace) -> Run:
    """Do what was asked for, print it, and write it.

    Raises:
        ValueError: something that cannot be measured; nothing has been started.
    """
    if options.rounds < 1:
        raise ValueError(f"rounds={options.rounds} measures nothing; use 1 or more")
    choice = hpnb.ranks.choose_device(_device(options.device, options.ranks), options.ranks)
    tiny = options.size == "tiny" or (options.size is None and choice.device == "cpu")
    of = task(
        what, choice.device, options.ranks, tiny=tiny, batch=options.batch, rows=options.rows,
        heads=getattr(options, "heads", None), microbatches=options.microbatches,
    )  # fmt: skip
    wanted = options.layouts or layouts.names(options.ranks)
    shapes = {name: layouts.shape(name, options.ranks) for name in wanted}
    for shape in shapes.values():
        _of(of, shape, options.ranks).parts(shape)
    with pools(choice.device, options.timeout) as among:
        run = _begin(what, of, options.ranks, options.commit or result_files.commit(), among)
        print(f"{run.title}: {run.ranks} x {run.device}, {options.rounds} rounds", flush=True)
        if options.losses:
            _losses(run, of, shapes, options, among)
        elif options.scaling:
            _scaling(run, of, options, among)
        else:
            _contests(run, of, shapes, options, among)
    return run


# --- speed -----------------------------------------------------------------------------------------------


def _contests(
    run: Run, of: Task, shapes: dict[str, Shape], options: argparse.Namespace, among: RankPools
) -> None:
    print(tables.head(of.unit), flush=True)
    for layout, shape in shapes.items():
        task = _of(of, shape, options.ranks)
        found = _contest(task, layout, shape, options, among, again=True)
        if found is None:
            continue
        run.layouts[layout] = found
        print("\n".join(tables.rows(found)), flush=True)
        _write(run, options)
    if lines := tables.families(list(run.layouts.values())):
        print("\n".join(lines), flush=True)


def _contest(
    of: Task, layout: str, shape: Shape, options: argparse.Namespace, among: RankPools, again: bool = False
) -> LayoutResult | None:
    known = worker.candidates(of.what, shape)
    chosen = [
        one.name
        for one in known.values()
        if (options.thorough or not one.extra or options.candidates)
        and _asked(one.name, options.candidates, known)
    ]
    if not chosen:
        print(f"{layout}: no program has a name with {' or '.join(options.candidates)}", flush=True)
        return None
    began = time.monotonic()
    plain = among.reference(of, shape.ranks, _say)
    found = LayoutBenchmark(
        among, of, layout, shape, chosen, options.rounds, options.profile, _say, plain, again
    ).run()
    _say(f"{layout} took {time.monotonic() - began:.0f} s")
    return found


def _scaling(run: Run, of: Task, options: argparse.Namespace, among: RankPools) -> None:
    """Speed per GPU on n of them, over that on one."""
    counts = [n for n in range(1, options.ranks + 1) if options.ranks % n == 0]
    speeds: dict[str, dict[str, float]] = {"hpnb": {}, "best peer": {}}
    for n in counts:
        part = of.on_one(options.ranks // n) if n < options.ranks else of
        found = _contest(part, f"dp{n}" if n > 1 else "one", Shape(dp=n), options, among)
        for side, ours in (("hpnb", True), ("best peer", False)):
            best = found.fastest(ours) if found is not None else None
            if found is None or best is None:
                continue
            speeds[side][str(n)] = found.per_gpu(best.name)
            over = speeds[side][str(n)] / speeds[side].get("1", float("nan"))
            print(f"{n} GPUs  {best.name:40} {found.per_gpu(best.name):12,.1f} {of.unit}/s/GPU  "
                  f"{over:.3f} of one's", flush=True)  # fmt: skip
    run.scaling = speeds
    _write(run, options)


# --- losses ----------------------------------------------------------------------------------------------


def _losses(
    run: Run, of: Task, shapes: dict[str, Shape], options: argparse.Namespace, among: RankPools
) -> None:
    """Of hpnb's first program of each layout; or of those that are asked for by name, peers too."""
    steps, one = options.losses, Shape()
    serial, other = (among.of(1).run(worker.losses, of, one, "hpnb", steps, way)[0] for way in (False, True))
    noise = loss_agreement.distance(serial, other)
    print(f"one GPU: {serial[0]:.4f} to {serial[-1]:.4f} in {steps} steps; the opposite order of rows is "
          f"{noise:.2e} away", flush=True)  # fmt: skip
    run.losses = {"steps": steps, "serial": serial, "order": noise, "layouts": {}}
    units = 0.0
    if any(shape.tp > 1 for shape in shapes.values()):
        turned = among.of(1).run(worker.losses, OtherOrder.of(of), one, "hpnb", steps)[0]
        run.losses["units"] = units = loss_agreement.distance(serial, turned)
        print(f"the opposite order of heads and units is {units:.2e} away", flush=True)
    for layout, shape in shapes.items():
        if shape.ranks == 1:
            continue
        known = worker.candidates(of.what, shape)
        same = [one for one in known.values() if one.same]
        ours = [one.name for one in same if one.ours]
        asked = [one.name for one in same if _asked(one.name, options.candidates, known)]
        chosen = asked if options.candidates else ours if options.thorough else ours[:1]
        for name in chosen:
            try:
                found = among.of(shape.ranks).run(worker.losses, of, shape, name, steps)[0]
            except RankInterrupt:
                raise KeyboardInterrupt from None
            except RankError as error:
                print(f"{layout:10} {name:34} {error.summary.splitlines()[0]}", flush=True)
                continue
            far = loss_agreement.distance(serial, found)
            run.losses["layouts"][f"{layout} {name}"] = {"distance": far, "losses": found}
            print(loss_agreement.line(layout, name, far, noise, units if shape.tp > 1 else 0.0), flush=True)
            _write(run, options)


# --- what surrounds it -----------------------------------------------------------------------------------


def _device(asked: str, ranks: int) -> str:
    """A GPU that is the only one is measured too; elsewhere it would leave one rank apart from the rest."""
    return "cuda" if asked == "auto" and 1 == ranks <= torch.cuda.device_count() else asked


def _begin(what: What, of: Task, ranks: int, commit: str, among: RankPools) -> Run:
    device: str = among.of(ranks).run(worker.device_name)[0]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__,
                "Python": platform.python_version()}  # fmt: skip
    if torch.version.cuda and device != "CPU":
        versions["CUDA"] = torch.version.cuda
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    key = f"{of.title}; {ranks} x {device}"
    return Run(what, key, of.title, now, commit, device, ranks, versions)


def _of(of: Task, shape: Shape, ranks: int) -> Task:
    """One GPU alone has a rank's share of the batch."""
    return of.on_one(ranks) if shape.ranks == 1 < ranks else of


def _write(run: Run, options: argparse.Namespace) -> None:
    if options.out is not None:
        result_files.write(run, options.out)


def _asked(name: str, parts: Iterable[str] | None, known: Collection[str]) -> bool:
    """By a part of its name; what is a whole name means that program alone."""
    return not parts or any(part == name if part in known else part in name for part in parts)


def _say(text: Any) -> None:
    if text:
        print(f"    {text}", flush=True)
