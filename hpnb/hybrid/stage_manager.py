"""Where a rank stands in its pipeline: who has the first stage, and who has the last, where the loss is.

pp_style     1f1b           zb-v (there and back)
rank         0 1 2 3        0 1 2 3
stages       0 1 2 3        0 1 2 3
                            7 6 5 4
last stage         *        *
"""

from __future__ import annotations

from dataclasses import dataclass

from hpnb.mesh import Axis
from hpnb.pipeline_parallel import Schedule


@dataclass(frozen=True)
class StageManager:
    """Of one rank. Without a pipeline it has the first stage and the last.

    Attributes:
        stage, num_stages: the rank's place along the pipeline, and how many ranks it has.
        stages: the numbers of the model's stages that are here; a rank may have several.
    """

    stage: int
    num_stages: int
    stages: tuple[int, ...]
    _last: int

    @staticmethod
    def of(axis: Axis, schedule: Schedule) -> StageManager:
        return StageManager(axis.rank, axis.size, tuple(schedule.stages_of(axis.rank)), schedule.stages - 1)

    def is_first_stage(self) -> bool:
        """Whether this rank has the model's first stage, which takes the inputs."""
        return 0 in self.stages

    def is_last_stage(self) -> bool:
        """Whether this rank has the model's last stage, which gives the outputs and the loss."""
        return self._last in self.stages
