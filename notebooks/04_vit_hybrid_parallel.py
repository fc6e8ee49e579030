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
# # Which axis deserves the fast wire?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hpnb/hpnb/blob/main/notebooks/04_vit_hybrid_parallel.ipynb)
# [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/hpnb/hpnb/blob/main/notebooks/04_vit_hybrid_parallel.ipynb)
#
# **The question.** You know three ways to share a training step: samples (dp), layers (pp), matrices (tp). Large models
# use all three at once. A cluster has two kinds of wire: fast ones inside a host (one machine with several devices),
# slow ones between hosts. Which axis gets the fast wire, and how are the three put together so that the answer stays
# the same?
#
# **You will be able to** compare the axes by one number each; predict and record who sends to whom, and place axes so
# that little crosses a host's border; assemble the three by hand, and by `Booster`; count a gradient norm once; find
# swapped groups behind a falling loss; move a run to another layout while it trains.
#
# **You should know** notebooks 01 (buckets, the sampler), 02 (1F1B, the bubble) and 03 (columns and rows).
#
# **Time.** 30 minutes to read; under 2 minutes to run on a laptop, and as long on GPUs; 80 minutes for the exercises.
#
# **Two questions to recall.** From 02: what does a pipeline waste, and what does it send? From 03: what happens to the
# ratio of computing to sending when the batch of a tensor-parallel group grows?
#
# <details><summary>Answers</summary>
# Time, (p-1)/(m+p-1) of it, and one activation a cut and microbatch, each way. Nothing: 4.5 h/((t-1)ρ) has no batch in it.
# </details>

# %% tags=["setup"]
import importlib.util

assert importlib.util.find_spec("hpnb"), (
    "hpnb is missing: run `%pip install hpnb` in a cell, then this cell again"
)
import tempfile
from dataclasses import replace
import torch, torch.distributed as dist
import hpnb
from hpnb import Layout, Mesh, comm, lesson, plot, precision, theory
from hpnb.lesson.figures import vit_hybrid as figures
from hpnb.grad_norm import total_norm
from hpnb.lesson.programs import (
    device_timing,
    host_traffic,
    step_timing,
    vit_hybrid,
    vit_pipeline,
    vit_tensor,
)
from hpnb.lesson.exercises import vit_hybrid_parallel as exercises
from hpnb.models import SIZES, ViTSize
from hpnb.pipeline_parallel import full_state_dict, schedules
from hpnb.placement import placement_of
from hpnb.tensor_parallel import parallelize
from hpnb.theory import LINKS

N = min(4, device_timing.timed_ranks())  # on a CPU no more than cores, so that a clock means something
pool, eight = hpnb.Ranks(N), hpnb.Ranks(8, device="cpu")  # these ranks stay to the end
sizes, TINY = lesson.choose_sizes("04", pool), ViTSize(64, 4, 8, 256, 8, 32)  # the largest that fit
SIZE, DTYPE, IMAGES = sizes.size, sizes.dtype, sizes.batch
name = (
    f"ViT, {SIZE.layers} blocks of {SIZE.hidden}, {str(DTYPE)[6:]}, {IMAGES} images of {SIZE.tokens} tokens"
)
leaves = hpnb.data.beans("train", size=1024, image_size=32)
here = lesson.banner(N, model=name, data=leaves.describe(), sizes=sizes,
                     reading="cells with 8 ranks run tiny, on the CPU: they are about bytes and equality, not time")  # fmt: skip

# %% [markdown]
# ## Three laws, one mesh
#
# Eight ranks may be 2 x 2 x 2: two replicas, each a pipeline of two stages, each stage's matrices cut in two. A rank has
# a coordinate on each axis, and an axis is a set of groups: those ranks that differ in this coordinate alone. What the
# three say to each other you have derived. ρ is the FLOPs that a rank does while it sends a byte (00):
#
# | axis | says | how often | can it hide? | computing over sending |
# |---|---|---|---|---|
# | dp | a gradient | once a step | behind the backward | tokens of a rank / (ρ (d-1)/d) |
# | pp | an activation | at a cut, there and back, each microbatch | behind other microbatches | 18 h (l/p)/ρ |
# | tp | an activation | four times a block, each microbatch | hardly | 4.5 h/((t-1)ρ) |
#
# **Do they hold side by side?** On a mesh a rank has 1/(p t) of the model. dp's gradients shrink by that, and so does
# the backward they hide behind: its law stays. tp has l/p blocks to compute and l/p to sum for: stays. pp computes 1/t
# as long between messages that are as large as before: divide by t. One term is new. In a pipeline gradients are
# complete when the *last* microbatch has come back, so dp has 1/m of the backward to hide behind.
#
# The table puts in numbers: a ViT-L/16, eight ranks along one axis, 64 images a rank. Below 1 the wire is the slower.

# %%
card = lesson.machine_card(N)
card.show()
VIT, TOKENS, RANKS = SIZES["l16"], 64 * SIZES["l16"].tokens, 8
rhos = {f"here, ρ = {card.rho:,.0f}": card.rho}
rhos |= {f"{wire}, ρ = {4e14 / LINKS[wire].bandwidth:,.0f}": 4e14 / LINKS[wire].bandwidth
         for wire in ("NVLink 4", "InfiniBand NDR", "Ethernet 100 Gb")}  # fmt: skip
laws = {"dp": lambda rho: TOKENS / theory.dp_tokens_to_hide(rho, RANKS),
        "pp": lambda rho: theory.pp_compute_over_communication(VIT.hidden, VIT.layers / RANKS, rho),
        "tp": lambda rho: theory.tp_compute_over_communication(VIT.hidden, RANKS, rho)}  # fmt: skip
rows = [(axis, *(lesson.number(law(rho)) for rho in rhos.values())) for axis, law in laws.items()]
lesson.table(
    ("axis", *rhos),
    rows,
    "computing over sending, ViT-L/16, 8 ranks at 400 TFLOP/s (first column: at this machine's rate)",
)
layout = Layout(dp=2, pp=2, tp=2)
plot.show(plot.mesh(layout, hosts_of=4, title="dp 2 x pp 2 x tp 2 on two hosts of four, nested dp > pp > tp"),
          alt="Eight ranks in two hosts; tp joins neighbours, pp pairs two apart in a host, dp the two hosts.")  # fmt: skip

# %% [markdown]
# The slower the wire, the worse for all three alike; but they start at different heights. tp is in need first, dp
# later, pp last.
#
# The figure has the same coordinates in the order in which hpnb numbers ranks: dp outermost, tp innermost, so that tp
# neighbours are next to each other, and a host is a run of consecutive ranks.
#
# ### Exercise 1: rank to coordinates
#
# *Implement, 10 minutes.* Return `{"dp": i, "pp": j, "tp": k}` of `rank`. `sizes` is such a dict too, and `order` names
# the axes from the outermost to the innermost, such as `("dp", "pp", "tp")`.
#
# Hint: a rank is a number whose digits are its coordinates. Which digit changes first when you count?


# %% tags=["stub-1"]
def coordinates(rank, sizes, order): ...


# %% tags=["check-1"]
lesson.check(exercises.coordinates, coordinates)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def coordinates(rank, sizes, order):
#     found = {}
#     for axis in reversed(order):
#         rank, found[axis] = divmod(rank, sizes[axis])
#     return found
# ```
# </details>

# %% [markdown]
# ### Your step on a slower wire
#
# Now measured, and then moved. All your ranks train the same batch along dp, along pp (1F1B, 8 microbatches), along tp.
# What was computed is recorded; what was sent is put on a wire of a tenth, of a hundredth of the bandwidth, as if the
# ranks stood on different hosts. (InfiniBand has about a tenth of NVLink's bandwidth, Ethernet a fortieth.) Commit to
# an order first.

# %%
lesson.predict("04.slow-wire", f"{N} ranks, {IMAGES} images, in 8 microbatches under pp, a wire with a tenth of the bandwidth of "
               "yours: which of dp, pp and tp has the shortest step?", guess=None, kind="ranking")  # fmt: skip

# %%
raced = vit_hybrid.time_axes(pool, SIZE, IMAGES, DTYPE, 8, card)
rows = [
    (f"{axis}, sent by a rank", step.predicted_bytes, step.bytes, "B", "identity")
    for axis, step in raced.items()
]
rows += [(f"{axis}, step", step.predicted(card.link), step.seconds, "s") for axis, step in raced.items()]
ratios = lesson.comparison(
    rows, title=f"{N} ranks along one axis; predicted: a rank's share measured alone, and the card's wire"
)
slower = [10 ** (k / 8) for k in range(17)]
wires = [replace(card.link, bandwidth=card.link.bandwidth / times) for times in slower]
curves = {axis: [step.on(wire) for wire in wires] for axis, step in raced.items()}
worst = {axis: curve[-1] / curve[0] for axis, curve in curves.items()}
plot.show(
    figures.slower_link(slower, curves, {axis: step.seconds for axis, step in raced.items()},
                   title=f"simulated · the recorded step on slower wires, {N} ranks on {card.hardware}"),
    alt=f"Step over bandwidth; at a hundredth of it {', '.join(f'{axis} takes {times:.1f} times as long' for axis, times in worst.items())}.",
)  # fmt: skip
tenth = {axis: curve[8] for axis, curve in curves.items()}
lesson.reveal(
    "04.slow-wire", tenth, predicted=sorted(raced, key=lambda axis: raced[axis].predicted(wires[8]))
)
vit_hybrid.add_to_ledger(raced, name, card)

# %% [markdown]
# The bytes are identities. The times are models, and where a ratio is off, name the term: dp's buckets take cores or
# multiprocessors from the backward; a pipeline's microbatches are small matmuls, and ranks of a CPU wait for whoever
# got less of it; under tp each rank does all of the norms.
#
# Read the lines from left to right. tp rises from the start: all that it sends is in line. dp is flat as long as the
# backward covers it; then it rises as steeply, or more. How soon depends on the tokens of a rank: a laptop's batch
# has few, so there dp's shelter is short, and dp may end worst (the table above has 64 images a rank). pp stays flat:
# it pays for its bubble and its small microbatches everywhere, and for the wire next to nothing, until computing over
# sending comes near 1 (02's table of wires). Where the lines cross, the best axis changes: **on a fast wire bubble
# and small pieces are what costs, on a slow one the bytes.**
#
# **Takeaway.** tp gets the fast wire. pp can do with any. dp takes what is left, as long as a rank has tokens enough.
#
# ## A traffic atlas
#
# Who sends how much to whom, then? `record.traffic` notes every message of every rank: the axis, the bytes that leave
# the rank, who takes part. A send goes to its peer. In a collective each rank passes its bytes on to the next of its
# group, the last to the first, for bytes are counted as a ring would move them; in groups of two there is no other way.
# So a step becomes a table of senders and receivers; a square that is *hot* holds many bytes.
#
# Eight ranks, 2 x 2 x 2, on two hosts of four; the model is tiny, of 4 blocks, and each replica has half of the images.
# The axes can be nested in any order; whichever is outermost crosses the border. `assemble` is the whole of it: four
# lines, which the next section takes apart.

# %%
ORDERS = (("dp", "pp", "tp"), ("pp", "dp", "tp"), ("tp", "pp", "dp"))
IMAGES8, M = 32, 2
lesson.predict("04.border", f"8 ranks, {IMAGES8} images of {TINY.tokens} tokens of {TINY.hidden} float64 numbers in {M} microbatches, "
               f"{TINY.parameters(classes=3):,} parameters: which of dp, pp, tp sends the fewest bytes when it crosses?",
               guess=None, kind="ranking")  # fmt: skip


def assemble(dp, pp, tp):
    model = parallelize(vit_tensor.float64_vit(TINY), tp)  # each matrix shared by the ranks of tp
    pipe = hpnb.Pipeline(
        model, pp, schedules.make("1f1b", pp.size, M), vit_pipeline.microbatch_loss
    )  # of that, this rank's stage
    pipe.gradients = hpnb.DataParallel(pipe.module, dp)  # who sums its gradients, bucket by bucket
    return pipe


def sent_in(order):
    mesh = Mesh(Layout(dp=2, pp=2, tp=2, order=order))
    pipe, batch = (
        assemble(mesh.dp, mesh.pp, mesh.tp),
        vit_hybrid.local_rows(vit_hybrid.leaf_batch(leaves, IMAGES8), mesh.dp),
    )
    pipe.step(batch)  # the first one exchanges shapes, too
    with hpnb.record.traffic() as t:
        pipe.step(batch)
    return t.messages, sum(p.numel() for p in pipe.module.parameters())


# %%
ran = {order: eight.run(sent_in, order) for order in ORDERS}
seen = {
    order: host_traffic.recorded_traffic([messages for messages, _ in found], least=1024)
    for order, found in ran.items()
}
plot.show(
    figures.atlas({f"{' > '.join(order)}": flows for order, flows in seen.items()}, host=4,
               title="measured · 8 ranks on two hosts of 4: bytes of a step"),
    alt="Three tables of senders and receivers. tp's squares are the hottest; they lie inside hosts, but with tp outermost.",
)  # fmt: skip
message = IMAGES8 // 2 // M * TINY.tokens * TINY.hidden * 8  # bytes of a microbatch's hidden states
told = {"dp": sum(theory.bytes_sent("all_reduce", 8 * held, 2) for _, held in ran[ORDERS[0]]),
        "pp": 4 * 2 * M * message,  # four pipelines, there and back
        "tp": 8 * TINY.layers // 2 * 4 * M * theory.bytes_sent("all_reduce", message, 2)}  # fmt: skip
over = {order[0]: host_traffic.crossing_bytes(flows, 4) for order, flows in seen.items()}
rows = [(f"{axis} outermost, over the border", told[axis], over[axis], "B") for axis in told]
ratios = lesson.comparison(rows, "identity", "what crosses, all ranks together (messages above 1 kB)")
lesson.reveal("04.border", over, predicted=sorted(told, key=told.get))

# %% [markdown]
# The same step three times, the same bytes in all; only where they fall differs. tp belongs inside a host. Of the
# others pp sends fewest, so fewest bytes cross with pp outermost, which is how Megatron-LM nests them. hpnb nests dp
# outermost, for gradients travel while the rank computes, and few bytes are not yet little time: with a long backward
# dp costs nothing where pp's hops are in line. With many microbatches it is the reverse: dp has 1/m of the backward to
# hide behind, and hops hide behind other microbatches. Count before you choose.
#
# The explorer counts for a model of 6.4 billion parameters, 500,000 tokens a step, 16 microbatches and 400 TFLOP/s a
# rank. It opens with tp across the border.
#
# **Challenge.** 32 ranks in hosts of 8, NVLink 4 inside, Ethernet 100 Gb between, at most 16 GB of states a rank: a step of at
# most 1.3 times its computing. What crosses in your answer, and why is the same with dp outermost too slow?
#
# <details><summary>Answer</summary>
#
# dp 4 x pp 4 x tp 2 with pp outermost takes 1.27 times its computing, the only sizes and place of pp that do. pp's 49
# GB cross the border; dp and tp stay inside a host. With dp outermost 77 GB cross, and gradients have a sixteenth of
# the backward to hide behind: 0.14 s of them are exposed beside 1.51 s of computing, and the step takes 1.34 times
# that.
# </details>

# %%
lesson.explorers.layouts_on_hosts()

# %% [markdown]
# ### Exercise 2: place the axes
#
# *Design, 15 minutes; it returns to 00.* `job.flows(order)` gives `{(sender, receiver): bytes}` of a step when the axes are
# nested in `order`, outermost first: rings for dp and tp, neighbours for pp. Hosts hold `job.host` consecutive ranks.
# Return the order that sends the fewest bytes between hosts.
#
# Hint: on which host is rank r? A ring that spans hosts crosses a border at few of its hops when its ranks are neighbours,
# and at all when they are far apart: the loudest axis need not be the innermost.


# %% tags=["stub-2"]
def place(job): ...


# %% tags=["check-2"]
lesson.check(exercises.place_axes, place)

# %% [markdown]
# <details><summary>Solution</summary>
#
# There are six orders: try them.
#
# ```python
# def place(job):
#     from itertools import permutations
#
#     def over(order):
#         return sum(n for (a, b), n in job.flows(order).items() if a // job.host != b // job.host)
#
#     return min(permutations(("dp", "pp", "tp")), key=over)
# ```
#
# In the third job tp, of 8, fits no host of 6. As the outermost it crosses at every hop, and lets the other two stay inside.
# </details>

# %% [markdown]
# ## Put together by hand, and by Booster
#
# Why do `assemble`'s lines stand in this order? Each strategy works on what the one before has left. Tensor parallelism
# goes first, for it needs to know whole matrices. The pipeline takes this rank's blocks of the cut model, and neither knows
# nor cares that they are cut: what is between blocks is whole on each tp rank, and each sends it to its own
# peer. Data parallelism comes last: the replicas of *this stage's cut part* sum their gradients, and the pipeline tells
# them when one is complete (in the last microbatch's backward, and not before).
#
# One thing nobody can do alone is to clip: the norm is that of all gradients, on all ranks. So it is asked along all
# three axes. Here is a step by hand, and then by `Booster`, which does the same for any training script. Both are held
# against one process, in float64.


# %%
def by_hand(batch):
    mesh = Mesh(Layout(dp=2, pp=2, tp=2))
    pipe, mine = assemble(mesh.dp, mesh.pp, mesh.tp), vit_hybrid.local_rows(batch, mesh.dp)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        loss = pipe.step(mine).loss
        norm = precision.step(optimizer, [mesh.dp, mesh.pp, mesh.tp], max_norm=1.0).norm
    return loss, norm, full_state_dict(pipe.module, mesh.pp, [mesh.dp, mesh.tp])


def by_booster(batch):
    plugin = hpnb.HybridParallelPlugin(
        tp_size=2, pp_size=2, num_microbatches=M, max_norm=1.0, precision="fp64"
    )
    booster, model = hpnb.Booster(plugin=plugin), vit_tensor.float64_vit(TINY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        found = booster.execute_pipeline(
            iter([vit_hybrid.local_rows(batch, plugin.mesh.dp)]), model, optimizer=optimizer
        )
        optimizer.step()
    weights = full_state_dict(model.unwrap(), plugin.mesh.pp, [plugin.mesh.dp, plugin.mesh.tp])
    return found["loss"], optimizer.last_step.norm, weights


def by_one(batch):
    model = vit_tensor.float64_vit(TINY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.detach(), norm, model.state_dict()


# %%
def three_ways():
    batch = vit_hybrid.leaf_batch(leaves, IMAGES8)
    loss, norm, weights = by_one(batch)
    off = {}
    for way in (by_hand, by_booster):
        mine = way(batch)
        value = loss if mine[0] is None else mine[0]  # the last stage has it
        off[way.__name__] = [
            step_timing.relative_distance([a], [b]) for a, b in ((value, loss), (mine[1], norm))
        ]
        off[way.__name__].append(
            step_timing.relative_distance([mine[2][n] for n in weights], weights.values())
        )
    return off


found = eight.run(three_ways)
rows = [(way, *(f"{max(off[way][i] for off in found):.0e}" for i in range(3))) for way in found[0]]
lesson.table(
    ("way", "loss", "norm before clipping", "weights"),
    rows,
    "off from one process after three clipped steps, the worst of 8 ranks",
)
assert max(max(off) for each in found for off in each.values()) < 1e-12

# %% [markdown]
# Rounding, and nothing else. What `Booster` adds is what you would forget: seeds for dropout, loss scaling, buffers,
# ZeRO, checkpoints. What cannot compose is refused before anything runs.
#
# ### An autopsy
#
# Two axes of equal size are two groups of equal size, and no shape tells them apart. A colleague passes them in the wrong
# places: `assemble(mesh.tp, mesh.pp, mesh.dp)`. The matrices are now shared by ranks that have *different samples*. Each
# adds its part of a product to somebody else's. Nothing raises. Does it train?


# %%
def train(swapped):
    mesh = Mesh(Layout(dp=2, pp=2, tp=2))
    pipe = assemble(mesh.tp, mesh.pp, mesh.dp) if swapped else assemble(mesh.dp, mesh.pp, mesh.tp)
    optimizer, log = torch.optim.AdamW(pipe.parameters(), lr=1e-3), []
    batch = vit_hybrid.local_rows(vit_hybrid.leaf_batch(leaves, IMAGES8), mesh.dp)
    for _ in range(16):
        optimizer.zero_grad()
        loss = pipe.step(batch).loss.item()
        optimizer.step()
        log.append(
            (
                loss,
                max(
                    vit_hybrid.replica_distance(vit_hybrid.replicated_parameters(pipe.module), axis)
                    for axis in (mesh.dp, mesh.tp)
                ),
            )
        )
    with hpnb.record.traffic() as t:
        pipe.step(batch)
    return log, t.messages


runs = {"right": eight.run(train, False), "dp and tp swapped": eight.run(train, True)}
losses, apart = ({run: [step[i] for step in ranks[0][0]] for run, ranks in runs.items()} for i in (0, 1))
ends = ", ".join(f"{run} {series[0]:.2f} to {series[-1]:.2f}" for run, series in losses.items())
plot.show(
    plot.drift(
        losses,
        apart,
        title="measured · 8 ranks: the loss, and copies of norms and embeddings",
        between="copies",
    ),
    alt=f"Losses: {ends}; both fall. The copies stay equal if right, and part from the first step if swapped.",
)
maps = {
    run: host_traffic.recorded_traffic([messages for _, messages in ranks], 1024)
    for run, ranks in runs.items()
}
plot.show(
    figures.atlas(maps, host=4, title="measured · 8 ranks on two hosts of 4: where the bytes fall"),
    alt="The two atlases; if swapped, the hot squares lie across the border, in the colour of dp.",
)
lesson.field_guide.add(
    "the loss is finite and falls, as fast as it should or faster; whole weights part by rank; a step is slow on several hosts",
    "the traffic atlas: do the hot squares lie where tp was to be? copies of norms and embeddings, axis by axis",
    "dp's and tp's groups have changed places, so ranks with different samples share matrices",
    notebook="04",
)
lesson.field_guide.show()

# %% [markdown]
# It trains. The loss is finite, and falls, for what the ranks compute together is *some* function of two batches with
# enough weights to learn them by heart. It is no ViT. Put its parts together, and the model that you would save has
# never been run by anybody.
#
# Two instruments see it at once, with no second run to compare. The copies: norms and embeddings are whole on all ranks and
# must stay equal; along the axis that is now cut they get gradients of different samples. And the atlas: hot squares in dp's
# colour, over the border. A step that is slow on two hosts and fast on one is this symptom's other face.
#
# **Takeaway.** A falling loss proves nothing. Who has which samples, which copies are equal, and who talks how often can each
# be checked in one line.
#
# ### Exercise 3: four healthy curves
#
# *Diagnose, 15 minutes; it returns to 01.* You get `run` of a few steps on dp 2 x tp 2, right or with a fault, and all losses
# fall. `run.same_samples["dp"]` says whether ranks along dp were given the same samples, `run.copies["dp"]` how far copies of
# what is not cut are apart along dp, `run.calls["dp"]` how many collectives a step made along it; the same for `"tp"`. Return
# `"right"`, `"swapped"`, `"not dealt out"` (01's sampler that gives everybody everything) or `"not reduced"` (no one sums
# gradients over dp). The check runs all four on 4 ranks.
#
# Hint: which of the faults leave copies equal? Which of the others is silent along dp?


# %% tags=["stub-3"]
def diagnose(run): ...


# %% tags=["check-3"]
lesson.check(exercises.diagnose, diagnose)

# %% [markdown]
# <details><summary>Solution</summary>
#
# The curve that falls least is the right one: it has twice the samples to learn.
#
# ```python
# def diagnose(run):
#     if run.same_samples["dp"]:
#         return "not dealt out"
#     if max(run.copies.values()) == 0:
#         return "right"
#     return "not reduced" if run.calls["dp"] == 0 else "swapped"
# ```
# </details>

# %% [markdown]
# ## A norm counted once
#
# Clipping scales all gradients by one number, made of the norm of all of them. On a mesh a gradient may be on one rank,
# on several, or in parts:
#
# | | along dp | along pp | along tp |
# |---|---|---|---|
# | a matrix that is cut | equal | one stage has it | parts |
# | a norm, an embedding | equal | one stage has it | equal |
# | a tied weight (one table at both ends of a GPT-2: 06) | equal | two stages have it | parts |
# | anything under ZeRO 3 | parts | one stage has it | as above |
#
# Sum the squares of all ranks, and what is equal on several counts several times. Sum only those of your own, and each rank
# clips by another factor: copies part, as in the autopsy. The cell does both, and asks `placement`, which knows of every
# parameter along which axes the ranks hold different parts.


# %%
def norms():
    mesh = Mesh(Layout(dp=2, pp=2, tp=2))
    pipe = assemble(mesh.dp, mesh.pp, mesh.tp)
    pipe.step(vit_hybrid.local_rows(vit_hybrid.leaf_batch(leaves, IMAGES8), mesh.dp))
    own = sum(p.grad.square().sum() for p in pipe.parameters())
    everybody, half = own.clone(), own.clone()
    dist.all_reduce(everybody)
    for axis in (mesh.pp, mesh.tp):
        dist.all_reduce(half, group=axis.group)
    once = total_norm(pipe.parameters(), [mesh.dp, mesh.pp, mesh.tp])
    places = {
        n: "".join(f"{a:>4}" for a in sorted(placement_of(p).axes)) for n, p in pipe.module.named_parameters()
    }
    return own.sqrt().item(), everybody.sqrt().item(), half.sqrt().item(), once.item(), places


def norm_of_one():
    model = vit_tensor.float64_vit(TINY)
    model(**vit_hybrid.leaf_batch(leaves, IMAGES8)).loss.backward()
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


found, right = eight.run(norms), eight.run(norm_of_one)[0]
ways = {f"its own parts, rank {r}": found[r][0] for r in (0, 2)}
ways |= {
    "all ranks, all they have": found[0][1],
    "over pp and tp alone": found[0][2],
    "each element once": found[0][3],
}
lesson.table(("what is summed", "norm", "times one process's"), [(way, f"{n:.6f}", f"{n / right:.6f}") for way, n in ways.items()],
             "the norm of one gradient", f"{sum('tp' in axes for axes in found[0][4].values())} of rank 0's {len(found[0][4])} "
             "parameters are cut along tp, and all along pp: another stage has others.")  # fmt: skip

# %% [markdown]
# Over pp and tp alone looks like care, and is worse than wrong: all ranks agree, the loss falls, and norms, embeddings and whatever
# else is not cut count twice, so that all is clipped too hard.
#
# ### Exercise 4: a norm counted once
#
# *Implement, 20 minutes.* Return the norm of all gradients, the same on every rank. `parameters` are those that this rank
# holds and that have a `.grad`; `axes` are dp, pp and tp. `placement_of(p).axes` are the names of those along which the ranks
# hold different parts of p; `placement_of(p).tied_to` is not None where p's gradient is counted already, on another stage. The
# check wants one process's norm for a ViT, a GPT-2 with a tied embedding over two stages, and ZeRO 3, with at most three small messages.
#
# Hint: what is equal on c ranks may count 1/c on each of them. Then a plain sum over all ranks is right.


# %% tags=["stub-4"]
def norm(parameters, axes): ...


# %% tags=["check-4"]
lesson.check(exercises.global_norm, norm)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def norm(parameters, axes):
#     squares = torch.zeros((), dtype=torch.float64)
#     for p in parameters:
#         where, copies = placement_of(p), 1
#         for axis in axes:
#             copies *= 1 if axis.name in where.axes else axis.size
#         if where.tied_to is None:
#             squares += p.grad.square().sum() / copies
#     for axis in axes:
#         dist.all_reduce(squares, group=axis.group)
#     return squares.sqrt()
# ```
# </details>

# %% [markdown]
# ## Change layout mid-run
#
# A checkpoint belongs to the model, not to the layout. What is saved are whole tensors by the model's names (in pieces, so that no
# rank ever has all of them), and whoever loads takes its parts. So a run may go on elsewhere: on fewer ranks, or with another
# axis when the hosts you are given change.
#
# The cell trains a small ViT on Beans for four epochs, with AdamW, clipped, and a cosine. Ranks get fewer on the way: eight, then four, and for the
# last two epochs two, each time along other axes. It evaluates after each part. One process trains beside it, from the same
# start on the same batches.

# %%
others = hpnb.data.beans("validation", image_size=32)
recipe = vit_hybrid.LeafRecipe(ViTSize(48, 2, 4, 192, 8, 32), *map(vit_hybrid.in_memory, (leaves, others)))
LEGS = {"8 ranks: dp 2 x pp 2 x tp 2": (eight, 1, {"pp_size": 2, "tp_size": 2, "num_microbatches": 2}),
        "4 ranks: dp 2 x tp 2, ZeRO 2": (hpnb.Ranks(4, device="cpu"), 2, {"tp_size": 2, "zero_stage": 2}),
        "2 ranks: pp 2, ZB-H1": (hpnb.Ranks(2, device="cpu"), 4, {"pp_size": 2, "num_microbatches": 4, "pp_style": "zb-h1"})}  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    legs = {leg: vit_hybrid.with_losses(ranks.run(vit_hybrid.train_leg, recipe, until, f"{folder}/run", knobs))
            for leg, (ranks, until, knobs) in LEGS.items()}  # fmt: skip
    alone, last = vit_hybrid.serial_run(recipe, f"{folder}/one")
losses = [loss for series, _ in legs.values() for loss in series]
off = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
plot.show(
    plot.by_layout([(leg, series) for leg, (series, _) in legs.items()], alone,
                   title=f"measured · one run on three layouts; from one process's loss {off:.0e} at most"),
    alt=f"The loss falls from {losses[0]:.2f} to {losses[-1]:.2f} over three layouts and lies on the curve of one process.",
)  # fmt: skip
rows = [(leg, row["epoch"], *(f"{row[each]:.4f}" for each in ("loss", "eval_loss", "eval_accuracy")))
        for leg, row in [*((leg, row) for leg, (_, row) in legs.items()), ("one process", last)]]  # fmt: skip
share = max(hpnb.data.beans_cifar10_mrpc.BEANS_COUNTS["validation"]) / len(recipe.test)
lesson.table(("layout", "epoch", "loss", "validation loss", "accuracy"), rows, f"Beans, {len(leaves):,} leaves to train, {len(recipe.test)} to validate",
             f"Always saying the commonest class would give {share:.2f}; with {len(recipe.test)} leaves an accuracy is known to 0.04 or so.")  # fmt: skip
assert off < 1e-6
assert last["eval_accuracy"] > 0.5

# %% [markdown]
# The colours change and the curve does not: momenta, learning rate and the order of samples went along. (In float64, so that you
# can see it. In 16 bits the curves would part as those of two serial runs do
# that sum in another order.) On the *same* layout a resumed run is equal bit for bit.
#
# From scratch, on a thousand leaves of 32 x 32 pixels, well over half are told right where guessing tells a third. What matters
# is that it is the same number as one process's. Pretrained weights go in by `booster.load_model`, into any layout too.
#
# ### Exercise 5: other shares of a tensor
#
# *Implement, 20 minutes.* How does a tensor get from four shares to three? Its `n` rows are dealt over ranks 0 to old-1, as
# evenly as can be (`comm.split_sizes(n, old)`: the first ranks get one more). They are to be dealt over 0 to new-1. Return the
# messages: a list of `(source, target, start, stop)`, rows of the whole tensor that source has and target lacks. The check
# carries them out, and lets no row travel that need not.
#
# Hint: two ranges overlap from the larger start to the smaller stop.


# %% tags=["stub-5"]
def moves(n, old, new): ...


# %% tags=["check-5"]
lesson.check(exercises.reshard, moves)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def moves(n, old, new):
#     def ends(ranks):
#         sizes = comm.split_sizes(n, ranks)
#         return [(sum(sizes[:r]), sum(sizes[: r + 1])) for r in range(ranks)]
#
#     found = []
#     for source, (a, b) in enumerate(ends(old)):
#         for target, (c, d) in enumerate(ends(new)):
#             if source != target and max(a, c) < min(b, d):
#                 found.append((source, target, max(a, c), min(b, d)))
#     return found
# ```
# </details>

# %% [markdown]
# Last, the ledger: each layout that ran on your machine so far, here and in the notebooks before. 08 reads it.

# %%
lesson.ledger.show()

# %% [markdown]
# ## What to remember
#
# - tp talks four times a block, pp once a microbatch and cut, dp once a step. That order is the order of their need.
# - On a mesh the three laws stay, but pp's is divided by t, and with a pipeline dp hides behind 1/m of the backward.
# - tp inside a host. Between hosts pp sends fewest bytes, and dp hides best: count bytes, then time.
# - Cut matrices first, then stages, then replicate what is left. Clip over all three.
# - What is equal on c ranks counts 1/c on each.
# - Groups of equal size can be swapped without an error. Look at samples, copies and calls.
# - A checkpoint of whole names goes to any layout, in the middle of a run.
#
# **When not to use this.** When one axis does: each further one adds its own waiting, and its own way to fail. When the model
# fits a device and tokens are many: dp alone (01). When it fits one host: tp or pp in it, dp between. A third axis is for
# models that do not fit a host, or for batches too small for dp alone.
#
# **Papers.** Shoeybi et al. 2019, *Megatron-LM* (1909.08053). Narayanan et al. 2021, *Efficient large-scale language model
# training on GPU clusters using Megatron-LM* (2104.04473; all three axes, and where they lie). Rajbhandari et al. 2020, *ZeRO*
# (1910.02054). Pascanu et al. 2013, *On the difficulty of training recurrent neural networks* (1211.5063; clipping by the global
# norm). Patarasuk & Yuan 2009 (rings).
