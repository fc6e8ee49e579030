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
# # What refuses to divide?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hpnb/hpnb/blob/main/notebooks/07_gpt2_tensor_parallel.ipynb)
# [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/hpnb/hpnb/blob/main/notebooks/07_gpt2_tensor_parallel.ipynb)
#
# **The question.** In notebook 03 nearly everything divided, heads, neurons and classes, and there was no dropout. The
# largest GPT-2 has 25 heads, 50,257 words, and drops a tenth of its values. What becomes of tensor parallelism where numbers
# are odd, and where they are drawn?
#
# **You will be able to** deal out heads that do not divide, and say what that costs; take an exact loss of a cut vocabulary,
# padding included; say for each dropout of a model which ranks must draw alike, and see from masks whether they do; count
# what a layer keeps, by the published formula and beyond it; tell Megatron's sequence parallelism, Ulysses and ring
# attention apart by what they send.
#
# **You should know** notebook 03 (columns then rows, sequence parallelism), and from 01 what "equal" means.
#
# **Time.** 30 minutes to read; under 2 minutes to run on a laptop, and as long on 2 or 4 GPUs; 90 minutes for the exercises.
#
# **Letters.** t ranks share a model of a heads, V words and width h; b rows of s tokens are n = b·s tokens. *Heads* are an
# attention's; *the* head is the last layer, which has a logit for each of the V words. (06 wrote a for the weight of that
# head in blocks; here a counts heads.)
#
# **Two questions to recall.** From 03: which all-reduces does a block make? From 06: what is a head of V words worth in
# blocks?
#
# <details><summary>Answers</summary>
# Two forward, where attention and MLP end, two backward, where they began; b·s·h numbers each. V/(12 h + 2 s): 2.4 blocks
# in the largest GPT-2.
# </details>

# %% tags=["setup"]
import importlib.util

assert importlib.util.find_spec("hpnb"), (
    "hpnb is missing: run `%pip install hpnb` in a cell, then this cell again"
)
import hashlib
from itertools import islice
import torch, torch.distributed as dist, torch.nn.functional as F
import hpnb
from hpnb import Layout, comm, lesson, plot, theory
from hpnb.lesson.figures import gpt2_tensor as figures
from hpnb.lesson.programs import dropout_masks, gpt2_tensor, step_timing, vit_pipeline, vit_tensor
from hpnb.lesson.exercises import gpt2_tensor_parallel as exercises
from hpnb.tensor_parallel import full_state_dict, parallelize

N = min(4, hpnb.ranks.default_ranks())
pool = hpnb.Ranks(N)  # these ranks stay to the end
sizes = lesson.choose_sizes("07", pool)  # the largest that fit
SIZE, DTYPE, ROWS, SMALL = sizes.size, sizes.dtype, sizes.batch, sizes.laptop  # SMALL has 25 narrow heads
BLOCK = SIZE.block(ROWS, bytes_per_value=DTYPE.itemsize)
english = hpnb.data.text("train", block=64)  # 509 words
texts = list(islice(hpnb.data.Loader(english, 8), 33))  # the same batches on every rank
name = f"GPT-2, blocks of {SIZE.hidden} in {SIZE.heads} heads, {SIZE.vocab_size:,} words, {str(DTYPE)[6:]}, {ROWS} x {SIZE.length} tokens"
here = lesson.banner(N, model=name, data=english.describe(), sizes=sizes)

# %% [markdown]
# ## Run it unchanged
#
# In 03 you cut a matrix by `w.chunk(axis.size, dim)[axis.rank]`: columns of the first, rows of the second. Do the same to an
# attention of 25 heads. GPT-2 holds q, k and v in one matrix Q | K | V of (h, 3h), so this line can be used in two ways: on
# that matrix, or on q, k and v each. A third way forgets the line, and gives each rank whole heads. Which output is right?


# %%
def by_hand(heads=25, d=8, s=32):
    axis, h = vit_tensor.tensor_axis(), heads * d
    x, qkv, out = (
        gpt2_tensor.random_values(*shape, seed=i) for i, shape in enumerate([(s, h), (h, 3 * h), (h, h)])
    )
    right = gpt2_tensor.attention(x @ qkv, heads) @ out

    def own(w, dim):
        return w.chunk(axis.size, dim)[axis.rank]

    apart = torch.cat([own(each, 1) for each in qkv.chunk(3, 1)], 1)
    ways = {"03's line": (own(qkv, 1), own(out, 0), heads // axis.size),
            "03's line, to q, k and v": (apart, own(out, 0), heads),
            "whole heads": gpt2_tensor.rank_heads(qkv, out, heads, axis.size, axis.rank)}  # fmt: skip
    found = []
    for way, (columns, rows, mine) in ways.items():
        has = f"{mine}, each {rows.size(0) / mine:.4g} wide"
        try:
            z = comm.all_reduce(gpt2_tensor.attention(x @ columns, mine) @ rows, axis)
            found.append((way, has, f"{step_timing.relative_distance([z], [right]):.0e}"))
        except RuntimeError as error:
            found.append((way, has, " ".join(str(error).split()[:9]) + " ..."))
    return found


lesson.table(
    ("cut by", "rank 0 has heads", "output off by"),
    pool.run(by_hand)[0],
    f"an attention of 25 heads of 8 on {N} ranks, float64",
)

# %% [markdown]
# (A head should be 8 wide.)
#
# The first fails aloud: a slice of Q | K | V is mostly Q on the first rank and mostly V on the last, and its width is no
# number of heads. The second runs wherever h divides by t, has the right shape, and is wrong. The matrix divides; the
# *head* does not. A rank has the columns of some whole heads and of a piece of one, and takes them for 25 narrow ones.
# It would not help to give everybody a piece of every head: a score q·k is a sum over all columns of a head, and a softmax
# of parts is not a part of the softmax.
#
# (One could sum scores over ranks, before softmax. That is an all-reduce of b·a·s² numbers in place of b·s·h: s/d times as
# many, for heads d wide. In GPT-2 16 times.)
#
# What does the library do? Below is 03's training cell with model and data changed: 5 heads, 509 words, and one table that is
# both embedding and head.
#
# At its end the cell asks what uneven heads will cost. Write your guess into it before you read on.


# %%
def train(texts):
    alone, model = (hpnb.models.gpt2("laptop", dtype=torch.float64, device=hpnb.device()) for _ in range(2))
    parallelize(model, vit_tensor.tensor_axis(), mode="1d")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (alone, model)]
    for batch in texts:
        words = batch["input_ids"].to(hpnb.device())
        logits = alone(input_ids=words).logits[:, :-1].flatten(0, 1)
        losses = [F.cross_entropy(logits, words[:, 1:].flatten()), model(input_ids=words, labels=words).loss]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    weights, theirs = full_state_dict(model), alone.state_dict()
    off = (
        step_timing.relative_distance(losses[1:], losses[:1]),
        step_timing.relative_distance(weights.values(), [theirs[name] for name in weights]),
    )
    held = (tuple(w.shape) for w in (model.transformer.h[0].attn.c_attn.weight, model.transformer.wte.weight))
    return losses[1].item(), *off, *held


ran = pool.run(train, texts[:3])
print(
    f"loss {ran[0][0]:.3f}; off one process's by {ran[0][1]:.0e}, weights after three steps by {ran[0][2]:.0e}"
)
rows = [
    (f"rank {r}", f"{c_attn}", f"{c_attn[1] // 60}", f"{table}") for r, (*_, c_attn, table) in enumerate(ran)
]
lesson.table(("", "q | k | v", "heads", "words"), rows, "a GPT-2 of 100, with 5 heads of 20 and 509 words")
lesson.predict("07.block", f"{SIZE.heads} heads over {N} ranks, width {SIZE.hidden}, {SIZE.length} tokens a row: how many times the mean "
               "of all ranks does the fullest compute on a block?", guess=None)  # fmt: skip

# %% [markdown]
# Exact. Nothing was padded, and nobody has half a head: what is uneven is dealt out unevenly. The next section has the
# price. And dropout was 0 here; it has a section of its own.
#
# ## Uneven heads
#
# 25 heads over 4 ranks are 7, 6, 6 and 6. All meet in the all-reduce at the end of the attention, so all take as long as 7.
# Of a block's 24h² + 4sh FLOPs a token, 8h² + 4sh go by heads. The rest, the MLP, divides. So against an even share a block
# takes
#
# $$ 1 + \frac{2h+s}{6h+s}\left(\frac{t\,\lceil a/t\rceil}{a} - 1\right) $$
#
# | t | heads | attention | block (h = 1,600, s = 1,024) |
# |---|---|---|---|
# | 2 | 13, 12 | 1.04 | 1.016 |
# | 3 | 9, 8, 8 | 1.08 | 1.032 |
# | 4 | 7, 6, 6, 6 | 1.12 | 1.048 |
# | 5 | 5, 5, 5, 5, 5 | 1.00 | 1.000 |
# | 8 | 4, 3, 3, 3, 3, 3, 3, 3 | 1.28 | 1.111 |
#
# Megatron-LM wants t to divide a, so people pad 25 heads to 28, 7 on each of 4 ranks. Is dealing out 25 quicker? No: all wait
# for the 7. It saves the others' memory and work, and no time.
#
# Now measured, part by part:

# %%
took = pool.run(gpt2_tensor.time_heads, SIZE, ROWS, DTYPE)[0]
dealt = comm.split_sizes(SIZE.heads, N)
mean = {part: sum(each[part] for each in took) / N for part in ("attention", "MLP")}
told = {
    f"rank {r}, {dealt[r]} heads": mean["attention"] * dealt[r] * N / SIZE.heads + mean["MLP"]
    for r in range(N)
}
fullest = sum(took[0].values()) / sum(mean.values())
plot.show(
    figures.stacked(dict(zip(told, took, strict=True)), told, "s", "predicted by heads alone",
                 title=f"measured · computing one block, {'CPU time, ' if here.device == 'cpu' else ''}forward and backward"),
    alt="What each rank computes; of the mean attention " + ", ".join(f"{each['attention'] / mean['attention']:.2f}" for each in took) + ".",
)  # fmt: skip
lesson.reveal("07.block", fullest, predicted=theory.block_imbalance(BLOCK, N))
a_head = sum(each["attention"] for each in took[1:]) / sum(dealt[1:])
ratios = lesson.comparison([("attention of rank 0, over the mean", dealt[0] * N / SIZE.heads, took[0]["attention"] / mean["attention"]),
                            ("a head on rank 0, over a head elsewhere", 1, took[0]["attention"] / dealt[0] / a_head)])  # fmt: skip

# %% [markdown]
# A tick is where the bar would end if the attention's seconds went by heads alone, and the MLP's were equal. (Ranks that
# share cores would measure each other. There one of them computes each rank's share in turn.)
#
# A block's ratio is near 1 whatever happens, so read the last row: the seconds of one head. Where a head costs *less* on the
# fullest rank, a part of the attention does not go by heads: what every rank does with x, launches of kernels, and on GPUs
# a product computed in tiles, of which 6 heads may need as many as 7. Unevenness then costs less than the formula says.
#
# **Takeaway.** Uneven is exact and costs t⌈a/t⌉/a on attention alone. Choose t among divisors of the heads if you can: 5, for
# 25.
#
# ### Exercise 1: deal out heads
#
# *Implement, 15 minutes.* Write `share(qkv, bias, out, heads, axis)`. Return three tensors: this rank's columns of `qkv`
# (h, 3h), which is Q | K | V, their part of `bias` (3h,), and its rows of `out` (h, h). The check runs causal attention with
# them on 2 and 4 ranks, with 12, 25 and 23 heads. It wants the exact output, and nobody with more heads than ⌈a/t⌉.
#
# Hint: `comm.split_sizes(25, 4)` is (7, 6, 6, 6); where does rank r begin?


# %% tags=["stub-1"]
def share(qkv, bias, out, heads, axis): ...


# %% tags=["check-1"]
lesson.check(exercises.split_heads, share)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def share(qkv, bias, out, heads, axis):
#     dealt, d = comm.split_sizes(heads, axis.size), out.size(0) // heads
#     first = d * sum(dealt[: axis.rank])
#     mine = slice(first, first + d * dealt[axis.rank])
#     columns = torch.cat([part[:, mine] for part in qkv.chunk(3, 1)], 1)
#     return columns, torch.cat([part[mine] for part in bias.chunk(3)]), out[mine]
# ```
# </details>

# %% [markdown]
# ## A loss in three numbers
#
# 50,257 = 29 · 1733: no t that anyone uses divides it. To 4 ranks the library deals out 12,565 + 12,564 + 12,564 + 12,564
# words. Others pad the table to 50,304, a multiple of 128, and then 47 words that do not exist must be kept out of the
# softmax: with logits of 0 they make the first loss too large by log(50,304/50,257) = 0.0009, which nobody would see.
#
# 03 showed why no rank needs the others' logits. Three numbers a token are enough: the largest logit, the sum of
# exponentials, the target's logit. In a whole model there are two more sums, of b·s·h numbers each. Forward, of the words
# that were looked up: a rank finds zeros for those that it does not have. Backward, of the gradient of the head's input.
# And there is a detail: GPT-2 asks position i for word i + 1, so a row of 1,024 has 1,023 targets. The last position stays,
# with a target that is ignored, so the loss is of all n = b·s.
#
# Commit to the bytes of a step. The loss's numbers are float32, whatever the others are.

# %%
lesson.predict("07.words-bytes", f"{ROWS} x {SIZE.length} tokens of {SIZE.hidden} numbers of {DTYPE.itemsize} bytes, {SIZE.vocab_size:,} words: "
               f"how many bytes leave each of {N} ranks in a step because the vocabulary is cut?", guess=None, unit="B",
               kind="identity")  # fmt: skip

# %%
sent = pool.run(gpt2_tensor.bytes_around_blocks, SIZE, ROWS, DTYPE)[0]
n, V = ROWS * SIZE.length, [509 * 2 ** (k / 2) for k in range(18)]
lesson.reveal("07.words-bytes", sent, predicted=theory.vocabulary_bytes(BLOCK, N))
activation = theory.bytes_sent("all_reduce", n * SIZE.hidden * DTYPE.itemsize, N)
logits = theory.gathered_logits_bytes(n, SIZE.vocab_size, N, DTYPE.itemsize)
rows = [("words that are looked up", activation), ("gradient of the head's input", activation), ("the loss", theory.sharded_loss_bytes(n, N)),
        ("in place of the loss: gathered logits", logits)]  # fmt: skip
lesson.table(("what", "leaves a rank"), [(what, lesson.number(nbytes, "B")) for what, nbytes in rows])
found = pool.run(gpt2_tensor.compare_losses, 16, (509, 4001, 50_257, 128_256))[0]
counted = {"gather the logits": {words: whole / 16 for words, (whole, *_) in found.items()},
           "three reductions": {words: three / 16 for words, (_, three, _) in found.items()}}  # fmt: skip
lines = {
    "gather the logits": [theory.bytes_sent("all_gather", 4 * words, N) for words in V],
    "three reductions": [theory.sharded_loss_bytes(1, N)] * len(V),
}
times, off = (
    counted["gather the logits"][50_257] / counted["three reductions"][50_257],
    max(off for *_, off in found.values()),
)
plot.show(
    figures.vocabulary_bytes(V, lines, counted, {"GPT-2": 50_257, "Llama 3": 128_256}, title=f"a loss on {N} ranks, float32: {times:,.0f} times fewer bytes at 50,257 words",
                    caption=f"The two losses differ by {off:.0e} at most."),
    alt=f"Bytes a token over words, log-log: gathering grows with the vocabulary, three reductions do not; {times:,.0f} times at 50,257 words.",
)  # fmt: skip

# %% [markdown]
# It is 03's V/6, whatever ranks and batch (half of it where logits would travel in 16 bits). Memory goes the same way: a
# rank holds logits of V/t words. What a pipeline could not do (06), make the head thinner, tensor parallelism does, for two
# all-reduces of an activation.
#
# **Takeaway.** Cut the vocabulary, never gather logits. (`outputs.logits` gathers when you read it; `outputs.loss` never
# does.)
#
# ### Exercise 2: a loss of cut words
#
# *Implement, 25 minutes; it returns to 03 and 06.* Write `loss(logits, targets, first, axis)`. Return (the sum of all losses,
# how many targets count). `logits` (n, words of this rank) begin with word `first`; `targets` (n,) are whole, and one of -100
# counts for nothing. V is 37. The check wants one process's sum and gradients in float64, on 2 and 3 ranks, with three
# numbers a token in at most three calls forward, and none backward; also where logits are in the ten thousands, and where
# no target counts.
#
# Hint: `comm.all_reduce` sums, and its backward sends nothing; for the largest `dist.all_reduce(m, dist.ReduceOp.MAX,
# axis.group)`, on something detached. Whose is target -100?


# %% tags=["stub-2"]
def loss(logits, targets, first, axis): ...


# %% tags=["check-2"]
lesson.check(exercises.vocab_parallel_loss, loss)

# %% [markdown]
# <details><summary>Solution</summary>
#
# The largest only keeps exp finite: it cancels, so it needs no gradient. The two sums may share one message.
#
# ```python
# def loss(logits, targets, first, axis):
#     m = logits.detach().amax(1)
#     dist.all_reduce(m, dist.ReduceOp.MAX, axis.group)
#     own, counts = targets - first, targets != -100
#     here = counts & (own >= 0) & (own < logits.size(1))
#     z = logits.gather(1, own.where(here, 0)[:, None])[:, 0].where(here, 0.0)
#     S = (logits - m[:, None]).exp().sum(1)
#     S, z = comm.all_reduce(torch.stack([S, z]), axis)
#     return (m + S.log() - z).where(counts, 0.0).sum(), counts.sum()
# ```
# </details>

# %% [markdown]
# ## Randomness has a layout
#
# Dropout draws. Who must draw alike? That depends on how the activation lies:
#
# | dropout | without sequence parallelism | with |
# |---|---|---|
# | after the embedding | replicated: alike | replicated: alike |
# | of attention's probabilities | cut by heads: apart | cut by heads: apart |
# | after attention, after the MLP | replicated: alike | cut by tokens: apart |
#
# In the last row one line of the model must draw alike in one layout and apart in the other. So who draws alike is no
# property of a rank, nor of a module: it belongs to the layout. Two simple policies come to mind. *A seed each*:
# `torch.manual_seed(7 + rank)`. *One seed*: `torch.manual_seed(7)` everywhere. Below is what rank 0 and the last rank drop,
# for p = 1/2. XOR is what one of the two drops and the other keeps: nothing if they draw alike, half if they draw apart.
#
# **A puzzle.** With one seed all generators start alike. Then rank 0 draws masks for its heads, and the last rank for its
# own. What will you see of the attention, and what after the MLP?

# %%
cases = {"right": ("right", False), "a seed each": ("a seed each", False), "one seed": ("one seed", False),
         "right, tokens cut": ("right", True)}  # fmt: skip
shown = {
    case: dropout_masks.mask_pictures(pool.run(dropout_masks.record_masks, policy, 0.5, cut), cut)
    for case, (policy, cut) in cases.items()
}
xor = {case: [f"{100 * one.differ:.0f} %" for one in found] for case, found in shown.items()}
places, pair = (
    ("probabilities of the first head: cut", "after the MLP: replicated, or tokens cut"),
    ("rank 0", f"rank {N - 1}"),
)
plot.show(
    figures.dropped(shown, places, pair, title=f"recorded · what ranks 0 and {N - 1} of {N} drop in the first block, 5 heads"),
    alt="Dropout masks of two ranks as bitmaps, and their XOR. What differs, of the attention and after the MLP: "
    + "; ".join(f"{case} {' and '.join(found)}" for case, found in xor.items()) + ".",
)  # fmt: skip
if not shown["one seed"][1].differ:
    print("One seed, and the MLP's masks still agree: this generator counts rounds of threads, not numbers.")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Attention: the first heads of both ranks share a mask, though they are different heads. After the MLP: 5 heads do not
# divide, and rank 0 has one more than the last, so it draws more numbers. From then on a CPU's generators stand at
# different places, and nothing replicated is alike any more. (A GPU's generator counts rounds of threads: with tensors as
# small as these all ranks take one, and stay together by luck.) With heads that divide, one seed gives alike everywhere.
# Then heads of different ranks share masks, and neither loss nor gradient shows it.
# </details>
#
# `hpnb.tensor_parallel.dropout_rng` starts from one seed on all ranks and lends each a state of its own, a hash of the
# common state and the rank, while it draws for what is cut. Afterwards the common state is put back, so it does not matter
# who drew how many numbers. Seeds that differ are refused:


# %%
def seeded_apart():
    model = parallelize(hpnb.models.gpt2("laptop", dropout=0.1), vit_tensor.tensor_axis())
    torch.manual_seed(7 + hpnb.rank())
    model(input_ids=torch.zeros(1, 8, dtype=torch.long, device=hpnb.device()))


try:
    hpnb.launch(seeded_apart, ranks=2, device="cpu")
except hpnb.RankError as error:
    print(error.summary)

# %% [markdown]
# ### An autopsy
#
# Now train with the two wrong policies, the check switched off. Losses are what one looks at while training. "Of the saved
# model" is the test loss of what rank 0 would save; "copies apart" is how far copies of norms and positions are from rank 0's
# in the end. XOR is from the bitmaps. The last column is a second instrument: walk a little along the gradient, both ways,
# with the same masks. It is the change of the loss over what the gradient told, so it should be 1.

# %%
rows, runs = (
    [],
    {
        policy: pool.run(dropout_masks.train_with_dropout, policy, texts[:32], texts[32])
        for policy in dropout_masks.POLICIES
    },
)
for policy, ran in runs.items():
    losses, _, (tested, saved) = ran[0]
    apart = max(gaps[-1] for _, gaps, _ in ran)
    slope = pool.run(dropout_masks.gradient_check, policy)[0]
    rows.append(
        (
            policy,
            f"{losses[0]:.3f} to {losses[-1]:.3f}",
            f"{tested:.4f}",
            f"{saved:.4f}",
            f"{apart:.0e}",
            *xor[policy],
            f"{slope:.4f}",
        )
    )
columns = (
    "policy",
    "loss",
    "test loss",
    "of the saved model",
    "copies apart",
    "XOR, attention",
    "XOR, MLP",
    "slope, measured over told",
)
lesson.table(columns, rows, f"dropout 0.1, 32 steps on {N} ranks; XOR with p = 1/2")
lesson.field_guide.add(
    "with dropout the loss falls as it should; copies of norms part on the ranks, though every sum is there",
    "dropout masks, XOR over ranks: empty where an activation is replicated, half full where it is cut",
    "ranks draw differently for a replicated activation: a seed each, or one seed and unequal heads",
    notebook="07",
)
lesson.field_guide.show()

# %% [markdown]
# The losses tell nothing. Where the MLP's masks differ, what is wrong is what the loss is *of*. Each rank has its own copy of
# the residual stream, with holes of its own, and the all-reduces mix what was computed from different copies. The backward
# believes that there is one copy. So the gradient is that of no function: the slope is not 1. And as in 03 the copies of
# norms get different gradients and part, so the model that is saved depends on who saves it. Where masks of different heads
# agree, nothing but XOR shows it: that is a function with its gradient, only not the one that you asked for. (03's cliff
# finds neither: without dropout all gradients are exact.)
#
# **Takeaway.** For each dropout ask how its activation lies. Replicated: draw alike. Cut: draw apart. And nobody's next
# draw may depend on how much another has drawn.
#
# ### Exercise 3: read the masks
#
# *Diagnose, 15 minutes.* You get a record of a run on 4 ranks, with one fault at most. `record.cut[place]` says whether an
# activation is cut; `record.masks[place]` is (steps, ranks, elements) of bool, True is dropped, p = 0.1. Return "right", or
# what is wrong somewhere: "differs" (ranks that must draw alike do not), "agrees" (two ranks that must draw apart share a
# mask), "repeats" (ranks draw the same at every step).
#
# Hint: with p = 0.1 two masks that were drawn apart have 82 % of their elements in common.


# %% tags=["stub-3"]
def read(record): ...


# %% tags=["check-3"]
lesson.check(exercises.read_masks, read)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def read(record):
#     for place, found in record.masks.items():
#         if (found[0] == found[1]).all():
#             return "repeats"
#         ranks = range(found.size(1))
#         equal = [bool((found[:, i] == found[:, j]).all()) for i in ranks for j in ranks if i < j]
#         if record.cut[place] and any(equal):
#             return "agrees"
#         if not record.cut[place] and not all(equal):
#             return "differs"
#     return "right"
# ```
#
# All pairs: in one of the records ranks 0 and 2 share masks, and neither does with rank 1.
# </details>

# %% [markdown]
# ### Exercise 4: a policy of seeds
#
# *Design, 20 minutes.* Write `seed_of(base, where, site, step)`. Return the seed, 0 to 2⁶³ - 1, of a generator for one mask.
# `where.dp` and `where.tp` are the rank's coordinates, `site.index` numbers the model's dropouts, `site.cut` says whether the
# activation is cut along tp. The check draws masks on 2 x 4 ranks, 6 sites, some steps and 3 base seeds. It wants them alike where
# replicated and apart where cut; apart along dp, between sites, steps and bases. The function has no memory, so a block that
# is computed again drops the same.
#
# Hint: sums meet: 7 + rank 1 is 8 + rank 0. `hashlib.blake2b(data, digest_size=7)` does not.


# %% tags=["stub-4"]
def seed_of(base, where, site, step): ...


# %% tags=["check-4"]
lesson.check(exercises.seed_policy, seed_of)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def seed_of(base, where, site, step):
#     told = (base, step, site.index, where.dp, where.tp if site.cut else -1)
#     return int.from_bytes(hashlib.blake2b(repr(told).encode(), digest_size=7).digest(), "little")
# ```
#
# Python's own `hash` would not do for everything: of strings it differs between processes.
# </details>

# %% [markdown]
# ## What the sequence keeps
#
# Memory now: what does a layer, which is a block, keep from forward to backward, in 16 bits? Count it, in units of b·s·h bytes.
#
# - Attention: its input 2; q, k and v 6; what goes into the projection 2; a dropout mask 1.
# - The MLP: its input 2; what goes into GELU 8, and what comes out 8; a mask 1.
# - Two norms: their inputs, 2 each. So far 34 (03 had no masks, and counted 32). Of it 24 lies inside the pairs of columns
#   and rows: q, k, v, the projection's input, both sides of GELU.
# - Scores, where no kernel fuses attention: softmax 2, mask 1, what dropout leaves 2, for each of a·s²·b: together 5as/h.
#
# So 34 + 5as/h, for GPT-2 XL 34 + 80. Tensor parallelism cuts what lies inside the pairs, and scores. Sequence
# parallelism cuts the rest. Computing scores a second time in the backward (*selective recomputation*) keeps none of them,
# for 4bs²h FLOPs, 3.2 % of a step in GPT-2 XL; computing the whole block again keeps its input alone, for a third of a step.
#
# Korthikanti et al. put this into a table of six rows. Below they are predicted and measured, for the rank with the most
# heads. (GELU is one kernel and attention goes product by product, as in theirs; a flash kernel writes no scores at all.) A
# second table has what is computed again, counted on a small model on the CPU, whose s/h is that of GPT-2 XL.

# %%
lesson.predict("07.kept", f"{N} ranks share a layer by tensor parallelism alone: what share of its activations does a rank keep?",
               guess=None, unit="%")  # fmt: skip

# %%
layers = gpt2_tensor.measure_kept_activations(SIZE, 1, N)
rows = [(f"{one.name} (B)", one.predicted, one.measured) for one in layers]
lesson.comparison(
    rows,
    title=f"a layer of {SIZE.hidden}, {SIZE.heads} heads, {SIZE.length} tokens, on the first of {N} ranks",
)
again = pool.run(gpt2_tensor.recompute_shares, SMALL, 1)[0]
rows = [(f"{what} (%)", 100 * told, 100 * counted) for what, (told, counted) in again.items()]
lesson.comparison(
    rows,
    title=f"computed again, of a step's FLOPs: a layer of {SMALL.hidden}, {SMALL.heads} heads, {SMALL.length} tokens",
)
whole, cut = layers[:2]
lesson.reveal("07.kept", 100 * cut.measured / whole.measured, predicted=100 * cut.predicted / whole.predicted)
plot.show(
    figures.stacked({one.label: one.parts for one in layers}, {one.label: one.measured for one in layers},
                 title=f"what a layer keeps on the first of {N} ranks: predicted in parts, measured as ticks"),
    alt="What a layer keeps: " + "; ".join(f"{one.name} {lesson.number(one.measured, 'B')}" for one in layers) + ".",
)  # fmt: skip
print(
    "measured over the published formula alone:",
    ", ".join(f"{one.measured / one.published:.2f}" for one in layers),
)

# %% [markdown]
# Every byte has a name. In the second table one row is off: attention computed again costs half of what the formula says.
# The backward wants softmax and masks, PyTorch stops as soon as it has them, and the product with v is never made.
#
# The line under the figure has the six rows once more, over the published formula by itself. What that lacks has three
# causes. The first rank has more heads than a t-th, so more scores. Under sequence parallelism inputs of columns stay whole
# here, where Megatron-LM cuts them and gathers them again. And on a CPU masks take 2 bytes, not 1. (Norms' statistics are the
# rest; `lesson.layer_memory` lists all.)
#
# Perhaps you guessed 1/t. Ten of the 34 do not care about t: that is why sequence parallelism exists.
#
# **Takeaway.** Scores first: compute attention again, or fuse it. Then cut tokens. A block computed again is the last
# resort.
#
# ### Exercise 5: activation bytes
#
# *Implement, 15 minutes.* Write `kept(layer)`: bytes of a layer on each rank by the published formula, with heads that divide.
# `layer.s`, `.b`, `.h`, `.a` and `.t` are as above, `.sequence` says whether tokens are cut, `.recompute` is "", "attention" or
# "full". The check compares all six rows of the published table, at three shapes.
#
# Hint: three numbers, 10, 24 and 5as/h; who divides which?


# %% tags=["stub-5"]
def kept(layer): ...


# %% tags=["check-5"]
verdict = lesson.check(exercises.activation_bytes, kept)
if verdict.status == "passed" and "layers" in vars():
    mine = kept(exercises.ShardedLayer(SIZE.length, 1, SIZE.hidden, SIZE.heads, N, sequence=True))
    print(
        f"tensor + sequence parallel on this page: yours {lesson.number(mine, 'B')}, measured {layers[2].measured / mine:.2f} times that"
    )
verdict

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def kept(layer):
#     sbh = layer.s * layer.b * layer.h
#     if layer.recompute == "full":
#         return 2 * sbh
#     scores = 0 if layer.recompute else 5 * layer.a * layer.s / layer.h
#     return sbh * (10 / (layer.t if layer.sequence else 1) + (24 + scores) / layer.t)
# ```
# </details>
#
# The explorer puts all of it together: 48 blocks by the published formula, on the first rank, and logits at 6 bytes each (2,
# and 4 for their softmax). `between` says whether tokens are whole or cut between the pairs.
#
# **Challenge.** 25 heads, 50,257 words, a row of 8,192 tokens: at most 5 GB kept, at most 20 % of the FLOPs computed again, and
# no rank more than 2 % over an even share.
#
# <details><summary>Answer</summary>
#
# 5 ranks, tokens `cut`, `attention` computed again: 4.77 GB, 14.9 % of the FLOPs, no rank over an even share. It is the only
# setting. 2, 4, 8 and 16 do not divide 25 heads, and the first rank is 3 to 18 % over; one rank alone keeps 23.9 GB. With
# nothing computed again scores are 5as/h = 640 beside the other 34, and 5 ranks keep 85 GB. With tokens whole the 10 of 34
# that nobody cuts are 6.3 GB by themselves. Blocks computed again keep 1.8 GB, for 32 % of the FLOPs.
# </details>

# %%
lesson.explorers.kept_by_rank()

# %% [markdown]
# ## Three names for a cut sequence
#
# "Sequence parallelism" means three things. All cut the tokens between attentions; in the attention every token must
# meet all before it, and there they differ.
#
# - **Megatron**: gather x, each rank does *its heads* for all tokens, scatter the sum. Weights are cut.
# - **Ulysses**: each rank computes q, k and v of its tokens, for all heads. An all-to-all (00) turns this into all tokens of
#   *some heads*; after the attention another one turns it back. Weights are whole.
# - **Ring**: q stays, k and v *go round*, from rank to rank. A softmax over parts needs the largest and the sum of
#   exponentials so far: the same numbers as the loss above. Weights are whole.
#
# Of the next two cells the first asks, and the second has all three.

# %%
lesson.predict(
    "07.names",
    "megatron, ulysses, ring: on 4 ranks, which sends the fewest bytes in one attention?",
    guess=None,
    kind="ranking",
)


# %%
def ways(heads, s=64, d=8):
    axis, h = vit_tensor.tensor_axis(), heads * d
    x, qkv, out = (
        gpt2_tensor.random_values(*shape, seed=i) / h**0.5
        for i, shape in enumerate([(s, h), (h, 3 * h), (h, h)])
    )

    def megatron(x):
        columns, rows, own = gpt2_tensor.rank_heads(qkv, out, heads, axis.size, axis.rank)
        return comm.reduce_scatter(
            gpt2_tensor.attention(comm.all_gather(x, axis, 0) @ columns, own) @ rows, axis, 0
        )

    def ulysses(x):
        q, k, v = (
            comm.all_to_all(each, axis, 0, 1) for each in gpt2_tensor.split_heads(x @ qkv, heads)
        )  # (heads/t, s, d)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return comm.all_to_all(y, axis, 1, 0).transpose(0, 1).flatten(1) @ out

    def ring(x):
        (q, k, v), place = gpt2_tensor.split_heads(x @ qkv, heads), torch.arange(len(x))  # (heads, s/t, d)
        m, S, y = torch.full_like(q[..., :1], -torch.inf), 0.0, 0.0
        for hop in range(axis.size):
            ahead = (axis.rank - (axis.rank - hop) % axis.size) * len(x)  # from those keys to these queries
            z = (q @ k.mT / d**0.5).masked_fill(place[:, None] + ahead < place, -torch.inf)
            top = torch.maximum(m, z.detach().amax(-1, keepdim=True))  # the largest so far
            S = S * (m - top).exp() + (z - top).exp().sum(-1, keepdim=True)
            y, m = y * (m - top).exp() + (z - top).exp() @ v, top
            if hop < axis.size - 1:
                k, v = comm.exchange(k, axis), comm.exchange(v, axis)
        return (y / S).transpose(0, 1).flatten(1) @ out

    found = {}
    for way in (megatron, ulysses, ring):
        try:
            found[way.__name__] = gpt2_tensor.compare_with_serial(
                way, lambda x: gpt2_tensor.attention(x @ qkv, heads) @ out, x
            )
        except ValueError as error:
            found[way.__name__] = str(error)
    return found


with hpnb.Ranks(4, device="cpu") as four:
    even, odd = (four.run(ways, heads)[0] for heads in (24, 25))
told = {way.lower(): theory.sequence_bytes(way, 64, 24 * 8, 4, 8) for way in theory.SEQUENCE_WAYS}
rows = [(way, f"{off:.0e}", lesson.number(told[way], "B"), lesson.number(sent, "B"), f"{sent / told[way]:.2f}",
         odd[way].partition(";")[0] if isinstance(odd[way], str) else f"off by {odd[way][0]:.0e}") for way, (off, sent) in even.items()]  # fmt: skip
lesson.table(
    ("", "off by", "sends, predicted", "sends", "ratio", "25 heads"),
    rows,
    "an attention of 24 heads, 64 tokens on 4 ranks, forward and backward",
)
lesson.reveal(
    "07.names", {way: sent for way, (_, sent) in even.items()}, predicted=sorted(told, key=told.get)
)

# %% [markdown]
# Ulysses sends the least, 8(t-1)/t² · n h numbers; the two others send 4(t-1)/t · n h. It moves q, k, v and the output, and
# on the way back their gradients, but of each rank's t-th of the tokens only. (At t = 2 all three send the same.) It cuts by
# heads like Megatron, but it wants them to divide: its messages are equal parts. The ring knows no heads. Its ranks have
# equally many tokens, but with a causal mask not equal work: the last rank needs all keys, the first its own. (Here
# autograd kept the k and v that came by, and sent gradients back. The published ring keeps its own only, and sends k and v
# round once more in the backward.)
#
# What the table leaves out: under Ulysses and ring every rank has all weights and a gradient of them, which is to be summed
# as in data parallelism (01). They are ways to cut *long sequences*; tensor parallelism is one to cut *weights*. They
# compose.
#
# **Takeaway.** Of anything called sequence parallel ask two things: what is cut inside the attention, heads or tokens? And
# are the weights?

# %%
quantities = {
    "vocabulary, sent (B)": (theory.vocabulary_bytes(BLOCK, N), sent),
    "block of the fullest rank over even": (theory.block_imbalance(BLOCK, N), fullest),
}
quantities |= {f"a layer keeps, {one.name} (B)": (one.predicted, one.measured) for one in layers[1:3]}
lesson.ledger.add("07", Layout(tp=N), name, quantities, vit_pipeline.hardware(N))
lesson.ledger.show()

# %% [markdown]
# ## What to remember
#
# - A matrix divides, a head does not. Deal out whole heads; the fullest rank sets the pace, on attention alone.
# - Padding heads takes as long as uneven ones. A t that divides them takes less.
# - A loss of cut words: largest, sum, target's logit. V/6 times fewer bytes than logits.
# - Dropout: alike where replicated, apart where cut. Sequence parallelism makes some of the first into the second.
# - A wrong seed leaves the loss healthy. XOR the masks.
# - A layer keeps 34 + 5as/h. t divides 24 and the scores, sequence parallelism the other 10.
# - Megatron and Ulysses can use as many ranks as there are heads, the ring as many as there are tokens.
#
# **When not to use this.** With a small vocabulary and few ranks a whole head is simpler (a ViT's classifier: 03). Where 25 heads
# meet 8 ranks a fifth of the attention idles: take 5, or a pipeline (06). Compute again only what memory asks for: with a
# flash kernel selective recomputation has little left to drop.
#
# **Papers.** Shoeybi et al. 2019, *Megatron-LM* (1909.08053). Korthikanti et al. 2022, *Reducing activation recomputation in
# large transformer models* (2205.05198). Jacobs et al. 2023, *DeepSpeed Ulysses* (2309.14509). Liu, Zaharia & Abbeel 2023,
# *Ring attention with blockwise transformers* (2310.01889). Milakov & Gimelshein 2018, *Online normalizer calculation for
# softmax* (1805.02867).
