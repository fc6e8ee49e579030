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
# **The question.** In notebook 01 every rank had the whole model, in 02 whole layers. Now all ranks work on the same
# matrix at once, each on a part of it. How must it be cut so that the answer stays the same, and what does each way
# send?
#
# **You will be able to** cut an MLP and an attention over ranks by hand; count what a transformer block sends and
# keeps in 1D, 2D, 2.5D and 3D; say from ρ and the width whether a wire can bear it; find a missing sum by reading
# gradients from the loss down; cut a model of your own.
#
# **You should know** notebooks 00 (all-reduce and its halves, ρ) and 01 (what "equal" means), and of 02 that a
# backward computes two things, I and W.
#
# **Time.** 35 minutes to read; under 2 minutes to run on a laptop, and on 2 or 4 GPUs; 90 minutes for the exercises.
#
# **Letters.** t ranks cut a matrix by 1D, p make a grid, N run here. h is the width; b images have s tokens each.
#
# **Two questions to recall.** From 00: which two collectives make an all-reduce, and how many bytes leave each of t
# ranks? From 02: which part of the backward does nobody wait for?
#
# <details><summary>Answers</summary>
# A reduce-scatter and an all-gather, (t-1)/t S each, so 2(t-1)/t S together. W, the gradients of the weights: only the
# optimizer needs them.
# </details>

# %% tags=["setup"]
import inspect
import torch, torch.distributed as dist, torch.nn.functional as F
import hpnb
from torch import nn
from hpnb import comm, lesson, plot, theory
from hpnb.lesson.figures import vit_tensor as figures
from hpnb.lesson.figures.grid_steps import grid_steps
from hpnb.lesson.programs import device_timing, step_timing, vit_tensor
from hpnb.lesson.exercises import vit_tensor_parallel as exercises
from hpnb.models import SIZES, Anatomy, Part, ViTSize
from hpnb.models.role import linear, norm
from hpnb.tensor_parallel import full_gradients, full_state_dict, parallelize, summa, tp_1d_linear

N = min(4, device_timing.timed_ranks())  # on a CPU no more than cores, so that a clock means something
GPU = hpnb.ranks.choose_device("auto", N).device == "cuda"
SMALL, TINY = ViTSize(256, 8, 8, 1024, 8, 32), ViTSize(64, 4, 8, 256, 8, 32)
SIZE, DTYPE, IMAGES = (SIZES["l16"], torch.bfloat16, 256) if GPU else (SMALL, torch.float32, 64)
BLOCK = SIZE.block(IMAGES, DTYPE.itemsize)
name = f"ViT, {SIZE.layers} blocks of {SIZE.hidden}, {str(DTYPE)[6:]}, {IMAGES} images of {SIZE.tokens} tokens"
leaves = hpnb.data.beans("train", size=48, image_size=32)
here = lesson.banner(N, model=name, data=leaves.describe())
pool = hpnb.Ranks(N)  # these ranks stay to the end

# %% [markdown]
# ## Columns, then rows
#
# Let x be m tokens of h numbers, to be multiplied by A of n columns. Over t ranks there are two ways to cut A:
#
# | | rank r has | it computes x_r A_r, which is | |
# |---|---|---|---|
# | columns | all of x, and A_r of n/t columns | n/t columns of x A | whole in, cut out |
# | rows | h/t columns of x, and A_r of as many rows | one of t matrices whose sum is x A | cut in, a sum out |
#
# Put columns first and rows second, and they fit: what the first leaves cut, the second takes cut. In z = f(x A) B
# nothing is sent between the two. f must work on columns by themselves, as GELU works on each number.
#
# The other order does not: after rows there is a sum to take, and GELU(u + v) is not GELU(u) + GELU(v). The cell does
# both, and once without the sum. `replicate` and `all_reduce` are a mirror pair: the first does nothing forward and
# an all-reduce backward, for x is used by all ranks, so its gradient is the sum of what each of them finds; the
# second does an all-reduce forward and nothing backward. `split` and `gather` slice and put together.

# %%
def orders(m=64, h=48):
    axis = vit_tensor.tensor_axis()
    x, A, B = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
               for i, shape in enumerate([(m, h), (h, 4 * h), (4 * h, h)]))  # fmt: skip

    def own(matrix, dim):
        return matrix.chunk(axis.size, dim)[axis.rank]

    def columns_rows(x):
        y = F.gelu(comm.replicate(x, axis) @ own(A, 1))  # (m, 4h/t): columns of f(x A)
        return comm.all_reduce(y @ own(B, 0), axis)  # (m, h)

    def rows_columns(x, forget=False):
        part = comm.split(x, axis, 1) @ own(A, 0)  # (m, 4h): one of t parts of a sum
        y = F.gelu(part if forget else comm.all_reduce(part, axis))
        return comm.gather(comm.replicate(y, axis) @ own(B, 1), axis, 1)  # (m, h)

    def run(way):
        leaf = x.clone().requires_grad_()
        with hpnb.record.traffic() as t:
            z = way(leaf)
            z.sum().backward()
        return z, leaf.grad, t.total

    whole, gradient, _ = run(lambda x: F.gelu(x @ A) @ B)
    ways = {"columns, rows": columns_rows, "rows, columns": rows_columns,
            "rows, columns, no sum": lambda x: rows_columns(x, forget=True)}  # fmt: skip
    found = {way: run(function) for way, function in ways.items()}
    return [(way, step_timing.relative_distance([z], [whole]), step_timing.relative_distance([dx], [gradient]), sent) for way, (z, dx, sent) in found.items()]


rows = [(way, f"{z:.0e}", f"{dx:.0e}", lesson.number(sent, "B")) for way, z, dx, sent in pool.run(orders)[0]]
lesson.table(("order", "z off by", "gradient of x off by", "a rank sends, both ways"), rows, f"z = GELU(x A) B on {N} ranks, float64")

# %% [markdown]
# The first two are exact but for rounding. The second sends 4.5 times as much: its sums, one each way, are over 4h
# numbers a token, not h, and x and z are cut where everybody else wants them whole. The third runs, has the right
# shape, and is wrong.
#
# **Takeaway.** Columns, then rows: one all-reduce forward, one backward, each as large as x. A rank does 1/t of the
# work and holds 1/t of both matrices.
#
# ### Exercise 1: columns, then rows
#
# *Implement, 20 minutes.* Now with biases: return GELU(x A + a) B + b, whole on every rank. `mlp` gets x, A, a, B, b
# whole and equal on all ranks, and may multiply with this rank's part only. The check runs it on 2 and 3 ranks and
# wants the exact output and gradients, one all-reduce each way, and 1/t of the FLOPs.
#
# Hint: `.chunk(axis.size, dim)[axis.rank]`. How often is each bias added?

# %% tags=["stub-1"]
def mlp(x, A, a, B, b, axis):
    ...


# %% tags=["check-1"]
lesson.check(exercises.column_row, mlp)

# %% [markdown]
# <details><summary>Solution</summary>
#
# a is cut with the columns that it belongs to. b belongs to the sum, and is added once, after it. (Before it and on
# rank 0 alone, as the library does, gives the same z. But then autograd finds b's gradient on rank 0 only, and the
# check says that on other ranks it is off by 1; the library puts it there by hand, `adds` below.)
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
# An attention is such a pair, too. A head is a set of columns of q, k and v, and works by itself, as GELU does; the
# output projection takes its rows. So a block has two pairs. Each sums once forward and once backward: four
# all-reduces of b·s·h numbers. Norms and residuals lie between the pairs, where x is whole.
#
# **Can a wire bear it?** A rank computes 72 b s h²/t FLOPs of a block (01's 6 a weight and token, of 12h² weights),
# and sends 8(t-1)/t b s h numbers of 2 bytes:
#
# $$ \frac{72\,b s h^2/t}{16\,b s h\,(t-1)/t\;\rho} = \frac{4.5\,h}{(t-1)\,\rho} $$
#
# The last of the series' three ratios (attention's scores add the share s/6h). Neither b nor s is in it: **no batch,
# however large, helps**. A wider model does, or fewer ranks, or a faster wire: with ρ = 1,000, eight ranks compute as
# long as they send at h = 1,556. At a ratio r, with nothing hidden, t ranks are t·r/(1 + r) times as fast as one:
# half of t at 1. And where 01 sent gradients while the backward went on, here the next matmul waits for each sum.
# Commit to both, bytes and ratio.
#
# Which weight is what, the model has to say. `hpnb.models.roles` is that table; `parallelize` reads it, and which
# modules are the blocks. A column keeps this rank's outputs, a row its inputs, everything else stays whole. The
# model's own forward does not change. Below are ten lines of the table, and a cut ViT that trained beside one
# process, in float64.

# %%
card = lesson.machine_card(N)
card.show()
lesson.predict("03.block-bytes", f"{IMAGES} images of {SIZE.tokens} tokens of {SIZE.hidden} numbers of {DTYPE.itemsize} bytes: how "
               f"many bytes leave each of {N} ranks in the forward and backward of one block?", guess=None, unit="B",
               kind="identity")  # fmt: skip
lesson.predict("03.ratio", f"ρ is {card.rho:,.0f}, h = {SIZE.hidden}, {N} ranks, numbers of {DTYPE.itemsize} bytes: how many times "
               "as long as it communicates does a block compute?", guess=None)  # fmt: skip


def cut_and_train():
    place = hpnb.data.ImageTransform(32, device=hpnb.device())
    batch = next(iter(hpnb.data.Loader(leaves, 16, transform=place)))  # the whole batch, on every rank
    alone, model = vit_tensor.float64_vit(TINY), vit_tensor.float64_vit(TINY)
    roles, whole = hpnb.models.roles(model), {n: tuple(p.shape) for n, p in model.named_parameters()}
    parallelize(model, vit_tensor.tensor_axis(), mode="1d")
    cut = [(n, roles[n].kind, f"{whole[n]}", f"{tuple(p.shape)}") for n, p in model.named_parameters()]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (alone, model)]
    for _ in range(3):
        losses = [each(**batch).loss for each in (alone, model)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        right, mine = {n: p.grad.clone() for n, p in alone.named_parameters()}, full_gradients(model)
        for optimizer in optimizers:
            optimizer.step()
    weights, theirs = full_state_dict(model), alone.state_dict()
    return cut, {"loss": step_timing.relative_distance(losses[1:], losses[:1]),
                 "gradients": step_timing.relative_distance(mine.values(), [right[n] for n in mine]),
                 "weights": step_timing.relative_distance(weights.values(), [theirs[n] for n in weights])}  # fmt: skip

# %%
cut, apart = pool.run(cut_and_train)[0]
shown = ("q_proj.weight", "q_proj.bias", "o_proj.weight", "o_proj.bias", "fc1.weight", "fc2.weight", "fc2.bias", "before.weight")
rows = [row for row in cut if row[0].endswith(("cls_token", "classifier.weight")) or ("layers.0" in row[0] and row[0].endswith(shown))]
off = ", ".join(f"{what} {distance:.0e}" for what, distance in apart.items())
lesson.table(("weight", "role", "whole", "on rank 0"), rows, f"a ViT over {N} ranks", f"After three steps, from one process: {off}.")
sent, _ = pool.run(vit_tensor.measure_block, SIZE, IMAGES, DTYPE)[0]
activation = IMAGES * SIZE.tokens * SIZE.hidden * DTYPE.itemsize
lesson.reveal("03.block-bytes", sent, predicted=4 * theory.bytes_sent("all_reduce", activation, N))

# %% [markdown]
# q, k and v are cut by heads: 16 heads over 3 ranks are 6, 5 and 5. A column's bias is cut with it, a row's is whole.
# `full_state_dict` makes the ordinary model again.
#
# In the forward a rank can do nothing while a sum travels. In the backward it can: W, as in 02. So the backward of a
# pair goes:
#
# 1. its matmuls give dx, and note what W needs;
# 2. where the pair began, the sum of dx is started;
# 3. meanwhile each layer's W is computed from the notes;
# 4. then the sum is waited for.
#
# Autograd runs what is ready in the reverse order of the forward. So all this is set up where x comes in, by the
# function below (`self.sharding` are the ranks, `self.layers` the pair), and `hpnb/tensor_parallel/async_all_reduce.py` has the
# rest. And a block that ran:

# %%
print(inspect.getsource(tp_1d_linear.ParallelRegion.begin))
tl = pool.run(vit_tensor.record_block, SIZE, IMAGES, DTYPE)[0]
sending, computing, bare = vit_tensor.mean_seconds(tl), vit_tensor.mean_seconds(tl, "FIW"), step_timing.exposed_seconds(tl)
moving = vit_tensor.mean_seconds(tl.split_waits(), ["move"])
plot.show(
    plot.timeline(tl, exposed=True, bubble=None, title=f"one block on {N} ranks: the forward waits, the backward has W to do"),
    alt="Forward: compute, all-reduce, compute, all-reduce. Backward: weight gradients beside two more all-reduces. "
    f"{100 * bare / tl.makespan:.0f} % of the block is exposed communication.",
)
law = theory.tp_compute_over_communication(SIZE.hidden, N, card.rho, SIZE.tokens) * 2 / DTYPE.itemsize
lesson.reveal("03.ratio", computing / sending, predicted=law)
matmuls, wire = BLOCK.training_flops / N / card.matmul, theory.block_sent(BLOCK, "1d", N).seconds(card.link)
print(f"by the card, latency included: {matmuls / wire:.2f}; computing takes {computing / matmuls:.2f} times its matmuls, the four "
      f"all-reduces {sending / wire:.2f} times what the card says, {moving / wire:.2f} once the last rank has come; "
      f"{100 * (1 - bare / sending):.0f} % of them is hidden")  # fmt: skip

# %% [markdown]
# In the forward computing stops twice, each time for a whole sum. In the backward W (green) runs while the sum is on
# the wire; what W does not cover is exposed. (A message is drawn in pieces where computing beside it starts or ends.)
# The last line takes the ratio apart. The law knows no latency. Where computing takes longer than its matmuls, the
# host launches kernels one by one, norms, GELU and residuals move bytes, and every rank does all the norms. That
# raises the ratio, and is no merit. Where a sum takes longer than on the card, ranks came to it at different times
# (waiting is not moving: 00), or W took cores or multiprocessors from it.
#
# **Takeaway.** 1D wants h above (t-1)ρ/4.5, whatever the batch. So it belongs where ρ is small, within a host; put in
# your card's ρ even there.
#
# ### An autopsy
#
# A colleague writes the MLP of a block by hand. One line is missing: x goes into fc1 as it came. The loss is right,
# and training starts. What is wrong is a gradient, and nobody looks at those. One process shows it: the same weights
# and pictures, in float64, module by module, in the order in which the backward completes them.

# %%
class Mlp(nn.Module):
    def __init__(self, old, axis, forget):
        super().__init__()
        self.fc1, self.fc2, self.axis, self.forget = old.fc1, old.fc2, axis, forget

    def forward(self, x):
        if not self.forget:
            x = comm.replicate(x, self.axis)  # the one line: backward all-reduces
        y = F.gelu(F.linear(x, self.fc1.weight, self.fc1.bias))
        return comm.all_reduce(F.linear(y, self.fc2.weight), self.axis) + self.fc2.bias


def train(forgetful):
    axis, place = vit_tensor.tensor_axis(), hpnb.data.ImageTransform(32, device=hpnb.device())
    model = parallelize(vit_tensor.float64_vit(TINY), axis)
    for i, layer in enumerate(model.vit.layers):
        layer.mlp = Mlp(layer.mlp, axis, forget=i in forgetful)
    copies = [p for n, p in model.named_parameters() if "norm" in n or "embeddings" in n]  # whole on all ranks
    optimizer, errors, log = torch.optim.AdamW(model.parameters(), lr=4e-4), None, []
    batch = next(iter(hpnb.data.Loader(leaves, 24, transform=place)))
    for _ in range(24):
        loss = model(**batch).loss
        loss.backward()
        errors = errors or vit_tensor.gradient_errors(model, vit_tensor.serial_gradients(TINY, batch)[1])
        optimizer.step()
        optimizer.zero_grad()
        first = [p.detach().clone() for p in copies]
        hpnb.data_parallel.broadcast(first, axis)  # rank 0's
        log.append((loss.item(), step_timing.relative_distance(copies, first)))
    return errors, log

# %%
cases = {"right": (), "forgotten in layer 2": (2,), "in all layers": (0, 1, 2, 3)}
runs = {case: pool.run(train, layers) for case, layers in cases.items()}
errors = {case: runs[case][0][0] for case in ("right", "forgotten in layer 2")}
worst = ", ".join(f"{case} {max(each.values()):.0e}" for case, each in errors.items())
plot.show(
    figures.gradient_cliff(errors, title=f"measured · {N} ranks: a cliff stands where the sum was forgotten"),
    alt=f"Relative errors of gradients from the loss down; the largest: {worst}. The fault is a cliff, from rounding upwards.",
)
losses = {case: [loss for loss, _ in ranks[0][1]] for case, ranks in runs.items()}
apart = {case: [max(d for _, d in step) for step in zip(*(log for _, log in ranks), strict=True)] for case, ranks in runs.items()}
ends = ", ".join(f"{case} {series[0]:.2f} to {sum(series[-6:]) / 6:.2f}" for case, series in losses.items())
plot.show(
    plot.drift(losses, apart, title=f"measured · {N} ranks: the loss, and ranks' copies of norms and embeddings"),
    alt=f"Losses: {ends}. Beneath, the distance between the ranks' copies: 0 if right, growing if a sum is forgotten.",
)
lesson.field_guide.add(
    "the loss is that of one process, training looks healthy, whole weights differ by rank",
    "gradients beside one process's in float64, from the loss down: where is the cliff?",
    "an activation that all ranks use goes into a cut layer, and its gradient is not summed in the backward",
    notebook="03",
)
lesson.field_guide.show()

# %% [markdown]
# From the loss down everything is right to rounding, until the backward leaves the faulty MLP. fc1 and fc2 of that
# very layer are still right: their gradients are local. The norm before them is the first to hear from one rank
# alone, and it is wrong by half and more. Further up it is a tenth or so, for the residual carries most of the
# gradient past the fault. That is why the loss hardly minds, and why float64 helps: 1e-16 and 1e-2 cannot be
# confused; in bf16 they can.
#
# The lower figure has the second symptom, from 01: what is whole on all ranks (these copies are its "replicas") gets
# different gradients, and parts. The model that rank 0 saves is not the model that was trained.
#
# **Takeaway.** In a parallel forward errors shout; in its backward they whisper. Compare gradients, not losses.
#
# ### Exercise 2: read a cliff
#
# *Diagnose, 15 minutes.* You get `errors`, {module: relative error} from the loss down, of a ViT with something wrong
# in one layer. Return `("forward", None)` if the loss is wrong already, so that everything is; `("backward",
# "vit.layers.1.mlp")` if the sum of the gradient that leaves that module was forgotten (an attention:
# `"vit.layers.1.attention"`); `("own", "vit.layers.1.mlp.fc2")` if nothing but that module's own gradient is wrong.
# The check runs four such models on 2 ranks.
#
# Hint: above 1e-9 is no rounding. Look at what comes *after* the first that is wrong; and at what came *before* it.

# %% tags=["stub-2"]
def diagnose(errors):
    ...


# %% tags=["check-2"]
verdict = lesson.check(exercises.gradient_cliff, diagnose)
if verdict.status == "passed" and "errors" in vars():
    print("of the cliff drawn above you say:", diagnose(errors["forgotten in layer 2"]))
verdict

# %% [markdown]
# <details><summary>Solution</summary>
#
# The lonely one is a colleague's cure for a bias that was added t times: he added b/t on every rank. The output is
# right. The gradient of b is divided by t.
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
# ## A loss without logits
#
# The classifier of a ViT is small, and every rank computes it. A language model's is not: V words by h, cut by
# columns like any other. Each rank has the logits of V/t words, and gathering them would dwarf all else. But cross
# entropy, log Σ exp(z) - z_target, needs only three numbers a token from the others: the largest logit, the sum of
# exponentials, and the target's logit from whoever has it.

# %%
def two_losses(n=256, words=10_007):
    axis, draw = vit_tensor.tensor_axis(), torch.Generator().manual_seed(0)
    logits = torch.randn(n, words, dtype=torch.float64, generator=draw)
    targets = torch.randint(words, (n,), generator=draw)
    share = comm.split_sizes(words, axis.size)  # uneven, and that is all right
    first = sum(share[: axis.rank])
    mine = logits[:, first : first + share[axis.rank]]
    with hpnb.record.traffic() as gathered:
        whole = F.cross_entropy(comm.gather(mine, axis, 1, total=words), targets)
    with hpnb.record.traffic() as reduced:
        m, inside = mine.amax(1), (targets >= first) & (targets < first + mine.size(1))
        dist.all_reduce(m, dist.ReduceOp.MAX, axis.group)  # so that exp stays finite
        z = torch.where(inside, mine.gather(1, (targets - first).where(inside, 0)[:, None])[:, 0], 0.0)
        S = (mine - m[:, None]).exp().sum(1)
        dist.all_reduce(S, group=axis.group)
        dist.all_reduce(z, group=axis.group)
    return gathered.total, reduced.total, abs(((m + S.log() - z).mean() - whole) / whole).item()


gathered, reduced, off = pool.run(two_losses)[0]
rows = [("gather the logits (B)", theory.bytes_sent("all_gather", 8 * 256 * N * -(-10_007 // N), N), gathered),
        ("three reductions (B)", 3 * theory.bytes_sent("all_reduce", 8 * 256, N), reduced)]  # fmt: skip
ratios = lesson.comparison(rows, "identity", f"256 tokens, 10,007 words, float64: the losses differ by {off:.0e}, the bytes {gathered / reduced:,.0f} times")

# %% [markdown]
# (V does not divide, so the gather pads.) The ratio is V/6 on any number of ranks. The backward sends nothing:
# softmax minus one, of a rank's own words. `hpnb.tensor_parallel.cross_entropy` is this; 07 lives on it.
#
# ## What lies between the pairs
#
# Between two pairs each rank does the same norms and keeps the same inputs for the backward: of the 32 b s h bytes
# that a block keeps in 16 bits, 24 are cut and 8 are not. Now recall: an all-reduce is a reduce-scatter and an
# all-gather. Between the two each rank has finished sums of 1/t of the tokens; and norm, dropout and residual work
# token by token. So leave x cut along the tokens, and gather it at the next pair. That is *sequence parallelism*.
# Same bytes, and of a norm's input 1/t is kept.

# %%
odd, rows = IMAGES - 1, []  # tokens that do not divide
for mode, sequence in (("1d", False), ("1d+sp", True)):
    sent, kept = pool.run(vit_tensor.measure_block, SIZE, odd, DTYPE, "1d", sequence)[0]
    block = SIZE.block(odd, DTYPE.itemsize)
    rows.append((f"{mode}, sent", theory.block_sent(block, "1d", N, 1, sequence).bytes(), sent, "B", "identity"))
    rows.append((f"{mode}, kept", theory.activation_bytes(block, "1d", N, 1, sequence), kept, "B", "model"))
shares = ", ".join(f"{share:,}" for share in comm.split_sizes(odd * SIZE.tokens, N))
ratios = lesson.comparison(rows, title=f"a block on {N} ranks; 1d+sp: {odd} x {SIZE.tokens} tokens in shares of {shares}")

# %% [markdown]
# Nearly the same bytes. The tokens of a batch are cut as they lie, one behind the other: 3 images of 197 over 4 ranks
# are 148, 148, 148 and 147. They travel in equal shares, 4 x 148. And since a norm now sees 1/t of the tokens, the
# gradients of its weights are parts of a sum: one small all-reduce a block. But what a column layer has gathered is
# kept whole: on 4 ranks a block keeps 14 b s h bytes without, 11 with it; 8 in Megatron-LM, which drops that, too,
# and gathers again.
#
# ### Exercise 3: norms on a share of the tokens
#
# *Implement, 20 minutes.* `x` (s/t, h) are this rank's tokens. Return x + GELU(norm(x)·g·A)·B, with norm(x)·g
# elementwise, of these tokens alone. `norm` is given; g, A and B come whole, as in exercise 1. The check wants exact
# output and gradients, g's too, a norm that sees s/t tokens, and no more bytes than exercise 1 sends for as many
# tokens, but for the gradient of g.
#
# Hint: `gather` and `all_gather` do the same forward. Backward, one slices the gradient, the other sums it first
# (`hpnb.comm` has a table). Which is right where every rank goes on with columns of its own?

# %% tags=["stub-3"]
def block(x, g, norm, A, B, axis):
    ...


# %% tags=["check-3"]
lesson.check(exercises.sequence_parallel, block)

# %% [markdown]
# <details><summary>Solution</summary>
#
# g is the same on all ranks, and each uses it on other tokens: `replicate` sums its gradient. (Multiplied after the
# gather, the answer is as exact and the check content; but every rank then does all s tokens of it.)
#
# ```python
# def block(x, g, norm, A, B, axis):
#     A, B = A.chunk(axis.size, 1)[axis.rank], B.chunk(axis.size, 0)[axis.rank]
#     y = norm(x) * comm.replicate(g, axis)
#     y = F.gelu(comm.all_gather(y, axis, 0) @ A)
#     return x + comm.reduce_scatter(y @ B, axis, 0)
# ```
# </details>

# %% [markdown]
# ## Grids
#
# 1D sends 8(t-1)/t b s h numbers a block: as many, however many ranks share the work. For every rank needs all of x.
# So cut x too. On q x q ranks let rank (i, j) hold block (i, j) of every matrix, activations included. Then
#
# $$ C_{ij} = \sum_t A_{it}\,B_{tj} $$
#
# takes q steps, counted by t: in step t column t sends its blocks of A across the rows, row t sends its blocks of B
# down the columns, and everybody multiplies what came and adds it up. The next panels travel meanwhile. That is
# SUMMA. 2D tensor parallelism is made of it: the product lies as its factors did, and nothing is ever whole anywhere.
# The backward is two more products, dA = dC Bᵀ and dB = Aᵀ dC, in which sums travel too.
#
# **2.5D** stacks d such grids: each has a d-th of the tokens and all of the weights, whose gradients it sums with the
# others, as data parallelism does. **3D** puts l x l x l ranks in a cube, gathers x along one direction and W along
# another, and scatters the sum along the third. A block sends, in numbers that leave each of p ranks,
#
# | | p | by tokens | by weights |
# |---|---|---|---|
# | 1d | any | 8 (p-1)/p · b·s·h | |
# | 2d | q² | 21 (q-1)/q² · b·s·h | 36 (q-1)/q² · h² |
# | 2.5d | d q² | 21 (q-1)/(d q²) · b·s·h | (36 (q-1) + 24 (d-1)/d)/q² · h² |
# | 3d | l³ | 39 (l-1)/l³ · b·s·h | 36 (l-1)/l³ · h² |
#
# and a little for norms and biases.
#
# <details><summary>Where 21, 39 and 36 come from</summary>
#
# The inputs of a block's four matrices are h, h, h and 4h wide, together 7h; their outputs 3h, h, 4h and h, together
# 9h; the matrices have 12h². SUMMA moves inputs three times, x in the forward, x (for dW) and dx in the backward:
# 21 = 3·7. And weights three times, W forward and backward and dW: 36 = 3·12. 3D does the same, and moves outputs
# twice, the sum y and its gradient dy: 39 = 21 + 2·9.
# </details>
#
# What a grid sends falls with p. But weights travel too, and that pays only when tokens are many beside h. Rank the
# modes. (Tiny processes of a CPU: about bytes and exactness, not time. Bytes under the picture are means over ranks.)

# %%
lesson.predict("03.modes", f"8 ranks, 32 images of {TINY.tokens} tokens of {TINY.hidden} numbers: which mode's block sends the fewest "
               "bytes, 1d, 2.5d (2 x 2 x 2) or 3d (2 x 2 x 2)?", guess=None, kind="ranking")  # fmt: skip


def product(q, m=96):
    down, across = vit_tensor.tensor_axis().split(q, q)
    a, b = (torch.randn(m, m) for _ in range(2))  # this rank's blocks
    with hpnb.record.traffic() as t:
        summa.ab(a, b, summa.SummaGrid(down, across, hpnb.device()))
    return t.messages


messages = hpnb.launch(product, 3, ranks=9, device="cpu")
plot.show(
    grid_steps(messages, (3, 3), names=lambda m: "B down" if m.axis == "tp.0" else "A across",
                    title="measured · SUMMA on 3 x 3 ranks: who sends which block when"),
    alt="Three grids of nine ranks; in step t the ranks of column t send across their rows, those of row t down their columns.",
)  # fmt: skip

# %% [markdown]
# ### Exercise 4: one step of SUMMA
#
# *Implement, 15 minutes.* Return c + A_it·B_tj, where c, a and b are this rank's blocks. `across` is the axis of the
# ranks in this row (`across.rank` is j), `down` that of this column (`down.rank` is i). The check runs all steps on 2
# x 2 ranks and wants the sum after each, and the bytes of one panel each way.
#
# Hint: `comm.broadcast(x, axis, source)` gives all ranks of the axis what place `source` has.

# %% tags=["stub-4"]
def panel(c, a, b, t, across, down):
    ...


# %% tags=["check-4"]
lesson.check(exercises.summa, panel)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def panel(c, a, b, t, across, down):
#     return c + comm.broadcast(a, across, t) @ comm.broadcast(b, down, t)
# ```
# </details>

# %% [markdown]
# Now the modes: the same ViT on eight ranks, each against one process, and what a block sends and keeps.

# %%
def on_a_grid(mode, depth):
    draw = torch.Generator().manual_seed(0)
    batch = {"pixel_values": torch.randn(32, 3, 32, 32, generator=draw), "labels": torch.arange(32) % 3}
    model = parallelize(vit_tensor.float64_vit(TINY), vit_tensor.tensor_axis(), mode, depth=depth)
    value = model(**batch).loss
    value.backward()
    loss, right = vit_tensor.serial_gradients(TINY, batch)
    off = max(abs(value.item() / loss - 1), *vit_tensor.gradient_errors(model, right).values())
    return off, sum(p.numel() for p in model.parameters()), *vit_tensor.measure_block(TINY, 32, torch.float32, mode, False, depth)


rows, told, seen = [], {}, {}
with hpnb.Ranks(8, device="cpu") as eight:
    for mode, depth in {"1d": 1, "2.5d": 2, "3d": 1}.items():
        off, numbers, seen[mode], kept = eight.run(on_a_grid, mode, depth)[0]
        told[mode] = theory.block_sent(TINY.block(32, 4), mode, 8, depth).bytes()
        cells = (f"{numbers:,}", lesson.number(kept, "B"), f"{told[mode]:,.0f} B", f"{seen[mode]:,.0f} B", f"{seen[mode] / told[mode]:.2f}")
        rows.append((mode, " x ".join(map(str, theory.grid_sides(mode, 8, depth))), f"{off:.0e}", *cells))
columns = ("mode", "grid", "loss and gradients off by", "parameters a rank", "a block keeps", "sends, predicted", "sends", "ratio")
lesson.table(columns, rows, f"8 ranks; the whole model has {TINY.parameters(classes=3):,} parameters")
lesson.reveal("03.modes", seen, predicted=sorted(told, key=told.get))

# %% [markdown]
# All three compute what one process does. A rank of a grid keeps an eighth of every activation, where 1D keeps inputs
# and outputs of norms whole. (But 2.5D has its weights on each of two layers: more parameters than 1D.)
#
# ### When does each win?
#
# Fewer bytes are not always less time. Bytes are a mean over ranks; but a broadcast takes as long as its whole panel,
# since its last receiver waits for all of it, while in a ring all ranks send at once. In time, panels of tokens cost
# 2D 21/q · b·s·h numbers, 1D's all-reduces 8 (p-1)/p · b·s·h: 10.5 against 6 on 2 x 2 ranks, 7 against 7.1 on 3 x 3.
# And on 2 x 2 ranks 2D makes 53 calls a block, 1D four.
#
# First a race; its tokens are of all ranks, the maps' of one. (Four ranks on fewer cores share them: there compare
# modes alone.) Areas of the first map are predicted from your card's α and B: which mode of 4 ranks *communicates*
# for the shortest time; by the numbers above 1D. Dots are measured: whether blocks by 1D or 2D took less time *in
# all*. The second map is a prediction: 64 ranks on such a wire.

# %%
square, shape, dtype = vit_tensor.four_ranks(pool)  # four ranks: on GPUs if there are as many
card, MODES = lesson.machine_card(4), ("1d", "1d+sp", "2d")
raced = vit_tensor.time_modes(square, shape, dtype, MODES)
told = vit_tensor.predict_modes(raced, card, dtype)
columns = ("h", "tokens", *(f"{mode}, {what}" for mode in MODES for what in ("predicted", "measured")))
rows = [(f"{size.hidden:,}", f"{images * size.tokens:,}", *(lesson.number(t[mode], "s") for mode in MODES for t in (told[size, images], seconds)))
        for (size, images), seconds in raced.items()]  # fmt: skip
lesson.table(columns, rows, f"a block on 4 ranks, {card.hardware}: forward and backward")
won = [(images * size.tokens / 4, size.hidden, min(("1d", "2d"), key=seconds.get)) for (size, images), seconds in raced.items()]
tokens, hidden = ([2.0 ** (k / 4) for k in range(*ends)] for ends in ((16, 64), (22, 57)))
for ranks, depth, dots in ((4, 1, won), (64, 4, [])):
    modes = theory.cheapest_modes(tokens, hidden, ranks, card.link, depth, bytes_per_value=dtype.itemsize)
    cells = [mode for row in modes for mode in row]
    areas = ", ".join(f"{mode} {100 * cells.count(mode) / len(cells):.0f} %" for mode in dict.fromkeys(cells))
    source = f"measured · {ranks} ranks" if dots else f"predicted · {ranks} ranks on such a wire"
    plot.show(
        figures.cheapest_mode(tokens, hidden, modes, dots, title=f"{source}, ρ is {card.rho:,.0f} FLOP a byte"),
        alt=f"Which mode communicates for the shortest time, over tokens and hidden size, on {ranks} ranks: {areas} of the map.",
    )
vit_tensor.add_to_ledger(square, raced, told, card, dtype)

# %% [markdown]
# The prediction lacks a term: calls. Where a mode takes as long for many times the tokens, it waits for the host,
# which launches kernels and messages one by one. 2D has most of both.
#
# The maps leave out computing, which is shared equally, and hiding, which is not: SUMMA's panels travel beside
# products, 1D's backward has W. But a grid's products come in q pieces, and small ones are slow.
#
# On 64 ranks grids win almost everywhere. To the right by bytes: 1D's have stayed, theirs have fallen. To the left by
# latency: 1D's four rings take 126 steps each, all of 3D 144. (2D's 1,414 win nowhere.) With trees (12 steps, not
# 126) 1D would have part of the left edge.
#
# **Takeaway.** On four ranks of one host use 1D; cut tokens when memory is short. Grids are for many ranks.
#
# The explorer hides nothing: messages and products take turns, at 400 TFLOP/s, not your card's.
#
# **Challenge.** 16 ranks or more on InfiniBand NDR, a width of 8,192 or less: computing at least 0.4 of sending, with
# at most 2 GB of states and activations. Why can no batch make 1D meet it?
#
# <details><summary>Answer</summary>
#
# NDR has 50 GB/s, so ρ is 8,000. At best, 16 ranks at h = 8,192, 1D has 4.5·8,192/(15·8,000) = 0.31. Scores of
# 8,192 tokens add s/6h = 1/6 of that: 0.36. The batch is in neither. Of the 1,344 settings that such ranks, widths and
# link leave, four meet the challenge: 2D on 16 ranks, and 2.5D on 16, 32 and 64, all with sequences of 8,192 in
# batches of 8 to 32.
# </details>

# %%
lesson.explorers.tensor_modes()

# %% [markdown]
# ### Exercise 5: how many ranks to cut over
#
# *Design, 20 minutes; it returns to 01.* `job.devices` devices train a transformer of `job.layers` blocks of width
# `job.hidden`. Return t: so many of them share each matrix by 1D, the rest are d = devices/t replicas. A device holds
# `16 * job.parameters / t` bytes of states, at most `job.cap`. A step is its computing (6 FLOPs a parameter and
# token, over all devices at `job.rate`), plus four all-reduces a layer over t ranks of `2 * job.tokens / d *
# job.hidden` bytes along `job.link`, in line, plus what a gradient of `2 * job.parameters / t` bytes in 24 buckets
# leaves exposed over d ranks, behind two thirds of all that. The check allows 1 % over the shortest step of those
# that fit.
#
# Hint: `theory.seconds("all_reduce", bytes, ranks, wire)` and `theory.exposed_seconds(behind, bytes, buckets, ranks,
# wire)`. The fewest that fit are not always best: 01's law asks for tokens.

# %% tags=["stub-5"]
def choose(job):
    ...


# %% tags=["check-5"]
verdict = lesson.check(exercises.choose_ranks, choose)
if verdict.status == "passed" and "card" in vars():
    print("eight such devices, ViT-L/16, 50,000 tokens: t =", choose(exercises.TensorTask(8, 24, 1024, 5e4, card.matmul, card.link, 80e9)))
verdict

# %% [markdown]
# <details><summary>Solution</summary>
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
#
# With 8,192 tokens on 64 devices, replicas spend the step on gradients. Cut over 16, a gradient is a 16th. The law
# gives 0.31 there, and 0.10 and 0.19 for the 4 ranks of the two jobs on Ethernet. So 1D sends for longer than it
# computes, and is still the best that is left where memory or few tokens rule replicas out: the law says what 1D
# costs, not what else there is. (A pipeline, perhaps: 02.)
# </details>

# %% [markdown]
# ## A model of your own
#
# Here is a model that no library knows: no attention, and an MLP with a gate, which is two columns and one row.
# `page` gives each weight's role, `anatomy` the modules of embedding, blocks and head; `embed`, `run` and `finish`
# are their forwards, for pipelines (02). Each of four ranks will hold more than a quarter: 1D leaves norms,
# embedding, head and biases of rows whole, 2D halves most of them.

# %%
class Gated(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(h), Gated(h)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, h=16):
        super().__init__()
        self.embed, self.layers = nn.Linear(12, h), nn.ModuleList(Layer(h) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, 5)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))

# %%
class Parts(Anatomy):  # its forward, taken apart
    def embed(self, inputs):
        return self.embedding[0].module(inputs["x"])

    def run(self, block, hidden, inputs):
        return block.module(hidden)

    def finish(self, hidden, inputs):
        return self.head[1].module(self.head[0].module(hidden).mean(1))


def anatomy(net):
    blocks = [Part(f"layers.{i}", layer) for i, layer in enumerate(net.layers)]
    return Parts((Part("embed", net.embed),), tuple(blocks), (Part("norm", net.norm), Part("head", net.head)))


def page(net):
    roles = [*linear("embed", "embedding"), *norm("norm"), *linear("head", "head")]
    for i, units in enumerate(layer.mlp.up.out_features for layer in net.layers):
        roles += [*norm(f"layers.{i}.norm"), *linear(f"layers.{i}.mlp.gate", "column", units)]
        roles += [*linear(f"layers.{i}.mlp.up", "column", units), *linear(f"layers.{i}.mlp.down", "row", units)]
    return dict(roles)


def own(mode):
    hpnb.models.register(Net, anatomy, page)
    torch.manual_seed(0)
    alone, x = Net().double(), torch.randn(8, 6, 12, dtype=torch.float64)
    alone(x).square().sum().backward()
    net = Net().double()
    net.load_state_dict(alone.state_dict())
    parallelize(net, vit_tensor.tensor_axis(), mode)(x).square().sum().backward()
    held, mine = sum(p.numel() for p in net.parameters()), full_gradients(net)
    off = step_timing.relative_distance(mine.values(), [alone.get_parameter(n).grad for n in mine])
    return mode, f"{held / sum(p.numel() for p in alone.parameters()):.2f}", f"{off:.0e}"


with hpnb.Ranks(4, device="cpu") as ranks:
    rows = [ranks.run(own, mode)[0] for mode in ("1d", "2d")]
lesson.table(("mode", "of its parameters on a rank", "gradients off by"), rows, "your model on 4 ranks")
lesson.ledger.show()

# %% [markdown]
# ## What to remember
#
# - Columns, then rows: nothing is sent between them. A block makes four all-reduces of b·s·h numbers.
# - Computing over sending is 4.5 h/((t-1)ρ). No batch helps; so 1D belongs on the fastest wire.
# - A missing sum in the backward leaves the loss right. Compare gradients with one process's, from the loss down.
# - Cross entropy needs three numbers a token, never the logits.
# - Sequence parallelism sends the same bytes and keeps 1/t of what goes into norms.
# - Grids cut every activation and send weights: they want many ranks, and many tokens beside h.
#
# **When not to use this.** When replicas will do (01): they send once a step, not four times a block. When ranks are
# on different hosts: let pipelines or replicas cross, if they can (02, 04). When h is below (t-1)ρ/4.5: use fewer
# ranks, if they can hold the model. And 2D on fewer than 16 ranks: there 1D is quicker as a rule, and simpler.
#
# **Papers.** Shoeybi et al. 2019, *Megatron-LM* (1909.08053). Korthikanti et al. 2022, *Reducing activation
# recomputation in large transformer models* (2205.05198). Van de Geijn & Watts 1997, *SUMMA*. Xu et al. 2021, *An
# efficient 2D method for training super-large deep learning models* (2104.05343). Wang et al. 2021, *Tesseract*
# (2105.14500). Bian et al. 2021, *Maximizing parallelism in distributed training for huge neural networks*
# (2105.14450).
