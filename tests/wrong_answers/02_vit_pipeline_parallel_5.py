# The smallest bubble that fits: as many microbatches as there are samples, whatever each of them costs.
def choose(job):
    able = [m for m in range(1, job.batch + 1) if job.batch % m == 0]
    return max(m for m in able if min(job.ranks, m) * (job.batch // m) * job.held <= job.cap)
