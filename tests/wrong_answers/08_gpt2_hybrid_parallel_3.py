# ruff: noqa: F821
# Never sets the epoch: the second one repeats the first one's order, or has no batch left.
def train(run, folder, steps, every):
    parts = run.model, run.optimizer, run.scheduler, run.loader
    saved, done = sorted(Path(folder).glob("step-*")), 0
    if saved:
        run.booster.load(saved[-1], *parts)
        done = int(saved[-1].name.removeprefix("step-"))
    while done < steps:
        for batch in run.loader:
            run.step(batch)
            done += 1
            if done % every == 0:
                run.booster.save(f"{folder}/step-{done:05d}", *parts)
            if done == steps:
                return
