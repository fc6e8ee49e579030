# Begins with the outermost axis: then that one changes first as ranks are counted.
def coordinates(rank, sizes, order):
    found = {}
    for axis in order:
        rank, found[axis] = divmod(rank, sizes[axis])
    return found
