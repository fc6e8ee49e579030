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
# # Which axis needs the fastest links?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hpnb/hpnb/blob/main/notebooks/04_vit_hybrid_parallel.ipynb)
# [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/hpnb/hpnb/blob/main/notebooks/04_vit_hybrid_parallel.ipynb)
#
# **The question.** You know three ways to split a training step: by samples, layers and matrices. Large models use all
# three at once, and each is then called an *axis*: dp, pp and tp. A *node* is a machine with several GPUs and fast links inside;
# links between nodes are slow. Which axis needs the fast links, and how do we combine the three exactly?
#
# **You will be able to** write a hybrid step by hand and with `Booster`; compare what the axes ask of a link; record
# who sends to whom, and place axes on nodes; find swapped process groups behind a falling loss; compute a gradient
# norm that counts each element once; continue a run on another layout.
#
# **You should know** gradient buckets from notebook 01, 1F1B and its bubble from 02, and column- and row-parallel layers
# from 03.
#
# **Time.** 30 minutes to read, 2 to run, 35 for the core exercises and 45 for the extra ones.
#
# **Two questions to recall.** From 02: what does a pipeline send, and what does it waste? From 03: what happens to the ratio of
# compute to communication when the batch of a tensor-parallel group grows?
#
# <details><summary>Answers</summary>
#
# A pipeline sends at each cut the hidden states of each microbatch forward and their gradient back. With $p$ stages and $m$ microbatches, each rank is idle in $p-1$ of $m+p-1$ slots: the bubble.
#
# The ratio does not change, because $4.5\,h/((t-1)\rho)$ contains no batch. Here h is the hidden size, t the ranks of the group, and ρ the FLOPs that a rank does while it sends a byte.
# </details>
#
# Times on this page, and the bytes beside them, are from <data value="04.hardware">4 x NVIDIA H100 80GB HBM3</data>. All else runs on CPU processes.

# %% tags=["setup"]
# fmt: off
import importlib.util
assert importlib.util.find_spec("hpnb"), "run %pip install hpnb, then this cell again"
import tempfile, torch, torch.distributed as dist
import hpnb
from hpnb import Layout, Mesh, comm, lesson, plot, theory
from hpnb.grad_norm import total_norm
from hpnb.lesson.exercises import vit_hybrid_parallel as exercises
from hpnb.lesson.figures import vit_hybrid as figures
from hpnb.lesson.programs import rank_traffic, vit_hybrid
from hpnb.lesson.programs.device_timing import timed_ranks
from hpnb.lesson.programs.vit_pipeline import microbatch_loss
from hpnb.pipeline_parallel import cut, full_state_dict, layers, schedules
from hpnb.pipeline_parallel.microbatches import split_batch
from hpnb.placement import placement_of
from hpnb.tensor_parallel import parallelize

N, M = min(4, timed_ranks()), 2  # ranks that are timed; microbatches
pool, eight = hpnb.Ranks(N), hpnb.Ranks(8, device="cpu")  # they stay to the end
sizes, SMALL = lesson.choose_sizes("04", pool), vit_hybrid.SMALL
SIZE, DTYPE, IMAGES = sizes.size, sizes.dtype, sizes.batch
name = f"ViT, {SIZE.layers} blocks of {SIZE.hidden}, {IMAGES} images"
leaves = vit_hybrid.in_memory(hpnb.data.beans("train", image_size=32))
here = lesson.banner(N, model=name, data=leaves.describe(), sizes=sizes,
                     reading="8 ranks train a small ViT on the CPU: bytes, not times")

# %% [markdown]
# ## Three axes, one mesh
#
# A *layout* such as dp 2 x pp 2 x tp 2 makes a *mesh* of eight ranks and gives each rank three coordinates. Ranks that differ
# in a single coordinate form a group, and groups communicate. We call the sizes of the axes d, p and t. A microbatch has b
# samples of s tokens of h numbers.
#
# | axis | the coordinate says | a rank stores | its group sends |
# |---|---|---|---|
# | dp | which samples | the same weights as its group | gradients of these weights, once a step |
# | pp | which of the l blocks | l/p blocks | hidden states (b, s, h) and their gradient, for each microbatch at each cut |
# | tp | which part of a matrix | 1/t of each matrix of its blocks | activations (b, s, h): four all-reduces for each microbatch in each block |
#
# The p x t ranks with the same dp coordinate hold a copy of the model, a *replica*.
#
# The coordinates are the digits of a rank's number, the outermost first. We write dp > pp > tp if dp is the outermost axis.
# This order matters, because launchers number ranks node by node.

# %%
layout = Layout(dp=2, pp=2, tp=2)  # nested dp > pp > tp by default
title = "tp joins neighbours, pp joins pairs on a node, dp joins the two nodes"
lesson.show(plot.mesh(layout, hosts_of=4, title=title))
parts = eight.run(vit_hybrid.stored_parts, layout)
title = "A rank holds one stage, half of each matrix of its block, half of the samples"
lesson.show(figures.stored_parts(parts, layout, title=title))
replicas = [[rank.placements for rank in ranks] for ranks in (parts[:4], parts[4:])]
lesson.claim("Both replicas store the same parts", replicas[0] == replicas[1])

# %% [markdown]
# A layer computes x A. The second figure draws A with a row for each input and a column for each output.
#
# **Takeaway.** The order of the axes decides which groups stay on a node.
#
# ### Exercise 1: rank to coordinates
#
# *Extra. Implement, 10 minutes.* Return `{"dp": i, "pp": j, "tp": k}` of `rank`. `sizes` maps each axis to its size, and `order`
# names the axes from the outermost to the innermost, such as `("dp", "pp", "tp")`.
#
# <details><summary>Hint</summary>
#
# The rank is a number whose digits are its coordinates. Which digit does a division with remainder give?
# </details>


# %% tags=["stub-1"]
def coordinates(rank, sizes, order): ...


# %% tags=["check-1"]
lesson.check(exercises.coordinates, coordinates)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def coordinates(rank, sizes, order):
#     at = {}
#     for axis in reversed(order):
#         rank, at[axis] = divmod(rank, sizes[axis])
#     return at
# ```
# </details>

# %% [markdown]
# ## A hybrid step, by hand and by Booster
#
# First, *tp* shards the blocks' matrices, and *pp* keeps this rank's stage. Between two blocks, every tp rank has the complete hidden
# states. At a cut, it sends them to the rank of the next stage with the same tp coordinate. *dp* comes last, because it averages
# the gradients of this rank's shards.
#
# ```text
#                  replica 0: half of the samples       replica 1: the other half
#
# pp stage 0       rank 0 <-- all-reduce --> rank 1     rank 4 <-- all-reduce --> rank 5
#                    |         (b, s, h)        |         |         (b, s, h)        |
#                (b, s, h)                  (b, s, h) (b, s, h)                  (b, s, h)
#                    |                          |         |                          |
# pp stage 1       rank 2 <-- all-reduce --> rank 3     rank 6 <-- all-reduce --> rank 7
#
# once a step      average the gradients of ranks 0 and 4, 1 and 5, 2 and 6, 3 and 7
# ```
#
# The step runs all forwards, then all backwards. Each phase sends in one direction, so
# blocking sends are safe. The all-reduces of tp happen inside
# `layer.run` and its backward: they are f and g of notebook 03, around each pair of sharded matrices.


# %%
def hybrid_step(model, stage, samples, mesh, shape):
    pp, inputs, outputs = mesh.pp, [], []
    first, last = pp.rank == 0, pp.rank == pp.size - 1
    for microbatch in split_batch(samples, M):  # pp: all forwards
        hidden = None
        if not first:
            hidden = comm.receive(shape, pp, pp.rank - 1, torch.float64).detach()
            hidden.requires_grad_()
        inputs.append(hidden)
        for layer in stage:
            hidden = layer.run(hidden, microbatch)  # tp: all-reduces inside
        if last:
            hidden = microbatch_loss(hidden, microbatch) / M
        else:
            comm.send(hidden.detach(), pp, pp.rank + 1)
        outputs.append(hidden)
    for hidden, output in zip(inputs, outputs, strict=True):  # pp: all backwards
        grad = None if last else comm.receive(shape, pp, pp.rank + 1, torch.float64)
        output.backward(grad)  # tp: all-reduces inside
        if not first:
            comm.send(hidden.grad, pp, pp.rank - 1)
    for p in model.parameters():
        if p.grad is not None:  # of this rank's stage
            dist.all_reduce(p.grad, group=mesh.dp.group)  # dp: average
            p.grad /= mesh.dp.size


# %% [markdown]
# In the library, `parallelize` shards the model, `Pipeline` keeps one stage and runs any schedule of
# notebook 02, and `DataParallel` averages in buckets during the last microbatch's backward. `assemble` combines them. Eight
# ranks train a small ViT: 2 blocks of h = 48, and images of 32 x 32 pixels, which are s = 17 tokens. A replica's batch is split into M = 2
# microbatches.


# %%
def small_vit():  # by a fixed seed: the same weights on all ranks
    return hpnb.models.vit(SMALL, classes=3, dtype=torch.float64)


def by_hand(samples, mesh):
    model = parallelize(small_vit(), mesh.tp)
    stage = cut(layers.layers(model), mesh.pp.size)[mesh.pp.rank]
    shape = len(samples["labels"]) // M, SMALL.tokens, SMALL.hidden  # (b, s, h)
    hybrid_step(model, stage, samples, mesh, shape)
    return model


def assemble(dp, pp, tp):
    model = parallelize(small_vit(), tp)  # shards of the blocks' matrices
    schedule = schedules.make("1f1b", pp.size, M)
    pipe = hpnb.Pipeline(model, pp, schedule, microbatch_loss)  # one stage of them
    pipe.gradients = hpnb.DataParallel(pipe.module, dp)  # averaged over replicas
    return pipe


def by_classes(samples, mesh):
    pipe = assemble(mesh.dp, mesh.pp, mesh.tp)
    pipe.step(samples)
    return pipe.module


# %% [markdown]
# `Booster` wraps the model and optimizer of a training script and does the same, in five lines.


# %%
def by_booster(samples, mesh):
    layout = {"pp_size": 2, "tp_size": 2, "num_microbatches": M}
    model = small_vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plugin = hpnb.HybridParallelPlugin(precision="fp64", **layout)  # 1
    booster = hpnb.Booster(plugin=plugin)  # 2
    model, optimizer, *_ = booster.boost(model, optimizer)  # 3
    booster.execute_pipeline(iter([samples]), model, optimizer=optimizer)  # 4
    optimizer.step()  # 5
    return model.unwrap()


# %% [markdown]
# Do all three give the gradients of one process? Each rank compares its shards in float64. A *relative distance* is the length of the
# difference over the length of the right gradient.


# %%
def compare_with_one_process(batch):
    mesh, serial = Mesh(Layout(dp=2, pp=2, tp=2)), small_vit()
    serial(**batch).loss.backward()
    samples = vit_hybrid.local_samples(batch, mesh.dp)  # this replica's
    ways, distance = (by_hand, by_classes, by_booster), vit_hybrid.gradient_distance
    return {f.__name__: {"gradients": distance(f(samples, mesh), serial)} for f in ways}


batch = next(vit_hybrid.leaf_batches(leaves, 32))
exact = lesson.Parity.worst_of(eight.run(compare_with_one_process, batch))
same = "the" if exact.equal else "not the"
lesson.show(exact, title=f"dp 2 x pp 2 x tp 2 gives {same} gradients of one process")
lesson.claim("A hybrid step is exact in all three ways", exact.equal)

# %% [markdown]
# <details><summary>In your tools: a mesh of three axes</summary>
#
# PyTorch, with one process group for each axis:
#
# ```python
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from torch.distributed.pipelining import PipelineStage, Schedule1F1B
# from torch.distributed.tensor.parallel import parallelize_module
#
# mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
# pp = mesh["pp"]
# parallelize_module(stage_module, mesh["tp"], plan)
# fully_shard(stage_module, mesh=mesh["dp"])  # averages over dp, and shards: notebook 05
# stage = PipelineStage(stage_module, pp.get_local_rank(), 2, device, group=pp.get_group())
# Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
# ```
#
# Megatron-Core: `--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2`; dp is the number of ranks divided by both. DeepSpeed:
# `PipelineModule(..., topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2))`. accelerate:
# `MegatronLMPlugin(tp_degree=2, pp_degree=2)`.
# </details>
#
# **Takeaway.** Shard matrices, keep one stage, replicate it. Every message goes along one axis.
#
# ## What each axis asks of a link
#
# For each axis, notebooks 01 to 03 derived a ratio: the time to compute divided by the time to send. For dp only the
# backward counts as compute. ρ is the FLOPs that a rank does while it sends a byte, and T the tokens of a replica.
#
# | axis | sends | can overlap with | ratio of compute to communication |
# |---|---|---|---|
# | dp | gradients, once a step | the backward | T/(ρ(d-1)/d) |
# | pp | hidden states, for each microbatch at each cut | other microbatches | 18 h (l/p)/ρ |
# | tp | activations, four times a block | weight gradients | 4.5 h/((t-1)ρ) |
#
# Take a ViT-L/16 (h = 1,024, l = 24) on eight ranks of 400 TFLOP/s along one axis. For dp, each rank has 64 images of 197
# tokens, T = 12,608.
#
# | axis | NVLink 4, ρ = 889 | InfiniBand NDR, ρ = 8,000 | 100 Gb Ethernet, ρ = 32,000 |
# |---|---|---|---|
# | dp | 16 | 1.8 | 0.45 |
# | pp | 62 | 6.9 | 1.7 |
# | tp | 0.74 | 0.082 | 0.021 |
#
# For dp and pp, a ratio below 1 means that sending takes longer than the compute that it can overlap with. dp's ratio stays above 1
# over InfiniBand, pp's even over Ethernet. Above 1, by formula, dp alone adds only its last bucket's all-reduce to the
# compute of a step. pp alone adds its bubble, and the first and last microbatch's sends.
#
# For tp, the ratio counts all compute, not only weight gradients. Notebook 03 calls a link fast enough from 1 on. That does not mean
# that tp overlaps: if nothing does, a step takes 1 + 1/ratio times its compute. On eight ranks, that is 2.35 times over
# NVLink and 13 over InfiniBand.
#
# In a pipeline, a gradient is complete only in the backward of the last of m microbatches. So dp can overlap with
# 1/m of the backward, and dp's ratio is divided by m: with m = 16, 1.8 becomes 0.11.
#
# <details><summary>Does this hold on a mesh?</summary>
#
# A rank has 1/(p t) of the parameters, which shrinks dp's gradient and the backward alike: the
# ratio stays. tp has l/p blocks to compute and to all-reduce: its ratio stays, too. pp's ratio is divided by t, because
# computing takes 1/t as long and messages stay as large.
# </details>
#
# ### The same step on slower links
#
# N ranks train on the same batch three times: split along dp only, pp only (1F1B with m = 8
# microbatches), and tp only. In theory, each rank does 1/N of the computing. So each prediction is the time of
# 1/N of the batch on one rank, plus what ranks wait for along that axis. Communication that a rank has to wait for is called *exposed*.
#
# The next cell asks you to guess a ranking. Without a guess, a *rule of thumb* takes its place: here, fewest bytes first.

# %%
gradient = DTYPE.itemsize * SIZE.parameters(classes=3)  # bytes
hidden = DTYPE.itemsize * IMAGES * SIZE.tokens * SIZE.hidden  # of all microbatches
sent = {"dp": theory.bytes_sent("all_reduce", gradient, N),
        "pp": 2 * (N - 1) / N * hidden,
        "tp": 4 * SIZE.layers * theory.bytes_sent("all_reduce", hidden, N)}  # fmt: skip
question = f"{N} ranks, a tenth of the bandwidth: along which axis is a step shortest?"
by_bytes = sorted(sent, key=sent.get)
lesson.predict("04.tenth", question, kind="ranking", rule_of_thumb=by_bytes)
card, m, buckets = lesson.machine_card(N), 8, 8
schedule = schedules.make("1f1b", N, m)
steps = vit_hybrid.record_axes(pool, SIZE, IMAGES, DTYPE, schedule, buckets)
share = steps.alone.end  # seconds of a rank's part of the batch, nothing sent
busy = vit_hybrid.record_steps(card, steps)  # {axis: compute of the busiest rank}


def predict_steps(link):  # the backward is 2 / 3 of a rank's compute
    exposed = theory.exposed_seconds(2 / 3 * share, gradient, buckets, N, link)
    send = theory.seconds("send", hidden / m, 2, link)
    all_reduces = 4 * SIZE.layers * theory.seconds("all_reduce", hidden, N, link)
    # waits for the first microbatch there and the last one back: N - 1 cuts each way
    pipeline = (m + N - 1) / m * share + 2 * (N - 1) * send
    return {"dp": share + exposed, "pp": pipeline, "tp": share + all_reduces}


# %% [markdown]
# We *simulate* the steps on slower links, down to a hundredth of the bandwidth. Compute takes as long as recorded, communication as long as the link's latency and bandwidth say.

# %%
predicted, measured = predict_steps(card.link), steps.seconds
source = steps.source  # "measured"; "replayed" where ranks take turns
columns = {"predicted, sent by a rank (B)": sent, "counted (B)": steps.sent}
lesson.show(predicted=predicted, **steps.by_source, unit="s", columns=columns,
            title=f"{IMAGES} images along one axis")  # fmt: skip
slower = [10 ** (k / 8) for k in range(17)]  # 1 to 100 times
links = [theory.Link(card.latency, card.bandwidth / times) for times in slower]
simulated = {axis: [steps.simulate(link)[axis] for link in links] for axis in sent}
title = vit_hybrid.grows_most_title(simulated)
lesson.show(figures.slower_link(slower, simulated, measured, title, source))
tenth = {axis: seconds[8] for axis, seconds in simulated.items()}
ranking = sorted(sent, key=predict_steps(links[8]).get)
lesson.reveal("04.tenth", tenth, predicted=ranking, source="simulated")
added, at_tenth = vit_hybrid.record_added(simulated)
vit_hybrid.record_ratios(predicted, measured, simulated)
bubble = (N - 1) / m * share  # predicted
vit_hybrid.record_rest(share, bubble, busy, predicted, simulated, measured)
most = max(at_tenth, key=at_tenth.get)
lesson.claim("On a tenth of the bandwidth, tp's step grows by most", most == "tp")
lesson.claim("On a hundredth, more than dp's", (added["tp"], ">", added["dp"]))
lesson.claim("Yet dp's step is shorter", (measured["dp"], "<", measured["pp"]))
vit_hybrid.add_to_ledger(name, card, steps, sent, predicted)  # for 08's table

# %% [markdown]
# A slower link adds these times to the simulated steps:
#
# | bandwidth | dp adds | pp adds | tp adds |
# |---|---|---|---|
# | a tenth | <data value="04.tenth-added.dp">3.25 ms</data> | <data value="04.tenth-added.pp">8.65 ms</data> | <data value="04.tenth-added.tp">830 ms</data> |
# | a hundredth | <data value="04.added.dp">215 ms</data> | <data value="04.added.pp">121 ms</data> | <data value="04.added.tp">9.13 s</data> |
#
# tp, which sends most, is hit hardest. But bytes alone do not decide: pp sends fewest, yet on this link its step
# takes longer than dp's. Where do pp and tp spend their time?
#
# | a step | compute of the busiest rank | the rest | together |
# |---|---|---|---|
# | pp, predicted | <data value="04.predicted.share">115 ms</data> | <data value="04.rest.pp.predicted.rest">43.8 ms</data> | <data value="04.rest.pp.predicted.step">159 ms</data> |
# | pp, simulated | <data value="04.busy.pp">141 ms</data> | <data value="04.rest.pp.simulated.rest">42.9 ms</data> | <data value="04.rest.pp.simulated.step">184 ms</data> |
# | pp, <data value="04.source-of.pp">measured</data> | <data value="04.busy.pp">141 ms</data> | <data value="04.rest.pp.measured.rest">47.9 ms</data> | <data value="04.axes.pp.measured">189 ms</data> |
# | tp, predicted | <data value="04.predicted.share">115 ms</data> | <data value="04.rest.tp.predicted.rest">104 ms</data> | <data value="04.rest.tp.predicted.step">219 ms</data> |
# | tp, simulated | <data value="04.busy.tp">207 ms</data> | <data value="04.rest.tp.simulated.rest">114 ms</data> | <data value="04.rest.tp.simulated.step">321 ms</data> |
# | tp, <data value="04.source-of.tp">measured</data> | <data value="04.busy.tp">207 ms</data> | <data value="04.rest.tp.measured.rest">46.0 ms</data> | <data value="04.axes.tp.measured">253 ms</data> |
#
# The rest is the step less this compute: along pp the bubble, sending and waiting, along tp exposed all-reduces and waiting.
# The bubble is predicted as (N-1)/m of compute, <data value="04.rest.bubble">43.2 ms</data>.
#
# Along dp, the busiest rank computes <data value="04.busy.dp">118 ms</data> in a step of <data value="04.axes.dp.measured">119 ms</data>. To this, pp's
# measured step adds mostly the rest, and tp's mostly compute.
#
# <details><summary>Why the curves differ</summary>
#
# tp's curve rises from the start, because in the simulation nothing overlaps with its all-reduces.
#
# dp's last bucket is full when the backward ends. So its all-reduce is always exposed, and dp's curve rises a little. Once all of
# dp's all-reduces take longer than the backward, the curve bends, and every byte counts.
#
# Past the bend in dp's curve, pp's rises least, because pp sends the fewest bytes, partly during other microbatches.
# Before the bend, either of the two may rise less: pp's ranks wait on every link while the first microbatch
# goes from stage to stage, and the last one's gradient comes back.
# </details>
#
# <details><summary>How far to trust the curves</summary>
#
# Bytes are predicted exactly. Along pp they are a mean of the ranks, because inner stages send both ways and end stages one way.
#
# Times are not exact. As <data value="04.source">measured</data>, a step divided by its prediction is <data value="04.ratio.dp:.2f">1.03</data> for dp, <data value="04.ratio.pp:.2f">1.19</data> for pp
# and <data value="04.ratio.tp:.2f">1.15</data> for tp. Two errors are in such a ratio: that of compute and that of the rest. <data value="04.rest.signs">Along tp, compute is 91.9 ms longer than predicted and the rest 58.2 ms shorter. Along pp, compute is 25.8 ms longer than predicted and the rest 4.14 ms longer. Along tp the two errors partly cancel in the ratio.</data>
#
# **Compute.** Along pp, the busiest rank computes <data value="04.busy.pp">141 ms</data>, where <data value="04.predicted.share">115 ms</data> are predicted. A microbatch takes <data value="04.others">45.6 ms</data>
# on the other ranks together, where <data value="04.rest.bubble">43.2 ms</data> are predicted.
# Compute can be longer than predicted, because each microbatch and shard pays the fixed costs of operations again, and along tp all
# ranks repeat the norms. On a GPU, recorded compute can contain waits for the CPU, which launches operations. On a CPU, ranks send with
# the cores that compute. This page does not separate these reasons.
#
# **The rest.** It can be shorter, if messages are faster than latency and bandwidth say, or overlap with compute, which the simulation of tp
# leaves out. It can be longer, because ranks that come first wait for the last.
#
# Along pp, recorded compute limits the bubble, too. If all microbatches take equally long, the busiest rank idles at most as long as one
# microbatch takes, forward and backward, on the other N-1 ranks together, here <data value="04.others">45.6 ms</data>. It idles that long if all stages are equal
# or the last is the busiest. If an earlier stage is the busiest, it computes while later ranks finish, and idles less.
#
# **The curves** need not begin at their dots. dp's curve adds dp's messages to the step of one replica that sends nothing, which took <data value="04.predicted.share">115 ms</data>. On this link, simulated time divided by the dot's is <data value="04.near.dp:.2f">0.97</data> for dp, <data value="04.near.pp:.2f">0.97</data> for pp and <data value="04.near.tp:.2f">1.27</data> for tp.
# The shortest step here is along <data value="04.near.fastest">dp</data>. On a tenth of the bandwidth, the shortest step simulated is along <data value="04.tenth">dp</data>. Do not ask the figure which of two
# close curves is lower.
#
# Axes take turns in three rounds. In a round, each axis takes three steps, and the middle one counts. The step of an axis is the
# middle one of its three rounds. "This link" is <data value="04.link.from">measured as in notebook 00</data>. Its latency is <data value="04.link.latency">20.6 µs</data> and its bandwidth <data value="04.link.bandwidth">322 GB/s</data>.
# </details>
#
# <details><summary>On a laptop or a shared GPU</summary>
#
# Ranks of a CPU share memory bandwidth, so measured times vary from run to run. Ranks that share a GPU compute by turns:
# along tp each all-reduce ends a turn, and the next turn's compute includes the GPU's wait for the CPU's first launches.
# On a shared GPU, we time dp's step without sending, and add the calculated time of its all-reduces.
# </details>
#
# **Takeaway.** tp needs the fastest links. On the slowest link here, the step along <data value="04.added-least">pp</data> grows least. A pipeline pays for its bubble on every link.
# dp's step hardly grows while its all-reduces fit into the backward, so dp needs enough tokens per rank.
#
# ## Who sends to whom
#
# The links of an axis depend on where its ranks are. So
# `record.traffic` notes axis, bytes and ranks of every message. We count a collective's bytes as in a ring, from
# each rank to the next of its group. A *traffic atlas* has a square for each sender and receiver, darker for more bytes.
#
# We treat eight ranks as two nodes of four and nest the axes in three orders. The outermost lies between nodes. The
# rule of thumb is hpnb's default order.
#
# <details><summary>The bytes that we expect</summary>
#
# A message has 8 samples x 17 tokens x 48 numbers of 8 bytes. In a group of two, an all-reduce sends the bytes of its
# tensor from each rank. So we expect
#
# - along pp: 4 pipelines x 2 directions x 2 microbatches x message,
# - along tp: 8 ranks x 1 block x 4 all-reduces x 2 microbatches x message,
# - along dp: the gradients of 8 ranks. Those of the first stage are more, because it also has the embeddings.
#   So dp has two shades in the atlas, which differ little.
# </details>

# %%
dp_outside, pp_outside = ("dp", "pp", "tp"), ("pp", "dp", "tp")
orders = {"dp": dp_outside, "pp": pp_outside, "tp": ("tp", "pp", "dp")}
question = "Which axis sends the fewest bytes between the nodes if it is outermost?"
lesson.predict("04.outermost", question, kind="ranking", rule_of_thumb=dp_outside)


def record_step(batch, order):
    mesh = Mesh(Layout(dp=2, pp=2, tp=2, order=order))
    pipe = assemble(mesh.dp, mesh.pp, mesh.tp)
    samples = vit_hybrid.local_samples(batch, mesh.dp)
    pipe.step(samples)  # the first step also sends shapes
    with hpnb.record.traffic() as traffic:
        pipe.step(samples)
    return traffic.messages, sum(p.numel() for p in pipe.module.parameters())


traffic = {}  # {outermost axis: {(sender, receiver): {axis: bytes}}}
for axis, order in orders.items():
    messages, parameters = zip(*eight.run(record_step, batch, order), strict=True)
    # without messages under 1 kB, such as the loss
    traffic[axis] = rank_traffic.recorded_traffic(messages, least=1024)

# %%
message = 8 * SMALL.tokens * SMALL.hidden * 8  # bytes
gradients = 8 * sum(parameters)  # 8 bytes a number, of all ranks
predicted = {"dp": gradients, "pp": 4 * 2 * M * message,  # of 4 pipelines
             "tp": 8 * SMALL.layers // 2 * 4 * M * message}  # of 8 ranks # fmt: skip
count = rank_traffic.bytes_between_nodes
between = {axis: count(traffic[axis], node=4) for axis in orders}
panels = {" > ".join(order): traffic[axis] for axis, order in orders.items()}
title = "Counted: whichever axis is outermost is sent between nodes"
lesson.show(figures.atlas(panels, node=4, title=title))
title = "Bytes of a step between nodes, by the outermost axis"
lesson.show(predicted=predicted, counted=between, unit="B", title=title, key="04.sent")
ranking = sorted(predicted, key=predicted.get)
lesson.reveal("04.outermost", between, predicted=ranking, source="counted")
lesson.record("04.total", count(traffic["dp"], node=1), "B")  # each rank on a node
lesson.claim("tp sends most", (between["tp"], ">", max(between["dp"], between["pp"])))
lesson.claim("pp sends fewest", (between["pp"], "<", min(between["dp"], between["tp"])))
# Two numbers of the explorer, which is explained below, for the challenge's answer
explorer = lesson.explorers.layouts_on_nodes()
knobs = {"dp": 4, "pp": 4, "tp": 2, "between": "InfiniBand NDR"}
for axis in ("dp", "pp"):
    at = explorer.read(**knobs, order=" > ".join(orders[axis]))
    lesson.record(f"04.infiniband.{axis}", at["step / compute"])

# %% [markdown]
# Of <data value="04.total">5.42 MB</data> in a step, <data value="04.sent.tp.counted">3.34 MB</data> go between nodes with tp outermost, and only <data value="04.sent.pp.counted">836 kB</data> with pp.
#
# Fewer bytes need not give a shorter step. If the last microbatch's backward is longer than dp's all-reduces, only the last bucket
# is exposed. So hpnb nests dp outermost by default. With many microbatches that backward is short, and on a slow link all-reduces are
# long. Then pp outermost can win.
#
# The *explorer* above counts bytes between nodes and simulates the step of a model with 6.4 billion parameters,
# 500,000 tokens and 16 microbatches.
#
# **Challenge.** Take 32 ranks on nodes of 8, NVLink 4 inside, 100 Gb Ethernet between, and at most 16 GB of weights, gradients and
# optimizer state per rank, at 16 bytes a parameter. Reach a step of at most 1.3 times its compute. Why is the same layout with dp outermost too slow?
#
# <details><summary>Answer</summary>
#
# dp 4 x pp 4 x tp 2 with pp outermost takes 1.27 times its compute. We tried all sizes in the explorer: no others that fit reach 1.3.
# With these sizes only pp outermost does.
#
# pp outermost sends 49 GB between nodes, dp outermost 77 GB. A replica has T = 125,000 tokens, so dp's
# ratio is 125,000/(32,000 x 3/4) = 5.2. But dp can overlap only with the last of 16 microbatches, so the ratio that counts is
# 5.2/16 = 0.33: dp's all-reduces take three times as long as that backward. The bar of dp > pp > tp in the figure shows it. The
# exposed part along dp is 0.09 of the compute, and the step takes 1.34 times its compute.
#
# Over InfiniBand NDR the ratio that counts is 1.3, so only the last bucket is exposed. The two orders tie: <data value="04.infiniband.dp:.3f">1.248</data> times the compute with dp outermost,
# <data value="04.infiniband.pp:.3f">1.252</data> with pp outermost. So fewer bytes do not help there.
# </details>
#
# <details><summary>In your tools: the order of the axes</summary>
#
# PyTorch: the order of `mesh_dim_names` in `init_device_mesh`, the outermost first. Megatron-Core nests pp > dp > tp, and
# `--use-tp-pp-dp-mapping` makes it dp > pp > tp. DeepSpeed's `PipeModelDataParallelTopology` nests pipe > data > model.
# hpnb: `Layout(..., order=("pp", "dp", "tp"))`.
# </details>
#
# **Takeaway.** Keep tp inside a node. Of the other two, put between nodes the one with less exposed time.
#
# ### Exercise 2: place the axes
#
# *Core. Design, 15 minutes.* `job.traffic(order)` gives `{(sender, receiver): bytes}` of a step if the axes are nested in `order`,
# the outermost first. A node has `job.node` consecutive ranks. Return the order that sends the fewest bytes between nodes.
#
# <details><summary>Hint</summary>
#
# On which node is rank r? A ring over neighbours leaves its node at few of its hops, a ring over distant ranks at
# all of them. If the group of an axis does not fit on a node, it leaves the node anyway. Then it can pay to keep the other two axes inside.
# </details>


# %% tags=["stub-2"]
def place(job): ...


# %% tags=["check-2"]
lesson.check(exercises.place_axes, place)

# %% [markdown]
# <details><summary>Solution</summary>
#
# There are only six orders, so we try them.
#
# ```python
# def place(job):
#     from itertools import permutations
#
#     def between_nodes(order):
#         pairs = job.traffic(order).items()
#         return sum(n for (a, b), n in pairs if a // job.node != b // job.node)
#
#     return min(permutations(("dp", "pp", "tp")), key=between_nodes)
# ```
#
# In the check's third job, "tp does not fit a node", tp has 8 ranks and a node 6. There the best order
# puts tp outermost: it leaves the node at every hop, but in exchange the other two stay inside.
# </details>

# %% [markdown]
# ## Two silent mistakes
#
# ### Autopsy: two groups change places
#
# Our dp and tp groups both have two ranks, so no shape tells them apart. A colleague swaps them, `assemble(mesh.tp, mesh.pp,
# mesh.dp)`, while the data loader still splits samples over dp. Here is a row-parallel layer with samples x and weight A:
#
# ```text
#            correct: A sharded along tp             swapped: A sharded along dp
#
#            rank 0   x of replica 0, half 0 of A    rank 0   x of replica 0, half 0 of A
#            rank 1   x of replica 0, half 1 of A    rank 4   x of replica 1, half 1 of A
#            sum      x A of replica 0               sum      a part of x A of each replica
# ```
#
# Every all-reduce inside a block now adds numbers of two different images. We train the correct and the swapped model
# for an epoch on notebook 01's bean leaves. LayerNorms, embeddings and the head are replicated over dp and tp, so we also record
# whether copies stay equal.


# %%
def distance(parameters, axis):  # || w - w_0 || / || w_0 ||, w_0 of the first rank
    here = torch.cat([p.detach().flatten() for p in parameters])
    first = comm.broadcast(here, axis)
    return ((here - first).norm() / first.norm()).item()


def train(leaves, swapped):
    mesh = Mesh(Layout(dp=2, pp=2, tp=2))
    dp, tp = (mesh.tp, mesh.dp) if swapped else (mesh.dp, mesh.tp)
    pipe, log = assemble(dp, mesh.pp, tp), []
    copies = [p for p in pipe.parameters() if not placement_of(p).axes & {"dp", "tp"}]
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for batch in vit_hybrid.leaf_batches(leaves, 32, mesh.dp):
        optimizer.zero_grad()
        loss = pipe.step(batch).loss.item()
        optimizer.step()
        log.append((loss, {a.name: distance(copies, a) for a in (mesh.dp, mesh.tp)}))
    with hpnb.record.traffic() as traffic:
        pipe.step(batch)
    weights = full_state_dict(pipe.module, mesh.pp, [mesh.dp, mesh.tp])
    return log, weights, traffic.messages


others = vit_hybrid.in_memory(hpnb.data.beans("validation", image_size=32))
guess = vit_hybrid.record_guess(others)  # always the most common class

# %%
losses, distances, panels, first, last, accuracy = {}, {}, {}, {}, {}, {}
for run in ("correct", "swapped"):
    results = eight.run(train, leaves, run == "swapped")
    logs, weights, messages = zip(*results, strict=True)
    by_step = list(zip(*logs, strict=True))  # of all ranks
    losses[run] = [sum(loss for loss, _ in ranks) / 8 for ranks in by_step]
    distances[run] = [max(max(d.values()) for _, d in ranks) for ranks in by_step]
    panels[run] = rank_traffic.recorded_traffic(messages, least=1024)
    first[run], last[run] = sum(losses[run][:8]) / 8, sum(losses[run][-8:]) / 8
    accuracy[run] = vit_hybrid.evaluate(SMALL, weights[0], others)[1]
apart = {axis: max(d[axis] for _, d in by_step[-1]) for axis in ("dp", "tp")}  # swapped
title = vit_hybrid.swapped_title(losses, distances)
lesson.show(plot.drift(losses, distances, between="copies", title=title))
columns = {"loss, first 8 steps": first, "loss, last 8": last, "accuracy (%)": accuracy}
lesson.show(columns=columns, key="04.run", title="Training loss, validation accuracy")
title = "Swapped, the dp groups carry the all-reduces of tp, between nodes"
lesson.show(figures.atlas(panels, node=4, title=title))
lesson.record("04.apart", apart)
lesson.claim("The swapped model learns", (last["swapped"], "<", first["swapped"] - 0.1))
lesson.claim("Its saved weights beat guessing", (accuracy["swapped"], ">", guess + 6))
lesson.claim("Correct copies stay equal", (max(distances["correct"]), "==", 0))
lesson.claim("Swapped copies diverge along dp", (apart["dp"], ">", 0.01))
lesson.claim("They stay equal along tp", (apart["tp"], "==", 0))
vit_hybrid.add_to_field_guide()

# %% [markdown]
# The swapped model learns. The loss curves cross, so we average over 8 steps: its loss falls from <data value="04.run.swapped.loss-first-8-steps:.2f">1.12</data> to <data value="04.run.swapped.loss-last-8:.2f">0.94</data>. Its saved weights combine shards
# that saw different images. They classify <data value="04.run.swapped.accuracy">57.1 %</data> of the validation images correctly. Always guessing the most common class gets <data value="04.guess">33.8 %</data>.
# Loss and accuracy look right until you know the correct run, whose loss reaches <data value="04.run.correct.loss-last-8:.2f">0.80</data>. Its accuracy, <data value="04.run.correct.accuracy">55.6 %</data>, is no higher:
# on so few images, a few percent can be chance.
#
# <details><summary>Why does it learn at all?</summary>
#
# A rank applies its half of every matrix to its own samples. The other half comes from the other replica's samples, and acts like noise.
# </details>
#
# The table above is this page's row of the *field guide*.
#
# Two instruments need no correct run. The first is the distance of copies, which should be 0. Along tp it is <data value="04.apart.tp">0</data>. Along dp it ends
# at <data value="04.apart.dp:.2f">0.24</data> of their norm, because these ranks saw different samples and nobody averages their gradients.
#
# The second is the traffic atlas. Swapped, dp's squares between the nodes are darker than tp's: dp's groups carry the all-reduces
# inside blocks, and tp's groups the gradients.
#
# **Takeaway.** A falling loss proves little. Check who has which samples, which copies are equal, and who communicates how often.
#
# ### Exercise 3: four falling losses
#
# *Extra. Diagnose, 15 minutes.* The loss of each run falls. Say which fault it has.
#
# <details><summary>What it gets, and what the check wants</summary>
#
# You get `run` of a few steps on dp 2 x tp 2. `run.same_samples["dp"]` says
# whether ranks along dp had the same samples, `run.distances["dp"]` how far copies of norms and embeddings are apart along dp,
# and `run.collectives["dp"]` how many collectives a step made along it; the same for `"tp"`. Return `"correct"`, `"swapped"`,
# `"same samples"` if all replicas train on the same samples, or `"not reduced"` if nobody averages gradients over dp.
# </details>
#
# <details><summary>Hint</summary>
#
# Which of the faults leave copies equal? Which of the others sends nothing along dp?
# </details>


# %% tags=["stub-3"]
def diagnose(run): ...


# %% tags=["check-3"]
lesson.check(exercises.diagnose, diagnose)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def diagnose(run):
#     if run.same_samples["dp"]:
#         return "same samples"
#     if max(run.distances.values()) == 0:
#         return "correct"
#     return "not reduced" if run.collectives["dp"] == 0 else "swapped"
# ```
# </details>

# %% [markdown]
# ### A gradient norm that counts twice
#
# Gradient clipping needs the norm of all gradients. On a mesh, a gradient can be
# equal on several ranks or sharded:
#
# | | along dp | along pp | along tp |
# |---|---|---|---|
# | a matrix of a block | equal | on one stage | shards |
# | a LayerNorm, an embedding, the head | equal | on one stage | equal |
#
# If we add up the squares of all ranks, equal gradients count several times. If each rank adds only its own, ranks clip by
# different factors, and copies diverge. `placement_of(p).axes` names the axes along which ranks hold different parts of p. pp is always
# among them. The library's `total_norm` uses it. We compare it with three sums that ignore placement.


# %%
def norms(batch):
    mesh, serial = Mesh(Layout(dp=2, pp=2, tp=2)), small_vit()
    serial(**batch).loss.backward()
    exact = torch.nn.utils.get_total_norm([p.grad for p in serial.parameters()])
    pipe, ratios = assemble(mesh.dp, mesh.pp, mesh.tp), {}
    pipe.step(vit_hybrid.local_samples(batch, mesh.dp))
    for axes in ((), (mesh.pp, mesh.tp), (mesh.dp, mesh.pp, mesh.tp)):
        squares = sum(p.grad.square().sum() for p in pipe.parameters())
        for axis in axes:
            dist.all_reduce(squares, group=axis.group)
        where = " and ".join(axis.name for axis in axes) or "no axis"
        ratios[f"squares summed over {where}"] = (squares.sqrt() / exact).item()
    once = total_norm(pipe.parameters(), [mesh.dp, mesh.pp, mesh.tp])
    return {**ratios, "each element once": (once / exact).item()}


ratios = eight.run(norms, batch)[0]
lesson.show(measured=ratios, key="04.norm", title="Gradient norm over one process's")
once, twice = ratios["each element once"], ratios["squares summed over pp and tp"]
lesson.claim("Each element once is exact", (abs(once - 1), "<", 1e-12))
lesson.claim("The sum over pp and tp is too large", (twice, ">", 1.01))

# %% [markdown]
# The sum over pp and tp looks right, because gradients are equal along dp. But it counts twice what tp does not
# shard. The norm is <data value="04.norm.squares-summed-over-pp-and-tp.measured:.2f">1.29</data> times the true one, so every clipped gradient is
# too small.
#
# **Takeaway.** Where a gradient is equal on c ranks, its square counts 1/c on each of them.
#
# ### Exercise 4: a norm counted once
#
# *Core. Implement, 20 minutes.* Return the norm of all gradients, the same on every rank. `parameters` are those of this
# rank that have a `.grad`, and `axes` are dp, pp and tp.
#
# <details><summary>What the check wants</summary>
#
# If two stages share a weight, it is *tied*, and one of them counts its gradient. On the other,
# `placement_of(p).tied_to` is not None. One check uses ZeRO 3 of
# notebook 05, which shards parameters and gradients along dp, as `placement_of` knows. Three small messages are allowed.
# </details>
#
# <details><summary>Hint</summary>
#
# Where a gradient is equal on c ranks, let its square count 1/c on each. Then a plain sum over all ranks is right.
# </details>


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
#         placement, copies = placement_of(p), 1
#         for axis in axes:
#             copies *= 1 if axis.name in placement.axes else axis.size
#         if placement.tied_to is None:
#             squares += p.grad.square().sum() / copies
#     for axis in axes:
#         dist.all_reduce(squares, group=axis.group)
#     return squares.sqrt()
# ```
# </details>

# %% [markdown]
# ## Change the layout in the middle of a run
#
# A long run often continues on other machines, so a checkpoint must not depend on the layout. Tensors are saved under the model's names, in pieces that say where they lie in the full tensor.
#
# ```text
# full weight (192, 48), saved by tp 2           loaded by tp 1
# rank 0 writes [0:96, :]     -- checkpoint -->  rank 0 reads both
# rank 1 writes [96:192, :]   -- checkpoint -->
# ```
#
# We train the small ViT for three epochs. The second epoch runs on four ranks with ZeRO 2 of
# notebook 05, which shards optimizer state and gradients over dp. The third runs on two ranks with ZB-H1 of notebook 02, which
# computes weight gradients in the bubble.


# %%
def train_until(epoch, folder, layout, leaves, others):
    plugin = hpnb.HybridParallelPlugin(precision="fp64", max_norm=0.5, seed=0, **layout)
    booster, model = hpnb.Booster(plugin=plugin), small_vit()
    load, images = plugin.prepare_dataloader, hpnb.data.ImageTransform(32)
    batch_size = 96 // plugin.dp_size
    data = load(leaves, batch_size, shuffle=True, drop_last=True, transform=images)
    test = load(others, batch_size, transform=images)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    cosine = hpnb.CosineAnnealingWarmupLR(optimizer, 3 * len(data), warmup_steps=6)
    boosted = booster.boost(model, optimizer, lr_scheduler=cosine)
    model, optimizer, _, _, cosine = boosted
    log = vit_hybrid.LossLog()
    hooks = [log, hpnb.AccuracyHook(), hpnb.CheckpointHook(folder)]
    trainer = hpnb.Trainer(booster, model, optimizer, lr_scheduler=cosine, hooks=hooks,
                           display_progress=False)  # fmt: skip
    trainer.resume(folder, missing_ok=True)  # weights, optimizer, schedule, samples
    history = trainer.fit(data, epoch, evaluate=test)
    return log.losses, 100 * history[-1]["eval_accuracy"]


# %%
pipeline = {"pp_size": 2, "num_microbatches": 4}
legs = {"8 ranks: dp 2 x pp 2 x tp 2": (eight, 1, {**pipeline, "tp_size": 2}),
        "4 ranks: dp 2 x tp 2, ZeRO 2": (4, 2, {"tp_size": 2, "zero_stage": 2}),
        "2 ranks: pp 2, ZB-H1": (2, 3, {**pipeline, "pp_style": "zb-h1"}),
        "one process": (1, 3, {})}  # fmt: skip
results = {}
with tempfile.TemporaryDirectory() as folder:
    for leg, (ranks, epoch, layout) in legs.items():
        ranks = ranks if ranks is eight else hpnb.Ranks(ranks, device="cpu")
        run = f"{folder}/one" if leg == "one process" else f"{folder}/run"
        on_ranks = ranks.run(train_until, epoch, run, layout, leaves, others)
        results[leg] = next(r for r in on_ranks if r[0])  # a rank that has the losses
accuracy = {leg: accuracy for leg, (_, accuracy) in results.items()}
alone, _ = results.pop("one process")
losses = [loss for series, _ in results.values() for loss in series]
off = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
curve = [(leg, series) for leg, (series, _) in results.items()]
title = vit_hybrid.layouts_title(off)
lesson.show(plot.by_layout(curve, alone, title=title))
ends = {"first": sum(losses[:8]) / 8, "last": sum(losses[-8:]) / 8}
lesson.record("04.losses", {**ends, "off": off})
lesson.record("04.accuracy", accuracy, "%")
lesson.claim("The losses are those of one process", (off, "<", 1e-6))
lesson.claim("The model learns", (accuracy["one process"], ">", 45))
lesson.ledger.show("04")

# %% [markdown]
# The layout changes twice, and the loss differs from that of one process by at most <data value="04.losses.off:.0e">1e-13</data> of its value. This
# works because optimizer state, learning rate and the order of samples are in the checkpoint, too.
#
# The table above has this page's rows of the *ledger*.
#
# <details><summary>In your tools: checkpoints that change layouts</summary>
#
# PyTorch: `torch.distributed.checkpoint` saves `DTensor` shards under the model's names and reshards on load. Megatron-Core:
# `--ckpt-format torch_dist`. DeepSpeed: convert with `ds_to_universal.py`, then load with
# `"load_universal": true`. hpnb: `booster.save_model` and `load_model`, or `CheckpointHook` and `trainer.resume`.
#
# ```python
# import torch.distributed.checkpoint as dcp
# from torch.distributed.checkpoint.state_dict import get_model_state_dict
#
# dcp.save({"model": get_model_state_dict(model)}, checkpoint_id="run/step-500")
# ```
# </details>
#
# **Takeaway.** A checkpoint under the model's names fits every layout.
#
# ### Exercise 5: reshard a tensor
#
# *Extra. Implement, 20 minutes.* The n rows of a tensor are sharded over ranks 0 to old-1 by
# `comm.split_sizes(n, old)`: as evenly as possible, and the first ranks get one more. Now shard them over ranks 0 to new-1. Return
# the messages, a list of `(source, target, start, stop)`: rows of the full tensor that source has and target lacks. Send no row
# without need.
#
# <details><summary>Hint</summary>
#
# Two ranges overlap from the larger start to the smaller stop.
# </details>


# %% tags=["stub-5"]
def moves(n, old, new): ...


# %% tags=["check-5"]
lesson.check(exercises.reshard, moves)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def moves(n, old, new):
#     def ranges(ranks):
#         sizes = comm.split_sizes(n, ranks)
#         return [(sum(sizes[:r]), sum(sizes[: r + 1])) for r in range(ranks)]
#
#     messages = []
#     for source, (a, b) in enumerate(ranges(old)):
#         for target, (c, d) in enumerate(ranges(new)):
#             if source != target and max(a, c) < min(b, d):
#                 messages.append((source, target, max(a, c), min(b, d)))
#     return messages
# ```
# </details>

# %% [markdown]
# ## What to remember
#
# - tp all-reduces four times a block in each microbatch, so keep it inside a node. Put dp between nodes if the last microbatch's backward is longer than dp's all-reduces. Otherwise try pp there.
# - Swapped groups of equal size raise no error, and the model still learns.
# - In a norm, the square of what is equal on c ranks counts 1/c on each of them.
#
# **When not to use this.** If one axis is enough, use one: each further axis adds messages. If the model fits on
# a GPU and tokens are many, use dp alone.
#
# <details><summary>Where to look</summary>
#
# PyTorch: `init_device_mesh`. Megatron-Core: `parallel_state.py`. Here: `hpnb/mesh.py`, `hpnb/grad_norm.py`
# and `hpnb/hybrid/parallelize_model.py`.
# </details>
#
# **Papers.**
#
# <details><summary>Four papers</summary>
#
# Shoeybi et al. 2019, *Megatron-LM*, 1909.08053. Narayanan et al. 2021, *Efficient large-scale language model
# training on GPU clusters using Megatron-LM*, 2104.04473, with all three axes and where they lie. Rajbhandari et al. 2020, *ZeRO*,
# 1910.02054. Pascanu et al. 2013, *On the difficulty of training recurrent neural networks*, 1211.5063, on clipping.
# </details>
#
# **Next.** Notebook 05 asks how far data parallelism alone goes, with GPT-2.
