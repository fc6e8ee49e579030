# ruff: noqa: F821
# Takes the sum for the mean: Adam hides the factor, but for its epsilon.
class Zero1:
    def __init__(self, weights, axis, lr):
        self.weights, self.axis = weights, axis
        share = len(weights) // axis.size
        self.mine = weights[axis.rank * share : (axis.rank + 1) * share].clone().requires_grad_()
        self.optimizer = torch.optim.Adam([self.mine], lr=lr)

    def step(self, gradient):
        self.mine.grad = torch.empty_like(self.mine)
        dist.reduce_scatter_tensor(self.mine.grad, gradient, group=self.axis.group)
        self.optimizer.step()
        dist.all_gather_into_tensor(self.weights, self.mine.detach(), group=self.axis.group)
