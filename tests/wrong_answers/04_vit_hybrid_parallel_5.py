# ruff: noqa: F821
# Sends each new share whole, what the rank has already included.
def moves(n, old, new):
    def ends(ranks):
        sizes = comm.split_sizes(n, ranks)
        return [(sum(sizes[:r]), sum(sizes[: r + 1])) for r in range(ranks)]

    pairs = [(s, t, a, b) for s, a in enumerate(ends(old)) for t, b in enumerate(ends(new))]
    return [(s, t, max(a, c), min(b, d)) for s, t, (a, b), (c, d) in pairs if max(a, c) < min(b, d)]
