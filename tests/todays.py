"""Prints some of the files that it is given, the next ones each day, so that all come around.

    python tests/todays.py 4 notebooks/*.ipynb
"""

from __future__ import annotations

import datetime
import sys


def todays(count: int, files: list[str], day: int) -> list[str]:
    """`count` of `files`, from where the day before has stopped."""
    if count >= len(files):
        return files
    return [files[(day * count + i) % len(files)] for i in range(count)]


if __name__ == "__main__":
    today = datetime.datetime.now(datetime.UTC).date().toordinal()
    print(*todays(int(sys.argv[1]), sorted(sys.argv[2:]), today))
