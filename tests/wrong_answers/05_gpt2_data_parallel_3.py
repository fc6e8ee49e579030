# One ahead in the order of the model, in the backward too, which goes the other way.
def plan_gathers(step):
    last = len(step.sizes) - 1
    forward = [[0, 1], *[[i + 1] for i in range(1, last)], []]
    return [*forward, [], *[[i] for i in reversed(range(last))]]
