# ruff: noqa: F821
# A sum of one block and of zeros is that block: exact, and twice the bytes of a broadcast.
def panel(c, a, b, k, across, down):
    left = comm.all_reduce(a if across.rank == k else torch.zeros_like(a), across)
    right = comm.all_reduce(b if down.rank == k else torch.zeros_like(b), down)
    return c + left @ right
