"""python -m hpnb doctor; python -m hpnb train vit.toml; python -m hpnb plan gpt2-xl --gpus 8"""

from __future__ import annotations

import argparse
import os
import signal
import sys


def _doctor() -> int:
    from hpnb.doctor import find_problems, format_report, inspect_machine

    machine = inspect_machine()
    print(format_report(machine))
    return int(any(problem.level == "problem" for problem in find_problems(machine)))


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `hpnb plan gpt2-xl --gpus 8 | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        return 128 + signal.SIGPIPE


def _run(arguments: list[str] | None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser("python -m hpnb", description="Hybrid parallel training, run for real.")
    commands = parser.add_subparsers(dest="command", metavar="command")
    about = "what this machine has, what hpnb will use, and what is wrong"
    commands.add_parser("doctor", help=about, description=f"Prints {about}; needs no options.")
    train = commands.add_parser(
        "train", help="train what a TOML file says; go on where it was, if it was begun"
    )
    train.add_argument("file", help="as examples/vit.toml; its comments say what there is")
    train.add_argument("--ranks", type=int, help="processes to start, by default one a GPU, or 1")
    train.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", dest="overrides",
                       help="in place of what the file says; may be given again")  # fmt: skip
    train.add_argument("--allow-changes", action="store_true",
                       help="go on where the run had other data, samples a step, or seed")  # fmt: skip
    plan = commands.add_parser("plan", help="will a model fit, how fast, in which layout, and why")
    if arguments[:1] == ["plan"]:  # its options name the GPUs that there are datasheets of
        from hpnb.hybrid.plan_command.main import add_arguments

        add_arguments(plan)
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return _doctor()
    if options.command == "train":
        from hpnb.hybrid.train_command.main import run

        if options.allow_changes:
            options.overrides.append("checkpoint.allow_changes=true")
        return run(options.file, options.ranks, options.overrides)
    if options.command == "plan":
        from hpnb.hybrid.plan_command.main import run as run_plan

        return run_plan(options)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
