# Divides everything by t: without sequence parallelism 10 of the 34 stay whole.
def kept(layer):
    sbh = layer.s * layer.b * layer.h
    if layer.recompute == "full":
        return 2 * sbh
    scores = 0 if layer.recompute else 5 * layer.a * layer.s / layer.h
    return sbh * (34 + scores) / layer.t
