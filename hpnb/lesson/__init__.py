"""What only notebooks need, sorted by kind.

    predictions/    the reader's guesses: predict, reveal, regret
    explorers/      formulas with knobs, one for each notebook
    exercises/      the checker, and the oracles of each notebook's exercises
    programs/       what each notebook runs on its ranks
    pages/          the commands that run, clean and commit notebooks; no notebook imports them

`lesson.ledger`, `field_guide`, `explorers` and `outcome` are modules, the rest functions and classes. Nothing
here imports matplotlib or ipywidgets before it draws.
"""

# ruff: noqa: E402
from hpnb.ranks.forkserver import start_ahead

start_ahead("hpnb.lesson")  # the rank server imports it while this process does

import torch

from hpnb.lesson import explorers, field_guide, ledger
from hpnb.lesson.banner import banner
from hpnb.lesson.exercises.checker import Exercise, Finding, check
from hpnb.lesson.exercises.reader_schedules import keep_schedule, reader_schedule
from hpnb.lesson.explorers.explorer import Challenge, Explorer
from hpnb.lesson.explorers.knobs import Choice, Slider
from hpnb.lesson.home import digest, home
from hpnb.lesson.machine_card import MachineCard, machine_card
from hpnb.lesson.page_sizes import choose_sizes
from hpnb.lesson.predictions.predict import outcomes, predict, reveal
from hpnb.lesson.rank_share import measure_share
from hpnb.lesson.show import Parity, show
from hpnb.lesson.tables import number, survivors_table, table
from hpnb.lesson.values import claim, record
from hpnb.theory.replay import replay

__all__ = [
    "Challenge",
    "Choice",
    "Exercise",
    "Explorer",
    "Finding",
    "MachineCard",
    "Parity",
    "Slider",
    "banner",
    "check",
    "choose_sizes",
    "claim",
    "digest",
    "explorers",
    "field_guide",
    "home",
    "keep_schedule",
    "ledger",
    "machine_card",
    "measure_share",
    "number",
    "outcomes",
    "predict",
    "reader_schedule",
    "record",
    "replay",
    "reveal",
    "show",
    "survivors_table",
    "table",
]

# What pages compute on a CPU is small: more threads make it no faster, and ten times slower on 64 cores that
# other programs use, too. Ranks get no more than their caller has.
torch.set_num_threads(min(4, torch.get_num_threads()))
