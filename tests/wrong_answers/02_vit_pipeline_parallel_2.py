# All microbatches through one chunk, then through the next: as short, and everything is in flight at once.
def interleave(p, m):
    rows = []
    for r in range(p):
        forward = [f"{stage}F{k}" for stage in (r, r + p) for k in range(m)]
        rows.append(forward + [f"{stage}B{k}" for stage in (r + p, r) for k in range(m)])
    return rows
