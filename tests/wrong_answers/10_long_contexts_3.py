# A zigzag in every row, which balances an even number of chunks on a rank, and no odd one.
def assign(chunks, ranks):
    shards = [[] for _ in range(ranks)]
    for chunk in range(chunks):
        row, place = divmod(chunk, ranks)
        shards[place if row % 2 == 0 else ranks - 1 - place].append(chunk)
    return shards
