# ZeRO-3 shards the weights alone, as if ZeRO stages were a choice and not a sum.
def state_bytes(P, ranks, stage, weight_bytes, gradient_bytes, optimizer_bytes):
    sizes = {"parameters": weight_bytes, "gradients": gradient_bytes, "optimizer": optimizer_bytes}
    sharded = {1: "optimizer", 2: "gradients", 3: "parameters"}.get(stage)
    return {name: P * size / (ranks if name == sharded else 1) for name, size in sizes.items()}
