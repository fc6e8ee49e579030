# Blames the longest bar, whose rank waited most.
def straggler(tl):
    return max(tl.ranks, key=lambda rank: sum(event.duration for event in tl.by_rank[rank]))
