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
# # Where do you cut when layers are unequal?
#
# **The question.** In notebook 02 every stage took the same time, for a ViT is a stack of equal blocks. GPT-2 ends in a
# head that weighs several of them, it uses one table of words at both ends, and its rows are not equally long. Where do
# you cut now, and what else was only right because everything was equal?
#
# **You will be able to** measure the layers of a model and cut it by them; say before you run it what a cut costs, and
# how many devices a pipeline of this model is worth at most; keep a weight that lives on two ranks one weight; take the
# exact mean over ragged rows; fit a schedule to unequal stages and to the memory of each rank.
#
# **You should know** notebook 02 (schedules as lists, the bubble, I and W), and from 01 the exact mean of a ragged batch.
#
# **Time.** 30 minutes to read; under 2 minutes to run on a laptop, and as long on 2 or 4 GPUs; 95 minutes for the
# exercises.
#
# **Two questions to recall.** From 02: how long is a step of stages that take t₀, t₁, ...? From 01: ranks with unequally
# many samples each take a mean; why is the mean of these not the mean?
#
# <details><summary>Answers</summary>
# About Σ t + (m-1) max t: the first microbatch passes all stages, the others come out one slowest stage apart. It gives
# each rank the same say, so a sample on a rank with few counts for more.
# </details>

# %% tags=["setup"]
from itertools import islice
import torch, torch.nn.functional as F
import hpnb
from torch import nn
from hpnb import Layout, Mesh, comm, lesson, plot, theory
from hpnb.lesson.figures import gpt2_pipeline as figures
from hpnb.lesson.programs import gpt2_pipeline, step_timing, tied_weights, vit_pipeline
from hpnb.lesson.exercises import gpt2_pipeline_parallel as exercises
from hpnb.models import GPT2_SIZES, GPT2Size
from hpnb.pipeline_parallel import Costs, Schedule, full_state_dict, schedules
from hpnb.pipeline_parallel.layer_costs import flops_of, parameters_of
from hpnb.pipeline_parallel.layers import layers
from hpnb.pipeline_parallel.partition import balanced, uniform

N, M = min(4, hpnb.ranks.default_ranks()), 8  # ranks, microbatches
GPU = hpnb.ranks.choose_device("auto", N).device == "cuda"
SMALL = GPT2Size(hidden=128, layers=13, heads=4, mlp=512, vocab_size=8009, length=48)
SIZE, DTYPE, EACH = (GPT2_SIZES["1.5b"], torch.bfloat16, 4) if GPU else (SMALL, torch.float32, 2)
ROWS = EACH * M
english = hpnb.data.text("train", block=64)  # packed; 509 words
texts = list(islice(hpnb.data.Loader(english, 16), 40))  # the same batches on every rank
name = f"GPT-2, {SIZE.layers} blocks of {SIZE.hidden}, {SIZE.vocab_size:,} words, {str(DTYPE)[6:]}, {ROWS} rows of {SIZE.length} in {M} microbatches"
here = lesson.banner(N, model=name, data=english.describe())
pool = hpnb.Ranks(N)  # these ranks stay to the end

# %% [markdown]
# ## Uniform loses
#
# Start with what you have. `train` is the cell of 02 in which your 1F1B trained a ViT, with three things changed: the
# model, its data, and the loss, which asks each position for the next word. The cut is 02's too: as many blocks for
# each rank, the embedding with the first, the head with the last. (Until you have written your 1F1B the library's
# stands in.)
#
# Two things may break: the answer and the time. Commit to the second. With equal stages 02's formula gives (p-1)/(m+p-1).

# %%
mine = lesson.reader_schedule("1f1b", N, M)
lesson.predict("06.bubble", f"GPT-2 cut uniformly, {mine.name}, {N} ranks, {M} microbatches: which share of ranks x time is idle?",
               guess=None, unit="%")  # fmt: skip


def train(schedule, texts):
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    model, alone = (hpnb.models.gpt2("laptop", dtype=torch.float64, device=hpnb.device()) for _ in range(2))
    pipe = hpnb.Pipeline(model, axis, schedule, gpt2_pipeline.token_loss)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (pipe, alone)]
    losses = []
    for batch in texts:
        words = batch["input_ids"].to(hpnb.device())
        ours, theirs = pipe.step(batch).loss, gpt2_pipeline.token_loss(alone(words), {"labels": words})
        theirs.backward()
        losses.append((ours.item(), theirs.item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = full_state_dict(pipe.module, axis)
    return losses, step_timing.relative_distance(whole.values(), [alone.state_dict()[key] for key in whole])

# %%
losses, apart = pool.run(train, mine, texts[:4])[0]
print(f"loss {losses[0][0]:.3f} to {losses[-1][0]:.3f}, from one process's {max(abs(a - b) for a, b in losses):.0e} at most; "
      f"weights apart by {apart:.0e}")  # fmt: skip
whole = layers(hpnb.models.gpt2(SIZE, device="meta"))  # embedding, block, block, ..., head: shapes alone
cuts = {"uniform": uniform(whole, N)}
ran = pool.run(gpt2_pipeline.time_cuts, SIZE, ROWS, DTYPE, {"uniform": (mine, cuts["uniform"])})[0]["uniform"]
lesson.reveal("06.bubble", 100 * ran.bubble_fraction, predicted=100 * theory.bubble(N, M))
work = [ran.work(rank) / M for rank in ran.ranks]
print("a microbatch takes the ranks " + ", ".join(lesson.number(each, "s") for each in work) + f" ({ran.source})")

# %% [markdown]
# The answer holds, tied table and all. The time does not, and the term that is missing stands in the last line: the last
# rank takes longer than the others, and they wait for it. More microbatches will not help, for it is not the filling that
# costs. (02: the idle share then goes to 1 - mean/max.)
#
# ## The skyline
#
# How heavy is a head? A block computes 24 h² + 4 s h FLOPs a token forward, the logits of V words 2 h V. In blocks (for
# the table V = 50,257, s = 1,024) that is
#
# $$ a = \frac{V}{12\,h + 2\,s} $$
#
# | GPT-2 | h | blocks L | a | (L+a)/a |
# |---|---|---|---|---|
# | 124M | 768 | 12 | 4.5 | 3.7 |
# | 355M | 1,024 | 24 | 3.5 | 7.8 |
# | 774M | 1,280 | 36 | 2.9 | 13.5 |
# | 1.5B | 1,600 | 48 | 2.4 | 21.3 |
#
# Dealt out evenly the last of p stages has L/p + a blocks where (L+a)/p would be fair: the step is longer by the factor
#
# $$ \frac{L/p + a}{(L+a)/p} = 1 + \frac{a\,(p-1)}{L+a} $$
#
# Wide and deep models lose little, long pipelines much. The last column is a limit: a pipeline does not cut the head, so
# no stage is shorter than a. However many devices you give it, a 124M is never faster than 3.7 of them. (Cutting the
# head itself is 07's business.)
#
# FLOPs are one measure. Here is another: each layer alone, forward and backward of one microbatch, on the ranks.

# %%
sky = pool.run(gpt2_pipeline.time_layers, SIZE, EACH, DTYPE)[0]
law = theory.head_in_blocks(SIZE.block(), SIZE.vocab_size)
told = sky.step(mine, cuts["uniform"])  # simulated with what the layers took
rows = [("head, products (blocks)", law, sky.head - sky.loss / sky.block), ("head and loss (blocks)", law, sky.head),
        ("step (s)", told.makespan, ran.makespan), ("bubble (%)", 100 * told.bubble_fraction, 100 * ran.bubble_fraction)]
ratios = lesson.comparison(rows, title="the head by FLOPs; the step by the measured layers")

# %% [markdown]
# The first two rows ask whether FLOPs tell the head's time. Its products are large matmuls, which run better than a
# block's small ones; the softmax over V words has no products at all, but moves b·s·V numbers several times. Where a
# ratio is off it is for one of these two. The step and its bubble, predicted from the layers, should now be near 1.
#
# Below, the skyline twice, each time with the step that ran beneath. A cut line is free to move; a bar is not.

# %%
cuts["by time"] = balanced(sky.smooth, N)  # noise aside, blocks are equal
quicker = pool.run(gpt2_pipeline.time_cuts, SIZE, ROWS, DTYPE, {"by time": (mine, cuts["by time"])})[0]["by time"]
drawn = {"uniform": figures.PipelineCut(cuts["uniform"], ran), "by time": figures.PipelineCut(cuts["by time"], quicker)}
times = " and ".join(lesson.number(built.step.makespan, "s") for built in drawn.values())
gain = ran.makespan / quicker.makespan
plot.show(
    figures.skyline(sky.costs, drawn, sky.kinds, sky.loss, title=f"two cuts of one GPT-2: the second is {gain:.2f} times as fast"),
    alt=f"Layers as bars, the head and its loss {sky.head:.1f} blocks high, cut as {cuts['uniform']} and {cuts['by time']} "
    f"layers; the steps beneath take {times}.",
)

# %% [markdown]
# **Takeaway.** A pipeline is as fast as its heaviest stage, and under a uniform cut GPT-2's head makes the last stage
# the heaviest. Measure layers, then cut.
#
# ### Exercise 1: an optimal partition
#
# *Implement, 25 minutes.* Write `partition(costs, stages)`: how many layers each stage gets, in order and at least one,
# so that the largest stage is as small as it can be. The check holds it to exhaustive search on 17 small skylines, then
# asks for 50 layers over 8 stages, for which there are 86 million cuts.
#
# Hint: let best[j] be the best way to cut the first j layers into k stages. For k + 1 stages the last one begins somewhere.

# %% tags=["stub-1"]
def partition(costs, stages):
    ...


# %% tags=["check-1"]
lesson.check(exercises.partition, partition)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def partition(costs, stages):
#     upto = [0.0]
#     for cost in costs:
#         upto.append(upto[-1] + cost)  # upto[j] - upto[i] is the cost of layers i to j - 1
#     best = {0: (0.0, [])}
#     for _ in range(stages):
#         longer = {}
#         for i, (largest, counts) in best.items():
#             for j in range(i + 1, len(upto)):
#                 option = max(largest, upto[j] - upto[i]), [*counts, j - i]
#                 longer[j] = min(longer.get(j, option), option)
#         best = longer
#     return best[len(costs)][1]
# ```
#
# The library finds the least limit by bisection, and among the cuts that keep to it takes the most even one.
# </details>

# %% [markdown]
# ## Four partitioners
#
# What is "cost"? The answer decides the cut. *Uniform* counts blocks. *By parameters* weighs what a rank must hold:
# weights, gradients and optimizer states; to it the table of words is heavy at both ends. *By FLOPs* needs no clock, and
# knows products only. *By time* knows everything about this machine, noise included. The cell also slides the last cut
# from one side to the other, with the other blocks dealt out evenly before it.

# %%
lesson.predict("06.cuts", "uniform, by parameters, by flops, by time: which cut gives the shortest step?", guess=None, kind="ranking")
meta = {"input_ids": torch.zeros(EACH, SIZE.length, dtype=torch.long, device="meta")}
held = parameters_of(whole)
cuts |= {"by parameters": balanced(held, N), "by flops": balanced(flops_of(whole, meta), N)}
beside = {cut: counts[-1] - 1 for cut, counts in cuts.items()}  # blocks beside the head
low, high = max(0, min(beside.values()) - 2), max(beside.values()) + 1
positions = sorted({low + round(k * (high - low) / 4) for k in range(5)})
slid = {n: (*(c + (r == 0) for r, c in enumerate(theory.even_split(SIZE.layers - n, N - 1))), n + 1) for n in positions}

# %%
ran = pool.run(gpt2_pipeline.time_cuts, SIZE, ROWS, DTYPE, {cut: (mine, counts) for cut, counts in cuts.items()})[0]
told = {cut: sky.step(mine, counts).makespan for cut, counts in cuts.items()}
seen, rows = {cut: tl.makespan for cut, tl in ran.items()}, []
for cut, counts in cuts.items():
    fullest = max(theory.stage_loads(held, counts)) * DTYPE.itemsize
    cells = (f"{', '.join(map(str, counts))}", lesson.number(max(theory.stage_loads(sky.costs, counts)), "s"), lesson.number(told[cut], "s"))
    rows.append((cut, *cells, lesson.number(seen[cut], "s"), f"{seen[cut] / told[cut]:.2f}", lesson.number(fullest, "B")))
columns = ("cut", "layers", "largest stage", "step, predicted", "run", "ratio", "weights of the fullest rank")
lesson.table(columns, rows, f"four cuts, {mine.name}; predicted from the skyline; {ran['uniform'].source}")
lesson.reveal("06.cuts", seen, predicted=sorted(told, key=told.get))

# %%
swept = pool.run(gpt2_pipeline.time_cuts, SIZE, ROWS, DTYPE, {n: (mine, counts) for n, counts in slid.items()}, 2)[0]
measured, predicted = [swept[n].makespan for n in positions], [sky.step(mine, slid[n]).makespan for n in positions]
best = positions[measured.index(min(measured))]
alike = [str(n) for n, step in zip(positions, measured, strict=True) if step < 1.03 * min(measured)]
words = f"Shortest, within 3 %, with {' or '.join(alike)} blocks beside the head; the uniform cut leaves {beside['uniform']} there."
plot.show(
    figures.last_cut(positions, measured, predicted, beside, f"run ({swept[best].source})", title="slide the last cut: what a step takes", caption=words),
    alt=f"The step over blocks on the last stage, from {lesson.number(measured[0], 's')} to {lesson.number(measured[-1], 's')}. {words}",
)

# %% [markdown]
# (A mark says how many blocks a cut leaves there; by parameters the stages before are another story.)
#
# To the right of the least the last stage sets the pace, and each block more costs a step m times that block. To the
# left the others do, and there a block is shared by p - 1 ranks: the curve is flatter. So if you must err, give the
# last rank too little. (The prediction knows only what layers took when they were measured; a run has the machine's
# noise too, most where ranks share cores. Steps that differ by less than two runs of the same cut do are equally long.)
#
# By parameters the fullest rank holds the least, whatever the time: the cut for a model that does not fit otherwise
# (05). FLOPs come near to time as long as products decide; they miss the softmax, the
# norms, and the backward of the embedding, which computes nothing and yet writes a gradient of V·h numbers.
#
# **Takeaway.** Cut by what runs out: by time for speed, by parameters for memory. `hpnb.Pipeline(..., cut="time",
# example=batch)` measures and cuts (without the loss, which it does not time); `cut=[5, 4, 4, 2]` is your own.
#
# ## One weight, two homes
#
# GPT-2 looks words up in a table and scores them with the same table: rank 0 has it as `wte`, the last rank as `lm_head`.
# On one device that is one tensor, and autograd adds up the gradients of both uses. On two ranks it is two tensors, and
# nobody adds. They stay one weight only if they start equal and get equal gradients: the sum, by an all-reduce between
# these two ranks, once a step. Commit to its bytes. (Compare: activations cross every cut for each microbatch.)

# %%
lesson.predict("06.tie-bytes", f"a table of {SIZE.vocab_size:,} x {SIZE.hidden} numbers of {DTYPE.itemsize} bytes: what do all {N} ranks "
               "together send for the tie, a step?", guess=None, unit="B", kind="identity")  # fmt: skip


def train_tied(tied, texts):
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    model, fresh = (hpnb.models.gpt2("laptop", device=hpnb.device()) for _ in range(2))
    table = model.transformer.wte.weight
    if not tied:  # two programs that each load "their" weights: equal, and two
        model.lm_head.weight = nn.Parameter(table.detach().clone())
    pipe = hpnb.Pipeline(model, axis, schedules.make("1f1b", axis.size, M), gpt2_pipeline.token_loss)
    optimizer, log = torch.optim.AdamW(pipe.parameters(), lr=1e-3), []
    for batch in texts:
        loss = pipe.step(batch).loss.item()
        optimizer.step()
        optimizer.zero_grad()
        log.append((loss, tied_weights.tied_distance(pipe, axis, table.shape)))
    return log, pipe.step(batch, forward_only=True).loss.item(), tied_weights.loaded_losses(full_state_dict(pipe.module, axis), fresh, batch)

# %%
sent = pool.run(gpt2_pipeline.count_bytes, SIZE, ROWS, DTYPE, (mine, cuts["by time"]))
lesson.reveal("06.tie-bytes", sum(each["tie"] for each in sent), predicted=theory.tied_weight_bytes(SIZE.vocab_size, SIZE.hidden, DTYPE.itemsize))
print("activations and their gradients, a step: " + lesson.number(sum(each["activations"] for each in sent), "B"))
runs = {"added up": pool.run(train_tied, True, texts)[0], "never added up": pool.run(train_tied, False, texts)[0]}
losses, apart = ({case: [step[i] for step in log] for case, (log, *_) in runs.items()} for i in (0, 1))
plot.show(
    plot.drift(losses, apart, title=f"measured · {N} ranks: the loss, and how far apart the two homes of one table are",
               between="the two homes"),
    alt=f"Two losses that both fall; beneath, the distance between the homes: 0 if gradients are added up, else growing to {apart['never added up'][-1]:.1e}.",
)
rows = [(case, *(f"{loss:.4f}" for loss in (trained, *again))) for case, (_, trained, again) in runs.items()]
lesson.table(("gradients", "trained, in the pipeline", "loaded with wte", "loaded with lm_head"), rows, "loss of the last batch")
lesson.field_guide.add(
    "the loss falls as it should, and the saved model is worse than the one that was trained",
    "the distance between the two homes of a tied weight: 0, or it grows",
    "each home steps with its own gradient; nobody added them up",
    notebook="06",
)
lesson.field_guide.show()

# %% [markdown]
# The upper panel is the symptom, or rather there is none: two tables are one weight more to train with, and the loss
# even falls faster. The lower panel is the instrument. The price comes at the end. GPT-2 has one table; whoever loads
# the checkpoint keeps one home, and the table above says what the model is then worth: compare with what was trained.
# (If one home comes out at the loss of the right run, that is luck.)
#
# Rank 0 sends V·h numbers for the tie, and h for each token: in a step of V tokens they are equal. With small batches
# the tie is the largest message of the pipeline. It is sent once a step, when both homes are complete.
#
# **Takeaway.** A weight with two homes needs three things: the same start, the sum of gradients, and a norm that counts
# it once (clipping, 04).
#
# ### Exercise 2: one weight, two homes
#
# *Implement, 15 minutes.* Every rank calls `tie(weight, axis)` before the first step; `weight` is its home, or None in
# the middle. Return a function `add()`, which every rank calls after each backward and before the optimizer. The two
# homes begin with different values, and rank 0's are the right ones. The check trains on 2 and 3 ranks beside one
# process, wants equal weights after three steps, and ranks in the middle that send nothing.
#
# Hint: `axis.among(places)` is the axis of these ranks alone, and every rank must call it. `comm.broadcast(x, axis,
# source)` and `comm.all_reduce(x, axis)` return what they have made.

# %% tags=["stub-2"]
def tie(weight, axis):
    ...


# %% tags=["check-2"]
lesson.check(exercises.tied_weight, tie)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def tie(weight, axis):
#     ends = axis.among((0, axis.size - 1))
#     if weight is None:
#         return lambda: None
#     weight.data.copy_(comm.broadcast(weight.data, ends))
#
#     def add():
#         weight.grad.copy_(comm.all_reduce(weight.grad, ends))
#
#     return add
# ```
#
# An average in place of the sum keeps the homes equal, and trains the table with half its gradient.
# </details>

# %% [markdown]
# ### Exercise 3: whose tie is it
#
# *Diagnose, 10 minutes.* You get a record of a run whose loss falls: `record.losses`; `record.apart`, the distance between
# the homes before the first step and after each; `record.off`, two numbers, how far the gradient of either home was from
# one process's in the first step. Return "right", "never made equal", "never summed" or "averaged".
#
# Hint: what does each of the four do to `apart` at the start, and at the end? One of them needs `off`.

# %% tags=["stub-3"]
def diagnose(record):
    ...


# %% tags=["check-3"]
lesson.check(exercises.diagnosis, diagnose)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def diagnose(record):
#     if record.apart[0] > 1e-9:
#         return "never made equal"
#     if record.apart[-1] > 1e-9:
#         return "never summed"
#     return "averaged" if max(record.off) > 1e-9 else "right"
# ```
# </details>

# %% [markdown]
# ## Ragged tokens
#
# A ViT's microbatch has as many targets as images. Text is padded to the longest row, a pad asks for nothing (label -100),
# and so microbatches differ in how many targets they have. What you want is the mean over all targets of the batch, S
# losses summed and c counted in each microbatch:
#
# $$ \ell = \frac{\sum_k S_k}{\sum_k c_k} \qquad\text{and not}\qquad \frac{1}{m}\sum_k \frac{S_k}{c_k} $$
#
# In the second a target weighs Σc/(m c) times what it should: the fewer targets beside it, the more. And 1F1B starts a
# backward before it has seen the last microbatch, so Σc must be known before anything is computed. It is: labels are
# whole on every rank, and counting them is cheap. The cell takes paragraphs of real English, and three losses.

# %%
ways = {"all targets": gpt2_pipeline.token_loss,
        "a mean of means": lambda outputs, inputs: (gpt2_pipeline.token_loss(outputs, inputs), 1),
        "pads count": lambda outputs, inputs: (gpt2_pipeline.token_loss(outputs, {"labels": inputs["input_ids"]}), 1)}  # fmt: skip
ragged = next(iter(hpnb.data.Loader(hpnb.data.text("train", rows="paragraph", block=64), 16)))


def averaged(batch):
    axis, found = Mesh(Layout(pp=hpnb.world_size())).pp, {}
    words = {name: value.to(hpnb.device()) for name, value in batch.items()}
    for way, loss in ways.items():
        model, alone = (hpnb.models.gpt2("laptop", dtype=torch.float64, device=hpnb.device()) for _ in range(2))
        pipe = hpnb.Pipeline(model, axis, schedules.make("1f1b", axis.size, M), loss)
        gpt2_pipeline.token_loss(alone(words["input_ids"], attention_mask=words["attention_mask"]), words).backward()  # one process, all rows
        found[way] = pipe.step(batch).loss.item(), tied_weights.gradient_distance(pipe, alone)
    return found

# %%
found, counts = pool.run(averaged, ragged), tied_weights.targets_per_microbatch(ragged, M)
weights = [sum(counts) / (M * c) for c in counts]
weighs = {"all targets": "1", "a mean of means": f"{min(weights):.2f} to {max(weights):.2f}", "pads count": "less than 1"}
rows = [(way, f"{found[0][way][0]:.4f}", f"{max(each[way][1] for each in found):.1e}", weighs[way]) for way in ways]
note = f"Targets in the {M} microbatches: {', '.join(map(str, counts))}; {ragged['labels'].numel():,} places with pads."
lesson.table(("mean over", "loss", "gradients off one process's by", "a target weighs"), rows, "one batch, three losses", note)

# %% [markdown]
# Nothing crashes, and the three losses look alike. The gradients do not. "Pads count" is off most, and its loss looks
# *better*: pads are easily learned, so as training goes on it will look better still.
#
# ### Exercise 4: the exact token mean
#
# *Implement, 15 minutes; it returns to exercise 1 of 01.* Write `token_loss(outputs, inputs)` for one microbatch: (the sum
# of its losses, how many targets it has). `outputs.logits` are (b, s, V), `inputs["labels"]` (b, s), with -100 at pads.
# The pipeline divides. The check wants one process's loss and gradients in float64, with ragged rows, and with a
# microbatch that asks for nothing.
#
# Hint: position i is asked for label i + 1, so a row of n words has n - 1 targets.

# %% tags=["stub-4"]
def token_loss(outputs, inputs):
    ...


# %% tags=["check-4"]
lesson.check(exercises.token_mean, token_loss)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def token_loss(outputs, inputs):
#     logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
#     total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
#     return total, (labels != -100).sum()
# ```
# </details>

# %% [markdown]
# ## Your schedule at real costs
#
# 02 compared schedules on equal stages, and its exercises had F = I = W. Here stages have recorded costs, nearly equal in
# sum by the cut, and F, I and W are what they are. Two chunks a rank make stages half as long, and the head is as long as
# ever: whatever has more, thinner stages is harder to balance. (A V has both ends on rank 0, so there a short first stage
# may stand beside the head.)
#
# Memory is unequal too. A split backward holds on to the gradient of each layer's output until W, and the last layer's
# output are the logits: b·s·V numbers for each microbatch whose W lags.

# %%
lesson.predict("06.schedules", f"{mine.name}, interleaved, zb-h1, zb-v, each cut by time: which has the shortest step?", guess=None, kind="ranking")
CHUNKS = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
made = {each: mine if each == "1f1b" else schedules.make(each, N * v, M, v) for each, v in CHUNKS.items()}
runs = {each: (made[each], balanced(sky.smooth, N * v)) for each, v in CHUNKS.items()}

# %%
ran = pool.run(gpt2_pipeline.time_cuts, SIZE, ROWS, DTYPE, runs)[0]
told, seen, rows = {}, {each: tl.makespan for each, tl in ran.items()}, []
for each, (schedule, counts) in runs.items():
    told[each] = sky.step(schedule, counts).makespan
    most, work = pool.run(gpt2_pipeline.peak_activations, SIZE, ROWS, DTYPE, runs[each]), [ran[each].work(r) for r in range(N)]
    cells = (lesson.number(told[each], "s"), lesson.number(seen[each], "s"), f"{seen[each] / told[each]:.2f}")
    uneven = (f"{100 * ran[each].bubble_fraction:.1f} %", f"{max(work) * N / sum(work):.2f}")
    rows.append((each, *cells, *uneven, lesson.number(most[0], "B"), lesson.number(most[-1], "B")))
    step = {"step (s)": (told[each], seen[each]), "bubble (%)": (None, 100 * ran[each].bubble_fraction)}
    lesson.ledger.add("06", Layout(pp=N), f"{name}, {each}", step, vit_pipeline.hardware(N))
columns = ("schedule", "step, predicted", "run", "ratio", "bubble", "fullest rank over mean", "rank 0 holds", f"rank {N - 1} holds")
own = ", ".join(f"{each} {tl.makespan / made[each].simulate(Costs.measured(tl)).makespan:.2f}" for each, tl in ran.items())
lesson.table(columns, rows, f"cut by time; held: beside weights and gradients; {ran['1f1b'].source}", f"Ratios with each schedule's own F, I, W: {own}.")
lesson.reveal("06.schedules", seen, predicted=sorted(told, key=told.get))
shown = ("1f1b", "zb-h1", "zb-v")
plot.show(
    plot.timeline(*(ran[each] for each in shown), names=shown, title=f"GPT-2 on {N} ranks, {M} microbatches, cut by time"),
    alt=f"Steps of {', '.join(shown)} take {', '.join(lesson.number(seen[each], 's') for each in shown)}.",
)

# %% [markdown]
# Predicted from the skyline: F as measured, I and W half a backward each. Start with 1f1b's ratio: it has no I and W,
# so what is off there is noise, or a machine that was slower or quicker when layers were measured, and all four share
# it. What the others have beyond it is what the prediction leaves out: W is matmuls alone, I has everything else, and
# both apart take longer than one backward. (Put these in, and the note's ratios are near 1.) Where I is much longer
# than W, ZB-H1 gains little, for it idles (p-1)(F+I-W). The V needs no such luck; its thin stages need a good cut.
#
# Compare the last rank's memory under 1f1b and zb-h1: part of the difference is logits' gradients that wait for W, the
# rest what the layers of that rank keep for theirs.
#
# **Takeaway.** A schedule is chosen with the costs and the memory of its stages, not by its name.
#
# **Challenge.** A head of 4.5 blocks or more on 24 blocks, 4 ranks, at most 8 microbatches: a bubble under 10 % with at
# most 4.5 microbatches in flight. Then watch "as fast as so many devices" while you add ranks.
#
# <details><summary>Answer</summary>
#
# `dualpipe-v`, cut by time, with 8 microbatches and the head at 4.5: 9.2 % idle, 4.5 in flight, as fast as 3.6 devices.
# No other schedule does it; `zb-v` idles 11.8 %. More ranks buy less and less: 8 ranks of `zb-v` are as fast as 4.4
# devices, and (24.1 + 4.5)/4.5 = 6.4 is the limit.
# </details>

# %%
lesson.explorers.uneven_layers()

# %% [markdown]
# ### Exercise 5: beat 1F1B under a cap
#
# *Design, 30 minutes.* Write `plan(job)`: a list of actions for each rank, stage r on rank r. `job.ranks`,
# `job.microbatches`, `job.costs` (a `Costs`, one number a stage), `job.held[r]` (bytes of one microbatch in flight on rank
# r, from F to W) and `job.cap` (bytes for each rank). The check wants no rank over the cap, and a step within 1 % of the
# best that it knows. ZB-H1 as you know it breaks a cap; 1F1B is too slow everywhere. Two jobs are recorded costs.
#
# Hint: start from exercise 3 of 02, where W lags r microbatches on rank r. How far may it lag if there is room for
# `cap // held[r]`? Does more room allow a longer warm-up? `Schedule(rows).simulate(job.costs).makespan` decides.

# %% tags=["stub-5"]
def plan(job):
    ...


# %% tags=["check-5"]
verdict = lesson.check(exercises.beat_1f1b, plan)
if verdict.status == "passed" and "ran" in vars():
    costs = Costs.measured(ran["zb-h1"])
    job = exercises.CappedPipeline(N, M, costs, (1.0,) * N, float(N))
    print("at this page's costs:", *(f"{lesson.number(s.simulate(costs).makespan, 's')} {s.name}" for s in (Schedule(plan(job), "yours"), mine)))
verdict

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def row(r, ahead, lag, m):
#     actions = [f"{r}F{k}" for k in range(min(ahead, m))]
#     for k in range(m):
#         actions.append(f"{r}I{k}")
#         if k >= lag:
#             actions.append(f"{r}W{k - lag}")
#         if k + ahead < m:
#             actions.append(f"{r}F{k + ahead}")
#     return actions + [f"{r}W{k}" for k in range(max(0, m - lag), m)]
#
#
# def plan(job):
#     p, tried = job.ranks, []
#     room = [int(job.cap // held) for held in job.held]
#     for stretch in (1, 2):  # ZB-H1's warm-up, and ZB-H2's
#         ahead = [stretch * (p - r - 1) + 1 for r in range(p)]
#         lag = [min(stretch * r, room[r] - ahead[r]) for r in range(p)]
#         if min(lag) >= 0:
#             tried.append([row(r, ahead[r], lag[r], job.microbatches) for r in range(p)])
#     return min(tried, key=lambda rows: Schedule(rows).simulate(job.costs).makespan)
# ```
# </details>

# %% [markdown]
# ## What to remember
#
# - The heaviest stage sets the pace. A head of a = V/(12h + 2s) blocks makes a uniform cut 1 + a(p-1)/(L+a) times as
#   long, and no pipeline of that model faster than (L+a)/a devices.
# - Measure layers, then cut: by time for speed, by parameters for memory. FLOPs do not see a softmax.
# - Err on the side of a light last rank: a block too many there is paid by all.
# - A tied weight is one weight: same start, summed gradients, counted once. Its two homes are an instrument: distance 0.
# - Divide once, by all targets. They are counted before anything is computed.
# - A lagging W keeps gradients of logits. Memory, like time, is a property of a stage, not of a schedule.
#
# **When not to use this.** When one layer weighs more than its share (a 124M on 8 ranks) no cut helps: cut the head itself
# (07), or use fewer ranks and replicas of them (08). When sequences differ wildly, microbatches differ in time as well,
# and no static cut is right: sort by length. A profile is of one machine, one length and one batch; cut again when they
# change.
#
# **Papers.** Radford et al. 2019, *Language models are unsupervised multitask learners*. Press & Wolf 2017, *Using the
# output embedding to improve language models* (one table). Narayanan et al. 2019, *PipeDream* (a partition by profile).
# Huang et al. 2019, *GPipe*. Qi et al. 2024, *Zero bubble pipeline parallelism*; Yeung et al. 2024, *Balancing pipeline
# parallelism with vocabulary parallelism* (arXiv 2411.05288).
