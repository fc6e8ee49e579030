# Begins with the outermost axis, so that one changes first as ranks are counted.
def coordinates(rank, sizes, order):
    at = {}
    for axis in order:
        rank, at[axis] = divmod(rank, sizes[axis])
    return at
