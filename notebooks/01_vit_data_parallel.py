# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # When is data parallelism free?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hpnb/hpnb/blob/main/notebooks/01_vit_data_parallel.ipynb)
# [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/hpnb/hpnb/blob/main/notebooks/01_vit_data_parallel.ipynb)
#
# **The question.** In data parallelism every rank holds the whole model and works on its own part of the batch. After
# each backward all ranks must agree on one gradient. When is this free, and what do we pay otherwise?
#
# **You will be able to** estimate a training step's FLOPs and bytes, average gradients by hand, send them during the
# backward, tell from how many tokens per rank a step is free, and find replicas that diverge silently.
#
# **You should know** how to train a model with PyTorch on one GPU, and notebook 00: ranks, all-reduce, latency α,
# bandwidth B, and ρ, the FLOPs that a rank can compute while it sends one byte.
#
# **Time.** 35 minutes to read, 2 minutes to run, 85 minutes for the exercises.
#
# **Two questions to recall from 00.** In a ring of d ranks, how many bytes does each rank send in an all-reduce
# of S bytes? How large must that tensor be before its bytes take longer than its latency?
#
# <details><summary>Answers</summary>
#
# Each rank sends 2(d-1)/d S bytes, which is less than twice the tensor for any number of ranks. A tensor of d α B bytes
# spends as much time on latency as on bandwidth. This size is the knee of notebook 00. There the number of ranks was n.
# From here on it is d, the *data-parallel size*.
# </details>

# %% tags=["setup"]
import importlib.util

assert importlib.util.find_spec("hpnb"), "run `%pip install hpnb`, then this cell again"
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
import hpnb, torch, torch.distributed as dist
from hpnb import Layout, Mesh, comm, lesson, plot, theory
from hpnb.lesson.exercises import vit_data_parallel as exercises
from hpnb.lesson.figures import vit_data_parallel as figures
from hpnb.lesson.programs import device_timing, launch_timing, step_timing
from hpnb.lesson.programs.step_timing import divide_rounds

N = device_timing.timed_ranks()  # one rank per GPU; on a CPU at most one per core
pool = hpnb.Ranks(N)  # N processes that live until the end of the page
sizes, wide = lesson.choose_sizes("01", pool), lesson.choose_sizes("01.wide", pool)
SIZE, DTYPE, BUCKET_MB = sizes.size, sizes.dtype, sizes.bucket_mb
PARAMETERS, SMALL = SIZE.parameters(classes=3), hpnb.models.SIZES["laptop"]
leaves = hpnb.data.beans("train", size=48, image_size=32)
model_name = lesson.page_sizes.model_name(SIZE)
notes = "the machine's speed may change between cells: compare times within a cell"
here = lesson.banner(N, model=model_name, data=leaves.describe(), sizes=sizes,
                     reading=notes)  # fmt: skip
lesson.record("01.page", {"ranks": N, "tokens": SIZE.tokens, "image": SIZE.image})

# %% [markdown]
# ## What one step costs on one device
#
# A ViT (vision transformer) cuts an image into patches. Each patch becomes one *token*, a vector of h numbers, which
# passes through *blocks* of attention and an MLP. We time the ViT `SIZE` of the banner on random images of <data value="01.page.image">224</data> x
# <data value="01.page.image">224</data> pixels, which make <data value="01.page.tokens">197</data> tokens each, one of them for the class.
#
# Quick checks use `SMALL`, 8 blocks of width 64. Its images of 32 x 32 pixels show bean leaves of three classes.
#
# Two numbers describe the cost:
#
# - **6 FLOPs per parameter and token.** The forward does one multiplication and one addition per weight. The backward
#   does twice as much, because it computes two gradients: of the input and of the weight.
# - **16 bytes of model states per parameter.** With Adam in float32 these are 4 for the weight, 4 for its gradient and
#   8 for two moments. With 16-bit weights they are 2 + 2, and 12 for the moments and the *master
#   weight*, a float32 copy.
#
# We take notebook 00's machine card for <data value="01.page.ranks">4</data> ranks, and record the memory of one step.


# %%
def record_one_step():
    model, loss = device_timing.vit_and_loss(SIZE, sizes.batch, DTYPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if DTYPE.itemsize == 2:
        hpnb.precision.Masters(optimizer)  # keeps float32 master weights
    for _ in range(2):  # Adam creates its moments in the first step
        with hpnb.record.memory(model, optimizer) as recorder:
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    return recorder.profile()


card = lesson.machine_card(N)
card.show()
profile = pool.run(record_one_step)[0]
states = sum(profile.peak_of(k) for k in ("parameters", "gradients", "optimizer"))
work = 6 * PARAMETERS * SIZE.tokens * sizes.batch
lesson.show(rule_of_thumb={"model states (B)": 16 * PARAMETERS, "work (FLOP)": work},
            counted={"model states (B)": states,
                     "work (FLOP)": SIZE.training_flops(sizes.batch, classes=3)},
            key="01.cost")  # fmt: skip
lesson.show(profile, title="Activations pile up until the backward", key="01.memory")
lesson.record("01.bucket", BUCKET_MB)
lesson.record("01.few", {"images": sizes.few, "tokens": sizes.few * SIZE.tokens})

# %% [markdown]
# The states take <data value="01.cost.model-states.counted">4.85 GB</data>, as 16 bytes per parameter say. The rule for FLOPs leaves out attention's scores.
#
# The backward frees activations and leaves gradients behind. The peak of <data value="01.memory.peak">14.5 GB</data> comes where the backward begins and
# all activations are alive.
#
# **Takeaway.** States grow with the parameters, activations with the tokens. Data parallelism divides the tokens.
#
# ## Average the gradients, and check that nothing changed
#
# Each rank holds a *replica*, a full copy of the model, and takes 1/d of the batch. The optimizer must see the same
# gradient on every rank, so we average them:
#
# ```text
#                batch (d·b, 3, 32, 32)
#         rank 0: rows 0 … b-1     rank 1: rows b … 2b-1
#               │ backward               │ backward
#           p.grad (h, h)            p.grad (h, h)        different on every rank
#               └────── all-reduce, / d ─┘
#           p.grad (h, h)     =      p.grad (h, h)        the mean over the full batch
# ```
#
# If all parts have equally many samples, the mean of their means is the mean over the batch. Below, `axis` is the
# group of ranks that average.


# %%
def average_gradients(model, axis):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=axis.group)  # the sum over all ranks
        parameter.grad /= axis.size


def train(policy, batch, parts, wrap=lambda model: model, reduce=lambda model: None):
    # policy: the dtype, and whether there are float32 master weights
    # wrap goes round the model; reduce is called after the backwards of a step
    # vit draws its weights with a fixed seed, so all ranks start with the same ones
    model = policy.cast(hpnb.models.vit(SMALL, classes=3, device=hpnb.device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if policy.masters:
        hpnb.precision.Masters(optimizer)
    wrapped = wrap(model)
    for _ in range(3):
        optimizer.zero_grad()
        for rows in parts:  # slices of the batch, whose gradients add up
            inputs = {key: value[rows] for key, value in batch.items()}
            (wrapped(**inputs).loss / len(parts)).backward()
        reduce(model)
        optimizer.step()
    gradients = [p.grad for p in model.parameters()]
    return {"gradients": gradients, "weights": list(model.parameters())}


# %% [markdown]
# Sums depend on their order, so we need a yardstick: one process trains on the full batch, and again on the batch in d
# parts. Only rounding separates these two. The table has distances to the run on the full batch,
# $\lVert a - b \rVert / \lVert b \rVert$ over all tensors.


# %%
def compare_with_one_process():
    axis = Mesh(Layout(dp=hpnb.world_size())).dp  # one data-parallel group
    batch, parts = step_timing.load_batch(leaves, axis)  # all ranks' slices
    local, distances = [parts[axis.rank]], {}
    for name in ("fp64", "fp32", "bf16"):
        run = partial(train, hpnb.precision.policy(name), batch)
        ways = {
            "by hand": run(local, reduce=lambda model: average_gradients(model, axis)),
            "one process, in parts": run(parts),
        }
        reference = run([slice(None)])
        for way, result in ways.items():
            distances[f"{name}, {way}"] = step_timing.distances(result, reference)
    return distances


parity = lesson.Parity.worst_of(pool.run(compare_with_one_process))
lesson.show(parity, title="Ranks differ from one process by rounding",
            note="Compare the two rows of one precision.")  # fmt: skip
by_hand, in_parts = (parity.distances[f"fp64, {way}"]["gradients"]
                     for way in ("by hand", "one process, in parts"))  # fmt: skip
lesson.claim("in fp64 only rounding is left", (by_hand, "<", 100 * in_parts + 1e-15))

# %% [markdown]
# The two rows of a precision differ by rounding at most. A distance above a hundred times the yardstick is a bug.
# Test in float64: rounding in bf16 can conceal one.
#
# `hpnb.DataParallel(model, axis)` copies rank 0's weights to all ranks, and averages gradients inside each `backward()`.
#
# <details><summary>In your tools: average gradients</summary>
#
# `accelerator.prepare(model)` of Accelerate uses this wrapper of PyTorch:
#
# ```python
# from torch.nn.parallel import DistributedDataParallel
#
# replica = DistributedDataParallel(model, device_ids=[local_rank])
# ```
# </details>
#
# **Takeaway.** With parts of equal size, data parallelism changes the order of additions and nothing else.
#
# ### Exercise 1: the exact mean of a ragged batch
#
# *Extra, 15 minutes.* The last batch of an epoch may leave 4, 1 and 0 samples to three ranks. The mean of their means
# is then wrong, and an empty mean is NaN. Write `ragged_loss(losses, axis)` for this rank's losses (n,). Return a
# scalar whose gradient, averaged over ranks by `DataParallel`, is that of the mean over all samples. Send one number.
#
# <details><summary>Hint</summary>
#
# All ranks need the same denominator. `DataParallel` divides by the number of ranks, so multiply by it. The sum
# over an empty batch is 0 and still depends on the weights.
# </details>


# %% tags=["stub-1"]
def ragged_loss(losses, axis): ...


# %% tags=["check-1"]
lesson.check(exercises.ragged_mean, ragged_loss)

# %% [markdown]
# <details><summary>Solution</summary>
#
# A rank without samples joins the all-reduce with zeros. The library has this as `hpnb.data_parallel.global_mean`.
#
# ```python
# def ragged_loss(losses, axis):
#     count = torch.tensor(float(len(losses)), device=losses.device)
#     dist.all_reduce(count, group=axis.group)
#     return losses.sum() * axis.size / count
# ```
# </details>

# %% [markdown]
# ## Send gradients during the backward
#
# Gradients become final one by one, from the last layer to the first. Autograd calls a *hook* whenever the gradient of a
# parameter is complete, so we can send it while the backward goes on. Each message costs a latency. So we collect
# gradients in *buckets*, and send full ones:
#
# ```text
# backward     block 7          block 6          block 5    …    block 0
#                     └ bucket 0 full  └ bucket 1 full                  └ last bucket full
# link                  [all-reduce 0]   [all-reduce 1]  …                [all-reduce n]  exposed
# ```
#
# Communication is *exposed* while a rank waits for it and computes nothing. The last bucket usually is: it is full only
# when the backward ends. So very large buckets overlap little.
#
# We try the bucket and hook below on `SMALL`. Its gradient has <data value="01.small">413,699</data> numbers, in float64 of 8 bytes.

# %%
lesson.record("01.small", values := SMALL.parameters(classes=3))
lesson.record("01.factor", 2 * (N - 1) / N)
expected = theory.bytes_sent("all_reduce", 8 * values, N)
lesson.predict("01.step-bytes", "How many bytes does each rank send in a step?",
               unit="B", kind="identity", rule_of_thumb=8 * values)  # fmt: skip


def attach_bucket(parameters, all_reduce, in_flight):
    def on_gradient(_):  # autograd calls it when one of the gradients is complete
        # zero_grad left None, so all are there only when the bucket is full
        if all(p.grad is not None for p in parameters):
            flat = torch.cat([p.grad.flatten() for p in parameters])  # (numel,)
            in_flight.append((parameters, flat, all_reduce(flat)))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient)


def wait_and_unpack(in_flight, ranks):
    for parameters, flat, work in in_flight:
        work.wait()
        parts = (flat / ranks).split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad.copy_(part.view_as(parameter))
    in_flight.clear()


# %% [markdown]
# `all_reduce(flat)` will be `dist.all_reduce` with `async_op=True`. It returns at once, and `work.wait()` waits for the
# result. We put 16 tensors into each bucket.


# %%
def attach_buckets(model, all_reduce, in_flight):
    parameters = list(model.parameters())[::-1]  # about the order of the backward
    for i in range(0, len(parameters), 16):
        attach_bucket(parameters[i : i + 16], all_reduce, in_flight)
    return model


def train_with_buckets():
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    send = partial(dist.all_reduce, group=axis.group, async_op=True)
    (batch, parts), in_flight = step_timing.load_batch(leaves, axis), []
    run = partial(train, hpnb.precision.policy("fp64"), batch)
    reference = run([slice(None)])  # one process, with the full batch
    with hpnb.record.traffic() as sent:
        by_hand = run([parts[axis.rank]], lambda m: attach_buckets(m, send, in_flight),
                      lambda model: wait_and_unpack(in_flight, axis.size))  # fmt: skip
    library = run([parts[axis.rank]], lambda m: hpnb.DataParallel(m, axis))
    ways = {"buckets by hand": by_hand, "DataParallel": library}
    return {w: step_timing.distances(ways[w], reference) for w in ways}, sent


distances, sent = zip(*pool.run(train_with_buckets), strict=True)
buckets = lesson.Parity.worst_of(distances, tolerance=100 * in_parts + 1e-15)
lesson.show(buckets, title="Buckets give the same gradients")
lesson.reveal("01.step-bytes", sent[0].bytes["dp"] / 3, "B", expected, source="counted")

# %% [markdown]
# Counted as a ring, each rank sent <data value="01.step-bytes">4.96 MB</data> per step, 2(d-1)/d times the gradient's <data value="01.step-bytes.rule-of-thumb">3.31 MB</data>. With d = <data value="01.page.ranks">4</data> this
# factor is <data value="01.factor:g">1.5</data>. So each gradient is sent once. NCCL's bytes were not measured.
#
# We record a forward and backward of `SIZE` in three versions. A sends every tensor alone after the backward, B sends
# buckets after it, and C sends buckets during it. Each rank has <data value="01.few.images">64</data> images, or <data value="01.few.tokens">12,608</data> tokens, and a bucket has at
# most <data value="01.bucket">25.0</data> MiB.
#
# To predict them, we time a step without messages, note when each bucket is full, and add all-reduces that take what α
# and B say.

# %%
# (MiB of a bucket, reduce during the backward); a bucket of 1 byte holds one tensor
VERSIONS = {"A: tensors, after": (1e-6, False), "B: buckets, after": (BUCKET_MB, False),
            "C: buckets, during": (BUCKET_MB, True)}  # fmt: skip


def record_versions():
    axis, steps, alone = Mesh(Layout(dp=hpnb.world_size())).dp, {}, {}
    for name, (mb, during) in VERSIONS.items():
        model, loss = device_timing.vit_and_loss(SIZE, sizes.few, DTYPE)
        # the median of 3 steps without messages; it notes when each bucket is full
        alone[mb] = step_timing.time_backward(model, partial(loss, model), mb, 3)
        replica = hpnb.DataParallel(model, axis, mb, overlap_communication=during)
        steps[name] = replica, partial(loss, replica)
    return alone, step_timing.record_in_turn(steps, repeats=9)


# %% [markdown]
# A *round* times A, B and C once. We divide within each round, because a busy moment of the machine hits all three. We
# give the median of nine rounds and a *range*, from the second lowest to the second highest. The *verdict* on a ratio is
# *slower* if its range lies above 1, *faster* if below, and otherwise *cannot tell*, or undecided.
#
# The first figure is the prediction. The second is one round, the nearest to the medians in the table. Its dark grey is
# *work for messages*: starting them and copying gradients.

# %%
alone, rounds = pool.run(record_versions)[0]
# the same computing for A, B and C, so that they differ only by messages on the link
ideal = {v: alone[mb].as_long_as(alone[BUCKET_MB]).on(card.link, N, during)
         for v, (mb, during) in VERSIONS.items()}  # fmt: skip
predicted = {v: timeline.makespan for v, timeline in ideal.items()}
a, b, c = VERSIONS
lesson.predict("01.overlap", "How many times as long as B does C take?",
               rule_of_thumb=alone[BUCKET_MB].end / predicted[b])  # nothing is exposed
lesson.show(ideal, exposed=True, axis_labels={0: "each rank"},
            bubble=None,  # no share of idle time beside the ranks
            title="By α and B, buckets and overlap save time")  # fmt: skip
timelines = figures.typical_round(rounds)
steps, exposed = figures.median_steps(rounds)
b_over_a, c_over_b = figures.divide_versions(rounds)  # within rounds
lesson.show(figures.versions(timelines, b_over_a, c_over_b))
lesson.show(predicted=predicted, measured=steps, unit="s", key="01.step",
            columns={"measured, exposed (s)": exposed},
            title="Forward and backward, medians of nine rounds",
            note="Exposed: mean over ranks, with waits for slower ones.")  # fmt: skip
b_by_formula, c_by_formula = predicted[b] / predicted[a], predicted[c] / predicted[b]
lesson.reveal("01.overlap", c_over_b.median, "", c_by_formula, truth_range=c_over_b[1:])
lesson.claim("buckets are not slower than tensors", b_over_a.verdict != "slower")
lesson.record("01.b-over-a", figures.describe_ratio(b_over_a, b_by_formula))
lesson.record("01.c-over-b", figures.describe_ratio(c_over_b, c_by_formula))
lesson.record("01.versions", figures.describe_versions(rounds))

# %% [markdown]
# <details><summary>How to read the figures</summary>
#
# We divide or subtract two measured times within each round, and then take the median. So C / B need not equal the
# quotient of the two medians in the table, and a median difference need not equal the difference of two medians. Printed
# ranges are rounded, verdicts are not.
#
# If rounds are independent, the true median lies in the range with 95 % confidence. The rule of thumb of the question
# is a C that exposes nothing. The *ratio* in its answer is the measured value over the guess.
#
# A step's *makespan* is the time from its first start to its last end. Each title gives the share of the makespan in
# which a rank is exposed, averaged over the ranks. The round of the second figure has typical times; its exposed
# times may be further from the medians.
#
# The thin lane `dp` under a rank has its messages. The work for them is starting them, copying gradients into
# buckets (C does both inside the backward), and what the reducer does at the end. A message beside this work is not exposed, because the work counts as computing. A
# message of an early rank includes the wait for the last one, as in notebook 00. The prediction has neither this work
# nor these waits. Ranks that share a GPU compute by turns and send through its memory, so their exposed times say
# nothing about a link.
# </details>
#
# **Buckets.** Every all-reduce pays 2(d-1) α. A sends <data value="01.versions.messages.a">392</data> messages and B <data value="01.versions.messages.b">26</data>. B takes <data value="01.b-over-a.median:.3f">0.497</data> times as long as A, range
# <data value="01.b-over-a.low:.3f">0.443</data> to <data value="01.b-over-a.high:.3f">0.606</data>: the verdict is *<data value="01.b-over-a.verdict">faster</data>*. The prediction,
# <data value="01.b-over-a.predicted:.3f">0.611</data>, lies <data value="01.b-over-a.predicted-is">above this range</data> and leaves out
# the work for messages: on the slowest rank <data value="01.versions.handling.a">89.6 ms</data> in A and <data value="01.versions.handling.b">9.98 ms</data> in B.
#
# **Overlap.** C takes <data value="01.overlap:.3f">1.056</data> times as long as B (<data value="01.c-over-b.low:.3f">0.967</data> to <data value="01.c-over-b.high:.3f">1.146</data>): the verdict is *<data value="01.c-over-b.verdict">cannot tell</data>*. The prediction of
# <data value="01.overlap.predicted:.3f">0.920</data> lies <data value="01.c-over-b.predicted-is">below this range</data>. It leaves out two costs, which the next section
# measures: C's backward also fills the buckets, and an all-reduce beside this backward may slow it.
#
# **Late ranks.** Ranks with equal work do not start together. In C the last rank
# begins its backward <data value="01.versions.late.seconds">7.96 ms</data> after the first, by median. Messages of early ranks wait for it. A rank that is slow by itself would be last in every round. Here the
# most frequent is <data value="01.versions.late.last">rank 3 in 5 of 9 rounds</data>. So no rank is always the late one.
#
# <details><summary>In your tools: overlap</summary>
#
# DDP always overlaps.
#
# ```python
# ddp = {"bucket_cap_mb": 25}
# megatron_core = {"overlap_grad_reduce": True}
# deepspeed = {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 500_000_000}}
# ```
# </details>
#
# **Takeaway.** Buckets save latencies and the work of starting messages. Less exposed time need not mean a shorter
# step, so compare full steps.
#
# ### Exercise 2: a bucketed reducer
#
# *Core, 30 minutes.* Write `reducer(parameters, ranks, limit, all_reduce)`. The `parameters` come in the order of the
# backward. Put them into buckets of at most `limit` bytes, and close a bucket before the tensor that would exceed it.
# Call `all_reduce(flat)` as soon as a bucket is full. It sums in place, later, and returns an object with `wait()`.
# Return a function `finish()` that leaves the **mean** in every `p.grad`.
#
# <details><summary>Hint</summary>
#
# `attach_bucket` and `wait_and_unpack` do most of it. Every step starts with gradients that are None.
# </details>


# %% tags=["stub-2"]
def reducer(parameters, ranks, limit, all_reduce): ...


# %% tags=["check-2"]
lesson.check(exercises.reducer, reducer)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def reducer(parameters, ranks, limit, all_reduce):
#     buckets, in_flight = [[]], []
#     for p in parameters:
#         if buckets[-1] and sum(q.nbytes for q in buckets[-1]) + p.nbytes > limit:
#             buckets.append([])
#         buckets[-1].append(p)
#
#     def attach(bucket):
#         def on_gradient(_):
#             if all(q.grad is not None for q in bucket):
#                 flat = torch.cat([q.grad.flatten() for q in bucket])
#                 in_flight.append((bucket, flat, all_reduce(flat)))
#
#         for p in bucket:
#             p.register_post_accumulate_grad_hook(on_gradient)
#
#     def finish():
#         for bucket, flat, work in in_flight:
#             work.wait()
#             for q, part in zip(bucket, (flat / ranks).split([q.numel() for q in bucket])):
#                 q.grad.copy_(part.view_as(q))
#         in_flight.clear()
#
#     for bucket in buckets:
#         attach(bucket)
#     return finish
# ```
#
# The library's `hpnb.data_parallel.Reducer` also makes sure that all ranks send buckets in the same order, because
# all-reduces are matched by order. Its `.grad` is a view of the bucket, so nothing is copied back.
# </details>

# %% [markdown]
# ## When is it free?
#
# The backward has to last long enough. For one weight, a backward over T tokens does
# 4T FLOPs at R FLOP/s. Its gradient has g bytes, and an all-reduce over d ranks sends 2(d-1)/d g of them at B bytes/s.
# The backward takes longer than the all-reduce when
#
# $$ \frac{4T}{R} \ge \frac{2(d-1)}{d}\,\frac{g}{B} \qquad\text{so}\qquad T \ge \rho\,\frac{d-1}{d}\,\frac{g}{2}
# \qquad\text{with}\quad \rho = R/B $$
#
# We call this inequality *the law*, and the smallest such T the *token knee*. The size of the model cancels.
#
# A step is *free* if communication makes it less than 1.1 times as long as the step alone. By the law a step that reduces
# *during* the backward is free a little below the token knee, because it may last a tenth longer: from 0.87 of it on.
# One that reduces *after* it exposes the full all-reduce, and is free from 6.7 token knees on.
#
# A measured size is *free* if, at this size and at every larger one, the range of step / step alone lies below 1.1. It is
# *not free* if its range lies above 1.1, and otherwise undecided.
#
# <details><summary>The law's two curves, which the next figure has as lines</summary>
#
# A forward takes half as long as a backward. With T equal to x times the token knee, a step that reduces after the backward
# takes $1 + \frac{2}{3x}$ times as long as without communication. One that reduces during it takes
# $1 + \frac{2(1-x)}{3x}$ times as long up to the token knee, and from there on as long as without communication. The first
# ratio falls to 1.1 at x = 20/3 = 6.7, the second at x = 20/23 = 0.87.
#
# A step that is not free can still pay: at 1.25 times the time, two ranks train 1.6 times as fast.
# </details>
#
# The model is now `wide`, with depth <data value="01.wide.blocks">6</data>, width <data value="01.wide.width:,">4,096</data>, <data value="01.wide.parameters:,">1,212,260,355</data> parameters and gradients of <data value="01.wide.gradient">2.42 GB</data>. At each batch
# size, nine rounds time a step alone, one that reduces after the backward, one that reduces during it,
# and an all-reduce by itself.

# %%
law_knee = theory.dp_tokens_to_hide(card.rho, N, DTYPE.itemsize)
law = {"knee": law_knee, "during": 20 / 23 * law_knee, "after": 20 / 3 * law_knee}
middle = wide.size.tokens * 16  # of 16 images
by_law = 1 / (1 - theory.exposed_share(middle / law_knee))  # step / step alone
lesson.record("01.law", law | {"middle": by_law, "tokens": middle})
lesson.predict("01.free", "With overlap, from how many tokens per rank is a step free?",
               unit="tokens", rule_of_thumb=wide.size.tokens)  # fmt: skip
ALONE, AFTER, DURING = figures.ALONE, figures.AFTER, figures.DURING


def time_steps(images):
    axis, steps = Mesh(Layout(dp=hpnb.world_size())).dp, {}
    for name in (ALONE, AFTER, DURING):
        model, loss = device_timing.vit_and_loss(wide.size, images, DTYPE)
        if name != ALONE:
            overlap = {"overlap_communication": name == DURING}
            model = hpnb.DataParallel(model, axis, BUCKET_MB, **overlap)
        steps[name] = partial(step_timing.forward_and_backward, model, loss)
    message = torch.zeros(wide.size.parameters(3), dtype=DTYPE, device=hpnb.device())
    steps[figures.ALL_REDUCE] = partial(dist.all_reduce, message)
    return step_timing.rounds_in_turn(steps, repeats=9)


batches = [n for n in (1, 4, 16, 64) if n <= wide.batch]  # images of a rank
times = {wide.size.tokens * n: pool.run(time_steps, n)[0] for n in batches}

# %%
after = {tokens: divide_rounds(t[AFTER], t[ALONE]) for tokens, t in times.items()}
during = {tokens: divide_rounds(t[DURING], t[ALONE]) for tokens, t in times.items()}
overlap = {tokens: divide_rounds(t[DURING], t[AFTER]) for tokens, t in times.items()}
free_during = step_timing.measured_knee({t: r.high for t, r in during.items()})
versus = figures.law_words(law["during"], during)
lesson.show(figures.step_ratios(after, during, law_knee, {
    "law, during: free from": law["during"],
    "measured, during: free from": free_during,
    "law, after: free from": law["after"]}, versus))  # fmt: skip
lesson.show(columns=figures.spread_columns({
    "after / alone": after, "during / alone": during, "during / after": overlap}),
    title="Overlap pays where the range of during / after lies below 1")
at_most, at_fewest = (during[t].median for t in (max(times), min(times)))
less = f"communication adds less at {max(times)} tokens than at {min(times)}"
lesson.claim(less, (at_most, "<", at_fewest))
if free_during:  # else no size that we timed is free, and no answer can be scored
    lesson.reveal("01.free", free_during, predicted=law["during"],
                  truth_range=figures.free_range(during))  # fmt: skip
lesson.record("01.measured", figures.describe_sweep(after, during, overlap, law))
launches = pool.run(launch_timing.vit_launches, wide.size, 1, DTYPE)[0]  # 1 image
slow = figures.compare_with_rate(times, wide.size, card)
lesson.record("01.slow", slow | figures.describe_launches(launches, here.device))
lesson.record("01.alone", median(times[middle][ALONE]), "s")
lesson.record("01.middle", during[middle]._asdict())
lesson.record("01.extra", figures.cost_of_overlap(times[middle]))

# %% [markdown]
# **When is it free here?** Sizes are tokens per rank.
#
# - Reduced during the backward, a step is <data value="01.measured.during">not free at 197, 788 and 3,152, undecided at 12,608</data>. By the law it is free from <data value="01.law.during:,.0f">1,481</data> on,
#   0.87 of the token knee, <data value="01.law.knee:,.0f">1,703</data>.
# - Reduced after it, a step is <data value="01.measured.after">not free at 197, 788 and 3,152, undecided at 12,608</data>. By the law it is free from <data value="01.law.after:,.0f">11,352</data> on.
# - Overlap, against reducing after the backward, is <data value="01.measured.overlap">faster at 3,152, slower at 197 and 788, undecided at 12,608</data>.
#
# No size proved free with overlap, so no guess is scored.
#
# By the law a step with overlap and <data value="01.law.tokens:,">3,152</data> tokens takes <data value="01.law.middle:.2f">1.00</data> times as long as alone. We measure <data value="01.middle.median:.2f">1.23</data>
# (<data value="01.middle.low:.2f">1.22</data> to <data value="01.middle.high:.2f">1.30</data>).
#
# | with <data value="01.law.tokens:,">3,152</data> tokens | median |
# |---|---|
# | the step alone takes | <data value="01.alone">39.6 ms</data> |
# | reducing after the backward adds | <data value="01.extra.after">15.0 ms</data> |
# | reducing during the backward adds | <data value="01.extra.during">8.91 ms</data> |
# | an all-reduce of all gradients in one message takes | <data value="01.extra.all-reduce">10.4 ms</data> |
#
# Overlap can save at most the <data value="01.extra.after">15.0 ms</data> that reducing after the backward adds. One message, the last row, takes less.
# Buckets have three costs that the message lacks. By the formula the largest is latency: about 73 buckets pay about
# 9 ms, and with their bytes they need about 20. The measured time is shorter, because calls in a series overlap (00). The
# other costs are filling buckets, which we time below, and waits for late ranks.
#
# Within rounds, the step with overlap takes <data value="01.extra.compared">neither clearly longer nor clearly less than</data> the step alone and the one
# message together. So here overlap is faster than buckets after the backward, but not shown to be faster than one message.
#
# <details><summary>The law's times and the measured ones</summary>
#
# A measured ratio can leave the law's line in both directions. A step that computes slower than R lowers the ratio.
# Costs that the law leaves out, such as latencies, raise it.
#
# At B the all-reduce takes <data value="01.wide.by-bandwidth">11.3 ms</data>. At R the step alone, with the scores of attention, takes <data value="01.wide.at-rate">31.5 ms</data>. Measured, they
# take <data value="01.extra.all-reduce">10.4 ms</data> and <data value="01.alone">39.6 ms</data>. We subtract within each round and take the median, so the medians above need
# not give the same difference.
#
# Each of the model's 36 large weight matrices has 32 or 128 MiB, more than a bucket, and gets one to itself. Between two of
# them, a bucket has only biases and norms. That makes about 73 buckets. At 2(d-1) α each, their latencies take about 9 ms,
# and the bytes take <data value="01.wide.by-bandwidth">11.3 ms</data> more.
#
# With <data value="01.slow.tokens:,">197</data> tokens the step alone takes <data value="01.slow.times:.1f">9.4</data> times as long as at R. *Launches* are the calls that start a GPU's kernels. Do
# they make the step slow? On its slowest rank, <data value="01.slow.rank">rank 0</data>, we see this: <data value="01.slow.words">its process needs 17.7 ms just to launch the step, so launches set the time there</data>.
# </details>
#
# The law assumes that the backward keeps its speed while an all-reduce runs, and that filling buckets takes no time. To
# test the first, we run a step beside an *unrelated* all-reduce of as many bytes, and stop the clock when its backward is
# done. To test the second, we make each rank a data-parallel group of one, which fills buckets and sends nothing.


# %%
def time_causes(images):
    build = partial(device_timing.vit_and_loss, wide.size, images, DTYPE)
    (plain, loss), (filled, loss_2) = build(), build()
    # a data-parallel group of one: all ranks lie along tp, notebook 03's axis
    filled = hpnb.DataParallel(filled, Mesh(Layout(dp=1, tp=N)).dp, BUCKET_MB)
    step = step_timing.forward_and_backward
    return step_timing.rounds_in_turn({
        ALONE: partial(step, plain, loss),
        "beside an unrelated all-reduce": step_timing.beside_all_reduce(plain, loss),
        "with buckets, nothing sent": partial(step, filled, loss_2)}, repeats=9)


causes = pool.run(time_causes, 16)[0]  # 16 images: {step: seconds of each round}

# %%
factors = {way: divide_rounds(causes[way], causes[ALONE]) for way in list(causes)[1:]}
lesson.show(columns={"step / step alone": {way: f.median for way, f in factors.items()},
                     "range": {way: f.range for way, f in factors.items()},
                     "verdict": {way: f.verdict for way, f in factors.items()}},
            title="Two costs that the law leaves out, at 16 images a rank",
            key="01.cause")  # fmt: skip
last = theory.seconds("all_reduce", BUCKET_MB * 2**20, N, card.link)
lesson.record("01.together", figures.explain_step(causes, last, during[middle]))
lesson.record("01.wide", figures.describe_wide(wide.size, DTYPE, card))

# %% [markdown]
# Do these two costs and the last bucket, which no backward can overlap, explain the step with overlap? By α and B
# that bucket takes <data value="01.together.last-bucket">246 µs</data>, or <data value="01.together.share:.3f">0.006</data> of the step alone. Together that makes <data value="01.cause.beside-an-unrelated-all-reduce.step-step-alone:.3f">1.083</data> x <data value="01.cause.with-buckets-nothing-sent.step-step-alone:.3f">1.058</data> + <data value="01.together.share:.3f">0.006</data> = <data value="01.together.ratio:.2f">1.15</data>. For the
# step with overlap we measured a range of <data value="01.middle.low:.2f">1.22</data> to <data value="01.middle.high:.2f">1.30</data> above.
# <data value="01.together.lies">The sum lies below this range, so something else costs time as well</data>. Late ranks and latencies are candidates, which this run does not separate.
#
# <details><summary>Why we divide within rounds</summary>
#
# A machine's speed can change between rounds and between cells: a step alone took <data value="01.together.alone">41.2 ms</data> in these rounds, and <data value="01.alone">39.6 ms</data> in
# those that compared batch sizes. Such a change hits both times of one round alike, so a ratio within rounds suffers less from it than a quotient of
# two medians. A range assumes independent rounds, which a slow change of speed violates.
# </details>
#
# <details><summary>Why an all-reduce can slow the backward beside it</summary>
#
# An all-reduce also adds numbers and copies them. With more tokens the backward is longer, but the gradient has as many bytes as
# before. So the slowdown becomes a smaller share of the step.
#
# On a CPU the threads of an all-reduce occupy cores.
#
# On GPUs the kernels of an all-reduce occupy memory bandwidth and *multiprocessors*, the units
# that compute the backward. In one node, `hpnb.DataParallel(model, axis, copy_engines=True)` needs
# them less: gradients travel by *copy engines*, a GPU's separate units for copying memory, and multiprocessors only add. Ranks that share a GPU send through
# its memory, which their backwards need as well.
# </details>
#
# **Takeaway.** Communication weighs less with more tokens. In this run, <data value="01.measured.versus-law">with overlap a free step needs more tokens than the law says</data>.
# Whether overlap pays is another question, so measure both.
#
# **Challenge.** The explorer simulates a ViT-L/16 on 64 ranks with Ethernet 100 Gb. Expose
# less than 6.5 % of the step with at most 50,000 tokens per rank.
#
# <details><summary>Hint</summary>
#
# This link has α = 30 µs and B = 12.5 GB/s. With R = 400 TFLOP/s, ρ is 32,000 FLOP a byte. Gradients have g = 2 bytes, so
# the token knee is 31,500 tokens per rank.
#
# A bucket of d α B, here 24 MB or 22.9 MiB, spends half of its time on latency.
# </details>
#
# <details><summary>Answer</summary>
#
# With 50,000 tokens, the bucket limits 40, 50, 63 and 79 MiB expose 4.5, 4.9, 5.5 and 6.46 %. With 25 MiB there are 24
# buckets of 24.1 MiB, about d α B, so half of their time is latency. Together they need 186 ms on the link, and the
# backward takes 152 ms. 15 buckets of 38.6 MiB take 152 ms. With much larger buckets the last one is long, and nothing is
# left to overlap it: with 160 MiB, 11 % is exposed.
#
# The explorer's buckets are equal. Tensors of a real model do not divide so evenly, and need a few buckets more.
# </details>

# %%
lesson.explorers.overlapped_backward()

version = c  # becomes a row of the ledger, in which notebook 08 compares layouts
sent = theory.bytes_sent("all_reduce", DTYPE.itemsize * PARAMETERS, N)
quantities = {
    "sent (B)": (sent, step_timing.sent_bytes(timelines[version])),
    "states (B)": (16 * PARAMETERS, states),
    "forward and backward (s)": (predicted[version], steps[version]),
}
model = f"{model_name}, {sizes.few} images a rank"
lesson.ledger.add("01", Layout(dp=N), model, quantities, card.hardware)

# %% [markdown]
# ## Accumulation, 16 bits, and a silent failure
#
# *Gradient accumulation* splits the rank's batch into microbatches, adds up their gradients, and reduces once. All
# microbatches but the last run inside `no_sync()`.


# %%
def four_microbatches(accumulate):
    model, loss = device_timing.vit_and_loss(SMALL, 2, torch.float32)
    replica = hpnb.DataParallel(model, Mesh(Layout(dp=N)).dp)
    with hpnb.record.traffic() as traffic:
        for microbatch in range(4):
            with replica.no_sync() if accumulate and microbatch < 3 else nullcontext():
                loss(replica).backward()
    return traffic.bytes["dp"]


often, once = (pool.run(four_microbatches, way)[0] for way in (False, True))
lesson.show(counted={"four times (B)": often, "once (B)": once}, key="01.sent")

# %% [markdown]
# Accumulation sends <data value="01.sent.once.counted">2.48 MB</data> instead of <data value="01.sent.four-times.counted">9.93 MB</data>. Only the backward of the *last* microbatch can overlap, but the
# cost is spread over a longer step.
#
# 16-bit gradients halve the bytes. But in fp16 small gradients vanish, so the loss is multiplied by a *scale*. It
# doubles after `growth_interval` steps in a row without *overflow*, a gradient above 65504. A step that overflows is
# skipped and, with `hysteresis=1`, halves the scale.
#
# ### A failure that the loss does not show
#
# A colleague reduces gradients in fp16. If a rank's own gradient overflows, the rank sends zeros, skips its step, and
# halves its scale. The correct loop differs in one line.


# %%
def train_fp16(agree):
    axis, device = Mesh(Layout(dp=hpnb.world_size())).dp, hpnb.device()
    to_tensors = hpnb.data.ImageTransform(32, device=device)
    model = hpnb.models.vit(replace(SMALL, layers=4), classes=3, device=device)
    optimizer, history = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    weights = list(model.parameters())
    scaler = hpnb.precision.LossScaler(2.0**16, growth_interval=12, hysteresis=1)
    loader = hpnb.data.Loader(leaves, 8, axis, transform=to_tensors)
    for epoch in range(max(8, 3 * axis.size)):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = model(**batch).loss
            scaler.scaled(loss).backward()
            flat = torch.cat([p.grad.flatten() for p in weights]).half()
            overflow = 1.0 - flat.isfinite().all().float()
            if agree:
                overflow = comm.all_reduce(overflow, axis)  # the only difference
            flat = torch.zeros_like(flat) if overflow else flat / axis.size
            dist.all_reduce(flat, group=axis.group)
            if not overflow:
                step_timing.step_with(optimizer, weights, flat.float() / scaler.scale)
            scaler.update(bool(overflow))
            optimizer.zero_grad()
            history.append(step_timing.compare_replicas(loss, weights, overflow, axis))
    return history  # of each step the mean loss, distance, number of overflows


# %%
right, wrong = (pool.run(train_fp16, agree)[0] for agree in (True, False))
histories = {"agreed": right, "not agreed": wrong}
losses = {name: [step.loss for step in run] for name, run in histories.items()}
distance = {name: [step.distance for step in run] for name, run in histories.items()}
some = [i for i, step in enumerate(wrong, 1) if 0 < step.overflows < N]
lesson.show(plot.drift(losses, distance, some, "overflow on some ranks only",
                       "Both losses fall, but one run's replicas diverge"))  # fmt: skip
first, last = (sum(step.loss for step in part) / 6 for part in (wrong[:6], wrong[-6:]))
lesson.record("01.drift", {"first": first, "last": last, "overflows": len(some),
                           "distance": wrong[-1].distance})  # fmt: skip
lesson.claim("the loss of the wrong run falls", (last, "<", first))
lesson.claim("replicas that agree stay equal", (max(distance["agreed"]), "==", 0.0))
lesson.claim("replicas that do not agree diverge", (wrong[-1].distance, ">", 0.0))
lesson.field_guide.add(
    "the loss falls, and evaluation or checkpoints differ by rank",
    "distance between replicas: || w_r - w_0 || / || w_0 ||, every hundred steps",
    "a rank skipped a step after an overflow, and others did not", "01")  # fmt: skip
lesson.field_guide.show()

# %% [markdown]
# The wrong run's mean loss falls from <data value="01.drift.first:.2f">1.11</data> in the first six steps to <data value="01.drift.last:.2f">0.83</data> in the last six. But
# <data value="01.drift.overflows">5</data> overflows, dotted in the figure, hit some ranks only, and the replicas end at a relative distance of <data value="01.drift.distance:.2f">0.04</data>. A rank that
# skipped lacks an update, and has halved its scale. Weights and Adam's moments then stay different, because replicas
# never exchange them.
#
# <details><summary>If the distance falls at a later overflow</summary>
#
# Then a second rank has skipped too, at a different step. The replicas are closer and not equal, and from then on their
# scales may differ. The all-reduce adds gradients with different scales, and each rank divides the sum by its scale.
# </details>
#
# In a healthy run this distance is exactly 0. `hpnb.precision.step(optimizer, [axis], scaler=scaler)` lets all ranks
# decide alike.
#
# **Takeaway.** Every decision that changes weights, such as skip, clip or stop, needs numbers that are equal on all ranks.
#
# ### Exercise 3: a sampler behind a healthy curve
#
# *Extra, 15 minutes.* `seen[step][rank]` has the numbers of the samples that each rank saw in one epoch. Return the kind
# of sampler and the effective batch size.
#
# <details><summary>What the check wants</summary>
#
# Return a pair. First comes `"sharded"` if no sample was seen twice, `"same order"` if in every step all ranks saw the same samples,
# or `"own order"` if each rank shuffled all samples. Second comes the effective batch size, the number of different
# samples in a step, averaged over the steps.
# </details>
#
# <details><summary>Hint</summary>
#
# A Python set drops duplicates.
# </details>


# %% tags=["stub-3"]
def diagnose(seen): ...


# %% tags=["check-3"]
lesson.check(exercises.sampler, diagnose)

# %% [markdown]
# <details><summary>Solution</summary>
#
# The check prints the first and last loss of each sampler: all three fall. With the same order on all ranks, the mean
# gradient is the gradient of one rank: you pay for d ranks and get the batch of one. If each rank shuffles all samples
# for itself, one pass of the loaders goes through the data set d times.
#
# ```python
# def diagnose(seen):
#     effective = sum(len(set().union(*step)) for step in seen) / len(seen)
#     everything = [number for step in seen for part in step for number in part]
#     if len(set(everything)) == len(everything):
#         return "sharded", effective
#     same = all(part == step[0] for step in seen for part in step)
#     return ("same order" if same else "own order"), effective
# ```
# </details>

# %% [markdown]
# ## ZeRO in one picture
#
# Every replica keeps 16 bytes for each of P parameters. ZeRO, the *zero redundancy optimizer*, *shards* some or all of them:
# each rank keeps one d-th. After reduce-scatter, the first half of an all-reduce, rank r has the final gradient of its
# part. In stage 1 it keeps optimizer states for that part only, updates it, and sends the new weights to all by the second
# half, an all-gather:
#
# ```text
# gradient (P,) ── reduce-scatter ──▶ (P/d,) ── Adam on P/d weights ──▶ (P/d,) ── all-gather ──▶ weights (P,)
# ```
#
# ZeRO stage 1 shards the optimizer states, stage 2 also the gradients, and stage 3 also the weights, which it gathers
# block by block in the forward and in the backward. Only bytes matter here, so this cell's ranks use CPUs. `SMALL` gets
# 32 classes, which divide evenly.


# %%
def one_zero_step(stage):
    axis, adam = Mesh(Layout(dp=hpnb.world_size())).dp, torch.optim.AdamW
    model = replica = hpnb.models.vit(SMALL, classes=32, dtype=torch.bfloat16)
    if stage in (1, 2):  # it has the masters itself; in stage 3 parameters are shards
        optimizer = hpnb.ZeroOptimizer(model.parameters(), adam, axis, stage=stage)
    else:
        replica = (hpnb.fully_shard if stage == 3 else hpnb.DataParallel)(model, axis)
        hpnb.precision.Masters(optimizer := adam(model.parameters()))
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.arange(2)}
    for _ in range(2):  # Adam creates its moments in the first step
        with hpnb.record.traffic() as t, hpnb.record.memory(model, optimizer) as memory:
            replica(**batch).loss.backward()
            optimizer.step()
    return step_timing.state_bytes(memory.profile(), optimizer), t.bytes["dp"]


cpus, D = (pool, N) if here.device == "cpu" else (hpnb.Ranks(4, device="cpu"), 4)
runs = {f"stage {s}": cpus.run(one_zero_step, s)[0] for s in range(4)}
kept, sent = ({name: run[k] for name, run in runs.items()} for k in (0, 1))
predicted = {f"stage {s}": vars(theory.model_states(SMALL.parameters(32), D, s))
             for s in range(4)}  # fmt: skip
lesson.show(figures.states(predicted, kept, f"ZeRO keeps less on a rank; {D} ranks"))
lesson.show(counted=sent, unit="B", title="Sent by a rank per step", key="01.zero-sent")
lesson.record("01.zero", {name: sum(p.values()) for name, p in kept.items()}, "B")
lesson.claim("stage 1 sends no more", (sent["stage 1"] - sent["stage 0"], "==", 0))

# %% [markdown]
# Stage 0, plain data parallelism, keeps <data value="01.zero.stage-0">6.65 MB</data> of states on each rank. Stage 3 keeps <data value="01.zero.stage-3">1.66 MB</data>.
#
# Stages 1 and 2 send <data value="01.zero-sent.stage-1.counted">1.25 MB</data>, as many bytes as stage 0, because an all-reduce consists of the same two halves. Stage 3
# sends <data value="01.zero-sent.stage-3.counted">1.85 MB</data>, about 1.5 times as many, in three such halves: it gathers weights twice and reduce-scatters gradients once.
#
# <details><summary>In your tools: ZeRO</summary>
#
# ```python
# from torch.distributed.fsdp import fully_shard  # ZeRO stage 3, called for each block and the model
# from torch.distributed.optim import ZeroRedundancyOptimizer  # stage 1
#
# deepspeed = {"zero_optimization": {"stage": 1}}  # or 2, or 3
# megatron_core = {"use_distributed_optimizer": True}  # stage 1
# ```
# </details>
#
# **Takeaway.** ZeRO stages 1 and 2 save memory and send no extra bytes.
#
# ### Exercise 4: ZeRO stage 1 by hand
#
# *Core, 25 minutes.* All ranks have equal `weights` (P,), and `step(gradient)` gets this rank's gradient. Change
# `weights` in place as Adam on one process would with the mean gradient, by one reduce-scatter and one all-gather. P is a
# multiple of d. `self.optimizer` must be a `torch.optim.Adam` that keeps 1/d of the moments.
#
# <details><summary>Hint</summary>
#
# `dist.reduce_scatter_tensor(output, input, group=axis.group)` sums, so divide by d. Do not trust the eye
# here: Adam's steps hardly depend on the scale of the gradient, so a missing division changes them very little.
# </details>


# %% tags=["stub-4"]
class Zero1:
    def __init__(self, weights, axis, lr):
        raise NotImplementedError

    def step(self, gradient):
        raise NotImplementedError


# %% tags=["check-4"]
lesson.check(exercises.zero1, Zero1)

# %% [markdown]
# <details><summary>Solution</summary>
#
# Adam divides a gradient by its own size, so a sum instead of a mean moves the weights by almost the same. Only Adam's
# epsilon shows the difference, and the check in float64 sees it.
#
# ```python
# class Zero1:
#     def __init__(self, weights, axis, lr):
#         self.weights, self.axis = weights, axis
#         size = len(weights) // axis.size
#         self.shard = weights[axis.rank * size : (axis.rank + 1) * size].clone().requires_grad_()
#         self.optimizer = torch.optim.Adam([self.shard], lr=lr)
#
#     def step(self, gradient):
#         self.shard.grad = torch.empty_like(self.shard)
#         dist.reduce_scatter_tensor(self.shard.grad, gradient / self.axis.size, group=self.axis.group)
#         self.optimizer.step()
#         dist.all_gather_into_tensor(self.weights, self.shard.detach(), group=self.axis.group)
# ```
# </details>

# %% [markdown]
# ## What to remember
#
# - A step costs 6 FLOPs per parameter and token, and 16 bytes per parameter.
# - Send gradients in buckets. Measure whether overlap pays.
# - By the law the all-reduce fits under the backward from ρ(d-1)/d g/2 tokens per rank on.
# - Measure the distance between replicas.
#
# **When not to use this.** If the model states or the activations of one image do not fit a device, use another kind of
# parallelism.
#
# <details><summary>Where to look, and papers</summary>
#
# **Where to look.** PyTorch's `torch/csrc/distributed/c10d/reducer.cpp`, and `hpnb/data_parallel/reducer.py`.
#
# **Papers.** Li et al. 2020, *PyTorch Distributed: experiences on accelerating data parallel training*. Micikevicius et
# al. 2018, *Mixed precision training*. Rajbhandari et al. 2020, *ZeRO: memory optimizations toward training trillion
# parameter models*.
# </details>
#
# **Next.** Notebook 02 gives each rank only some of the layers, and asks who is idle.
