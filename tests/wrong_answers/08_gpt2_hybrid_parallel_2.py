# ruff: noqa: F821
# The fastest that fits, on all ranks: as if ranks cost nothing.
from itertools import product


def choose(job):
    sizes = [n for n in range(1, job.ranks + 1) if job.ranks % n == 0]
    able = []
    for dp, pp, tp, m, zero in product(sizes, sizes, sizes, sizes, range(4)):
        plan = ParallelLayout(dp, pp, tp, m if pp > 1 else 1, zero)
        if plan.world_size == job.ranks and job.refusal(plan) is None and job.peak_bytes(plan) <= job.memory:
            able.append(plan)
    return min(able, key=job.seconds)
