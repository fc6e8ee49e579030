"""The command line of whole programs, apart from what takes long to import."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hpnb.bench import layouts


def arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """What can be asked for on a command line."""
    add = parser.add_argument
    add("--ranks", type=int, default=4)
    add("--rounds", type=int, default=10, help="steps of each program that count, in turns")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--size", choices=("full", "tiny"), help="tiny is for a CPU, and the default there")
    usual = ",".join(layouts.names(4))
    add("--layouts", type=_names, help=f"a part of them: {usual}")
    add("--candidates", type=_names, help="programs of these names, or whose names contain one: hpnb,DDP")
    add("--thorough", action="store_true", help="more forms of the peers, and schedules of hpnb")
    add("--batch", type=int, help="of a step, over all ranks")
    add("--rows", type=int, help="of a forward without a pipeline, times tp; more come in microbatches")
    add("--microbatches", type=int, default=0, help="of a pipeline; by default 4 a rank of it")
    if what == "gpt2-xl":
        add("--heads", type=int, help="20 as the published peers by default; 25 is the original's")
    add("--profile", metavar="FOLDER", help="traces of a step of the fastest of either side, and its kernels")
    add(
        "--scaling",
        action="store_true",
        help="data parallelism on 1, 2, 4 ... GPUs, with the same batch each",
    )
    add(
        "--losses",
        type=int,
        nargs="?",
        const=50,
        metavar="STEPS",
        help="those of all layouts beside one GPU's",
    )
    add("--out", metavar="PLACE", help="a folder, or a file that ends in .json, for what is found")
    add("--commit", help="of the code, where git cannot say it")
    add("--timeout", type=float, default=300.0, help="seconds for building a program, and for a step")


def _names(text: str) -> Sequence[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
