# Takes the share of the bytes for the share of the latency.
def bucket_bytes(wire, ranks, share):
    return ranks * wire.latency * wire.bandwidth * share / (1 - share)
