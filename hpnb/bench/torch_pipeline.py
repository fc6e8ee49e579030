"""PyTorch's pipelines: torch.distributed.pipelining over stages of transformers' model, and what they lack.

    pp         stages of bf16 weights with masters
    dp x pp    the same stages in DDP, or of float32 shards in FSDP2; pipelining reduces gradients only after
               the last microbatch
    tp x pp    stages of a model that `parallelize_module` has cut

Stages have the same layers as hpnb's. The last one computes the loss of its microbatch, so that no logits
pass through the schedule. GPT-2's embedding is also its head, on two stages. torch's pipelining knows no tied
weights, so both stages have a copy, and their gradients are summed after the schedule, as Megatron does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import hpnb
from hpnb.bench import torch_precision, torch_tensor_parallel
from hpnb.bench.program import Program
from hpnb.bench.tasks import BatchFeed, TrainingTask, cast_inputs
from hpnb.bench.torch_data_parallel import mean, mesh_of, shard, wrap_ddp
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2Size
from hpnb.ranks.process_group import collective_timeout

_AXES = ("dp", "pp", "tp")
ReplicaWrapper = Literal["ddp", "fsdp"]


def pipelined(
    kind: str,
    chunks: int,
    wrapper: ReplicaWrapper,
    how: torch_precision.Compiled,
    sequence: bool,
    task: TrainingTask,
    layout: ParallelLayout,
) -> Program:
    """A program of the schedule `kind`: Schedule1F1B, ScheduleInterleaved1F1B or ScheduleZBVZeroBubble.

    Args:
        chunks: stages of a rank; 1 for the first of them, and 2 for the last.
        wrapper: what stages of several replicas are wrapped in.
        how: "blocks" and "head" compile them, for schedules that do not split backwards.
        sequence: SequenceParallel too, along tp.

    Raises:
        ValueError: heads or tokens that do not divide.
    """
    num_microbatches = task.count_microbatches(layout)
    mesh = mesh_of(_AXES, (layout.dp, layout.pp, layout.tp))
    place, count = mesh["pp"].get_local_rank(), layout.pp * chunks
    v_shaped = kind == "ScheduleZBVZeroBubble"
    numbers = [place, count - 1 - place] if v_shaped else list(range(place, count, layout.pp))
    wide = layout.dp > 1 and wrapper == "fsdp"
    modules = _build_stages(task, mesh, numbers, count, wide, sequence, how)
    tied = _TiedEmbedding(mesh, modules, v_shaped) if isinstance(task.size, GPT2Size) else None
    wrapped: list[Any] = list(modules.values())
    if wide:
        for stage in wrapped:
            shard(task, stage, mesh["dp"], reshard=False)
    elif layout.dp > 1:
        wrapped = [wrap_ddp(stage, False, mesh["dp"].get_group()) for stage in wrapped]
    optimizer = torch_precision.adamw([p for stage in modules.values() for p in stage.parameters()], task.lr)
    coordinate = mesh["dp"].get_local_rank()
    feed, losses = BatchFeed(task, coordinate, layout.dp), list[torch.Tensor]()
    dtype = task.dtype
    rows = task.batch // layout.dp // num_microbatches
    stages = [
        _stage(task, module, i, count, rows, mesh, sequence)
        for i, module in zip(modules, wrapped, strict=True)
    ]
    kinds: Any = getattr(pipelining, kind)
    schedule = kinds(stages if chunks > 1 else stages[0], num_microbatches, loss_fn=_first)
    has_first, has_last = 0 in modules, count - 1 in modules

    def step() -> None:
        optimizer.zero_grad()
        inputs = cast_inputs(feed.batch, dtype)
        labels = inputs.pop("labels")
        args = tuple(inputs.values()) if has_first else ()
        kwargs = {"labels": labels, "target": labels, "losses": losses} if has_last else {}
        losses.clear()
        with torch_tensor_parallel.split_vocab_loss(task)() if layout.tp > 1 else nullcontext():
            schedule.step(*args, **kwargs)
        if tied is not None:
            tied.sum_gradients()
        optimizer.step()

    def loss() -> float:
        value = torch.zeros(())
        if has_last:
            value = torch.stack([one.detach().double() for one in losses]).mean()
        return mean(value.to(hpnb.device()), layout.dp * layout.tp)

    replicas = [p for stage in wrapped for p in stage.parameters()] if layout.dp > 1 and not wide else []
    return Program(step, loss, feed, replicas=lambda: replicas, dp_group=mesh["dp"].get_group())


# --- stages ----------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """Some layers of a model: rows or hidden states in, hidden states or a loss (1,) out."""

    def __init__(self, model: Any, layers: range, last: int) -> None:
        super().__init__()
        self.causal = model.config.model_type == "gpt2"
        core = model.transformer if self.causal else model.vit
        every_block = core.h if self.causal else core.layers
        self.first, self.last = layers.start == 0, layers.stop == last
        self.blocks = nn.ModuleList([every_block[i - 1] for i in layers if 0 < i < last - 1])
        if self.first and self.causal:
            self.words, self.places, self.drop = core.wte, core.wpe, core.drop
        elif self.first:
            self.embeddings = core.embeddings
        if self.last:
            self.norm, self.head = (
                (core.ln_f, model.lm_head) if self.causal else (core.layernorm, model.classifier)
            )
            if self.causal:  # a copy of the table of words
                weight = self.head.weight
                self.head.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if self.first and self.causal:
            places = torch.arange(x.size(1), device=x.device).unsqueeze(0)
            x = self.drop(self.words(x) + self.places(places))  # (b, s, h)
        elif self.first:
            x = self.embeddings(x)
        for block in self.blocks:
            x = block(x)
        if not self.last:
            return x
        assert labels is not None
        x = self.norm(x)
        if self.causal:
            loss = self.loss(self.head(x), labels)
        else:
            loss = F.cross_entropy(self.head(x[:, 0]).float(), labels)
        loss = loss.to_local() if isinstance(loss, DTensor) else loss
        return loss + loss.new_zeros(1)  # (1,), and no view, which FSDP2 warns of

    loss: Any = staticmethod(torch_precision.causal_loss)


def _build_stages(
    task: TrainingTask, mesh: DeviceMesh, numbers: Sequence[int], count: int, wide: bool, sequence: bool,
    how: torch_precision.Compiled,
) -> dict[int, Stage]:  # fmt: skip
    """The stages of these numbers; the rest of the model is freed."""
    model: Any = task.build()
    if not wide:
        model = model.to(task.dtype)
    tp, vocab_size = mesh["tp"], getattr(model.config, "vocab_size", 0)
    fused_loss = how == "head" and vocab_size > 0
    if tp.size() > 1:
        torch_tensor_parallel.parallelize(model, tp, sequence, fused_loss)
    ends = list(pairwise(accumulate(task.split_layers(count), initial=0)))
    stages = {i: Stage(model, range(*ends[i]), ends[-1][1]) for i in numbers}
    for stage in stages.values():
        torch_precision.compile_parts(stage, how)
        if stage.last and fused_loss:
            mask = (
                torch_tensor_parallel.padding_mask(vocab_size, tp, hpnb.device()) if tp.size() > 1 else None
            )
            stage.loss = torch_precision.with_loss(stage.head, mask)
        elif stage.last and stage.causal and (tp.size() == 1 or how != "no"):
            stage.loss = torch_precision.compiled(torch_precision.causal_loss)
    return stages


def _stage(
    task: TrainingTask, module: nn.Module, index: int, count: int, rows: int, mesh: DeviceMesh, sequence: bool
) -> pipelining.PipelineStage:
    """With its shapes, so that nothing is run to infer them."""
    size, dtype = task.size, task.dtype
    length = size.length if isinstance(size, GPT2Size) else size.tokens
    ranks = mesh["tp"].size() if sequence else 1
    between = torch.empty(
        rows, -(-length // ranks), size.hidden, dtype=dtype, device="meta", requires_grad=True
    )
    enters: torch.Tensor = between
    if index == 0 and isinstance(size, GPT2Size):
        enters = torch.empty(rows, length, dtype=torch.long, device="meta")
    elif index == 0:
        enters = torch.empty(rows, 3, size.image, size.image, dtype=dtype, device="meta")  # type: ignore[union-attr]
    leaves = torch.empty(1, device="meta", requires_grad=True) if index == count - 1 else between
    return pipelining.PipelineStage(
        module, index, count, hpnb.device(), input_args=(enters,), output_args=(leaves,),
        group=mesh["pp"].get_group(),
    )  # fmt: skip


def _first(loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The last stage's output is the loss. A view of it could not be detached, as ZBV wants to."""
    return loss.mean()


class _TiedEmbedding:
    """Sums the gradients of the embedding over the stages that have a copy of it."""

    def __init__(self, mesh: DeviceMesh, stages: dict[int, Stage], v_shaped: bool) -> None:
        self.ends = [stage for stage in stages.values() if stage.first or stage.last]
        # A group is made by all ranks, or by none: with a V both copies are on the first rank.
        columns = mesh.mesh.movedim(1, -1).flatten(0, 1)  # (dp tp, pp): the ranks of every pipeline
        self.group = None if v_shaped else _pairs(tuple(map(tuple, columns.tolist())))

    def sum_gradients(self) -> None:
        grads = torch_precision.gradients(
            (stage.words if stage.first else stage.head).weight for stage in self.ends
        )
        if len(grads) == 2:
            grads[0].add_(grads[1])
            grads[1].copy_(grads[0])
        elif grads:
            dist.all_reduce(grads[0], group=self.group)


@lru_cache(maxsize=4)
def _pairs(columns: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
    """The group of this pipeline's first and last rank. All ranks call it."""
    group_of_rank: dist.ProcessGroup | None = None
    for column in columns:
        group: Any = dist.new_group([column[0], column[-1]], timeout=collective_timeout())
        if hpnb.rank() in column:
            group_of_rank = group
    return group_of_rank
