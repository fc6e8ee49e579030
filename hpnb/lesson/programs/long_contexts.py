"""What notebook 10 runs on its ranks: shapes, an attention beside one process's, times of steps and messages.

Every rank calls what is here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

import hpnb
from hpnb import comm, theory
from hpnb.context_parallel import BlockAttention, ContextParallel, Ring, Visibility
from hpnb.context_parallel.ring import add_gradients, merge_pair
from hpnb.context_parallel.visibility import Pair
from hpnb.lesson.machine_card import MachineCard
from hpnb.lesson.programs.device_timing import Batch
from hpnb.lesson.programs.gpt2_tensor import random_values
from hpnb.lesson.programs.layer_times import time_in_turn
from hpnb.lesson.programs.step_timing import relative_distance, rounds_in_turn
from hpnb.lesson.programs.vit_pipeline_words import listed
from hpnb.lesson.values import record
from hpnb.mesh import Axis
from hpnb.models import GPT2Size
from hpnb.precision import best_16_bit, policy
from hpnb.ranks import choose_device
from hpnb.theory.context import Attention, BothWays

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_TIMED = {"cpu": (Attention(1, 8, 8, 32, 1, 4), tuple(1 << k for k in (6, 8, 10, 12))),
          "cuda": (Attention(1, 16, 16, 64, 1, 2), tuple(1 << k for k in range(10, 17)))}  # fmt: skip
_KEPT = {"cpu": (GPT2Size(64, 2, 4, 256, 509, 2048), torch.float32),
         "cuda": (GPT2Size(1024, 2, 16, 4096, 8192, 4096), torch.bfloat16)}  # fmt: skip
_STEPS = {"cpu": 14, "cuda": 30}
_ROUNDS = 9  # of each timed part
_NOTHING, _FOREVER = BothWays(0.0, 0.0), BothWays(math.inf, math.inf)  # seconds of a step


def context_axis() -> Axis:
    """All ranks, along the context axis."""
    return hpnb.Mesh(hpnb.Layout(cp=hpnb.world_size())).cp


def timed_shapes(device: str) -> list[Attention]:
    """The attentions that are timed, one for each sequence length: small on a CPU."""
    shape, lengths = _TIMED[device]
    return [replace(shape, sequence=length) for length in lengths]


def kept_size(device: str) -> tuple[GPT2Size, torch.dtype]:
    """The GPT-2 whose activations are measured, of two blocks, and its dtype: of 16 bits on a GPU."""
    size, dtype = _KEPT[device]
    return size, dtype if device == "cpu" else policy(best_16_bit(device)).compute


def training_steps(device: str) -> int:
    """Steps of the training with right and wrong positions: fewer on a CPU."""
    return _STEPS[device]


def random_qkv(
    sequence: int, heads: int = 8, kv_heads: int = 8, head_size: int = 16
) -> tuple[torch.Tensor, ...]:
    """q (1, heads, sequence, head_size), k and v with kv_heads, in float64, the same on all ranks."""
    counts = (heads, kv_heads, kv_heads)
    return tuple(random_values(1, n, sequence, head_size, seed=i) for i, n in enumerate(counts))


@dataclass(frozen=True)
class Compared:
    """An attention of sharded tokens beside one process's: {"output" or "gradients of q, k, v": relative
    distance on the rank where it is largest}, and bytes that left this rank.
    """

    distances: dict[str, float]
    sent: BothWays


def compare_with_full(
    layer: Layer, qkv: Sequence[torch.Tensor], places: torch.Tensor, axis: Axis
) -> Compared:
    """Run `layer` on this rank's tokens, and one process's attention on all of them.

    Args:
        layer: (q, k, v) of this rank's tokens, (1, heads, s / cp, d) each, -> output of the same shape as q.
        qkv: of all tokens, equal on all ranks.
        places: (s / cp,) where this rank's tokens stand.
    """
    full = q, k, v = [part.clone().requires_grad_() for part in qkv]
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    seed = random_values(*right.shape, seed=99)
    (right * seed).sum().backward()
    local = [part[:, :, places].clone().requires_grad_() for part in qkv]
    with hpnb.record.traffic() as traffic:
        out = layer(*local)
        forward = traffic.total
        (out * seed[:, :, places]).sum().backward()
        sent = BothWays(forward, traffic.total - forward)
    grads = [part.grad for part in local if part.grad is not None]
    wanted = [part.grad[:, :, places] for part in full if part.grad is not None]
    distances = {"output": relative_distance([out], [right[:, :, places]]),
                 "gradients of q, k, v": relative_distance(grads, wanted)}  # fmt: skip
    worst = torch.tensor([list(distances.values())], dtype=torch.float64, device=out.device)
    of_all = comm.gather(worst, axis, 0).amax(0).tolist()
    return Compared(dict(zip(distances, of_all, strict=True)), sent)


def train_alone(batches: Sequence[Batch]) -> torch.Tensor:
    """Losses of a "laptop" GPT-2 in float64 that one process trains by SGD on these batches, on the CPU."""
    model: torch.nn.Module = hpnb.models.gpt2("laptop", dtype=torch.float64)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in batches:
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def reloaded_distance(model: torch.nn.Module, context: ContextParallel, batch: Batch, shard: Batch) -> float:
    """How far logits of this rank's tokens are from those of one process that loads the weights of `model`, a
    "laptop" GPT-2 under context parallelism that was trained on `shard`, this rank's part of `batch`.
    """
    alone = hpnb.models.gpt2("laptop").to(hpnb.device())
    alone.load_state_dict(model.state_dict())
    places = context.shard_batch(batch)["position_ids"][0].to(hpnb.device())
    with torch.no_grad():
        right = alone(input_ids=batch["input_ids"].to(hpnb.device())).logits[:, places]
        inputs = {name: x for name, x in shard.items() if name != "labels"}
        return relative_distance([model(**inputs).logits], [right])


def least_variation(norms: Mapping[str, Sequence[Sequence[float]]], steps: int) -> float:
    """The largest over the smallest norm of row 0 in the last steps, of the run where it is least.

    `norms` are {run: for each step, the norm of each row's gradient}.
    """
    first = ([rows[0] for rows in run[-steps:]] for run in norms.values())
    return min(max(sizes) / min(sizes) for sizes in first)


def largest_gap(losses: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """The largest distance between two runs' losses in a step, "most", and that step, counted from 1."""
    gaps = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    return {"most": max(gaps), "step": 1 + gaps.index(max(gaps))}


@dataclass(frozen=True)
class Replayed:
    """Exposed seconds of one attention, forward and backward, put together from what was timed alone.

    Attributes:
        packed: of Ulysses, with q, k and v in one all-to-all.
        messages: of the ring, seconds of all its messages, exposed or not.
        last: of the ring's last message, which brings gradients home and is always exposed.
        parts: what this was put together from, named as in `predict_parts`.
        timed: whether messages were timed, and do not take what the card says.
        quartiles: {way: (low, high)} of exposed seconds: low with the lower quartile of the messages' rounds
            and the upper quartile of the computing's, high the other way round.
    """

    ring: float
    ulysses: float
    packed: float
    messages: float
    last: float
    parts: dict[str, float]
    timed: bool
    quartiles: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def covered(self) -> float:
        """The share of the ring's messages, the last one aside, that computing covers."""
        others = self.messages - self.last
        return 1 - (self.ring - self.last) / others if others else 0.0


def packed_exposed(shape: Attention, ranks: int, link: theory.Link) -> float:
    """Predicted exposed seconds of Ulysses, forward and backward, with q, k and v in one all-to-all."""
    sent = theory.context.ulysses_bytes(shape, ranks).total
    return 4 * (ranks - 1) * link.latency + sent / link.bandwidth


def predict_parts(shape: Attention, ranks: int, card: MachineCard) -> dict[str, float]:
    """Predicted seconds of a ring step's computing, of one message of a ring, and of the all-to-all of q."""
    block = theory.context.ring_bytes(shape, ranks).forward / (ranks - 1)
    exchanges = theory.context.ulysses_exposed(shape, ranks, card.link).total
    computing = theory.context.ring_step_seconds(shape, ranks, card.matmul)
    return _parts(computing, theory.seconds("send", block, ranks, card.link), exchanges / 8)


def _parts(step: BothWays, message: float, exchange: float) -> dict[str, float]:
    return {"computing of a forward step": step.forward, "computing of a backward step": step.backward,
            "message of a ring": message, "all-to-all": exchange}  # fmt: skip


def ratios_beside(
    seconds: Mapping[str, Sequence[float]], lengths: Sequence[int], border: float
) -> list[dict[str, float]]:
    """Packed Ulysses' seconds over the ring's, at lengths below the border and at the others: the "least" and
    the "most" of both. The shortest length counts as below the border, and the longest as above.
    """
    ratios = [p / r for p, r in zip(seconds["Ulysses, packed"], seconds["ring"], strict=True)]
    below = min(max(sum(length < border for length in lengths), 1), len(lengths) - 1)
    return [{"least": min(part), "most": max(part)} for part in (ratios[:below], ratios[below:])]


def wins_in_words(seconds: Mapping[str, Sequence[float]], lengths: Sequence[int]) -> str:
    """For prose: at which lengths Ulysses has fewer predicted seconds than the ring."""
    packed, plain = (
        [n for n, r, u in zip(lengths, seconds["ring"], seconds[way], strict=True) if u < r]
        for way in ("Ulysses, packed", "Ulysses")
    )
    if not packed and not plain:
        return "the ring exposes least at every length"
    at = [f"at {listed(wins)}" if wins else "at no length" for wins in (packed, plain)]
    return f"packed Ulysses exposes less than the ring {at[0]} tokens, and unpacked Ulysses {at[1]}"


def winners_in_words(
    predicted: Mapping[str, Sequence[float]], replayed: Sequence[Replayed], lengths: Sequence[int]
) -> str:
    """For prose: where the ring beats packed Ulysses in the replay, and where the card says otherwise.

    Lengths at which the bars of the two touch do not count.
    """
    touching = _touching(replayed, lengths)
    card = [r <= u for r, u in zip(predicted["ring"], predicted["Ulysses, packed"], strict=True)]
    rings = {n: times.ring <= times.packed
             for n, times in zip(lengths, replayed, strict=True) if n not in touching}  # fmt: skip
    if not rings:
        return "So it can't judge the card's prediction either"
    won = {way: [n for n, ring in rings.items() if ring == (way == "the ring")]
           for way in ("packed Ulysses", "the ring")}  # fmt: skip
    where = "at every other length" if touching else "at every length"
    parts = [f"{way} wins {where if len(wins) == len(rings) else f'at {listed(wins)} tokens'}"
             for way, wins in won.items() if wins]  # fmt: skip
    said = f"In the replay {', and '.join(parts)}"
    wrong = [n for n, ring in zip(lengths, card, strict=True) if rings.get(n, ring) != ring]
    if not wrong:
        return f"{said}, as the card predicts"
    return f"{said}. So the card names the wrong winner at {listed(wrong)} tokens"


def least_exposed_in_words(seconds: Mapping[str, Sequence[float]]) -> str:
    """The title of a figure of replayed seconds: at how many lengths the ring exposes least of all ways."""
    least = [times[0] <= min(times) for times in zip(seconds["ring"], *seconds.values(), strict=True)]
    if all(least):
        return "In the replay, the ring exposes least at every length"
    return f"In the replay, the ring exposes least at {sum(least)} of {len(least)} lengths"


def touching_in_words(replayed: Sequence[Replayed], lengths: Sequence[int]) -> str:
    """For prose: at which lengths the quartiles of the ring and of packed Ulysses overlap."""
    at = _touching(replayed, lengths)
    if not at:
        return "The bars of the two touch at no length"
    if len(at) == len(lengths):
        return "The bars of the two touch at every length, so this run can't say which is faster"
    return f"The bars of the two touch at {listed(at)} tokens; there, this run can't say which is faster"


def _touching(replayed: Sequence[Replayed], lengths: Sequence[int]) -> list[int]:
    at = []
    for length, times in zip(lengths, replayed, strict=True):
        (ring_low, ring_high), (low, high) = (times.quartiles[way] for way in ("ring", "Ulysses, packed"))
        if ring_low <= high and low <= ring_high:
            at.append(length)
    return at


def source_in_words(replayed: Replayed) -> str:
    """For a title: where the seconds of messages come from."""
    return "computing and messages were timed" if replayed.timed else "messages take what the card says"


def covers_in_words(replayed: Sequence[Replayed], lengths: Sequence[int]) -> str:
    """For prose: at which lengths a ring's step computes for at least as long as its message takes."""
    covers = [
        times.parts["computing of a forward step"] >= times.parts["message of a ring"] for times in replayed
    ]
    count = sum(covers)
    if count in (0, len(covers)):
        return "at every length" if count else "at none of these lengths"
    if all(covers[-count:]):
        return f"from {lengths[-count]:,} tokens on"
    return f"at {listed([n for n, covered in zip(lengths, covers, strict=True) if covered])} tokens"


def parts_over_card(
    replayed: Sequence[Replayed], shapes: Sequence[Attention], ranks: int, card: MachineCard
) -> list[dict[str, float]]:
    """For each shape, replayed over predicted seconds of the parts of `predict_parts`."""
    predicted = [predict_parts(shape, ranks, card) for shape in shapes]
    return [
        {part: times.parts[part] / took for part, took in parts.items()}
        for times, parts in zip(replayed, predicted, strict=True)
    ]


def record_replay(
    replayed: Sequence[Replayed],
    predicted: Mapping[str, Sequence[float]],
    dots: Mapping[str, Sequence[float]],
    shapes: Sequence[Attention],
    ranks: int,
    card: MachineCard,
) -> None:
    """Record what the page's text says of the replay: {way: exposed seconds for each shape} are `predicted`
    by the card, and replayed in `dots`.
    """
    lengths, ends = [shape.sequence for shape in shapes], {"first": 0, "last": -1}
    for end, i in ends.items():
        record(f"10.at-{end}", {way: seconds[i] for way, seconds in dots.items()}, "s")
    record("10.lengths", {end: lengths[i] for end, i in ends.items()})
    record("10.touch", touching_in_words(replayed, lengths))
    record("10.covered", {end: 100 * replayed[i].covered for end, i in ends.items()}, "%")
    record("10.covers", covers_in_words(replayed, lengths))
    record("10.last-message", (100 * replayed[0].last / replayed[0].messages, "%"))
    tokens = theory.context.tokens_to_overlap(shapes[0], card.matmul, card.link)
    record("10.dotted", round(ranks * tokens))
    facts = {"overlap": round(tokens), "rho": round(card.rho), "heads": shapes[0].heads}
    record("10.card", facts | {"latency": (card.link.latency, "s")})
    off = {
        way: [max(p / t, t / p) for p, t in zip(predicted[way], times, strict=True)]
        for way, times in dots.items()
    }
    record("10.off", {way: max(factors) for way, factors in off.items()})
    worst = off["ring"].index(max(off["ring"]))  # here the ring's dot is farthest off
    record("10.farthest", lengths[worst])
    over = parts_over_card(replayed, shapes, ranks, card)
    record("10.over", {"first": over[0], "last": over[-1], "worst": over[worst]})


def replay_exposed(shapes: Sequence[Attention], dtype: torch.dtype, link: theory.Link) -> list[Replayed]:
    """For each shape: a ring step's computing and each message are timed alone, and `theory.context` puts
    them together. Ranks that share a GPU can't time messages; these take what `link` says.
    """
    axis = context_axis()
    assumed = choose_device("auto", axis.size).shares_gpus
    calls = {(i, way): call for i, shape in enumerate(shapes)
             for way, call in _step_calls(shape, axis, dtype).items()}  # fmt: skip
    computing = time_in_turn(calls, repeats=_ROUNDS)
    sending = {} if assumed else rounds_in_turn(
        {f"{i} {way}": call for i, shape in enumerate(shapes)
         for way, call in _message_calls(shape, axis, dtype).items()}, repeats=_ROUNDS
    )  # fmt: skip
    replayed = []
    for i, shape in enumerate(shapes):
        steps = [
            BothWays(forward, backward)
            for forward, backward in zip(
                *(_quartiles(computing[i, way]) for way in ("forward", "backward")), strict=True
            )
        ]
        block = theory.context.ring_bytes(shape, axis.size).forward / (axis.size - 1)
        links = [link] * 3
        ulysses = [theory.context.ulysses_exposed(shape, axis.size, link).total] * 3
        packed = [packed_exposed(shape, axis.size, link)] * 3
        if not assumed:
            links = [theory.Link(0.0, block / took) for took in _quartiles(sending[f"{i} ring"])]
            ulysses, packed = (
                [2 * took for took in _quartiles(sending[f"{i} {way}"])] for way in ("ulysses", "packed")
            )  # the backward sends the same
        low, ring, high = (
            theory.context.ring_exposed(shape, axis.size, over, step).total
            for over, step in zip(links, reversed(steps), strict=True)
        )
        message = theory.seconds("send", block, axis.size, links[1])
        parts = _parts(steps[1], message, ulysses[1] / 8)
        messages, last = (
            theory.context.ring_exposed(shape, axis.size, links[1], computed).total
            for computed in (_NOTHING, _FOREVER)
        )
        quartiles = {"ring": (low, high), "Ulysses": (ulysses[0], ulysses[2]),
                     "Ulysses, packed": (packed[0], packed[2])}  # fmt: skip
        replayed.append(Replayed(ring, ulysses[1], packed[1], messages, last, parts, not assumed, quartiles))
    return replayed


def _quartiles(rounds: Sequence[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    return statistics.quantiles(rounds, n=4, method="inclusive")


@dataclass(frozen=True)
class RingStep:
    """What this rank of a ring computes while messages travel, with the functions of `ring_attention`.

    Attributes:
        source: the rank that the block's keys and values come from.
        q, dout, dq: this rank's queries and the gradients of its output and of q so far, (B, H, s / cp, d).
        block, sent: keys and values, and their gradient so far, which the rank before has sent,
            (2, B, H_kv, s / cp, d).
        out, lse: of the keys so far, (B, H, s / cp, d) and (B, H, s / cp); as dq and sent, float32 or wider.
    """

    ring: Ring
    attention: BlockAttention
    source: int
    q: torch.Tensor
    block: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    sent: torch.Tensor

    def forward(self) -> None:
        """Merge the attention to the block into out and lse."""
        for pair in self._pairs():
            merge_pair(self.attention, pair, self.q, self.block, self.out, self.lse)

    def backward(self, output: torch.Tensor) -> torch.Tensor:
        """Add to dq, and return the block's gradient so far, given the output (B, H, s / cp, d)."""
        inputs, local = (self.dout, self.q, self.block, output, self.lse), torch.zeros_like(self.sent)
        for pair in self._pairs():
            add_gradients(self.attention, pair, *inputs, self.dq, local)
        return local + self.sent

    def _pairs(self) -> list[Pair]:
        fused = self.attention.kernel is not None
        return self.ring.pairs(self.source, Visibility(causal=True), self.q.device, fused)


def _step_calls(shape: Attention, axis: Axis, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """{"forward" or "backward": a ring step with the keys of the rank before}."""
    local = shape.sequence // axis.size
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v, dout = (
        torch.randn(1, shape.heads, local, int(shape.head_size), device=hpnb.device(), dtype=dtype)
        for _ in range(4)
    )
    block, lse = torch.stack([k, v]), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    out, dq, sent = (torch.zeros_like(x, dtype=wide) for x in (q, q, block))
    attention, before = BlockAttention(q, k, v, shape.head_size**-0.5), (axis.rank - 1) % axis.size
    ring = Ring.of(axis, local, zigzag=True)
    step = RingStep(ring, attention, before, q, block, dout, out, lse, dq, sent)
    step.forward()
    output = out.to(dtype)
    return {"forward": step.forward, "backward": lambda: step.backward(output)}


def _message_calls(shape: Attention, axis: Axis, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """{"ring": one block goes on, "ulysses": the all-to-alls of a forward, "packed": q, k and v in one}."""
    local = shape.sequence // axis.size
    ring = Ring.of(axis, local, zigzag=True)
    q = torch.randn(1, shape.heads, local, int(shape.head_size), device=hpnb.device(), dtype=dtype)
    block = torch.stack([q, q])

    def ulysses() -> None:
        for _ in "qkv":
            exchanged = comm.all_to_all(q, axis, 1, 2)
        comm.all_to_all(exchanged, axis, 2, 1)

    def packed() -> None:
        exchanged = comm.all_to_all(torch.cat([q, q, q]), axis, 1, 2)
        comm.all_to_all(exchanged[:1], axis, 2, 1)

    return {"ring": lambda: ring.pass_on(block)(), "ulysses": ulysses, "packed": packed}
