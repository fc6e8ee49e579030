"""What save_model writes of a model of one's own whose weights have two names, loaded by PyTorch alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

import hpnb


class Tied(nn.Module):
    """The output layer has the weight of the embedding, and a block is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        block = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([block, nn.Linear(4, 4), block])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]


def _save(path: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    plugin = hpnb.HybridParallelPlugin(precision="fp32", zero_stage=3)
    booster = hpnb.Booster(plugin=plugin)
    model = Tied()
    expected = {name: p.detach().clone() for name, p in model.state_dict().items()}
    boosted, *_ = booster.boost(model)
    booster.save_model(boosted, path / "one")
    booster.save_model(boosted, path / "several", size_per_shard=100)
    return expected


def test_a_weight_of_two_names_is_saved_once_and_loads_as_the_help_says(tmp_path: Path) -> None:
    expected = hpnb.launch(_save, tmp_path, ranks=2, device="cpu", timeout=120)[0]
    file = tmp_path / "one" / "model.safetensors"
    assert "head.weight" not in load_file(file)
    with pytest.raises(RuntimeError, match="Missing key"):
        Tied().load_state_dict(load_file(file))

    first, second, third = Tied(), Tied(), Tied()
    load_model(first, file)
    second.load_state_dict(load_file(file), strict=False)
    shards = sorted((tmp_path / "several").glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        third.load_state_dict(load_file(shard), strict=False)
    for model in (first, second, third):
        assert model.head.weight is model.embed.weight
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, expected[name])
