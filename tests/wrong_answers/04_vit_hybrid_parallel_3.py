# Looks at copies alone: they part as well where nobody sums gradients over dp.
def diagnose(run):
    return "swapped" if max(run.copies.values()) > 0 else "right"
