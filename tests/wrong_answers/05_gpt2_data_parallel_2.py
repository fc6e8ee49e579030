# ruff: noqa: F821
# The blocks with the most activations first: fits, and recomputes more than it must.
def blocks_to_recompute(layers, head, budget):
    chosen = []
    for i in sorted(range(len(layers)), key=lambda i: -layers[i].activations):
        if exercises.peak_activations(layers, chosen, head) <= budget:
            break
        chosen.append(i)
    return chosen
