# ruff: noqa: F821
# The fastest of all, whether it fits or not.
from itertools import product


def fit(job):
    able = []
    for tp, pp, chunks in product(range(1, job.run.heads + 1), range(1, job.run.layers + 1), range(1, 11)):
        plan = ParallelLayout(job.gpus // (pp * tp), pp, tp, chunks=chunks)
        if job.refusal(plan) is None:
            able.append(plan)
    return min(able, key=job.seconds)
