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
# # What if one sequence does not fit?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hpnb/hpnb/blob/main/notebooks/10_long_contexts.ipynb)
# [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/hpnb/hpnb/blob/main/notebooks/10_long_contexts.ipynb)
#
# **The question.** Data parallelism gives each rank other sequences, so a single sequence must fit on one GPU. Training
# GPT-2 XL, of hidden size h = 1,600, keeps 34·h bytes of activations per token and layer, not counting attention
# scores. That is 2.6 MB per token in its 48 layers, so 32,768 tokens take 86 GB, more than the 80 GB of an H100. What
# if we shard its tokens? Most layers work on each token by itself; only attention needs all of them.
#
# **You will be able to** compute a softmax in pieces; write a ring attention; balance causal work; predict what a
# ring and Ulysses send, and which slows a step down less; find positions that are wrong on every rank.
#
# **You should know** attention with a causal mask, notebook 00 for the machine card and all-to-all, 04 for the plugin, and the last section of 07.
#
# **Time.** 30 minutes to read, 1 to run, 60 for the exercises.
#
# **Two questions to recall.** From 00: how long does a message of n bytes take? From 07: which three numbers per token give
# a loss from sharded logits?
#
# <details><summary>Answers</summary>
# Latency plus n over the bandwidth. The largest logit, the sum of exponentials, and the target's logit.
# </details>
#
# **Letters.** A sequence of s tokens is sharded over p ranks of the *context axis*, cp. Queries have H heads; keys and
# values have G, the *kv heads*. A head has d values of w bytes. In causal attention a query sees its own and earlier keys.
# All numbers come from one run, on
# <data value="10.hardware">4 x NVIDIA H100 80GB HBM3</data>.

# %% tags=["setup"]
import importlib.util

assert importlib.util.find_spec("hpnb"), "run %pip install hpnb, then this cell again"
import itertools, math, torch, torch.distributed as dist, torch.nn.functional as F
import hpnb
from hpnb import Layout, Mesh, comm, lesson, theory
from hpnb.context_parallel import Ring, Visibility, parallelize, ring_attention
from hpnb.lesson.exercises import long_contexts as exercises
from hpnb.lesson.explorers.ring_or_ulysses import ring_exposes_less_from
from hpnb.lesson.figures import long_contexts as figures
from hpnb.lesson.programs import device_timing, long_contexts, step_timing
from hpnb.theory.context import Attention

N = min(4, hpnb.ranks.default_ranks())
pool = hpnb.Ranks(N)  # these ranks stay to the end
lesson.record("10.ranks", N)
text = hpnb.data.text("train", block=64)  # packed into sequences of 64 tokens
loader = hpnb.data.Loader(text, 8)
model = "attention alone, then a small GPT-2"
here = lesson.banner(N, model=model, data=text.describe())
card = lesson.machine_card(N)  # measured in notebook 00, or now
steps = long_contexts.training_steps(here.device)
batches = list(itertools.islice(loader, steps))  # the same on all ranks
shapes = long_contexts.timed_shapes(here.device)  # an attention for each length
kept_size, DTYPE = long_contexts.kept_size(here.device)

# %% [markdown]
# ## Attention over blocks
#
# A softmax seems to need all scores at once, because its denominator is a sum over all keys. It doesn't. Take two blocks of
# keys, a and b. Attention to one block gives two things per query: an output O, and L, the logarithm of the sum of
# exponentials of its scores, called *lse*.
#
# ```text
#               keys of a                     keys of b
# query (s, d)  ├─► O_a (s, d)  L_a (s)       ├─► O_b (s, d)  L_b (s)
#               └──────────────────┬─────────────────────┘
#                    L = log(exp L_a + exp L_b)
#                    O = exp(L_a - L) O_a + exp(L_b - L) O_b
# ```
#
# Each block's output was divided by its own sum of exponentials. The two weights turn this into the common sum. So blocks may
# come one by one, in any order. A query that sees no key of a block gets a meaningless O there, but its L is about -1e30, so
# its weight in the merge is 0.


# %%
def attend_block(q, k, v, mask):  # (1, H, n, d), (1, H, m, d) twice, (n, m)
    scores = q @ k.mT / q.size(-1) ** 0.5  # (1, H, n, m)
    scores = scores.masked_fill(~mask, -1e30)  # not -inf, which gives NaN
    lse = scores.logsumexp(-1, keepdim=True)  # (1, H, n, 1)
    return (scores - lse).exp() @ v, lse


def merge(out, lse, block_out, block_lse):
    total = torch.logaddexp(lse, block_lse)
    return (lse - total).exp() * out + (block_lse - total).exp() * block_out, total


q, k, v = long_contexts.random_qkv(64)  # (1, H, 64, d) in float64
causal = torch.ones(64, 64, dtype=torch.bool, device=q.device).tril()
right, state = F.scaled_dot_product_attention(q, k, v, is_causal=True), None
for first in (48, 0, 32, 16):  # in any order
    keys = slice(first, first + 16)
    block = attend_block(q, k[:, :, keys], v[:, :, keys], causal[:, keys])
    state = merge(*state, *block) if state else block
off = step_timing.relative_distance([state[0]], [right])
lesson.show(measured={"four blocks, merged": off}, title="Distance to one softmax")
lesson.claim("Merged blocks are exact", (off, "<", 1e-12))

# %% [markdown]
# **Takeaway.** Attention to a block of keys gives an output and an lse. Those of two blocks merge exactly.
#
# ### Exercise 1: a softmax over a stream of blocks
#
# *Core. Implement, 20 minutes.* Write `attend(q, blocks)`. `q` has shape H x s x d. `blocks` is an iterator over triples
# `k, v, mask`. With n keys in a block, `k` and `v` have shape H x n x d, and `mask` has s x n, True where a query sees a key.
# Divide scores by √d. Return the output, and hold no more than two blocks at once. A block may have no visible key for some
# query, and scores may be in the ten thousands.
#
# <details><summary>Hint</summary>
#
# `merge` would do. A *flash kernel*, such as FlashAttention, never stores all scores. It keeps the largest score m so far,
# the sum of exp(score - m), and an output that isn't divided yet. What happens to the last two when m grows?
# </details>


# %% tags=["stub-1"]
def attend(q, blocks): ...


# %% tags=["check-1"]
lesson.check(exercises.online_softmax, attend)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def attend(q, blocks):
#     m = q.new_full(q.shape[:-1], -1e30)
#     total, out = torch.zeros_like(m), torch.zeros_like(q)
#     for k, v, mask in blocks:
#         scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(~mask, -torch.inf)
#         larger = torch.maximum(m, scores.amax(-1))
#         shrink, weights = (m - larger).exp(), (scores - larger[..., None]).exp()
#         total = shrink * total + weights.sum(-1)
#         out = shrink[..., None] * out + weights @ v
#         m = larger
#     return out / total[..., None]
# ```
#
# Without `shrink` the result is right only if the first block has the largest score.
# </details>

# %% [markdown]
# ## A ring
#
# Each rank has s/p tokens, with their queries, keys and values. Queries stay. While a rank computes with a block of keys
# and values, it sends it on to the next rank, until every query has met every key.
#
# ```text
#          rank 0               rank 1               rank 2               rank 3
# step 0   q0 meets k0, v0      q1 meets k1, v1      q2 meets k2, v2      q3 meets k3, v3
#              └─ k0, v0 ──►        └─ k1, v1 ──►        └─ k2, v2 ──►        └─ k3, v3 ──► to rank 0
# step 1   q0 meets k3, v3      q1 meets k0, v0      q2 meets k1, v1      q3 meets k2, v2
# ...
# step 3   q0 meets k1, v1      q1 meets k2, v2      q2 meets k3, v3      q3 meets k0, v0
# ```
#
# k0 has the shape (1, G, s/p, d). Send and receive start together: if every rank first waited for its send, none would
# receive. A *pair* is any query with any key, *visible* if the key isn't later.
#
# <details><summary>How many blocks does a rank hold?</summary>
#
# At most three: its own, which the backward needs; the one that it computes with; and the one that arrives meanwhile.
# </details>


# %%
def pass_on(block, axis):  # start; call the result to wait for what has arrived
    received = torch.empty_like(block)
    after, before = (axis.ranks[(axis.rank + k) % axis.size] for k in (1, -1))
    ops = [dist.P2POp(dist.isend, block, after, axis.group),
           dist.P2POp(dist.irecv, received, before, axis.group)]  # fmt: skip
    works = dist.batch_isend_irecv(ops)

    def wait():
        [work.wait() for work in works]
        return received

    return wait


# %%
def ring(q, k, v, places, axis):  # this rank's q, k, v; places[r]: the tokens of rank r
    out, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -1e30)
    block, source = torch.stack([k, v]), axis.rank
    for step in range(axis.size):
        arriving = pass_on(block, axis) if step < axis.size - 1 else None  # meanwhile
        mask = places[axis.rank][:, None] >= places[source]  # (s/p, s/p)
        out, lse = merge(out, lse, *attend_block(q, *block, mask))
        if arriving:
            block, source = arriving(), (source - 1) % axis.size
    return out


# %%
def run_ring(places):
    axis = Mesh(Layout(cp=hpnb.world_size())).cp
    places = [place.to(hpnb.device()) for place in places]
    qkv = long_contexts.random_qkv(64)
    right = F.scaled_dot_product_attention(*qkv, is_causal=True)
    local = [part[:, :, places[axis.rank]].contiguous() for part in qkv]
    out, wanted = ring(*local, places, axis), right[:, :, places[axis.rank]]
    sources = [(axis.rank - step) % axis.size for step in range(axis.size)]
    masks = [places[axis.rank][:, None] >= places[source] for source in sources]
    shares = [mask.double().mean().item() for mask in masks]  # of visible pairs
    steps = list(zip(sources, shares, strict=True))
    return step_timing.relative_distance([out], [wanted]), steps


contiguous = list(torch.arange(64).chunk(N))  # rank r has the r-th part
question = "Causal attention, equal parts: what share of rank 0's pairs is visible?"
lesson.predict("10.rank-0", question, unit="%", rule_of_thumb=50)
results = pool.run(run_ring, contiguous)
lesson.claim("The ring is exact", max(off for off, _ in results) < 1e-12)
steps = [steps for _, steps in results]  # of each rank
title = "Rank 0 sees only its own keys, the last rank sees all"
lesson.show(figures.ring_steps(steps, title=title))
seen = sum(share for _, share in steps[0]) / N
lesson.reveal("10.rank-0", 100 * seen, source="counted")

# %% [markdown]
# On rank 0, <data value="10.rank-0">13.3 %</data> of the pairs are visible, and on all ranks together about half. The last
# rank sees all keys but later ones of its own. Our `attend_block` computes all pairs and then masks. Real kernels skip
# invisible blocks, and rank 0 would then be idle after step 0.
#
# ### The backward
#
# The backward of a block needs its keys and values once more, so they travel around the ring again. The block's gradient is a
# sum over all queries, so each rank adds a term. A rank sends keys and values on while it computes its term. It
# adds the term to the sum that arrives, so the sum travels one step behind them. For rank 0's block, with p = 4:
#
# ```text
# step   block is on   terms in its gradient after the step
# 1      rank 1        1
# 2      rank 2        1 + 2
# 3      rank 3        1 + 2 + 3       goes home to rank 0, which adds its own term
# ```
#
# A rank sends:
#
# ```text
# forward    k, v of s/p tokens          p - 1 messages
# backward   k, v once more              p - 1 messages
#            gradients of k and v        p - 1 messages, in at least 4 bytes a value
# ```
#
# In 16 bits, a running sum over many ranks would lose digits, so gradients travel in float32. The library's
# `ring_attention` does all this. `Ring` says which tokens each rank has, and `Visibility` which keys a query sees.


# %%
def check_ring(kv_heads):
    axis = Mesh(Layout(cp=hpnb.world_size())).cp
    order = Ring.of(axis, 64 // axis.size, zigzag=False)  # contiguous tokens

    def layer(q, k, v):  # scale: 1 / sqrt(d)
        return ring_attention(q, k, v, order, Visibility(causal=True), scale=16**-0.5)

    qkv = long_contexts.random_qkv(64, heads=8, kv_heads=kv_heads)
    places = order.places(hpnb.device())  # (s/p,): where this rank's tokens stand
    return long_contexts.compare_with_full(layer, qkv, places, axis)


# %%
found = {f"{G} kv heads": pool.run(check_ring, G)[0] for G in (8, 2)}
exact = lesson.Parity({name: ring.distances for name, ring in found.items()})
lesson.show(exact, title="The library's ring, forward and backward")
lesson.claim("Gradients are exact, too", exact.equal)
jobs = {G: Attention(64, 8, G, 16, 1, 8) for G in (8, 2)}  # s, H, G, d, batch, w
predicted = {f"{G} kv heads": theory.context.ring_bytes(jobs[G], N).total for G in jobs}
counted = {name: ring.sent.total for name, ring in found.items()}
forward = {name: ring.sent.forward for name, ring in found.items()}
lesson.show(predicted=predicted, counted=counted, unit="B", key="10.ring",
            columns={"counted, in the forward (B)": forward}, title="A ring's bytes")

# %% [markdown]
# With 8 kv heads, <data value="10.ring.8-kv-heads.counted">295 kB</data> leave a rank, a third of them in the forward. With 2
# kv heads for 8 heads, called *grouped queries*, it sends a quarter, because k and v are a quarter as large.
#
# **Takeaway.** Forward, a ring sends p - 1 blocks of keys and values. Backward, it sends them once more, and as many blocks
# of gradients.
#
# ### Exercise 2: the backward's bytes
#
# *Core. Calculate, 15 minutes.* Write `sent(job)`: the bytes that leave a rank in a ring's backward. A job has `job.p` ranks, `job.b`
# sequences of `job.s` tokens, `job.heads` and `job.kv_heads` heads of `job.d` values, and `job.w` bytes a value of q, k and v.
#
# <details><summary>Hint</summary>
#
# A block has keys and values of s/p tokens of every sequence. Which messages have more than w bytes a value, and when?
# </details>


# %% tags=["stub-2"]
def sent(job): ...


# %% tags=["check-2"]
lesson.check(exercises.backward_bytes, sent)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def sent(job):
#     values = 2 * job.b * job.s / job.p * job.kv_heads * job.d
#     return (job.p - 1) * values * (job.w + max(job.w, 4))
# ```
# </details>

# %% [markdown]
# ## A puzzle: equal work
#
# Token i, counted from 0, sees i + 1 keys. With contiguous parts and real kernels, all ranks wait for the last, which has the
# most work. So give each rank equally many tokens and visible pairs.
#
# *Striped* gives rank r the tokens r, r + p, r + 2p and so on. *Zigzag* splits the sequence into 2p chunks and gives rank r
# chunk r and chunk 2p - 1 - r:
#
# ```text
# p = 4    chunk   0   1   2   3   4   5   6   7
#          rank    0   1   2   3   3   2   1   0
# ```

# %%
tokens = range(64)
question = f"Contiguous, {N} ranks: the last rank's visible pairs, over the mean?"
lesson.predict("10.last", question, rule_of_thumb=1)
ways = {"contiguous": [i * N // 64 for i in tokens], "striped": [i % N for i in tokens]}
ways["zigzag"] = [min(c, 2 * N - 1 - c) for c in (i * 2 * N // 64 for i in tokens)]
title = "Contiguous parts overload the last rank, zigzag is even"
lesson.show(figures.causal_work(ways, title=title))

# %%
work = {way: figures.work_per_rank(owners) for way, owners in ways.items()}
fullest = {way: N * max(pairs) / sum(pairs) for way, pairs in work.items()}
predicted = 2 - 1 / N  # of whole chunks, for long sequences
lesson.reveal("10.last", fullest["contiguous"], predicted=predicted, source="counted")
lesson.record("10.striped", fullest["striped"])
places = [torch.tensor([i for i in tokens if ways["zigzag"][i] == r]) for r in range(N)]
results = pool.run(run_ring, places)
shares = {share for _, steps in results for _, share in steps[1:]}
lesson.claim("In a zigzag, our ring is exact", max(off for off, _ in results) < 1e-12)
lesson.claim("After the first step, half of the pairs are visible", shares == {0.5})

# %% [markdown]
# The last contiguous part has <data value="10.last:.2f">1.74</data> times the mean number of visible pairs; for p ranks it is
# nearly 2 - 1/p. The fullest striped part has <data value="10.striped:.2f">1.05</data> times the mean. A zigzag is even in
# total and in each step, so ranks don't wait for each other: after step 0, half of a step's pairs are visible on every rank.
#
# <details><summary>Its masks are simple, too</summary>
#
# A chunk of queries sees either all or nothing of another chunk. Only a chunk with itself needs a causal mask, and flash
# kernels have one built in.
# </details>
#
# **Takeaway.** Balance the visible pairs, not only the tokens. Zigzag does it for every step.
#
# ### Exercise 3: a balanced assignment
#
# *Core. Design, 25 minutes.* A zigzag gives each rank 2 chunks. Now give each rank k of them, for any k from 2 on; `chunks`
# is k times `ranks`. Call a chunk of queries with an earlier chunk of keys one unit of work. With itself it is half a unit,
# so chunk i has i + ½ units. Write `assign(chunks, ranks)`, which returns a list of chunks for each rank. Work may differ by
# at most 1 unit between ranks.
#
# <details><summary>Hint</summary>
#
# Take rows of `ranks` chunks. Two rows make a zigzag. If the number of rows is odd, treat 3 of them together. For 3 ranks
# and the rows 0 1 2, 3 4 5 and 6 7 8:
#
# ```text
# first row     0    1    2
# second row    5    3    4      in another order
# sum           5    4    6
# third row     7    8    6      its smallest chunk with the largest sum
# all three    12   12   12
# ```
#
# How do you match two rows of any length so that the sorted sums grow by at most 1 at a time?
# </details>


# %% tags=["stub-3"]
def assign(chunks, ranks): ...


# %% tags=["check-3"]
lesson.check(exercises.balanced_assignment, assign)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def assign(chunks, ranks):
#     rows = [list(range(k, k + ranks)) for k in range(0, chunks, ranks)]
#     shards = [[] for _ in range(ranks)]
#     while len(rows) not in (0, 3):  # two rows in a zigzag
#         for shard, early, late in zip(shards, rows.pop(0), reversed(rows.pop(0))):
#             shard += [early, late]
#     if rows:
#         first, second, third = rows
#         # every other chunk of the second row, from its end; then the others: 5, 3, 4 for 3 ranks
#         middle = second[::-2] + second[-2::-2]
#         pairs = sorted(zip(first, middle), key=sum)
#         for (one, two), three in zip(pairs, reversed(third)):
#             shards[one - first[0]] += [one, two, three]  # a rank's place in the first row
#     return shards
# ```
#
# Sums of the first two rows increase from pair to pair by 1, or by 0 once, and the third row decreases by 1. If you
# zigzag two rows and just add the third, its differences remain, up to ranks - 1 units.
# </details>

# %% [markdown]
# ## Ulysses
#
# The second method changes the sharded dimension before attention and after it:
#
# ```text
# q, k, v (1, H, s/p, d)   a rank has some tokens of all heads; k and v have G, not H
#       │ all-to-all
# q, k, v (1, H/p, s, d)   all tokens of some heads: an ordinary attention, causal mask and all
#       │ all-to-all
# output  (1, H, s/p, d)   some tokens of all heads again
# ```
#
# The code below and the library send q, k, v and the output one by one: four all-to-alls forward and four
# backward. *Packed*, with q, k and v in one tensor, it would be two and two. Every head sees the whole
# sequence, so any attention kernel works, and work is even without a zigzag. But p can't exceed the number of heads.


# %%
def check_ulysses(kv_heads):
    axis = Mesh(Layout(cp=hpnb.world_size())).cp
    tokens = torch.arange(64, device=hpnb.device())
    places = tokens.chunk(axis.size)[axis.rank]  # contiguous

    def layer(*qkv):
        copies = math.lcm(kv_heads, axis.size) // kv_heads  # so that p divides kv heads
        q, *kv = qkv
        qkv = q, *(x.repeat_interleave(copies, 1) for x in kv)
        q, k, v = (comm.all_to_all(x, axis, split_dim=1, concat_dim=2) for x in qkv)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return comm.all_to_all(out, axis, split_dim=2, concat_dim=1)  # (1, H, s/p, d)

    qkv = long_contexts.random_qkv(64, heads=8, kv_heads=kv_heads)
    return long_contexts.compare_with_full(layer, qkv, places, axis)


question = f"{N} ranks, 8 heads, 8 kv heads: bytes of a ring, over those of Ulysses?"
lesson.predict("10.bytes", question, rule_of_thumb=2 / 4)  # k, v over q, k, v, output
found = {G: pool.run(check_ulysses, G)[0] for G in (8, 4, 1)}
rings = {G: pool.run(check_ring, G)[0] for G in (8, 4, 1)}

# %%
exact = lesson.Parity({f"{G} kv heads": way.distances for G, way in found.items()})
lesson.claim("Ulysses by hand is exact", exact.equal)
predicted, counted = {}, {}
for G, heads in ((8, "8 kv heads"), (4, "4 kv heads"), (1, "1 kv head")):
    shape = Attention(64, 8, G, 16, 1, 8)  # s, H, G, d, batch, w
    predicted[f"ring, {heads}"] = theory.context.ring_bytes(shape, N).total
    predicted[f"Ulysses, {heads}"] = theory.context.ulysses_bytes(shape, N).total
    counted[f"ring, {heads}"] = rings[G].sent.total
    counted[f"Ulysses, {heads}"] = found[G].sent.total
title = long_contexts.fewest_bytes_title(counted)
lesson.show(predicted=predicted, counted=counted, unit="B", key="10.sent", title=title)
over = [sent["ring, 8 kv heads"] / sent["Ulysses, 8 kv heads"]
        for sent in (counted, predicted)]  # fmt: skip
lesson.reveal("10.bytes", over[0], predicted=over[1], source="counted")
lesson.claim("The formula counts every byte", counted == predicted)


# %% [markdown]
# The rule of thumb counted two tensors for a ring, k and v, and four for Ulysses. But a ring sends both p - 1 times, and
# more in the backward. For each of its tokens, forward and backward
# together, a rank sends
#
# $$ \text{ring: } 6\,(p-1)\,G\,d \qquad\qquad \text{Ulysses: } 4\,\tfrac{p-1}{p}\,(H+G)\,d \quad\text{values of } w \text{ bytes.} $$
#
# In 16 bits, the ring's gradients are twice as wide, and its 6 becomes 8. If kv heads are repeated for Ulysses, its G counts
# the copies.
#
# <details><summary>And with more ranks?</summary>
#
# With twice as many ranks, each has half as many tokens. So a rank of Ulysses then sends about half as many bytes. A
# rank of a ring sends about as many as before.
# </details>
#
# Grouped queries help the ring: with 1 kv head instead of 8 it sends <data value="10.sent.ring-1-kv-head.counted">36.9 kB</data> instead of
# <data value="10.sent.ring-8-kv-heads.counted">295 kB</data>. With 4 kv heads, Ulysses sends less, too. But every
# rank needs a kv head, so our code copies a single one for each rank, and sends as much as with 4.
#
# In a model, notebook 04's `HybridParallelPlugin` shards each sequence, gives tokens their positions, and sums gradients over
# cp. We train a small GPT-2 for two steps: both ways, and in one process.


# %%
def train_boosted(mode):
    model = hpnb.models.gpt2("laptop", dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"cp_size": hpnb.world_size(), "context_parallel": mode}
    plugin = hpnb.HybridParallelPlugin(precision="fp64", **options)
    booster, losses = hpnb.Booster(plugin=plugin), []
    model, optimizer, *_ = booster.boost(model, optimizer)
    for batch in batches[:2]:
        batch = {key: value.to(hpnb.device()) for key, value in batch.items()}
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # the plugin's loss is that of all tokens
    return torch.tensor(losses, dtype=torch.float64)


# %%
alone = pool.run(long_contexts.train_alone, batches[:2])[0]  # a plain loop
boosted = {mode: pool.run(train_boosted, mode) for mode in ("ring", "ulysses")}
off = {mode: step_timing.relative_distance(losses, [alone] * N)
       for mode, losses in boosted.items()}  # fmt: skip
exact = lesson.Parity({mode: {"losses of two steps": off[mode]} for mode in boosted})
trains = "trains" if exact.equal else "does not train"
lesson.show(exact, title=f"A GPT-2 with cp_size {trains} as in one process")
lesson.claim("The plugin trains exactly, in both modes", exact.equal)

# %% [markdown]
# <details><summary>In your tools: context parallelism</summary>
#
# hpnb: `HybridParallelPlugin(cp_size=4, context_parallel="ring")`, or `"ulysses"`. Megatron-Core: `--context-parallel-size 4`
# with `--cp-comm-type p2p` for the ring and `a2a` for Ulysses. accelerate: `ParallelismConfig(cp_size=4)`, which needs FSDP2
# (PyTorch's ZeRO 3) and uses PyTorch's `context_parallel`. PyTorch and accelerate gather k and v by default; the next section
# calls that "a third way". For a ring, call `set_rotate_method("alltoall")` in PyTorch, and pass
# `TorchContextParallelConfig(cp_comm_strategy="alltoall")` to accelerate: in this all-to-all each rank sends to the next one
# only. transformers: pass accelerate's configuration to `TrainingArguments(parallelism_config=...)`. DeepSpeed has Ulysses in
# `deepspeed.sequence.layer`. PyTorch:
#
# ```python
# from torch.distributed.tensor.experimental import context_parallel
#
# buffers = [tokens, labels, positions]  # (b, s) each; sharded in place, in a zigzag
# with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 1]):
#     loss = loss_of(model(tokens, position_ids=positions), labels)
#     loss.backward()
# ```
# </details>
#
# **Takeaway.** During attention, Ulysses shards heads. It sends fewer bytes than a ring, if there are enough kv
# heads.
#
# ## Which wins when?
#
# Bytes don't decide alone, because a ring sends while it computes. So we
# compare *exposed* time: what messages add to computing time. A step of a ring exposes its message only where that takes
# longer than the step's computing.
#
# In a zigzag, a forward step has (s/p)² pairs, half of them visible. Each visible pair costs 4d FLOPs a head. So a rank
# computes $2Hd\,(s/p)^2$ FLOPs. It sends $2\,(s/p)\,Gd$ values of w bytes. Computing grows with the square of s/p, so from
# some length on it covers the message. With ρ, a rank's FLOP/s over its bytes/s, that length is
#
# $$ \frac{s}{p} = w\,\rho\,\frac{G}{H} \text{ tokens a rank.} $$
#
# The backward's last message brings gradients home. Nothing is left to compute meanwhile, so it is always exposed.
#
# <details><summary>And the rest of the backward?</summary>
#
# The backward has 2.5 times the FLOPs and, in 16 bits, 3 times the bytes, so it needs 1.2 times the
# length. `theory.context` adds all this up.
# </details>
#
# In the figure below, w = 2 bytes, d = 64, and H = G = <data value="10.card.heads">16</data>.
#
# - *Lines* are *predicted* from the machine card of notebook 00: latency, bandwidth and matmul rate, with ρ = <data value="10.card.rho">2,270</data> FLOP a byte.
# - *The dotted line*: by bandwidth and FLOP/s alone, computing covers the forward from about <data value="10.card.overlap">4,541</data> tokens a rank on, or
#   <data value="10.dotted">18,162</data> on all <data value="10.ranks">4</data> ranks, which the axis counts.
# - *Dots* are *replayed*, with timed messages. For the ring we time, each alone, the computing of a forward step, that of a backward step, and a
#   message; for Ulysses, a forward's all-to-alls. Medians of nine rounds go into the same formulas.
# - *Bars* show quartiles, unless the dot covers them.
#
# <details><summary>What is timed, and how the quartiles are put together</summary>
#
# On the lines, a backward step computes for 2.5 times as long as a forward step, as its FLOPs say. Dots take measured times, and
# short calls don't follow FLOPs. Timed steps run the ring's own code. A forward step attends to a block and merges. A backward step computes
# gradients and adds them to those of earlier steps and of other ranks. The replay takes the same time for every step, though in the
# first two of a backward no gradients have arrived.
#
# Starting a message takes CPU time. The replay counts it as part of the message, so computing can cover it.
#
# For Ulysses, a bar shows the quartiles of its all-to-alls. For the ring, a bar's lower end combines the lower quartile of
# message times with the upper quartile of computing times, because longer computing covers more. Its upper end combines the
# other two quartiles. Marks of one length stand side by side.
#
# In 16 bits, the backward's gradients have twice the bytes of the timed message, so the replay gives them twice its time.
# That doubles the time of the start, too, so short messages come out too long.
#
# Ranks that share CPU cores time computing as CPU time, and messages by the clock. Ranks that share a GPU can't time messages
# between GPUs, so theirs take what the card says, and have no quartiles.
# </details>

# %%
replayed = pool.run(long_contexts.replay_exposed, shapes, DTYPE, card.link)[0]
predicted = {"ring": [], "Ulysses": [], "Ulysses, packed": []}
for shape in shapes:
    step = theory.context.ring_step_seconds(shape, N, card.matmul)
    ring_times = theory.context.ring_exposed(shape, N, card.link, step)
    predicted["ring"].append(ring_times.total)
    exchanges = theory.context.ulysses_exposed(shape, N, card.link)
    predicted["Ulysses"].append(exchanges.total)
    packed = long_contexts.packed_exposed(shape, N, card.link)
    predicted["Ulysses, packed"].append(packed)
dots = {"ring": [times.ring for times in replayed],
        "Ulysses": [times.ulysses for times in replayed],
        "Ulysses, packed": [times.packed for times in replayed]}  # fmt: skip
lengths = [a.sequence for a in shapes]
tokens = theory.context.tokens_to_overlap(shapes[0], card.matmul, card.link)
title = long_contexts.least_exposed_in_words(dots)
bars = {way: [times.quartiles[way] for times in replayed] for way in dots}
rule = "computing covers a forward from here on, by bandwidth and FLOP/s alone"
lesson.show(figures.exposed_times(lengths, predicted, dots, lengths, bars, title=title,
                                  marked=N * tokens, marked_as=rule))  # fmt: skip

# %%
# numbers of the text below: dots over lines, covered and last messages, the card
long_contexts.record_replay(replayed, predicted, dots, shapes, N, card)
parts = long_contexts.predict_parts(shapes[0], N, card)
source = long_contexts.source_in_words(replayed[0])
title = f"One part alone, at {lengths[0]} tokens; {source}"
lesson.show(predicted=parts, replayed=replayed[0].parts, unit="s", key="10.parts",
            title=title)  # fmt: skip
step = "computing of a forward step"
lesson.claim("A small step computes for longer than its FLOPs say",
             (replayed[0].parts[step] / parts[step], ">", 1))  # fmt: skip
lesson.claim("Packed, Ulysses waits less at the shortest sequence",
             (dots["Ulysses, packed"][0], "<", dots["Ulysses"][0]))  # fmt: skip
lesson.claim("At the longest sequence, computing covers all messages but the last",
             (100 * replayed[-1].covered, ">", 99.9))  # fmt: skip

# %% [markdown]
# In the replay, the ring's last message takes <data value="10.at-last.ring">1.27 ms</data> at <data value="10.lengths.last">65,536</data> tokens: twice a timed
# forward message, because gradients have 4 bytes a value.
#
# At <data value="10.lengths.first">1,024</data> tokens, a forward step computes for <data value="10.parts.computing-of-a-forward-step.replayed">828 µs</data>, and its FLOPs
# need <data value="10.parts.computing-of-a-forward-step.predicted">184 ns</data>. The rest is mainly the *start of calls*, the CPU's work before a
# kernel or a message starts: with 1,024 times the FLOPs, at <data value="10.farthest">32,768</data> tokens, it takes about as long. While a kernel is being started, a
# message can travel, so this covers messages, too. In the replay a forward step covers its message <data value="10.covers">at every length</data>; by the
# dotted line, from <data value="10.dotted">18,162</data> tokens on. But where a GPU waits for launches, starting a message also delays computing, so a real ring can
# expose more than its dots say.
#
# No computing covers Ulysses' all-to-alls. At <data value="10.lengths.first">1,024</data> tokens the eight take <data value="10.at-first.ulysses">2.14 ms</data>. Packed into four, they
# take <data value="10.at-first.ulysses-packed">1.27 ms</data>. At <data value="10.lengths.last">65,536</data> tokens, with 64 times the bytes, the eight take <data value="10.at-last.ulysses">2.25 ms</data> and
# the four <data value="10.at-last.ulysses-packed">1.74 ms</data>. Where more bytes hardly take longer, as in the eight, the start of calls decides.
#
# <details><summary>Why lines and dots differ</summary>
#
# **The lines** are mostly latency at short lengths. The card counts one for each of a ring's 3p - 3 messages, and
# p - 1 for each all-to-all: there are eight, or packed four.
#
# **All three.** Notebook 00 fitted the card's latency and bandwidth to all-reduces. A send or an all-to-all can be faster or
# slower. The times measured here include the start of a call, and those of an all-to-all include copies that put its pieces
# in order. The card has neither, except a message's latency. At <data value="10.lengths.first">1,024</data> tokens a ring's message takes
# <data value="10.over.first.message-of-a-ring">11.2</data> times as long as the card says, and an all-to-all
# <data value="10.over.first.all-to-all">4.24</data> times. At <data value="10.lengths.last">65,536</data> tokens the message
# takes <data value="10.over.last.message-of-a-ring">2.77</data> times as long, and the all-to-all
# <data value="10.over.last.all-to-all">2.01</data> times. Ulysses' lines only rise with the length, so where its dots fall
# from one length to the next, that is probably noise.
#
# **The ring's line** climbs while hardly any message is covered, and falls as computing, which grows faster, covers more of
# them. In the end only the last message is left, and it grows with the length. **Its dots** are flatter. At
# <data value="10.lengths.first">1,024</data> tokens the start of calls covers all messages but the last. Longer messages raise the dots. A
# backward step, whose time is still mainly the start of calls, then probably doesn't cover keys, values and gradients together.
# At <data value="10.farthest">32,768</data> and <data value="10.lengths.last">65,536</data> tokens it does, and only the last message is left again.
#
# **The ring** differs by a factor of up to <data value="10.off.ring">3.62</data>, at <data value="10.farthest">32,768</data>
# tokens. There a message takes <data value="10.over.worst.message-of-a-ring">3.32</data> times as long as the card says. A
# forward step computes for <data value="10.over.worst.computing-of-a-forward-step">4.05</data> times as long as its FLOPs say,
# and a backward step for <data value="10.over.worst.computing-of-a-backward-step">3.03</data> times as long. Longer messages
# raise a dot. Longer computing lowers it, because it covers more. A step that isn't covered exposes its message's time minus
# its computing's, and such a difference can be off by a larger factor than both times.
#
# Where computing covers all messages but the last, by the card and in the replay, only that message counts. In 16 bits it
# has twice the bytes of a forward message. The replay takes twice the time of a forward message, its start included. The
# card takes twice the time of the bytes, but the latency once. So there the dot's factor is larger than the message's.
#
# **The dotted line** leaves out two things. One is a message's latency, <data value="10.card.latency">20.6 µs</data> by the card, which would move the
# line to the right. The other is that short calls don't reach the card's FLOP/s, which would move it to the left. At
# <data value="10.lengths.first">1,024</data> tokens, a forward step computes for <data value="10.over.first.computing-of-a-forward-step">4,510</data> times as long as its
# FLOPs say.
#
# **Ulysses** differs by up to <data value="10.off.ulysses">4.24</data>. The card adds up the latencies of the p - 1 messages of an all-to-all, but they
# start together. That alone would put dots below the line. But all lie above it, so the start of the calls and the
# copies outweigh this.
#
# **Packed Ulysses** differs by up to <data value="10.off.ulysses-packed">5.20</data>, and all its dots lie above its line, too. Besides the start of
# the calls, its times include the copies that pack q, k and v. We haven't timed these apart.
# </details>
#
# ### Where does Ulysses win?
#
# By this machine's card,
# <data value="10.card-wins">packed Ulysses exposes less than the ring at 4,096 and 8,192 tokens, and unpacked Ulysses at no length</data>.
# In the replay, packed Ulysses exposes <data value="10.beside.shorter.least:.2f">1.58</data> to
# <data value="10.beside.shorter.most:.2f">2.74</data> times as much as the ring at the shorter
# lengths, and <data value="10.beside.last.most:.2f">1.37</data> times at <data value="10.lengths.last">65,536</data> tokens.
#
# <data value="10.touch">The bars of the two touch at no length</data>: in the replay the ring *exposes* least. **That doesn't make it faster.** A ring also computes in p steps,
# each with its own start of calls: at <data value="10.lengths.first">1,024</data> tokens <data value="10.ranks">4</data> of <data value="10.parts.computing-of-a-forward-step.replayed">828 µs</data> forward and <data value="10.ranks">4</data> of <data value="10.parts.computing-of-a-backward-step.replayed">813 µs</data> backward. Ulysses calls
# one attention, which we haven't timed.
#
# With enough kv heads Ulysses sends less, so it exposes less where bytes decide and computing is too short to cover a ring's
# messages. By the same formulas, with 8 ranks over InfiniBand and its latency of 10 µs, the ring exposes less than unpacked
# Ulysses from <data value="10.wins.32-kv-heads">17,178</data> tokens a rank on if G = H, and from
# <data value="10.wins.8-kv-heads">2,848</data> on with 8 kv heads for 32 heads. With ρ = 8,000, the rule
# w·ρ·G/H gives 16,000 and 4,000.
#
# <details><summary>Why is the rule too low once, and too high once?</summary>
#
# An H100 with 400 TFLOP/s in attention and a network of 50 GB/s, InfiniBand NDR, has ρ = 8,000. With 2 bytes a value and G = H,
# the rule asks for 16,000 tokens a rank.
#
# The rule gives the length from which computing covers the forward's messages. With G = H the ring exposes less only later than that,
# because its backward needs a greater length. With few kv heads it does so earlier, before all its messages are covered, because
# Ulysses sends q and the output, too.
# </details>
#
# <details><summary>A third way: one all-gather</summary>
#
# Llama 3 gathers k and v of all ranks at once, and so does PyTorch by default. That sends the bytes of a ring's forward in one call. Meanwhile a rank can
# compute with its own block alone, and afterwards it holds k and v of all tokens. With few kv heads, k and v are small, so gathering and holding them costs little.
# </details>
#
# The *explorer* draws the ring, unpacked Ulysses, and the computing of an H100 at d = 128. **Challenge:** on 8 ranks over InfiniBand NDR, with 32 heads, at least
# 8 kv heads and at most 65,536 tokens, keep the exposed time of the better way below 5 % of the computing time.

# %%
wins = {f"{G} kv heads": ring_exposes_less_from(32, G, cp=8, link="InfiniBand NDR")
        for G in (32, 8)}  # fmt: skip
lesson.record("10.wins", wins)  # tokens a rank
lesson.record("10.card-wins", long_contexts.wins_in_words(predicted, lengths))
winners = long_contexts.winners_in_words(predicted, replayed, lengths)
lesson.record("10.winners", winners)
least, packed = (predicted[way][-1] for way in ("ring", "Ulysses, packed"))
lesson.claim("By the card, a ring wins at the longest sequence", (least, "<", packed))
shorter, longest = long_contexts.ratios_beside(dots, lengths, lengths[-1])
lesson.record("10.beside", {"shorter": shorter, "last": longest})
lesson.explorers.ring_or_ulysses()

# %% [markdown]
# <details><summary>Answer</summary>
#
# 65,536 tokens and 8 kv heads: a ring exposes 3.5 %, Ulysses 17 %. With half the tokens the ring exposes 16 %, and with
# twice the kv heads 15 %.
# </details>
#
# ### The longest sequence
#
# We measure the activations that a rank keeps of one sequence of <data value="10.kept-length">4,096</data> tokens, in a GPT-2
# of two blocks. The prediction is the measurement at cp = 1, divided by cp.


# %%
def kept_bytes(cp):
    mesh = Mesh(Layout(dp=hpnb.world_size() // cp, cp=cp))
    model = hpnb.models.gpt2(kept_size, dtype=DTYPE).to(hpnb.device())
    context = parallelize(model, mesh.cp, "ring")
    batch = context.shard_batch(device_timing.random_tokens(kept_size, 1))
    del batch["labels"]
    with hpnb.record.memory(model) as recorder:
        model(**batch).logits.sum().backward()
    return max(sample.activations for sample in recorder.profile().samples)


sizes = [cp for cp in (1, 2, 4) if N % cp == 0]
kept = {f"cp = {cp}": pool.run(kept_bytes, cp)[0] for cp in sizes}
predicted = {f"cp = {cp}": kept["cp = 1"] / cp if cp > 1 else None for cp in sizes}
longest = {row: int(1e9 / nbytes * kept_size.length) for row, nbytes in kept.items()}
lesson.record("10.kept-length", kept_size.length)
lesson.show(predicted=predicted, measured=kept, unit="B", key="10.kept",
            columns={"extrapolated: kept in 1 GB (tokens)": longest},
            title="Activations of one sequence, on a rank")  # fmt: skip
worst = max((abs(kept[row] / n - 1) for row, n in predicted.items() if n), default=0)
lesson.claim("Activations shrink as 1/cp, within a tenth", (worst, "<", 0.1))

# %% [markdown]
# Activations shrink nearly in proportion, so p ranks can keep a sequence nearly p times as long. Weights,
# gradients and optimizer state shrink only with ZeRO, pipeline stages or tensor parallelism.
#
# <details><summary>What the library's ring computes a block with</summary>
#
# With PyTorch's *fused* attention kernels. They return the lse, and compute scores in pieces that never reach the main memory.
# Three cases use plain matrix products instead: float64 on a GPU, models whose queries see only the nearest keys, and models that
# limit the size of scores. These products write the scores of one pair of chunks to memory, H (s/2p)² numbers.
# </details>
#
# **Takeaway.** Where bytes decide and Ulysses sends fewer of them, take it well below w·ρ·G/H tokens a rank; otherwise, and well
# above, take a ring. If times hardly grow with the length, time both, computing included. With more ranks than heads, take a ring.
#
# ## The silent failure
#
# GPT-2 looks up each token's position in a table, `wpe`. Without positions, the `transformers` library counts from 0, on
# every rank.
#
# We train a GPT-2 twice on <data value="10.ranks">4</data> ranks. `shard_batch` returns a rank's tokens, which
# are a zigzag for a ring, with positions and shifted labels. In the second run we delete the positions. Masks
# stay right, because the ring knows where tokens stand. Then
# one process loads each run's weights, its *checkpoint*, and we compare logits of rank 0's tokens, the first and last 8.


# %%
def train(keep_positions):
    axis = Mesh(Layout(cp=hpnb.world_size())).cp
    model = hpnb.models.gpt2("laptop").to(hpnb.device())
    context, losses, norms = parallelize(model, axis, "ring"), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches:
        shard = context.shard_batch({k: x.to(hpnb.device()) for k, x in batch.items()})
        if not keep_positions:
            del shard["position_ids"]  # now every rank counts from 0
        targets = batch["labels"][:, 1:].numel()  # on all ranks: a loss is a part
        loss = model(**shard, num_items_in_batch=targets).loss
        model.zero_grad()
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        total = comm.all_reduce(torch.cat([g.flatten() for g in grads]), axis)
        for g, part in zip(grads, total.split([g.numel() for g in grads]), strict=True):
            g.copy_(part.view_as(g))  # each rank has other tokens: sum, don't average
        optimizer.step()
        losses.append(comm.all_reduce(loss.detach(), axis).item())
        norms.append(model.transformer.wpe.weight.grad[:64].norm(dim=1).tolist())
    return losses, norms, long_contexts.reloaded_distance(model, context, batch, shard)


names = {"positions of shard_batch": True, "positions that restart": False}
runs = {name: pool.run(train, keep)[0] for name, keep in names.items()}

# %%
losses, norms = ({name: run[i] for name, run in runs.items()} for i in (0, 1))
rows = {name: run[-1] for name, run in norms.items()}  # of the last step
lesson.record("10.varies", long_contexts.least_variation(norms, steps=10))  # of row 0
title = long_contexts.rows_title(losses, rows)
lesson.show(figures.losses_and_rows(losses, rows, title))
final = {name: run[-1] for name, run in losses.items()}
trained = {name: sum(norm > 0 for norm in run) for name, run in rows.items()}
# one process loads the weights: the distance of its logits, relative to their norm
off = {name: distance for name, (*_, distance) in runs.items()}
columns = {"last loss": final, "reloaded logits are off by": off,
           "rows of wpe with a gradient, of 64": trained}  # fmt: skip
title = long_contexts.reloaded_title(off)
lesson.show(columns=columns, key="10.fault", title=title)
right, wrong = names
start, end = losses[right][0], losses[right][-1]
lesson.record("10.gap", long_contexts.largest_gap(*losses.values()))
lesson.claim("The loss doesn't tell", abs(final[wrong] - end) < (start - end) / 5)
lesson.claim("With right positions, one process agrees", (off[right], "<", 1e-5))
lesson.claim("With wrong positions, it doesn't", (off[wrong], ">", 100 * off[right]))
lesson.claim("Only the first rows are trained", trained[wrong] == 64 // N)
lesson.field_guide.add(
    "the loss falls, and one process computes other logits from the checkpoint",
    "rows of the position table with a gradient; position_ids of all ranks, sorted",
    "each rank of cp counts its tokens' positions from 0", notebook="10")  # fmt: skip
lesson.field_guide.show("10")

# %% [markdown]
# Both losses fall, to <data value="10.fault.positions-of-shard_batch.last-loss:.2f">5.34</data> and
# <data value="10.fault.positions-that-restart.last-loss:.2f">5.35</data>. They differ most in step
# <data value="10.gap.step">29</data>, by <data value="10.gap.most:.2f">0.02</data>. One curve alone shows nothing, perhaps because
# the causal mask still tells the model which tokens come first.
#
# But the one process counts positions from 0 to 63. With the first checkpoint it computes the logits of training, up to
# rounding. With the second, they are off by
# <data value="10.fault.positions-that-restart.reloaded-logits-are-off-by:.4f">0.0144</data> of their norm.
#
# The instrument is the gradient of `wpe`: count the rows without one, the figure's crosses. With right positions,
# <data value="10.fault.positions-of-shard_batch.rows-of-wpe-with-a-gradient-of-64">63</data> of 64 rows have one, because the
# last token has no target. With positions that restart, only
# <data value="10.fault.positions-that-restart.rows-of-wpe-with-a-gradient-of-64">16</data> do.
#
# <details><summary>What if a model has no such table?</summary>
#
# Gather `position_ids` from all ranks of cp and sort them. Each position below s should appear once.
# </details>
#
# <details><summary>Why not compare the norms of rows?</summary>
#
# They vary from step to step, and the figure shows the last step only. Over the last ten steps, the norm of row 0 varies by a factor of
# <data value="10.varies:.1f">28.3</data> or more, in both runs.
# </details>
#
# **Takeaway.** Shift labels, then shard tokens together with positions and labels: the target of a rank's last token is on
# another rank.
#
# ## What to remember
#
# - Attention to blocks merges exactly, by output and lse.
# - A ring sends keys and values while it computes. Where bytes and FLOPs decide, computing covers them in the forward from
#   w·ρ·G/H tokens a rank on.
# - Ulysses exchanges tokens for heads and back, and needs p heads or more. Nothing covers what it sends.
# - Zigzag gives all ranks equally many visible pairs in every step.
#
# **When not to use this.** If a sequence fits, data parallelism needs no messages inside a layer. A flash kernel or
# recomputation may be enough.
#
# <details><summary>Where to look, and papers</summary>
#
# **Where to look.** Here: `hpnb/context_parallel/`, and `hpnb/theory/context.py` for bytes and times. Megatron-Core:
# `get_batch_on_this_cp_rank` in `megatron/core/utils.py` splits in a zigzag. PyTorch:
# `torch/distributed/tensor/experimental/`.
#
# **Papers.** Rabe & Staats 2021, *Self-attention does not need O(n²) memory*, arXiv 2112.05682. Dao et al. 2022,
# *FlashAttention*, 2205.14135. Liu, Zaharia & Abbeel 2023, *Ring attention*, 2310.01889. Brandon et al. 2023, *Striped
# attention*, 2311.09431. Jacobs et al. 2023, *DeepSpeed Ulysses*, 2309.14509.
# </details>
#
# **Next.** In [notebook 11](11_experts.ipynb) an all-to-all carries tokens to *experts*.
