"""What only notebooks need: a banner, the reader's predictions, exercise checks, ledgers, explorers.

`lesson.banner`, `predict` and `explorer` are the functions, though submodules have the same names: a name
imported from a submodule replaces the submodule that importing it had bound here. `lesson.ledger`,
`lesson.field_guide` and `lesson.steps` are modules. Nothing here imports matplotlib or ipywidgets before it
draws.
"""

from hpnb.lesson import ahead as ahead  # isort: skip  # it has the server of ranks import at the same time

from hpnb.lesson import explorers, field_guide, ledger, steps
from hpnb.lesson.banner import Banner, banner
from hpnb.lesson.checks import Exercise, Finding, Verdict, check
from hpnb.lesson.comparison import comparison
from hpnb.lesson.explorer import Explorer, explorer
from hpnb.lesson.home import digest, home
from hpnb.lesson.kept import keep, kept
from hpnb.lesson.knobs import Challenge, Choice, Slider
from hpnb.lesson.layer_memory import LayerMemory, layer_memory, measure_layers
from hpnb.lesson.machine_card import MachineCard, machine_card
from hpnb.lesson.outcome import Outcome
from hpnb.lesson.predict import outcomes, predict, reveal
from hpnb.lesson.replay import replay
from hpnb.lesson.tables import number, table

__all__ = [
    "Banner",
    "Challenge",
    "Choice",
    "Exercise",
    "Explorer",
    "Finding",
    "LayerMemory",
    "MachineCard",
    "Outcome",
    "Slider",
    "Verdict",
    "banner",
    "check",
    "comparison",
    "digest",
    "explorer",
    "explorers",
    "field_guide",
    "home",
    "keep",
    "kept",
    "layer_memory",
    "ledger",
    "machine_card",
    "measure_layers",
    "number",
    "outcomes",
    "predict",
    "replay",
    "reveal",
    "steps",
    "table",
]
