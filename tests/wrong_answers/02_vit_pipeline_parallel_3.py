# Splits each backward of 1F1B where it stands: I is sent sooner, but W fills no gap.
def place_w(p, m):
    rows = []
    for r in range(p):
        warm = p - r - 1
        row = [f"{r}F{k}" for k in range(warm)]
        for k in range(m):
            row += [f"{r}F{warm + k}"] * (warm + k < m) + [f"{r}I{k}", f"{r}W{k}"]
        rows.append(row)
    return rows
