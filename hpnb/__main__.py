"""python -m hpnb doctor"""

from __future__ import annotations

import argparse
import sys


def _doctor() -> int:
    from hpnb.doctor import inspect_machine, problems, report

    machine = inspect_machine()
    print(report(machine))
    return int(any(problem.level == "problem" for problem in problems(machine)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m hpnb", description="Hybrid parallel training, run for real.")
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("doctor", help="what this machine has, what hpnb will use, and what is wrong")
    if parser.parse_args(arguments).command == "doctor":
        return _doctor()
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
