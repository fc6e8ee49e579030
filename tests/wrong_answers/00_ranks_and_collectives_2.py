# Meets the same neighbour in every step: right for 2 ranks, half of the ranks are never heard on 4.
def doubling_all_reduce(x, rank, ranks, exchange):
    distance = 1
    while distance < ranks:
        x = x + exchange(x, rank ^ 1)
        distance *= 2
    return x
