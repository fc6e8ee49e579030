# The sum over an edp group is divided by its size, as if the loss were a mean over these ranks only.
def reduces(rank, dp, pp, ep):
    dp_index, pp_index = divmod(rank, pp)
    router = [i * pp + pp_index for i in range(dp)]
    expert = [i * pp + pp_index for i in range(dp_index % ep, dp, ep)]
    return {"router": (router, dp), "expert": (expert, len(expert))}
