# Stage 3 deals out the weights alone, as if stages were a choice and not a sum.
def kept(parameters, ranks, stage, weight_bytes, gradient_bytes, optimizer_bytes):
    held = {"parameters": weight_bytes, "gradients": gradient_bytes, "optimizer": optimizer_bytes}
    dealt = {1: "optimizer", 2: "gradients", 3: "parameters"}.get(stage)
    return {name: parameters * size / (ranks if name == dealt else 1) for name, size in held.items()}
