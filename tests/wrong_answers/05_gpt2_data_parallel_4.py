# The mean of every step's ratio: a step whose signal is lost in noise decides alone.
def scale_from_norms(per_rank, reduced, small):
    ranks, ratios = len(per_rank[0]), []
    big = small * ranks
    for norms, B in zip(per_rank, reduced, strict=True):
        b = sum(norms) / ranks
        ratios.append((b - B) / (1 / small - 1 / big) / ((big * B - small * b) / (big - small)))
    return sum(ratios) / len(ratios)
