# ruff: noqa: F821
# Sends each new shard in full, even the rows that a rank already has.
def moves(n, old, new):
    def ranges(ranks):
        sizes = comm.split_sizes(n, ranks)
        return [(sum(sizes[:r]), sum(sizes[: r + 1])) for r in range(ranks)]

    pairs = [(s, t, a, b) for s, a in enumerate(ranges(old)) for t, b in enumerate(ranges(new))]
    return [(s, t, max(a, c), min(b, d)) for s, t, (a, b), (c, d) in pairs if max(a, c) < min(b, d)]
