# Looks for ranks that saw the same in one step, and so takes shuffling for oneself for sharding.
def diagnose(seen):
    effective = sum(len(set().union(*step)) for step in seen) / len(seen)
    alike = all(part == step[0] for step in seen for part in step)
    return ("same order" if alike else "sharded"), effective
