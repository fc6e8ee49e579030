"""Log lines that say which rank they are from, or come from chosen ranks only.

hpnb.disable_existing_loggers()                   # libraries keep their warnings to say
logger = hpnb.get_dist_logger()
logger.info("the model is built", ranks=[0])      # 12:00:00 INFO rank 0: the model is built
logger.warning("this batch is empty")             # from every rank that has one
"""

from __future__ import annotations

import logging
from collections.abc import Collection, MutableMapping
from typing import Any

from hpnb.ranks.current_rank import rank


class DistLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger of Python's whose methods also take `ranks`: only these write the line."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        ranks: Collection[int] | None = kwargs.pop("ranks", None)
        if ranks is None or rank() in ranks:
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"rank {rank()}: {msg}", kwargs


def get_dist_logger(name: str = "hpnb") -> DistLogger:
    """The logger called `name`, on this rank. At first it writes lines of level INFO and above to stderr.

    One that has a handler or a level already keeps it, so `logging` configures it as any other.

    >>> hpnb.get_dist_logger().logger.name
    'hpnb'
    """
    logger = logging.getLogger(name)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    return DistLogger(logger, {})


def disable_existing_loggers(
    include: Collection[str] | None = None, exclude: Collection[str] = ("hpnb",)
) -> None:
    """Let the loggers that there are say warnings and errors alone.

    Args:
        include: only these; None is all.
        exclude: leave out those whose name begins with one of these.

    >>> hpnb.disable_existing_loggers(include=["datasets"])
    """
    for name in list(logging.root.manager.loggerDict) if include is None else include:
        if not name.startswith(tuple(exclude)):
            logging.getLogger(name).setLevel(logging.WARNING)
