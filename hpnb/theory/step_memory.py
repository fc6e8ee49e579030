"""What a training step of a language model takes at its peak: states, activations, temporary buffers.

    start --- forward ---> turn --- backward of block L-1 ... 0 ---> end --- step --->
              activations  |  logits                             gradients    16-bit weights: float32
              grow         |  three times                        complete     gradients of master weights

For the T = b s tokens of one rank, values of w bytes, and P parameters on N ranks, the peak is the largest of

    turn      the activations of all blocks, L x `tensor_memory.activation_terms`, and
              12 V T: float32 log-probabilities, and two gradients of that size
    block i   the activations of the blocks up to i, and the gradients that flow around block i
    end       all gradients, and no activations
    step      4 bytes more for every parameter of this rank, if master weights step 16-bit weights

A recomputed block keeps only its input, w T h, and all its activations during its backward. The gradient of
tied embeddings, w V h, starts with the head and waits for the embedding's half until the end. In stage 3 the
weights outside the blocks stay gathered, `prefetch` blocks are gathered ahead of the one that computes, and a
block's full gradients exist a second time while they are sent.

Stages 0 and 1 keep gradient buffers from step to step. In stages 2 and 3 a gradient lives from its backward
to its reduction, and 1/N of it until the next step starts. Rajbhandari et al. 2020, *ZeRO* (arXiv
1910.02054), sections 3 and 5; Chen et al. 2016 (arXiv 1604.06174) for recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from hpnb.theory.model_states import model_states
from hpnb.theory.tensor_memory import activation_terms
from hpnb.theory.transformer import Block


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
        return float(sum(getattr(self, field.name) for field in fields(self) if field.name != "name"))


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
    waits = w * vocab_size * h
    flow = w * tokens * (3 * block.mlp + 2 * h)  # of an MLP's inner values three, and what goes around
    gathered = w * root if stage == 3 else 0.0

    def before(i: int) -> float:
        """What the first i blocks keep."""
        again = min(i, recompute)
        return again * w * tokens * h + (i - again) * kept

    def at(name: str, done: float, activations: float, temporary: float) -> Moment:
        share = gradients if stage < 2 else done * gradients
        return Moment(name, weights, share, optimizer, activations, temporary)

    ahead = one * min(prefetch, layers) if stage == 3 else 0.0
    moments = [at("turn", 0.0, before(layers) + head + logits, 2 * logits + gathered + ahead)]
    for i in reversed(range(layers)):
        stored = before(i + 1) - before(i)
        inside = kept - stored if i < recompute else 0.0
        passing = waits + gathered + flow + inside
        if stage == 3:
            passing += one * (1 + min(prefetch, i)) + (4 / 3 * one if i < layers - 1 else 0.0)
        else:
            passing += bucket * min(2 if stage == 2 else 1, layers - 1 - i)
        moments.append(at(f"block {i}", (layers - 1 - i) / layers, before(i + 1), passing))
    sending = 2 * bucket if stage == 2 else 2 * one if stage == 3 else 0.0
    moments.append(at("end", 1.0, 0.0, waits + gathered + sending))
    # Masters of 16-bit weights get float32 gradients; offloaded ones get them elsewhere.
    wide = 4.0 * parameters / (ranks if stage else 1) if w < 4 and not offload else 0.0
    moments.append(at("step", 1.0, 0.0, wide))
    return StepMemory(tuple(moments))
