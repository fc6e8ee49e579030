"""`python -m hpnb.bench NAME`: measure here and now, and print a table of ratios; or show recorded ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hpnb.bench import layouts

Options = argparse.Namespace


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hpnb.bench", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True)
    for name, (help_text, add_options, _) in _COMMANDS.items():
        add_options(names.add_parser(name, help=help_text))
    options = parser.parse_args()
    try:
        _COMMANDS[options.name][2](options)
    except ValueError as error:
        sys.exit(f"python -m hpnb.bench {options.name}: {error}")


# --- one mechanism ---------------------------------------------------------------------------------------


def _launch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)


def _launch(options: Options) -> None:
    from hpnb.bench import launch

    print(launch.run(options.ranks, options.rounds))


def _data_parallel_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--contest", choices=("replicas", "stage 1", "stage 3"), action="append")
    parser.add_argument("--batch", type=int, default=1, help="times the smallest batch")


def _data_parallel(options: Options) -> None:
    from hpnb.bench import data_parallel

    contests = tuple(options.contest or data_parallel.CONTESTS)
    print(data_parallel.run(options.ranks, options.pairs, options.device, contests, options.batch))


def _pipeline_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--contest", choices=("1f1b", "zb-h1", "interleaved", "zb-v"), action="append")
    parser.add_argument("--microbatches", type=int, action="append")
    parser.add_argument("--size", type=float, default=1.0, help="of a microbatch, times the usual one")
    parser.add_argument("--bubbles", action="store_true", help="measured and simulated bubbles instead")


def _pipeline(options: Options) -> None:
    from hpnb.bench import pipeline

    counts = options.microbatches or (pipeline.SWEEP if options.bubbles else (8,))
    if options.bubbles:
        pipeline.bubbles(options.ranks, options.device, counts, options.size)
    else:
        contests = tuple(options.contest or pipeline.CONTESTS)
        pipeline.run(options.ranks, options.pairs, options.device, contests, counts, options.size)


def _tensor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", choices=("vit", "gpt2"), action="append")
    parser.add_argument("--batch", type=int, help="images or sequences of a step, over all ranks")
    parser.add_argument("--heads", type=int, help="of the GPT-2; 25 is the original's")
    parser.add_argument("--candidate", choices=("1d", "1d-sp", "2d", "torch", "torch-sp"), action="append")
    parser.add_argument("--profile", metavar="FOLDER", help="traces of a step, and its longest kernels")


def _tensor(options: Options) -> None:
    from hpnb.bench import tensor

    tensor.run(
        options.ranks, options.rounds, options.device, options.model, options.batch, options.heads,
        tuple(options.candidate or tensor.CANDIDATES), options.profile,
    )  # fmt: skip


def _checkpoint_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, default=20, help="steps from save to save")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0)
    parser.add_argument("--hidden", type=int, default=192, help="width of the ViT")
    parser.add_argument("--batch", type=int, default=16, help="images a rank")


def _checkpoint(options: Options) -> None:
    from hpnb.bench import checkpoint

    print(
        checkpoint.run(
            options.ranks, options.every, options.rounds, options.device, options.zero, options.hidden,
            options.batch,
        )
    )  # fmt: skip


# --- whole programs, layout by layout --------------------------------------------------------------------


def _layouts_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, default=4)
    add("--rounds", type=int, default=10, help="steps of each program that count, in turns")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--size", choices=("full", "tiny"), help="tiny is for a CPU, and the default there")
    usual = ",".join(layouts.usual_layouts(4))
    add("--layouts", type=_split_names, help=f"a part of them: {usual}")
    add("--candidates", type=_split_names, help="programs of these names, or that contain one: hpnb,DDP")
    add("--thorough", action="store_true", help="more forms of the peers, and schedules of hpnb")
    add("--batch", type=int, help="of a step, over all ranks")
    add("--rows", type=int, help="of a forward without a pipeline, times tp; more come in microbatches")
    add("--microbatches", type=int, default=0, help="of a pipeline; by default 4 a rank of it")
    add("--profile", metavar="FOLDER", help="traces of a step of the fastest of either side, and its kernels")
    add("--scaling", action="store_true", help="data parallelism on 1, 2, 4 ... GPUs, with one batch each")
    add("--losses", type=int, nargs="?", const=50, metavar="STEPS", help="of all layouts and one GPU")
    add("--out", metavar="PLACE", help="a folder, or a file that ends in .json, for the results")
    add("--commit", help="of the code, where git cannot say it")
    add("--timeout", type=float, default=300.0, help="seconds for building a program, and for a step")


def _gpt2_options(parser: argparse.ArgumentParser) -> None:
    _layouts_options(parser)
    parser.add_argument("--heads", type=int, help="20 as the published peers by default; the original has 25")


def _layouts(options: Options) -> None:
    from hpnb.bench import layouts_command

    layouts_command.main(options.name, options)


def _split_names(text: str) -> Sequence[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


# --- recorded results ------------------------------------------------------------------------------------


def _table_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, help="a folder; by default hpnb/bench/results")


def _table(options: Options) -> None:
    from hpnb.bench import result_files

    print(result_files.table(options.results or result_files.RESULTS))


def _chart_options(parser: argparse.ArgumentParser) -> None:
    _table_options(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="a PNG; by default images/layouts.png")
    parser.add_argument("--peers", type=int, help="of a layout; by default the fastest 3, or as many as fit")


def _chart(options: Options) -> None:
    from hpnb.bench import chart, result_files

    path = options.out or chart.PICTURE
    drawn = chart.write(path, options.results or result_files.RESULTS, options.peers)
    print(f"{path}  from {', '.join(drawn.sources)}")


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[Options], None]]] = {
    "launch": ("starting processes: hpnb beside spawn and notebook_launcher", _launch_options, _launch),
    "data-parallel": (
        "a training step: hpnb beside torch's DDP and FSDP2", _data_parallel_options, _data_parallel),
    "pipeline": ("a step over a pipeline: hpnb beside torch's schedules", _pipeline_options, _pipeline),
    "tensor": ("a step of sharded matrices: hpnb beside torch's DTensor", _tensor_options, _tensor),
    "checkpoint": ("steps beside which a checkpoint is written", _checkpoint_options, _checkpoint),
    "gpt2-xl": ("whole programs of a GPT-2 of 1.5B, for each layout", _gpt2_options, _layouts),
    "vit-l16": ("whole programs of ViT-L/16, for each layout", _layouts_options, _layouts),
    "table": ("the README's tables, of the newest results", _table_options, _table),
    "chart": ("the same results as the README's picture", _chart_options, _chart),
}  # fmt: skip


if __name__ == "__main__":
    main()
