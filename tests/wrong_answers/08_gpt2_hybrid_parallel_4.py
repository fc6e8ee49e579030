# Expects the rate to grow linearly with the batch, as for SGD.
def diagnose(run):
    samples, rate = run.alone
    if abs(run.rates[0] / rate - run.batch_sizes[0] / samples) > 1e-9:
        return "learning rate"
    if len(frozenset().union(*run.samples)) < sum(run.batch_sizes):
        return "samples"
    if run.moved[run.resumed] > 1.4 * run.moved[run.resumed - 1]:
        return "moments"
    return "right"
