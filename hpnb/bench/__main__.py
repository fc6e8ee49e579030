"""Measures hpnb beside PyTorch's programs on this machine, and prints a table of step times and of hpnb's
speed over PyTorch's. `table` and `chart` show results that were written before."""

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
    names = parser.add_subparsers(dest="what", required=True, metavar="NAME")
    for name, (help_text, _, options) in _COMMANDS.items():
        subparser = names.add_parser(
            name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}."
        )
        for flag, settings in options.items():
            subparser.add_argument(flag, **settings)
    chosen = vars(parser.parse_args())
    what = chosen.pop("what")
    module, _, function = _COMMANDS[what][1].partition(".")
    try:
        flags = {options.get("dest", flag[2:]): flag for flag, options in _COMMANDS[what][2].items()}
        for name in ("ranks", "rounds", "every"):
            if chosen.get(name, 1) < 1:
                raise ValueError(f"{flags[name]} {chosen[name]} measures nothing; use 1 or more")
        run = getattr(importlib.import_module(f"hpnb.bench.{module}"), function)  # which may take long
        run(**chosen)
    except ValueError as error:
        sys.exit(f"python -m hpnb.bench {what}: {error}")


def _integer(default: int | None, help_text: str | None = None) -> dict[str, Any]:
    return {"type": int, "default": default, "help": help_text}


def _some_of(*choices: str, help_text: str) -> dict[str, Any]:
    return {"choices": choices, "action": "append", "help": help_text}


def _split_names(text: str) -> Sequence[str]:
    separator = ";" if ";" in text else ","  # some programs have a comma in their name
    return [part.strip() for part in text.split(separator) if part.strip()]


_USUAL = ", ".join(layouts.usual_layouts(4))
_DEVICE = {
    "--device": {
        "choices": ("auto", "cpu", "cuda"),
        "default": "auto",
        "help": "where ranks run; `python -m hpnb doctor` says what auto takes (default: auto)",
    }
}
_BUSY = "in a round each program takes one step, so that a busy moment slows all of them"
_PROFILE = {
    "--profile": {
        "metavar": "FOLDER",
        "help": "write a Chrome trace of one step of hpnb's fastest program and of PyTorch's, and print the "
        "kernels that take longest",
    }
}


def _ranks(default: int) -> dict[str, dict[str, Any]]:
    return {
        "--ranks": _integer(default, "number of processes, one a GPU or on the CPU (default: %(default)s)")
    }


def _rounds(default: int) -> dict[str, dict[str, Any]]:
    return {"--rounds": _integer(default, f"rounds to measure: {_BUSY} (default: %(default)s)")}


_PAIRS: dict[str, dict[str, Any]] = {
    **_ranks(2),
    "--pairs": {**_integer(15, f"rounds to measure: {_BUSY} (default: %(default)s)"), "dest": "rounds"},
    **_DEVICE,
}
_RESULTS = {
    "--results": {
        "type": Path,
        "metavar": "FOLDER",
        "default": Path(__file__).parent / "results",
        "help": "folder of result files (default: hpnb/bench/results)",
    }
}
_LAYOUTS: dict[str, dict[str, Any]] = {
    **_ranks(4),
    **_rounds(10),
    **_DEVICE,
    "--size": {
        "choices": ("full", "tiny"),
        "help": "full: the model of that name, for GPUs; tiny: a few small layers, for a CPU (default: full "
        "on GPUs, tiny on a CPU)",
    },
    "--layouts": {
        "type": _split_names,
        "help": "which layouts to measure, separated by commas: one (a single rank), zero1 to zero3, or "
        f"sizes along dp, pp and tp such as dp2xpp2 (default on 4 ranks: {_USUAL})",
    },
    "--candidates": {
        "type": _split_names,
        "help": "measure only programs whose name is or contains one of these, separated by commas, or by "
        "semicolons if a name has a comma: hpnb,DDP (default: all but those of --thorough)",
    },
    "--thorough": {
        "action": "store_true",
        "help": "also measure programs that are seldom the fastest: more forms of PyTorch's, more schedules "
        "of hpnb's",
    },
    "--batch": _integer(None, "samples of a step, over all ranks (default: 16 sequences or 128 images a "
                        "rank; 4 if tiny)"),
    "--rows": _integer(None, "samples of one forward at most, on a rank without tp or pp: a larger share of "
                       "the batch is split into microbatches, whose gradients are accumulated; with tp N it "
                       "is N times as many (default: no limit)"),
    "--microbatches": _integer(0, "microbatches of a pipeline (default: 4 times its ranks)"),
    **_PROFILE,
    "--scaling": {
        "action": "store_true",
        "help": "instead of layouts, measure data parallelism on 1, 2, ... ranks with the same batch a rank",
    },
    "--losses": {
        "type": int,
        "nargs": "?",
        "const": 50,
        "metavar": "STEPS",
        "help": "instead of speed, compare the losses of STEPS steps of each layout with those of one GPU "
        "(50 if no number follows)",
    },
    "--out": {
        "metavar": "PLACE",
        "help": "write results as JSON into this folder, or into this file if it ends in .json (default: "
        "print only)",
    },
    "--commit": {"help": "commit to write into results (default: what git says)"},
    "--timeout": {
        "type": float,
        "default": 300.0,
        "metavar": "SECONDS",
        "help": "give up a program whose building, or one step, takes longer (default: %(default)g)",
    },
}  # fmt: skip
_HEADS = {
    "--heads": _integer(
        None, "attention heads (default: 20, which 4 ranks can share; the original model has 25)"
    )
}

# Its help, the function of hpnb.bench that is called with its options, and these.
_COMMANDS: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "launch": (
        "seconds until a function has run on N new processes: hpnb.launch beside torch.multiprocessing.spawn "
        "and accelerate's notebook_launcher", "launch.run",
        {**_ranks(4), "--rounds": _integer(5, "launches of each, which take turns (default: %(default)s)")}),
    "data-parallel": (
        "a step of data parallelism: hpnb's DataParallel, ZeroOptimizer and fully_shard beside PyTorch's "
        "DDP, ZeroRedundancyOptimizer and FSDP2", "data_parallel.run", {
        **_PAIRS,
        "--contest": _some_of("replicas", "zero1", "zero3", help_text="which pair of programs: full "
                              "replicas, ZeRO stage 1 or ZeRO stage 3; may be repeated (default: all)"),
        "--batch": _integer(1, "batch, in multiples of the smallest one (default: %(default)s)"),
    }),
    "pipeline": (
        "a step of pipeline parallelism: hpnb's schedules beside those of torch.distributed.pipelining",
        "pipeline.run", {
        **_PAIRS,
        "--contest": _some_of("1f1b", "zb-h1", "interleaved", "zb-v", help_text="which of hpnb's schedules; "
                              "may be repeated (default: all)"),
        "--microbatches": {"type": int, "action": "append",
                           "help": "microbatches of a step; may be repeated (default: 8; with --bubbles 4, "
                           "8, 16 and 32)"},
        "--size": {"type": float, "default": 1.0,
                   "help": "size of a microbatch, in multiples of the usual one (default: %(default)g)"},
        "--bubbles": {"action": "store_true", "help": "instead of step times, print the bubble of each of "
                      "hpnb's schedules, measured and simulated"},
    }),
    "tensor": (
        "a step of tensor parallelism: hpnb's 1D and 2D beside PyTorch's parallelize_module", "tensor.run", {
        **_ranks(2),
        **_rounds(15),
        **_DEVICE,
        "--model": _some_of("vit", "gpt2", help_text="which model; may be repeated (default: both on GPUs, "
                            "vit on a CPU)"),
        "--batch": _integer(None, "images or sequences of a step, over all ranks (default: 64 images or 8 "
                            "sequences; on a CPU 16 or 4)"),
        "--heads": _integer(None, "attention heads of the GPT-2 (default: 20; the original model has 25)"),
        "--candidate": _some_of("1d", "1d-sp", "2d", "torch", "torch-sp", help_text="which program, -sp with "
                                "sequence parallelism; may be repeated (default: all)"),
        **_PROFILE,
    }),
    "context": (
        "attention over a sequence that is sharded over ranks: hpnb's ring, all-gather and Ulysses beside "
        "PyTorch's context_parallel", "context.run", {
        **_ranks(2),
        **_rounds(7),
        **_DEVICE,
        "--length": _integer(8192, "tokens of the sequence (default: %(default)s)"),
        "--heads": _integer(8, "query heads (default: %(default)s)"),
        "--kv-heads": _integer(None, "key-value heads (default: as many as --heads)"),
        "--head-dim": _integer(64, "width of a head (default: %(default)s)"),
    }),
    "experts": (
        "how much of the experts' all-to-all a DualPipe-V step cannot overlap: predicted and replayed (on "
        "four GPUs measured)", "experts.run", {
        **_rounds(7),
        **_DEVICE,
        "--bandwidth": {"type": float, "default": 0.2,
                        "help": "of the link to replay with, GB/s (default: %(default)g)"},
        "--latency": {"type": float, "default": 50.0,
                      "help": "of a message over that link, microseconds (default: %(default)g)"},
        "--hidden": _integer(None, "hidden size of the model (default: 2048 on GPUs, 128 on a CPU)"),
        "--layers": _integer(8, "layers of the model (default: %(default)s)"),
        "--microbatches": _integer(8, "microbatches of a step (default: %(default)s)"),
    }),
    "launch-bound": (
        "steps of microbatches so small that the CPU cannot launch kernels fast enough: eager, and as CUDA "
        "graphs", "launch_bound.run", {
        **_rounds(7),
        **_DEVICE,
        "--stages": {"type": int, "action": "append",
                     "help": "pipeline stages to measure after the programs of one rank; may be repeated "
                     "(default: 2 and 4)"},
        "--tasks": {"type": _split_names,
                    "help": "which tasks, by parts of their names, separated by commas or semicolons: ViT,8 "
                    "x 16 (default: all)"},
    }),
    "checkpoint": (
        "how much longer training steps take while a checkpoint is written", "checkpoint.run", {
        **_ranks(2),
        "--every": _integer(20, "steps after each save (default: %(default)s)"),
        "--rounds": _integer(7, "times that those steps run without a save, with one in the background, and "
                             "with one that is waited for (default: %(default)s)"),
        **_DEVICE,
        "--zero": {"type": int, "choices": (0, 1, 2, 3), "default": 0,
                   "help": "ZeRO stage (default: 0, none)"},
        "--hidden": _integer(192, "hidden size of the ViT (default: %(default)s)"),
        "--batch": _integer(16, "images of a step on each rank (default: %(default)s)"),
    }),
    "gpt2-xl": ("a GPT-2 of 1.5B parameters trained in each layout: hpnb's programs beside PyTorch's",
                "layouts_command.gpt2_xl", {**_LAYOUTS, **_HEADS}),
    "vit-l16": ("a ViT-L/16 trained in each layout: hpnb's programs beside PyTorch's",
                "layouts_command.vit_l16", _LAYOUTS),
    "table": ("print tables of the newest results of gpt2-xl and vit-l16", "result_files.show_table", {
        **_RESULTS,
        "--write": {"action": "store_true", "help": "instead of printing them, replace the tables in the "
                    "README.md of that folder"},
    }),
    "chart": ("draw those results", "chart.show", {
        **_RESULTS,
        "--out": {"type": Path, "metavar": "FILE", "default": Path("images/layouts.png"),
                  "help": "PNG to write (default: %(default)s)"},
    }),
}  # fmt: skip


if __name__ == "__main__":
    main()
