"""What this machine has, what hpnb will do with it, and what stands in the way.

    python -m hpnb doctor

`inspect_machine` reads everything once into a `Machine`; `plan`, `problems` and `report` are pure functions
of it, so each can be tried on a machine that is not at hand. Nothing here touches a GPU in the calling
process (that would forbid forking ranks from it later): GPUs are questioned in a child that then ends. No
host or user name gets into the report, which can be pasted into an issue as it is.
"""

from hpnb.doctor.gpus import Gpu, parse_topology
from hpnb.doctor.machine import Machine, inspect_machine
from hpnb.doctor.problems import Problem, problems
from hpnb.doctor.report import plan, report

__all__ = ["Gpu", "Machine", "Problem", "inspect_machine", "parse_topology", "plan", "problems", "report"]
