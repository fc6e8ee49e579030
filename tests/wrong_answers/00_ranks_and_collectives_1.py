# Stops after the reduce-scatter: each rank holds one finished chunk, and returns its unfinished ones as well.
def ring_all_reduce(chunks, rank, exchange):
    n = len(chunks)
    for s in range(n - 1):
        chunks[(rank - s - 1) % n] += exchange(chunks[(rank - s) % n])
    return chunks
