"""hpnb.theory against closed forms, an oracle of messages, torch's FLOP counter and published numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hpnb import theory
from hpnb.theory import Block, Link

# --- the oracle: every message of every algorithm, executed on sets of contributions --------------

Round = list[tuple[int, int, list[int]]]  # (from, to, chunks), all at once
State = list[list[frozenset[int]]]  # [rank][chunk] = whose contributions the sum holds
WIRE = Link(latency=2e-6, bandwidth=1e9)


def backwards(rounds: list[Round]) -> list[Round]:
    return [[(to, source, chunks) for source, to, chunks in r] for r in reversed(rounds)]


def messages(op: str, p: int, algorithm: str) -> list[Round]:
    """Rounds of messages. Spreading is written down; collecting is spreading backwards."""
    whole = list(range(p))
    if op == "all_to_all":
        return [[(r, (r + k) % p, [(r + k) % p]) for r in range(p)] for k in range(1, p)]
    if op == "send":
        return [[(0, 1, whole)]]
    if op in ("reduce", "gather"):
        return backwards(messages({"reduce": "broadcast", "gather": "scatter"}[op], p, algorithm))
    if op == "all_gather":
        return backwards(messages("reduce_scatter", p, algorithm))
    distances = [1 << k for k in range((p - 1).bit_length())]
    if algorithm in ("naive", "tree") and op in ("all_reduce", "reduce_scatter"):
        then = "broadcast" if op == "all_reduce" else "scatter"
        return messages("reduce", p, algorithm) + messages(then, p, algorithm)
    match op, algorithm:
        case "broadcast", "naive":
            return [[(0, r, whole)] for r in range(1, p)]
        case "broadcast", "tree":
            return [[(r, r + d, whole) for r in range(d) if r + d < p] for d in distances]
        case "broadcast", "ring":
            return [[(r, r + 1, [t - r]) for r in range(p - 1) if 0 <= t - r < p] for t in range(2 * (p - 1))]
        case "broadcast", "halving-doubling":
            return messages("scatter", p, "tree") + messages("all_gather", p, algorithm)
        case "scatter", "naive":
            return [[(0, r, [r])] for r in range(1, p)]
        case "scatter", "tree":
            return [
                [(r, r + d, whole[r + d : r + 2 * d]) for r in range(0, p, 2 * d) if r + d < p]
                for d in reversed(distances)
            ]
        case "scatter", "ring":
            return [[(r, r + 1, [p - 1 - t + r]) for r in range(t + 1)] for t in range(p - 1)]
        case "reduce_scatter", "ring":
            return [[(r, (r + 1) % p, [(r - t - 1) % p]) for r in range(p)] for t in range(p - 1)]
        case "reduce_scatter", "halving-doubling":
            halves: list[Round] = []
            for d in reversed(distances):
                halves.append([(r, r ^ d, [c for c in whole if c // d == (r ^ d) // d]) for r in range(p)])
            return halves
        case "all_reduce", ("ring" | "halving-doubling"):
            return messages("reduce_scatter", p, algorithm) + messages("all_gather", p, algorithm)
    raise AssertionError((op, algorithm))


def execute(rounds: list[Round], state: State) -> None:
    for one in rounds:
        carried = [(to, c, state[source][c]) for source, to, chunks in one for c in chunks]
        for to, c, value in carried:
            held = state[to][c]
            assert value, "an empty chunk was sent"
            assert value >= held or not value & held, "a contribution was added twice"
            state[to][c] = value | held


ONE_WAY = ("all_to_all", "send")  # ops with one algorithm
PAIRS = [
    (op, algorithm)
    for op in theory.OPS
    for algorithm in theory.ALGORITHMS
    if (op not in ONE_WAY or algorithm == "ring")
    and (op not in ("gather", "scatter") or algorithm != "halving-doubling")
]


def counts(algorithm: str) -> list[int]:
    """Numbers of ranks that `algorithm` can have."""
    return [2, 4, 8, 16] if algorithm == "halving-doubling" else [2, 3, 4, 5, 6, 7, 8, 13, 16]


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
def test_plan_counts_what_the_messages_do(op: str, algorithm: str) -> None:
    for p in counts(algorithm):
        rounds = messages(op, p, algorithm)
        for one in rounds:
            assert len({source for source, _, _ in one}) == len({to for _, to, _ in one}) == len(one)
        serial = sum(max(len(chunks) for _, _, chunks in one) for one in rounds)
        n = 1000 * p  # chunks of 1,000 bytes
        assert theory.steps(op, p, algorithm) == len(rounds)
        took = theory.seconds(op, n, p, WIRE, algorithm)
        assert took == pytest.approx(len(rounds) * 2e-6 + 1000 * serial / 1e9, rel=1e-12)


# Where a chunk lies before and after: on the "root", on its "owner" (chunk r on rank r), or everywhere.
BEFORE = {"broadcast": "root", "scatter": "root", "gather": "owner", "all_gather": "owner"}
AFTER = {"reduce": "root", "gather": "root", "scatter": "owner", "reduce_scatter": "owner"}


def lies(where: str, rank: int, chunk: int) -> bool:
    return {"root": rank == 0, "owner": rank == chunk}.get(where, True)


@pytest.mark.parametrize(("op", "algorithm"), [pair for pair in PAIRS if pair[0] not in ONE_WAY])
def test_the_oracle_really_does_the_op(op: str, algorithm: str) -> None:
    before, after = BEFORE.get(op, "everywhere"), AFTER.get(op, "everywhere")
    for p in counts(algorithm):
        state = [[frozenset({r} if lies(before, r, c) else ()) for c in range(p)] for r in range(p)]
        execute(messages(op, p, algorithm), state)
        for c in range(p):
            # everyone's sum, or the one value there was, unchanged
            result = range(p) if before == "everywhere" else {0 if before == "root" else c}
            assert all(state[r][c] == frozenset(result) for r in range(p) if lies(after, r, c))


# --- the alpha-beta model -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "expected"),
    [("all_reduce", 1500.0), ("send", 1000.0)]
    + [(op, 750.0) for op in theory.OPS if op not in ("all_reduce", "send")],
)
def test_bytes_sent(op: str, expected: float) -> None:
    assert theory.bytes_sent(op, 1000, 4) == expected
    assert isinstance(theory.bytes_sent(op, 1000, 4), float)
    assert theory.bytes_sent(op, 1000, 1) == (1000 if op == "send" else 0)
    assert theory.bytes_sent(op, 0, 4) == 0


def test_bytes_sent_is_what_each_rank_of_a_ring_sends() -> None:
    for p in (2, 3, 8):
        ring = messages("all_reduce", p, "ring")
        sent = Counter(source for one in ring for source, _, chunks in one for _ in chunks)
        assert {theory.bytes_sent("all_reduce", 7 * p, p)} == {7.0 * count for count in sent.values()}
        chain = [m for one in messages("broadcast", p, "ring") for m in one]
        assert theory.bytes_sent("broadcast", 7 * p, p) == 7 * len(chain) / p  # the mean over ranks


def test_the_table_of_the_docstring_at_eight_ranks() -> None:
    n = 8e6
    assert [theory.steps("all_reduce", 8, a) for a in theory.ALGORITHMS] == [14, 6, 14, 6]
    free = Link(0.0, 1.0)  # serial bytes alone
    serial = [theory.seconds("all_reduce", n, 8, free, a) for a in theory.ALGORITHMS]
    assert serial == [14 * n, 6 * n, 14e6, 14e6]
    assert [theory.steps("all_reduce", 5, a) for a in ("naive", "tree", "ring")] == [8, 6, 8]


@pytest.mark.parametrize("op", theory.OPS)
def test_one_rank_is_free_and_a_send_is_not(op: str) -> None:
    expected = 2e-6 + 1e3 / 1e9 if op == "send" else 0.0
    assert theory.seconds(op, 1e3, 1, WIRE) == expected
    assert theory.steps(op, 1) == (1 if op == "send" else 0)


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
def test_knee_splits_evenly(op: str, algorithm: str) -> None:
    for p in counts(algorithm):
        n = theory.knee(p, WIRE, op, algorithm)
        latency = theory.steps(op, p, algorithm) * WIRE.latency
        assert theory.seconds(op, n, p, WIRE, algorithm) == pytest.approx(2 * latency, rel=1e-12)


def test_knee_of_a_ring_is_p_latency_bandwidth() -> None:
    assert theory.knee(8, Link(5e-6, 100e9)) == pytest.approx(8 * 5e-6 * 100e9)


def test_cheapest() -> None:
    assert theory.cheapest("all_reduce", 1, 6, WIRE) == "tree"  # latency decides, and 6 is no power of two
    assert theory.cheapest("all_reduce", 1e9, 6, WIRE) == "ring"
    assert theory.cheapest("all_reduce", 1e9, 8, WIRE) == "halving-doubling"
    assert theory.cheapest("all_reduce", 1e9, 2, WIRE) == "ring"  # a tie with halving-doubling
    assert theory.cheapest("broadcast", 1, 8, WIRE) == "tree"
    assert theory.cheapest("broadcast", 1e9, 7, WIRE) == "ring"
    assert theory.cheapest("all_to_all", 1e9, 7, WIRE) == "ring"
    assert theory.cheapest("all_reduce", 1, 1, WIRE) == "naive"
    for n in (1.0, 1e4, 1e9):  # where it can run, halving-doubling is never behind a ring
        for p in counts("halving-doubling"):
            halving, ring = (
                theory.seconds("all_reduce", n, p, WIRE, a) for a in ("halving-doubling", "ring")
            )
            assert halving <= ring


def test_wires_are_in_bytes_one_way() -> None:
    gigabytes = {name: round(link.bandwidth / 1e9, 2) for name, link in theory.LINKS.items()}
    assert gigabytes == {
        "NVLink 4": 450,
        "PCIe 5 x16": 63.02,
        "PCIe 4 x16": 31.51,
        "InfiniBand NDR": 50,
        "Ethernet 100 Gb": 12.5,
        "Ethernet 10 Gb": 1.25,
    }
    assert all(link.name == name and 1e-6 <= link.latency <= 1e-4 for name, link in theory.LINKS.items())


# --- fitting a link -------------------------------------------------------------------------------

SIZES = [0.0, *(2.0**k for k in range(3, 31, 3))]  # an empty message takes latency alone


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
def test_fit_recovers_a_planted_wire(op: str, algorithm: str) -> None:
    for p in counts(algorithm):
        planted = Link(7e-6, 23e9)
        times = [theory.seconds(op, n, p, planted, algorithm) for n in SIZES]
        fitted = theory.fit_link(SIZES, times, p, op, algorithm, name="mine")
        assert fitted.latency == pytest.approx(7e-6, rel=1e-9)
        assert fitted.bandwidth == pytest.approx(23e9, rel=1e-9)
        assert fitted.name == "mine"


def test_fit_weighs_small_and_large_messages_alike() -> None:
    noise = np.random.default_rng(0).uniform(0.9, 1.1, size=(400, len(SIZES)))
    for planted in (Link(7e-6, 23e9), Link(1e-3, 1e8)):
        times = [theory.seconds("all_reduce", n, 4, planted) for n in SIZES]
        fits = [theory.fit_link(SIZES, list(np.multiply(times, row)), 4) for row in noise]
        assert np.mean([f.latency for f in fits]) == pytest.approx(planted.latency, rel=0.02)
        assert np.mean([f.bandwidth for f in fits]) == pytest.approx(planted.bandwidth, rel=0.02)
        assert max(abs(f.latency / planted.latency - 1) for f in fits) < 0.1


def loss(link: Link, sizes: list[float], times: list[float]) -> float:
    return sum((theory.seconds("send", n, 2, link) / t - 1) ** 2 for n, t in zip(sizes, times, strict=True))


@pytest.mark.parametrize(
    ("sizes", "times", "zero"),
    [([1e3, 2e3, 4e3], [1.0, 2.5, 5.5], "latency"), ([1e3, 2e3, 4e3], [3.0, 2.0, 1.5], "bandwidth")],
)
def test_fit_keeps_both_terms_non_negative(sizes: list[float], times: list[float], zero: str) -> None:
    fitted = theory.fit_link(sizes, times, 2, "send")
    if zero == "latency":
        assert fitted.latency == 0
        nearby = [Link(0.0, fitted.bandwidth * f) for f in (0.999, 1.001)] + [Link(1e-3, fitted.bandwidth)]
    else:
        assert fitted.bandwidth == math.inf
        nearby = [Link(fitted.latency * f, math.inf) for f in (0.999, 1.001)] + [Link(fitted.latency, 1e7)]
    assert all(loss(other, sizes, times) > loss(fitted, sizes, times) for other in nearby)


# --- a transformer block --------------------------------------------------------------------------


class ExplicitBlock(nn.Module):
    """A pre-norm block with every product spelled out, to be counted by torch."""

    def __init__(self, h: int, heads: int, ratio: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.projection = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, ratio * h), nn.Linear(ratio * h, h)

    def forward(self, x: Tensor) -> Tensor:  # (b, s, h)
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)  # (b, heads, s, s)
        x = x + self.projection((weights @ v).transpose(1, 2).reshape(b, s, h))
        y: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + y


@pytest.mark.parametrize(
    ("h", "heads", "s", "b", "ratio"), [(32, 4, 12, 3, 4), (40, 5, 64, 1, 3), (24, 1, 7, 2, 4)]
)
def test_block_against_torch(h: int, heads: int, s: int, b: int, ratio: int) -> None:
    real, block = ExplicitBlock(h, heads, ratio), Block(h, heads, s, b, ratio, bytes_per_value=4)
    x = torch.randn(b, s, h, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = real(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert block.forward_flops == forward.get_total_flops()
    assert block.backward_flops == backward.get_total_flops()
    assert block.training_flops == forward.get_total_flops() + backward.get_total_flops()
    assert block.parameters == sum(p.numel() for p in real.parameters())


def test_block_closed_forms() -> None:
    h, s, b = 1024, 197, 8
    block = Block(h, 16, s, b)
    assert block.parameters == 12 * h**2 + 13 * h == 12_596_224  # a block of ViT-L/16
    assert block.forward_flops == 24 * b * s * h**2 + 4 * b * s**2 * h
    assert {m.name: m.flops for m in block.matmuls} == {
        "qkv": 6 * b * s * h**2,
        "scores": 2 * b * s**2 * h,
        "weighted values": 2 * b * s**2 * h,
        "projection": 2 * b * s * h**2,
        "mlp up": 8 * b * s * h**2,
        "mlp down": 8 * b * s * h**2,
    }
    assert theory.Matmul("one", 3, 5, 7).bytes == 2 * (15 + 35 + 21)
    qkv, scores = block.matmuls[:2]
    assert qkv.bytes == 2 * (b * s * h + 3 * h**2 + 3 * b * s * h)
    assert scores.bytes == 2 * (2 * b * s * h + 16 * b * s**2)  # q, k and the scores of 16 heads


def test_the_smallest_block_and_an_odd_one() -> None:
    assert Block(1, 1, 1).parameters == 12 + 13
    assert Block(1, 1, 1).forward_flops == 28
    assert theory.model_flops(1, 1, 1, 1, 1) == 3 * 28 + 6


@pytest.mark.parametrize(  # Narayanan et al. 2021, arXiv 2104.04473, table 1 (s 2048, V 51,200)
    ("billions", "hidden", "layers", "batch"),
    [
        (1.7, 2304, 24, 512),
        (7.5, 4096, 36, 512),
        (39.1, 8192, 48, 1536),
        (145.6, 12288, 80, 2304),
        (529.6, 20480, 105, 2520),
    ],
)
def test_model_formulas_against_megatron(billions: float, hidden: int, layers: int, batch: int) -> None:
    h, l, s, V = hidden, layers, 2048, 51200  # noqa: E741, the paper's letters
    P = theory.model_parameters(l, h, V, s)
    assert round(P / 1e9, 1) == billions
    assert pytest.approx(12 * l * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * l * h)), rel=1e-12) == P
    plain, recomputed = (theory.model_flops(l, h, V, s, batch, recompute=r) for r in (False, True))
    unit = batch * s * l * h**2
    assert plain == pytest.approx(72 * unit * (1 + s / (6 * h) + V / (12 * l * h)), rel=1e-12)
    assert recomputed == pytest.approx(96 * unit * (1 + s / (6 * h) + V / (16 * l * h)), rel=1e-12)


# --- the three laws, from Block and bytes_sent alone ----------------------------------------------

BUS = 50e9  # bytes/s; the laws hold whatever it is


@pytest.mark.parametrize("gradient_bytes", [2, 4])
def test_dp_law_is_where_backward_equals_the_all_reduce(gradient_bytes: int) -> None:
    rho, d, h = 1000.0, 4, 512
    tokens = theory.dp_tokens_to_hide(rho, d, gradient_bytes)
    assert tokens == 750 * gradient_bytes / 2
    matmuls = Block(h, 8, sequence=int(tokens)).matmuls
    weights = [m for m in matmuls if m.count == 1]  # attention's products have no weights
    backward = 2 * sum(m.flops for m in weights) / (rho * BUS)
    reduce = theory.bytes_sent("all_reduce", gradient_bytes * sum(m.k * m.n for m in weights), d) / BUS
    assert backward == pytest.approx(reduce, rel=1e-12)


@pytest.mark.parametrize(("t", "b"), [(2, 1), (3, 1), (8, 16)])
def test_tp_law_is_a_block_over_four_all_reduces(t: int, b: int) -> None:
    rho, h, s = 800.0, 1920, 512
    block = Block(h, 24, s, b)
    compute = block.training_flops / t / (rho * BUS)
    communicate = 4 * theory.bytes_sent("all_reduce", 2 * b * s * h, t) / BUS
    law = theory.tp_compute_over_communication
    assert law(h, t, rho, sequence=s) == pytest.approx(compute / communicate, rel=1e-12)
    assert law(h, t, rho) == pytest.approx(4.5 * h / ((t - 1) * rho), rel=1e-12)  # the spine's, without s^2
    assert law(h, t, rho, sequence=s) / law(h, t, rho) == pytest.approx(1 + s / (6 * h))


def test_laws_default_to_two_bytes_and_take_fast_wires() -> None:
    assert theory.dp_tokens_to_hide(1000, 4) == 750
    assert theory.dp_tokens_to_hide(0.5, 4) == 0.375


def test_laws_of_one_rank_cost_nothing() -> None:
    assert theory.dp_tokens_to_hide(1000, 1) == 0
    assert theory.tp_compute_over_communication(1024, 1, 1000) == math.inf


# --- refusals: one sentence, with the numbers and what would work ---------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.bytes_sent("allreduce", 1, 2), "no op 'allreduce'; there are all_reduce, all_gather"),
        (lambda: theory.bytes_sent("send", 1, 0), "ranks=0 is not a count; use 1 or more"),
        (lambda: theory.bytes_sent("send", -1, 2), "nbytes=-1 is not a size"),
        (lambda: theory.seconds("send", math.nan, 2, WIRE), "nbytes=nan is not a size"),
        (lambda: theory.steps("all_to_all", 4, "tree"), "all_to_all has no algorithm 'tree'; it has ring$"),
        (lambda: theory.steps("gather", 4, "halving-doubling"), "it has naive, tree, ring$"),
        (lambda: theory.steps("all_reduce", 4, "magic"), "it has naive, tree, ring, halving-doubling$"),
        (lambda: theory.steps("all_reduce", 6, "halving-doubling"), "cannot pair 6; 4 or 8 ranks would work"),
        (lambda: theory.steps("all_reduce", 3, "halving-doubling"), "cannot pair 3; 2 or 4 ranks would work"),
        (lambda: theory.knee(1, WIRE), "all_reduce on 1 rank moves nothing and has no knee; use 2"),
        (lambda: Link(-1e-6, 1e9), "latency -1e-06 s .* must be at least 0"),
        (lambda: Link(math.inf, 1e9), "latency inf s and bandwidth 1000000000.0 bytes/s cannot be"),
        (lambda: Link(1e-6, 0), "bandwidth 0 bytes/s .* bandwidth above 0"),
        (lambda: theory.fit_link([1, 2], [1, 2], 1), "all_reduce on 1 rank moves nothing, .*; use 2 ranks"),
        (
            lambda: theory.fit_link([1, 2], [1], 2),
            r"2 sizes \(2 different\) and 1 times .* one time for each",
        ),
        (lambda: theory.fit_link([8, 8], [1, 2], 2), r"2 sizes \(1 different\) .* at least 2 different"),
        (lambda: theory.fit_link([1, 2], [0, 1], 2), r"times from 0\.0 s cannot be fitted; .* times above 0"),
        (lambda: theory.fit_link([1, 2], [1, math.inf], 2), "all of them finite"),
        (lambda: Block(1600, 24, 128), "hidden 1600 does not divide into 24 heads; 20 or 25 would work"),
        (lambda: Block(8, 9, 128), "hidden 8 does not divide into 9 heads; 4 or 8 would work"),
        (lambda: Block(7, 3, 1), "hidden 7 does not divide into 3 heads; 1 or 7 would work"),
        (lambda: Block(8, 2, 0), "Block sequence=0 is not a size; use 1 or more"),
        (lambda: theory.dp_tokens_to_hide(0, 2), "rho=0 is not FLOP/s over bytes/s"),
        (
            lambda: theory.dp_tokens_to_hide(math.inf, 2),
            "rho=inf is not FLOP/s over bytes/s; it must be finite",
        ),
        (lambda: theory.dp_tokens_to_hide(10, 0), "ranks=0 is not a count"),
        (lambda: theory.tp_compute_over_communication(0, 2, 10), "hidden=0 is not a count"),
    ],
)
def test_refusals(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_every_public_name_is_there() -> None:
    assert sorted(theory.__all__) == sorted(set(theory.__all__))
    assert all(hasattr(theory, name) for name in theory.__all__)


# --- model states ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "gigabytes"),  # of 7.5B parameters, stages 0 to 3: arXiv 1910.02054, table 1
    [
        (4, (120, 52.5, 41.3, 30)),
        (16, (120, 35.6, 21.6, 7.5)),
        (64, (120, 31.4, 16.6, 1.88)),
        (256, (120, 30.4, 15.4, 0.47)),
        (1024, (120, 30.1, 15.1, 0.12)),
    ],
)
def test_model_states_are_those_that_were_published(ranks: int, gigabytes: tuple[float, ...]) -> None:
    for stage, published in enumerate(gigabytes):
        digits = len(str(published).partition(".")[2])
        found = theory.model_states(7.5e9, ranks, stage).total / 1e9
        assert abs(found - published) <= 0.5 * 10**-digits + 1e-9


def test_model_states_by_category_and_what_they_refuse() -> None:
    states = theory.model_states(100, 4, 2, weight_bytes=4, gradient_bytes=4, optimizer_bytes=8)
    assert (states.parameters, states.gradients, states.optimizer) == (400, 100, 200)
    with pytest.raises(ValueError, match="stage=4 is not one of 0, 1, 2, 3"):
        theory.model_states(1, 1, 4)
    with pytest.raises(ValueError, match="ranks=0 is not a count"):
        theory.model_states(1, 0)


# --- what a backward hides ------------------------------------------------------------------------


def test_buckets_travel_one_behind_the_other() -> None:
    link = Link(latency=0.5, bandwidth=10.0)  # on 2 ranks 1 s of latency, and a tenth of a second a byte
    found = theory.overlap([1.0, 2.0, 7.0], [10, 20, 10], 2, link)
    assert found.starts == (1.0, 3.0, 7.0)  # the second waits for the first, the third for its gradients
    assert found.ends == (3.0, 6.0, 9.0)
    assert (found.backward, found.exposed) == (7.0, 2.0)
    assert theory.overlap([1.0, 2.0, 7.0], [10, 20, 10], 2, link, backward=8.5).exposed == 0.5
    assert theory.overlap([1.0, 2.0, 7.0], [10, 20, 10], 2, link, backward=10).exposed == 0


def test_a_bucket_that_is_full_early_keeps_its_turn() -> None:
    found = theory.overlap([5.0, 1.0], [10, 10], 2, Link(0.0, 10.0))
    assert found.starts == (5.0, 6.0)
    assert theory.overlap([], [], 2, WIRE).exposed == 0
    with pytest.raises(ValueError, match="2 times and 1 sizes"):
        theory.overlap([1.0, 2.0], [1], 2, WIRE)


def test_gradients_made_at_a_constant_rate_fill_buckets_evenly() -> None:
    assert theory.even_buckets(100, 40, 10.0) == ((4.0, 8.0, 10.0), (40, 40, 20))
    assert theory.even_buckets(90, 30, 9.0) == ((3.0, 6.0, 9.0), (30, 30, 30))
    assert theory.even_buckets(10, 25, 1.0) == ((1.0,), (10,))
    ready, sizes = theory.even_buckets(0.7, 0.1, 1.0)
    assert (len(ready), sum(sizes)) == (7, pytest.approx(0.7))
    with pytest.raises(ValueError, match="above 0"):
        theory.even_buckets(10, 0, 1.0)


@pytest.mark.parametrize("buckets", [1, 2, 7, 40])
@pytest.mark.parametrize("bandwidth", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("latency", [0.0, 0.01, 0.3])
def test_the_closed_form_is_the_simulation_of_equal_buckets(
    buckets: int, bandwidth: float, latency: float
) -> None:
    link, backward, nbytes = Link(latency, bandwidth), 6.0, 120.0
    ready, sizes = theory.even_buckets(nbytes, nbytes / buckets, backward)
    exposed = theory.exposed_seconds(backward, nbytes, buckets, 4, link)
    assert exposed == pytest.approx(theory.overlap(ready, sizes, 4, link).exposed, rel=1e-9)


def test_the_share_exposed_ends_at_the_knee_of_the_law() -> None:
    """A step of many buckets on a link without latency, by the simulation and by the law's own tokens."""
    rate, parameters, ranks, gradient_bytes = 1e12, 1e8, 8, 2
    link = Link(0.0, 1e10)
    knee = theory.dp_tokens_to_hide(rate / link.bandwidth, ranks, gradient_bytes)
    for x in (0.1, 0.5, 0.9, 1.0, 3.0):
        backward = 4 * x * knee * parameters / rate
        moving = seconds_of(gradient_bytes * parameters, ranks, link)
        assert backward == pytest.approx(x * moving)
        exposed = theory.exposed_seconds(backward, gradient_bytes * parameters, 10**5, ranks, link)
        share = exposed / (1.5 * backward + exposed)
        assert share == pytest.approx(theory.exposed_share(x), abs=1e-4)
        after = moving / (1.5 * backward + moving)
        assert after == pytest.approx(theory.exposed_share(x, overlapped=False))
    assert theory.exposed_share(0) == theory.exposed_share(0, overlapped=False) == 1
    with pytest.raises(ValueError, match="no number of tokens"):
        theory.exposed_share(-1)


def seconds_of(nbytes: float, ranks: int, link: Link) -> float:
    return theory.seconds("all_reduce", nbytes, ranks, link)


# --- pipelines -------------------------------------------------------------------------------------


def simulated(name: str, ranks: int, microbatches: int, chunks: int = 1, **costs: object) -> Any:
    from hpnb.pipeline_parallel import Costs, schedules

    made = schedules.make(name, ranks * chunks, microbatches, chunks)
    return made.simulate(Costs(**costs) if costs else Costs(1 / chunks, 1 / chunks, 1 / chunks))


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_the_bubble_is_that_of_the_simulation(ranks: int, rounds: int) -> None:
    m = rounds * ranks
    made = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("breadth-first", 2))
    for name, chunks in made:
        found = simulated(name, ranks, m, chunks)
        assert found.bubble_fraction == pytest.approx(theory.bubble(ranks, m, chunks), abs=1e-12)
    assert theory.bubble(ranks, 1) == pytest.approx(1 - 1 / ranks)
    assert [round(100 * theory.bubble(4, 8, v), 1) for v in (1, 2)] == [27.3, 15.8]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("microbatches", [1, 3, 12])
def test_in_flight_is_that_of_the_simulation(name: str, microbatches: int) -> None:
    found = simulated(name, 4, microbatches)
    held = [theory.in_flight(name, 4, microbatches, rank) for rank in range(4)]
    assert [found.peak_in_flight(rank) for rank in range(4)] == held


def test_the_slowest_stage_sets_the_pace() -> None:
    forward = [1.0, 1.5, 0.5, 1.25]
    backward = [2 * f for f in forward]
    each = [3 * f for f in forward]
    for m in (1, 4, 9):
        costs = {"forward": forward, "input_grad": backward, "weight_grad": 0.0}
        assert simulated("gpipe", 4, m, **costs).makespan == pytest.approx(theory.pipeline_seconds(each, m))
        assert simulated("1f1b", 4, m, **costs).makespan <= theory.pipeline_seconds(each, m) + 1e-9
    last = {"forward": forward[::-1], "input_grad": backward[::-1], "weight_grad": 0.0}
    last["forward"], last["input_grad"] = [1.0, 1.0, 1.0, 1.5], [2.0, 2.0, 2.0, 3.0]
    predicted = theory.pipeline_seconds([3, 3, 3, 4.5], 9)
    assert simulated("1f1b", 4, 9, **last).makespan == pytest.approx(predicted)
    idle = 1 - sum(each) * 10**6 / (4 * theory.pipeline_seconds(each, 10**6))
    assert idle == pytest.approx(1 - (sum(each) / 4) / max(each), abs=1e-5)


def test_more_microbatches_help_up_to_a_point() -> None:
    work, ranks, extra = 12.0, 4, 0.05
    step = {m: theory.step_seconds(work, ranks, m, extra) for m in range(1, 100)}
    assert step[8] == pytest.approx(
        simulated("1f1b", ranks, 8, forward=0.125, input_grad=0.25, weight_grad=extra).makespan
    )
    best = theory.best_microbatches(work, ranks, extra)
    assert best == pytest.approx((3 * 12 / (4 * 0.05)) ** 0.5)
    assert min(step, key=step.__getitem__) in (math.floor(best), math.ceil(best))
    assert theory.best_microbatches(work, ranks, 0.0) == math.inf
    assert theory.best_microbatches(work, 1, extra) == 0.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.bubble(0, 1), "ranks=0 is not a count"),
        (lambda: theory.bubble(2, 0), "microbatches=0 is not a count"),
        (lambda: theory.in_flight("interleaved", 2, 4), "'interleaved' has no closed form here"),
        (lambda: theory.in_flight("1f1b", 2, 4, 2), "rank=2 is not among 0 to 1"),
        (lambda: theory.pipeline_seconds([], 4), "stages=0 is not a count"),
        (lambda: theory.best_microbatches(1.0, 2, -1.0), "-1.0 s extra: both must be 0 or more"),
    ],
)
def test_refusals_of_pipelines(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
