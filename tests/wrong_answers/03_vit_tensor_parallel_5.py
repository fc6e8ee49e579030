# The fewest ranks that hold the states: with few tokens, replicas then spend the step on gradients.
def choose(job):
    able = [t for t in range(1, job.devices + 1) if job.devices % t == 0]
    return min(t for t in able if 16 * job.parameters / t <= job.cap)
