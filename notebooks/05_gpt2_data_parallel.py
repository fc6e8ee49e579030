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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hpnb/hpnb/blob/main/notebooks/05_gpt2_data_parallel.ipynb)
# [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/hpnb/hpnb/blob/main/notebooks/05_gpt2_data_parallel.ipynb)
#
# **The question.** Data parallelism splits the batch and copies everything else. For GPT-2 XL, with 1.56 billion
# parameters, that is 25 GB on every GPU. How large a model can we train if we shard these copies, what does each saved
# byte cost in time, and what stops us when memory no longer does?
#
# **You will be able to** predict the peak memory of a training step from shapes; write the steps of ZeRO-1 and ZeRO-3
# (Zero Redundancy Optimizer) by hand; choose between sharding, recomputation, and offloading to CPU memory; read an
# out-of-memory report; and measure a gradient noise scale.
#
# **You should know** reduce-scatter, all-gather, and ρ from notebook 00: the FLOPs that a rank can compute while it sends one byte. From 01:
# DDP, gradient buckets, and the *token knee*: the tokens per rank above which the backward overlaps the whole
# all-reduce.
#
# **Time.** 30 minutes to read, 2 to run, and 70 for the exercises.
#
# **Two questions to recall** notebook 01. Which bytes of a step grow with parameters, and which with tokens? Where is
# the token knee on N ranks?
#
# <details><summary>Answers</summary>
#
# Weights, gradients and optimizer state grow with parameters, together 16 bytes a parameter. Activations grow with
# tokens. With 2-byte gradients the all-reduce sends about 4 bytes a parameter, and the backward computes 4 FLOPs a
# parameter and token. So they take equally long at about ρ tokens, exactly at ρ(N-1)/N.
# </details>

# %% tags=["setup"]
# fmt: off
import importlib.util
assert importlib.util.find_spec("hpnb"), "hpnb is missing: run `%pip install hpnb`"
from statistics import median; import hpnb, torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint
from hpnb import Layout, Mesh, comm, lesson, theory
from hpnb.lesson.figures import gpt2_data_parallel as figures
from hpnb.lesson.figures.gradient_noise import batch_wall
from hpnb.lesson.programs import device_timing, gpt2_zero, gradient_noise, step_timing
from hpnb.lesson.programs import gpt2_zero_words as words
from hpnb.lesson.exercises import gpt2_data_parallel as exercises
from hpnb.lesson.programs.gpt2_zero import ZeroConfig
from hpnb.models import GPT2_SIZES, GPT2Size

N = min(4, device_timing.timed_ranks())  # on a CPU no more than cores
pool = hpnb.Ranks(N)
sizes, XL = lesson.choose_sizes("05", pool), GPT2_SIZES["1.5b"]
SIZE, DTYPE, ROWS, BUCKET = sizes.size, sizes.dtype, sizes.batch, sizes.bucket_mb
P, TOKENS, FEW = SIZE.parameters(), ROWS * SIZE.length, 64  # tokens of a rank
BUDGET = 24e9 * P / XL.parameters()  # bytes: 24 GB for XL, the same share for others
TINY = GPT2Size(hidden=64, layers=2, heads=4, mlp=256, vocab_size=509, length=32)
english = hpnb.data.text("train", vocab_size=TINY.vocab_size, block=TINY.length)
name = f"GPT-2, {SIZE.layers} blocks of {SIZE.hidden}, {round(P / 1e6, 1)} M parameters"
here = lesson.banner(N, model=name, data=english.describe(), sizes=sizes)

# %% [markdown]
# ## The unchanged run does not fit
#
# In mixed precision, a parameter takes 2 bytes, its gradient 2, and its optimizer state 12: a float32 master weight
# and Adam's two moments. In float32, the weight takes 4, the gradient 4 and the moments 8. GPT-2 XL, which this run trains, has
# 1,557,611,200 parameters. That makes 24.9 GB before the first token. A common GPU has 24 GB.
#
# So every rank here gets a *budget* of <data value="05.stopped.budget">24.0 GB</data>, or 15.4 bytes a parameter.
# `hpnb.record.memory(..., budget=...)` counts the bytes of all tensors after every operator, and raises where a GPU
# would be out of memory. We run one step of DDP with hardly any tokens, <data value="05.stopped.tokens">64</data> on each rank.
#
# <details><summary>What do the banner's gigabytes mean?</summary>
#
# A page trains the largest model that is predicted to take at most 80 % of the memory that is free on a GPU. The banner has both numbers:
# the predicted peak, and what is free. The peak is that of plain data parallelism, with five copies of the logits added as a reserve.
# </details>
#
# Some cells ask for a guess first. Without one, a *rule of thumb* takes its place. Here it counts weights and gradients.

# %%
lesson.predict("05.states", "How many bytes of parameters, gradients and optimizer "
               f"state has a rank? The model has {P} parameters.", unit="B",
               rule_of_thumb=2 * DTYPE.itemsize * P)  # weights and gradients


def train_one_step():
    model = device_timing.random_gpt2(SIZE, DTYPE)
    ids = device_timing.random_tokens(SIZE, 1)["input_ids"][:, :FEW]  # (1, 64)
    ddp = hpnb.DataParallel(model, Mesh(Layout(dp=hpnb.world_size())).dp, BUCKET)
    optimizer = gpt2_zero.adamw(model, DTYPE)  # with master weights for 16-bit weights
    try:
        with hpnb.record.memory(model, optimizer, budget=BUDGET):
            ddp(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    except hpnb.record.OutOfBudget as error:
        return error.with_traceback(None)


stopped = pool.run(train_one_step)[0]
lesson.show(stopped, title="The largest tensors alive, counted")
usage = {"total": stopped.usage.total, "activations": stopped.usage.activations}
lesson.record("05.stopped", {**usage, "budget": BUDGET}, "B")
lesson.record("05.stopped", {"operator": stopped.operator, "tokens": FEW})
lesson.claim("The backward has already freed the activations",
             (usage["activations"], "<", BUDGET / 20))

# %% [markdown]
# It stopped <data value="05.stopped.operator">after aten.zeros_like</data>, with <data value="05.stopped.total">24.0 GB</data> in use, in the first `optimizer.step()`,
# which allocates Adam's moments. By then, the backward had freed all activations but <data value="05.stopped.activations">8.19 kB</data>. Weights,
# gradients and optimizer state are together the *states*: 16 bytes a parameter when complete, over the budget of 15.4. So no batch is
# small enough.
#
# <details><summary>How does the table count?</summary>
#
# Gradients lie in flat buckets. A bucket that is made during the recording, as here, is listed as one flat tensor. An older one is listed with
# all its bytes, under the shape of a gradient that lies in it. On a GPU, each tensor counts with the multiple of 512 bytes that PyTorch
# reserves. So parameters take slightly more than 2 bytes each.
#
# *Temporary* is the category for the rest. A weight here takes <data value="05.shape.bytes">2</data> bytes. With 2-byte weights, the update first copies all gradients to float32; until it ends, these copies and the new moments count as *temporary*. With 4-byte weights there are no copies, and new moments count as *optimizer*.
# </details>
#
# **Takeaway.** Adam allocates its state in the first update. So only the second step has activations and state
# together: test two steps.
#
# ## Sharding and recomputation by hand
#
# Each ZeRO stage shards one more kind of copy over the N ranks. Of P parameters, a rank keeps and sends, by formula:
#
# | | weights | gradients | optimizer state | sent in a step |
# |---|---|---|---|---|
# | ZeRO-0 (DDP) | P | P | P | 2P: all-reduce gradients |
# | ZeRO-1 | P | P | P / N | 2P: reduce-scatter gradients, all-gather weights |
# | ZeRO-2 | P | P / N | P / N | 2P: the same |
# | ZeRO-3 (fully sharded, FSDP) | P / N | P / N | P / N | 3P: all-gather weights twice, reduce-scatter gradients |
#
# Under ZeRO-1 a rank keeps optimizer state only for its part, updates it, and all-gathers the new
# weights. ZeRO-2 also frees other ranks' gradients after each bucket, and its own part after the update. Here is a
# complete step of ZeRO-1, on one flat tensor of all parameters.

# %%
def train_zero1_by_hand(steps=3):
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    by_hand, library = (gpt2_zero.seeded_gpt2(TINY, torch.float64) for _ in range(2))
    torch.manual_seed(axis.rank)  # every rank has rows of its own
    ids = torch.randint(TINY.vocab_size, (2, 32), device=hpnb.device())  # (B, s)
    flat = parameters_to_vector(by_hand.parameters()).detach()  # (P,)
    shard = torch.nn.Parameter(comm.split(flat, axis, dim=0).clone())  # (P/N,)
    optimizer = torch.optim.AdamW([shard], lr=1e-2)  # its state is (P/N,) as well
    zero = hpnb.ZeroOptimizer(library.parameters(), torch.optim.AdamW, axis, lr=1e-2)
    for _ in range(steps):
        by_hand.zero_grad()
        by_hand(input_ids=ids, labels=ids).loss.backward()
        gradient = parameters_to_vector([p.grad for p in by_hand.parameters()])  # (P,)
        shard.grad = comm.reduce_scatter(gradient, axis, dim=0) / axis.size  # (P/N,)
        optimizer.step()
        weights = comm.all_gather(shard.detach(), axis, dim=0, total=len(flat))  # (P,)
        vector_to_parameters(weights, by_hand.parameters())
        zero.zero_grad()
        library(input_ids=ids, labels=ids).loss.backward()
        zero.step()
    return step_timing.relative_distance(by_hand.parameters(), library.parameters())

# %% [markdown]
# ZeRO-3 shards the weights too. A block's n weights are complete only while it computes: *unshard*
# them with an all-gather, run the forward, then *reshard*. Autograd has saved views of them for the backward, so the
# tensor must stay. We shrink its storage to 0 bytes, and before the backward grow and fill it again.
#
# ```
#              unshard    forward     reshard            unshard    backward    reduce-scatter, reshard
# weights      (n/N,)  →  (n,)     →  (n/N,)   . . .     (n/N,)  →  (n,)     →  (n/N,)
# ```

# %%
def run_zero3_block_by_hand():
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    block = gpt2_zero.seeded_gpt2(TINY, torch.float64).transformer.h[0]
    weights = list(block.parameters())
    torch.manual_seed(0)  # the same hidden states on every rank
    hidden = torch.randn(2 * N, 32, 64, dtype=torch.float64, device=hpnb.device())
    serial = torch.autograd.grad(block(hidden).square().mean(), weights)  # one process
    expected = comm.split(parameters_to_vector(serial), axis, 0)
    full = parameters_to_vector(weights).detach()  # (n,)
    shard = comm.split(full, axis, dim=0).clone()  # (n/N,)
    vector_to_parameters(full, weights)  # the weights become views of `full`

    def unshard():
        full.untyped_storage().resize_(full.nbytes)  # the first time, no change
        # Weights were set by .data, so autograd does not see that `full` changes.
        full.copy_(comm.all_gather(shard, axis, dim=0, total=len(full)))

    unshard()
    loss = block(hidden[2 * axis.rank :][:2]).square().mean()  # this rank's (2, s, h)
    full.untyped_storage().resize_(0)  # reshard: no full weights until the backward
    unshard()
    loss.backward()
    full_grad = parameters_to_vector([p.grad for p in weights])  # (n,)
    shard.grad = comm.reduce_scatter(full_grad, axis, dim=0) / N  # (n/N,)
    return step_timing.relative_distance([shard.grad], [expected])

# %% [markdown]
# With recomputation, or activation checkpointing, a block stores only its input, and runs its forward a second time in
# the backward. This is one autograd function:

# %%
class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, hidden):  # hidden: (B, s, h)
        ctx.block = block
        ctx.save_for_backward(hidden)  # the only activation that is stored
        with torch.no_grad():
            return block(hidden)

    @staticmethod
    def backward(ctx, grad_output):
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.block(hidden)  # the forward again, now with its activations
        output.backward(grad_output)
        return None, hidden.grad


# %%
def compare_checkpoints():
    block = gpt2_zero.seeded_gpt2(TINY, torch.float64).transformer.h[0]
    hidden = torch.randn(2, 32, 64, dtype=torch.float64, device=hpnb.device())
    ways = {"no checkpoint": block, "by hand": lambda x: Checkpoint.apply(block, x),
            "torch": lambda x: checkpoint(block, x, use_reentrant=False)}
    stored, gradients = {}, {}
    for way, forward in ways.items():
        block.zero_grad()
        with hpnb.record.memory(block) as recorder:
            output = forward(hidden.requires_grad_())
        stored[way] = recorder.profile().samples[-1].activations  # after the forward
        output.square().mean().backward()
        gradients[way] = [p.grad.clone() for p in block.parameters()]
    by_hand, plain = gradients["by hand"], gradients["no checkpoint"]
    return stored, step_timing.relative_distance(by_hand, plain)


stored, checkpointed = pool.run(compare_checkpoints)[0]
apart = {"ZeRO-1, weights": max(pool.run(train_zero1_by_hand)),
         "ZeRO-3, gradients": max(pool.run(run_zero3_block_by_hand)),
         "checkpoint, gradients": checkpointed}
refs = dict(zip(apart, ("ZeroOptimizer", "one process", "no checkpoint"), strict=True))
lesson.show(measured=apart, columns={"reference": refs}, title="Relative distances")
lesson.show(counted=stored, unit="B", key="05.stored", title="Stored by one block")
lesson.claim("All three by hand are right", (max(apart.values()), "<", 1e-6))

# %% [markdown]
# The checkpointed block stores only its input, <data value="05.stored.by-hand.counted">32.8 kB</data>, instead of <data value="05.stored.no-checkpoint.counted">985 kB</data>.
# Without a checkpoint, a block stores about 28 times its input, and where attention stores its probabilities, heads × length / hidden size more, here 2.
#
# <details><summary>In your tools</summary>
#
# ```python
# from torch.distributed.fsdp import fully_shard
# from torch.distributed.optim import ZeroRedundancyOptimizer
# from torch.utils.checkpoint import checkpoint
#
# optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4)  # ZeRO-1 on DDP
# for block in model.transformer.h:  # ZeRO-3: blocks first, then the rest
#     fully_shard(block, mesh=mesh, reshard_after_forward=True)
# fully_shard(model, mesh=mesh)
# ```
#
# - *HSDP*: `fully_shard` on a mesh of two dimensions shards inside a node and replicates between nodes. With 8 GPUs a node, only an all-reduce of P/8 gradients crosses nodes.
# - FSDP2 is PyTorch's name for `fully_shard`. With `reshard_after_forward=False` it keeps the weights between forward and backward. That sends a third less.
# - DeepSpeed: `"zero_optimization": {"stage": 1}`, 2 or 3 in its configuration; `"offload_optimizer": {"device": "cpu"}`.
# - accelerate: `FullyShardedDataParallelPlugin(fsdp_version=2)`, passed to `Accelerator(fsdp_plugin=...)`.
# - Megatron-Core: `--use-distributed-optimizer` is ZeRO-1; `--recompute-granularity full --recompute-method uniform` recomputes blocks.
# - transformers: `model.gradient_checkpointing_enable()`.
#
# *Offloading* saves bytes even on one GPU; this page runs it only where there are GPUs. Optimizer state stays in CPU memory, gradients go there, the CPU updates, and weights come back. With ZeRO-3, hpnb keeps weight shards there, too, and sends them up for each gather.
# How long should offloading take? For XL in bf16 on one GPU, gradients and weights are 4 bytes a parameter. Over PCIe, the
# link between CPU and GPU, they take 0.25 s at 25 GB/s. With the gradient cast to float32, AdamW reads 16 and writes 12 bytes a parameter, which takes 0.44 s at 100 GB/s of
# CPU memory. Together that is 0.69 s,
# as long as a GPU with 400 TFLOP/s computes on 29,000 tokens. On N ranks with ZeRO-1 or 2, transfer and update take 1/N of that if each rank has these rates for itself. Ranks of one node share them.
# So shard first, and offload where there are too few ranks.
#
# With ZeRO-3, gradients go down once, and weights come up twice, for the forward and the backward: three transfers of 2 bytes a parameter.
# For XL on four ranks they take <data value="05.xl-offload.transfers:.2f">0.09</data> s. The CPU's update takes <data value="05.xl-offload.update:.2f">0.11</data> s, and the GPU does none.
# The steps are measured further down. <data value="05.offload">In this run, offloading added 1.04 s to a step with ZeRO-3 and recomputation, predicted as 197 ms.</data>
# Assumed rates and shared cores are only possible reasons for the difference. This page does not test them.
# </details>
#
# **Takeaway.** ZeRO-1 and 2 split the all-reduce into its two halves and update in between. ZeRO-3 instead gathers weights twice a step.
#
# ## When is a step fullest?
#
# The fullest moment decides between ZeRO and recomputation. Take T tokens a rank, hidden size h, vocabulary size V and w bytes a
# value. A step can be fullest at four moments. All hold weights and optimizer state. ZeRO-0 and 1 hold all gradients throughout.
# ZeRO-2 and 3 free theirs after the update, so they hold none at the turn, and P/N at the end. In addition:
#
# - **turn** from forward to backward: about 28 T h values of each block, 28 times its input, and 12 V T bytes of the
#   loss, for float32 log-probabilities and two gradients of that size. With recomputation, a block keeps its input alone, T h values.
# - **block i**, counted from 0, in its backward: the activations of blocks 0 to i, and what the table folded below lists. With recomputation, the
#   inputs of blocks 0 to i and all activations of block i.
# - **end** of the backward: no activations.
# - **step**, the update: the same as at the end, and a float32 copy of 16-bit gradients, which the optimizer needs for master weights.
#
# <details><summary>What else is there in the backward of block i?</summary>
#
# Each step starts with `zero_grad()`, which sets every `.grad` to None. With ZeRO-0 and 1, the flat buckets stay allocated. So autograd makes
# new gradients beside them, and each stays until its bucket is full. With ZeRO-2, another bucket is on its way.
#
# | | bytes |
# |---|---|
# | its temporary values | about 14 T h w |
# | the output layer's gradient | V h w: output layer and embedding share a weight, so this gradient is kept until the embedding's is there, at the end of the backward |
# | ZeRO-0 to 2: gradients outside their bucket | up to one bucket, with ZeRO-2 two; none in the last block's backward, which comes first |
# | ZeRO-3: gathered weights | the embedding and about three blocks |
# </details>
#
# `theory.step_memory` predicts the largest of the four. On a GPU we add the *workspaces* of cuBLAS, the matmul
# library. On all pages, a prediction *holds* if the answer is 0.8 to 1.25 times the prediction. An *identity* must hold
# exactly.
#
# We predict and measure steps with <data value="05.tokens.page">4,096</data> tokens on each of <data value="05.tokens.ranks">4</data> ranks. For XL on two ranks, with 1,024 tokens each, we
# only predict.

# %%
lesson.predict("05.fitting", "How many of ZeRO-0 to ZeRO-3 fit the budget?",
               kind="identity", rule_of_thumb=lambda: sum(  # states alone
                   theory.model_states(P, N, s).total <= BUDGET for s in range(4)))

# ZeRO stage, and how many blocks to recompute: -1 is all
CONFIGS = [ZeroConfig(stage, recompute) for recompute in (0, -1) for stage in range(4)]
if here.device == "cuda":
    CONFIGS.append(ZeroConfig(3, -1, offload=True))
setting = SIZE, ROWS, DTYPE
# runs: the steps; alone: seconds of a rank that sends nothing
runs, alone = gpt2_zero.measure_in_turn(pool, *setting, CONFIGS, BUCKET)
spread = {c: run.seconds for c, run in runs.items()}  # fastest, median, slowest
workspace = max(pool.run(device_timing.matmul_workspace))  # bytes; 0 on a CPU

# %%
memory = gpt2_zero.predict_memories(*setting, CONFIGS, N, BUCKET, workspace)
# XL, 1 sequence a rank, on 2 ranks
large = {c: gpt2_zero.predict_memory(XL, 1, torch.bfloat16, c, 2) for c in CONFIGS}
peaks = {config: run.profile.peak for config, run in runs.items()}
expected, xl = ({c: step.peak for c, step in s.items()} for s in (memory, large))
shown = ZeroConfig(0), ZeroConfig(1), ZeroConfig(3), ZeroConfig(3, -1)
lesson.show(figures.rivers({c: runs[c].profile for c in shown}, BUDGET))
lesson.show(predicted=expected, measured=peaks, unit="B", key="05.peak",
            columns={"predicted moment": {c: memory[c].fullest.name for c in CONFIGS}},
            title="Predicted and measured peaks of a step")
last = runs[ZeroConfig(0)].profile.samples[-1]
lesson.reveal("05.states", last.parameters + last.gradients + last.optimizer,
              predicted=16 * P)
fits = [config for config in CONFIGS if peaks[config] <= BUDGET]
lesson.reveal("05.fitting", sum(not config.recompute for config in fits),
              predicted=sum(expected[config] <= BUDGET for config in CONFIGS[:4]))
lesson.record("05.fits", {"all": len(fits), "of": len(CONFIGS)})
error = max(abs(peaks[config] / expected[config] - 1) for config in CONFIGS)
lesson.claim("Every peak is predicted within a tenth", (error, "<", 0.1))
lesson.show(predicted=xl, unit="B", key="05.xl", title="XL on two ranks",
            columns={"predicted moment": {c: m.fullest.name for c, m in large.items()}})
words.record_worked(large[ZeroConfig(1)].fullest, memory[ZeroConfig(0)].fullest)
lesson.claim("ZeRO-2 fits XL with room to spare", (xl[ZeroConfig(2)], "<", 0.8 * 24e9))

# %% [markdown]
# Recording slows the step: trust bytes, not clocks. With ZeRO-3, *temporary* contains the gathered weights.
#
# Of the four ZeRO stages without recomputation, <data value="05.fitting">0</data> fit the budget. The rule of thumb leaves
# out activations, predicted as <data value="05.worked.activations.this-page-zero-0">18.5 GB</data>. Of all <data value="05.fits.of">9</data> configurations, <data value="05.fits.all">4</data> fit, all with recomputation.
#
# And XL on two ranks, in bf16? ZeRO-0 is predicted to peak at <data value="05.xl.zero-0.predicted">31.2 GB</data>, in the update: the float32 copy of
# all gradients takes 6.2 GB, and recomputation cannot help. ZeRO-1 needs <data value="05.xl.zero-1.predicted">20.6 GB</data>. But a
# real GPU needs room for its driver, workspaces and fragmentation. So plan with 80 % of it, here 19.2 GB. ZeRO-2 fits with <data value="05.xl.zero-2.predicted">17.5 GB</data>, ZeRO-1
# only if it recomputes, with <data value="05.xl.zero-1-+-recompute.predicted">18.7 GB</data>.
#
# <details><summary>Both peaks, line by line</summary>
#
# The formulas above, by category. At the turn, *activations* include one of the loss's three terms, 4 V T. This
# page's fullest moment is: <data value="05.worked.name.this-page-zero-0">turn</data>. The right column has the formulas of the turn. Were the backward of a block fullest, *activations* would have
# no 4 V T, and *temporary* would be 14 T h w + V h w instead of 8 V T.
#
# | | XL on two ranks: ZeRO-1, at the turn | | this page: ZeRO-0 | |
# |---|---|---|---|---|
# | parameters | 2 P | <data value="05.worked.parameters.xl-on-two-ranks-zero-1">3.12 GB</data> | w P | <data value="05.worked.parameters.this-page-zero-0">3.12 GB</data> |
# | gradients | 2 P | <data value="05.worked.gradients.xl-on-two-ranks-zero-1">3.12 GB</data> | w P | <data value="05.worked.gradients.this-page-zero-0">3.12 GB</data> |
# | optimizer | 12 P / 2 | <data value="05.worked.optimizer.xl-on-two-ranks-zero-1">9.35 GB</data> | 8 P, in 16 bits 12 P | <data value="05.worked.optimizer.this-page-zero-0">18.7 GB</data> |
# | activations | 28 T h w × 48 blocks + 4 V T | <data value="05.worked.activations.xl-on-two-ranks-zero-1">4.62 GB</data> | 28 T h w a block + 4 V T | <data value="05.worked.activations.this-page-zero-0">18.5 GB</data> |
# | temporary | 8 V T | <data value="05.worked.temporary.xl-on-two-ranks-zero-1">412 MB</data> | 8 V T, on a GPU + workspaces | <data value="05.worked.temporary.this-page-zero-0">1.71 GB</data> |
# | together | | <data value="05.xl.zero-1.predicted">20.6 GB</data> | | <data value="05.peak.zero-0.predicted">45.1 GB</data> |
#
# XL has T = 1,024, h = 1,600, V = 50,257, w = 2 and P = 1,557,611,200. On this page T is <data value="05.tokens.page">4,096</data>, h <data value="05.shape.hidden">1,600</data>, V <data value="05.shape.vocabulary">50,257</data>, w <data value="05.shape.bytes">2</data>. The
# formulas leave out norms' statistics and the last norm, less than 1 % of the activations. The numbers contain them.
# </details>
#
# <details><summary>In your tools</summary>
#
# Drag a snapshot into pytorch.org/memory_viz to see the same picture, tensor by tensor. hpnb writes one on any device.
# PyTorch's own snapshot needs a GPU; it also records the Python stack of each allocation.
#
# ```python
# with hpnb.record.memory(model, optimizer) as recorder:
#     train_step()
# recorder.to_memory_snapshot("rank0.pickle")
#
# torch.cuda.memory._record_memory_history(max_entries=100_000)
# train_step()
# torch.cuda.memory._dump_snapshot("step.pickle")
# ```
# </details>
#
# **Takeaway.** Ask when a step is fullest, then shrink what is there: states by ZeRO, activations by recomputation.
#
# ### Exercise 1: bytes of any ZeRO stage
#
# *Core, 10 minutes.* Return `{"parameters": .., "gradients": .., "optimizer": ..}`, the bytes on one rank at the
# end of the backward. The last three arguments are bytes a parameter before sharding.
#
# <details><summary>Hint</summary>
#
# The table above says what each ZeRO stage divides by N.
# </details>

# %% tags=["stub-1"]
def state_bytes(P, ranks, stage, weight_bytes, gradient_bytes, optimizer_bytes):
    ...


# %% tags=["check-1"]
lesson.check(exercises.state_bytes, state_bytes)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def state_bytes(P, ranks, stage, weight_bytes, gradient_bytes, optimizer_bytes):
#     sizes = {"parameters": weight_bytes, "gradients": gradient_bytes, "optimizer": optimizer_bytes}
#     sharded = list(sizes)[3 - stage :]
#     return {name: P * size / (ranks if name in sharded else 1) for name, size in sizes.items()}
# ```
# </details>

# %% [markdown]
# ## What does a saved byte cost?
#
# What sets the time of a step? The CPU launches every operator, which takes time however small the tensors are. We
# first look for this floor, with ever fewer tokens.

# %%
def time_forward_backward(shapes, repeats=5):
    model, seconds_by_tokens = device_timing.random_gpt2(SIZE, DTYPE), {}
    ids = device_timing.random_tokens(SIZE, ROWS)["input_ids"]  # (B, s)
    for _ in range(device_timing.warmup_steps() + repeats):
        for rows, length in shapes:  # in turn: a busy moment hits all of them
            few = ids[:rows, :length]
            with hpnb.record.timeline() as recorder, recorder.span():
                model(input_ids=few, labels=few).loss.backward()
            took = sum(event.duration for event in recorder.events())
            seconds_by_tokens.setdefault(rows * length, []).append(took)
    return {tokens: took[-repeats:] for tokens, took in seconds_by_tokens.items()}


shapes = [(1, 2**k) for k in range(1, 10) if 2**k < SIZE.length]
shapes += [(rows, SIZE.length) for rows in range(1, ROWS + 1)]
rounds = pool.run(time_forward_backward, shapes)[0]  # {tokens: s of each round}
took = {tokens: median(seconds) for tokens, seconds in rounds.items()}
floor, adds = min(took.values()), here.device == "cpu"  # a CPU launches, then computes
slope = (took[TOKENS] - (floor if adds else 0)) / TOKENS  # s a token
lesson.show(figures.launch_floor(rounds, floor, slope, TOKENS, adds))
lesson.record("05.limit", words.limit_in_words(floor, took[TOKENS]))
lesson.record("05.floor", {"launch": floor, "step": took[TOKENS]}, "s")
lesson.record("05.tokens", {"equal": floor / slope, "page": TOKENS, "ranks": N})
words.record_shape(SIZE, DTYPE)

# %% [markdown]
# We assume that launching takes equally long for any number of tokens, though medians up to 2,048 scatter. We
# take the lowest, a median of five rounds: <data value="05.floor.launch">75.8 ms</data>. Without messages, forward and backward of this page's <data value="05.tokens.page:,.0f">4,096</data> tokens
# take <data value="05.floor.step">149 ms</data>. The computing line counts all of that, so it is an upper limit. So launching takes longer than computing at
# least up to the crossing, <data value="05.tokens.equal:,.0f">2,090</data> tokens.
#
# To predict a step, take forward, backward and update of one rank that sends nothing: `alone`. Recomputation adds a forward. With
# ZeRO, we predict 1/N of the update. Communication adds what does not overlap with computing, its *exposed* part. On GPUs, we predict:
#
# - **ZeRO-0** overlaps its all-reduce with the backward, except for the last bucket.
# - **ZeRO-1 and 2** overlap the reduce-scatter likewise. But the all-gather of all weights follows the update, fully
#   exposed.
# - **ZeRO-3** gathers one block while another computes. Mainly the first gather and last reduce-scatter are exposed,
#   if a gather is shorter than a block's forward, and if a gather plus a reduce-scatter is shorter than its backward.
#
# <details><summary>On a laptop</summary>
#
# On a CPU, computing comes on top of launching. The cores that compute also move the messages, so nothing overlaps, and we predict all communication as exposed.
# </details>

# %%
card = lesson.machine_card(N)
parts = {c: gpt2_zero.predict_parts(SIZE, DTYPE, c, card, alone, BUCKET)
         for c in CONFIGS}
totals = {config: sum(part.values()) for config, part in parts.items()}
source = runs[ZeroConfig(0)].source  # "replayed" where ranks share a GPU
seconds = {config: middle for config, (_, middle, _) in spread.items()}
lesson.show(figures.step_parts(
    parts, {c: runs[c].parts for c in CONFIGS if not c.offload}, source))
lesson.show(figures.zero_frontier(peaks, spread, BUDGET, source))
lesson.show(predicted=totals, **{source: seconds}, unit="s", columns={
    "fastest (s)": {c: spread[c][0] for c in CONFIGS},
    "slowest (s)": {c: spread[c][2] for c in CONFIGS}}, title="Median steps")
lesson.show(columns=gpt2_zero.price_of_bytes(peaks, spread), key="05.price",
            title=f"What a saved byte costs on this page, {source}")
words.record_steps(runs, parts)
most = max(seconds[c] / totals[c] for c in CONFIGS if not c.offload)
lesson.claim("Not offloaded, no step takes 3 times its prediction", (most, "<", 3))
after = {c: runs[c].parts["exposed after the update"] for c in CONFIGS}
lesson.claim("ZeRO-2 communicates after its update, ZeRO-3 hardly does",
             (after[ZeroConfig(2)], ">", 2 * after[ZeroConfig(3)]))
lesson.record("05.alone", {"forward": alone[0]}, "s")

# %% [markdown]
# ZeRO-3 instead of ZeRO-0 saved <data value="05.price.zero-0-to-zero-3.saved">19.5 GB</data>, and its median step was <data value="05.changed.zero-3">21.1 ms shorter</data>. Their ranges <data value="05.ranges">overlap: either may be faster</data>.
# ZeRO-1's was <data value="05.changed.zero-1">38.3 ms shorter</data> than ZeRO-0's, but predicted as <data value="05.changed.zero-1-predicted">10.7 ms shorter</data>. ZeRO-2's was
# <data value="05.changed.zero-2">28.5 ms longer</data>.
#
# Recomputation added <data value="05.recompute.least">97.7 ms</data> to <data value="05.recompute.most">156 ms</data> to a median step. We predicted one forward, <data value="05.alone.forward">69.9 ms</data>.
#
# The predicted time holds for <data value="05.off.hold">1</data> of <data value="05.off.of">9</data> steps. Steps take <data value="05.off.low:.2f">1.17</data> to <data value="05.off.high:.2f">3.15</data> times the prediction, the most with
# <data value="05.off.highest">ZeRO-3 + recompute + offload</data>. <data value="05.excess">In the bars, most of the excess lies before the update.</data> Only ZeRO-1's lies mostly
# after it.
# By prediction, ZeRO-1 and 2 gather for <data value="05.after.predicted">7.31 ms</data> after the update. But what is
# gathered while the CPU still launches counts as update. So the last check decides little: it compares
# <data value="05.after.zero-2">1.53 ms</data> of ZeRO-2 with <data value="05.after.zero-3">0 s</data> of ZeRO-3. Compare sums: in ZeRO-1's and 2's bars, update and gather together take <data value="05.late.least:.1f">2.0</data> to <data value="05.late.most:.1f">2.9</data> times the prediction.
#
# <details><summary>What does the prediction leave out?</summary>
#
# Steps end with:
#
# | | ZeRO-0 | ZeRO-1 | ZeRO-2 | ZeRO-3 |
# |---|---|---|---|---|
# | update | <data value="05.update.zero-0">27.8 ms</data> | <data value="05.update.zero-1">5.97 ms</data> | <data value="05.update.zero-2">31.0 ms</data> | <data value="05.update.zero-3">13.3 ms</data> |
# | communication after it | <data value="05.after.zero-0">0 s</data> | <data value="05.after.zero-1">33.0 ms</data> | <data value="05.after.zero-2">1.53 ms</data> | <data value="05.after.zero-3">0 s</data> |
#
# The prediction leaves out copies to and from flat buckets, launching the hooks that shard and gather, and waiting for the slowest rank. Without
# messages, forward and backward take less than twice as long as launching alone, so more launches can lengthen them.
#
# With recomputation, <data value="05.after.zero-1-+-recompute">28.9 ms</data> follow the update in ZeRO-1 and <data value="05.after.zero-2-+-recompute">21.0 ms</data> in ZeRO-2.
# ZeRO-1 and 2 update equal shards, so the longer of their updates may contain waiting, too. Recomputation launches a forward again, with its
# hooks. Messages also take time from cores or a GPU that compute. For offloading, the prediction assumes rates.
#
# This page does not measure these causes one by one. The times in the table may contain waiting. Where ranks share a GPU, communication is not
# measured but predicted. The figure's bars leave out offloaded steps.
# </details>
#
# The usual rule says "use the lowest ZeRO stage that fits", because ZeRO-3 sends 1.5 times as many bytes. But by our prediction, overlapped
# communication costs no time, and every stage from 1 on leaves a rank 1/N of the update. So we simulate the exposed communication of
# XL on 8 GPUs of 400 TFLOP/s, with 8 sequences each. There ZeRO-1 equals ZeRO-2. Which of ZeRO-0, 2 and 3 exposes least on a fast link? From which bandwidth on does ZeRO-3 beat ZeRO-2?

# %%
lesson.predict("05.exposed", "Which exposes less on a link of 1 TB/s?", kind="ranking",
               rule_of_thumb=["ZeRO-0", "ZeRO-2", "ZeRO-3"])  # by bytes, then by stage
# 8 sequences a rank, on 8 ranks
exposed = {f"ZeRO-{z}": gpt2_zero.exposed_by_bandwidth(XL, 8, z, 8) for z in (0, 2, 3)}
links = gpt2_zero.BANDWIDTHS  # 1 GB/s to 1 TB/s
fast = gpt2_zero.gather_bandwidth(XL, 8, 8)  # B/s: a block's gather takes its forward
lesson.show(figures.exposed_by_link(links, exposed, fast))
less = [two > three for _, two, three in zip(*exposed.values(), strict=True)]
gpt2_zero.record_links(links, exposed, fast)  # where curves cross
lesson.reveal("05.exposed", {z: s[-1] for z, s in exposed.items()}, source="simulated")
# False on slow links, True on fast ones: in this order if the curves cross once
lesson.claim("ZeRO-3 exposes less than ZeRO-2 on fast links only", less == sorted(less))

# %% [markdown]
# No stage exposes less than ZeRO-0. Up to about <data value="05.link.apart">21.5 GB/s</data>, ZeRO-2 exposes as much as ZeRO-0. ZeRO-2 and 3 cross at <data value="05.link.crossing">27.4 GB/s</data>.
# From <data value="05.link.fast">38.6 GB/s</data> on, a gather is shorter than a block's forward, and ZeRO-3 overlaps nearly all gathers. There, as on InfiniBand NDR (50 GB/s), it
# saves more memory than ZeRO-2 *and* exposes less. On slow links, like Ethernet at 12.5 GB/s, ZeRO-3 pays for its extra bytes.
#
# <details><summary>Must ZeRO-2 gather after the update?</summary>
#
# Ours gathers all weights after the update and waits. Megatron-Core's `--overlap-param-gather`
# gathers during the next forward. We did not simulate it.
# </details>
#
# <details><summary>What does a saved GB cost XL on 8 GPUs?</summary>
#
# The prices above are of this page's steps on this machine. Here XL is simulated on 8 GPUs with NDR (50 GB/s) and 8 sequences each. Do not compare the two.
# The table leaves out the GPU's update; it follows below.
#
# | XL, 8 GPUs | saves | adds, without the update | a saved GB |
# |---|---|---|---|
# | ZeRO-3 instead of ZeRO-0 | <data value="05.xl-price.shard.saved">22.0 GB</data> | <data value="05.xl-price.shard.added">8.06 ms</data> | <data value="05.xl-price.shard.each">367 µs</data> |
# | ZeRO-3, recomputing all blocks | <data value="05.xl-price.recompute.saved">34.0 GB</data> | <data value="05.xl-price.recompute.added">66.8 ms</data> | <data value="05.xl-price.recompute.each">1.96 ms</data> |
# | offloading optimizer state | <data value="05.xl-price.offload.saved">18.7 GB</data> | <data value="05.xl-price.offload.added">685 ms</data> | <data value="05.xl-price.offload.each">36.7 ms</data> |
#
# Offloading is computed without sharding, from 25 GB/s of PCIe and 100 GB/s of CPU memory, as under the first *In your tools*.
#
# The GPU's update moves 28 bytes a parameter, which takes XL about 15 ms at 3 TB/s of GPU memory. ZeRO-3 on 8 GPUs saves 7/8 of it, 13 ms,
# and exposes <data value="05.xl-price.shard.added">8.06 ms</data> more communication than ZeRO-0. So by this estimate, sharding costs no time.
#
# This page's ZeRO-0 took <data value="05.update.zero-0">27.8 ms</data> for its update. With 16-bit weights, an update also copies gradients to float32 and
# rounds the new weights, which the estimate leaves out. A longer update lets sharding save more.
# </details>
#
# **Takeaway.** Time the stages that fit. By simulation, the least exposed communication plus update wins: for XL on 8 GPUs,
# ZeRO-3 beats ZeRO-2 from <data value="05.link.crossing">27.4 GB/s</data> on. Our runs neither confirm nor refute this: steps took
# <data value="05.off.low:.2f">1.17</data> to <data value="05.off.high:.2f">3.15</data> times their prediction, and the ranges of ZeRO-0 to 3 overlap. A saved GB cost least
# by sharding, and most by offloading, here and on NDR.
#
# ### Exercise 2: which blocks to recompute
#
# *Core, 20 minutes.* Each of `layers` has `.activations` and `.input` in bytes, and
# `.seconds` of forward. Return the indices of the blocks to recompute, so that
# `exercises.peak_activations(layers, chosen, head) <= budget` in the fewest seconds. The peak is at the turn,
# when the logits take `head` bytes, or later, when a recomputed block has all its activations during its backward.
#
# <details><summary>Hint</summary>
#
# Eight blocks have 256 subsets. Recomputing the largest first is not optimal.
# </details>

# %% tags=["stub-2"]
def blocks_to_recompute(layers, head, budget):
    ...


# %% tags=["check-2"]
lesson.check(exercises.recompute_choice, blocks_to_recompute)

# %% [markdown]
# <details><summary>Solution</summary>
#
# Recomputing the last block gains nothing where the head is small: its backward comes first, while the blocks
# before it still store everything.
#
# ```python
# from itertools import combinations
#
#
# def blocks_to_recompute(layers, head, budget):
#     indices = range(len(layers))
#     fitting = [chosen for count in range(len(layers) + 1) for chosen in combinations(indices, count)
#                if exercises.peak_activations(layers, chosen, head) <= budget]
#     return min(fitting, key=lambda chosen: sum(layers[i].seconds for i in chosen))
# ```
# </details>

# %% [markdown]
# ### Prefetching the gathers
#
# ZeRO-3 is only cheap if weights arrive before their block computes. Here are six blocks of XL on 8 ranks of InfiniBand
# NDR, simulated: gathered on demand, and one block ahead.

# %%
block, link = XL.block(8), theory.LINKS["InfiniBand NDR"]  # 8 x 1,024 tokens
forward, nbytes = block.forward_flops / 400e12, 2 * block.parameters  # s; bytes
gather = theory.seconds("all_gather", nbytes, 8, link)  # s
uses = [*range(6), *reversed(range(6))]  # blocks, in the order of their computing
computing = [forward] * 6 + [2 * forward] * 6  # s of each use
late, early = (theory.simulate_gathers(uses, computing, [gather] * 6, [nbytes] * 6,
               theory.prefetch_plan(uses, ahead)) for ahead in (0, 1))
lesson.show(figures.prefetch_steps({"on demand": late, "one ahead": early}, uses))
lesson.record("05.prefetch", {"late": late.ends[-1], "early": early.ends[-1]}, "s")
lesson.claim("One ahead, only the first gather is exposed", early.stall == 0)

# %% [markdown]
# On demand the step takes <data value="05.prefetch.late">37.7 ms</data>, one block ahead <data value="05.prefetch.early">26.2 ms</data>. The dp lanes have the all-gathers, and the *makespan* is the time of the step.
#
# <details><summary>Why eleven all-gathers?</summary>
#
# Twelve uses need eleven, because the last block is still there when its backward begins. Reduce-scatters
# are left out; they fit beside a block's backward.
# </details>
#
# ### Exercise 3: all-gathers without a stall
#
# *Extra, 25 minutes.* `step.uses` lists blocks in the order in which they compute. Return one list per entry of
# `step.uses`: the blocks whose gathers start when this use starts.
#
# <details><summary>The rules, and what the check wants</summary>
#
# Gathers share one link, in order. A block is freed
# after its use, unless the next use is of the same block. Block b takes `step.sizes[b]` bytes
# from the start of its gather until it is freed. All blocks together may take `step.limit` bytes at most. The check simulates three `step`s: only the first
# use may wait, and 2L - 1 gathers are enough for L blocks. Then it draws your step above a right one.
# </details>
#
# <details><summary>Hint</summary>
#
# Start each gather as early as memory allows, in the order of uses.
# </details>

# %% tags=["stub-3"]
def plan_gathers(step):
    ...


# %% tags=["check-3"]
verdict = lesson.check(exercises.gather_order, plan_gathers)
drawn = exercises.compared_plans(plan_gathers)  # your step above a right one
if drawn:  # nothing before you write a plan that computes
    lesson.show(figures.prefetch_steps(*drawn))
verdict

# %% [markdown]
# <details><summary>Solution</summary>
#
# One ahead is not enough where a wide block follows narrow ones: its gather must start two uses earlier.
#
# ```python
# def plan_gathers(step):
#     queue = [b for k, b in enumerate(step.uses) if k == 0 or step.uses[k - 1] != b]
#     gathered, starts = set(), []
#     for k, block in enumerate(step.uses):
#         starts.append([])
#         while (queue and queue[0] not in gathered
#                and sum(step.sizes[b] for b in {*gathered, queue[0]}) <= step.limit):
#             gathered.add(queue[0])
#             starts[k].append(queue.pop(0))
#         if step.uses[k + 1 : k + 2] != (block,):
#             gathered.discard(block)
#     return starts
# ```
# </details>

# %% [markdown]
# ## The largest model
#
# We look for the deepest model that trains two steps within the budget.

# %%
lesson.predict("05.largest", "How many blocks fit with ZeRO-3 and recomputation?",
               unit="blocks", rule_of_thumb=BUDGET / (16 / N * SIZE.block().parameters))
shallow, deep = ZeroConfig(0), ZeroConfig(3, -1)  # -1: recompute all blocks
plan, depth = gpt2_zero.deepest_models(pool, *setting, (shallow, deep), BUCKET, BUDGET)
lesson.show(predicted=plan, measured=depth, unit="blocks", key="05.depth",
            title=f"The most blocks of {SIZE.hidden} that train within the budget")
lesson.reveal("05.largest", depth[deep], predicted=plan[deep])
words.record_depths(*setting, plan, depth, N, BUCKET, workspace)
lesson.claim("ZeRO-3 trains a deeper model", (depth[deep], ">", depth[shallow]))

# %% [markdown]
# ZeRO-0 stops at <data value="05.depth.zero-0.measured">23 blocks</data>, with <data value="05.millions.zero-0:.1f">789.1</data> million parameters. ZeRO-3 with recomputation stops at <data value="05.depth.zero-3-+-recompute.measured">150 blocks</data>, with
# <data value="05.millions.zero-3:.1f">4693.2</data> million.
#
# <details><summary>What limits the depth, here and with more ranks?</summary>
#
# With ZeRO-3 and recomputation in 16 bits, a block costs 14/N bytes a parameter at the turn, where there are no gradients, and
# w T h bytes for its stored input. In the update it costs 16/N bytes a parameter, and 4/N for the float32 copy of gradients. The fullest moment limits the depth.
# By prediction, this is the moment *<data value="05.fullest.zero-3">step</data>* in the list of this page's four moments.
#
# With more ranks, what is divided by N vanishes. What remains is stored inputs, about three gathered blocks, the gathered embedding and the logits.
# </details>
#
# ### An autopsy
#
# A colleague's run fits at first: its budget is the peak of one step of one sequence plus 8.5 copies of the logits. Its loss
# falls. After some steps it is out of memory, but its states do not grow. What does?

# %%
def train_and_log(headroom, steps=20):
    program, log = gpt2_zero.serial_program(SIZE, 1, DTYPE), []
    program.step()
    with program.recording() as recorder:
        program.step()
    try:
        with program.recording(budget=recorder.profile().peak + headroom):
            for _ in range(steps):
                log.append(program.step_with_outputs())  # for a plot of the loss
    except hpnb.record.OutOfBudget as error:  # also if the device itself is full
        return [outputs.loss.item() for outputs in log], error.with_traceback(None)


V = SIZE.vocab_size
losses, stopped = pool.run(train_and_log, 8.5 * DTYPE.itemsize * V * SIZE.length)[0]
lesson.survivors_table(stopped, side=V)
copies = max(one.count for one in stopped.survivors if one.shape[-1:] == (V,))
lesson.record("05.autopsy", {"steps": len(losses), "copies": copies,
                             "first": losses[0], "last": losses[-1]})
lesson.claim("The loss falls until the end", (losses[-1], "<", losses[0]))
lesson.claim("More logits are alive than steps finished", (copies, ">", len(losses)))
lesson.field_guide.add(  # the series' table of symptoms
    "the loss falls, and after some steps a run that fitted is out of memory",
    "the tensors that are alive: which shape is there once for every step?",
    "outputs are kept for logging, with their logits; keep loss.item()", notebook="05")

# %% [markdown]
# The loss fell from <data value="05.autopsy.first:.2f">9.61</data> to <data value="05.autopsy.last:.2f">8.24</data> in <data value="05.autopsy.steps">8</data> steps. The shape tokens × V is alive <data value="05.autopsy.copies">9</data> times: once for each
# step that began. These are the logits inside `outputs`, which the list keeps. The fix is `log.append(outputs.loss.item())`.
#
# **Takeaway.** When memory grows, look for a shape that is alive as often as steps have begun.
#
# **Challenge.** The *explorer* below simulates steps of other GPTs, with GELU as one kernel: a block stores 16 times its input, not 28.
# There tensors may fill all 80 GB of a GPU. Train 30 billion parameters or more in bf16, on at most 64 ranks with InfiniBand
# NDR and at most 1,000,000 tokens a step. A step may take at most 1.25 times its forward and backward without recomputation. Why can ZeRO-2
# not do it?
#
# <details><summary>Answer</summary>
#
# With ZeRO-2 each rank keeps all 60 GB of weights. Their all-gather after each update takes 1.2 s at 50 GB/s. With 8
# sequences on each of 64 ranks, the gather adds a third to forward and backward. Without recomputation, a step
# takes less than 1.25 times these from 11 sequences on. But from 11 on a rank needs more than 80 GB, even if all blocks are recomputed. On fewer ranks even
# less fits.
#
# The slider for billions sets a goal: at 32, the nearest shape has 32.5 billion parameters.
# With ZeRO-3 and half of the blocks recomputed, 32.5 billion parameters take 67 GB on each of 64 ranks. A step takes 1.19 times its
# forward and backward.
# </details>

# %%
for c in (ZeroConfig(2), ZeroConfig(3, -1)):  # the series' table of runs, for 08
    lesson.ledger.add("05", Layout(dp=N), f"{name}, {TOKENS} tokens a rank, {c}", {
        "peak (B)": (expected[c], peaks[c]), "step (s)": (totals[c], seconds[c])
    }, card.hardware)
# XL on 8 GPUs, for the fold on prices
gpt2_zero.record_prices(XL, rows=8, ranks=8, link=theory.LINKS["InfiniBand NDR"])
lesson.explorers.sharded_step()

# %% [markdown]
# ## The batch wall
#
# With enough ranks, states no longer limit the model. But each rank needs enough tokens to overlap its communication. So more ranks mean a larger batch. From some size on, the *batch wall*, that hardly pays.
#
# A gradient over B samples, here sequences, is the true gradient G plus noise:
# $E|g_B|^2 = |G|^2 + \mathrm{tr}(\Sigma)/B$, where Σ is the covariance of single samples' gradients. Signal and noise are
# equal at the *gradient noise scale*,
#
# $$ B_{noise} = \mathrm{tr}(\Sigma) / |G|^2. $$
#
# In theory, reaching a given loss takes $s_{min} (1 + B_{noise}/B)$ steps, where $s_{min}$ is the number of steps with an
# unlimited batch. By this *step law*, each doubling saves less: it halves the steps far below the noise scale, and saves
# almost nothing far above.
#
# Squared norms at two batch sizes give both unknowns: at b, here 1, and at B, here 8 or 128.
#
# $$ |G|^2 = \frac{B|g_B|^2 - b|g_b|^2}{B - b} \qquad \mathrm{tr}(\Sigma) = \frac{|g_b|^2 - |g_B|^2}{1/b - 1/B} $$
#
# Both formulas subtract noisy norms, so we repeat. We train one small GPT-2 to a test loss of 6, another to 5. At each we take
# four sets of 128 samples. From each set we estimate the scale twice: from 16 batches of 8, and from one of 128. The table has
# their medians. We also count the steps to a loss of 5 with batches of 4 to 64.

# %%
def noise_scales(model, axis, rows):
    small, sums, scales = [], [], {}
    for ids in rows.split(8):  # (8, s)
        total = 0.0
        for row in ids[axis.rank :: axis.size].split(1):  # b = 1
            model.zero_grad()
            model(input_ids=row, labels=row).loss.backward()
            gradient = parameters_to_vector([p.grad for p in model.parameters()])
            small.append(gradient.square().sum())
            total = total + gradient
        sums.append(comm.all_reduce(total, axis))  # over 8 samples
    b_norm = comm.all_reduce(torch.stack(small).mean(), axis) / axis.size  # E |g_b|^2
    for B in (8, len(rows)):  # both formulas with b = 1, times B - 1
        means = torch.stack(sums).unflatten(0, (-1, B // 8)).sum(1) / B  # (batches, P)
        B_norm = means.square().sum(1).mean()  # E |g_B|^2
        signal, noise = B * B_norm - b_norm, B * (b_norm - B_norm)
        scales[B] = (noise / signal.clamp(min=noise / 1e4)).item()  # it may be negative
    return scales


def train_and_estimate(rows, test, target):
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    model = gradient_noise.train_to_loss(TINY, rows, test, batch=8, target=target).model
    return [noise_scales(model, axis, samples.to(hpnb.device()))
            for samples in rows[:512].split(128)]  # four sets

# %%
lesson.predict("05.doubling", "Steps with batches of 4, over steps with batches of 8?",
               rule_of_thumb=2)
rows, test = (gradient_noise.token_rows(TINY, split) for split in ("train", "test"))
early, late = (pool.run(train_and_estimate, rows, test, loss)[0] for loss in (6, 5))
repeats = 1 if here.device == "cpu" else 2
trained = dict.fromkeys((4, 8, 16, 32, 64), repeats)  # {batch: runs to average}
steps = gradient_noise.mean_steps(pool, TINY, rows, test, trained, 5)  # {batch: steps}
fewest, fitted = theory.fitted_wall([*steps][1:], [*steps.values()][1:])  # not 4
scales = {f"loss {loss}, batches of {B}": sorted(scale[B] for scale in estimates)
          for loss, estimates in ((6, early), (5, late)) for B in (8, 128)}
lesson.show(measured={way: median(estimates) for way, estimates in scales.items()},
            columns={"lowest (samples)": {way: scales[way][0] for way in scales},
                     "highest (samples)": {way: scales[way][-1] for way in scales}},
            unit="samples", key="05.scale", title="Four estimates of the noise scale")
lesson.show(batch_wall(steps, {"law, fitted from 8 on": (fewest, fitted)}, 5, {
    f"gradients, loss {loss}": median(scales[f"loss {loss}, batches of 128"])
    for loss in (6, 5)}))
gradient_noise.record_doublings(steps, trained, fewest, fitted)
lesson.reveal("05.doubling", steps[4] / steps[8], predicted=theory.steps_at(
    4, fewest, fitted) / theory.steps_at(8, fewest, fitted))
first, eights, larges = (scales[f"loss {loss}, batches of {B}"]
                         for loss, B in ((6, 128), (5, 8), (5, 128)))
lesson.claim("At a loss of 5, a larger batch narrows the interval",
             larges[-1] / larges[0] < eights[-1] / eights[0])
lesson.claim("The scale grows as the loss falls", larges[0] > first[-1])

# %% [markdown]
# From 4 to 8 samples the steps fell by a factor of <data value="05.doubling:.2f">1.60</data>, not 2. The law, fitted from 8 samples on,
# predicted <data value="05.doubling.predicted:.2f">1.79</data>.
#
# Doublings divided the steps by <data value="05.doublings.least:.2f">1.27</data> to <data value="05.doublings.most:.2f">1.63</data>. By the law, the last divides them by <data value="05.doublings.law-last:.2f">1.32</data>. <data value="05.doublings.wall">The last doubling saved least, as the law says.</data> But the
# doubling from 16 to 32 saved most, not the first.
# We look at the test loss every five steps, and <data value="05.repeats.words">average 2 runs</data> for each batch size, so small differences can be chance.
#
# At a loss of 5, batches of 8 gave noise scales from <data value="05.scale.loss-5-batches-of-8.lowest:.0f">48</data> to <data value="05.scale.loss-5-batches-of-8.highest:.0f">101</data> samples. The same samples in one batch of
# 128 gave <data value="05.scale.loss-5-batches-of-128.lowest:.0f">50</data> to <data value="05.scale.loss-5-batches-of-128.highest:.0f">66</data>. At a loss of 6 the larger batch did not narrow the interval:
# <data value="05.scale.loss-6-batches-of-8.lowest:.2f">7.63</data> to <data value="05.scale.loss-6-batches-of-8.highest:.2f">7.99</data>, then <data value="05.scale.loss-6-batches-of-128.lowest:.2f">7.45</data> to <data value="05.scale.loss-6-batches-of-128.highest:.2f">8.08</data>.
#
# From a loss of 6 to 5, the median noise scale grew from <data value="05.scale.loss-6-batches-of-128.measured:.0f">8</data> to <data value="05.scale.loss-5-batches-of-128.measured:.0f">60</data> samples. The law has one noise scale for all
# of training. Fitted to the steps, it is <data value="05.fitted:.0f">30</data> samples, between the two: the dotted line.
#
# The *critical batch* takes twice the fewest steps and twice the fewest samples. By the law, it is the noise scale.
#
# <details><summary>Is the noise scale the critical batch?</summary>
#
# In theory it is, if SGD descends a loss that curves alike in all directions. We use AdamW, with an
# untuned learning rate that grows with the root of the batch, so it need not be here. Merrill et al. therefore measure the critical batch by training.
# </details>
#
# **Takeaway.** The noise scale gives an order of magnitude, and grows during training. Before you buy GPUs, train to a
# loss with two batch sizes.
#
# How many ranks can a batch keep busy? At most the critical batch in tokens, divided by the token knee.
# At 400 TFLOP/s and 50 GB/s, ρ is 8,000 FLOPs a byte, so the knee is about 8,000 tokens. If GPT-3's batch of
# 3.2 million tokens is the critical one, 3.2 M / 8,000 = 400 ranks are useful.
#
# ### Exercise 4: a noise scale from two norms
#
# *Extra, 15 minutes.* `per_rank[step][rank]` are squared norms of gradients over `small` samples, and `reduced[step]` is
# the squared norm of the gradient averaged over the ranks. Return the noise scale in samples. A few steps are ten times as noisy as the rest.
#
# <details><summary>Hint</summary>
#
# The formulas hold for expectations. Average first, and divide last.
# </details>

# %% tags=["stub-4"]
def scale_from_norms(per_rank, reduced, small):
    ...


# %% tags=["check-4"]
lesson.check(exercises.noise_scale, scale_from_norms)

# %% [markdown]
# <details><summary>Solution</summary>
#
# The mean of ratios is not the ratio of means: a single step with a signal near 0 would dominate.
#
# ```python
# def scale_from_norms(per_rank, reduced, small):
#     ranks, steps = len(per_rank[0]), len(reduced)
#     big = small * ranks
#     b_norm = sum(sum(norms) / ranks for norms in per_rank) / steps
#     B_norm = sum(reduced) / steps
#     noise = (b_norm - B_norm) / (1 / small - 1 / big)
#     return noise / ((big * B_norm - small * b_norm) / (big - small))
# ```
# </details>

# %% [markdown]
# ## What to remember
#
# - A parameter costs 16 bytes, half of them allocated in the first update. Test two steps.
# - ZeRO shards states, recomputation shrinks activations. Predict the fullest moment, then choose.
# - Time the ZeRO stages that fit. By simulation, ZeRO-3 beats ZeRO-2 on fast links; our runs do not decide it.
# - How far? Here from <data value="05.depth.zero-0.measured">23 blocks</data> to <data value="05.depth.zero-3-+-recompute.measured">150 blocks</data> on <data value="05.tokens.ranks">4</data> ranks; by simulation 32.5 billion parameters take 84 % of 80 GB on 64 GPUs. Then the
#   batch limits data parallelism: to about 400 ranks if GPT-3's batch is critical.
#
# **When not to use this.** Use tensor parallelism when one block, or one sequence's
# activations, do not fit: notebook 07. Use other axes when the batch is at the wall: notebooks 06 and 08.
#
# <details><summary>Where to look, and papers</summary>
#
# **Where to look.** PyTorch: `torch/distributed/fsdp/_fully_shard`. Megatron-Core: `distrib_optimizer.py`. Here:
# `hpnb/data_parallel/zero.py` and `fsdp.py`.
#
# **Papers.**
#
# - Rajbhandari et al. 2020, *ZeRO* (1910.02054). Zhao et al. 2023, *PyTorch FSDP*, 2304.11277.
# - Ren et al. 2021, *ZeRO-Offload* (2101.06840). Chen et al. 2016, *Training deep nets with sublinear memory cost*, 1604.06174.
# - McCandlish et al. 2018, *An empirical model of large-batch training* (1812.06162).
# - Merrill et al. 2025, *Critical batch size revisited* (2505.23971). Brown et al. 2020, *GPT-3*, 2005.14165.
# </details>
#
# **Next.** Notebook 06 partitions GPT-2 into pipeline stages, which send only hidden states and their gradients.
