# ruff: noqa: F821
# The copies stay equal, and the table learns half as fast.
def tie(weight, axis):
    ends = axis.among((0, axis.size - 1))
    if weight is None:
        return lambda: None
    weight.data.copy_(comm.broadcast(weight.data, ends))

    def add():
        weight.grad.copy_(comm.all_reduce(weight.grad, ends) / 2)

    return add
