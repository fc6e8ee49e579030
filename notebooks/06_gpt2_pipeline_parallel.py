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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hpnb/hpnb/blob/main/notebooks/06_gpt2_pipeline_parallel.ipynb)
# [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/hpnb/hpnb/blob/main/notebooks/06_gpt2_pipeline_parallel.ipynb)
#
# **The question.** In notebook 02 all pipeline stages took the same time, because a ViT is a stack of equal blocks. Three
# things that held for the ViT fail for GPT-2. Its last layer, the head, takes as long as several blocks. Its first and last
# layer share one weight. Its texts differ in length, so microbatches have unequal numbers of *targets*, the tokens to
# predict. Where do we cut now, and how do loss and gradients stay exact?
#
# **You will be able to** measure a model's layers and find its best cut; explain why FLOPs misjudge the head, and why
# vocabularies are padded; keep a shared weight equal on two ranks; average a loss exactly over unequal numbers of targets;
# choose a schedule for unequal stages.
#
# **You should know** notebook 02: forwards F and backwards split into input gradients I and weight gradients W,
# schedules, the makespan, and the bubble. From 00: broadcast and all-reduce.
#
# **Time.** 30 minutes to read, 2 to run, 40 for the core exercises and 45 for the extra ones.
#
# **Two questions to recall.** From 02: how long is a step of m microbatches through stages that take t₀, t₁, ...? From 01:
# two ranks with unequal numbers of samples each compute a mean. Why is the average of the two not the mean?
#
# <details><summary>Answers</summary>
# About Σ t + (m-1) max t. The first microbatch passes through all stages, and the others follow at the pace of the slowest
# one. The average gives both ranks the same weight, so a sample on the rank with fewer samples counts more.
# </details>

# %% tags=["setup"]
import importlib.util

assert importlib.util.find_spec("hpnb"), "run %pip install hpnb, then this cell again"
from itertools import islice
import hpnb, statistics, torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from hpnb import Layout, Mesh, comm, lesson, theory
from hpnb.lesson.figures import gpt2_pipeline as figures
from hpnb.lesson.programs import device_timing, gpt2_pipeline, step_timing, tied_weights
from hpnb.lesson.programs.gpt2_pipeline import FEW_TOKENS  # why a claim may fail
from hpnb.lesson.exercises import gpt2_pipeline_parallel as exercises
from hpnb.pipeline_parallel import Schedule, full_state_dict, layer_costs, schedules
from hpnb.pipeline_parallel import layers, microbatches, partition as partitions

N, M = min(4, hpnb.ranks.default_ranks()), 8  # ranks (on 2 cores, too), microbatches
pool = hpnb.Ranks(N)  # these ranks stay to the end
sizes = lesson.choose_sizes("06", pool)  # the largest that fit
SIZE, DTYPE, MICROBATCH_SIZE = sizes.size, sizes.dtype, sizes.batch
BATCH_SIZE = M * MICROBATCH_SIZE
english = hpnb.data.text("train", block=64)  # texts end to end, cut every 64 tokens
batches = list(islice(hpnb.data.Loader(english, 16), 32))  # the same on every rank
model = f"GPT-2, {SIZE.layers} blocks of {SIZE.hidden}, vocabulary {SIZE.vocab_size}"
model += f"; {M} microbatches of {MICROBATCH_SIZE} x {SIZE.length} tokens, {DTYPE}"
lesson.banner(N, model=model, data=english.describe(), sizes=sizes)
schedule_1f1b = lesson.reader_schedule("1f1b", N, M)

# %% [markdown]
# ## A uniform cut loses
#
# We begin with your 1F1B from notebook 02 if it is there, otherwise with the library's. *Layers* are the embedding, the blocks and the head.
# The cut is *uniform*: numbers of blocks differ by at most one. A microbatch has b sequences of s tokens;
# V is the vocabulary size, h the hidden size.
#
# ```text
#            rank 0              rank 1              rank p-1
# tokens     embedding (V, h)                                                  logits
# (b, s) ──► blocks       ─────► blocks ─────► ... ─► blocks, head (V, h) ───► (b, s, V) ──► loss
#                      (b, s, h)       (b, s, h)
# ```
#
# Is it exact? `train` compares a small GPT-2 in float64, as a pipeline and in one process. Its `axis` is the group of
# ranks that form the pipeline. The banner's model is for timing only.


# %%
def next_token_loss(outputs, inputs):
    """Mean cross entropy over a microbatch's targets; position i predicts i + 1."""
    targets = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)  # (b, s)
    logits = outputs.logits  # (b, s, V); in 16 bits, the loss is computed in float32
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(schedule, batches):
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    model, serial = (hpnb.models.gpt2("laptop", dtype=torch.float64) for _ in range(2))
    pipe, losses = hpnb.Pipeline(model, axis, schedule, next_token_loss), []
    serial.to(hpnb.device())  # equal to model: weights are drawn with a fixed seed
    for batch in batches:
        batch = {key: value.to(hpnb.device()) for key, value in batch.items()}
        serial_loss = next_token_loss(serial(batch["input_ids"]), batch)
        serial_loss.backward()
        losses.append((pipe.step(batch).loss.item(), serial_loss.item()))
        for part in (pipe, serial):
            torch.optim.SGD(part.parameters(), lr=0.05).step()
            part.zero_grad()
    state = full_state_dict(pipe.module, axis)  # all layers, gathered from all ranks
    expected = [serial.state_dict()[key] for key in state]
    weights = step_timing.relative_distance(state.values(), expected)
    return {"loss": max(abs(a - b) / b for a, b in losses), "weights": weights}


# %%
distances = pool.run(train, schedule_1f1b, batches[:4])  # of each rank
exact = lesson.Parity.worst_of([{"uniform cut": distance} for distance in distances])
lesson.show(exact, title="A pipelined GPT-2, compared with one process")
lesson.claim("The pipeline is exact up to rounding", exact.equal)
all_layers = layers.layers(hpnb.models.gpt2(SIZE, device="meta"))  # shapes only
cuts = {"uniform": partitions.uniform(all_layers, N)}  # layers of each stage
question = f"{N} ranks, {M} microbatches, uniform cut: how large is the bubble?"
formula = 100 * theory.bubble(N, M)
lesson.predict("06.bubble", question, unit="%", rule_of_thumb=formula)

# %% [markdown]
# Now the time. With equal stages, notebook 02 predicts a bubble of $(p-1)/(m+p-1)$, here <data value="06.bubble.rule-of-thumb">27.3 %</data>.
# `time_steps` runs real steps. Where ranks share cores or a GPU, it times each action alone and *replays* the step
# from these times, in the schedule's order. Here steps are <data value="06.run.source">measured</data>. Variants of a step share one set of weights
# and **take turns**, A B C A B C, so that a busy second slows all of them. The cell keeps all <data value="06.repeats">5</data> repeats, because a difference smaller than their spread is no
# finding. Later we also *simulate* steps, from times of single layers.


# %%
def time_steps(variants):
    """{variant: its steps}, of {variant: (schedule, layers of each stage)}, in turn."""
    axis, repeats = Mesh(Layout(pp=hpnb.world_size())).pp, gpt2_pipeline.step_repeats()
    batch = device_timing.random_tokens(SIZE, BATCH_SIZE)
    model, pipes = device_timing.timing_gpt2(SIZE, DTYPE), {}
    for variant, (schedule, cut) in variants.items():
        copy = gpt2_pipeline.share_weights(model)  # timing only reads weights
        pipes[variant] = hpnb.Pipeline(copy, axis, schedule, next_token_loss, cut=cut)
    timelines = {variant: [] for variant in variants}
    for _ in range(device_timing.warmup_steps() + repeats):
        for variant, pipe in pipes.items():
            timeline = pipe.step(batch, return_outputs=False).timeline
            pipe.zero_grad()
            timelines[variant].append(timeline.select("FIWB"))  # B: I and W at once
    return {v: gpt2_pipeline.StepRepeats(timelines[v][-repeats:]) for v in variants}


steps = pool.run(time_steps, {"uniform": (schedule_1f1b, cuts["uniform"])})[0]
step, SOURCE = steps["uniform"].median, steps["uniform"].source  # "measured" or so
lesson.reveal("06.bubble", 100 * step.bubble_fraction, source=SOURCE)
busy = {f"rank {rank}": step.work(rank) / M for rank in step.ranks}
lesson.show(**{SOURCE: busy}, unit="s", title="One microbatch, forward and backward")
*others, last = busy.values()
lesson.claim("The last rank is slowest", (last, ">", max(others)), FEW_TOKENS, unit="s")
lesson.record("06.run", gpt2_pipeline.unequal_ranks(SOURCE, busy))

# %% [markdown]
# The bubble is <data value="06.bubble">42.9 %</data> instead. The formula assumes equal stages, but the last rank works
# <data value="06.run.slower:.1f">1.6</data> times as long as the others on average, and they wait for it. With endlessly many
# microbatches, these times still leave a bubble of <data value="06.run.endless">29.3 %</data> by Σ t + (m-1) max t.
#
# **Takeaway.** A uniform cut gives the exact result, but slowly: the stage with the head sets the pace.
#
# ## The head costs several blocks
#
# How much does the head cost? FLOPs first. Per token of a sequence of s, a block's forward takes 24 h² + 4 s h FLOPs, and
# the logits 2 h V; a backward takes twice as many. Counted in blocks, the head costs
#
# $$ a = \frac{V}{12\,h + 2\,s}, \qquad\text{for GPT-2 with } s = 1024: $$
#
# | GPT-2 | h | blocks L | head a, predicted | best speed-up over one rank by FLOPs, (L+a)/a |
# |---|---|---|---|---|
# | 124M | 768 | 12 | 4.5 | 3.7 |
# | 355M | 1,024 | 24 | 3.5 | 7.8 |
# | 774M | 1,280 | 36 | 2.9 | 13.5 |
# | 1.5B | 1,600 | 48 | 2.4 | 21.3 |
#
# A cut that keeps the head on one rank cannot exceed the speed-up in the last column.
#
# We also time each layer alone, and of the last layer the head's matmuls and the loss separately.

# %%
times = pool.run(gpt2_pipeline.time_layers, SIZE, MICROBATCH_SIZE, DTYPE)[0]
law = theory.head_in_blocks(SIZE.block(), SIZE.vocab_size)
matmuls = (times.costs[-1] - times.loss) / times.block  # seconds over seconds: blocks
lesson.show(predicted={"head's matmuls": law, "head and loss": law}, unit="blocks",
            measured={"head's matmuls": matmuls, "head and loss": times.head},
            key="06.head", title="The head by FLOPs and by time")  # fmt: skip
lesson.record("06.repeats", len(steps["uniform"].timelines))
lesson.record("06.head", {"ratio": matmuls / law, "limit": (SIZE.layers + law) / law})
lesson.record("06.chunks", times.chunks_in_words(2 * N))
lesson.claim("FLOPs are off by over a tenth", (times.misjudged(law), ">", 0.1))

# %% [markdown]
# FLOPs predict <data value="06.head.head-s-matmuls.predicted">2.37 blocks</data> for the head. Its matmuls really take
# <data value="06.head.head-s-matmuls.measured">5.31 blocks</data>, <data value="06.head.ratio:.2f">2.25</data> times as much. With the loss,
# which FLOPs leave out, the head takes <data value="06.head.head-and-loss.measured">6.94 blocks</data>.
#
# FLOPs err in two directions, and the errors can cancel. Norms, GELU, softmax and launches make a block longer, so the
# head counts fewer blocks. The loss and an odd vocabulary make the head longer, and weigh more here. For the banner's
# model, the best speed-up is <data value="06.head.limit:.1f">21.3</data> by FLOPs and <data value="06.chunks.limit:.1f">7.9</data> by the measured layers.
#
# ### Why 50,257 is a bad size
#
# Fast tensor-core kernels load their operands in aligned pieces of 16 bytes, or 8 numbers of 16 bits. Each row of the
# logits has V numbers. If V is odd, the second row does not begin at such a boundary, and NVIDIA's cuBLAS picks
# slower kernels. A multiple of 8 cures that; people take a multiple of 64, here 50,304. We time the head's three matmuls
# with both sizes, in turn.


# %%
def time_heads(vocab_sizes):
    like = {"device": hpnb.device(), "dtype": DTYPE}
    hidden = torch.randn(MICROBATCH_SIZE * SIZE.length, SIZE.hidden, **like)  # (b s, h)

    def three_matmuls(vocab_size):  # logits, gradient of hidden, gradient of weight
        weight = torch.randn(vocab_size, SIZE.hidden, **like)  # (V, h)
        grad = torch.randn(len(hidden), vocab_size, **like)  # (b s, V), of the logits
        return lambda: (hidden @ weight.T, grad @ weight, grad.T @ hidden)

    return gpt2_pipeline.time_in_turn({v: three_matmuls(v) for v in vocab_sizes})


odd, padded = pool.run(time_heads, (50_257, 50_304))[0].values()  # [seconds]
rows = {"50,257": odd, "50,304": padded}
lesson.show(
    measured={size: statistics.median(seconds) for size, seconds in rows.items()},
    columns={"fastest (s)": {size: min(seconds) for size, seconds in rows.items()},
             "slowest (s)": {size: max(seconds) for size, seconds in rows.items()}},
    unit="s", key="06.vocab", title="The head's matmuls",
)  # fmt: skip
lesson.record("06.padding", times.padded(odd, padded))
lesson.claim("The padded median is not slower than the odd size's slowest repeat",
             (statistics.median(padded), "<=", max(odd)), unit="s")  # fmt: skip

# %% [markdown]
# By the median, the odd size takes <data value="06.padding.gain:.2f">5.81</data> times as long here, a difference <data value="06.padding.spread">beyond the spread of the repeats</data>.
# If our head gained as much, its matmuls would take less than half of FLOPs' <data value="06.head.head-and-loss.predicted">2.37 blocks</data>. With the
# loss, which FLOPs leave out, the head would take <data value="06.padding.head">2.54 blocks</data>. So FLOPs would be nearly right, because two errors cancel.
# Our model stays unpadded, as GPT-2 was published, because this page needs a long head.
#
# <details><summary>On a laptop</summary>
# A CPU has no tensor cores. Its ratio belongs to its own kernels, and doesn't tell what a GPU gains in 16 bits. On GPUs
# it depends on the versions of GPU and cuBLAS, so measure yours.
# </details>
#
# <details><summary>In your tools: pad the vocabulary</summary>
#
# transformers: `model.resize_token_embeddings(pad_to_multiple_of=64)`. Plain PyTorch: `nn.Embedding(50_304, h)`.
# Megatron-Core pads by itself, to a multiple of `--make-vocab-size-divisible-by`, 128 by default, times the tensor-parallel
# size.
# </details>
#
# **Takeaway.** FLOPs misjudge this head. On GPUs, pad the vocabulary first, then measure.
#
# ## Four ways to weigh a layer
#
# The slowest stage counts m times in a step, so a good cut makes the largest stage as small as possible. We choose a *limit* for all
# stages, fill one stage after the other, and start a new one whenever the next layer doesn't fit. The limit is possible if p
# stages suffice. Bisection then gives the smallest limit. The costs are `times.smooth`: measured, with all blocks at their
# median, because their differences are noise or drift. Simulated steps use the same times.


# %%
def least_limit(costs, stages, precision=1e-9):
    """The smallest possible largest stage, with consecutive layers on each stage."""

    def stages_needed(limit):
        needed, load = 1, 0.0
        for cost in costs:
            if load + cost > limit:  # this layer starts a new stage
                needed, load = needed + 1, 0.0
            load += cost
        return needed

    low, high = max(costs), sum(costs)
    while high - low > precision * high:
        middle = (low + high) / 2
        low, high = (low, middle) if stages_needed(middle) <= stages else (middle, high)
    return high


largest = max(theory.stage_loads(times.smooth, partitions.balanced(times.smooth, N)))
by_hand = least_limit(times.smooth, N)
lesson.show(predicted={"by hand": by_hand, "library": largest}, unit="s",
            title="The smallest possible largest stage")  # fmt: skip
lesson.claim("Bisection by hand is right", abs(by_hand / largest - 1) < 1e-6)

# %% [markdown]
# But which costs?
#
# - *uniform* counts blocks.
# - *by parameters* balances weights.
# - *by FLOPs* needs no clock, but knows only matmuls.
# - *by time* uses `times.smooth`.
#
# Our rule of thumb puts FLOPs first, because a count has no noise.
#
# For the next subsection, the run also times cuts that put more or fewer blocks on the stage of the head. We call
# these the blocks *beside the head*.


# %%
lesson.predict(
    "06.cuts", "uniform, by parameters, by flops, by time: which step is shortest?",
    kind="ranking", rule_of_thumb=("by flops", "by time", "uniform", "by parameters"),
)  # fmt: skip
tokens = torch.zeros(MICROBATCH_SIZE, SIZE.length, dtype=int, device="meta")  # (b, s)
parameters = layer_costs.parameters_of(all_layers)
cuts["by parameters"] = partitions.balanced(parameters, N)
flops = layer_costs.flops_of(all_layers, {"input_ids": tokens})
cuts["by flops"] = partitions.balanced(flops, N)
cuts["by time"] = partitions.balanced(times.smooth, N)
last_blocks = {cut: cuts[cut][-1] - 1 for cut in ("uniform", "by flops", "by time")}
lesson.record("06.beside", last_blocks)
# times.step simulates a step from times.smooth
cut, beside = cuts["by time"], last_blocks["by time"]
idle = {"simulated": times.step(schedule_1f1b, cut).bubble_fraction,
        "formula": times.bubble(cut, M)}  # fmt: skip
lesson.record("06.idle", {name: (100 * share, "%") for name, share in idle.items()})
# For the next subsection: these cuts and others, {blocks beside the head: layers},
# up to one whose simulated step is 1.6 times as long as the shortest
slid = {blocks: cuts[cut] for cut, blocks in last_blocks.items()}
slid = gpt2_pipeline.slide_last_cut(times, schedule_1f1b, slid)
curve = {b: times.step(schedule_1f1b, slid[b]).makespan for b in slid}
variants = {*cuts.values(), *slid.values()}  # some are the same cut
steps = pool.run(time_steps, {cut: (schedule_1f1b, cut) for cut in variants})[0]

# %%
repeats = {cut: steps[counts] for cut, counts in cuts.items()}
measured = {cut: seconds.median.makespan for cut, seconds in repeats.items()}
predicted = {cut: times.step(schedule_1f1b, cuts[cut]).makespan for cut in cuts}
most = {cut: max(theory.stage_loads(parameters, cuts[cut])) / 1e6 for cut in cuts}
lesson.show(
    simulated=predicted, **{SOURCE: measured}, unit="s", key="06.cut", title="Cuts",
    columns={**gpt2_pipeline.range_columns(repeats),
             "layers": {cut: ", ".join(map(str, cuts[cut])) for cut in cuts},
             "most parameters per rank (M)": most})  # fmt: skip
ranking = sorted(predicted, key=predicted.get)
lesson.reveal("06.cuts", measured, predicted=ranking, source=SOURCE)
lesson.claim("Simulated, the cut by time beats the uniform cut",
             (predicted["by time"], "<", predicted["uniform"]),
             otherwise=FEW_TOKENS, unit="s")  # fmt: skip
gpt2_pipeline.claim_faster(repeats, "by time", "uniform")
lesson.record("06.faster", gpt2_pipeline.faster(repeats, "by time", "uniform"))
lesson.record("06.ratio", gpt2_pipeline.ratio_range(measured, predicted))
idle = {cut: 100 * repeats[cut].median.bubble_fraction for cut in cuts}
lesson.record("06.idle.run", idle, "%")
same = cuts["by flops"] == cuts["by time"]
versus = gpt2_pipeline.compare(repeats, predicted, "by flops", "by time")
lesson.record("06.flops", gpt2_pipeline.cuts_in_words(same, versus))
shown = {cut: figures.PipelineCut(cuts[cut], repeats[cut].median)
         for cut in ("uniform", "by time")}  # fmt: skip
lesson.show(figures.skyline(times.smooth, shown, times.kinds, times.loss))

# %% [markdown]
# Bars are `times.smooth`, and a bold number is the largest of its cut. By the median, the cut by time is
# <data value="06.faster.gain:.1f">1.2</data> times as fast as the uniform one: <data value="06.faster.sure">all of its repeats are faster than all of the uniform cut's</data>.
#
# The four steps take <data value="06.ratio.least:.2f">0.84</data> to <data value="06.ratio.most:.2f">0.87</data> times as long as simulated. The more these ratios differ, the
# less the simulated order is worth.
#
# <details><summary>Why is a step not the sum of its layers?</summary>
# The step of the cut by time takes <data value="06.cut.by-time.fastest">406 ms</data> to <data value="06.cut.by-time.slowest">473 ms</data> here. It runs again as 1F1B
# in the section on schedules, and takes <data value="06.style.1f1b.fastest">423 ms</data> to <data value="06.style.1f1b.slowest">470 ms</data> there.
#
# Layers can take other times in a step than alone. In this run most take less: in the table of the uniform cut in the first section, each rank's
# microbatch takes less time than the sum above its bars here. But some actions take longer than others of their kind on the same rank, such as the
# first forwards of rank 0 in this figure. The ranks that wait for their results wait longer, and the step can grow. We did not trace the
# causes.
# </details>
#
# <details><summary>How large is the bubble of the cut by time?</summary>
# For the cut by time, Σ t + (m-1) max t gives a bubble of <data value="06.idle.formula">28.0 %</data>. Equal stages would have <data value="06.bubble.rule-of-thumb">27.3 %</data>, but only whole layers move. The simulation keeps the order of all
# actions, and gives <data value="06.idle.simulated">27.9 %</data>.
#
# The run's bubble is <data value="06.idle.run.by-time">30.5 %</data> here. In the section on schedules, the same step has
# <data value="06.bubbles.1f1b.of-the-median-step">34.3 %</data> as 1F1B. The uniform cut also ran twice: its bubble is <data value="06.bubble">42.9 %</data> in the
# first section and <data value="06.idle.run.uniform">43.2 %</data> here.
# </details>
#
# FLOPs <data value="06.error.word">underrate</data> the head, by <data value="06.error.head:.1f">4.6</data> blocks. The cut by FLOPs leaves <data value="06.beside.by-flops">10</data> blocks beside the
# head, and the cut by time <data value="06.beside.by-time">7</data>. In the run, <data value="06.flops">the step cut by FLOPs takes 1.09 times as long, a difference within the spread of the repeats</data>. If the padded
# head took the estimated <data value="06.padding.head">2.54 blocks</data>, both cuts would be the same, on 2 to 8 ranks. What does our head's error cost on
# these?
#
# ### Slide the last cut
#
# For 2 to 8 ranks, the table has the slowest stage of each cut, as the sum of its layers' times. The figure slides
# our last cut: it has steps with other numbers of blocks beside the head, the rest spread evenly.

# %%
slowest, lost = gpt2_pipeline.slowest_stages(flops, times, range(2, 9))  # 2 to 8 ranks
lesson.record("06.error", lost)  # of FLOPs, in blocks, and what their cut loses
lesson.show(columns=slowest, title="Slowest stages of the two cuts")
lesson.claim("At most their errors are lost", (lost["excess"], "<=", lost["ends"]))
positions = {blocks: steps[counts] for blocks, counts in slid.items()}
seconds = {blocks: repeats.seconds for blocks, repeats in positions.items()}
lesson.show(figures.last_cut(seconds, curve.values(), last_blocks, SOURCE))
last = gpt2_pipeline.last_cut_in_words(positions, beside)
lesson.record("06.last", last)
lesson.claim("Too many blocks on the last stage slow each repeat", (last["by"], ">", 1))

# %% [markdown]
# The slowest stage of the cut by FLOPs takes at most <data value="06.error.ratio:.2f">1.56</data> times as long as that of the cut by time. It is
# at most <data value="06.error.excess:.1f">3.9</data> blocks longer. Blocks are equal, so FLOPs misjudge only head and embedding, by
# <data value="06.error.ends:.1f">4.8</data> blocks together. The cut by FLOPs never loses more.
#
# By the median, the best number of blocks beside the head is <data value="06.last.first">6</data>. The run doesn't decide between the best number
# and others whose repeats overlap. <data value="06.last.by-time">The cut by time leaves 7, and its step takes 1.03 times as long, a difference within the spread of the repeats</data>.
# With <data value="06.last.most">21</data> blocks, even the fastest repeat takes <data value="06.last.by:.2f">1.52</data> times as long as the slowest repeat with the best number.
#
# In the simulation, moving a block beside the head can shorten the step while the block's old stage is the slowest. Once the
# head's stage is the slowest, each further block there delays every microbatch.
#
# <details><summary>In your tools: where to cut</summary>
#
# hpnb: `hpnb.Pipeline(..., cut="time", example=batch)`, or `cut=[5, 4, 4, 2]` by hand. Megatron-Core:
# `--decoder-last-pipeline-num-layers` sets the last stage, and `--account-for-loss-in-pipeline-split` counts the head as a
# layer. In PyTorch you name the cuts:
#
# ```python
# from torch.distributed.pipelining import SplitPoint, pipeline
#
# pipe = pipeline(model, mb_args=(tokens,), split_spec={"transformer.h.7": SplitPoint.BEGINNING})
# ```
#
# Or you make a *manual stage* for `PipelineStage`: build the whole model on the meta device, delete the blocks of other
# stages, and set embedding or head to None where they are elsewhere. The forward skips what is None. If the blocks stay
# in a `ModuleDict` under their old numbers, names of weights don't change, and a checkpoint of the whole model fits.
# </details>
#
# **Takeaway.** Start from the cut by time, and run its neighbours in turn, because layers timed alone only predict a step.
#
# ### Exercise 1: an optimal partition
#
# *Core. Implement, 25 minutes.* `partition(costs, stages)` returns the number of layers of each stage, in order and at
# least one each. The check compares 17 small cases with exhaustive search, then asks for 50 layers over 8 stages.
#
# <details><summary>Hint</summary>
#
# Let best[j] be the best cut of the first j layers into k stages. With k + 1 stages the last one starts at some layer
# i: combine best[i] with the cost of layers i to j - 1.
# </details>


# %% tags=["stub-1"]
def partition(costs, stages): ...


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
# The library combines both: bisection finds the smallest limit, and dynamic programming picks the most even of the cuts
# that keep to it.
# </details>

# %% [markdown]
# ## One weight, two homes
#
# GPT-2 looks tokens up in a table of V x h numbers and scores them with the same table: the weight is *tied*. In one
# process it is one tensor, and autograd adds up the gradients of both uses. In a pipeline it has two homes.
#
# | | rank 0 | ranks between | rank p-1 |
# |---|---|---|---|
# | holds | `wte.weight` (V, h), the table | - | `lm_head.weight` (V, h), its copy |
# | gradient from | tokens of the batch | - | all V logits |
#
# The cell unties the model, so that each copy gets the gradient of one use, and adds the two with an all-reduce between the
# first and the last rank. Their group comes from `axis.among((0, p-1))`, which every rank must call, as with
# `dist.new_group`.


# %%
def sum_tied_gradients(batch):
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    ends = axis.among((0, axis.size - 1))  # these two ranks; every rank calls it
    batch = {key: value.to(hpnb.device()) for key, value in batch.items()}
    model, serial = (hpnb.models.gpt2("laptop", dtype=torch.float64) for _ in range(2))
    next_token_loss(serial.to(hpnb.device())(batch["input_ids"]), batch).backward()
    expected = serial.transformer.wte.weight.grad  # (V, h), from both uses
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # untie
    schedule = schedules.make("1f1b", axis.size, M)
    pipe = hpnb.Pipeline(model, axis, schedule, next_token_loss)
    pipe.step(batch)
    if axis.rank in (0, axis.size - 1):
        use = "transformer.wte.weight" if axis.rank == 0 else "lm_head.weight"
        grad = dict(pipe.named_parameters())[use].grad  # (V, h), from one use
        alone = step_timing.relative_distance([grad], [expected])
        dist.all_reduce(grad, group=ends.group)  # the sum, on both ranks
        return alone, step_timing.relative_distance([grad], [expected])
    return None


first, *_, last = pool.run(sum_tied_gradients, batches[0])  # (one use, the sum)
rows = {"embedding's": first[0], "head's": last[0], "their sum": max(first[1], last[1])}
lesson.show(measured=rows, key="06.tie", title="Distance to one process's gradient")
lesson.claim("The sum is exact", (rows["their sum"], "<", 1e-12))
lesson.claim("Neither gradient alone is", (min(first[0], last[0]), ">", 0.1))

# %% [markdown]
# Alone, the head's gradient is off by <data value="06.tie.head-s.measured:.2f">0.57</data> of the true gradient's norm, and the embedding's by
# <data value="06.tie.embedding-s.measured:.2f">0.82</data>. Their sum is exact.
#
# ### The silent failure
#
# What if we forget the sum? We train with the sum, and with two copies that start equal and follow their own gradients.
# After each step we take their distance.


# %%
def train_tied(tied):
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    model, loaded = (hpnb.models.gpt2("laptop", device=hpnb.device()) for _ in range(2))
    table = model.transformer.wte.weight  # (V, h)
    if not tied:  # two programs that each load "their" weight: equal, but two tensors
        model.lm_head.weight = nn.Parameter(table.detach().clone())
    schedule = schedules.make("1f1b", axis.size, M // 2)  # fewer, to launch less
    pipe = hpnb.Pipeline(model, axis, schedule, next_token_loss)  # sums, if tied
    optimizer, log = torch.optim.AdamW(pipe.parameters(), lr=6e-4), []
    for batch in batches:
        loss = pipe.step(batch).loss.item()
        optimizer.step()
        optimizer.zero_grad()
        log.append((loss, tied_weights.tied_distance(pipe, axis, table.shape)))
    trained = pipe.step(batch, forward_only=True).loss.item()
    state = full_state_dict(pipe.module, axis)  # what a checkpoint would hold
    return log, (trained, *tied_weights.loaded_losses(state, loaded, batch))


cases = {"summed": True, "never summed": False}
runs = {case: pool.run(train_tied, tied)[0] for case, tied in cases.items()}

# %%
losses = {case: [loss for loss, _ in log] for case, (log, _) in runs.items()}
distances = {case: [distance for _, distance in log] for case, (log, _) in runs.items()}
lesson.show(figures.copies_of_a_tied_weight(losses, distances))
heads = ("loss as trained", "loaded with wte's copy", "loaded with lm_head's copy")
lesson.show(
    columns={head: {case: final[i] for case, (_, final) in runs.items()}
             for i, head in enumerate(heads)},
    key="06.loss", title="Loss of the last batch, before and after a checkpoint",
)  # fmt: skip
lesson.record("06.distance", distances["never summed"][-1])
trained, *loaded = runs["never summed"][1]
lesson.claim("Never summed, the loss falls", (trained, "<", losses["summed"][0] - 0.5))
lesson.claim("Summed, the copies stay equal", (max(distances["summed"]), "==", 0))
lesson.claim("Never summed, a reloaded model is worse", (min(loaded), ">", trained))
summed = runs["summed"][1][0]
lesson.record("06.ends", gpt2_pipeline.beside(summed, trained=trained, lm=loaded[1]))
lesson.claim("With lm_head's copy it is close", (abs(loaded[1] - summed), "<", 0.2))
# The field guide collects the silent failures of all pages: symptom, test, cause.
lesson.field_guide.add(
    "the loss falls, and the saved model is worse than the one that was trained",
    "the distance between the two copies of a tied weight: 0, or it grows",
    "each copy follows its own gradient; nobody summed them", notebook="06",
)  # fmt: skip
lesson.field_guide.show("06")

# %% [markdown]
# Without the sum the model has one more table to train. After the last step, the last batch's loss is
# <data value="06.ends.trained">0.03 lower</data> than with the sum: <data value="06.loss.never-summed.loss-as-trained:.2f">5.25</data> against
# <data value="06.loss.summed.loss-as-trained:.2f">5.28</data>. But the distance between the copies, which should be 0, has grown to
# <data value="06.distance:.2f">0.59</data> of the table's norm. A GPT-2 checkpoint has one table, so whoever loads it keeps one of the copies.
#
# After loading, the loss is
# <data value="06.loss.never-summed.loaded-with-wte-s-copy:.2f">6.02</data> with wte's copy, and <data value="06.loss.never-summed.loaded-with-lm_head-s-copy:.2f">5.29</data> with lm_head's. Both are worse than as
# trained. But with lm_head's copy, the loss is close to the summed model's, so it doesn't show the mistake.
#
# <details><summary>In your tools: tied weights</summary>
#
# Megatron-Core all-reduces the two gradients when it finalizes them, unless you pass
# `--untie-embeddings-and-output-weights`. In DeepSpeed you declare the tie with `TiedLayerSpec`. With manual stages of
# `torch.distributed.pipelining` the two lines are yours:
#
# ```python
# ends = dist.new_group([0, world_size - 1])  # once, on every rank
# dist.all_reduce(table.grad, group=ends)  # each step, on these two ranks
# ```
# </details>
#
# **Takeaway.** A tied weight needs an equal start and the sum of its gradients.
#
# ### Exercise 2: one weight, two homes
#
# *Core. Implement, 15 minutes.* Every rank calls `tie(weight, axis)` once; `weight` is its copy, or None on the ranks
# between. Return a function `add()` for every rank to call between backward and optimizer. The copies begin with different
# values, and rank 0's are right. The check compares with one process. It wants equal weights, and the ranks between must
# send nothing.
#
# <details><summary>Hint</summary>
#
# `comm.broadcast(x, axis, source)` and `comm.all_reduce(x, axis)` return
# their results and leave x alone.
# </details>


# %% tags=["stub-2"]
def tie(weight, axis): ...


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
# An average instead of the sum keeps the copies equal, so the distance stays 0. But the table then trains with half its
# gradient: equal copies are necessary, not sufficient.
# </details>

# %% [markdown]
# ## Ragged microbatches
#
# The third difference is in the data. So far, sequences were packed. Now each is one paragraph, padded to the longest, and padding has no
# target: its label is -100. The batch is
# *ragged*: its microbatches differ in their number of targets. We want the mean over all targets. If microbatch k has a
# sum of losses Sₖ over cₖ targets, this is
#
# $$ \ell = \frac{\sum_k S_k}{\sum_k c_k} \qquad\text{and not}\qquad \frac{1}{m}\sum_k \frac{S_k}{c_k}. $$
#
# The second form, a mean of means, gives a target more weight if its microbatch has few targets. The cell accumulates the
# gradients of a ragged batch in three ways. The table's last row compares parameters after a step of the pipeline, which weights
# the mean of each microbatch by its number of targets.


# %%
paragraphs = hpnb.data.text("train", rows="paragraph", block=64)
batch = next(iter(hpnb.data.Loader(paragraphs, 8)))
parts = microbatches.split_batch(batch, M)
counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]


def accumulate(parts, shares):
    model = hpnb.models.gpt2("laptop", dtype=torch.float64)
    for part, share in zip(parts, shares, strict=True):
        (share * next_token_loss(model(part["input_ids"]), part)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


exact = accumulate([batch], [1.0])  # all samples at once
padded = [{**part, "labels": part["input_ids"]} for part in parts]
ways = {"sums over one count": accumulate(parts, [c / sum(counts) for c in counts]),
        "mean of means": accumulate(parts, [1 / M] * M),
        "padding counted": accumulate(padded, [1 / M] * M)}  # fmt: skip
wrong = {way: float((grad - exact).norm() / exact.norm()) for way, grad in ways.items()}
wrong["pipeline, after a step"] = pool.run(train, schedule_1f1b, [batch])[0]["weights"]
lesson.show(measured=wrong, key="06.ragged", title="Distance to one process's result")
lesson.record("06.targets", {"fewest": min(counts), "most": max(counts)})
lesson.claim("One count is exact", (wrong["sums over one count"], "<", 1e-12))
lesson.claim("The pipeline is exact, too", (list(wrong.values())[-1], "<", 1e-12))
lesson.claim("A mean of means is not", (wrong["mean of means"], ">", 0.1))

# %% [markdown]
# The microbatches have between <data value="06.targets.fewest">1</data> and <data value="06.targets.most">63</data> targets. The mean of means is off by
# <data value="06.ragged.mean-of-means.measured:.2f">1.85</data> times the true gradient's norm, and counting padding as targets by
# <data value="06.ragged.padding-counted.measured:.2f">4.18</data>.
#
# <details><summary>In your tools: the exact mean</summary>
#
# hpnb: the loss function of a pipeline returns a mean, which is weighted by its targets as here, or the pair (sum, count).
# Megatron-Core: `--calculate-per-token-loss`. transformers' `Trainer` passes `num_items_in_batch` to the loss. In PyTorch's
# pipelining schedules, return the sum and divide the gradients by the count.
# </details>
#
# **Takeaway.** Add up sums, and divide once by one count.
#
# ### Exercise 3: the exact token mean
#
# *Extra. Implement, 15 minutes.* Write `token_loss(outputs, inputs)` for one microbatch. It returns the sum of its
# losses and the number of its targets, and the pipeline divides. `outputs.logits` has shape b x s x V, and
# `inputs["labels"]` b x s with -100 at padding. The check compares loss and gradients with one process, also where a
# microbatch has no target.
#
# <details><summary>Hint</summary>
#
# Position i predicts label i + 1, so a text of n tokens has n - 1 targets.
# </details>


# %% tags=["stub-3"]
def token_loss(outputs, inputs): ...


# %% tags=["check-3"]
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
# ## Four schedules at real costs
#
# Notebook 02 compared schedules on equal stages, with F = I = W. We run this page's 1F1B and three others, each with
# its own cut by time. ZB-H1 is 1F1B with split backwards: its W wait and fill gaps. Interleaving and ZB-V give each
# rank two shorter stages. In ZB-V, rank r has stages r and 2p-1-r, so rank 0 has the first and the last. As a rule of
# thumb we take the order on equal stages.

# %%
chunks = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}  # stages per rank
made = {name: schedules.make(name, N * v, M, v) for name, v in chunks.items()}
made["1f1b"] = schedule_1f1b
balance = {name: partitions.balanced(times.smooth, N * v) for name, v in chunks.items()}
runs = {name: (made[name], balance[name]) for name in chunks}
lesson.predict(
    "06.schedules", f"{', '.join(chunks)}, each cut by time: which step is shortest?",
    kind="ranking", rule_of_thumb=("zb-v", "zb-h1", "interleaved", "1f1b"),
)  # fmt: skip
steps = pool.run(time_steps, runs)[0]

# %%
medians = {name: steps[name].median for name in runs}
measured = {name: step.makespan for name, step in medians.items()}
predicted = {name: times.step(*run).makespan for name, run in runs.items()}
lesson.show(
    simulated=predicted, **{SOURCE: measured}, unit="s", key="06.style", title="Steps",
    columns={**gpt2_pipeline.range_columns(steps),
             "compute per rank (s)": gpt2_pipeline.seconds_per_rank(medians, "FIWB"),
             "forward per rank (s)": gpt2_pipeline.seconds_per_rank(medians, "F"),
             "W / I": gpt2_pipeline.w_over_i(medians)})  # fmt: skip
columns = gpt2_pipeline.bubble_columns(steps)
lesson.show(columns=columns, key="06.bubbles", title="Bubbles of the repeats")
ranking = sorted(predicted, key=predicted.get)
lesson.reveal("06.schedules", measured, predicted=ranking, source=SOURCE)
lesson.claim("Simulated, ZB-H1's step is shorter than 1F1B's",
             (predicted["zb-h1"], "<", predicted["1f1b"]), unit="s")  # fmt: skip
gpt2_pipeline.claim_less_idle(steps, "zb-h1", "1f1b")
lesson.record("06.h1", gpt2_pipeline.compare(steps, predicted, "zb-h1", "1f1b"))
lesson.record("06.fastest", gpt2_pipeline.schedules_in_words(steps, "1f1b"))
gpt2_pipeline.add_to_ledger(model, predicted, medians)  # for 08's table
lesson.show({name: medians[name] for name in ("1f1b", "zb-h1")},
            title="ZB-H1 splits the backwards of 1F1B into I and W")  # fmt: skip
peaks = gpt2_pipeline.peaks_by_run(pool, SIZE, BATCH_SIZE, DTYPE, runs)  # of each rank
lesson.show(columns=gpt2_pipeline.memory_columns(peaks, medians, chunks),
            title="Peak of activations, first and last rank")  # fmt: skip
lesson.record("06.last-rank", {name: peaks[name][-1] for name in runs}, "B")

# %% [markdown]
# The last table has the peak of what a rank
# keeps besides weights and their gradients. A microbatch is *in flight* from its F to the end of its backward. Where a rank
# has two stages, a microbatch counts half for each stage on which it is in flight.
#
# By the median, <data value="06.fastest.first">interleaved</data> is fastest. But the run decides a pair's order only where no repeats overlap,
# here in <data value="06.fastest.decided">0 of the 6</data> pairs.
#
# ZB-H1's step takes <data value="06.h1.run:.2f">0.93</data> times as long as 1F1B's by the median, a difference <data value="06.h1.spread">within the spread of the repeats</data>. Its
# bubble is <data value="06.bubbles.zb-h1.of-the-median-step">28.7 %</data> against <data value="06.bubbles.1f1b.of-the-median-step">34.3 %</data>, a difference <data value="06.fastest.zb-h1">beyond the spread of the repeats</data>.
# ZB-H1's repeats end at <data value="06.bubbles.zb-h1.highest">31.8 %</data>, and 1F1B's begin at <data value="06.bubbles.1f1b.lowest">31.9 %</data>. But among
# the cuts above, the same 1F1B step had a bubble of <data value="06.idle.run.by-time">30.5 %</data> and took <data value="06.cut.by-time.measured">420 ms</data>, less
# than ZB-H1 here. So the run doesn't decide between the two.
#
# Simulated, ZB-H1's step takes <data value="06.h1.simulated:.2f">0.85</data> times as long as 1F1B's. The simulation lets W take as long as I.
# But in this library W has only the weight gradients of matmuls. In the
# run it takes <data value="06.style.zb-h1.w-i:.2f">0.38</data> times as long as I. The shorter W is, the less a split backward saves.
#
# <details><summary>Can two stages a rank take equally long?</summary>
# If 2p stages were equal, each would take <data value="06.chunks.equal:.2f">6.90</data> blocks. The head alone takes
# <data value="06.head.head-and-loss.measured">6.94 blocks</data>. But only whole layers move: if the head has one of 8 stages for itself, 48 blocks lie on the
# other 7. At least one of these stages has 7 blocks, and takes slightly longer than the head. The row of 8 ranks in the table of
# slowest stages has the same cut by time.
# Interleaved and ZB-V cut the model alike. ZB-V also splits backwards, so its W can fill gaps.
# </details>
#
# <details><summary>How the run differs from the simulation</summary>
# The figure draws 1F1B and ZB-H1, because they have the same stages. It leaves out the number of a W that is too narrow. It
# also shows that equal work can take unequal time: compare F0 and F4 on rank 0. A rank that needs the result of a slow
# action waits longer. In the simulation, all forwards of a stage are equally long, and so are all backwards.
#
# The simulation also lets all schedules compute equally long. In the run, compute per rank is <data value="06.style.1f1b.compute-per-rank">298 ms</data> with
# 1F1B, <data value="06.style.zb-h1.compute-per-rank">302 ms</data> with ZB-H1, <data value="06.style.interleaved.compute-per-rank">318 ms</data> with interleaving and <data value="06.style.zb-v.compute-per-rank">309 ms</data> with ZB-V. Forwards are the same
# work under each schedule, and still their times differ. We did not trace the causes.
# </details>
#
# <details><summary>ZB-H1 keeps more on the last rank</summary>
# On the last rank, ZB-H1 keeps <data value="06.last-rank.zb-h1">11.3 GB</data> and 1F1B <data value="06.last-rank.1f1b">5.57 GB</data>. Each
# microbatch stays in flight until its W. After its I, it keeps only the inputs of all matmuls and the gradients of their
# outputs, here also the logits' gradient. So four in flight need not keep four times the bytes of one. ZB-V's last rank has no head, so its bytes don't compare with ZB-H1's.
# Interleaving has more in flight than 1F1B, because a rank starts forwards of both its stages before its first backward.
# </details>
#
# <details><summary>In your tools: schedules</summary>
#
# PyTorch: `ScheduleInterleaved1F1B` and `ScheduleInterleavedZeroBubble` of `torch.distributed.pipelining`. Megatron-Core
# interleaves with `--num-virtual-stages-per-pipeline-rank`.
# </details>
#
# **Takeaway.** Choose a schedule by its step at measured costs, and by its memory.
#
# **Challenge,** in the explorer below. With a head of 4.5 blocks or more on 24 blocks, 4 ranks and at most 8 microbatches,
# reach a bubble below 10 % with at most 4.5 microbatches in flight. One more schedule, `dualpipe-v`, places its stages as ZB-V does, and needs at least 2p microbatches.
#
# <details><summary>Answer</summary>
#
# `dualpipe-v`, cut by time, with 8 microbatches and the head at 4.5, idles 9.2 % with 4.5 microbatches in flight. It splits
# backwards at the start and at the end, where W fills gaps, and keeps them whole between. In the figures, r0 is
# rank 0, and the bubble over microbatches has a log scale.
#
# The running explorer also prints how many times as fast as one rank the setting is. Cut by time, with `zb-h1` and 32
# microbatches, it prints 3.7 on 4 ranks and 6.0 on 8. The limit is all layers over the head, with 0.1 blocks for
# the embedding: (0.1 + 24 + 4.5)/4.5 = 6.4.
# </details>

# %%
lesson.explorers.uneven_layers()

# %% [markdown]
# ### Exercise 4: beat 1F1B under a memory cap
#
# *Extra. Design, 30 minutes.* Write `plan(job)`: a list of actions for each rank, with stage r on rank r. You get
# `job.ranks`, `job.microbatches` and `job.costs`, with F, I and W per stage. `job.microbatch_bytes[r]` are the bytes of
# one in-flight microbatch on rank r, from its F to its W, and `job.cap` the bytes that a rank has for all. The check
# wants no rank above the cap, and a step within 1 % of the best that it knows.
#
# Write an action as stage, kind and microbatch: "0F3" is the forward of microbatch 3 on stage 0.
#
# <details><summary>Hint</summary>
#
# In ZB-H1, rank r runs W of microbatch k after I of microbatch k + r. How far may W lag with room for
# `job.cap // job.microbatch_bytes[r]` microbatches? Does more room allow a longer *warm-up*, the forwards before a
# rank's first backward? `Schedule(rows).simulate(job.costs).makespan` decides.
# </details>


# %% tags=["stub-4"]
def plan(job): ...


# %% tags=["check-4"]
lesson.check(exercises.beat_1f1b, plan)

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
#     room = [int(job.cap // nbytes) for nbytes in job.microbatch_bytes]
#     for stretch in (1, 2):  # 1F1B's warm-up, which always has room, or a longer one
#         ahead = [stretch * (p - r - 1) + 1 for r in range(p)]
#         # W lags as in ZB-H1, or twice as far, but never by more than there is room
#         lag = [min(stretch * r, room[r] - ahead[r]) for r in range(p)]
#         if min(lag) >= 0:
#             tried.append([row(r, ahead[r], lag[r], job.microbatches) for r in range(p)])
#     return min(tried, key=lambda rows: Schedule(rows).simulate(job.costs).makespan)
# ```
# </details>

# %% [markdown]
# ## What to remember
#
# - The slowest stage sets the pace. With a head of *a* blocks beside L others, no cut is more than (L+a)/a times as fast as
#   one rank.
# - Measure layers, cut so that the slowest stage is short, and run the neighbours of that cut.
# - On GPUs with 16-bit matmuls, pad the vocabulary to a multiple of 64.
# - A tied weight needs an equal start and summed gradients. Watch the distance between its copies.
# - Divide a loss once, by the count of all targets.
#
# **When not to use this.** If one layer takes longer than 1/p of the total time, use fewer ranks, with replicas as in
# notebook 05, or split the head itself. A measured cut holds for one machine and shape.
#
# <details><summary>Where to look, and papers</summary>
#
# **Where to look.** Megatron-Core: `finalize_model_grads.py`. Here: `partition.py`, `tied_weights.py` and `loss.py` in
# `hpnb/pipeline_parallel/`.
#
# **Papers.** Radford et al. 2019, *Language models are unsupervised multitask learners*. Press & Wolf 2017, *Using the
# output embedding to improve language models*. Narayanan et al. 2019, *PipeDream*, which partitions by profile. Huang
# et al. 2019, *GPipe*. Qi et al. 2024, *Zero bubble pipeline parallelism*. Yeung et al. 2024, *Balancing pipeline
# parallelism with vocabulary parallelism* (arXiv 2411.05288).
# </details>
#
# **Next.** Notebook 07 splits inside the layers: the head
# over its vocabulary, attention over its heads.
