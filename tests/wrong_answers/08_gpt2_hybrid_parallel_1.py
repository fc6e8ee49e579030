# Blames the part with the largest factor, and not the one with the most seconds.
def explain(rows):
    def off(row):
        ratio = sum(row.measured.values()) / sum(row.predicted.values())
        return max(ratio, 1 / ratio)

    worst = max(rows, key=off)
    part = max(worst.measured, key=lambda p: worst.measured[p] / max(worst.predicted[p], 1e-12))
    why = {"bubble": "stages", "computing": "kernels"}.get(part, "link")
    return str(worst.plan), part, why
