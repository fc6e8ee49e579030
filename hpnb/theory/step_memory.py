"""What a training step takes at its peak: states, activations, temporary buffers, at a few moments.

    start --- forward ---> turn --- backward of block L-1 ... 0 ---> end --- step --->
              activations  |  logits                             gradients    16-bit weights: float32
              grow         |  three times                        complete     gradients of master weights

The peak is the largest of these moments (`step_moments`), whatever the model and the program:

    turn      the activations of all blocks, and of the outputs and the loss
    block i   the activations of the blocks up to i, and the gradients that flow around block i
    end       all gradients, and no activations
    step      the same, and what the optimizer copies

Two programs fill them with terms. `step_memory` has those of an eager GPT-2 on the T = b s tokens of one
rank, with values of w bytes: its blocks keep L x `tensor_memory.activation_terms`, its loss 12 V T (float32
log-probabilities, and two gradients of that size), and master weights take 4 bytes more for every parameter
of a rank while they step 16-bit weights. `plan_memory` has those of any transformer in any layout, as hpnb
trains it: compiled blocks, a loss in chunks, pipelines, experts and an optimizer in passes.

A recomputed block keeps only its input, w T h, and all its activations during its backward. The gradient of
tied embeddings, w V h, starts with the head and waits for the embedding's half until the end. In stage 3 the
weights outside the blocks stay gathered, `prefetch` blocks are gathered ahead of the one that computes, and a
block's full gradients exist a second time while they are sent.

Stages 0 and 1 keep gradient buffers from step to step. In stages 2 and 3 a gradient lives from its backward
to its reduction, and 1/N of it until the next step starts. Rajbhandari et al. 2020, *ZeRO* (arXiv
1910.02054), sections 3 and 5; Chen et al. 2016 (arXiv 1604.06174) for recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hpnb.theory.model_states import model_states
from hpnb.theory.tensor_memory import activation_terms
from hpnb.theory.transformer import Block


@dataclass(frozen=True)
class StepTerms:
    """What the moments of a step are made of, in bytes on one rank.

    Attributes:
        weights, optimizer, workspaces: at every moment.
        kept_gradients: from step to step.
        added_gradients: that all microbatches add to, until the last backward reduces them.
        complete_gradients: at the end of the backward, besides those that are kept.
        other_microbatches: activations of those in flight.
        head_kept, head_passing: of outputs and loss, for the backward, and while they are computed.
        table_gradient: of tied embeddings, from the head's backward to the embedding's.
        gathered: weights outside of blocks, where weights are sharded.
        gathered_ahead: blocks that are gathered when the backward begins.
        sending: gradients that are sent at the end.
        copies: of the optimizer.
    """

    weights: float
    optimizer: float
    kept_gradients: float = 0.0
    added_gradients: float = 0.0
    complete_gradients: float = 0.0
    other_microbatches: float = 0.0
    head_kept: float = 0.0
    head_passing: float = 0.0
    table_gradient: float = 0.0
    gathered: float = 0.0
    gathered_ahead: float = 0.0
    sending: float = 0.0
    copies: float = 0.0
    workspaces: float = 0.0


@dataclass(frozen=True)
class Moment:
    """Bytes on one rank at one moment of a step, in the categories of `hpnb.record.MemoryProfile`."""

    name: str
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary


@dataclass(frozen=True)
class StepMemory:
    """The moments at which a step may reach its peak, in order of time."""

    moments: tuple[Moment, ...]

    @property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def peak(self) -> float:
        """Bytes."""
        return self.fullest.total


def step_moments(
    terms: StepTerms,
    layers: int,
    kept: Callable[[int], float],
    passing: Callable[[int], float],
    blocks: Iterable[int],
) -> StepMemory:
    """The moments of a step through some blocks, in order of time.

    Args:
        kept: bytes that the first n of its blocks keep of a microbatch, by n.
        passing: bytes that the backward of block i needs and gives back, by i.
        blocks: whose backward is looked at, of 0 to layers - 1, the last first.
    """

    def at(name: str, gradients: float, activations: float, temporary: float) -> Moment:
        return Moment(
            name, terms.weights, terms.kept_gradients + gradients, terms.optimizer, activations,
            terms.workspaces + temporary,
        )  # fmt: skip

    added, complete, around = terms.added_gradients, terms.complete_gradients, terms.gathered
    moments = [
        at("turn", added, terms.other_microbatches + kept(layers) + terms.head_kept,
           terms.head_passing + around + terms.gathered_ahead)
    ]  # fmt: skip
    around += terms.table_gradient
    for i in blocks:
        share = added or (layers - 1 - i) / layers * complete
        moments.append(at(f"block {i}", share, terms.other_microbatches + kept(i + 1), around + passing(i)))
    moments.append(at("end", max(added, complete), 0.0, around + terms.sending))
    moments.append(at("step", complete, 0.0, terms.copies))
    return StepMemory(tuple(moments))


def step_memory(
    block: Block,
    layers: int,
    vocab_size: int,
    positions: int,
    ranks: int = 1,
    stage: int = 0,
    *,
    recompute: int = 0,
    offload: bool = False,
    bucket_bytes: float = 25 * 2**20,
    prefetch: int = 1,
    mlp_copies: int = 5,
    optimizer_bytes: float | None = None,
) -> StepMemory:
    """The memory of a step of a GPT-2 with tied embeddings on one of `ranks` ranks, with AdamW.

    Args:
        block: one block, for the rows and the row length of one rank; its bytes_per_value is of weights too.
        stage: of ZeRO, 0 to 3.
        recompute: how many blocks are recomputed, from the first on.
        offload: optimizer state and this rank's gradients are on the CPU; in stage 3 its weights too.
        bucket_bytes: of gradients that stage 2 sends at once; two buckets are under way.
        mlp_copies: of an MLP's inner values, see `activation_terms`: 5 for the gelu that transformers' GPT-2
            writes out in Python.
        optimizer_bytes: a parameter: 8 for float32 weights, 12 for 16-bit ones with masters, by default.

    Raises:
        ValueError: a stage or a number that cannot be.
    """
    if not 0 <= recompute <= layers:
        raise ValueError(f"recompute={recompute} of {layers} blocks; use 0 to {layers}")
    w, h, tokens = block.bytes_per_value, block.hidden, block.batch * block.sequence
    root = (vocab_size + positions + 2) * h  # parameters outside of blocks
    parameters = layers * block.parameters + root
    default = 8.0 if w >= 4 else 12.0
    states = model_states(
        parameters,
        ranks,
        stage,
        weight_bytes=w,
        gradient_bytes=w,
        optimizer_bytes=default if optimizer_bytes is None else optimizer_bytes,
    )
    weights = 0.0 if offload and stage == 3 else states.parameters
    gradients = 0.0 if offload and stage >= 2 else states.gradients
    optimizer = 0.0 if offload else states.optimizer
    one, bucket = w * block.parameters, min(bucket_bytes, w * parameters)

    kept = sum(activation_terms(block, mlp_copies=mlp_copies).values())
    head = 2 * w * tokens * h + 8 * tokens  # the last norm's input, its output, and its statistics
    logits = 4.0 * vocab_size * tokens
    flow = w * tokens * (3 * block.mlp + 2 * h)  # of an MLP's inner values three, and what goes around

    def before(i: int) -> float:
        """What the first i blocks keep."""
        again = min(i, recompute)
        return again * w * tokens * h + (i - again) * kept

    def passing(i: int) -> float:
        stored = before(i + 1) - before(i)
        inside = kept - stored if i < recompute else 0.0
        if stage == 3:
            gathering = one * (1 + min(prefetch, i)) + (4 / 3 * one if i < layers - 1 else 0.0)
        else:
            gathering = bucket * min(2 if stage == 2 else 1, layers - 1 - i)
        return flow + inside + gathering

    terms = StepTerms(
        weights,
        optimizer,
        kept_gradients=gradients if stage < 2 else 0.0,
        complete_gradients=gradients if stage >= 2 else 0.0,
        head_kept=head + logits,
        head_passing=2 * logits,
        table_gradient=w * vocab_size * h,
        gathered=w * root if stage == 3 else 0.0,
        gathered_ahead=one * min(prefetch, layers) if stage == 3 else 0.0,
        sending=2 * bucket if stage == 2 else 2 * one if stage == 3 else 0.0,
        # Masters of 16-bit weights get float32 gradients; offloaded ones get them elsewhere.
        copies=4.0 * parameters / (ranks if stage else 1) if w < 4 and not offload else 0.0,
    )
    return step_moments(terms, layers, before, passing, reversed(range(layers)))
