# Looks at copies alone. They also diverge if nobody reduces gradients over dp.
def diagnose(run):
    return "swapped" if max(run.distances.values()) > 0 else "correct"
