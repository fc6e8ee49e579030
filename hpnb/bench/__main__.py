"""`python -m hpnb.bench NAME`: measure here and now, and print a table of ratios."""

from __future__ import annotations

import argparse


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
    options = parser.parse_args()
    if options.name == "launch":
        from hpnb.bench import launch as launching

        print(launching.run(options.ranks, options.rounds))
    else:
        from hpnb.bench import data_parallel

        contests = tuple(options.contest or data_parallel.CONTESTS)
        print(data_parallel.run(options.ranks, options.pairs, options.device, contests, options.batch))


if __name__ == "__main__":
    main()
