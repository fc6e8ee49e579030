"""PyTorch's own tensor parallelism of a transformers ViT or GPT-2: `parallelize_module` and DTensor.

    q, k, v, mlp up           ColwiseParallel
    projection, mlp down      RowwiseParallel
    norms                     SequenceParallel, if tokens are sharded
    attention, mlp            PrepareModuleInput, so that q, k and v share one gather and one reduction
    embedding, head           RowwiseParallel, ColwiseParallel, loss_parallel

Model class and weights are those that hpnb gets. Outside of these layers tensors are plain, which costs less
CPU time than DTensors. Two things have no plan in PyTorch, so they get the best form that has one:

- GPT-2's `Conv1D` becomes an nn.Linear. Of q, k and v, which are one weight, the rows are sorted so
  that a rank's slice of it is [q_r | k_r | v_r]: one matmul, as in the model itself.
- `SequenceParallel` of plain tensors needs equally many tokens on every rank. A ViT's 197 tokens are padded
with
  zeros, which nothing attends to: keys and values are sliced to 197, so attention needs no mask.
  (DTensors may be uneven, but with torch 2.11 a linear layer fails on one that has been gathered.)

The gradients of norms that `SequenceParallel` leaves partial are summed by the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import AttentionInterface, GPT2LMHeadModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hpnb
from hpnb.bench import torch_precision
from hpnb.bench.program import Program
from hpnb.bench.tasks import TrainingTask
from hpnb.bench.torch_data_parallel import accumulating, mesh_of, shard
from hpnb.bench.torch_precision import Compiled
from hpnb.mesh import Axis, ParallelLayout
from hpnb.models import GPT2Size, ViTSize

# Of a block: module -> (its positional arguments, its column layers, its row layer).
_Regions = Mapping[str, tuple[int, tuple[str, ...], str]]
_VIT: _Regions = {
    "attention": (2, ("q_proj", "k_proj", "v_proj"), "o_proj"),
    "mlp": (1, ("fc1",), "fc2"),
}
_VOCAB_MULTIPLE = 64  # rows of a rank, if the embedding is padded
_GPT2: _Regions = {"attn": (1, ("c_attn",), "c_proj"), "mlp": (1, ("c_fc",), "c_proj")}


def tensor_parallel(how: Compiled, sequence: bool, task: TrainingTask, layout: ParallelLayout) -> Program:
    """A program whose matrices are sharded over tp; with dp the model is of float32 weights in FSDP2.

    With head and loss compiled as one the embedding is padded first: 50,257 rows cannot be sharded evenly,
    and matmuls of odd rows are slow.

    Raises:
        ValueError: heads or tokens that do not divide.
    """
    mesh = mesh_of(("dp", "tp"), (layout.dp, layout.tp))
    model: Any = task.build()
    if layout.dp == 1:
        model = model.to(task.dtype)
    vocab_size = getattr(model.config, "vocab_size", 0)
    fused_loss = how in ("head", "async") and vocab_size > 0
    parallelize(model, mesh["tp"], sequence, fused_loss)
    if fused_loss:
        mask = padding_mask(vocab_size, mesh["tp"], hpnb.device())
        model.loss_function = torch_precision.with_loss(model.lm_head, mask)
    elif vocab_size and how != "no":
        model.loss_function = torch_precision.compiled(torch_precision.causal_loss)
    torch_precision.compile_parts(model, how)
    if layout.dp > 1:
        shard(task, model, mesh["dp"], reshard=False)
    optimizer = torch_precision.adamw(model.parameters(), task.lr)
    sends = model if layout.dp > 1 else None
    return accumulating(
        task, layout, model, optimizer, sends, within=split_vocab_loss(task), reshard=layout.dp == 1
    )


def split_vocab_loss(task: TrainingTask) -> Callable[[], AbstractContextManager[Any]]:
    """What forward and backward of a GPT-2's logits run in, because they are split by tokens of the
    vocabulary."""
    return loss_parallel if isinstance(task.size, GPT2Size) else nullcontext


def parallelize(
    model: nn.Module, axis: Axis | DeviceMesh, sequence_parallel: bool, fused_loss: bool = False
) -> nn.Module:
    """Cut `model` along `axis`, in place, as PyTorch's documentation does it, and return it.

    Args:
        model: a ViTForImageClassification or a GPT2LMHeadModel without dropout, equal on all ranks.
        axis: or a mesh of one dim, as a larger one's `mesh["tp"]`.
        fused_loss: of a GPT-2, leave to the loss function what the output layer does. It gets hidden states
            as a DTensor, replicated, and the embedding, sharded and padded with rows of zeros
            so that every rank has a multiple of 64 (`padding_mask`).

    Raises:
        ValueError: heads, or a GPT-2's positions, that do not divide by the ranks.
    """
    transformer: Any = model
    heads = transformer.config.num_attention_heads
    ranks = axis.size if isinstance(axis, Axis) else axis.size()
    if heads % ranks:
        raise ValueError(f"torch's plan cannot give {ranks} ranks as many of {heads} heads each")
    where = next(model.parameters()).device.type
    mesh = DeviceMesh.from_group(axis.group, where) if isinstance(axis, Axis) else axis
    if isinstance(model, GPT2LMHeadModel):
        _gpt2(model, mesh, sequence_parallel, fused_loss)
    else:
        _vit(model, mesh, sequence_parallel)
    return model


def padding_mask(vocab_size: int, mesh: DeviceMesh, device: torch.device) -> DTensor:
    """(padded vocabulary size,), sharded: added to logits, so that padding has no share of the
    probability."""
    added = torch.zeros(vocab_size + -vocab_size % (_VOCAB_MULTIPLE * mesh.size()), device=device)
    added[vocab_size:] = -torch.inf
    return distribute_tensor(added, mesh, [Shard(0)])


def note(size: ViTSize | GPT2Size, ranks: int) -> str:
    """What a table says of `sequence_parallel` behind its name: " (200 tokens)" where 197 do not divide."""
    tokens = size.tokens if isinstance(size, ViTSize) else size.length
    return f" ({tokens + -tokens % ranks} tokens)" if tokens % ranks else ""


# --- ViT -------------------------------------------------------------------------------------------------


def _vit(model: Any, mesh: DeviceMesh, sequence: bool) -> None:
    core = model.vit
    for block in core.layers:
        parallelize_module(block, mesh, _plan(_VIT, ("layernorm_before", "layernorm_after"), sequence))
    if not sequence:
        return
    tokens = core.embeddings.position_embeddings.size(1)
    if behind := -tokens % mesh.size():
        core.embeddings.register_forward_hook(lambda module, args, x: F.pad(x, (0, 0, 0, behind)))
        name = f"sdpa_of_{tokens}"
        AttentionInterface.register(name, partial(_attend_to, tokens))
        model.set_attn_implementation(name)
    parallelize_module(core.embeddings, mesh, _scatter_tokens())
    parallelize_module(core.layernorm, mesh, SequenceParallel())
    gathers = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    parallelize_module(core.layernorm, mesh, gathers)


def _attend_to(tokens: int, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               mask: None, **options: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention of (b, a, s, d), whose keys and values count up to `tokens`."""
    return sdpa_attention_forward(module, q, k[:, :, :tokens], v[:, :, :tokens], mask, **options)  # type: ignore[no-any-return]


# --- GPT-2 -----------------------------------------------------------------------------------------------


def _gpt2(model: Any, mesh: DeviceMesh, sequence: bool, fused_loss: bool) -> None:
    core, ranks = model.transformer, mesh.size()
    if sequence and core.config.n_positions % ranks:
        raise ValueError(
            f"torch's plan cannot give {ranks} ranks as many of {core.config.n_positions} tokens each"
        )
    if fused_loss:
        words = core.wte.weight.detach()
        core.wte.weight = nn.Parameter(F.pad(words, (0, 0, 0, -len(words) % (_VOCAB_MULTIPLE * ranks))))
    for block in core.h:
        for parent, first in ((block.attn, "c_attn"), (block.mlp, "c_fc")):
            for name in (first, "c_proj"):
                pieces = 3 if name == "c_attn" else 1
                setattr(parent, name, _linear(getattr(parent, name), pieces, ranks))
        block.attn.split_size //= ranks
        parallelize_module(block, mesh, _plan(_GPT2, ("ln_1", "ln_2"), sequence))
    if sequence:
        # The model reads the sequence's length off the words, so they are DTensors up to the first block.
        table = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
        parallelize_module(core.wte, mesh, table)
        parallelize_module(core.wpe, mesh, _scatter_tokens(local=False))
        parallelize_module(
            core.drop, mesh, PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Shard(1))
        )
        parallelize_module(core.ln_f, mesh, SequenceParallel())
    else:
        parallelize_module(core.wte, mesh, RowwiseParallel(input_layouts=Replicate()))
    enters = Shard(1) if sequence else Replicate()
    head: ParallelStyle = ColwiseParallel(input_layouts=enters, use_local_output=False)
    if fused_loss:
        head = PrepareModuleInput(input_layouts=(enters,), desired_input_layouts=(Replicate(),))
    parallelize_module(model.lm_head, mesh, head)
    model.lm_head.weight = core.wte.weight  # tied again: both are cut by words
    model.loss_function = torch_precision.causal_loss


def _linear(conv: Any, pieces: int, ranks: int) -> nn.Linear:
    """The same layer with its weight (out, in); outputs are sorted by rank, and then by piece."""
    inputs, outputs = conv.weight.shape
    linear = nn.Linear(inputs, outputs, device="meta")

    def sort_by_rank(x: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(x.unflatten(0, (pieces, ranks, -1)).transpose(0, 1).flatten(0, 2).contiguous())

    with torch.no_grad():
        linear.weight, linear.bias = sort_by_rank(conv.weight.t()), sort_by_rank(conv.bias)
    return linear


# --- plans -----------------------------------------------------------------------------------------------


def _plan(regions: _Regions, norms: tuple[str, ...], sequence: bool) -> dict[str, Any]:
    """Of a block: tensors go in and come out replicated, or sharded along the tokens."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {norm: SequenceParallel() for norm in norms} if sequence else {}
    for path, (arguments, columns, row) in regions.items():
        others = (None,) * (arguments - 1)
        # Where nothing is to be gathered it still sums the gradients of q, k and v before they are reduced.
        plan[path] = PrepareModuleInput(
            input_layouts=(between, *others), desired_input_layouts=(Replicate(), *others)
        )
        plan |= {f"{path}.{column}": ColwiseParallel() for column in columns}
        plan[f"{path}.{row}"] = RowwiseParallel(output_layouts=between)
    return plan


def _scatter_tokens(local: bool = True) -> PrepareModuleOutput:
    """(b, s, h) on all ranks -> this rank's tokens."""
    return PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=local
    )
