"""`python -m hpnb.bench NAME`: measure here and now, and print a table of ratios; or show recorded ones."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hpnb.bench import layouts_options


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hpnb.bench", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True)
    launch = names.add_parser("launch", help="starting processes: hpnb beside spawn and notebook_launcher")
    launch.add_argument("--ranks", type=int, default=4)
    launch.add_argument("--rounds", type=int, default=5)
    replicas = names.add_parser("data-parallel", help="a training step: hpnb beside torch's DDP and FSDP2")
    replicas.add_argument("--ranks", type=int, default=2)
    replicas.add_argument("--pairs", type=int, default=15)
    replicas.add_argument("--device", default="auto")
    replicas.add_argument("--contest", choices=("replicas", "stage 1", "stage 3"), action="append")
    replicas.add_argument("--batch", type=int, default=1, help="times the smallest batch")
    stages = names.add_parser("pipeline", help="a step over a pipeline: hpnb beside torch's schedules")
    stages.add_argument("--ranks", type=int, default=2)
    stages.add_argument("--pairs", type=int, default=15)
    stages.add_argument("--device", default="auto")
    stages.add_argument("--contest", choices=("1f1b", "zb-h1", "interleaved", "zb-v"), action="append")
    stages.add_argument("--microbatches", type=int, action="append")
    stages.add_argument("--size", type=float, default=1.0, help="of a microbatch, times the usual one")
    stages.add_argument("--bubbles", action="store_true", help="measured and simulated bubbles instead")
    matrices = names.add_parser("tensor", help="a step of shared matrices: hpnb beside torch's DTensor")
    matrices.add_argument("--ranks", type=int, default=2)
    matrices.add_argument("--rounds", type=int, default=15)
    matrices.add_argument("--device", default="auto")
    matrices.add_argument("--model", choices=("vit", "gpt2"), action="append")
    matrices.add_argument("--batch", type=int, help="images or sequences of a step, over all ranks")
    matrices.add_argument("--heads", type=int, help="of the GPT-2; 25 is the original's")
    matrices.add_argument("--candidate", choices=("1d", "1d-sp", "2d", "torch", "torch-sp"), action="append")
    matrices.add_argument("--profile", metavar="FOLDER", help="traces of a step, and its longest kernels")
    saves = names.add_parser("checkpoint", help="steps beside which a checkpoint is written")
    saves.add_argument("--ranks", type=int, default=2)
    saves.add_argument("--every", type=int, default=20, help="steps from save to save")
    saves.add_argument("--rounds", type=int, default=7)
    saves.add_argument("--device", default="auto")
    saves.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0)
    saves.add_argument("--hidden", type=int, default=192, help="width of the ViT")
    saves.add_argument("--batch", type=int, default=16, help="images a rank")
    texts = names.add_parser("gpt2-xl", help="whole programs of a GPT-2 of 1.5B, for each layout")
    layouts_options.arguments(texts, "gpt2-xl")
    images = names.add_parser("vit-l16", help="whole programs of ViT-L/16, for each layout")
    layouts_options.arguments(images, "vit-l16")
    tables = names.add_parser("table", help="the README's tables, of the newest results")
    tables.add_argument("--results", type=Path, help="a folder; by default hpnb/bench/results")
    charts = names.add_parser("chart", help="the same results as the README's picture")
    charts.add_argument("--results", type=Path, help="a folder; by default hpnb/bench/results")
    charts.add_argument("--out", type=Path, metavar="FILE", help="a PNG; by default images/layouts.png")
    charts.add_argument("--peers", type=int, help="of a layout; by default the fastest 3, or as many as fit")
    options = parser.parse_args()
    try:
        _run(options)
    except ValueError as error:
        sys.exit(f"python -m hpnb.bench {options.name}: {error}")


def _run(options: argparse.Namespace) -> None:
    if options.name in ("gpt2-xl", "vit-l16"):
        from hpnb.bench import layouts_command

        layouts_command.main(options.name, options)
    elif options.name == "table":
        from hpnb.bench import result_files

        print(result_files.table(options.results or result_files.RESULTS))
    elif options.name == "chart":
        from hpnb.bench import chart, result_files

        path = options.out or chart.PICTURE
        made = chart.write(path, options.results or result_files.RESULTS, options.peers)
        print(f"{path}  from {', '.join(made.sources)}")
    elif options.name == "launch":
        from hpnb.bench import launch as launching

        print(launching.run(options.ranks, options.rounds))
    elif options.name == "pipeline":
        from hpnb.bench import pipeline

        given = (options.microbatches or (pipeline.SWEEP if options.bubbles else (8,)), options.size)
        if options.bubbles:
            pipeline.bubbles(options.ranks, options.device, *given)
        else:
            rivals = tuple(options.contest or pipeline.CONTESTS)
            pipeline.run(options.ranks, options.pairs, options.device, rivals, *given)
    elif options.name == "checkpoint":
        from hpnb.bench import checkpoint

        sizes = (options.hidden, options.batch)
        print(
            checkpoint.run(options.ranks, options.every, options.rounds, options.device, options.zero, *sizes)
        )
    elif options.name == "tensor":
        from hpnb.bench import tensor

        chosen = tuple(options.candidate or tensor.CANDIDATES)
        sizes = (options.batch, options.heads)
        tensor.run(
            options.ranks, options.rounds, options.device, options.model, *sizes, chosen, options.profile
        )
    else:
        from hpnb.bench import data_parallel

        contests = tuple(options.contest or data_parallel.CONTESTS)
        print(data_parallel.run(options.ranks, options.pairs, options.device, contests, options.batch))


if __name__ == "__main__":
    main()
