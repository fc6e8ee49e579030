# The loudest axis innermost: but where it fits no host, the others may stay inside in its stead.
def place(job):
    return sorted(job.sent, key=lambda axis: job.sent[axis])
