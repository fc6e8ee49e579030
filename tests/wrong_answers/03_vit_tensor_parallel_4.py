# ruff: noqa: F821
# A sum of one block and of zeros is that block: exact, and twice the bytes of a broadcast.
def panel(c, a, b, t, across, down):
    left = comm.all_reduce(a if across.rank == t else torch.zeros_like(a), across)
    right = comm.all_reduce(b if down.rank == t else torch.zeros_like(b), down)
    return c + left @ right
