# ZB-H1 whatever the memory: the last rank holds four microbatches' logits, and more room is not used.
def plan(job):
    rows = []
    for r in range(job.ranks):
        ahead = job.ranks - r
        row = [f"{r}F{k}" for k in range(ahead)]
        for k in range(job.microbatches):
            row.append(f"{r}I{k}")
            if k >= r:
                row.append(f"{r}W{k - r}")
            if k + ahead < job.microbatches:
                row.append(f"{r}F{k + ahead}")
        rows.append(row + [f"{r}W{k}" for k in range(job.microbatches - r, job.microbatches)])
    return rows
