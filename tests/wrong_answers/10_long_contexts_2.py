# Keys, values and their gradients travel in the dtype of the keys; a ring adds gradients up in float32.
def sent(job):
    block = 2 * job.b * job.s / job.p * job.kv_heads * job.d * job.w
    return 2 * (job.p - 1) * block
