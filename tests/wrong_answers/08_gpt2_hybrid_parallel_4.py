# Looks at the loss, which falls or not for other reasons.
def diagnose(run):
    return "right" if run.losses[-1] < run.losses[0] else "learning rate"
