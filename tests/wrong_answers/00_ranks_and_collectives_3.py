# Takes the share of the bytes for the share of the latency.
def bucket_bytes(link, ranks, share):
    return ranks * link.latency * link.bandwidth * share / (1 - share)
