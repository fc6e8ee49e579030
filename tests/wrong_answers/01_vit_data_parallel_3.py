# ruff: noqa: F821
# The law's tokens and everybody's 25 MB: fine where latency is small, not on 64 ranks.
def plan(wire, ranks, rate, parameters):
    return 25e6, theory.dp_tokens_to_hide(rate / wire.bandwidth, ranks)
