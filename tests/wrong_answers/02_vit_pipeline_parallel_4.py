# ruff: noqa: F821
# Looks at work alone: every gap that no heavy rank explains is put down to too few microbatches.
def diagnose(tl):
    work = {rank: tl.work(rank) for rank in tl.ranks}
    most = max(work, key=work.get)
    if work[most] > 1.2 * statistics.median(work.values()):
        return "heavy stage", most
    return "few microbatches", None
