# ruff: noqa: F821
# Takes the sum for the mean: Adam hides the factor, but for its epsilon.
class Zero1:
    def __init__(self, weights, axis, lr):
        self.weights, self.axis = weights, axis
        n = len(weights) // axis.size
        self.shard = weights[axis.rank * n : (axis.rank + 1) * n].clone().requires_grad_()
        self.optimizer = torch.optim.Adam([self.shard], lr=lr)

    def step(self, gradient):
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(self.shard.grad, gradient, group=self.axis.group)
        self.optimizer.step()
        dist.all_gather_into_tensor(self.weights, self.shard.detach(), group=self.axis.group)
