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
# # How far does data parallelism alone go?
#
# **The question.** Data parallelism divides the tokens and copies the rest (01). A GPT-2 with 1.5 billion parameters
# has 25 GB of that rest. How large a model can replicas train once nothing is copied, what does each saved byte cost
# in time, and what stops them when memory no longer does?
#
# **You will be able to** predict the peak memory of a training step from shapes, within a few per cent; say which
# moment of the step it is, and which of sharding, recomputing and offloading moves it; read a list of survivors after
# an out-of-memory; choose the blocks to compute again under a budget; order gathers so that nobody waits; measure a
# gradient noise scale, and distrust it.
#
# **You should know** notebooks 00 (ρ, the wires) and 01 (16 bytes a parameter, buckets, ZeRO's stages, the token knee).
#
# **Time.** 35 minutes to read; under 2 minutes to run on a laptop, and as long on 2 or 4 GPUs; 70 minutes for the
# exercises.
#
# **Two questions to recall** notebook 01: Which bytes of a step go with parameters, which with tokens? And how many
# tokens must a rank have so that the gradients' all-reduce hides behind its backward?
#
# <details><summary>Answers</summary>
# Weights, gradients, moments and masters go with parameters, 16 bytes each; activations go with tokens. About
# ρ(d-1)/d, with gradients of 2 bytes.
# </details>

# %% tags=["setup"]
import inspect
from dataclasses import replace

import torch
import hpnb
from hpnb import Layout, Mesh, lesson, plot, theory
from hpnb.lesson.figures import gpt2_data_parallel as figures
from hpnb.lesson.programs import device_timing, gpt2_zero, gradient_noise
from hpnb.lesson.exercises import gpt2_data_parallel as exercises
from hpnb.lesson.programs.gpt2_zero import ZeroConfig
from hpnb.models import GPT2_SIZES, GPT2Size

N = min(4, device_timing.timed_ranks())  # on a CPU no more than cores, so that a clock means something
GPU = hpnb.ranks.choose_device("auto", N).device == "cuda"
XL, SMALL = GPT2_SIZES["1.5b"], GPT2Size(192, 12, 6, 768, 1511, 64)  # a head as heavy beside its blocks as XL's
SIZE, DTYPE, BUCKET, ROWS = (XL, torch.bfloat16, 25.0, 2) if GPU else (SMALL, torch.float32, 2.0, 2)
PARAMETERS, TOKENS = SIZE.parameters(), ROWS * SIZE.length
BUDGET = 24e9 * PARAMETERS / XL.parameters()  # a 24 GB card for XL, and the same share of it for a smaller model
name = f"GPT-2, {SIZE.layers} blocks of {SIZE.hidden}, {PARAMETERS / 1e6:,.1f} M parameters, {str(DTYPE)[6:]}, {TOKENS} tokens a rank"
english = hpnb.data.text("train", vocabulary=gradient_noise.SIZE.vocab_size, block=gradient_noise.SIZE.length)
here = lesson.banner(N, model=name, data=english.describe(), reading=f"every rank has a budget of {lesson.number(BUDGET, 'B')}")
pool = hpnb.Ranks(N)  # these ranks stay to the end

# %% [markdown]
# ## The unchanged run does not fit
#
# Weight 2, gradient 2, master and moments 12; or in float32 4, 4 and 8: a parameter is 16 bytes either way. GPT-2 XL
# has 1,557,611,200 of them. That is 24.9 GB before the first token, and a card of 24 GB is a common one.
#
# So the page gives every rank a *budget* of 24 GB; on a laptop, where the model is smaller, the same share of it.
# `hpnb.record.memory(..., budget=...)` counts the bytes of all tensors after every operator and raises when there are
# more; the error lists the *survivors*, the tensors that were alive at that moment. (On GPUs it counts what the
# allocator has handed out. A real card fails a little earlier, when free memory is in pieces that do not fit.) Here is
# notebook 01's code, with GPT-2 in the place of the ViT. (A *stage*, 0 to 3, is ZeRO's on this page, not a
# pipeline's.) Commit first.

# %%
lesson.predict("05.states", f"{PARAMETERS:,} parameters in {str(DTYPE)[6:]} with AdamW, stage 0: how many bytes of states has each "
               "rank after its first step?", guess=None, unit="B")  # fmt: skip


def unchanged():
    model, batch = gpt2_zero.gpt2_and_batch(SIZE, ROWS, DTYPE)
    replica = hpnb.DataParallel(model, Mesh(Layout(dp=hpnb.world_size())).dp, BUCKET)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if DTYPE.itemsize == 2:
        hpnb.precision.Masters(optimizer)
    try:
        with hpnb.record.memory(model, optimizer, budget=BUDGET):
            replica(**batch).loss.backward()
            optimizer.step()
    except hpnb.record.OutOfBudget as error:
        return error.with_traceback(None)


stopped = pool.run(unchanged)[0]
assert isinstance(stopped, hpnb.record.OutOfBudget)
rows = [(str(each), each.category, lesson.number(each.nbytes, "B")) for each in stopped.survivors[:8]]
lesson.table(("survivors", "held as", "bytes"), rows, f"out of budget {stopped.operator}", str(stopped) + ".")

# %% [markdown]
# Read the list of survivors as you would a crash report: shape, number, owner. The matrices of the blocks are there
# three or four times over: as weights, gradients, and as much as there already is of Adam's moments. What shape are the
# activations? There are next to none. In float32 the run had survived a forward and a backward, and it died in the very
# first `optimizer.step()`, where the moments come into being. (With 16-bit weights the masters are made before; then it
# may die sooner.) Nothing is wrong with the batch, so a smaller batch does not help.
#
# (Gradients lie in buckets. A bucket is listed whole, under the shape of the first gradient that was seen in it; so
# such a row has more bytes than its shapes make.)
#
# **Takeaway.** The first step is not the fullest; the second is. A run that survives its first backward proves nothing.
#
# ## The memory river
#
# Four moments of a step can be the fullest, for T tokens of a rank, V words, and w bytes a value:
#
# - **turn.** The forward is over. Every block holds what its backward needs, about 28 T h w: two norms' inputs and
#   outputs, q, k and v, attention's output, and *five* copies of the MLP's 4h, since GPT-2's GELU is written out in
#   Python (a fused one keeps two). And the head: float32 log-probabilities and two gradients of them, 12 V T bytes.
# - **block i.** Backward of block i: the blocks below still hold theirs; gradients pile up.
# - **end.** All gradients, no activations. GPT-2's head and embedding are one table (*tied*: 06), whose
#   gradient has waited here since the head.
# - **step.** With masters, every gradient once more in float32.
#
# `theory.step_memory` is this list, in numbers. Which one wins depends on how states are kept. Recomputing: a block
# drops what its forward made, keeps its input, and runs its forward again in the backward. That is five lines, with
# PyTorch's `checkpoint`; tables and figures call it `+ again`, where every block does it:

# %%
print(inspect.getsource(gpt2_zero.recompute_blocks))
lesson.predict("05.fullest", f"{TOKENS} tokens a rank, {N} ranks. How many of stages 0 to 3 have a peak within "
               f"{lesson.number(BUDGET, 'B')}?", guess=None, kind="identity")  # fmt: skip
WAYS = [ZeroConfig(stage, again) for again in (0, -1) for stage in range(4)] + [ZeroConfig(3, -1, True)] * GPU
found = {way: pool.run(gpt2_zero.measure_step, SIZE, ROWS, DTYPE, way, BUCKET)[0] for way in WAYS}
told = {way: gpt2_zero.predict_memory(SIZE, ROWS, DTYPE, way, N, BUCKET) for way in WAYS}

# %%
shown = [ZeroConfig(0), ZeroConfig(1), ZeroConfig(2), ZeroConfig(3), ZeroConfig(0, -1), ZeroConfig(3, -1)]
peaks = ", ".join(f"{way} {lesson.number(found[way].profile.peak, 'B')}" for way in shown)
plot.show(
    figures.rivers({str(way): found[way].profile for way in shown}, BUDGET, f"measured · rank 0 of {N}, {TOKENS} tokens: memory by category"),
    alt=f"Six panels of memory over a step, by category. Peaks: {peaks}; the budget is {lesson.number(BUDGET, 'B')}.",
)
rows = [(f"{way}, at its {told[way].fullest.name}", told[way].peak, found[way].profile.peak, "B") for way in WAYS]
ratios = lesson.comparison(rows, title=f"peak of a step, by theory.step_memory and recorded, {N} ranks")
last = found[ZeroConfig(0)].profile.samples[-1]
lesson.reveal("05.states", last.parameters + last.gradients + last.optimizer, predicted=16 * PARAMETERS)
fitting = [way for way in WAYS if found[way].profile.peak <= BUDGET]
lesson.reveal("05.fullest", sum(not way.again for way in fitting), predicted=sum(told[ZeroConfig(s)].peak <= BUDGET for s in range(4)))
print(f"within {lesson.number(BUDGET, 'B')}: {', '.join(map(str, fitting)) or 'nothing'}")

# %% [markdown]
# Each panel reads from the left, and has a clock of its own: recording slows a step by what it records. Blue and green
# are there all the time; ranks divide green from stage 1 on, and blue in stage 3. Red is flat in stages 0 and 1, where
# buffers of gradients stay; in stage 2 it grows during the backward, so that it is smallest when activations are
# largest. That is more than the formula of 01 gives it credit for. In stage 3 weights come and go as grey: gathered for
# a block, and freed.
#
# Computing again takes away yellow. Grey teeth remain, one for each block that is whole for the time of its backward;
# and the peak moves to a later moment (the table names the one that the formula finds fullest). Look at stage 3 with
# it: what is left is the embedding, which stays whole, and at its end gradients. With many words and few blocks, 12 V T
# is the next to go: `hpnb.models.chunk_loss(model, 1024)` never has more than 1,024 rows of logits.
#
# **Takeaway.** States are divided by ranks, activations by recomputing, logits by chunks. Ask *when* a run is fullest,
# then divide what is there.
#
# ### Exercise 1: bytes of any stage
#
# *Implement, 10 minutes; it returns to 01.* Return `{"parameters": .., "gradients": .., "optimizer": ..}`, the bytes on
# one rank between two steps. The last three arguments are bytes a parameter, undivided. The check wants the twenty
# numbers of the ZeRO paper's table 1, and byte for byte what is recorded of a small GPT-2 on 2 ranks.
#
# Hint: stage 1 deals out one of the three, stage 2 two.

# %% tags=["stub-1"]
def kept(parameters, ranks, stage, weight_bytes, gradient_bytes, optimizer_bytes):
    ...


# %% tags=["check-1"]
lesson.check(exercises.state_bytes, kept)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def kept(parameters, ranks, stage, weight_bytes, gradient_bytes, optimizer_bytes):
#     held = {"parameters": weight_bytes, "gradients": gradient_bytes, "optimizer": optimizer_bytes}
#     dealt = list(held)[3 - stage :]
#     return {name: parameters * size / (ranks if name in dealt else 1) for name, size in held.items()}
# ```
# </details>

# %% [markdown]
# ## Shard, recompute, offload
#
# What does a byte cost? By 01, stages 1 and 2 send what stage 0 sends; but their all-gather follows the step, where
# nothing hides it. Stage 3 sends half as much again, behind blocks that compute. Computing again adds a forward:
# a third of forward and backward. *Offloading* keeps a rank's share on the host; gradients go down and weights come
# up a link (PCIe) that is slower than the device's memory by a factor of 50 and more, and Adam runs at the host's pace.
# It needs a GPU: on a laptop there is nowhere to go.
#
# `theory.zero_step_seconds` adds these up. It takes forward, backward and optimizer of a rank alone, and your card.

# %%
card = lesson.machine_card(N)
card.show()
base = pool.run(gpt2_zero.time_serial_step, SIZE, ROWS, DTYPE)[0]
parts = {way: gpt2_zero.predict_seconds(SIZE, DTYPE, way, card, base, BUCKET, link=25e9) for way in WAYS}
lesson.predict("05.quickest", f"Of the ways that fit ({', '.join(map(str, fitting))}), which has the shortest step?",
               guess=None, kind="ranking")  # fmt: skip

# %%
families = {"nothing computed again": [ZeroConfig(s) for s in range(4)], "every block computed again": [ZeroConfig(s, -1) for s in range(4)],
            "and offloaded": [way for way in WAYS if way.offload]}  # fmt: skip
points = {side: {family: {f"{way.stage}": (seconds(way), held(way)) for way in ways} for family, ways in families.items() if ways}
          for side, seconds, held in (("predicted", lambda w: sum(parts[w].values()), lambda w: told[w].peak),
                                      ("measured", lambda w: found[w].seconds, lambda w: found[w].profile.peak))}  # fmt: skip
rows = [(f"{way}, step (s)", sum(parts[way].values()), found[way].seconds) for way in WAYS]
ratios = lesson.comparison(rows, title=f"seconds of a step, {N} ranks, {here.devices or f'{here.cores} cores'}")
quickest, leanest = (min(WAYS, key=key) for key in (lambda w: found[w].seconds, lambda w: found[w].profile.peak))
plot.show(
    figures.frontier(points["predicted"], points["measured"], BUDGET, f"measured · {N} ranks: stages 0 to 3, in time and memory",
                  f"The quickest is {quickest}; {leanest} holds the least, for {found[leanest].seconds / found[quickest].seconds:.2f} times as long."),
    alt=f"Step time against peak memory for {len(WAYS)} ways. {quickest} is the quickest, {leanest} holds the least; {len(fitting)} fit the budget.",
)  # fmt: skip
costs = {str(way): found[way].seconds for way in fitting}
lesson.reveal("05.quickest", costs, predicted=[str(way) for way in sorted(fitting, key=lambda w: sum(parts[w].values()))])
for way in (ZeroConfig(2), ZeroConfig(3, -1)):
    quantities = {"peak (B)": (told[way].peak, found[way].profile.peak), "step (s)": (sum(parts[way].values()), found[way].seconds)}
    lesson.ledger.add("05", Layout(dp=N), f"{name}, {way}", quantities, card.hardware)

# %% [markdown]
# Bytes are predicted to a few per cent, seconds are not: where the table says "name the missing term", read it so.
# Above 1: the model lets communication hide for free; on a CPU copying and adding take the very cores that compute
# (01). It knows neither the copies into buckets nor the hooks of every block, which many small blocks pay for. On a GPU
# with few tokens the host is part of it: it launches more slowly than the device computes, and each hook, bucket and
# message is one more thing to launch. And it takes computing again for exactly one forward. Below 1: the prediction starts from a step without messages, timed at
# another moment than the rest. If the machine was slower then, all predictions are too long, and only their order still
# says something.
#
# A frontier is read from the budget's line. Right of it a point is of no use, however quick. Left of it take the
# lowest: usually the *least* sharding that fits. A point that is above and to the right of another one is never
# worth it.
#
# **Takeaway.** Use the lowest stage that fits; recompute what is still too much; offload last.
#
# ### Exercise 2: which blocks to compute again
#
# *Design, 20 minutes.* All or nothing is rarely best. `layers` have `.kept` bytes of activations, `.input` bytes, and
# `.seconds` of forward. Return the blocks to compute again (a set or list of indices): with
# `exercises.peak(layers, again, head) <= budget`, in the fewest seconds. `peak` walks the backward: at the turn the
# head's bytes are there too; later, a block that is computed again is whole for its own backward.
#
# Hint: eight blocks have 256 subsets. Taking the largest first is not best; and look at what computing the last block
# again saves where the head is light.

# %% tags=["stub-2"]
def choose(layers, head, budget):
    ...


# %% tags=["check-2"]
lesson.check(exercises.recompute_choice, choose)

# %% [markdown]
# <details><summary>Solution</summary>
#
# The last block is whole again just when the blocks before it hold everything: where the head's bytes are few, nothing
# is gained. So with equal blocks take the first ones, as `compute_again` does.
#
# ```python
# from itertools import combinations
#
#
# def choose(layers, head, budget):
#     every = range(len(layers))
#     able = [c for n in range(len(layers) + 1) for c in combinations(every, n)
#             if exercises.peak(layers, c, head) <= budget]
#     return min(able, key=lambda chosen: sum(layers[i].seconds for i in chosen))
# ```
# </details>

# %% [markdown]
# ### Who waits for a gather
#
# Stage 3 is only cheap if blocks arrive before they are needed. Six of XL's blocks, 8,192 tokens a rank, on 8 ranks of
# InfiniBand NDR, simulated by `theory.simulate_gathers`: gathered on demand (`prefetch 0`), and one block ahead (`prefetch 1`).
# The gradients' reduce-scatters are left out.

# %%
block, wire = XL.block(8), theory.LINKS["InfiniBand NDR"]
forward, gather = block.forward_flops / 400e12, theory.seconds("all_gather", 2 * block.parameters, 8, wire)
uses = [*range(6), *reversed(range(6))]
computing = [forward] * 6 + [2 * forward] * 6
plans = {f"prefetch {ahead}": theory.prefetch_plan(uses, ahead) for ahead in (0, 1)}
ran = {which: theory.simulate_gathers(uses, computing, [gather] * 6, [2 * block.parameters] * 6, plan) for which, plan in plans.items()}
plot.show(
    plot.timeline(*(gpt2_zero.gather_timeline(one, uses, 8) for one in ran.values()), names=list(ran), exposed=True, bubble=None,
                  axis_labels={0: "each rank"}, title="six blocks of GPT-2 1.5B in one step, over their gathers"),
    alt=f"Two steps of six blocks over their gathers. On demand blocks wait {lesson.number(ran['prefetch 0'].stall, 's')} in all, "
    f"one ahead {lesson.number(ran['prefetch 1'].stall, 's')} after the first gather.",
)  # fmt: skip

# %% [markdown]
# On demand a block waits for each gather: 37.7 ms. One ahead the wire works while blocks compute: 26.2 ms, and only the
# first gather is exposed, for a gather takes less than a block's forward. (Paler is a later block. Twelve uses need
# eleven gathers: the last block is still whole when its backward begins.)
#
# ### Exercise 3: gathers that keep nobody waiting
#
# *Design, 25 minutes.* `step.uses` are blocks in the order in which they compute: 0 to L-1, then back. Return a list
# of lists, one for each use: the blocks whose gathers begin when that use begins (before it waits for its own).
# Gathers share one wire, in order. After its use a block is freed, unless the next use is of the same block. Whole
# blocks, from the start of their gathers on, may have at most `step.room` bytes; block b has `step.sizes[b]`. The
# check simulates three steps: no use but the first may wait, and 2L - 1 gathers are enough.
#
# Hint: go through the gathers in the order of uses, each as early as there is room. A block that is still whole cannot be
# gathered: wait until it has been freed.

# %% tags=["stub-3"]
def plan(step):
    ...


# %% tags=["check-3"]
lesson.check(exercises.gather_order, plan)

# %% [markdown]
# <details><summary>Solution</summary>
#
# One ahead does not do where a wide block stands behind narrow ones: its gather must begin two uses before.
#
# ```python
# def plan(step):
#     queue = [b for k, b in enumerate(step.uses) if k == 0 or step.uses[k - 1] != b]
#     whole, starts = set(), []
#     for k, block in enumerate(step.uses):
#         starts.append([])
#         while queue and queue[0] not in whole and sum(step.sizes[b] for b in {*whole, queue[0]}) <= step.room:
#             whole.add(queue[0])
#             starts[k].append(queue.pop(0))
#         if step.uses[k + 1 : k + 2] != (block,):
#             whole.discard(block)
#     return starts
# ```
# </details>

# %% [markdown]
# ## The largest model
#
# Now turn it round: keep width, rows and budget, and add blocks. Where does each way stop? `gpt2_zero.most_blocks_predicted` asks
# `step_memory`; the search then trains for two steps at that depth, under the enforced budget, and goes on until one
# block more raises `OutOfBudget`.

# %%
lesson.predict("05.largest", f"Blocks of {SIZE.hidden}, {N} ranks, stage 3, every block computed again: how many fit "
               f"{lesson.number(BUDGET, 'B')}?", guess=None, unit="blocks")  # fmt: skip
rows, deepest = [], {}
for way in (ZeroConfig(0), ZeroConfig(3, -1)):
    guess = gpt2_zero.most_blocks_predicted(SIZE, ROWS, DTYPE, way, N, BUCKET, BUDGET)
    deepest[way] = guess, gpt2_zero.most_blocks_measured(pool, SIZE, ROWS, DTYPE, way, BUCKET, BUDGET, guess)
    for what, unit, count in (("blocks", "", lambda n: n), ("parameters", "", lambda n: replace(SIZE, layers=n).parameters())):
        rows.append((f"{way}, {what}", *(count(n) for n in deepest[way]), unit))
ratios = lesson.comparison(rows, title=f"the largest model of width {SIZE.hidden} within {lesson.number(BUDGET, 'B')}, {N} ranks")
lesson.reveal("05.largest", deepest[ZeroConfig(3, -1)][1], predicted=deepest[ZeroConfig(3, -1)][0])

# %% [markdown]
# With stage 3 and everything computed again, a block costs 16/N bytes a parameter and w T h for its input. With N large
# only the second is left, and what no stage divides: one whole block, the whole embedding, the activations of one
# block. Those are the limits of data parallelism in memory. They are far away: a block as wide as GPT-3's, 12,288, has
# 3.6 GB of weights in 16 bits.
#
# ### An autopsy
#
# A colleague's run, each rank by itself, fits its card with some room. The loss is healthy. After a few steps the run is
# dead. Every step starts from the same states. What is new?

# %%
def train(room, steps=12):
    built, log, stopped = gpt2_zero.serial_program(SIZE, ROWS, DTYPE), [], None
    built.step()
    with built.recording() as healthy:
        built.step()
    try:
        with built.recording(healthy.profile().peak + room):
            for _ in range(steps):
                built.optimizer.zero_grad()
                outputs = built.wrapped(**built.batch)
                outputs.loss.backward()
                built.optimizer.step()
                log.append(outputs)
    except hpnb.record.OutOfBudget as error:
        stopped = error.with_traceback(None)
    return [outputs.loss.item() for outputs in log], stopped


logits = DTYPE.itemsize * SIZE.vocab_size * TOKENS
losses, stopped = pool.run(train, 4.5 * logits)[0]
assert stopped is not None
print("losses:", *(f"{loss:.2f}" for loss in losses), f"and then out of budget, in step {len(losses) + 1}")
rows = [(str(each), each.category, lesson.number(each.nbytes, "B")) for each in stopped.survivors if SIZE.vocab_size in each.shape]
lesson.table(("survivors with a side of V words", "held as", "bytes"), rows, f"out of budget {stopped.operator}")
lesson.field_guide.add(
    "the loss falls, memory between steps grows, and a run that fitted is out of memory after some steps",
    "survivors of an enforced budget, by shape: what is there once for every step?",
    "outputs (or losses with their graphs) that are kept: each holds the logits. Keep loss.item()",
    notebook="05",
)
lesson.field_guide.show()

# %% [markdown]
# The shape gives it away: tokens x words, which no gradient and no optimizer has. A step at its turn needs it three
# times, and once more for the logits; the others are one for each step that is over. `outputs` holds the logits, and the
# list, meant for a plot of losses, holds `outputs`. That one step fits had been seen; that a step leaves
# nothing behind had not. The cure is `log.append(outputs.loss.item())`.
#
# **Takeaway.** When memory grows from step to step, look for a shape that is there as often as there were steps.
#
# **Challenge.** Your devices have 80 GB: 30 billion parameters or more, in bf16, on at most 64 ranks of InfiniBand
# NDR, with at most 1,000,000 tokens a step. It must fit, and a step may take 1.25 times its computing. Why is stage 2 out
# of the question whatever else you turn?
#
# <details><summary>Answer</summary>
#
# In stage 2 each rank keeps all 60 GB of weights. What is left has room for 8 rows on 64 ranks only if every block is
# computed again, a third more; and each step gathers 60 GB when nothing computes, 1.2 s, another third. That is 1.65
# times the computing, and no other setting of stage 2 that fits does better. In stage 3 the same 64 ranks and 8 rows,
# with half of the blocks computed again, hold 65 GB and take 1.19.
# </details>

# %%
lesson.explorers.sharded_step()

# %% [markdown]
# ## The batch wall
#
# So memory does not stop replicas. What does? By 01 each rank needs its token knee, ρ(d-1)/d tokens, or it waits for
# the wire. So more ranks means larger batches; and a larger batch must be worth it. A gradient over B samples is the
# true gradient G plus noise, E|g_B|² = |G|² + tr(Σ)/B, with Σ the covariance of the gradients of single samples. The
# batch at which both are equally long,
#
# $$ B_{noise} = \mathrm{tr}(\Sigma) / |G|^2, $$
#
# is the *gradient noise scale*. Below it a doubled batch halves the noise, and nearly the number of steps: steps(B) =
# fewest · (1 + B_noise/B). Above it steps stay, and each costs twice. Data parallelism measures it for nothing: it has a
# gradient over b samples before its all-reduce and over B = N b after it, and two norms give both unknowns:
#
# $$ |G|^2 = \frac{B|g_B|^2 - b|g_b|^2}{B - b} \qquad \mathrm{tr}(\Sigma) = \frac{|g_b|^2 - |g_B|^2}{1/b - 1/B} $$
#
# The cell trains a small GPT-2 on English to a test loss of 5, with several batches, logging both norms. Commit: if
# the smallest batch is doubled, by what is the number of steps divided?

# %%
print(inspect.getsource(gradient_noise.gradient_norms))
lesson.predict("05.doubling", f"From {N} rows to {2 * N} a batch: what is the ratio of steps, before over after?", guess=None)
rows, test = gradient_noise.token_rows("train"), gradient_noise.token_rows("test", 32)
runs = [pool.run(gradient_noise.train, rows, test, each, 5.0)[0] for each in (1, 2, 4, 8, 16)]

# %%
middle = runs[2]
scale = theory.noise_scale(middle.small, middle.big, middle.batch / N, middle.batch)
batches, steps = [run.batch for run in runs], [run.steps for run in runs]
fewest = steps[-1] / (1 + scale / batches[-1])  # by the law, from the largest batch
fitted = theory.fitted_wall(batches, steps)
halves = [theory.noise_scale(middle.small[i::2], middle.big[i::2], middle.batch / N, middle.batch) for i in (0, 1)]
laws = {f"by norms: {scale:.0f} rows": (fewest, scale), f"fitted to the dots: {fitted[1]:.1f} rows": fitted}
plot.show(
    figures.batch_wall(batches, steps, laws, title=f"measured · {N} ranks, a small GPT-2 to a test loss of 5",
                    caption=f"The norms of odd and even steps alone give {halves[0]:.0f} and {halves[1]:.0f} rows. The test loss is read every 5 steps."),
    alt=f"Steps and rows to the loss over the batch: {', '.join(f'{b} rows {s} steps' for b, s in zip(batches, steps, strict=True))}.",
)  # fmt: skip
rows = [(f"batch of {b} rows, steps", theory.steps_at(b, fewest, scale), s) for b, s in list(zip(batches, steps, strict=True))[:-1]]
ratios = lesson.comparison(rows, title=f"steps to a loss of 5, from the norms and the {steps[-1]} steps of {batches[-1]} rows alone")
lesson.reveal("05.doubling", steps[0] / steps[1], predicted=theory.steps_at(N, fewest, scale) / theory.steps_at(2 * N, fewest, scale))
far = max(scale / fitted[1], fitted[1] / scale)
print(f"the norms' scale and the fitted one differ by a factor of {far:.1f}" + ("" if far > 2 else ": here they agree"))

# %% [markdown]
# The price is real: where doubling the batch divides the steps by less than two, rows to the same loss rise. Where the
# wall stands is another matter. Compare the two lines with the dots, their two scales (dotted, if inside the figure)
# with each other, and the two halves of the same log. What the scale assumes, and what is not so:
#
# - **SGD at its best learning rate for each batch.** This is AdamW, which divides each gradient by its own size, so the
#   noise in large coordinates weighs no more than in small ones. Its rate here goes with √B, by a rule, not tuned.
# - **Curvature alike in all directions.** If it is not, what counts is tr(HΣ)/GᵀHG.
# - **One number.** It is small at the start and grows as the loss falls; a mean over a run is a mean of that.
#   McCandlish et al. speak of the order of magnitude and claim no more. Shallue et al. found that what a batch buys
#   differs widely from workload to workload, and that learning rates must be tuned for each. Merrill et al. measure the
#   *critical batch* of language models (B_crit: beyond it a larger one hardly helps) directly, since the assumptions
#   behind the scale are strong: near 0 at the start, then rising, then level.
# - **A difference of two noisy numbers.** With few ranks |g_b|² and |g_B|² are close; |G|² may come out negative. Average both over
#   many steps, and divide last.
#
# Use its growth as a sign, and before you buy ranks measure the wall: train to a loss with two batches.
#
# ### Exercise 4: a noise scale from two norms
#
# *Diagnose, 15 minutes.* `per_rank[step][rank]` are squared norms of gradients over `small` samples each,
# `reduced[step]` of their mean over ranks. Return the noise scale in samples. The check plants one, with a few steps
# ten times as noisy as the rest, and wants it within 10 %.
#
# Hint: of which quantities is the expectation known?

# %% tags=["stub-4"]
def scale_of(per_rank, reduced, small):
    ...


# %% tags=["check-4"]
verdict = lesson.check(exercises.noise_scale, scale_of)
if verdict.status == "passed" and "middle" in vars():
    print("of the run above you say:", f"{scale_of([[s] * N for s in middle.small], middle.big, middle.batch // N):.1f} rows")
verdict

# %% [markdown]
# <details><summary>Solution</summary>
#
# A mean of ratios is not the ratio of means: one step whose signal comes out near 0 would decide alone.
#
# ```python
# def scale_of(per_rank, reduced, small):
#     ranks, steps = len(per_rank[0]), len(reduced)
#     big = small * ranks
#     b = sum(sum(norms) / ranks for norms in per_rank) / steps
#     B = sum(reduced) / steps
#     return (b - B) / (1 / small - 1 / big) / ((big * B - small * b) / (big - small))
# ```
# </details>

# %% [markdown]
# ## Stop here?
#
# Three walls then, and all three are numbers that you have. Memory: on enough ranks stage 3 with recomputing holds any
# model whose largest block, embedding and inputs of blocks fit. The wire: T tokens a rank, the knee. The batch: B_crit
# tokens in all, the critical batch, of which the noise scale is a rough estimate. So at most B_crit / T ranks are of
# use.

# %%
rows = []
for wire, link in theory.LINKS.items():
    knee = theory.dp_tokens_to_hide(400e12 / link.bandwidth, 1024)
    rows.append((wire, f"{knee:,.0f}", *(f"{batch / knee:,.0f}" for batch in (0.5e6, 4e6))))
columns = ("wire", "token knee of stage 0 (bf16, 400 TFLOP/s)", "ranks of use at 0.5 M tokens", "at 4 M tokens")
lesson.table(columns, rows, "how far replicas go before the batch stops them")
lesson.ledger.show()

# %% [markdown]
# GPT-3 was trained with batches of 3.2 million tokens (Brown et al. 2020). By the table that is work for 400 replicas
# on InfiniBand NDR, and many models need no more than this notebook. Go on when a block does not fit (07), when the
# wire between hosts makes the knee larger than the batch can feed (06: a pipeline sends little), or when you have more
# devices than B_crit / T.
#
# ## What to remember
#
# - 16 bytes a parameter, and the second step is the fullest. Predict the moment, not only the sum.
# - Sharding divides states, recomputing divides activations, chunks divide logits, offloading pays by the link.
# - Use the lowest stage that fits. Stage 3 needs a block's gather to hide behind a block's forward.
# - After an out-of-memory read the survivors: shape, number, owner.
# - Memory does not stop data parallelism. A batch that no longer helps does, at B_crit / T ranks.
# - The noise scale is free to measure and rough. Two real runs tell more.
#
# **When not to use this.** When the model fits without: each stage costs something. When one block, or the
# activations of one row, do not fit: no stage divides those (07). When ranks are already at the token knee and the
# batch at its wall: let other axes take the devices (06, 08).
#
# **Papers.** Rajbhandari et al. 2020, *ZeRO* (1910.02054). Ren et al. 2021, *ZeRO-Offload* (2101.06840). Zhao et al.
# 2023, *PyTorch FSDP* (2304.11277). Chen et al. 2016, *Training deep nets with sublinear memory cost* (1604.06174).
# McCandlish et al. 2018, *An empirical model of large-batch training* (1812.06162). Shallue et al. 2018, *Measuring the
# effects of data parallelism on neural network training* (1811.03600). Malladi et al. 2022, *On the SDEs and scaling
# rules for adaptive gradient algorithms* (2205.10287). Merrill et al. 2025, *Critical batch size revisited*
# (2505.23971). Brown et al. 2020, *Language models are few-shot learners* (2005.14165).
