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
# # Who is idle, and what does it cost to keep them busy?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hpnb/hpnb/blob/main/notebooks/02_vit_pipeline_parallel.ipynb)
# [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/hpnb/hpnb/blob/main/notebooks/02_vit_pipeline_parallel.ipynb)
#
# **The question.** Pipeline parallelism gives each rank a few consecutive layers of the model. Every sample passes
# through all ranks, so ranks wait for each other. Who is idle, for how long, and what does less idle time cost?
#
# **You will be able to** run a partitioned model by hand; write a schedule and the loop that executes it; say what 1F1B,
# interleaving and a split backward buy and cost; tell three definitions of "bubble" apart; choose the number of
# microbatches.
#
# **You should know** notebooks 00 and 01: send and receive, and how we check that a parallel step equals one process's.
#
# **Time.** 35 minutes to read, 2 to run, 100 for the exercises.
#
# **Two questions to recall.** From 00: how long does a message of b bytes take? From 01: does the number of bytes that
# data parallelism sends in a step depend on the batch size?
#
# <details><summary>Answers</summary>
#
# It takes α + b/B, with the latency α and the bandwidth B. No: data parallelism all-reduces the gradient, which is as
# large as the model, whatever the batch.
# </details>
#
# All times come from one run of this notebook, on <data value="02.hardware">4 x NVIDIA H100 80GB HBM3</data>. Unless marked
# *simulated*, steps are <data value="02.run.kind">measured</data>; **<data value="02.run.messages">they include the time of messages</data>**.
#
# <details><summary>Measured, simulated, replayed</summary>
#
# *Measured* steps are read from the clock. *Simulated* steps are computed from one forward time and one backward time per
# stage; messages take no time in them, unless we give a transfer time. *Replayed* steps, on machines with fewer cores or
# GPUs than ranks, are computed from the time of each action that ran, as if each rank had its own core or GPU.
# </details>

# %% tags=["setup"]
import importlib.util

assert importlib.util.find_spec("hpnb"), "run `%pip install hpnb`, then this cell"
import statistics
import torch, torch.distributed as dist
import hpnb
from hpnb import Layout, Mesh, comm, lesson, theory
from hpnb.lesson.figures import vit_pipeline as figures
from hpnb.lesson.programs import step_timing, vit_pipeline, vit_pipeline_words as words
from hpnb.lesson.exercises import vit_pipeline_parallel as exercises
from hpnb.pipeline_parallel import Costs, Schedule, ScheduleError, cut, schedules
from hpnb.pipeline_parallel.layers import layers
from hpnb.pipeline_parallel.microbatches import split_batch

N = min(4, hpnb.ranks.default_ranks())
pool = hpnb.Ranks(N)
sizes = lesson.choose_sizes("02", pool)  # the largest that fit
SIZE, DTYPE, IMAGES, M = sizes.size, sizes.dtype, sizes.batch, 8  # M microbatches
SHAPE = (IMAGES // M, SIZE.tokens, SIZE.hidden)  # between two stages: (b, s, h)
MESSAGE = SHAPE[0] * SHAPE[1] * SHAPE[2] * DTYPE.itemsize  # its bytes
NAME = f"ViT, {SIZE.layers} blocks of {SIZE.hidden}, {IMAGES} images"
leaves = hpnb.data.beans("train", size=48, image_size=32)
here = lesson.banner(N, model=NAME, data=leaves.describe(), sizes=sizes)
cpus = pool if here.device == "cpu" else hpnb.Ranks(N, device="cpu")
RAN = words.record_run(here, SHAPE, DTYPE)  # "measured", or "replayed"

# %% [markdown]
# ## One microbatch walks through the stages
#
# If a model does not fit on one GPU, we can partition it between blocks into p *stages*, one for each rank. A rank then
# stores 1/p of the weights, gradients and optimizer state. A *microbatch* is a part of the batch.
#
# ```text
#              rank 0               rank 1               rank 2               rank 3
# forward      stage 0 --(b, s, h)-> stage 1 --(b, s, h)-> stage 2 --(b, s, h)-> stage 3
# backward     stage 0 <-(b, s, h)-- stage 1 <-(b, s, h)-- stage 2 <-(b, s, h)-- stage 3
# ```
#
# Forward, the hidden states at a *cut*, the border of two stages, travel: b images of s tokens of h numbers. Backward, their gradient travels, with the
# same shape. In this run b = <data value="02.run.images">64</data>, s = <data value="02.run.tokens:.0f">197</data> and h = <data value="02.run.hidden:.0f">1024</data>, and a number has <data value="02.run.bytes">2</data> bytes.

# %%
question = f"A microbatch walks through {N} stages and back: how many bytes are sent?"
lesson.predict("02.walk-bytes", question, guess=None, unit="B", kind="identity",
               rule_of_thumb=(N - 1) * MESSAGE)  # fmt: skip


def run_stage(stage, hidden, batch):
    for layer in stage:
        hidden = layer.run(hidden, batch)  # (b, s, h); the head returns logits
    return hidden


def walk(recorder, stage, batch, axis):
    rank, last, hidden, grad_output = axis.rank, axis.size - 1, None, None
    if rank > 0:
        hidden = comm.receive(SHAPE, axis, rank - 1, DTYPE).detach().requires_grad_()
    with recorder.span("F", stage=rank, microbatch=0):
        output = run_stage(stage, hidden, batch)
        output = vit_pipeline.microbatch_loss(output, batch) if rank == last else output
    if rank < last:
        comm.send(output.detach(), axis, rank + 1)
        grad_output = comm.receive(SHAPE, axis, rank + 1, DTYPE).detach()
    with recorder.span("B", stage=rank, microbatch=0):
        output.backward(grad_output)  # the last rank starts from its loss
    if rank > 0:
        comm.send(hidden.grad, axis, rank - 1)


# %% [markdown]
# In the cell, F is a forward and B a backward. `cut` partitions the model's list of layers, and `pp` is the axis of a
# pipeline's ranks. We keep the quickest of six walks.


# %%
def record_walks():
    axis = Mesh(Layout(pp=hpnb.world_size())).pp  # all ranks, as one pipeline
    model, batch = vit_pipeline.vit_and_batch(SIZE, SHAPE[0], DTYPE)
    stage = cut(layers(model), axis.size)[axis.rank]  # this rank's layers
    recorded = []
    for _ in range(6):
        with hpnb.record.timeline() as recorder:
            walk(recorder, stage, batch, axis)
        recorded.append(recorder.gather())
    if recorded[0].source == "measured by turns":  # on one GPU; messages as by NVLink
        recorded = [lesson.replay(tl, theory.REPLAY_LINK) for tl in recorded]
    with hpnb.record.traffic() as traffic:
        walk(recorder, stage, batch, axis)  # another walk, for its bytes alone
    return min(recorded, key=lambda tl: tl.makespan).select("FB"), traffic.bytes["pp"]


walks = pool.run(record_walks)
walked = walks[0][0]
lesson.show(walked, key="02.walk", title=words.walk_title(walked))
sent = sum(nbytes for _, nbytes in walks)
lesson.reveal("02.walk-bytes", sent, predicted=2 * (N - 1) * MESSAGE, source="counted")
lesson.record("02.walk-idle", 100 * (1 - 1 / N), "%")  # the claim allows 5 points less
gradient = SIZE.parameters(classes=3) * DTYPE.itemsize
lesson.record("02.sent", {"step": M * sent, "dp": 2 * (N - 1) * gradient}, "B")
lesson.claim("One rank works at a time", (walked.bubble_fraction, ">", 0.95 - 1 / N))

# %% [markdown]
# Each cut is crossed twice, so $2(p-1)$ messages of b s h numbers are sent, <data value="02.walk-bytes">155 MB</data> in all. A step of
# eight microbatches sends <data value="02.sent.step">1.24 GB</data>, all ranks together. A ring all-reduce of the gradient would send
# <data value="02.sent.dp">3.64 GB</data>.
#
# One rank works at a time. So by counting, ranks are idle for 1 - 1/p = <data value="02.walk-idle">75.0 %</data> of the time. The run had
# <data value="02.walk.bubble">75.3 %</data>, which includes waits for messages. We call this idle share the
# *bubble*: idle time over ranks × *makespan*, where the makespan is the time from the first start to the last end.
#
# **Takeaway.** A pipeline sends only what crosses its cuts, and only between neighbours. With one microbatch, p ranks
# are no faster than one.
#
# ## Microbatches fill the pipeline
#
# A rank that has passed its microbatch on could start the next one. So we split the batch into m microbatches, and the
# optimizer steps once, at the end. *GPipe* runs all forwards, then all backwards.
#
# Who does what is a *schedule*: a list of actions for each rank. `1F0` is the forward of stage 1 on microbatch 0, and
# `1B0` its backward. In the printed lists, a column is one action.
#
# Let every stage need t seconds for forward and backward of one microbatch. The last stage starts p - 1 forwards late,
# then works m t without a pause. After it, p - 1 backwards remain. So the step takes $(m + p - 1)\,t$, and each rank works
# $m\,t$ of it:
#
# $$ \text{bubble} = \frac{p-1}{m+p-1} $$

# %%
question = f"GPipe, {N} ranks, {M} microbatches: what share of the time are ranks idle?"
naive = 100 * (N - 1) / M
lesson.predict("02.bubble", question, guess=None, unit="%", rule_of_thumb=naive)
print(schedules.make("gpipe", stages=2, microbatches=4))
gpipe = schedules.make("gpipe", stages=N, microbatches=M)

# %% [markdown]
# ### The loop that executes a schedule
#
# For each action of its list, a rank receives, computes, keeps or uses activations, and sends. `compute(hidden, k)`
# runs its stage on microbatch k. Sends do not block, or two neighbours that send to each other would wait forever.


# %%
def run_schedule(schedule, compute, axis, shape, dtype):
    """One step of this rank's stage; gradients are added to .grad."""
    rank, last = axis.rank, axis.size - 1
    in_flight, sends = {}, []  # {microbatch: (stage input, stage output)}
    for action in schedule.actions[rank]:
        k, stage_input, grad_output = action.microbatch, None, None
        if action.op == "F":
            if rank > 0:
                stage_input = comm.receive(shape, axis, rank - 1, dtype).detach()
                stage_input.requires_grad_()
            output = compute(stage_input, k)
            in_flight[k] = stage_input, output  # the backward needs both
            message, to = output.detach(), rank + 1
        else:  # "B"
            if rank < last:
                grad_output = comm.receive(shape, axis, rank + 1, dtype).detach()
            stage_input, output = in_flight.pop(k)
            output.backward(grad_output)
            message = stage_input.grad if rank > 0 else None
            to = rank - 1
        if 0 <= to <= last:
            sends.append(dist.isend(message, axis.ranks[to], axis.group))
    for send in sends:
        send.wait()


# %% [markdown]
# We train three copies of a small ViT for four steps, in float64 on the CPU: with this loop, with `hpnb.Pipeline`, and in
# one process. Losses are divided by m, so that gradients add up to those of the batch.


# %%
def train(schedule, steps=4):
    axis, m = Mesh(Layout(pp=hpnb.world_size())).pp, schedule.microbatches
    by_loop, by_library, alone, batch = vit_pipeline.small_models_and_batch(leaves)
    microbatches, loss_of = split_batch(batch, m), vit_pipeline.microbatch_loss
    shape, losses = (16 // m, 17, 64), []  # 16 images; 16 patches + 1 token; 64 numbers
    stage, last = cut(layers(by_loop), axis.size)[axis.rank], axis.rank == axis.size - 1
    pipe = hpnb.Pipeline(by_library, axis, schedule, loss_of)

    def compute(hidden, k):
        output = run_stage(stage, hidden, microbatches[k])  # (b, s, h), or logits
        return loss_of(output, microbatches[k]) / m if last else output

    models = by_loop, pipe, alone
    optimizers = [torch.optim.SGD(model.parameters(), 0.05, 0.9) for model in models]
    for _ in range(steps):
        run_schedule(schedule, compute, axis, shape, torch.float64)
        loss = alone(**batch).loss
        loss.backward()
        losses.append((pipe.step(batch).loss.item(), loss.item()))
        vit_pipeline.step_and_zero(optimizers)
    return losses, vit_pipeline.distances_from(alone, loop=by_loop, pipeline=by_library)


trained = cpus.run(train, gpipe)
lesson.show(lesson.Parity.worst_of([distances for _, distances in trained]))

# %% [markdown]
# All three agree up to rounding. We now use the library, which records times.

# %%
steps = pool.run(vit_pipeline.time_schedules, SIZE, IMAGES, DTYPE, {"gpipe": gpipe})
recorded, formula = steps[0]["gpipe"], 100 * theory.bubble(N, M)
lesson.show(recorded, in_flight=True, key="02.gpipe", title=f"GPipe has {M} in flight")
simulated = gpipe.simulate(Costs.measured(recorded))  # a stage's medians of F and B
lesson.record("02.medians", simulated)
lesson.record("02.slowest", vit_pipeline.slowest_over_mean(recorded))
bubble = 100 * recorded.bubble_fraction
lesson.reveal("02.bubble", bubble, predicted=formula, source=RAN)
lesson.claim("Microbatches help", (bubble, "<", 100 * walked.bubble_fraction))
# a file that Perfetto, a viewer of timelines, can open
trace = recorded.to_chrome_trace(lesson.home() / "02_gpipe_trace.json")

# %% [markdown]
# The formula assumes equal stages and predicts a bubble of <data value="02.bubble.predicted">27.3 %</data>. The step in the figure has
# <data value="02.bubble">35.9 %</data>. Its stages are not equally fast. Rank 0's forwards take about twice as long as the others'. The embedding explains
# little of that: in the first figure, rank 0's forward is only about a quarter longer. Rank 0 never waits for input, so it probably
# runs at the pace at which Python launches kernels (fold). GPipe's forwards go at the pace of the slowest forward. Its backwards go at that of the
# slowest backward, which can be on another stage. By medians, the slowest forward plus the slowest backward take
# <data value="02.slowest:.2f">1.18</data> times as long as forward plus backward of the average stage.
#
# Simulated with these medians, the bubble is <data value="02.medians.bubble">34.7 %</data>. The step that ran can have another bubble: a stage's times
# vary from microbatch to microbatch, and in a measured step messages take time.
#
# <details><summary>Why can equal stages take unequal times?</summary>
#
# Python can launch kernels more slowly than a GPU runs them. A rank that never waits then works at Python's pace. A rank that
# waits for its input launches its kernels meanwhile, and when the input comes, they run without gaps. So on GPUs equal
# blocks can be quick in one action and slow in another. Rank 0 has no such wait before its forwards, so they are launched while they run. The last section tests this with CUDA graphs. On a CPU, ranks that share cores and memory disturb each other.
# </details>
#
# <details><summary>Why the rule of thumb may come nearer</summary>
#
# The rule of thumb, (p-1)/m, divides idle time by working time; a later section calls it overhead over ideal. So it is always
# above the formula. If it comes nearer to the run, or *holds*, which means that the run is 0.8 to 1.25 times what it says, that is
# an accident: the rule knows nothing about unequal stages.
# </details>
#
# The lower curves show what is *in flight*. A rank keeps a microbatch's activations from its forward until its backward, so
# GPipe ends up with all <data value="02.gpipe.in-flight">8</data> microbatches in flight.
#
# <details><summary>On a laptop</summary>
#
# With fewer cores than ranks, a wall clock would show who got a core. Hence the replay from CPU times. Ranks that share a
# GPU are replayed from GPU times.
# </details>
#
# <details><summary>In your tools: stages, schedules and microbatches</summary>
#
# PyTorch, on each rank, with `stage_module` holding this rank's layers:
#
# ```python
# from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
#
# stage = PipelineStage(stage_module, stage_index=rank, num_stages=4, device=device)
# schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
# if rank == 0:
#     schedule.step(images)
# elif rank == 3:
#     schedule.step(target=labels, losses=losses)
# else:
#     schedule.step()
# ```
#
# Megatron-Core: `--pipeline-model-parallel-size 4 --micro-batch-size 2 --global-batch-size 16`; the number of microbatches
# is the global batch over micro-batch size × data-parallel size, and the schedule is 1F1B.
#
# DeepSpeed: `PipelineModule(layers=..., num_stages=4)` and `engine.train_batch()`, with the number of microbatches as
# `gradient_accumulation_steps`. accelerate: `MegatronLMPlugin(pp_degree=4, num_micro_batches=8)`.
# </details>
#
# **Takeaway.** With equal stages and m microbatches, a rank is idle for p - 1 of m + p - 1 slots.
#
# ## 1F1B buys memory
#
# A backward could start as soon as the first microbatch has reached the last stage. *One forward, one backward* (1F1B) does
# that. Here are both for p = 2 and m = 4. Digits are forwards; backwards stand in brackets and take two columns.
#
# ```text
# GPipe   rank 0   0 1 2 3 . . . [0] [1] [2] [3]       4 in flight
#         rank 1   . 0 1 2 3 [0] [1] [2] [3] . .       4
# 1F1B    rank 0   0 1 . . [0] 2 [1] 3 [2] . [3]       2
#         rank 1   . 0 [0] 1 [1] 2 [2] 3 [3] . .       1
# ```
#
# In the *warm-up*, rank r does p - r - 1 forwards, one for each rank after it. The *steady state* alternates and begins with
# a forward, so p - r forwards come before the first backward. The *cool-down* is the backwards that are left. So rank r has
# at most p - r microbatches in flight.
#
# ### Exercise 1: 1F1B as lists
#
# *Core, 20 minutes.* Write `one_f_one_b(p, m)`. It returns p lists of actions, such as `[["0F0", "0B0"], ["1F0",
# "1B0"]]` for p = 2, m = 1, with stage r on rank r.
#
# <details><summary>What the check wants</summary>
#
# With F = 1 and B = 2, the simulated step for p = 4 and m = 8 has to take $(m + p - 1)(F + B) = 33$ units, with at most
# p - r = 4, 3, 2, 1 microbatches in flight. The check draws your lists as far as they run.
# </details>
#
# <details><summary>Hint</summary>
#
# The number m may be smaller than the warm-up. Count forwards and backwards separately.
# </details>


# %% tags=["stub-1"]
def one_f_one_b(p, m): ...


# %% tags=["check-1"]
verdict = lesson.check(exercises.one_f_one_b, one_f_one_b)
exercises.draw_schedule(one_f_one_b, p=4, m=8)
verdict

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def one_f_one_b(p, m):
#     rows = []
#     for r in range(p):
#         warmup = min(p - r - 1, m)
#         row = [f"{r}F{k}" for k in range(warmup)]
#         for k in range(m - warmup):
#             row += [f"{r}F{warmup + k}", f"{r}B{k}"]
#         rows.append(row + [f"{r}B{k}" for k in range(m - warmup, m)])
#     return rows
# ```
# </details>

# %% [markdown]
# The next cell trains the ViT with your lists; until you have written them, it takes the library's. Rank r should need $(p - r)/m$ of GPipe's activations.

# %%
lesson.keep_schedule("1f1b", one_f_one_b)
my_1f1b = lesson.reader_schedule("1f1b", N, M)
trained = cpus.run(train, my_1f1b)
lesson.show(lesson.Parity.worst_of([distances for _, distances in trained]))
difference = max(abs(a - b) for a, b in trained[0][0])  # pipeline, one process
lesson.claim("The loss is that of one process", (difference, "<", 1e-12))
both = {"gpipe": gpipe, "1f1b": my_1f1b}
ran = pool.run(vit_pipeline.time_schedules, SIZE, IMAGES, DTYPE, both)[0]
peaks = {}  # {schedule: {rank: bytes of activations}}
for name, schedule in both.items():
    rows = pool.run(vit_pipeline.measure_activations, SIZE, IMAGES, DTYPE, schedule)
    peaks[name] = {f"rank {r}": peak for r, (peak, _, _) in enumerate(rows)}
lesson.show(
    predicted={rank: (N - int(rank[-1])) / M * b for rank, b in peaks["gpipe"].items()},
    measured=peaks["1f1b"], columns={"GPipe, measured (B)": peaks["gpipe"]},
    unit="B", key="02.activations", title="Peak activations under 1F1B",
)  # fmt: skip
lesson.show(**{RAN: {n: t.makespan for n, t in ran.items()}}, unit="s", key="02.step",
            title=words.beside_gpipe_title(ran),
            columns=vit_pipeline.work_and_bubble(ran))  # fmt: skip
words.record_beside_gpipe(ran, both)
saved = peaks["1f1b"]["rank 0"] / peaks["gpipe"]["rank 0"]
lesson.claim("1F1B needs less memory on rank 0", (saved, "<", 0.8))
ratio = ran["1f1b"].makespan / ran["gpipe"].makespan
lesson.claim("1F1B costs at most a fifth more time than GPipe", (ratio, "<", 1.2))

# %% [markdown]
# On rank 0 the activations fall from <data value="02.activations.rank-0.gpipe-measured">20.0 GB</data> under GPipe to <data value="02.activations.rank-0.measured">10.1 GB</data>. They do not shrink
# with p: p microbatches in a p-th of the layers are as much as one in all layers.
#
# We timed GPipe again, beside 1F1B. Its step takes <data value="02.ran.gpipe.makespan">192 ms</data>. 1F1B's takes <data value="02.ran.1f1b.makespan">174 ms</data>, <data value="02.by-run:.3f">0.905</data> times as long, and
# the bubbles are <data value="02.ran.gpipe.bubble">35.2 %</data> and <data value="02.ran.1f1b.bubble">28.7 %</data>. With equal stages both steps would be equally long, because filling and draining
# take as long. Simulated with GPipe's unequal median times, 1F1B's step takes <data value="02.by-medians:.3f">0.942</data> times as long. The rest
# may be noise: each step is the median of three. *Work* in the last table is the mean time that a rank spends in actions.
#
# <details><summary>What does the simulation leave out?</summary>
#
# It leaves out messages, noise, and whether actions take longer under one schedule than under the other: ranks work
# <data value="02.step.1f1b.work">124 ms</data> under 1F1B and <data value="02.step.gpipe.work">124 ms</data> under GPipe. It contains launches as far
# as they lengthen GPipe's actions.
# </details>
#
# **Takeaway.** 1F1B keeps at most p microbatches instead of m, and with equal stages it has GPipe's bubble.
#
# ### Autopsy: two actions change places
#
# A colleague wants a gradient to be sent sooner and exchanges `1F1` and `1B0` in rank 1's list. It was `1F0 1F1 1F2 1B0` and
# is now `1F0 1B0 1F2 1F1`. `check` examines lists before anything runs.

# %%
rows = [list(row) for row in schedules.make("1f1b", 4, 8).actions]
rows[1][1], rows[1][3] = rows[1][3], rows[1][1]  # 1F1 and 1B0
swapped = Schedule(rows, "swapped")
try:
    swapped.check()
except ScheduleError as problem:
    print(problem)

# %% [markdown]
# Here a step is only a place in the list. The actions in square brackets wait for each other: rank 1's `1B0` needs a gradient from
# rank 2, which first needs `1F1`. Our loop checks nothing. We run it on these lists, with one number as the hidden state.

# %%
def run_swapped():
    def double(hidden, k):
        return torch.ones(1, requires_grad=True) if hidden is None else 2 * hidden

    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    run_schedule(swapped, double, axis, shape=(1,), dtype=torch.float32)


try:
    hpnb.launch(run_swapped, ranks=4, device="cpu", timeout=2)
except hpnb.RankError as hang:
    lesson.show(hang)
lesson.field_guide.add(  # the series' table of symptoms
    "a pipeline stands still, and every rank waits in a receive",
    "Schedule.check() before anything runs: it names the circle",
    "two actions of one rank have changed places",
    notebook="02",
)
lesson.field_guide.show("02")

# %% [markdown]
# It hangs. The first table shows where ranks wait; the lists that `check` printed show why. The second is this page's row of
# the *field guide*; `lesson.field_guide.show()` shows all rows.
#
# ## Smaller pieces of work
#
# By the formula, more microbatches shrink the bubble. So do smaller pieces of work, in two ways.
#
# **Chunks.** Under *interleaving*, each rank has v thin stages instead of one thick stage. Each of these v is a *chunk*.
# With p = 4 and v = 2, these are the stages of each rank:
#
# ```text
#               rank 0   rank 1   rank 2   rank 3
# interleaved   0, 4     1, 5     2, 6     3, 7      through all ranks, then again
# V-shaped      0, 7     1, 6     2, 5     3, 4      through all ranks and back
# ```
#
# If all v chunks of a rank together still need t for a microbatch, one takes t/v. Filling and draining take p - 1 times t/v:
#
# $$ \text{bubble} = \frac{p-1}{v\,m+p-1} $$
#
# The price is more activations in flight and more messages: vp - 1 cuts are crossed instead of p - 1.
#
# **A split backward.** A backward computes two gradients. I is the gradient of a stage's *input*, for which the stage before
# waits. W is the gradient of its *weights*, for which only the optimizer waits. For a linear layer y = x Aᵀ with output
# gradient g, I is g A and W is gᵀ x: two matmuls of the same size. So a rank can do I at once and postpone W until it
# would be idle; until then the microbatch stays in flight. Three *zero-bubble* schedules do that:
#
# - *ZB-H1* keeps up to p microbatches in flight on every rank, as many as rank 0 does under 1F1B.
# - *ZB-H2* runs more forwards before its first backward and keeps up to 2p - 1.
# - *ZB-V* also places two chunks on each rank, in the V shape above, and keeps up to p.
#
# With equal stages, filling and draining leave each rank idle for p - 1 forwards and backwards under 1F1B:
# $(p-1)(F+I+W)$. Under ZB-H1 the stage before waits only for I, which leaves $(p-1)(F+I)$. Then p - 1 of the postponed W fill
# gaps, which leaves $(p-1)(F+I-W)$. ZB-H2's additional forwards fill more. Only the last rank's wait for its first forward cannot be filled: $(p-1)F$. The last two
# are equal if I = W.
#
# The figure shows p = 2 and m = 4, with F = I = W = 1. Paler actions belong to a rank's second chunk.


# %%
def make(name, ranks, microbatches):
    chunks = 2 if name in ("interleaved", "zb-v") else 1  # of each rank
    return schedules.make(name, ranks * chunks, microbatches, chunks)


def simulate(schedule):  # F = 1, and 1 for each part of a backward, I and W
    chunks = schedule.stages // schedule.ranks
    return schedule.simulate(Costs(1 / chunks, 1 / chunks, 1 / chunks))  # F, I, W


contenders = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
lesson.show(
    {name: simulate(make(name, 2, 4)) for name in contenders}, unit="forwards",
    title="At equal costs, smaller pieces end sooner",
)  # fmt: skip
made = {name: make(name, N, M) for name in contenders}
# queues: {(sender, receiver): its messages}
messages = {name: sum(map(len, s.queues.values())) for name, s in made.items()}
question = f"{N} ranks, {M} microbatches: which schedule has the shortest step?"
by_unit_costs = min(made, key=lambda name: simulate(made[name]).makespan)
idle = {name: simulate(made[name]).bubble_fraction for name in made}
most = max(idle[name] for name in contenders[1:])
lesson.claim("At equal costs, all four idle less than 1F1B", (most, "<", idle["1f1b"]))
lesson.predict("02.schedules", question, guess=None, kind="ranking",
               rule_of_thumb=[by_unit_costs])  # fmt: skip

# %% [markdown]
# ### Exercise 2: interleave by two
#
# *Extra, 25 minutes.* Write `interleave(p, m)` with two chunks a rank, stage s on rank s mod p, and m a multiple of p.
#
# <details><summary>What the check wants</summary>
#
# With F = ½ and B = 1 a chunk, the step for p = 4 and m = 8 has to take $3(m + (p-1)/2) = 28.5$ units, a bubble of 15.8 %.
# At most $2(p - r - 1) + p + 1$ chunks may be in flight.
# </details>
#
# <details><summary>Hint</summary>
#
# A group of p microbatches goes through chunk 0, then through chunk 1. Backwards take chunk 1 first, with microbatches
# in the same order. Warm up with 2(p - r - 1) + p forwards, then alternate.
# </details>


# %% tags=["stub-2"]
def interleave(p, m): ...


# %% tags=["check-2"]
lesson.check(exercises.interleave, interleave)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def interleave(p, m):
#     groups = range(0, m, p)
#     order = [(chunk, first + k) for first in groups for chunk in (0, 1) for k in range(p)]
#     rows = []
#     for r in range(p):
#         forwards = [f"{r + chunk * p}F{k}" for chunk, k in order]
#         backwards = [f"{r + (1 - chunk) * p}B{k}" for chunk, k in order]
#         warmup = min(2 * (p - r - 1) + p, 2 * m)
#         row = forwards[:warmup]
#         for f, b in zip(forwards[warmup:], backwards):
#             row += [f, b]
#         rows.append(row + backwards[2 * m - warmup :])
#     return rows
# ```
#
# A warm-up of p - r - 1 + p forwards is as fast and keeps 8 chunks instead of 11. But with transfers of
# 0.1 forwards, `simulate(Costs(0.5, 0.5, 0.5, 0.1))`, it takes 31.5 units against 29.9, because the longer warm-up also
# overlaps transfers.
# </details>

# %% [markdown]
# ### Exercise 3: place the weight gradients
#
# *Extra, 20 minutes.* Write `place_w(p, m)` with actions F, I and W, for m ≥ p.
#
# <details><summary>What the check wants</summary>
#
# With F = I = W = 1, the step for p = 4 and m = 8 has to take 3m + p - 1 = 27 units, with at most p = 4 microbatches in
# flight on every rank.
# </details>
#
# <details><summary>Hint</summary>
#
# Under 1F1B, rank r keeps r microbatches fewer than rank 0. Let W lag r microbatches behind I.
# </details>


# %% tags=["stub-3"]
def place_w(p, m): ...


# %% tags=["check-3"]
lesson.check(exercises.place_w, place_w)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def place_w(p, m):
#     rows = []
#     for r in range(p):
#         warmup = p - r
#         row = [f"{r}F{k}" for k in range(warmup)]
#         for k in range(m):
#             row.append(f"{r}I{k}")
#             if k >= r:
#                 row.append(f"{r}W{k - r}")
#             if k + warmup < m:
#                 row.append(f"{r}F{k + warmup}")
#         rows.append(row + [f"{r}W{k}" for k in range(m - r, m)])
#     return rows
# ```
# </details>

# %% [markdown]
# ### The race
#
# Exercise 3's schedule is ZB-H1. The prediction uses only the 1F1B step's times and halves backwards into I and W.
# For interleaved and ZB-V it takes all stages as equally fast.
#
# The schedules run in turn, <data value="02.run.repeats:.0f">5</data> times. We show <data value="02.run.shown">the median step</data>. *Spread* is a schedule's longest step minus its
# shortest.

# %%
task = SIZE, IMAGES, DTYPE, made
rounds = pool.run(vit_pipeline.time_rounds, *task, repeats=words.repeats_of(here))[0]
ran = {name: vit_pipeline.median_step(rounds[name], made[name]) for name in made}
makespans = {name: tl.makespan for name, tl in ran.items()}
spread = {name: vit_pipeline.spread_of(rounds[name]) for name in made}
costs = {n: vit_pipeline.stage_costs(ran["1f1b"], made[n].stages // N) for n in made}
predicted = {name: made[name].simulate(costs[name]).makespan for name in made}
in_flight = {n: vit_pipeline.peak_in_flight(ran[n], made[n].stages // N) for n in made}
split = {n: vit_pipeline.input_over_weight(ran[n]) for n in made if n[:2] == "zb"}
columns = {"spread (s)": spread, **vit_pipeline.work_and_bubble(ran)}
columns |= {"I / W": split, "in flight": in_flight, "messages": messages}
lesson.show(predicted=predicted, **{RAN: makespans}, unit="s", key="02.race",
            title="Five schedules, one step", columns=columns,
            note=f"All but predictions and messages: {RAN}.")  # fmt: skip
drawn = {"1f1b": ran["1f1b"], "zb-h2": figures.without_numbers(ran["zb-h2"], "W")}
lesson.show(drawn, title="ZB-H2 puts W into gaps and at the end")
first = min(predicted, key=predicted.get)
lesson.reveal("02.schedules", makespans, predicted=[first], source=RAN)
words.claim_less_idle(rounds, "zb-h2", "1f1b")
words.record_race(NAME, predicted, ran, rounds)
program = vit_pipeline.time_split_backward, SIZE, IMAGES, DTYPE, N, M
alone = words.compare_split(hpnb.launch(*program, ranks=1)[0])
lesson.show(columns=alone, key="02.split", title="Split backwards on one rank alone")

# %% [markdown]
# We call two schedules different only if the difference of their steps exceeds both spreads. So
# <data value="02.race.faster">no schedule is shown to be faster than another: all pairs are undecided</data>. We also compare the bubbles:
# <data value="02.race.idle">all steps of zb-h2 are below all of 1f1b's; those of interleaved, zb-h1 and zb-v overlap with 1f1b's, so the run does not decide</data>.
#
# The prediction puts <data value="02.race.first.predicted">zb-v</data> first; by medians, the run puts <data value="02.race.first.run">zb-h2</data> first. ZB-V has the longest median, <data value="02.race.zb-v.measured">205 ms</data>, and the largest bubble,
# <data value="02.race.zb-v.bubble">33.2 %</data>, but its spread of <data value="02.race.zb-v.spread">83.5 ms</data> leaves this undecided. The four schedules other than 1F1B take <data value="02.race.ratio.least:.2f">1.20</data>
# to <data value="02.race.ratio.most:.2f">1.56</data> times as long as predicted. A prediction can rank two schedules only if its errors are smaller than the
# predicted gap.
#
# <details><summary>Does a split backward also take more computing?</summary>
#
# We time one rank alone, by the clock, with a stage's layers, in <data value="02.split.split-in-one-piece.rounds:.0f">15</data> rounds. Split, the step takes
# <data value="02.split.split-in-one-piece.factor:.3f">1.031</data> times as long, with the range <data value="02.split.split-in-one-piece.range">0.986 to 1.091</data> and the verdict *<data value="02.split.split-in-one-piece.verdict">cannot tell</data>*.
#
# In the race, *work* goes from <data value="02.race.work">125 ms under 1f1b to 138 ms under interleaved</data>, although all five compute the same gradients. Differences that
# a rank alone does not show come from waits for launches, or from ranks that slow each other down. A few per cent can be noise: the
# race has few steps of each schedule.
#
# A smaller bubble does not prove a faster step. If ranks work longer in a step of the same length, its bubble is
# smaller, but nothing is gained. Under interleaving ranks work <data value="02.race.interleaved.work">138 ms</data> of
# <data value="02.race.interleaved.measured">184 ms</data>, and under 1F1B <data value="02.race.1f1b.work">125 ms</data> of <data value="02.race.1f1b.measured">183 ms</data>.
# </details>
#
# <details><summary>I and W are not equal</summary>
#
# Our prediction takes I and W as equal. In the run, I takes <data value="02.race.zb-h1.i-w:.2f">2.04</data> times as long as W under ZB-H1, and
# <data value="02.race.zb-h2.i-w:.2f">1.97</data> times under ZB-H2. Among the causes: softmax, GELU and the matmuls inside attention have no weights, hence no W.
#
# The formulas for idle time hold with equal stages, W ≤ F and W ≤ I ≤ 2W. There, a larger I makes ZB-H1 idle longer and
# leaves ZB-H2 as it is. Above 2W they do not say what happens.
# </details>
#
# <details><summary>How to read the table</summary>
#
# *In flight* is the peak of the rank with the highest peak; a chunk counts as half a microbatch. ZB-H1 and ZB-V keep
# 1F1B's peak, but on every rank. ZB-V sends less than interleaving: its stages p - 1 and p lie on one rank, so nothing is
# sent between them.
#
# The prediction knows no messages and only 1F1B's actions, and takes I = W. If a rank has two chunks, we average the forward
# times of all stages and give each chunk half of the average; likewise for I and W. So no stage is slower than another, and
# the predicted step is shorter than with unequal stages.
#
# In the figure below the table, weight gradients have no numbers, because many are short; nor have other actions that are
# too narrow for a digit. That figure shows where ZB-H2 puts
# W. At the end it computes W while 1F1B's ranks wait in the cool-down. W does not fill all gaps, because the lists fix the
# order of actions before their times are known. An action that takes clearly longer than its like in the other schedule has
# waited for launches, or its rank was disturbed.
#
# By the formulas, ZB-H1 and ZB-H2 are equally fast if I = W. The predictions take I = W too. They can still differ where stages
# are unequal, or where half a backward takes longer than a forward, so that W > F. In the 1F1B step of this run, half a
# backward takes <data value="02.race.half-backward:.2f">1.03</data> times as long as a forward.
# </details>
#
# <details><summary>Do the additional messages matter?</summary>
#
# Interleaving sends <data value="02.race.interleaved.messages">112</data> messages and 1F1B <data value="02.race.1f1b.messages">48</data>. A model of l blocks has l/p in each stage. For one microbatch, a middle stage computes 72 b s h² l/p FLOPs and sends two messages of b s h 16-bit numbers, 4 b s h bytes. The 72 is three times a forward's 24, without attention scores. Let ρ be the device's FLOP/s
# divided by the link's byte/s. Compute time divided by send time is
#
# $$ \frac{72\,b s h^2\,(l/p)}{4\,b s h\;\rho} = \frac{18\,h\,(l/p)}{\rho} $$
#
# The batch cancels, and chunks divide the ratio by v. A wider and deeper stage makes sending cheaper, so pipelines may cross
# slow links (notebook 04). With h = 1,024 and six blocks in each stage, the ratio is 110,592/ρ. At notebook 00's published rates
# of an H100 or H200 that is 50 over NVLink, where ρ is <data value="00.rho.nvlink-4.at-published-rates">2,200 FLOP/B</data>, and 0.14 over 10 Gb Ethernet, where ρ is <data value="00.rho.ethernet-10-gb.at-published-rates">791,000 FLOP/B</data>.
#
# The race's predictions contain no messages; <data value="02.run.in-race">its steps contain them, and also launches and waits, so the ratio of a step to its prediction does not show what messages cost</data>.
# </details>
#
# <details><summary>In your tools: interleaving and zero bubble</summary>
#
# ```python
# from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
#
# interleaved = ScheduleInterleaved1F1B(two_stages, n_microbatches=8, loss_fn=loss_fn)
# zero_bubble = ScheduleZBVZeroBubble(two_stages, n_microbatches=8, loss_fn=loss_fn)
# ```
#
# `two_stages` are this rank's two `PipelineStage` objects: r and r + p for the first, r and 2p - 1 - r for the second.
# Megatron-Core interleaves with `--num-layers-per-virtual-pipeline-stage` or `--num-virtual-stages-per-pipeline-rank`.
# DeepSpeed's pipeline engine has 1F1B alone.
# </details>
#
# **Takeaway.** At equal costs, the four other schedules have a smaller bubble than 1F1B and keep more activations in
# flight on some ranks. Interleaving and ZB-V also send more messages.
#
# ## Three numbers are called "bubble"
#
# - **Overhead over ideal.** Idle time over working time, $(p-1)/m$ for GPipe and 1F1B. Megatron's papers use it.
# - **Share of ranks × makespan.** This page's bubble, $(p-1)/(m+p-1)$.
# - **Share of a rank's span.** Take the rank with the longest time from its first start to its last end. The bubble is
#   its idle share of that time. The zero-bubble paper reports it.
#
# The cell simulates that paper's 6.2B model, 8 stages and 24 microbatches, from its published times. The explorer, a figure
# with knobs, simulates other pipelines. It opens on ZB-H2.
#
# **Challenge.** Get the bubble of a pipeline of 4 ranks under 11 %, with at most 12 microbatches, 80 messages and 6
# microbatches in flight.
#
# <details><summary>With what</summary>
#
# Take F = I = W and a transfer of at least 0.1 forwards. The bubble is the share of ranks × makespan. The explorer's last panel shows an answer.
# </details>

# %%
paper = vit_pipeline.PUBLISHED  # F, I, W and transfer of a stage, on A100s
steps = {}
for name in paper.rates:
    schedule = schedules.make(name, paper.stages, paper.microbatches)
    steps[name] = schedule.simulate(paper.costs)
# bubble_fraction: of ranks × makespan; bubble_rate: of the longest rank's span
shares = {name: 100 * tl.bubble_fraction for name, tl in steps.items()}
overheads = {name: 100 * share / (100 - share) for name, share in shares.items()}
lesson.show(
    simulated={name: 100 * tl.bubble_rate for name, tl in steps.items()},
    published={name: 100 * rate for name, rate in paper.rates.items()},
    columns={"overhead over ideal (%)": overheads, "of ranks × makespan (%)": shares},
    unit="%", key="02.paper", title="One step, three bubbles",
    note="Simulated, published: share of a rank's span. Last two columns: simulated.",
)  # fmt: skip
published = 100 * paper.rates["zb-h2"]
lesson.claim("ZB-H2's two shares differ", (shares["zb-h2"], ">", 1.2 * published))
lesson.explorers.pipeline_bubble()

# %% [markdown]
# For ZB-H2 the paper reports <data value="02.paper.zb-h2.published">6.98 %</data>, and the simulation agrees. Of ranks × makespan, the same step is idle for
# <data value="02.paper.zb-h2.of-ranks-makespan">10.0 %</data>. Its overhead over ideal is <data value="02.paper.zb-h2.overhead-over-ideal">11.2 %</data>. Only these two definitions include the idle
# time at the ends: the last rank starts later than the first, and the first ends earlier than the last. No rank
# starts the next step before all have ended, so this time is lost, and we use this page's bubble.
#
# <details><summary>The challenge: why this answer</summary>
#
# `zb-h1` with 12 microbatches and a transfer of 0.1: 10.4 %, 72 messages, 4 in flight. No other schedule of the
# explorer reaches the goal within these limits. With 12
# microbatches, `zb-h2` idles 8.4 % and keeps 7 in flight, `zb-v` idles 7.2 % and sends 144 messages, and two
# interleaved chunks send 168 and still idle 14.1 %.
# </details>
#
# **Takeaway.** Ask of every published bubble what it was divided by.
#
# ## When more microbatches do not help
#
# ### One slow stage
#
# Let stages take t₀, t₁, … seconds. The first microbatch passes through all. Then one comes out each time the slowest stage
# has done one:
#
# $$ \text{step} \approx \sum_s t_s + (m-1)\,\max_s t_s $$
#
# For large m the idle share goes to 1 - mean/max, not to 0. The cell moves blocks from stage 0 to stage 1. It also lets the
# library balance measured layer times.

# %%
blocks = SIZE.layers // N
moved = max(1, blocks // 3)
heavy = [blocks - moved, blocks + moved] + [blocks] * (N - 2)
cuts = {"uniform": "uniform", "heavy": heavy}
timed = pool.run(vit_pipeline.time_cuts, SIZE, IMAGES, DTYPE, my_1f1b, cuts)
rounds, num_layers = timed[0]
steps = vit_pipeline.median_steps(rounds, dict.fromkeys(rounds, my_1f1b))
uniform = vit_pipeline.stage_seconds(steps["uniform"])  # of one microbatch, F + B
took = {name: tl.makespan for name, tl in steps.items()}
in_stage, predicted = {}, {}  # {cut: blocks of each stage}, {cut: seconds}
for name, counts in num_layers.items():  # layers: an embedding, the blocks, a head
    in_stage[name] = [counts[0] - 1, *counts[1:-1], counts[-1] - 1]
    load = [t * n / blocks for t, n in zip(uniform, in_stage[name], strict=True)]
    predicted[name] = theory.pipeline_seconds(load, M)
source = steps["heavy"].source.split()[0]  # simulated where ranks share cores
lesson.show(
    predicted=predicted, **{source: took}, unit="s", key="02.cut-step",
    title=words.heavy_title(took),
    columns={"blocks of each stage": {name: str(n) for name, n in in_stage.items()}},
    note="Predicted: the formula, with the uniform cut's stage times.",
)  # fmt: skip
title = words.busiest_title(steps["heavy"])
lesson.show(steps["heavy"], key="02.heavy", title=title)
words.record_cuts(rounds, steps, in_stage)
words.claim_faster(rounds, "uniform", "heavy")

# %% [markdown]
# By medians, the uniform partition takes <data value="02.cut.uniform">170 ms</data>, the heavy one <data value="02.cut.heavy">190 ms</data>. Balancing by time gives the partition
# <data value="02.cut-step.by-time.blocks-of-each-stage">[6, 6, 6, 6]</data> and <data value="02.cut.by-time">172 ms</data>; <data value="02.cut.verdict">this is the uniform partition</data>.
#
# <details><summary>What can balancing gain here?</summary>
#
# Rank 0 times all layers. A ViT's blocks are equal, so only the embedding and the head are reasons to move blocks. Other
# moves come from noise in these times. If noise moves a block to a stage that was as fast as the others, this stage becomes the
# slowest, as stage 1 is in the heavy partition.
# </details>
#
# <details><summary>May we compare these steps with the race's?</summary>
#
# Where each rank has a GPU, they are of the same kind, but steps vary from cell to cell, as the fold on the best m shows. Where ranks
# share cores, they are simulated from times of single layers, measured on rank 0 while the other ranks wait.
# </details>
#
# <details><summary>How much longer does rank 1 work?</summary>
#
# In the figure, rank 1 works <data value="02.heavy-work:.2f">1.36</data> times as long as the median rank and has <data value="02.heavy-blocks:.2f">1.33</data> times as many blocks. Launches,
# noise, and the embedding or the head of another rank can make the difference. Launches and noise can also make a
# rank work longest that has no additional block, so this factor alone does not prove a heavy stage.
#
# The table's predictions scale the stage times of the uniform step by blocks. So they do not know where another step waits
# for launches.
# </details>
#
# ### Exercise 4: what is wrong with this step?
#
# *Extra, 20 minutes.* `diagnose(tl)` gets the `Timeline` of a 1F1B step and returns `("heavy stage", rank)`,
# `("slow link", None)` or `("few microbatches", None)`.
#
# <details><summary>A timeline tells a bubble's causes apart</summary>
#
# | cause | the timeline shows | threshold |
# |---|---|---|
# | heavy stage | one rank works clearly more than the others | work above 1.2 × the median rank's |
# | slow link | ranks are free and their inputs were computed long ago | such waits above 5 % of ranks × makespan |
# | few microbatches | ranks wait mostly while the pipeline fills and drains | neither of these |
# </details>
#
# <details><summary>Hint</summary>
#
# Use `tl.ranks`, `tl.work(r)`, `tl.makespan` and `tl.by_rank[r]`, whose events have `.op`, `.stage`, `.microbatch`,
# `.start` and
# `.end`. An F needs the F of the stage before, a B the B of the stage after. If an action starts later than both its rank's
# previous end and the end of what it needs, the rank has waited for the link. In the check's six simulated records, times vary by
# up to 6 %, a heavy stage takes
# 1.6 times as long as others, and a transfer takes 0.02 or 0.9 forwards.
# </details>


# %% tags=["stub-4"]
def diagnose(tl): ...


# %% tags=["check-4"]
lesson.check(exercises.diagnosis, diagnose)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def diagnose(tl):
#     work = {rank: tl.work(rank) for rank in tl.ranks}
#     heaviest = max(work, key=work.get)
#     if work[heaviest] > 1.2 * statistics.median(work.values()):
#         return "heavy stage", heaviest
#     ends = {(e.op, e.stage, e.microbatch): e.end for e in tl.events}
#     waited = 0.0
#     for events in tl.by_rank.values():
#         free = 0.0
#         for e in events:
#             needed = (e.op, e.stage - 1 if e.op == "F" else e.stage + 1, e.microbatch)
#             waited += e.start - max(free, ends.get(needed, 0.0))
#             free = e.end
#     if waited > 0.05 * tl.makespan * len(tl.ranks):
#         return "slow link", None
#     return "few microbatches", None
# ```
# </details>

# %% [markdown]
# ### Microbatches that are too small
#
# At a fixed batch, more microbatches are smaller ones. Suppose that, besides its computing, a microbatch costs every stage a
# constant c seconds: kernels have to be launched, and small ones do not fill the device. Let T be the seconds that the batch
# takes on one device without this cost. Then
#
# $$ \text{step} = (m+p-1)\left(\frac{T}{p\,m} + c\right) \qquad\text{least at}\qquad m = \sqrt{\frac{(p-1)\,T}{p\,c}} $$
#
# With more microbatches, slots are shorter, so filling and draining cost less. But each of the m + p - 1 slots adds c. The cell
# takes T and c from the work at the smallest and the largest m, and splits each step into parts.

# %%
SWEEP = [m for m in (1, 2, 4, 8, 16, 32, 64) if m <= max(16, IMAGES // 8)]
by_m = {m: schedules.make("1f1b", N, m) for m in SWEEP}
task, most = (SIZE, IMAGES, DTYPE, by_m), SWEEP[-1]
rounds = pool.run(vit_pipeline.time_rounds, *task, repeats=6)[0]  # in turn
# {} on a CPU; each pipeline is made with hpnb.Pipeline(..., cuda_graphs=True)
by_graphs, notes = pool.run(vit_pipeline.time_graphs, *task, repeats=6)[0]
ran, graphed = (vit_pipeline.median_steps(r, by_m) for r in (rounds, by_graphs))
busy = {m: step_timing.compute_seconds(tl) for m, tl in ran.items()}  # T/p + m c
c = max(0.0, busy[most] - busy[1]) / (most - 1)
# T/p = busy[1] - c, but noise must make it neither negative nor more than the work
ideal = max(0.0, min(busy[1] - c, *busy.values()))
parts = [vit_pipeline.step_parts(tls, by_m, ideal) for tls in (ran, graphed) if tls]
predicted = [theory.step_seconds(N * ideal, N, m, c) for m in SWEEP]
best, rivals = words.best_and_rivals(ran, rounds)
title = words.sweep_title(best, rivals)
lesson.show(figures.u_curve(SWEEP, parts[0], predicted, title, RAN, *parts[1:]))
print(words.record_graphs(ran, graphed, rounds, by_graphs, notes, M))
lesson.record("02.sweep.formula", theory.best_microbatches(N * ideal, N, c))
words.record_sweep(ran, rounds, parts, predicted, M)
alone, shortest = ran[1].makespan, ran[best].makespan
lesson.claim("Microbatches shorten the step", (alone, ">", 1.1 * shortest))
if graphed:
    pair = graphed[most].makespan, "<", ran[most].makespan
    lesson.claim("CUDA graphs shorten the step with the smallest microbatches", pair)

# %% [markdown]
# Launched from Python, the shortest step has m = <data value="02.sweep.best">8</data>; <data value="02.sweep.verdict">every other m took longer in each of 6 rounds</data>. The formula says
# <data value="02.sweep.formula:.1f">7.4</data>. The bubble takes <data value="02.sweep-bubble.best">49.8 ms</data> in the shortest step and <data value="02.sweep-bubble.most">560 ms</data> at m = <data value="02.sweep.most">64</data>. Between the two,
# <data value="02.sweep.changes">the time of launches and small kernels grows by 309 ms, the bubble grows by 510 ms and host wait grows by 64.2 ms. With CUDA graphs, the bubble at m = 64 is 17.9 ms. So most of the bubble without them comes from launches, not from the schedule</data>.
#
# A *CUDA graph* records all kernels of a stage's forward or backward once and launches them with one call. So c falls, and more
# microbatches pay.
#
# <details><summary>How to read the lower panel</summary>
#
# If the figure has a lower panel, it has an axis of its own, and the formula belongs to the upper panel. With graphs, which keep
# their memory, all repeats of one m run before the next m starts. So a slow drift of the machine can look like a small
# difference between two m.
# </details>
#
# <details><summary>What the parts are, and why the line need not meet the bars</summary>
#
# *Ideal* is T/p. What actions take beyond it is *launches and small kernels*. For the *bubble*, we replay the step: each action
# takes its recorded time and starts as soon as its rank is free and its input is computed. The bubble is the length of this replay
# minus the mean work of a rank.
#
# If a step's messages take time, the figure has a fourth part, *host wait and transfers*: what the step takes beyond
# its replay without messages. In a replayed step, launch costs are inside the actions, so this part holds only
# transfers. In a step that was measured with a GPU for each rank, it also holds the *host wait*: a rank is free and
# has its input, but its process has not launched the next action. Waits inside an action count as *launches and small
# kernels*. No schedule removes host wait or launches. Larger microbatches and CUDA graphs reduce both.
#
# T and c come from the work alone. The formula adds the bubble of equal stages, and takes c as the same at every m.
# Short actions vary more, relative to their length, and in the replay a rank waits for slow actions of others. So
# with more microbatches the bubble can shrink less than by the formula, or even grow. The line is furthest from the
# bars at m = <data value="02.sweep.furthest">64</data>, where the step takes <data value="02.sweep.over:.2f">2.34</data> times as long as by the formula.
# </details>
#
# <details><summary>How sure is the best m?</summary>
#
# There are six rounds, and in each round every m takes one step. We show <data value="02.run.shown">the median step</data>. If two m were equally fast, one would take longer in
# all six rounds in only 1 of 32 cases. So we call an m slower only if it took longer in all six; any other may be as good.
#
# From cell to cell, steps can vary more: 1F1B with m = 8 took <data value="02.ran.1f1b.makespan">174 ms</data> beside GPipe, <data value="02.race.step.1f1b">183 ms</data> in the race and
# <data value="02.sweep-step.usual">179 ms</data> here. So compare steps of one cell only.
# </details>
#
# <details><summary>Has this pipeline paid?</summary>
#
# At m = 1 only one rank works at a time. So that step, <data value="02.sweep-step.alone">414 ms</data>, is about what one rank would need for all stages, one
# after the other: T + p c. The shortest step without graphs takes <data value="02.sweep-step.best">179 ms</data>, which is <data value="02.sweep-share">43.3 %</data> of that. Without
# bubble and launches it would be T/p, at most a p-th of that.
#
# At the best m the ranks spend <data value="02.sweep-step.work">500 ms</data> in actions, all together. Where they share cores or a GPU, the real step
# takes at least this sum, divided by the number of cores or GPUs.
# </details>
#
# <details><summary>Which m to choose</summary>
#
# With m = 2p, this page's 8, the formula's bubble is 27 %, with 4p 16 %. But the larger c is, the smaller is the best m. A large m also saves memory: 1F1B keeps p microbatches of batch/m samples.
# </details>
#
# <details><summary>In your tools: CUDA graphs</summary>
#
# In hpnb: `hpnb.Pipeline(..., cuda_graphs=True)`. The third step with a shape captures each stage, and later steps replay
# it. A stage that cannot be captured runs as before, and a warning says why. In PyTorch:
# `torch.cuda.make_graphed_callables(stage, (hidden,))`, or `torch.compile(stage, mode="reduce-overhead")`. Megatron-Core:
# `--cuda-graph-impl local`.
# </details>
#
# **Takeaway.** By these formulas, two things limit a pipeline: its slowest stage, and what each microbatch costs whatever its size.
#
# ### Exercise 5: microbatches under a memory cap
#
# *Core, 15 minutes.* Write `choose(job)`. It returns the m, a divisor of `job.batch`, with the shortest 1F1B step whose
# activations on rank 0 fit into `job.memory_cap` bytes.
#
# <details><summary>What a job has</summary>
#
# With b = batch/m samples, a forward takes `job.launch + b * job.forward`, a backward `job.launch + 2 * b *
# job.forward`, and a message of `b * job.message_bytes` travels on `job.link`. A sample has `job.activation_bytes` in
# each of `job.ranks` stages. A step at most 1 % longer than the best also passes.
# </details>
#
# <details><summary>Hint</summary>
#
# Rank 0 has min(p, m) microbatches in flight. `theory.seconds("send", nbytes, 2, link)` is α + b/B for a send between
# 2 ranks. Simulate every m
# that fits, with `Costs(forward, backward, 0.0, transfer)`: an unsplit backward costs I + W.
# </details>


# %% tags=["stub-5"]
def choose(job): ...


# %% tags=["check-5"]
lesson.check(exercises.choose_microbatches, choose)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def choose(job):
#     def step_seconds(m):
#         b = job.batch // m
#         transfer = theory.seconds("send", b * job.message_bytes, 2, job.link)
#         forward, backward = (job.launch + k * b * job.forward for k in (1, 2))
#         costs = Costs(forward, backward, 0.0, transfer)
#         return schedules.make("1f1b", job.ranks, m).simulate(costs).makespan
#
#     divisors = [m for m in range(1, job.batch + 1) if job.batch % m == 0]
#     samples = {m: min(job.ranks, m) * (job.batch // m) for m in divisors}
#     fitting = [m for m in divisors if samples[m] * job.activation_bytes <= job.memory_cap]
#     return min(fitting, key=step_seconds)
# ```
# </details>

# %% [markdown]
# ## What to remember
#
# - A pipeline sends only what crosses its cuts. With equal stages and microbatches, GPipe and 1F1B waste $(p-1)/(m+p-1)$ of ranks × makespan.
# - 1F1B keeps p - r microbatches on rank r instead of m.
# - At equal costs, interleaving shortens idle time; it multiplies messages. A split backward fills gaps with W.
# - The slowest stage sets the pace, and each microbatch has a fixed cost, which CUDA graphs reduce.
#
# **When not to use this.** If the model fits on a GPU and the batch is large, replicas have no bubble. Avoid pipelines
# if the batch gives few microbatches of a useful size, or if layers cannot be partitioned evenly.
#
# <details><summary>Where to look, and papers</summary>
#
# **Where to look.** `torch/distributed/pipelining/schedules.py` in PyTorch, `megatron/core/pipeline_parallel/schedules.py`
# in Megatron-Core, `hpnb/pipeline_parallel/executor.py` here.
#
# **Papers.** Huang et al. 2019, *GPipe*. Narayanan et al. 2021, *Megatron-LM on GPU clusters*: 1F1B, interleaving. Qi et
# al. 2024, *Zero bubble pipeline parallelism*, arXiv 2401.10241.
# </details>
#
# **Next.** Notebook 03 splits the layers themselves.
