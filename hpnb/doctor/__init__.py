"""What this machine has, what hpnb will do with it, and what prevents it from running.

    python -m hpnb doctor

`inspect_machine` reads everything once into a `Machine`. `plan_launch`, `find_problems` and `format_report`
are pure functions of it, so they can be tested for other machines. Nothing here touches a GPU in the calling
process, because ranks could not be forked from it later: a child process inspects the GPUs and ends. The
report names neither the host nor the user, so it can be pasted into an issue.
"""

from hpnb.doctor.gpus import Gpu, parse_topology
from hpnb.doctor.machine import Machine, inspect_machine
from hpnb.doctor.problems import Problem, find_problems
from hpnb.doctor.report import format_report, plan_launch

__all__ = [
    "Gpu",
    "Machine",
    "Problem",
    "find_problems",
    "format_report",
    "inspect_machine",
    "parse_topology",
    "plan_launch",
]
