# ruff: noqa: F821
# Ranks that don't have the target add some other logit: the clamped index is looked up and not masked.
def loss(logits, targets, first, axis):
    counts = targets != -100
    m = logits.detach().amax(1)
    dist.all_reduce(m, dist.ReduceOp.MAX, axis.group)
    S = comm.all_reduce((logits - m[:, None]).exp().sum(1), axis)
    own = (targets - first).clamp(0, logits.size(1) - 1)
    z = comm.all_reduce(logits.gather(1, own[:, None])[:, 0], axis)
    return torch.where(counts, m + S.log() - z, 0.0).sum(), counts.sum()
