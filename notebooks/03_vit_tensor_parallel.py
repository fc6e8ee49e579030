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
# # How do you cut a matrix without changing the answer?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hpnb/hpnb/blob/main/notebooks/03_vit_tensor_parallel.ipynb)
# [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/hpnb/hpnb/blob/main/notebooks/03_vit_tensor_parallel.ipynb)
#
# **The question.** In notebook 01 every rank had the whole model, and in 02 every rank had whole layers. What if one
# layer is too large, or too slow, for one GPU? In *tensor parallelism* each rank stores a part of a matrix, and all work on
# the same product. How do we cut the matrix so that outputs and gradients stay the same, and what must be sent?
#
# **You will be able to** write a tensor-parallel MLP; count what a block sends and keeps; decide whether your interconnect is
# fast enough; find a missing all-reduce by comparing gradients; say when 2D and 3D layouts pay.
#
# **You should know** notebook 00 (all-reduce in a ring and in two halves, latency α, bandwidth, ρ), and from 02 that a
# backward computes input gradients and weight gradients.
#
# **Time.** 30 minutes to read, under 2 minutes to run, 90 minutes for the exercises.
#
# **Two questions to recall.** From 00: which two collectives make an all-reduce, and how many bytes leave each of t ranks?
# From 02: which part of the backward does no other rank wait for?
#
# <details><summary>Answers</summary>
#
# A reduce-scatter and an all-gather. Each sends $(t-1)/t$ of the S bytes, so an all-reduce sends $2(t-1)/t \cdot S$ from each rank.
# Nothing waits for the weight gradients: only the optimizer needs them.
# </details>

# %% tags=["setup"]
import importlib.util

assert importlib.util.find_spec("hpnb"), "run `%pip install hpnb` in a cell first"
import torch, torch.distributed as dist, torch.nn.functional as F
import hpnb
from hpnb import comm, lesson, plot, theory
from hpnb.lesson.exercises import vit_tensor_parallel as exercises
from hpnb.lesson.figures import grid_steps, vit_tensor as figures
from hpnb.lesson.programs import device_timing, step_timing, vit_tensor
from hpnb.lesson.programs import vit_tensor_predictions as predictions
from hpnb.lesson.programs.step_timing import relative_distance
from hpnb.models import ViTSize
from hpnb.tensor_parallel import parallelize

N = min(4, device_timing.timed_ranks())  # on a CPU at most one rank a core
pool = hpnb.Ranks(N)  # these ranks stay until the end
sizes = lesson.choose_sizes("03", pool)
TINY = ViTSize(hidden=64, layers=4, heads=8, mlp=256, patch=8, image=32)
SIZE, DTYPE, IMAGES = sizes.size, sizes.dtype, sizes.batch
ACTIVATION = IMAGES * SIZE.tokens * SIZE.hidden * DTYPE.itemsize  # bytes of (b, s, h)
NAME = f"ViT, blocks of {SIZE.hidden}, {IMAGES} images of {SIZE.tokens} tokens"
leaves = hpnb.data.beans("train", size=48, image_size=32)
here = lesson.banner(N, model=NAME, data=leaves.describe(), sizes=sizes)

# %% [markdown]
# ## Columns, then rows
#
# Letters differ from 02: m is the number of tokens, t that of ranks, and A, B and W are weight matrices. A linear layer multiplies x, which
# has m tokens of h numbers, by A of shape (h, n). There are two ways to shard A over t ranks, here for t = 2.
#
# ```text
# column-parallel                              row-parallel
#
#   x           A_0 | A_1       y_0 | y_1        x_0 | x_1      A_0        y = x_0 A_0 + x_1 A_1
# (m, h)   @    (h, n/2) x 2  =  (m, n/2) x 2   (m, h/2) x 2 @  ---    =       (m, n)
#                                                               A_1
# each rank needs all of x                     each rank needs its half of x's columns
# each rank gets n/2 columns of y              each rank gets one of the two terms of y
# nothing to send                              all-reduce: add the terms
# ```
#
# The first layer leaves its output sharded by columns, and the second wants its input sharded like that. So an MLP,
# z = GELU(x A) B, needs no communication in the middle if A is sharded by columns and B by rows.
# In the drawing, *f* and *g*, Megatron-LM's names, mark where ranks must add terms:
#
# ```text
#             column-parallel                  row-parallel
# rank 0   x -- f --> x A_0 --> GELU --> y_0 --> y_0 B_0 --\
#       (m, h)       (m, 2h)           (m, 2h)    (m, h)    g (all-reduce) --> z on both ranks
# rank 1   x -- f --> x A_1 --> GELU --> y_1 --> y_1 B_1 --/                 (m, h)
# ```
#
# GELU acts on each number alone, so each rank can apply it to its columns. With rows first, a rank has only one of the t
# terms of each number. GELU of a sum is not the sum of GELUs, so the terms would have to be added first.
#
# Each rank multiplies x by its own columns of A only. So in the backward it computes one of the t terms of x's gradient, and
# the terms must be added. At f only the backward all-reduces, at g only the
# forward.


# %%
class CopyToRanks(torch.autograd.Function):  # f
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        grad_input = grad_output.clone()
        dist.all_reduce(grad_input, group=ctx.group)  # add the ranks' terms
        return grad_input, None


class SumOverRanks(torch.autograd.Function):  # g
    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


# %% [markdown]
# `without_sum` shows what a missing sum does. `axis` is a group of ranks
# with this rank's place in it. `comm.split` takes this rank's part of a tensor, and `comm.gather` joins the parts. The library's
# f and g, which the exercises use, are `comm.replicate(x, axis)` and `comm.all_reduce(x, axis)`.


# %%
def column_row_mlp(x, A, B, axis):
    A_r = A.chunk(axis.size, 1)[axis.rank]  # (h, 4h/t): columns of A
    B_r = B.chunk(axis.size, 0)[axis.rank]  # (4h/t, h): the matching rows of B
    y_r = F.gelu(CopyToRanks.apply(x, axis.group) @ A_r)  # (m, 4h/t)
    return SumOverRanks.apply(y_r @ B_r, axis.group)  # (m, h)


def row_column_mlp(x, A, B, axis, add_before_gelu=True):
    A_r = A.chunk(axis.size, 0)[axis.rank]  # (h/t, 4h)
    B_r = B.chunk(axis.size, 1)[axis.rank]  # (4h, h/t)
    y = comm.split(x, axis, 1) @ A_r  # (m, 4h): one of t terms
    y = F.gelu(SumOverRanks.apply(y, axis.group) if add_before_gelu else y)
    return comm.gather(CopyToRanks.apply(y, axis.group) @ B_r, axis, 1)  # (m, h)


def without_sum(x, A, B, axis):
    return row_column_mlp(x, A, B, axis, add_before_gelu=False)


# %% [markdown]
# We compare all three with one process in float64, and count bytes. A *relative distance* is the length of the difference over that of the right vector.


# %%
def compare_mlps():
    axis, generator = vit_tensor.tensor_axis(), torch.Generator().manual_seed(0)
    shapes = (64, 48), (48, 192), (192, 48)  # x, A, B: on the CPU, so Gloo adds them
    x, A, B = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    serial_x = x.clone().requires_grad_()
    serial_z = F.gelu(serial_x @ A) @ B
    serial_z.sum().backward()
    distances, sent = {}, {}
    mlps = {"columns, rows": column_row_mlp, "rows, columns": row_column_mlp}
    for name, mlp in {**mlps, "rows, columns, no sum": without_sum}.items():
        x_r = x.clone().requires_grad_()
        with hpnb.record.traffic() as traffic:
            z = mlp(x_r, A, B, axis)
            z.sum().backward()
        off = {"z": relative_distance([z], [serial_z])}
        off["gradient of x"] = relative_distance([x_r.grad], [serial_x.grad])
        distances[name], sent[name] = off, traffic.total
    return distances, sent


# %%
compared = pool.run(compare_mlps)
parity, sent = lesson.Parity.worst_of([d for d, _ in compared]), compared[0][1]
lesson.show(parity, title="Rows first needs its sum", note="The last leaves it out.")
lesson.show(counted=sent, unit="B", key="03.mlp", title="Columns first sends least")
off = {name: max(by_what.values()) for name, by_what in parity.distances.items()}
lesson.record("03.no-sum", 100 * off.pop("rows, columns, no sum"), "%")
lesson.claim("Both orders with their sums are exact", (max(off.values()), "<", 1e-12))
ratio = sent["rows, columns"] / sent["columns, rows"]
lesson.record("03.order-ratio", ratio)
lesson.claim("Columns first sends fewer bytes", (ratio, ">", 4))

# %% [markdown]
# Columns first sends <data value="03.mlp.columns-rows.counted">73.7 kB</data> from each rank,
# forward and backward together. Rows first sends <data value="03.order-ratio">4.50</data> times as much: it adds terms of width 4h instead of h,
# it gathers z, and the backward gathers the gradient of x. The third version returns the right shape, but is off by up to <data value="03.no-sum">87.9 %</data>.
#
# <details><summary>In your tools</summary>
#
# ```python
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
# from torch.distributed.tensor.parallel import parallelize_module
#
# mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("tp",))
# plan = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
# mlp = parallelize_module(mlp, mesh["tp"], plan)
# ```
#
# Megatron-Core has `ColumnParallelLinear` and `RowParallelLinear`, switched on with `--tensor-model-parallel-size`. The number of ranks
# must divide the number of attention heads there; our library gives some ranks one head more.
# </details>
#
# **Takeaway.** Shard the first matrix by columns and the second by rows. The pair needs one all-reduce forward and one
# backward.
#
# ### Exercise 1: an MLP with biases
#
# *Core, implement, 20 minutes.* Return GELU(x A + a) B + b on every rank.
#
# <details><summary>What it gets, and what the check wants</summary>
#
# `mlp` gets complete x, A, a, B and b on all ranks,
# but may multiply only with this rank's part. The check runs it on 2 and 3 ranks. It wants the exact output and gradients,
# one all-reduce each way, and 1/t of the FLOPs.
# </details>
#
# <details><summary>Hint</summary>
#
# `.chunk(axis.size, dim)[axis.rank]` is this rank's part. How often may each bias be added?
# </details>


# %% tags=["stub-1"]
def mlp(x, A, a, B, b, axis): ...


# %% tags=["check-1"]
lesson.check(exercises.column_row, mlp)

# %% [markdown]
# <details><summary>Solution</summary>
#
# Shard a like the columns that it belongs to. Add b once, after the sum. If every rank added b before the sum, the output
# would contain it t times.
#
# ```python
# def mlp(x, A, a, B, b, axis):
#     A, a, B = (w.chunk(axis.size, dim)[axis.rank] for w, dim in ((A, 1), (a, 0), (B, 0)))
#     y = F.gelu(comm.replicate(x, axis) @ A + a)
#     return comm.all_reduce(y @ B, axis) + b
# ```
# </details>

# %% [markdown]
# ## One block, four all-reduces
#
# Attention is also a column-parallel layer followed by a row-parallel one. Each head uses its columns of q, k and v, and heads
# do not need each other. The output projection is sharded by the matching rows. A batch of b sequences of s tokens has m = b·s tokens.
#
# ```text
#         replicated        sharded by heads       replicated        sharded by columns      replicated
# x (b, s, h) -> norm -> f -> q, k, v -> o -> g -> + -> norm -> f -> fc1 -> GELU -> fc2 -> g -> + -> (b, s, h)
# forward                                     all-reduce                                   all-reduce
# backward                all-reduce                            all-reduce
# ```
#
# So a block makes four all-reduces of b·s·h numbers. Is the interconnect fast enough? A rank computes 72 b s h²/t FLOPs of a
# block, without attention's scores: 6 for each weight and token, with 12h² weights. With 2 bytes a number it sends
# 16 b s h (t-1)/t bytes. Let ρ be the FLOPs that a rank computes while one byte is sent. Then the ratio r of the two times is
# the FLOPs over the bytes, divided by ρ:
#
# $$ r = \frac{\text{compute time}}{\text{communication time}} = \frac{4.5\,h}{(t-1)\,\rho} $$
#
# Batch size cancels, and sequence length almost does: attention's scores, left out here, add a share of s/6h. The formula
# also leaves out latency. So once messages are long, **no batch makes r larger**. Only a wider model, fewer ranks or a
# faster interconnect does. Without overlap a rank computes r/(1+r) of the time. We call an interconnect fast enough from r = 1 on, where
# that is half.
#
# From here on, the library's `parallelize(model, mesh.tp, mode="1d")` replaces the linear layers by sharded ones.
# We call that *1D*.
#
# `machine_card` measures this machine's latency α, bandwidth and matmul rate, its *card*, where B is the bandwidth.
#
# The cell also trains a sharded and a one-process ViT for three steps, in float64.

# %%
card = lesson.machine_card(N)
card.show()
question = f"How many bytes leave each of {N} ranks in a block's forward and backward?"
gradients = 12 * SIZE.hidden**2 * DTYPE.itemsize
rule = theory.bytes_sent("all_reduce", gradients, N)  # what replicas send
lesson.predict("03.block-bytes", question, None, "B", "identity", rule_of_thumb=rule)
question = f"h = {SIZE.hidden}, {N} ranks: compute time over communication time?"
lesson.predict("03.ratio", question, None, rule_of_thumb=4.5 * SIZE.hidden / card.rho)
distances = pool.run(vit_tensor.train_beside_one_process, TINY, leaves)[0]
parity = lesson.Parity({"after three steps": distances})
lesson.show(parity, title="A tensor-parallel ViT trains like one process")
lesson.claim("The sharded ViT equals one process", parity.equal)
predictions.record_formula(card, DTYPE)  # numbers of a fold below

# %% [markdown]
# ### Overlap in the backward
#
# A rank has nothing to do during the forward's all-reduce, because the next layer needs the sum. In the backward it has the
# weight gradient. The layer after f can start the all-reduce of its input gradient, compute the weight gradient, and then
# wait.
#
# ```text
# compute        grad_output A_r^T  |  x^T grad_output (weight gradient)  |  earlier layers
# communication                     |  all-reduce of grad_input           |
# ```


# %%
class OverlappedColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):  # (m, h), (h, n/t)
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight  # (m, n/t)

    @staticmethod
    def backward(ctx, grad_output):  # (m, n/t)
        x, weight = ctx.saved_tensors
        grad_input = grad_output @ weight.T  # (m, h): one of t terms
        work = dist.all_reduce(grad_input, group=ctx.group, async_op=True)
        grad_weight = x.T @ grad_output  # (h, n/t), while the sum is on its way
        work.wait()
        return grad_input, grad_weight, None


def compare_with_blocking():
    group = vit_tensor.tensor_axis().group  # Gloo for CPU tensors, as these
    x = torch.ones(48, 48, dtype=torch.float64, requires_grad=True)  # all ranks' x
    w = torch.randn(48, 48, dtype=torch.float64, requires_grad=True)  # my columns
    ys = OverlappedColumnLinear.apply(x, w, group), CopyToRanks.apply(x, group) @ w
    grads = [torch.autograd.grad(y.square().sum(), (x, w)) for y in ys]
    return {"gradients": relative_distance(*grads)}


# %% [markdown]
# <details><summary>Can the forward overlap, too?</summary>
#
# Yes, with smaller products. Split the tokens into pieces. While the sum of one piece is sent, the rank multiplies the next piece.
# Only the last piece's sum is exposed. This is called *async TP*. Its price is more and smaller products and messages.
# Megatron-Core has it as `--tp-comm-overlap`, PyTorch's compiler as `_micro_pipeline_tp`. Our library does not do it.
# </details>
#
# The library also postpones fc2's weight gradient until fc1's all-reduce has started, so both weight gradients run beside it.
# We record one block. Lanes marked tp show communication, which is *exposed* while its rank computes nothing.

# %%
parity = lesson.Parity({"overlapped": pool.run(compare_with_blocking)[0]})
lesson.claim("Overlap does not change the gradients", parity.equal)
sent, _ = pool.run(vit_tensor.measure_block, SIZE, IMAGES, DTYPE)[0]
predicted = 4 * theory.bytes_sent("all_reduce", ACTIVATION, N)
lesson.reveal("03.block-bytes", sent, predicted=predicted, source="counted")
recorded = pool.run(vit_tensor.record_block, SIZE, IMAGES, DTYPE)[0]
title = "The forward waits, the backward has weight gradients to compute"
lesson.show(recorded, exposed=True, bubble=None, key="03.block", title=title)
communicating = vit_tensor.mean_seconds(recorded)
computing = vit_tensor.mean_seconds(recorded, ops="FIW")
ratio = theory.tp_compute_over_communication(SIZE.hidden, N, card.rho, SIZE.tokens)
ratio *= 2 / DTYPE.itemsize  # the formula is for numbers of 2 bytes
measured, source = computing / communicating, recorded.source.split()[0]
lesson.reveal("03.ratio", measured, predicted=ratio, source=source)
exposed = step_timing.exposed_seconds(recorded)
lesson.record("03.exposed", {"share": (100 * exposed / recorded.makespan, "%")})
lesson.record("03.overlapped", 100 * (1 - exposed / communicating), "%")
block = SIZE.block(IMAGES, DTYPE.itemsize)
slower = predictions.slower_than_predicted(recorded, block, card)
lesson.record("03.verdict", predictions.verdict(ratio, measured, slower))
columns = {"factor": slower}
lesson.show(columns=columns, key="03.slower", title="What the formula leaves out")
few = pool.run(vit_tensor.record_block, SIZE, IMAGES // 8, DTYPE)[0]
predictions.record_host(few, recorded, 8)  # is computing set by the tokens?
lesson.claim("Some communication stays exposed", (exposed, ">", 0))

# %% [markdown]
# Counted as a ring, <data value="03.block-bytes">2.48 GB</data> leave each rank, as predicted: four all-reduces of b·s·h numbers. NCCL's bytes were not
# measured. On <data value="03.hardware">4 x NVIDIA H100 80GB HBM3</data> the block took <data value="03.block.makespan">19.2 ms</data>;
# <data value="03.exposed.share">26.9 %</data> of that is exposed communication. Computing covered <data value="03.overlapped">43.5 %</data> of the communication, all of it in the
# backward.
#
# <details><summary>How to read the figure</summary>
#
# The first all-reduce of the forward is attention's, the first of the backward the MLP's.
# A bar begins when the rank calls the all-reduce. So the bar of a rank that comes early also contains its wait for the others.
# *Exposed* means that this rank computes nothing; others may. The *makespan* is the time from the first start to the last end, so the latest rank sets it.
# The call that starts an all-reduce in the backward still counts as input gradient. So the all-reduce can start inside that bar.
# On a GPU, a bar of computing also lasts while the GPU waits for its host to launch the next operation, so a rank whose host is slow ends late.
# On a CPU, a rank that waited for an all-reduce can go on some time after it has ended, for example when its process gets a core again. That time is idle, not exposed communication.
# Of five recorded blocks, the figure shows the one with the median makespan.
# The thin slices of forward after the last all-reduce are a bias and the residual. The last slices of input gradient are attention's norm.
# </details>
#
# The formula is for numbers of 2 bytes. Here they have <data value="03.value-bytes">2</data>; with v bytes, r is 2/v times as large. With attention's
# scores the formula predicts r = <data value="03.ratio.predicted">0.698</data>. The run has <data value="03.ratio">1.51</data>.
#
# So by the formula this interconnect is not fast enough for this h. The run's r is above 1 only because computing took
# <data value="03.slower.computing.factor:.2f">2.58</data> times as long as its matrix products alone would.
#
# <details><summary>Three factors between the formula and the run</summary>
#
# The table's factors are relative to the formula, which leaves out costs of computing and of communication. The run's r is the formula's, times the first factor below
# and divided by the other two:
#
# - Computing took <data value="03.slower.computing.factor">2.58</data> times as long as its matrix products would at the card's rate. That includes launching operations, norms, GELU, residuals and slower products; the run does not separate them. <data value="03.host">With 1/8 of the images, computing took 5.96 ms instead of 13.8 ms. So about 35 % of this time does not shrink with the images, such as launching operations.</data>
# - Latency makes the all-reduces <data value="03.slower.latency-of-all-reduces.factor">1.06</data> times as long as their bytes alone.
# - Because of waiting and other costs, the all-reduces took a further <data value="03.slower.waiting-and-the-rest.factor">1.12</data> times as long. A part is that ranks which come early wait for the others; the run does not explain the rest.
#
# If the rule of thumb, 4.5 h/ρ, comes nearer to the run than the formula, that is chance.
# </details>
#
# <details><summary>On a laptop</summary>
#
# Ranks are processes that share cores and memory bandwidth, so an all-reduce also slows down the computing beside it.
# Judge the order of events in the figure, not the times. Where several ranks share one GPU, they compute by turns, and the
# figure shows no overlap.
# </details>
#
# <details><summary>How wide on GPUs?</summary>
#
# A GPU of 400 TFLOP/s has ρ = 890 on NVLink 4, whose nominal bandwidth is 450 GB/s. So eight of them want h above
# 7 · 890/4.5, about 1,400. On InfiniBand NDR with 50 GB/s, ρ is 8,000, and they want h above about 12,400. These are nominal
# rates, and 2-byte numbers.
#
# With v bytes a number, h must be v/2 times as large. This page's v is <data value="03.value-bytes">2</data>, and its card measured a ρ of
# <data value="03.rho:,.0f">2,270</data> FLOP a byte. Eight such ranks would want h above <data value="03.wide:,.0f">3,532</data>.
# </details>
#
# **Takeaway.** By the formula, ask for r ≥ 1, so for h above (t-1)ρ/4.5. For eight ranks and usual widths, only the fastest
# links give that, those inside a *node*, which is one machine.
#
# ## An autopsy: the all-reduce that nobody missed
#
# f does nothing in the forward. What if an MLP lacks it? We train the ViT three times: correctly, without f in layer 2, and
# without f in all layers.


# %%
class HandwrittenMlp(torch.nn.Module):
    def __init__(self, mlp, axis, forget_f):
        super().__init__()
        self.fc1, self.fc2, self.axis, self.forget_f = mlp.fc1, mlp.fc2, axis, forget_f

    def forward(self, x):  # (b, s, h)
        if not self.forget_f:
            x = CopyToRanks.apply(x, self.axis.group)  # the line that is left out
        y_r = F.gelu(F.linear(x, self.fc1.weight, self.fc1.bias))  # (b, s, 4h/t)
        z = SumOverRanks.apply(F.linear(y_r, self.fc2.weight), self.axis.group)
        return z + self.fc2.bias


def train(faulty_layers, steps):
    axis = vit_tensor.tensor_axis()
    transform = hpnb.data.ImageTransform(32, device=hpnb.device())
    batch = next(iter(hpnb.data.Loader(leaves, 24, transform=transform)))
    model = parallelize(vit_tensor.float64_vit(TINY), axis)
    for i, layer in enumerate(model.vit.layers):
        layer.mlp = HandwrittenMlp(layer.mlp, axis, forget_f=i in faulty_layers)
    return vit_tensor.train_and_compare(model, TINY, batch, axis, steps)


# %%
cases = {"right": (), "left out in layer 2": (2,), "left out everywhere": (0, 1, 2, 3)}
steps = 16 if here.device == "cuda" else 12
runs = {case: pool.run(train, faulty, steps) for case, faulty in cases.items()}
errors = {case: ranks[0].errors for case, ranks in runs.items()}
del errors["left out everywhere"]
title = "One missing all-reduce: a cliff in the gradients of step 1"
lesson.show(figures.gradient_cliff(errors, title=title))
losses = {case: ranks[0].losses for case, ranks in runs.items()}
copies = {case: ranks[-1].distances for case, ranks in runs.items()}
title = predictions.copies_title(losses, copies)
between = "ranks' norms and embeddings"
lesson.show(plot.drift(losses, copies, title=title, between=between))
faulty = losses["left out in layer 2"]
lesson.record("03.loss", {"first": faulty[0], "last": faulty[-1]})
lesson.record("03.right-loss", losses["right"][-1])
worst = {case: max(by_module.values()) for case, by_module in errors.items()}
lesson.record("03.worst", worst)
lesson.claim("The right run agrees with one process", (worst["right"], "<", 1e-9))
lesson.claim("Faulty gradients are far off", (worst["left out in layer 2"], ">", 0.1))
lesson.claim("The faulty run learns", (faulty[-1], "<", faulty[0]))
lesson.claim("Its first loss is right", abs(faulty[0] / losses["right"][0] - 1) < 1e-12)
symptom = "the loss looks healthy, but replicated weights differ from rank to rank"
instrument = "compare gradients with one process, in float64, from the loss down"
cause = "the all-reduce in the backward of a column-parallel layer (f) is missing"
lesson.field_guide.add(symptom, instrument, cause, notebook="03")  # table of symptoms

# %% [markdown]
# The run without f in layer 2 starts with the right loss, which falls from <data value="03.loss.first">1.11</data> to <data value="03.loss.last">0.872</data>. The right run ends at
# <data value="03.right-loss">0.861</data>.
#
# This section's first figure compares rank 0's gradients of step 1 with those of one process, in the order in which
# the backward computes them. All gradients are right until the backward leaves the faulty MLP. Even its fc1 and fc2
# are right, because their gradients need no sum. The norm before the MLP, which Hugging Face calls `layernorm_after`,
# is the first that receives only this rank's term. Its error is the largest, <data value="03.worst.left-out-in-layer-2:.2f">0.82</data>; in the right run the largest is
# <data value="03.worst.right:.1e">5.4e-15</data>. Modules nearer the input also receive the residual connection's right gradient, so their error is smaller.
#
# Norms and embeddings are replicated, but their gradients now differ from rank to rank. So the copies diverge, as the second
# figure's lower panel shows. The model that rank 0 saves is not the model that
# was trained.
#
# **Takeaway.** A missing sum in the forward changes the loss at once. In the backward it changes only gradients. So compare
# gradients with one process before you trust a parallel layer.
#
# ### Exercise 2: read a cliff
#
# *Core, diagnose, 15 minutes.* One thing is wrong in one layer. Say which from the gradients' errors.
#
# <details><summary>What it gets, and what the check wants</summary>
#
# You get `errors`, {module: relative error}, ordered from the loss towards the input.
# Return `("forward", None)` if the loss itself is wrong, so that every gradient is. Return
# `("backward", "vit.layers.1.mlp")` if f was left out of that module; an attention is `"vit.layers.1.attention"`. Return
# `("own", "vit.layers.1.mlp.fc2")` if only that module's own gradient is wrong. The check runs four such models on 2 ranks.
# </details>
#
# <details><summary>Hint</summary>
#
# An error above 1e-9 is no rounding. Look at the module just before the first wrong one, and at those after it.
# </details>


# %% tags=["stub-2"]
def diagnose(errors): ...


# %% tags=["check-2"]
verdict = lesson.check(exercises.gradient_cliff, diagnose)
if verdict.status == "passed" and "errors" in vars():
    print("The cliff above:", diagnose(errors["left out in layer 2"]))
verdict

# %% [markdown]
# <details><summary>Solution</summary>
#
# A single wrong module is what you get when somebody adds b/t on every rank, so that the output is right. Then the gradient
# of b is divided by t, and nothing else is affected.
#
# ```python
# def diagnose(errors):
#     modules = list(errors)
#     wrong = [module for module in modules if errors[module] > 1e-9]
#     if wrong[0] == modules[0]:
#         return "forward", None
#     if len(wrong) == 1:
#         return "own", wrong[0]
#     return "backward", modules[modules.index(wrong[0]) - 1].rpartition(".")[0]
# ```
# </details>

# %% [markdown]
# ## Sequence parallelism: hardly more bytes, less memory
#
# Between two pairs of sharded layers x is replicated: every rank computes the same norm and keeps the same inputs. In 16 bits
# a block keeps 32 b s h bytes, without attention's scores. Of these, 24 b s h belong to attention and the MLP and are
# sharded. The other 8 b s h, inputs and outputs of two norms, are replicated.
#
# An all-reduce is a reduce-scatter and an all-gather. After the reduce-scatter each rank has the sum for 1/t of the tokens.
# Norm, dropout and residual work on one token at a time, so they run there. We all-gather when the next column-parallel
# layer needs all tokens.
#
# | on a rank | 1D | with sequence parallelism (1D+SP) |
# |---|---|---|
# | norm, residual | (m, h) | (m/t, h) |
# | ↓ forward / backward | none / all-reduce | all-gather / reduce-scatter |
# | attention, MLP | (m, 3h/t), (m, 4h/t) | the same |
# | ↓ forward / backward | all-reduce / none | reduce-scatter / all-gather |
#
# Megatron-LM calls this *sequence parallelism*. The library shards all m tokens of the batch. We count with one image fewer,
# <data value="03.padded.tokens">201,531</data> tokens. That is no multiple of the number of ranks, <data value="03.padded.ranks">4</data>, so the library pads.

# %%
uneven, predicted, counted = IMAGES - 1, {}, {}
block = SIZE.block(uneven, DTYPE.itemsize)
for mode, sp in (("1D", False), ("1D+SP", True)):
    sent, kept = pool.run(vit_tensor.measure_block, SIZE, uneven, DTYPE, "1d", sp)[0]
    counted |= {f"{mode} sends (B)": sent, f"{mode} keeps (B)": kept}
    predicted[f"{mode} sends (B)"] = theory.block_sent(block, "1d", N, 1, sp).bytes()
    predicted[f"{mode} keeps (B)"] = theory.activation_bytes(block, "1d", N, 1, sp)
predictions.record_padding(counted, uneven * SIZE.tokens, N)  # for the text
lesson.show(predicted=predicted, counted=counted, key="03.sp", title="SP keeps less")
lesson.claim("SP keeps less", counted["1D+SP keeps (B)"] < counted["1D keeps (B)"])

# %% [markdown]
# With sequence parallelism a rank keeps <data value="03.sp.1d+sp-keeps.counted">2.27 GB</data> instead of <data value="03.sp.1d-keeps.counted">2.90 GB</data>. It sends <data value="03.sp-more">24.6 kB</data> more than 1D's
# <data value="03.sp.1d-sends.counted">2.48 GB</data>, because of padding and a small all-reduce of norm gradients.
#
# <details><summary>Which bytes are sharded?</summary>
#
# The library shards the norms' inputs, 4 of the 8 b s h bytes.
# It keeps the norms' gathered outputs, because the weight gradients of q, k, v and fc1 need all tokens.
# </details>
#
# <details><summary>In your tools</summary>
#
# PyTorch has `SequenceParallel` in `torch.distributed.tensor.parallel`. Megatron-Core has
# `--sequence-parallel`.
# </details>
#
# **Takeaway.** Sequence parallelism keeps less and sends hardly more bytes.
#
# ### Exercise 3: norms on a part of the tokens
#
# *Core, implement, 20 minutes.* Return `x + GELU(norm(x) * gain @ A) @ B` for this rank's tokens.
#
# <details><summary>What it gets, and what the check wants</summary>
#
# `x` has this rank's m/t tokens. You get `norm`, its weight `gain`, and complete A and B as in exercise 1. The check wants exact output and
# gradients, a norm that sees m/t tokens, and no more bytes than exercise 1 sends, besides the gradient of `gain`.
# </details>
#
# <details><summary>Hint</summary>
#
# `comm.gather` and `comm.all_gather` do the same in the forward. In the backward, `gather` takes this rank's part of the gradient, and
# `all_gather` first adds the ranks' terms. Which is right if every rank goes on with its own columns?
# </details>


# %% tags=["stub-3"]
def block(x, gain, norm, A, B, axis): ...


# %% tags=["check-3"]
lesson.check(exercises.sequence_parallel, block)

# %% [markdown]
# <details><summary>Solution</summary>
#
# `gain` is replicated, and each rank uses it for other tokens, so `replicate` adds the terms of its gradient.
#
# ```python
# def block(x, gain, norm, A, B, axis):
#     A, B = A.chunk(axis.size, 1)[axis.rank], B.chunk(axis.size, 0)[axis.rank]
#     y = norm(x) * comm.replicate(gain, axis)
#     y = F.gelu(comm.all_gather(y, axis, 0) @ A)
#     return x + comm.reduce_scatter(y @ B, axis, 0)
# ```
# </details>

# %% [markdown]
# ## Grids: 2D, 2.5D and 3D
#
# In 1D on 64 ranks, a rank computes 1/16 of what it computes on 4. But it sends 1.31 times as much (63/64 instead of 3/4), because
# every rank needs all of x. A grid of ranks shards x as well. Let q x q ranks make a grid. On 2 x 2 ranks, the
# rank in row i and column j stores block ij of x, W and y = x W:
#
# ```text
#      x               W               y = x W
#  x_00 | x_01     W_00 | W_01     y_00 = x_00 W_00 + x_01 W_10
#  ---- + ----  @  ---- + ----     y_01 = x_00 W_01 + x_01 W_11
#  x_10 | x_11     W_10 | W_11     y_10 = x_10 W_00 + x_11 W_10     step k adds x_ik W_kj
# ```
#
# That rank needs the blocks of x in its row and of W in its column, one pair at a time. In step k, column k broadcasts its
# blocks of x along the rows, and row k broadcasts its blocks of W down the columns. Every rank multiplies what it received and
# adds it to y. This algorithm is SUMMA. The cell runs it on 3 x 3 ranks.
#
# <details><summary>Bytes and time of a broadcast</summary>
#
# From its source, a broadcast passes a block of S bytes around the ring of a row's or column's q ranks, in small pieces. A
# rank sends a piece on while the next one arrives. All but the last rank send all of them, so on average a rank sends S (1 - 1/q). The arrows of the figure below show which ranks get a block. They
# do not show that it travels from rank to rank. A broadcast takes S over the bandwidth plus q - 1 latencies, longer than the mean bytes suggest.
# </details>


# %%
def summa_product(q, side=32):
    # ranks in rows of q: the axis down my column, and the one across my row
    down, across = vit_tensor.tensor_axis().split(q, q)
    generator = torch.Generator().manual_seed(0)
    shape = (q * side, q * side)
    x, W = (torch.randn(shape, generator=generator).double() for _ in range(2))
    i, j = down.rank, across.rank
    rows, columns = (slice(n * side, (n + 1) * side) for n in (i, j))
    x_ij, W_ij = x[rows, columns].clone(), W[rows, columns].clone()
    y_ij = torch.zeros(side, side, dtype=x.dtype)
    with hpnb.record.traffic() as traffic:
        for k in range(q):
            x_ik = comm.broadcast(x_ij, across, k)  # (side, side), from column k
            W_kj = comm.broadcast(W_ij, down, k)  # (side, side), from row k
            y_ij += x_ik @ W_kj
    right = (x @ W)[rows, columns]
    return relative_distance([y_ij], [right]), traffic.messages


products = hpnb.launch(summa_product, 3, ranks=9, device="cpu")
lesson.claim("SUMMA is exact", (max(off for off, _ in products), "<", 1e-12))
title = "SUMMA on 3 x 3 ranks: who broadcasts in which step"
messages = [sent for _, sent in products]
lesson.show(grid_steps.summa_steps(messages, (3, 3), title))

# %% [markdown]
# ### Exercise 4: one step of SUMMA
#
# *Extra, implement, 15 minutes.* Write one step of SUMMA.
#
# <details><summary>What it gets, and what the check wants</summary>
#
# Return y plus the product of step k, where y, x and w are this rank's blocks. `across` is the
# axis of this row, so `across.rank` is j, and `down` that of this column. The check runs two steps on 2 x 2 ranks. It wants
# the sum after each step, and the bytes of one broadcast each way.
# </details>
#
# <details><summary>Hint</summary>
#
# `comm.broadcast(x, axis, source)` returns the tensor of rank `source` on all ranks of the axis.
# </details>


# %% tags=["stub-4"]
def panel(y, x, w, k, across, down): ...


# %% tags=["check-4"]
lesson.check(exercises.summa, panel)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def panel(y, x, w, k, across, down):
#     return y + comm.broadcast(x, across, k) @ comm.broadcast(w, down, k)
# ```
# </details>

# %% [markdown]
# *2D* tensor parallelism makes every linear layer from SUMMA. *2.5D* stacks D such grids, where D is its depth. Each grid has
# all weights and 1/D of the tokens. *3D* puts t = l x l x l ranks in a cube, here 2 x 2 x 2. Each stores 1/t of x, W
# and y. It gathers x and W along their directions, multiplies, and reduce-scatters y along the third:
#
# ```text
#       6 ----- 7
#      /|      /|       →  gather x
#     4 ----- 5 |       ↗  gather W
#     | 2 ----|-3       ↑  reduce-scatter y = x W
#     |/      |/
#     0 ----- 1
# ```
#
# <details><summary>How many numbers a block sends from each of t ranks, predicted</summary>
#
# D is the depth of 2.5D.
#
# | | ranks t | activations | weights |
# |---|---|---|---|
# | 1D | any | 8 (t-1)/t · b s h | none |
# | 2D | q² | 21 (q-1)/q² · b s h | 36 (q-1)/q² · h² |
# | 2.5D | D q² | 21 (q-1)/(D q²) · b s h | (36 (q-1) + 24 (D-1)/D)/q² · h² |
# | 3D | l³ | 39 (l-1)/l³ · b s h | 36 (l-1)/l³ · h² |
#
# With q, k and v as one, a block's four linear layers have 7h inputs and 9h outputs a token, and 12h² weights. Each makes three products: the output and
# two gradients. Forward, SUMMA broadcasts x and W. For the gradient of x it broadcasts W and adds the terms of dx. For the gradient of W it broadcasts x and adds
# the terms of dW. So each product moves one tensor as large as x and one as large as W, hence 21 = 3 · 7 and 36 = 3 · 12. Adding is a *reduce*: an all-reduce whose sum only one rank gets. It sends as many numbers as a broadcast.
# 3D moves 7 + 9 + 9 + 7 + 7 = 39: it gathers x, adds the terms of y, gathers the gradient of y, adds that of x, and gathers x once
# more for the weight gradient. 2.5D also all-reduces weight gradients over the depth, hence 24 = 2 · 12. On 2 x 2 ranks, four layers with three products, two
# steps and two broadcasts or reduces make 48 calls; norms add 4 and biases 1. The table leaves out norms and biases, which the
# run below counts, too.
# </details>
#
# A grid's bytes fall as t grows. We check exactness and bytes on eight CPU processes, without 2D, which needs a square number.

# %%
question = f"8 ranks, 32 x {TINY.tokens} tokens, h = {TINY.hidden}: fewest bytes?"
rule = ("1d+sp", "2.5d", "3d")
lesson.predict("03.modes", question, None, kind="ranking", rule_of_thumb=rule)
predicted, counted, off, kept = {}, {}, {}, {}
block = TINY.block(32, bytes_per_value=4)
one = ViTSize(hidden=64, layers=1, heads=8, mlp=256, patch=8, image=32)  # layer
with hpnb.Ranks(8, device="cpu") as eight:
    for mode, depth in {"1d+sp": 1, "2.5d": 2, "3d": 1}.items():
        grid, sp = mode.removesuffix("+sp"), mode.endswith("+sp")  # sequence parallel
        layout = grid, sp, depth
        off[mode] = max(eight.run(vit_tensor.worst_gradient_error, one, *layout))
        task = TINY, 32, torch.float32, *layout
        counted[mode], kept[mode] = eight.run(vit_tensor.measure_block, *task)[0]
        predicted[mode] = theory.block_sent(block, grid, 8, depth, sp).bytes()
columns = {"keeps, counted (B)": kept}
title = "On 8 ranks, grids keep less and send less than 1D with SP here"
both = {"predicted": predicted, "counted": counted}
lesson.show(**both, columns=columns, unit="B", title=title)
lesson.claim("All modes are exact", (max(off.values()), "<", 1e-9))
lesson.claim("3D keeps less than 1D with SP", (kept["3d"], "<", kept["1d+sp"]))
ranking = sorted(predicted, key=predicted.get)
lesson.reveal("03.modes", counted, predicted=ranking, source="counted")

# %% [markdown]
# **Takeaway.** A grid shards all activations and sends weights as well. The fewest bytes come from <data value="03.modes">2.5d</data> here.
#
# ## When does each mode win?
#
# Bytes are not all that counts, because each collective also costs launch, waiting and latency. On 2 x 2 ranks a block makes
# <data value="03.race.2d.calls">53</data> such calls in 2D, and <data value="03.race.1d.calls">4</data> in 1D. We time the forward and backward of a block of hidden size <data value="03.tokens.hidden">4,096</data> on four
# ranks, then with eight times the tokens. Modes take turns, and we show medians of five.

# %%
four, wide = vit_tensor.four_ranks(pool)  # four ranks, and a width that fits
card4, size, modes = lesson.machine_card(4), wide.size, ("1d", "1d+sp", "2d")
if N != 4:
    card4.show()
few, many = wide.batch // 8, wide.batch  # images
run = vit_tensor.time_blocks
seconds = {(size, n): four.run(run, size, n, wide.dtype, modes)[0] for n in (few, many)}
predicted = predictions.predict_modes(seconds, card4, wide.dtype)
small, large, first = seconds[size, few], seconds[size, many], predicted[size, few]
growth = {mode: large[mode] / small[mode] for mode in modes}
expected = {mode: predicted[size, many][mode] / first[mode] for mode in modes}
source = vit_tensor.source_of(four)  # "measured"; "replayed" if ranks take turns
columns = {f"{source}, 8 times the tokens (s)": large, f"{source} growth": growth}
columns |= {"predicted growth": expected}
columns |= {"calls": predictions.calls_of_modes(size, modes)}
lesson.show(predicted=first, **{source: small}, columns=columns, unit="s",
            key="03.race", title=predictions.growth_title(growth))  # fmt: skip
halves = four.run(vit_tensor.time_halves, size, few, wide.dtype)[0]
alone = predictions.predict_halves(card4, size, few, wide.dtype)
lesson.show(predicted=alone, **{source: halves}, unit="s", key="03.halves",
            title="One all-reduce, alone")  # fmt: skip
predictions.record_race(seconds, predicted, halves, card, card4)  # for the text
lesson.claim("8 times the tokens: less than 8 times in 2D", (growth["2d"], "<", 8))
lesson.claim("1D is faster than 2D with few tokens", (small["1d"], "<", small["2d"]))
vit_tensor.add_to_ledger(four, seconds, predicted, card4, wide.dtype)  # for 08's table

# %% [markdown]
# With <data value="03.tokens.few">6,304</data> tokens, 1D took <data value="03.few.1d">7.24 ms</data> and 2D <data value="03.few.2d">24.1 ms</data>. That is <data value="03.too-low.1d">1.78</data> and <data value="03.too-low.2d">3.27</data> times as long as
# predicted. Predictions count what norms send, but leave out the norms' computing, launches and waiting. Sequence parallelism took
# <data value="03.sp-longer.few">1.79 ms more</data> than 1D.
#
# <details><summary>Which rates do we predict with?</summary>
#
# The four ranks run on <data value="03.hardware">4 x NVIDIA H100 80GB HBM3</data>. Their latency α is <data value="03.alpha">20.6 µs, as on the page's card</data>.
# On GPUs, the matmul rate is the card's. On a CPU, ranks take turns if cores are fewer, so there we multiply the card's
# rate by cores over ranks, if that is below 1. Here we take <data value="03.rate">732 TFLOP/s</data>.
# </details>
#
# <details><summary>Why can sequence parallelism be slower?</summary>
#
# Latency alone predicts <data value="03.norms">124 µs</data> more with few tokens.
# By theory the two halves of an all-reduce take as long as the all-reduce. In a ring of four, both take 2 (4 - 1) = 6 steps,
# and each step one latency α. So the prediction adds only the latencies of one more call, the all-reduce of norm gradients.
#
# Timed alone, an all-reduce took <data value="03.alone.all-reduce">638 µs</data> and its two halves <data value="03.alone.two-halves">842 µs</data>. A block has four such pairs, so by
# these times its halves take <data value="03.four-halves">813 µs more</data> than its all-reduces would. The run does not explain the rest.
#
# With eight times the tokens, sequence parallelism took <data value="03.sp-longer.many">219 µs less</data> than 1D, whose time is <data value="03.many.1d">32.9 ms</data>. These are medians
# of five, so a difference of a few percent says nothing.
# </details>
#
# On four ranks 2D sends fewer bytes than 1D above 12 h tokens, here <data value="03.tokens.even">49,152</data>. With the
# <data value="03.tokens.many">50,432</data> tokens of the larger batch, <data value="03.grid">2D sends about as many bytes as 1D, and takes 41.5 ms against 32.9 ms</data>. Eight times
# the tokens took <data value="03.growth.1d:.2f">4.54</data> times as long in 1D, <data value="03.growth.1d+sp:.2f">3.61</data> in 1D+SP and <data value="03.growth.2d:.2f">1.72</data> in 2D.
#
# <details><summary>Which costs are constant, and what would help?</summary>
#
# Eight times the tokens took <data value="03.growth.2d:.2f">1.72</data> times as long in 2D, where <data value="03.race.2d.predicted-growth:.2f">5.09</data> was predicted. In 1D they took <data value="03.growth.1d:.2f">4.54</data> times as
# long, where <data value="03.race.1d.predicted-growth:.2f">7.15</data> was predicted. Take each time as a constant plus a part proportional to the tokens. <data value="03.constant">Then the constant is 90 % of 2D's time with few tokens, and 49 % of 1D's.</data>
#
# Several costs are constant:
#
# - Latency. A block in 1D makes four all-reduces of six steps, so 24 latencies α, <data value="03.latency.all">495 µs</data>. That is <data value="03.latency.share">6.84 %</data> of 1D's time
#   with few tokens. A link of lower latency shortens them.
# - Weights that 2D sends. A larger batch makes them, and latency, count less.
# - Launching operations, and waiting for other ranks. With few tokens, 2D makes <data value="03.calls.more">49</data> calls more than 1D and takes
#   longer. The difference in time, divided by these calls, is <data value="03.calls.seconds">344 µs</data> a call. A launch alone costs less, because a part
#   of that difference is predicted without launches: 2D's <data value="03.race.2d.predicted">7.37 ms</data> against 1D's <data value="03.race.1d.predicted">4.08 ms</data>.
#
# Where launching takes longer than computing and sending, a faster link does not help. Such a block is
# *launch-bound*. The part of a constant that latency and weights do not explain is launching and waiting.
# </details>
#
# The next cell maps which mode is predicted to spend the least time communicating, on 64 ranks and InfiniBand NDR, with 10 µs
# of latency and no launch costs. 2.5D has 4 x 4 x 4 ranks. The
# last line opens an *explorer*.

# %%
links = theory.LINKS["InfiniBand NDR"], theory.Link(0, 50e9)  # one without latency
tokens, hidden = figures.map_axes()  # powers of 2 and three sizes between them
best, free = (theory.cheapest_modes(tokens, hidden, 64, to, depth=4) for to in links)
columns = {"of the map (%)": figures.mode_shares(best)}
columns |= {"without latency (%)": figures.mode_shares(free)}
columns |= {"latencies a block": predictions.latencies_of_modes(64, {"2.5d": 4})}
lesson.show(columns=columns, key="03.map", title="Where each mode wins, predicted")
title = "Predicted for 64 ranks: mostly 3D or 2.5D communicates for the shortest time"
lesson.show(figures.cheapest_mode(tokens, hidden, best, title=title, ranks=64))
lesson.explorers.tensor_modes()

# %% [markdown]
# 1D sends no weights and more activations than 3D, so it wins where tokens are few and h is large. Their bytes are equal
# at 0.28 h tokens in the batch, by the table in the previous section's fold. For h = 16,384 that is 72 on the axis;
# latency moves it to about 57. 2.5D sends
# more weights than 3D and fewer activations, so it wins with many tokens. 2D never wins: 3D sends fewer activations and
# weights, with a tenth of the latencies.
#
# <details><summary>What moves the borders</summary>
#
# Latency shrinks the areas of 1D and 2.5D: without it they would take <data value="03.map.1d.without-latency">2.68 %</data> and <data value="03.map.2.5d.without-latency">66.6 %</data>. The table counts a block's
# latencies. 1D has <data value="03.map.1d.latencies-a-block">504</data>, because its rings have 64 ranks; 3D has <data value="03.map.3d.latencies-a-block">144</data>, the fewest.
#
# Where h is small, messages are short and latency counts most. There 3D wins up to many more tokens, so the border of 2.5D
# bends to the right at the bottom.
#
# By the table's bytes, 2.5D would win from 7.3 h tokens on, which is 1,877 on the axis for h = 16,384. The border is at about
# 4,300 there. A broadcast over q ranks lasts as long as sending all of its block, q/(q - 1) times as long as its mean bytes
# say. For 2.5D this factor is 4/3. It moves the border to 4,189, and latency does the rest.
# </details>
#
# **Challenge.** On 16 ranks or more with InfiniBand NDR, reach compute / sending of at least 0.4 with at most 2 GB a rank.
#
# <details><summary>The limits</summary>
#
# Use a hidden size of at most 8,192, and sequences of at most 8,192, the explorer's longest. The 2 GB are for the block's
# activations and states: weights, gradients and optimizer state, 16 bytes a parameter. Nothing overlaps in the explorer, a GPU
# does 400 TFLOP/s, and the link has 50 GB/s. Why does no batch help 1D?
# </details>
#
# <details><summary>Answer</summary>
#
# ρ is 8,000. At best 1D has 4.5 · 8,192/(15 · 8,000) = 0.31, and 0.36 with attention's scores. The batch is in neither.
#
# 2D on 16 ranks meets the challenge with a batch of 8 such sequences, where a rank keeps 1.9 GB. It sends for 140 ms: by the
# table of the section on grids 103 ms, times 4/3, which is q/(q - 1) for q = 4, because a broadcast lasts as long as sending all of its block; and 3 ms of
# latency. It computes for 57.7 ms, so the ratio is 0.41. Its weight traffic does not grow with the batch, while
# computing does. In this setting 1D would send for 162 ms.
# </details>
#
# **Takeaway.** Inside a node, use 1D: it makes the fewest calls, and the fast link carries its bytes. With many
# tokens 1D+SP took about as long, and it keeps less. Use a grid only when a
# matrix must be shared across nodes. On 64 ranks, 3D or 2.5D is predicted to spend less time communicating than 1D, except
# where tokens are few and h is large.
#
# ### Exercise 5: the number of ranks that share a matrix
#
# *Extra, design, 20 minutes.* Choose the fastest t that fits.
#
# <details><summary>The job, and what the check wants</summary>
#
# `job.devices` GPUs train `job.layers` blocks of hidden size `job.hidden` on `job.tokens` tokens a step, over all replicas together. Return t, the ranks that
# share each matrix by 1D, with d = devices/t replicas. A GPU holds `16 * job.parameters / t` bytes of weights, gradients and optimizer state, at most
# `job.cap`. A step is the sum of three times:
#
# 1. Compute: 6 FLOPs a parameter and token, divided over all GPUs. Each computes `job.rate` FLOPs a second.
# 2. Tensor parallelism: four all-reduces a layer over t ranks, of `2 * job.tokens / d * job.hidden` bytes along `job.link`, not overlapped.
# 3. Data parallelism: the part of the gradient all-reduce that the backward does not hide. It has `2 * job.parameters / t` bytes over d ranks, sent in 24
#    equal buckets (pieces of the gradient, as in notebook 01) while the backward runs. The backward is two thirds of the sum of 1 and 2.
#
# The check allows 1 % above the shortest step that fits.
# </details>
#
# <details><summary>Hint</summary>
#
# `theory.seconds("all_reduce", nbytes, ranks, link)` and `theory.exposed_seconds(compute, nbytes, buckets, ranks, link)`.
# </details>


# %% tags=["stub-5"]
def choose(job): ...


# %% tags=["check-5"]
lesson.check(exercises.choose_ranks, choose)

# %% [markdown]
# <details><summary>Solution</summary>
#
# Replicas that fit are not always best. The check's third job has h = 8,192 and 8,192 tokens. On 64 GPUs that is n =
# 128 tokens a GPU. The backward computes 4 FLOPs for each weight and token, and the all-reduce sends about 4 bytes for
# each weight. So hiding it takes about ρ = 8,000 tokens a GPU. The predicted step takes
# <data value="03.job.t1">1.57 s</data> for t = 1, most of it gradients, and <data value="03.job.t16">190 ms</data> for t = 16, although r is only 0.31 there.
#
# For one layer, the all-reduces of activations send 16 n h (t-1) bytes from a GPU, and those of gradients about 48 h²/t.
# The sum is least where t² = 3h/n. Here that is t = 14, and 16 is the divisor of 64 next to it. This leaves out overlap.
#
# ```python
# def choose(job):
#     def step(t):
#         d = job.devices // t
#         busy = 6 * job.parameters * job.tokens / job.devices / job.rate
#         busy += 4 * job.layers * theory.seconds("all_reduce", 2 * job.tokens / d * job.hidden, t, job.link)
#         return busy + theory.exposed_seconds(2 / 3 * busy, 2 * job.parameters / t, 24, d, job.link)
#
#     able = [t for t in range(1, job.devices + 1) if job.devices % t == 0]
#     return min((t for t in able if 16 * job.parameters / t <= job.cap), key=step)
# ```
# </details>

# %% [markdown]
# ## What to remember
#
# - Columns first, then rows. A block needs four all-reduces.
# - By matrix products and bytes alone, compute over communication is r = $4.5\,h/((t-1)\rho)$. No batch changes it, once messages are long.
# - Overlap the input gradient's all-reduce with weight gradients. The forward's all-reduces stay exposed, unless tokens are sent in pieces.
# - A missing backward all-reduce leaves the loss healthy. Compare gradients with one process.
# - Sequence parallelism keeps less and sends hardly more bytes. It can still take longer, so measure it.
# - Grids send fewer bytes in large batches, but make many small calls.
#
# **When not to use this.** With about ρ tokens a GPU or more, computing covers what replicas send. Use replicas if the model fits and each GPU has that
# many tokens. Otherwise share matrices inside a node, with r ≥ 1. With few tokens a smaller r can still beat
# replicas (exercise 5), so predict both. Across nodes, try pipelines before a grid.
#
# **Where to look.**
#
# <details><summary>In PyTorch, Megatron-Core and here</summary>
#
# PyTorch: `torch.distributed.tensor.parallel`. Megatron-Core: `core/tensor_parallel/layers.py` and
# `mappings.py`, where f and g live. Here: `hpnb/tensor_parallel/tp_1d_linear.py` and `summa.py`.
# </details>
#
# **Papers.**
#
# <details><summary>Six papers</summary>
#
# Shoeybi et al. 2019, *Megatron-LM*, 1909.08053. Korthikanti et al. 2022, *Reducing activation recomputation in
# large transformer models*, 2205.05198. Van de Geijn and Watts 1997, *SUMMA*. Xu et al. 2021, *An efficient 2D method for
# training super-large deep learning models*, 2104.05343. Wang et al. 2021, *Tesseract*, 2105.14500. Bian et al. 2021,
# *Maximizing parallelism in distributed training for huge neural networks*, 2105.14450.
# </details>
#
# **Next.** Notebook 04 combines data, pipeline and tensor parallelism, and asks which deserves the fastest links.
