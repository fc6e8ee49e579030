# Weights and momenta alone: the samples begin anew, and so does the learning rate.
def save(run, folder):
    run.booster.save(folder, run.model, run.optimizer)


def resume(run, folder):
    run.booster.load(folder, run.model, run.optimizer)
