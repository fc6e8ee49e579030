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
# **The question.** A pipeline gives each rank some layers of the model. Now they wait for each other. Who is idle, for
# how long, and what do you pay, in memory and messages, to keep them busy?
#
# **You will be able to** run a model cut in stages by hand; derive the bubble and predict it; write a schedule as lists
# of actions, prove that it cannot hang, and train with it; say what 1F1B, interleaving and a split backward each buy,
# and at what price; tell two definitions of "bubble" apart; choose the cut and the number of microbatches.
#
# **You should know** notebook 00 (sends, the knee of a wire, ρ) and 01 (forward, backward, what "equal" means).
#
# **Time.** 35 minutes to read; under 2 minutes to run on a laptop, and as long on 2 or 4 GPUs; 100 minutes for the
# exercises.
#
# **Two questions to recall.** From 00: how long does a message of b bytes take? From 01: from how many tokens a rank on
# can data parallelism be free, and which size is not in that law?
#
# <details><summary>Answers</summary>
# α + b/B; at the knee, α B bytes for a single message, both terms cost the same. From about ρ(d-1)/d tokens on (16-bit
# gradients). The size of the model is not in it.
# </details>

# %% tags=["setup"]
import statistics, sys
import torch, torch.distributed as dist
import hpnb
from hpnb import Layout, Mesh, comm, lesson, plot, theory
from hpnb.lesson.figures import vit_pipeline as figures
from hpnb.lesson.programs import step_timing, vit_pipeline
from hpnb.lesson.exercises import vit_pipeline_parallel as exercises
from hpnb.models import SIZES, ViTSize
from hpnb.pipeline_parallel import Costs, Schedule, ScheduleError, full_state_dict, schedules

N = min(4, hpnb.ranks.default_ranks())
GPU = hpnb.ranks.choose_device("auto", N).device == "cuda"
SMALL = ViTSize(hidden=256, layers=8, heads=8, mlp=1024, patch=8, image=32)
pool = hpnb.Ranks(N)  # these ranks stay to the end
SIZE, DTYPE = (SIZES["l16"], torch.bfloat16) if GPU else (SMALL, torch.float32)
IMAGES = vit_pipeline.batch_size(pool)  # on a GPU as many as make its kernels long, and fit
M = 8  # microbatches
EACH = IMAGES // M
MESSAGE = EACH * SIZE.tokens * SIZE.hidden * DTYPE.itemsize  # bytes between two stages
name = f"ViT, {SIZE.layers} blocks of {SIZE.hidden}, {str(DTYPE)[6:]}, {IMAGES} images in {M} microbatches"
leaves = hpnb.data.beans("train", size=48, image_size=32)
here = lesson.banner(N, model=name, data=leaves.describe())

# %% [markdown]
# ## One microbatch walks
#
# Cut a ViT between blocks into p *stages*, one a rank. A rank then holds 1/p of the weights, gradients and optimizer
# states, and no copy of anybody else's: where the model does not fit one device, that is the point.
#
# What must travel? Forward, the hidden states at the cut: one tensor of b images x s tokens x h numbers. Backward, its
# gradient, the other way. Nothing else. Before you run it, commit to the bytes.
#
# Here is the whole of it by hand. Between two `receive`s a rank knows nothing of the model but its own layers.

# %%
lesson.predict("02.walk-bytes", f"{EACH} images ({SIZE.tokens} tokens of {SIZE.hidden} numbers of {DTYPE.itemsize} bytes "
               f"each) walk through {N} stages and back: how many bytes do all ranks together send?", guess=None,
               unit="B", kind="identity")  # fmt: skip


def walk():
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    rank, last = axis.rank, axis.size - 1
    model, batch = vit_pipeline.vit_and_batch(SIZE, EACH, DTYPE)
    mine = vit_pipeline.rank_layers(model, axis)  # embedding, block, block, ..., head: a rank's share
    shape = (EACH, SIZE.tokens, SIZE.hidden)

    def once(recorder):
        x = gradient = None
        if rank > 0:
            x = comm.receive(shape, axis, rank - 1, DTYPE).detach().requires_grad_()
        with recorder.span("F", rank, 0):
            y = x
            for layer in mine:
                y = layer.run(y, batch)
            y = vit_pipeline.microbatch_loss(y, batch) if rank == last else y
        if rank < last:
            comm.send(y.detach(), axis, rank + 1)
            gradient = comm.receive(shape, axis, rank + 1, DTYPE)
        with recorder.span("B", rank, 0):
            y.backward(gradient)  # the last rank starts from the loss
        if rank > 0:
            comm.send(x.grad, axis, rank - 1)

    walks = []
    for _ in range(6):
        with hpnb.record.timeline() as recorder:
            once(recorder)
        walks.append(recorder.gather().select("FB"))
    with hpnb.record.traffic() as t:
        once(recorder)
    return min(walks, key=lambda tl: tl.makespan), t.bytes["pp"]

# %%
found = pool.run(walk)
walked = found[0][0]  # the quickest of six
plot.show(
    plot.timeline(walked, title=f"one microbatch on {N} ranks: only one of them ever works"),
    alt=f"A staircase down in forwards and up in backwards; {100 * walked.bubble_fraction:.0f} % is idle.",
)
sent = sum(sent for _, sent in found)
lesson.reveal("02.walk-bytes", sent, predicted=2 * (N - 1) * theory.bytes_sent("send", MESSAGE, 2))
ratios = lesson.comparison([("idle (%)", 100 * (1 - 1 / N), 100 * walked.bubble_fraction)], title="one microbatch")

# %% [markdown]
# 2(p-1) messages of b s h numbers: each cut is crossed twice. Each rank works once forward and once backward, and waits
# for all others meanwhile. Idle is 1 - 1/p of ranks x *makespan*, the time from the first start to the last end. You
# bought p devices and run at the speed of one. (So on a laptop this clock is honest, however few the cores.) This is
# naive model parallelism: still useful where a model fits no other way.
#
# **Takeaway.** A pipeline sends little, and only between neighbours. What it wastes is time.
#
# ## Fill it with microbatches
#
# A rank that has passed its microbatch on could start on the next. So cut the batch into m *microbatches* and send them
# one behind the other; gradients add up, and the optimizer steps once at the end, when all have been through. That is
# GPipe: all forwards, then all backwards. (The loss is divided once, by the count of the whole batch, so that uneven
# microbatches still give the exact mean: exercise 1 of 01.)
#
# Let a stage take t seconds for one microbatch, forward and backward. Follow the last stage: it starts p-1 forwards
# late, works m t without a pause, and the first stage ends p-1 backwards after it. So the step takes (m + p - 1) t, of
# which each rank works m t. The rest is the *bubble*:
#
# $$ \text{bubble} = \frac{p-1}{m+p-1} $$
#
# With m = 1 it is 1 - 1/p, as above. It does not matter how t divides into forward and backward, nor how large the model
# is.

# %%
lesson.predict("02.bubble", f"{N} ranks, {M} microbatches, GPipe: which share of ranks x time is idle?", guess=None, unit="%")
gpipe = schedules.make("gpipe", stages=N, microbatches=M)
gpipe.check()  # raises if it could hang
print(gpipe)

# %% [markdown]
# A schedule is nothing but lists: for each rank what it does, in order. `2F0` is stage 2's forward of microbatch 0, `B`
# a backward. Who sends what to whom follows from the lists, and so does what must be kept, and for how long. The object
# printed above is now simulated with the costs of the walk, executed, and drawn.

# %%
predicted = gpipe.simulate(Costs.measured(walked))
measured = pool.run(vit_pipeline.time_schedules, SIZE, IMAGES, DTYPE, {"gpipe": gpipe})[0]["gpipe"]
both = " and ".join(f"{100 * tl.bubble_fraction:.1f} %" for tl in (predicted, measured))
plot.show(
    plot.timeline(predicted, measured, names=("predicted", "run"), in_flight=True,
                  title=f"GPipe, {N} ranks, {M} microbatches: all forwards, then all backwards"),
    alt=f"GPipe predicted above run: forwards, then backwards; every rank comes to hold {M}. Bubbles of {both}.",
)  # fmt: skip
lesson.reveal("02.bubble", 100 * measured.bubble_fraction, predicted=100 * theory.bubble(N, M))
ratios = lesson.comparison([("step (s)", predicted.makespan, measured.makespan)], title="simulated with the walk's costs")

# %% [markdown]
# **Where the truth in time comes from.** On GPUs, from the devices' own clocks. On a laptop with fewer cores than ranks
# a clock on the wall would show who got a core. There each action's CPU time is recorded, and the simulator replays the
# schedule with these; the title says so.
#
# If the ratio of the bubble is above 1: in the formula all stages, and all microbatches, take the same t. Real ones do
# not, and whoever is quicker waits. A second term is a hop from rank to rank, which takes time too. (The walk's sends
# block; the library's travel while ranks compute, between GPUs of one machine by copy engines and not by
# multiprocessors.)
#
# Now read the strips. *In flight* are the microbatches that have been forward on a rank and are still needed there.
# GPipe comes to hold all m of them, on every rank. Twice as many of half the size shrink the bubble, and free no
# memory.
#
# ## 1F1B buys memory, not time
#
# Why hold m? A backward can start as soon as one microbatch has reached the end. *One forward, one backward* starts it
# then: rank r does p - r - 1 forwards to warm up, then one forward and one backward in turn, and ends with the backwards
# that are left. The step is as long and the bubble as large. But rank r never holds more than p - r, however many
# microbatches there are.
#
# ### Exercise 1: 1F1B as lists
#
# *Implement, 20 minutes.* Write `one_f_one_b(p, m)`: a list of p lists of actions, such as `[["0F0", "0B0"], ["1F0",
# "1B0"]]` for p = 2, m = 1. Stage r is on rank r. The check asks `Schedule.check()` and `.simulate()`, with F = 1 and
# B = 2: for p = 4, m = 8 it wants 33 units, and 4, 3, 2, 1 in flight.
#
# Hint: m may be smaller than the warm-up. Count forwards and backwards separately.

# %% tags=["stub-1"]
def one_f_one_b(p, m):
    ...


# %% tags=["check-1"]
lesson.check(exercises.one_f_one_b, one_f_one_b)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def one_f_one_b(p, m):
#     rows = []
#     for r in range(p):
#         warm = min(p - r - 1, m)
#         row = [f"{r}F{k}" for k in range(warm)]
#         for k in range(m - warm):
#             row += [f"{r}F{warm + k}", f"{r}B{k}"]
#         rows.append(row + [f"{r}B{k}" for k in range(m - warm, m)])
#     return rows
# ```
# </details>

# %% [markdown]
# Your lists now train a ViT. They are kept, too: notebooks 06 and 08 run them. (Until you have written them the
# library's stand in, and the output says so.) The pipeline must compute what one process computes, here in float64: the
# same loss in each step, the same weights after eight.

# %%
def train(schedule):
    axis, place = Mesh(Layout(pp=hpnb.world_size())).pp, hpnb.data.ImageTransform(32, device=hpnb.device())
    batch = next(iter(hpnb.data.Loader(leaves, 16, transform=place)))  # the same on every rank
    model, alone = (hpnb.models.vit("laptop", classes=3, dtype=torch.float64, device=hpnb.device()) for _ in range(2))
    pipe = hpnb.Pipeline(model, axis, schedule, vit_pipeline.microbatch_loss)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (pipe, alone)]
    losses = []
    for _ in range(8):
        ours, theirs = pipe.step(batch).loss, alone(**batch).loss
        theirs.backward()
        losses.append((ours.item(), theirs.item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = full_state_dict(pipe.module, axis)
    return losses, step_timing.relative_distance(whole.values(), [alone.state_dict()[key] for key in whole])


lesson.keep_schedule("1f1b", one_f_one_b)
mine = lesson.reader_schedule("1f1b", N, M)
losses, apart = pool.run(train, mine)[0]
print(f"loss {losses[0][0]:.3f} to {losses[-1][0]:.3f}, from one process's {max(abs(a - b) for a, b in losses):.0e} at most; "
      f"weights apart by {apart:.0e}")  # fmt: skip
again, ran = pool.run(vit_pipeline.time_schedules, SIZE, IMAGES, DTYPE, {"gpipe": gpipe, "1f1b": mine})[0].values()
all_at_once, in_turn = (pool.run(vit_pipeline.measure_activations, SIZE, IMAGES, DTYPE, each) for each in (gpipe, mine))
plot.show(
    plot.timeline(ran, in_flight=True, title=f"{mine.name}, {N} ranks, {M} microbatches"),
    alt=f"Forwards and backwards alternate; the ranks hold {[ran.peak_in_flight(r) for r in ran.ranks]} at most.",
)
rows = [(f"rank {r}, activations (B)", all_at_once[r][0] * theory.in_flight("1f1b", N, M, r) / M, in_turn[r][0])
        for r in range(N)]  # fmt: skip
rows.append(("all ranks, sent", 2 * (N - 1) * M * MESSAGE, sum(sent for _, sent, _ in in_turn), "B", "identity"))
rows.append(("step: GPipe's, 1F1B's", again.makespan, ran.makespan, "s"))
ratios = lesson.comparison(rows, title=f"{mine.name}; predicted: what GPipe held, times in flight over {M}, and its step")

# %% [markdown]
# The strips fall from p on rank 0 to 1 on the last: memory is saved, and unevenly, for rank 0's first microbatch comes
# back last. The bubble is in another place, and with equal stages and no transfer as large: the last row has both steps.
#
# **Takeaway.** GPipe and 1F1B are idle about equally long. 1F1B frees memory, which you may spend on more microbatches;
# *they* buy time.
#
# ### An autopsy
#
# Somebody tidies a list: rank 1 shall send its first gradient back sooner. `check` proves that
# every rank gets through its list, or says why not, before a single process is started.

# %% tags=["raises-exception"]
rows = [list(row) for row in schedules.make("1f1b", 4, 8).actions]
rows[1][1], rows[1][3] = rows[1][3], rows[1][1]  # 1F1 and 1B0
tidied = Schedule(rows, "tidied")
tidied.check()

# %% [markdown]
# Rank 1 waits for a gradient that rank 2 will compute once rank 1 has sent it something else. And a program that
# just obeys its list?

# %%
error = sys.last_value
assert isinstance(error, ScheduleError)
assert (error.rank, error.step) == (1, 1)


def obey(schedule):
    axis, sending = Mesh(Layout(pp=hpnb.world_size())).pp, []
    for action in schedule.actions[axis.rank]:
        way = 1 if action.op == "F" else -1
        if 0 <= axis.rank - way < axis.size:
            comm.receive((1,), axis, axis.rank - way)
        if 0 <= axis.rank + way < axis.size:  # without waiting
            sending.append(dist.isend(torch.zeros(1), axis.ranks[axis.rank + way], axis.group))


try:
    hpnb.launch(obey, tidied, ranks=4, device="cpu", timeout=3)
except hpnb.RankError as hang:
    stuck = [(rank, next(t.strip() for t in stack.splitlines() if "comm." in t)) for rank, stack in hang.stacks.items()]
    lesson.table(("rank", "waits in"), stuck, title=f"without check: {hang.error}")
lesson.field_guide.add(
    "a pipeline stands still, and every rank waits in the same line, a receive",
    "Schedule.check(), before anything runs: it names the circle",
    "two actions in one rank's list have changed places",
    notebook="02",
)
lesson.field_guide.show()

# %% [markdown]
# It hangs; and the instrument of 00, to compare lines, says nothing here: all wait in the same one. Reason about the
# lists, not the processes.
#
# ## Smaller pieces
#
# Two ways to a smaller bubble with the same m.
#
# **Interleave.** Give each rank v thin chunks in place of one thick stage: stage s on rank s mod p, so that the model
# goes round v times. To fill the pipeline now takes p - 1 *chunks* of t/v each:
#
# $$ \text{bubble} = \frac{p-1}{v\,m+p-1} $$
#
# The price: v p - 1 crossings in place of p - 1, each as large as before, so 2(vp-1)m messages for 2(p-1)m. And more in
# flight, since a microbatch must go round v times before it can come back.
#
# ### Exercise 2: interleave by two
#
# *Implement, 25 minutes.* Write `interleave(p, m)` with two chunks a rank, for m a multiple of p. With F = 1 and B = 2
# of a whole stage (so ½ and 1 a chunk) the check wants the 15.8 % of p = 4, m = 8, and at most 2(p - r - 1) + p + 1
# *chunks* in flight on rank r: with all forwards first it would be 2m.
#
# Hint: take microbatches in groups of p, for microbatch 0 needs p turns to come round to rank 0 again: p of them fill
# these turns. A group goes through chunk 0, then chunk 1; in backwards chunks are reversed, microbatches not. Warm up
# with 2(p - r - 1) + p forwards, long enough that rank 0 gets a backward when it needs one; then go on as in 1F1B.

# %% tags=["stub-2"]
def interleave(p, m):
    ...


# %% tags=["check-2"]
lesson.check(exercises.interleave, interleave)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def interleave(p, m):
#     order = [(chunk, group + k) for group in range(0, m, p) for chunk in (0, 1) for k in range(p)]
#     rows = []
#     for r in range(p):
#         forward = [f"{r + chunk * p}F{k}" for chunk, k in order]
#         backward = [f"{r + (1 - chunk) * p}B{k}" for chunk, k in order]
#         warm = min(2 * (p - r - 1) + p, 2 * m)
#         row = forward[:warm]
#         for f, b in zip(forward[warm:], backward):
#             row += [f, b]
#         rows.append(row + backward[2 * m - warm :])
#     return rows
# ```
#
# A warm-up of p - r - 1 + p is as short here, and holds 8 chunks in place of 11. With a transfer of 0.1 forwards it
# takes 31.5 units against 29.9: what is in flight also hides the wire.
# </details>

# %% [markdown]
# **Split the backward.** It computes two things. I, the gradient of a stage's *input*: the stage before waits for it.
# W, the gradient of its *weights*: nobody waits for it, but the optimizer at the end. In a linear layer y = x Aᵀ with
# gradient g of y, I is g A and W is gᵀ x: two matmuls of the same size, and neither needs the other. So do I at once,
# and keep W for moments in which the rank would be idle. In flight then lasts until W, which needs x and g (what only I
# needed is let go, so the bytes are fewer than the count says).
#
# ### Exercise 3: place the weight gradients
#
# *Implement, 20 minutes.* Write `place_w(p, m)` with actions F, I and W, for m ≥ p. With F = I = W = 1 the check wants
# 27 units for p = 4, m = 8, and at most 4 in flight on *every* rank. (W right after I, or all W at the end: both take
# 30, and the second holds 8.)
#
# Hint: with 1F1B, rank r has r microbatches of room that rank 0 needs. Let its W lag r microbatches behind its I.

# %% tags=["stub-3"]
def place_w(p, m):
    ...


# %% tags=["check-3"]
lesson.check(exercises.place_w, place_w)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def place_w(p, m):
#     rows = []
#     for r in range(p):
#         ahead = p - r
#         row = [f"{r}F{k}" for k in range(ahead)]
#         for k in range(m):
#             row.append(f"{r}I{k}")
#             if k >= r:
#                 row.append(f"{r}W{k - r}")
#             if k + ahead < m:
#                 row.append(f"{r}F{k + ahead}")
#         rows.append(row + [f"{r}W{k}" for k in range(m - r, m)])
#     return rows
# ```
# </details>

# %% [markdown]
# What you placed is ZB-H1 of the zero-bubble paper (arXiv 2401.10241): each rank idles (p-1)(F+I-W) (while W ≤ I),
# where with 1F1B it idles (p-1)(F+I+W). ZB-H2 spends memory: it starts with 2p - 1 forwards on rank 0, so that W can
# fill every gap. ZB-V folds the model: rank r has stages r and 2p - 1 - r, so rank 0 has both ends, and all ranks fill
# up evenly: with no more in flight than 1F1B's first rank, and fewer messages than interleaving, for its fold needs
# none. (The explorer below has two more: breadth-first, interleaving with all forwards first, and dualpipe-v, another
# V.)
#
# Which is the quickest *here*? The prediction knows the stage times of the 1F1B step alone: half a backward for I and W
# each, half a stage for each of two chunks. (1F1B runs anew in each section, in turn with its rivals,
# so its step differs a little.)

# %%
lesson.predict("02.schedules", f"{N} ranks, {M} microbatches: which has the shortest step, 1f1b, interleaved, zb-h1, zb-h2 or "
               "zb-v?", guess=None, kind="ranking")  # fmt: skip
CHUNKS = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-h2": 1, "zb-v": 2}
made = {each: schedules.make(each, stages=v * N, microbatches=M, chunks=v) for each, v in CHUNKS.items()}

# %%
ran = pool.run(vit_pipeline.time_schedules, SIZE, IMAGES, DTYPE, made)[0]
told = {each: made[each].simulate(vit_pipeline.stage_costs(ran["1f1b"], v)).makespan for each, v in CHUNKS.items()}
seen = {each: tl.makespan for each, tl in ran.items()}
rows = []
for each, tl in ran.items():
    bubbles = (f"{100 * share:.1f} %" for share in (tl.bubble_fraction, tl.bubble_rate))
    held = vit_pipeline.peak_in_flight(tl, CHUNKS[each])
    times = (lesson.number(told[each], "s"), lesson.number(seen[each], "s"), f"{seen[each] / told[each]:.2f}")
    rows.append((each, *times, *bubbles, f"{held:g}", f"{sum(map(len, made[each].queues.values()))}"))
columns = ("schedule", "predicted", "run", "ratio", "bubble, of ranks × makespan", "of the longest span", "in flight", "messages")
own = ", ".join(f"{each} {tl.makespan / made[each].simulate(Costs.measured(tl)).makespan:.2f}" for each, tl in ran.items())
note = f"In zb-h1 I takes {vit_pipeline.input_over_weight(ran['zb-h1']):.2f} x W. Ratios with each schedule's own F, I, W: {own}."
lesson.table(columns, rows, f"one step; in flight in microbatches; source: {tl.source}", note)
shown = ("1f1b", "interleaved", "zb-h2")
less = all(ran[each].bubble_fraction < ran["1f1b"].bubble_fraction for each in shown[1:])
finding = "less idle time with smaller pieces" if less else "smaller pieces, and not always less idle time"
plot.show(
    plot.timeline(*(ran[each] for each in shown), names=shown, title=f"{N} ranks, {M} microbatches: {finding}"),
    alt=f"{finding}: steps of {', '.join(shown)} take {', '.join(lesson.number(seen[each], 's') for each in shown)}.",
)
lesson.reveal("02.schedules", seen, predicted=sorted(told, key=told.get))
for each, tl in ran.items():
    step = {"step (s)": (told[each], seen[each]), "bubble (%)": (None, 100 * tl.bubble_fraction)}
    lesson.ledger.add("02", Layout(pp=N), f"{name}, {each}", step, vit_pipeline.hardware(N))

# %% [markdown]
# (11 chunks in flight, each half a stage, count as 5.5.) A ratio above 1 has two causes. Smaller pieces cost: a chunk's
# kernels are smaller, and I and W apart are slower than one backward (each goes through the same layers). Nor is I half
# a backward: attention's own matmuls, norms and activations have no W. ZB-H1 pays (p-1)(I-W) for that; ZB-H2 has slack,
# ZB-V some. The note predicts again with what F, I and W really took. A schedule wins if it saves more idle time than it
# adds work.
#
# **And the bytes?** A stage of l/p of the l blocks computes 72 b s h² l/p FLOPs a microbatch: 6 a token for each of a
# block's 12 h² weights (01). A stage in the middle sends twice b s h numbers of 2 bytes, one at an end half of that.
# With ρ FLOPs a byte, computing over sending is
#
# $$ \frac{72\,b s h^2\,(l/p)}{4\,b s h\;\rho} = \frac{18\,h\,(l/p)}{\rho} $$
#
# This is the third ratio of the series. No batch in it: b s cancels. The model *is* in it: wider and deeper stages
# make sending cheaper. Below, your recorded steps on other wires, ρ taken with the pace of your own
# stages. Data parallelism: as much computing, gradients all-reduced in 25 MB buckets during the backward.

# %%
pace = SIZE.training_flops(IMAGES, classes=3) / N / vit_pipeline.compute_seconds(ran["1f1b"])  # FLOP/s of a stage
gradient = DTYPE.itemsize * SIZE.parameters(classes=3)
rows, slowed = [], {}
wires = {**theory.LINKS, "Ethernet 1 Gb": theory.Link(100e-6, 1e9 / 8)}
for key, wire in wires.items():
    law = theory.pp_compute_over_communication(SIZE.hidden, SIZE.layers / N, pace / wire.bandwidth, SIZE.tokens)
    times = {each: vit_pipeline.replay_on_link(ran[each], made[each], wire, MESSAGE).makespan for each in ("1f1b", "interleaved", "zb-v")}
    times["data parallel"] = vit_pipeline.data_parallel_seconds(vit_pipeline.compute_seconds(ran["1f1b"]), gradient, N, wire)
    slowed[key] = times
    cells = (lesson.number(seconds, "s") for seconds in times.values())
    rows.append((key, lesson.number(pace / wire.bandwidth), lesson.number(law * 2 / DTYPE.itemsize), *cells))
columns = ("wire", "ρ", "computing over sending", *times)
fast = slowed["NVLink 4"]
lost = next((key for key in wires if slowed[key]["data parallel"] > 2 * fast["data parallel"]), "Ethernet 1 Gb")
note = f"A step on {lost} takes, in steps on NVLink 4: " + ", ".join(f"{each} × {slowed[lost][each] / fast[each]:.2f}" for each in fast) + "."
lesson.table(columns, rows, f"simulated: a step of {N} ranks on other wires", note)

# %% [markdown]
# Data parallelism sends the whole gradient, whatever the batch; a pipeline sends activations, more of them the larger
# it is. So a large batch hides the gradient (01), and a small one crosses hosts more cheaply as a pipeline (04). Where
# computing over sending is far above 1 a pipeline hardly notices the wire. Towards 1, 1F1B feels each transfer at once,
# since it holds nothing that could cover one. Once a transfer takes as long as a chunk's forward, interleaving loses
# more.
#
# **Takeaway.** Smaller pieces, smaller bubble. Interleaving pays in messages and memory, ZB-H2 in memory, each of them
# in kernels.
#
# ## Which bubble?
#
# Two numbers are in the table of schedules. The share of *ranks x makespan* is what you pay for. The share of the
# *longest rank's own span*, first start to last end, is what the zero-bubble paper reports: a rank that starts late and
# ends late is then not idle. (It is one rank's number, so uneven work changes it too.) Below are its times of a 6.2B
# model (8 stages, 24 microbatches, A100s), simulated here.

# %%
paper, rows = vit_pipeline.PUBLISHED, []
for each, rate in paper.rates.items():
    tl = schedules.make(each, paper.stages, paper.microbatches).simulate(paper.costs)
    cells = (f"{100 * tl.bubble_rate:.2f} %", f"{100 * rate:.2f} %", f"{tl.bubble_rate / rate:.3f}")
    rows.append((each, *cells, f"{100 * tl.bubble_fraction:.1f} %"))
columns = ("schedule", "of the longest span, simulated", "published", "ratio", "of ranks × makespan, simulated")
lesson.table(columns, rows, "idle share; published in arXiv 2401.10241")

# %% [markdown]
# ZB-H2 has 7.0 % by the one definition and 10.0 % by the other. Both are right. Its ranks lean: rank 7 starts seven
# forwards after rank 0, and ends later, too. The explorer opens on ZB-H2: hardly a gap inside a row (2.44 %), and empty
# corners (12.1 %). They fill up only if rank 0 begins the *next* step before rank 7 has ended this one, and then no
# optimizer may wait for all ranks. The paper does that: ranks step at once, and step back if the norm of the gradient,
# known later, says so. Where a step ends for everybody at once, as here, read the other number: with F = I = W and no
# transfer ZB-H2 takes 27 units on 4 ranks and 8 microbatches, as ZB-H1 does, for 7 in flight in place of 4. What its
# room buys is slack: for I longer than W, or for a transfer (of 0.1: 27.3 against 28.2).
#
# **Takeaway.** Ask of every published bubble: idle share of what?
#
# **Challenge.** 4 ranks, at most 12 microbatches, F = I = W, a transfer of 0.1 forwards or more: under 11 % of ranks ×
# makespan with at most 80 messages and at most 6 microbatches in flight.
#
# <details><summary>Answer</summary>
#
# `zb-h1` with 12 microbatches and a transfer of 0.1: 10.4 %, 72 messages, 4 in flight. Nothing else does it. Of 12
# microbatches `zb-h2` idles 8.4 % and holds 7, the two V's 7.2 % and send 144 messages; two interleaved chunks send 168 and
# still idle 14.1 %. With 6 microbatches ZB-H2 and ZB-V keep both limits, and idle 15.9 and 13.0 %. So few messages and
# little memory are paid for with microbatches: 11 are too few (11.3 %).
# </details>

# %%
lesson.explorers.pipeline_bubble()

# %% [markdown]
# ## The heavy stage
#
# So far all stages took t. Let them take t₀, t₁, ... The first microbatch must pass all of them, and then one comes out
# each time the slowest stage has done one:
#
# $$ \text{step} \approx \sum_s t_s + (m-1)\,\max_s t_s $$
#
# Now the idle share does *not* go to 0 with more microbatches. It goes to 1 - mean/max. The cell moves a few blocks from
# stage 0 to stage 1 (the last, where there are two), and also lets the library cut by time: each layer is measured once.
# Where ranks share cores noise would decide, so all steps are simulated from these measurements, and say so.

# %%
even = SIZE.layers // N
heavy = [even] * N
heavy[0], heavy[1] = even - max(1, even // 3), even + max(1, even // 3)
ran, chosen = pool.run(vit_pipeline.time_cuts, SIZE, IMAGES, DTYPE, mine, {"uniform": "uniform", "heavy": heavy})[0]
drawn, took = ran["heavy"], {cut: lesson.number(tl.makespan, "s") for cut, tl in ran.items()}
stages = vit_pipeline.stage_seconds(ran["uniform"])  # forward and backward of one microbatch
scaled = [t * blocks / even for t, blocks in zip(stages, heavy, strict=True)]
loads = {"uniform": stages, "heavy": scaled, "by time": [sum(stages) / N] * N}
formula = {cut: theory.pipeline_seconds(load, M) for cut, load in loads.items()}
rows = [(cut, f"{chosen[cut]}", lesson.number(formula[cut], "s"), took[cut], f"{tl.makespan / formula[cut]:.2f}")
        for cut, tl in ran.items()]  # fmt: skip
gain = 1 - ran["by time"].makespan / ran["uniform"].makespan
said = "it gains" if gain > 0.01 else "uniform is as good" if gain > -0.01 else "it loses: a cut by time is as good as its profile"
note = (f"By time: {took['by time']}, uniform: {took['uniform']}; {said}. Formula: stage times of the uniform cut, "
        "for by time as if all were equal.")  # fmt: skip
lesson.table(("cut", "layers, with embedding and head", "formula", drawn.source, "ratio"), rows, f"a step of {mine.name}", note)
shares = [100 * drawn.work(rank) / drawn.makespan for rank in drawn.ranks]
plot.show(
    plot.timeline(drawn, names=[f"heavy {heavy}"], title=f"one heavy stage: {took['heavy']} in place of {took['uniform']}"),
    alt=f"The ranks work {', '.join(f'{share:.0f} %' for share in shares)} of a step of {took['heavy']}.",
)

# %% [markdown]
# The formula is exact for GPipe; 1F1B takes up to 10 % less here, the earlier the heavy stage. In the picture, whose
# label counts blocks alone, the heavy rank has no gaps in the middle, and everyone else has one in each microbatch. Too
# few microbatches leave gaps at both ends. A ViT's blocks are equal, and its head is light, so "uniform" is already
# good. In GPT-2 the head weighs several blocks: see 06.
#
# ### Exercise 4: what is wrong with this step
#
# *Diagnose, 20 minutes.* You get a `Timeline` of a 1F1B step. Return `("heavy stage", rank)`, `("slow wire", None)` or
# `("few microbatches", None)`. All three have large bubbles. The check simulates six records, with every action up to 6
# % off, and then shows what you say of the heavy step above. As in 00: `tl.ranks`, `tl.by_rank[r]`, events with `.op`,
# `.stage`, `.microbatch`, `.start`, `.end`; and `tl.work(r)`, `tl.makespan`.
#
# Hint: a wait that neither this rank's own work nor the action that it needed can explain is the wire's. An F needs the
# F of the stage before, a B the B of the stage after.

# %% tags=["stub-4"]
def diagnose(tl):
    ...


# %% tags=["check-4"]
verdict = lesson.check(exercises.diagnosis, diagnose)
if verdict.status == "passed" and "drawn" in vars():
    print("of the heavy step drawn above you say:", diagnose(drawn))
verdict

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def diagnose(tl):
#     work = {rank: tl.work(rank) for rank in tl.ranks}
#     most = max(work, key=work.get)
#     if work[most] > 1.2 * statistics.median(work.values()):
#         return "heavy stage", most
#     ends = {(e.op, e.stage, e.microbatch): e.end for e in tl.events}
#     travelling = 0.0
#     for events in tl.by_rank.values():
#         free = 0.0
#         for e in events:
#             before = (e.op, e.stage - 1 if e.op == "F" else e.stage + 1, e.microbatch)
#             travelling += e.start - max(free, ends.get(before, 0.0))
#             free = e.end
#     if travelling > 0.05 * tl.makespan * len(tl.ranks):
#         return "slow wire", None
#     return "few microbatches", None
# ```
# </details>

# %% [markdown]
# ### When more microbatches stop helping
#
# At a fixed batch, more microbatches are smaller ones. Let each cost a stage c seconds whatever its size (launches,
# kernels too small to fill the device), besides its share of the T seconds that one device takes for the batch:
#
# $$ \text{step} = (m+p-1)\left(\frac{T}{p\,m} + c\right) \qquad\text{least at}\qquad m = \sqrt{\frac{(p-1)\,T}{p\,c}} $$
#
# The cell measures T and c at the ends of a sweep and predicts the rest. *Ideal* is T/p: a rank's work at m = 1, less c.

# %%
SWEEP = [m for m in (1, 2, 4, 8, 16, 32, 64) if m <= IMAGES // (4 if GPU else 1)]
ran = pool.run(vit_pipeline.time_schedules, SIZE, IMAGES, DTYPE, {m: schedules.make("1f1b", N, m) for m in SWEEP}, None, 2)[0]
busy = {m: vit_pipeline.compute_seconds(tl) for m, tl in ran.items()}
c = max(0.0, busy[SWEEP[-1]] - busy[1]) / (SWEEP[-1] - 1)  # a rank is busy for T/p + m c
ideal = min(busy[1] - c, *busy.values())
best = theory.best_microbatches(N * ideal, N, c)
predicted = [theory.step_seconds(N * ideal, N, m, c) for m in SWEEP]
parts = {"ideal": [ideal] * len(SWEEP), "small kernels": [busy[m] - ideal for m in SWEEP],
         "bubble": [ran[m].makespan - busy[m] for m in SWEEP]}  # fmt: skip
least = min(SWEEP, key=lambda m: ran[m].makespan)
off = [ran[m].makespan / told for m, told in zip(SWEEP, predicted, strict=True)]
words = (f"Least at m = {least}; the formula says {best:.1f}, with c = {lesson.number(c, 's')}. "
         f"Run over predicted: {min(off):.2f} to {max(off):.2f}.")  # fmt: skip
shape = "hurt" if least == 1 else "help, then hurt" if least < SWEEP[-1] else "help, as far as this goes"
title = f"More microbatches {shape} · {IMAGES} images by 1F1B on {N} ranks, {ran[least].source}"
plot.show(
    figures.u_curve(SWEEP, parts, predicted, title=title, caption=words),
    alt=f"Bars of a step over m, ideal, small kernels and bubble: more microbatches {shape}. {words}",
)

# %% [markdown]
# From the left, each doubling of m nearly halves the bubble, until (p-1) c is left of it, which no m removes. To the
# right kernels lose more than the bubble still gives. The dots assume p + m - 1 turns of equal length. Where bars stick
# out, turns differ, or are too short for a GPU's host to keep ahead: that wait counts as bubble here.
#
# Which m, then? 2p keeps this page's pictures small, 4p leaves a fifth idle, the root says where to stop; and memory
# wants more, for at a fixed batch 1F1B holds p microbatches of batch/m.
#
# ### Exercise 5: microbatches under a cap
#
# *Design, 15 minutes; it returns to 00.* Write `choose(job)`: the m, a divisor of `job.batch`, of the shortest 1F1B
# step such that rank 0 holds at most `job.cap` bytes. With b = batch/m samples, a forward takes `job.launch + b *
# job.forward`, a backward `job.launch + 2 * b * job.forward`, and a message b * `job.message` bytes along `job.link`.
# One sample's activations in a stage are `job.held` bytes; stages are `job.ranks`. The check allows 1 % over the
# shortest of those that fit.
#
# Hint: `theory.seconds("send", bytes, 2, wire)` is α + b/B; a small microbatch may lie left of the knee. Simulate all
# of those that fit, with `Costs(forward, backward, 0.0, transfer)`.

# %% tags=["stub-5"]
def choose(job):
    ...


# %% tags=["check-5"]
lesson.check(exercises.choose_microbatches, choose)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def choose(job):
#     def step(m):
#         b = job.batch // m
#         hop = theory.seconds("send", b * job.message, 2, job.link)
#         costs = Costs(job.launch + b * job.forward, job.launch + 2 * b * job.forward, 0.0, hop)
#         return schedules.make("1f1b", job.ranks, m).simulate(costs).makespan
#
#     able = [m for m in range(1, job.batch + 1) if job.batch % m == 0]
#     fits = [m for m in able if min(job.ranks, m) * (job.batch // m) * job.held <= job.cap]
#     return min(fits, key=step)
# ```
#
# With fewer microbatches than ranks, rank 0 holds m of them and not p.
# </details>

# %% [markdown]
# ## What to remember
#
# - A pipeline sends activations between neighbours: little. It wastes time: (p-1)/(m+p-1) of it.
# - 1F1B holds p - r microbatches in place of m, for the same bubble.
# - Interleaving divides the idle time by v, for (vp-1)/(p-1) times the messages and more in flight. W is
#   work that nobody waits for: it fills gaps.
# - A schedule is lists. Check them before you run them; simulate them before you believe them.
# - Ask: idle share of what? Of ranks x makespan, or of one rank's span.
# - The slowest stage sets the pace, and no number of microbatches helps. Nor do they help when kernels get too small.
# - 18 h (l/p)/ρ: the wider and deeper a stage, the less the wire matters. Pipelines may cross slow wires.
#
# **When not to use this.** When the model fits a device and 01's law holds: replicas have no bubble. When the batch
# gives fewer than about 4p microbatches (there 1F1B still idles a fifth), or when c makes so many dear. When layers
# cannot be cut evenly. For evaluation a pipeline has only the filling to pay; for a single sample it has nothing but
# bubble.
#
# **Papers.** Huang et al. 2019, *GPipe*. Narayanan et al. 2021, *Efficient large-scale language model training on GPU
# clusters using Megatron-LM* (1F1B in this form, interleaving). Qi et al. 2024, *Zero bubble pipeline parallelism*
# (arXiv 2401.10241; ZB-H1, ZB-H2, ZB-V). Lamy-Poirier 2023, *Breadth-first pipeline parallelism*.
