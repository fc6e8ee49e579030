"""PyTorch's programs of tensor parallelism: `parallelize_module`, and FSDP2 around it.

tp         bf16 weights with masters, the head cut by words with loss_parallel, blocks compiled
dp x tp    the same plan of float32 weights on a mesh of two dims, sharded by FSDP2 along dp

Of GPT-2 blocks and loss are compiled. With head and loss as one the table of words is padded first: 50,257
rows cannot be dealt out evenly, and products of odd rows are slow.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

import hpnb
from hpnb.bench import torch_precision, torch_tensor_parallel
from hpnb.bench.layouts import Shape
from hpnb.bench.program import Program
from hpnb.bench.tasks import Task
from hpnb.bench.torch_data_parallel import accumulating, mesh_of, shard
from hpnb.bench.torch_precision import Compiled
from hpnb.models import GPT2Size


def parallelized(how: Compiled, sequence: bool, task: Task, shape: Shape) -> Program:
    """All ranks share each matrix.

    Raises:
        ValueError: heads or tokens that do not divide.
    """
    mesh = mesh_of(("tp",), (shape.tp,))
    model = _cut(how, sequence, task.build().to(torch_precision.narrow(task)), mesh)
    optimizer = torch_precision.adamw(model.parameters(), task.lr)
    return accumulating(task, shape, model, optimizer, within=by_words(task))


def sharded(how: Compiled, sequence: bool, task: Task, shape: Shape) -> Program:
    """tp innermost, and FSDP2 along dp.

    Raises:
        ValueError: heads or tokens that do not divide.
    """
    mesh = mesh_of(("dp", "tp"), (shape.dp, shape.tp))
    model = _cut(how, sequence, task.build(), mesh["tp"])
    shard(task, model, mesh["dp"], reshard=False)
    optimizer = torch_precision.adamw(model.parameters(), task.lr)
    return accumulating(task, shape, model, optimizer, model, within=by_words(task), reshard=False)


def _cut(how: Compiled, sequence: bool, model: Any, mesh: DeviceMesh) -> nn.Module:
    words = getattr(model.config, "vocab_size", 0)
    whole = how in ("head", "async") and words > 0
    torch_tensor_parallel.parallelize(model, mesh, sequence, whole)
    if whole:
        model.loss_function = torch_precision.with_loss(
            model.lm_head, torch_tensor_parallel.hidden_words(words, mesh, hpnb.device())
        )
    elif words and how != "no":
        model.loss_function = torch_precision.compiled(torch_precision.causal_loss)
    torch_precision.compile_parts(model, how)
    return model  # type: ignore[no-any-return]


def by_words(task: Task) -> Callable[[], AbstractContextManager[Any]]:
    """What forward and backward of logits that are cut run in; a ViT's are whole."""
    return loss_parallel if isinstance(task.size, GPT2Size) else nullcontext
