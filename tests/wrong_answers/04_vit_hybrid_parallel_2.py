# The axis that sends most goes innermost. But if it fits no node, the others may stay inside instead.
def place(job):
    return sorted(job.sent, key=lambda axis: job.sent[axis])
