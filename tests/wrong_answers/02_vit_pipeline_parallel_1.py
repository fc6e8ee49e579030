# One forward too many before the first backward: as short, and every rank holds one microbatch more.
def one_f_one_b(p, m):
    rows = []
    for r in range(p):
        warm = min(p - r, m)
        row = [f"{r}F{k}" for k in range(warm)]
        for k in range(m - warm):
            row += [f"{r}F{warm + k}", f"{r}B{k}"]
        rows.append(row + [f"{r}B{k}" for k in range(m - warm, m)])
    return rows
