"""`python -m hpnb.bench NAME`: measure here and now, and print a table of ratios; or show recorded ones."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpnb.bench import layouts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hpnb.bench", description=__doc__)
    names = parser.add_subparsers(dest="what", required=True)
    for name, (help_text, _, options) in _COMMANDS.items():
        subparser = names.add_parser(name, help=help_text)
        for flag, settings in options.items():
            subparser.add_argument(flag, **settings)
    chosen = vars(parser.parse_args())
    what = chosen.pop("what")
    module, _, function = _COMMANDS[what][1].partition(".")
    try:
        for name in ("ranks", "rounds", "every"):
            if chosen.get(name, 1) < 1:
                raise ValueError(f"{name}={chosen[name]} measures nothing; use 1 or more")
        run = getattr(importlib.import_module(f"hpnb.bench.{module}"), function)  # which may take long
        run(**chosen)
    except ValueError as error:
        sys.exit(f"python -m hpnb.bench {what}: {error}")


def _integer(default: int | None, help_text: str | None = None) -> dict[str, Any]:
    return {"type": int, "default": default, "help": help_text}


def _some_of(*choices: str) -> dict[str, Any]:
    return {"choices": choices, "action": "append"}


def _split_names(text: str) -> Sequence[str]:
    separator = ";" if ";" in text else ","  # some programs have a comma in their name
    return [part.strip() for part in text.split(separator) if part.strip()]


_USUAL = ",".join(layouts.usual_layouts(4))
_PAIRS = {
    "--ranks": _integer(2),
    "--pairs": {**_integer(15, "steps of both that count"), "dest": "rounds"},
    "--device": {"default": "auto"},
}
_RESULTS = {
    "--results": {
        "type": Path,
        "default": Path(__file__).parent / "results",
        "help": "a folder; by default hpnb/bench/results",
    }
}
_LAYOUTS: dict[str, dict[str, Any]] = {
    "--ranks": _integer(4),
    "--rounds": _integer(10, "steps of each program that count, in turns"),
    "--device": {"default": "auto", "help": "auto, cpu or cuda"},
    "--size": {"choices": ("full", "tiny"), "help": "tiny is for a CPU, and the default there"},
    "--layouts": {"type": _split_names, "help": f"a part of them: {_USUAL}"},
    "--candidates": {
        "type": _split_names,
        "help": "programs of these names, or that contain one: hpnb,DDP; between names with commas, ;",
    },
    "--thorough": {"action": "store_true", "help": "more forms of the peers, and schedules of hpnb"},
    "--batch": _integer(None, "of a step, over all ranks"),
    "--rows": _integer(None, "of a forward without a pipeline, times tp; more come in microbatches"),
    "--microbatches": _integer(0, "of a pipeline; by default 4 a rank of it"),
    "--profile": {"metavar": "FOLDER", "help": "traces of a step of the fastest of either side"},
    "--scaling": {"action": "store_true", "help": "data parallelism on 1, 2, 4 ... GPUs, same batch per GPU"},
    "--losses": {"type": int, "nargs": "?", "const": 50, "metavar": "STEPS", "help": "of every layout"},
    "--out": {"metavar": "PLACE", "help": "a folder, or a file that ends in .json, for the results"},
    "--commit": {"help": "of the code, where git cannot say it"},
    "--timeout": {"type": float, "default": 300.0, "help": "seconds for building a program, and for a step"},
}
_HEADS = {"--heads": _integer(None, "20 as the published peers by default; the original has 25")}

# Its help, the function of hpnb.bench that is called with its options, and these.
_COMMANDS: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "launch": ("starting processes: hpnb beside spawn and notebook_launcher", "launch.run",
               {"--ranks": _integer(4), "--rounds": _integer(5)}),
    "data-parallel": ("a training step: hpnb beside torch's DDP and FSDP2", "data_parallel.run", {
        **_PAIRS,
        "--contest": _some_of("replicas", "stage 1", "stage 3"),
        "--batch": _integer(1, "times the smallest batch"),
    }),
    "pipeline": ("a step over a pipeline: hpnb beside torch's schedules", "pipeline.run", {
        **_PAIRS,
        "--contest": _some_of("1f1b", "zb-h1", "interleaved", "zb-v"),
        "--microbatches": {"type": int, "action": "append"},
        "--size": {"type": float, "default": 1.0, "help": "of a microbatch, times the usual one"},
        "--bubbles": {"action": "store_true", "help": "measured and simulated bubbles instead"},
    }),
    "tensor": ("a step of sharded matrices: hpnb beside torch's DTensor", "tensor.run", {
        "--ranks": _integer(2),
        "--rounds": _integer(15),
        "--device": {"default": "auto"},
        "--model": _some_of("vit", "gpt2"),
        "--batch": _integer(None, "images or sequences of a step, over all ranks"),
        "--heads": _integer(None, "of the GPT-2; 25 is the original's"),
        "--candidate": _some_of("1d", "1d-sp", "2d", "torch", "torch-sp"),
        "--profile": {"metavar": "FOLDER", "help": "traces of a step, and its longest kernels"},
    }),
    "context": ("attention over a long sequence: hpnb beside torch's context_parallel", "context.run", {
        "--ranks": _integer(2),
        "--rounds": _integer(7, "steps of each that count, in turns"),
        "--device": {"default": "auto"},
        "--length": _integer(8192, "tokens of the sequence"),
        "--heads": _integer(8),
        "--kv-heads": _integer(None, "as many as heads by default"),
        "--head-dim": _integer(64),
    }),
    "experts": ("the exposed all-to-all of a DualPipe-V step, predicted and replayed", "experts.run", {
        "--bandwidth": {"type": float, "default": 0.2, "help": "of the link, GB/s"},
        "--latency": {"type": float, "default": 50.0, "help": "of a message, microseconds"},
        "--hidden": _integer(128, "width of the model"),
        "--layers": _integer(8),
        "--microbatches": _integer(8),
    }),
    "launch-bound": ("small microbatches: launched one by one, and as CUDA graphs", "launch_bound.run", {
        "--rounds": _integer(7, "steps of each program that count, in turns"),
        "--device": {"default": "auto"},
        "--stages": {"type": int, "action": "append", "help": "of a pipeline by turns: 2 and 4"},
        "--tasks": {"type": _split_names, "help": "models and microbatches that contain one of: ViT,8 x 16"},
    }),
    "checkpoint": ("steps beside which a checkpoint is written", "checkpoint.run", {
        "--ranks": _integer(2),
        "--every": _integer(20, "steps from save to save"),
        "--rounds": _integer(7),
        "--device": {"default": "auto"},
        "--zero": {"type": int, "choices": (0, 1, 2, 3), "default": 0},
        "--hidden": _integer(192, "width of the ViT"),
        "--batch": _integer(16, "images a rank"),
    }),
    "gpt2-xl": ("whole programs of a GPT-2 of 1.5B, for each layout", "layouts_command.gpt2_xl",
                {**_LAYOUTS, **_HEADS}),
    "vit-l16": ("whole programs of ViT-L/16, for each layout", "layouts_command.vit_l16", _LAYOUTS),
    "table": ("tables of the newest results", "result_files.show_table", {
        **_RESULTS,
        "--write": {"action": "store_true", "help": "replace the tables in the README.md of that folder"},
    }),
    "chart": ("the same results as a picture", "chart.show", {
        **_RESULTS,
        "--out": {"type": Path, "metavar": "FILE", "default": Path("images/layouts.png"), "help": "a PNG"},
    }),
}  # fmt: skip


if __name__ == "__main__":
    main()
