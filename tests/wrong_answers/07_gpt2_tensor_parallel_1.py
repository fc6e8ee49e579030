# ruff: noqa: F821
# The last rank takes what is left over: 23 heads over 4 ranks are 5, 5, 5 and 8.
def share(qkv, bias, out, heads, axis):
    d, each = out.size(0) // heads, heads // axis.size
    last = axis.rank == axis.size - 1
    mine = slice(d * each * axis.rank, out.size(0) if last else d * each * (axis.rank + 1))
    columns = torch.cat([part[:, mine] for part in qkv.chunk(3, 1)], 1)
    return columns, torch.cat([part[mine] for part in bias.chunk(3)]), out[mine]
