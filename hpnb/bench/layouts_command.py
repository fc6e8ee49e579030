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
from hpnb.bench.harness import LayoutBenchmark, RankPools, rank_pools, say_indented
from hpnb.bench.results import BenchmarkRun, LayoutResult, distance_over_noise
from hpnb.bench.tasks import TrainingTask, make_task
from hpnb.mesh import ParallelLayout


def gpt2_xl(**options: Any) -> BenchmarkRun:
    return _run("gpt2-xl", argparse.Namespace(**options))


def vit_l16(**options: Any) -> BenchmarkRun:
    return _run("vit-l16", argparse.Namespace(**options, heads=None))


def _run(what: str, options: argparse.Namespace) -> BenchmarkRun:
    """Measure what was asked for, print it, and write it.

    Raises:
        ValueError: something that cannot be measured; nothing has been started.
    """
    device = options.device
    if device == "auto" and 1 == options.ranks <= torch.cuda.device_count():
        device = "cuda"  # elsewhere "auto" leaves a single GPU to the notebook
    choice = hpnb.ranks.choose_device(device, options.ranks)
    tiny = options.size == "tiny" or (options.size is None and choice.device == "cpu")
    task = make_task(
        what, choice.device, options.ranks, tiny=tiny, batch=options.batch, rows=options.rows,
        heads=options.heads, microbatches=options.microbatches,
    )  # fmt: skip
    names = options.layouts or layouts.usual_layouts(options.ranks)
    chosen = {name: layouts.parse_layout(name, options.ranks) for name in names}
    with rank_pools(choice.device, options.timeout) as pools:
        command = _Command(task, chosen, options, pools)
        if options.losses:
            command.compare_losses()
        elif options.scaling:
            command.measure_scaling()
        else:
            command.measure_layouts()
    return command.run


class _Command:
    """One call: what is measured, with which options, on which ranks, and the results so far."""

    def __init__(
        self,
        task: TrainingTask,
        chosen: dict[str, ParallelLayout],
        options: argparse.Namespace,
        pools: RankPools,
    ) -> None:
        self.task, self.layouts, self.options, self.pools = task, chosen, options, pools
        for layout in chosen.values():
            self._task_for(layout).count_microbatches(layout)
        device: str = pools.get(options.ranks).run(worker.device_name)[0]
        versions = {"torch": torch.__version__, "transformers": transformers.__version__,
                    "Python": platform.python_version()}  # fmt: skip
        if torch.version.cuda and device != "CPU":
            versions["CUDA"] = torch.version.cuda
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        key = f"{task.title}; {options.ranks} x {device}"
        commit = options.commit or result_files.current_commit()
        self.run = BenchmarkRun(
            task.what, key, task.title, now, commit, device, options.ranks, versions,
            candidates=list(options.candidates or ()),
        )  # fmt: skip
        print(f"{task.title}: {options.ranks} x {device}, {options.rounds} rounds", flush=True)

    # --- speed -------------------------------------------------------------------------------------------

    def measure_layouts(self) -> None:
        print(tables.head(self.task.unit), flush=True)
        for name, layout in self.layouts.items():
            result = self._measure(self._task_for(layout), name, layout, repeat_best=True)
            if result is None:
                continue
            self.run.layouts[name] = result
            print("\n".join(tables.layout_rows(result)), flush=True)
            self._write()
        if lines := tables.data_parallel_rows(list(self.run.layouts.values())):
            print("\n".join(lines), flush=True)
        if self.options.out is not None and self.run.candidates and self.run.layouts:
            print("only programs that --candidates asked for were measured: `table` and `chart` take a "
                  "layout from here only if no earlier run has more programs of it", flush=True)  # fmt: skip

    def measure_scaling(self) -> None:
        """Speed per GPU on n of them, over that on one."""
        ranks = self.options.ranks
        speeds: dict[str, dict[str, float]] = {"hpnb": {}, "best peer": {}}
        for n in (n for n in range(1, ranks + 1) if ranks % n == 0):
            task = self.task.on_one_rank(ranks // n) if n < ranks else self.task
            result = self._measure(task, f"dp{n}" if n > 1 else "one", ParallelLayout(dp=n))
            for side, ours in (("hpnb", True), ("best peer", False)):
                best = result.fastest(ours) if result is not None else None
                if result is None or best is None:
                    continue
                speeds[side][str(n)] = result.per_gpu(best.name)
                over = speeds[side][str(n)] / speeds[side].get("1", float("nan"))
                print(f"{n} GPUs  {best.name:40} {result.per_gpu(best.name):12,.1f} {task.unit}/s/GPU  "
                      f"{over:.3f} of one's", flush=True)  # fmt: skip
        self.run.scaling = speeds
        self._write()

    def _measure(
        self, task: TrainingTask, name: str, layout: ParallelLayout, repeat_best: bool = False
    ) -> LayoutResult | None:
        options, known = self.options, worker.candidates(task.what, layout)
        chosen = [
            candidate
            for candidate in known.values()
            if (options.thorough or not candidate.extra or options.candidates)
            and _is_asked(candidate.name, options.candidates, known)
        ]
        if not chosen:
            print(f"{name}: no program has a name with {' or '.join(options.candidates)}", flush=True)
            return None
        began = time.monotonic()
        reference = self.pools.reference_losses(task, layout.world_size, say_indented)
        result = LayoutBenchmark(
            self.pools, task, name, layout, chosen, options.rounds,
            traces=options.profile, say=say_indented, reference=reference, repeat_best=repeat_best,
        ).run()  # fmt: skip
        say_indented(f"{name} took {time.monotonic() - began:.0f} s")
        return result

    # --- losses ------------------------------------------------------------------------------------------

    def compare_losses(self) -> None:
        """Losses of hpnb's first program of each layout; or of those that are asked for by name, peers
        too."""
        steps, one_gpu = self.options.losses, ParallelLayout()
        alone = worker.candidates(self.task.what, one_gpu)["hpnb"]
        serial, backwards = (
            self.pools.get(1).run(worker.losses, self.task, one_gpu, alone, steps, way)[0]
            for way in (False, True)
        )
        noise = loss_agreement.loss_distance(serial, backwards)
        print(f"one GPU: {serial[0]:.4f} to {serial[-1]:.4f} in {steps} steps; with samples in the opposite "
              f"order its losses are {noise:.2e} away", flush=True)  # fmt: skip
        self.run.losses = {"steps": steps, "serial": serial, "order": noise, "layouts": {}}
        if any(layout.tp > 1 for layout in self.layouts.values()):
            task = loss_agreement.WideTask.of(self.task)
            wide = self.pools.get(1).run(worker.losses, task, one_gpu, alone, steps, tf32=True)[0]
            rounding = loss_agreement.loss_distance(wide, serial)
            self.run.losses |= {"wide": wide, "rounding": rounding}
            print(f"one GPU's losses are {rounding:.2e} from those with {task.bits} bits: their rounding",
                  flush=True)  # fmt: skip
        print("distances from one GPU's losses, and over that of the opposite order: at most "
              f"{loss_agreement.ALLOWED:g} x counts as the same training", flush=True)  # fmt: skip
        for name, layout in self.layouts.items():
            if layout.world_size > 1:
                self._compare_losses_of(name, layout, serial, noise)

    def _compare_losses_of(
        self, name: str, layout: ParallelLayout, serial: list[float], noise: float
    ) -> None:
        options, known = self.options, worker.candidates(self.task.what, layout)
        same = [candidate for candidate in known.values() if candidate.same]
        ours = [candidate.name for candidate in same if candidate.ours]
        asked = [c.name for c in same if _is_asked(c.name, options.candidates, known)]
        for program in asked if options.candidates else ours if options.thorough else ours[:1]:
            try:
                pool = self.pools.get(layout.world_size)
                losses = pool.run(worker.losses, self.task, layout, known[program], options.losses)[0]
            except RankInterrupt:
                raise KeyboardInterrupt from None
            except RankError as error:
                print(f"{name:10} {program:34} {error.summary.splitlines()[0]}", flush=True)
                continue
            distance = loss_agreement.loss_distance(serial, losses)
            result: dict[str, Any] = {"distance": distance, "losses": losses}
            if layout.tp > 1:
                from_wide = loss_agreement.loss_distance(self.run.losses["wide"], losses)
                result["rounding"] = distance_over_noise(from_wide, self.run.losses["rounding"])
            self.run.losses["layouts"][f"{name} {program}"] = result
            print(loss_agreement.describe(name, program, distance, noise, result.get("rounding")), flush=True)
            self._write()

    def _task_for(self, layout: ParallelLayout) -> TrainingTask:
        """One GPU alone has a rank's share of the batch."""
        ranks = self.options.ranks
        return self.task.on_one_rank(ranks) if layout.world_size == 1 < ranks else self.task

    def _write(self) -> None:
        if self.options.out is not None:
            result_files.write(self.run, self.options.out)


def _is_asked(name: str, parts: Iterable[str] | None, known: Collection[str]) -> bool:
    """Whether a part of the name is asked for. A part that is a full name means that program alone."""
    return not parts or any(part == name if part in known else part in name for part in parts)
