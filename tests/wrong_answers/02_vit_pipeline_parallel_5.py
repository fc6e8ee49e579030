# The smallest bubble that fits: as many microbatches as there are samples, whatever each of them costs.
def choose(job):
    divisors = [m for m in range(1, job.batch + 1) if job.batch % m == 0]
    in_flight = {m: min(job.ranks, m) * (job.batch // m) for m in divisors}
    return max(m for m in divisors if in_flight[m] * job.activation_bytes <= job.memory_cap)
