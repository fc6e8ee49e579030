"""Context and expert parallelism over two nodes: what crosses the link, and the steps are one process's.

first  10.77.0.1   rank 0       cp 2, or dp 2 = ep 2, under torchrun
  | 200 Mbit/s
second 10.77.0.2   rank 1
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_expert_parallel import batch, build
from test_hosts import HOSTS, spaces, torchrun_on_hosts  # noqa: F401, a fixture

import hpnb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS, WARM_UP = 4, 1  # the first step learns shapes and connects
OPTIONS: dict[str, dict[str, Any]] = {"cp": {"cp_size": 2}, "ep": {"ep_size": 2}}

PROGRAM = """
import json, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import hpnb
from test_hosts_axes import train

folder, options = Path(sys.argv[2]), json.loads(sys.argv[3])
hpnb.launch_from_torch(seed=1)
(folder / f"rank-{hpnb.rank()}").write_text(json.dumps(train(options, str(folder / "model"))))
"""


def sent_by_node() -> int:
    """Bytes that have left this node."""
    names = [path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith("hpnb")]
    return sum(int(Path("/sys/class/net", n, "statistics/tx_bytes").read_text()) for n in names)


def train(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """A few steps of a mixture of experts, what was counted along each axis, and what left the node."""
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", **options))
    model = build("Qwen3Moe")
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    dp = booster.plugin.mesh.dp
    samples = {name: value.chunk(dp.size)[dp.rank] for name, value in batch(64).items()}
    losses = []

    def step() -> None:
        optimizer.zero_grad()
        loss = boosted(**samples).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())

    for _ in range(WARM_UP):
        step()
    dist.barrier()
    before = sent_by_node()
    with hpnb.record.traffic() as traffic:
        for _ in range(WARM_UP, STEPS):
            step()
    dist.barrier()
    left = sent_by_node() - before
    booster.save_model(boosted, folder)
    counted = {axis: float(nbytes) for axis, nbytes in traffic.bytes.items()}
    return {"losses": losses, "counted": counted, "left": left, "node": os.uname().nodename}


@pytest.mark.parametrize("axis", OPTIONS)
def test_steps_over_two_nodes_are_one_process(
    axis: str,
    spaces: dict[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    program = ("program.py", str(Path(__file__).parent), str(tmp_path), json.dumps(OPTIONS[axis]))
    torchrun_on_hosts(spaces, tmp_path, 1, 29511, *program, seconds=600)
    ranks = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    assert [rank["node"] for rank in ranks] == list(HOSTS)

    alone = hpnb.launch(train, {}, str(tmp_path / "one"), ranks=1, device="cpu", timeout=300)[0]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        assert rank["counted"][axis] > 10_000
        total = sum(rank["counted"].values())
        print(f"{axis} on {rank['node']}: {rank['counted']}, left the node {rank['left']:,}, "
              f"{rank['left'] / total:.3f} of what is counted")  # fmt: skip
        assert 1.0 <= rank["left"] / total < 1.25  # headers and acknowledgements
    assert alone["losses"][-1] < alone["losses"][0] - 1e-3
    saved, one = (load(tmp_path / folder) for folder in ("model", "one"))
    assert saved.keys() == one.keys()
    for name, value in one.items():
        assert float((saved[name] - value).norm()) < 1e-12 * max(float(value.norm()), 1e-3), name


def load(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
