# ruff: noqa: F821
# The blocks that keep the most first: fits, and computes more again than it must.
def choose(layers, head, budget):
    chosen = []
    for i in sorted(range(len(layers)), key=lambda i: -layers[i].kept):
        if exercises.peak(layers, chosen, head) <= budget:
            break
        chosen.append(i)
    return chosen
