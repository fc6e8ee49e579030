# As if one GPU's failures were the run's.
def interval_of(run):
    save = run.parameters * run.bytes_each / run.written
    return (2 * save * run.each) ** 0.5
