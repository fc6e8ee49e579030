# Fills stages up to the mean: the last one gets what is left over.
def partition(costs, stages):
    fair, counts, load = sum(costs) / stages, [0], 0.0
    for i, cost in enumerate(costs):
        left = len(costs) - i
        if counts[-1] and len(counts) < stages and (load + cost > fair or left <= stages - len(counts)):
            counts.append(0)
            load = 0.0
        counts[-1] += 1
        load += cost
    return counts
