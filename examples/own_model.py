"""A model that no library knows, trained in every layout; and an nn.Sequential, which needs no page."""

import torch
import torch.nn.functional as F
from torch import nn

import hpnb
from hpnb.models import Anatomy, Part
from hpnb.models.role import linear, norm


class Layer(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, h=16, layers=4):
        super().__init__()
        self.embed, self.layers = nn.Linear(12, h), nn.ModuleList(Layer(h) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, 5)

    def forward(self, x):  # (B, s, 12) -> (B, 5)
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class Parts(Anatomy):  # the forward, taken apart: a pipeline cuts between blocks
    def embed(self, inputs):
        return self.embedding[0].module(inputs["x"])

    def run(self, block, hidden, inputs):
        return block.module(hidden)

    def finish(self, hidden, inputs):
        return self.head[1].module(self.head[0].module(hidden).mean(1))


def parts(net):
    blocks = tuple(Part(f"layers.{i}", layer) for i, layer in enumerate(net.layers))
    return Parts((Part("embed", net.embed),), blocks, (Part("norm", net.norm), Part("head", net.head)))


def roles(net):  # the page: how tensor parallelism cuts each weight
    page = [*linear("embed", "embedding"), *norm("norm"), *linear("head", "head")]
    for i, layer in enumerate(net.layers):
        neurons = layer.up.out_features  # a cut goes between them
        page += [*norm(f"layers.{i}.norm"), *linear(f"layers.{i}.up", "column", neurons)]
        page += linear(f"layers.{i}.down", "row", neurons)
    return dict(page)


def plain():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(72, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)
    )


def loss(outputs, batch):
    return F.cross_entropy(outputs, batch["labels"])


def train(make, layout, samples):
    hpnb.models.register(Net, parts, roles)
    torch.manual_seed(0)  # all ranks draw the same model, and keep their part of it
    model = make()
    plugin = hpnb.HybridParallelPlugin(precision="fp32", max_norm=1.0, **layout)
    booster = hpnb.Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(samples, batch_size=16 // plugin.dp_size, shuffle=True)
    model, optimizer, *_ = booster.boost(model, hpnb.HybridAdam(model.parameters(), lr=1e-2))
    losses = []
    for epoch in range(4):
        loader.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(len(loader)):
            optimizer.zero_grad()
            losses.append(booster.execute_pipeline(batches, model, loss, optimizer)["loss"])
            optimizer.step()
    return None if losses[0] is None else [round(float(losses[i]), 4) for i in (0, -1)]


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, 12, generator=generator)
    samples = [{"x": one, "labels": one.mean(0)[:5].argmax()} for one in x]
    with hpnb.Ranks(4) as ranks:
        for layout in ({}, {"zero_stage": 3}, {"pp_size": 4}, {"tp_size": 2, "pp_size": 2, "zero_stage": 1}):
            print("Net", layout, ranks.run(train, Net, layout, samples)[-1])
        for layout in ({}, {"zero_stage": 2}, {"pp_size": 2}):
            print("Sequential", layout, ranks.run(train, plain, layout, samples)[-1])
