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
# # What does agreement cost?
#
# **The question.** Training on many devices is computing apart, then agreeing. What does it cost to agree, in
# bytes and in seconds, and who pays?
#
# **You will be able to** run a function on several processes from a cell; say what each collective leaves
# where, and predict its bytes exactly; build an all-reduce from sends; measure latency, bandwidth and ρ of your
# machine, and predict a time from them; tell waiting from moving; read a deadlock from its records.
#
# **You should know** how to train a model in PyTorch on one device. Nothing about more than one.
#
# **Time.** 30 minutes to read; under 2 minutes to run on a laptop, 1 minute on 2 or 4 GPUs; 75 minutes for the
# exercises.
#
# **Two questions to recall** what you bring along: How many bytes does the gradient of a model with 25 million
# float32 parameters have? And which of a wire's two numbers, latency and bandwidth, decides how long one byte
# takes?
#
# <details><summary>Answers</summary>
# 100 MB: four bytes a parameter, as many as the parameters themselves. Latency: one byte takes as long as none.
# </details>

# %% tags=["setup"]
import statistics, sys, time
import torch, torch.distributed as dist
import hpnb
from hpnb import Layout, Mesh, comm, lesson, plot, theory
from hpnb.lesson.figures import ranks_and_collectives as figures
from hpnb.lesson.exercises import ranks_and_collectives as exercises

# %load_ext hpnb
here = lesson.banner()
N = here.ranks

# %% [markdown]
# ## A cell is a cluster
#
# A *rank* is one process of a group that works together. It has its own Python, its own memory and, where there
# are enough, its own GPU. `hpnb.launch` starts the ranks, sends them the function, joins them in a process
# group, shows what each prints under its label, and gives back one result a rank. What carries their bytes is a
# *backend*: NCCL between GPUs, gloo between CPUs.
#
# Every rank runs the *same* function. What it does differently, it decides by its rank.

# %%
def introduce(greeting):
    print(f"{greeting}, I am rank {hpnb.rank()} of {hpnb.world_size()} on {hpnb.device()}")
    return hpnb.rank() ** 2


hpnb.launch(introduce, "hello", ranks=N)

# %% [markdown]
# The lines come in any order: nobody told the ranks to take turns. The results are in order of rank.
#
# Those processes are gone again. `%%ranks` keeps a group alive between cells, and then it matters **where a
# variable lives**. The next cell binds `mine` on every rank. This notebook's own process never sees it.

# %%
# %%ranks $N
mine = torch.full((2,), float(hpnb.rank()))
mine

# %%
# %%ranks $N
mine.sum().item()

# %% [markdown]
# Each rank still has its own `mine`, and they differ. That is the whole difficulty of parallel training: there
# is no place where all of the data is. Whatever one rank needs of another must be sent.
#
# **Takeaway.** Same program, own memory. A name that you bind here goes to the ranks that read it, again whenever you
# rebind it; changed in place, it does not. A name that a rank binds stays there.
#
# ## Collectives, before and after
#
# Ranks could talk in pairs, by `send` and `receive`. Mostly they talk all at once, in a *collective*: a call that
# every rank of a group makes, in the same order. With n ranks and a tensor of S bytes:
#
# | collective | a rank brings | a rank leaves with | bytes that leave a rank, on average |
# |---|---|---|---|
# | broadcast | nothing, but for one who brings S | that S | (n-1)/n S |
# | reduce-scatter | S | its share, S/n, of the sum | (n-1)/n S |
# | all-gather | its share, S/n | all shares, S | (n-1)/n S |
# | all-reduce | S | the sum, S | 2(n-1)/n S |
# | all-to-all | n pieces of S/n | one piece from everybody | (n-1)/n S |
# | barrier | itself | the knowledge that all are there | 0 |
#
# The next cell runs two of them and draws what every rank really held. `Layout` arranges ranks along axes, and `Mesh`
# makes their groups; here all ranks lie along `dp`, the axis along which notebook 01 will split data. On an axis a
# rank has a place (`axis.rank`) among `axis.size`; `axis.ranks` are the members, and `axis.group` is what
# `torch.distributed` calls them.

# %%
def two_collectives():
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    mine = torch.arange(float(axis.size)) + 10 * axis.rank  # (n,)
    share = comm.reduce_scatter(mine, axis, dim=0)  # (1,)
    return mine.tolist(), share.tolist(), comm.all_gather(share, axis, dim=0).tolist()


stages = zip(*hpnb.launch(two_collectives, ranks=N), strict=True)
names = ("before", "after reduce-scatter", "after all-gather")
plot.show(
    figures.tensors(*stages, names=names, title="measured · what each rank holds"),
    alt=f"Each of {N} ranks holds {N} numbers; then the sum of one column; then all {N} sums.",
)

# %% [markdown]
# From the left of the figure to its right, the two together are an **all-reduce**: every rank ends with the sum of
# all. It is the most used collective in training, because gradients computed on different data must
# be summed; and it is made of these two halves. ZeRO (notebook 01) and sequence parallelism (notebook 03) are
# what you get when something useful happens between the halves.
#
# Before you go on, commit to a number. The table above has all you need.

# %%
lesson.predict(
    "00.ring-bytes",
    f"All-reduce 1,000,000 float32 values over {N} ranks: how many bytes leave each rank?",
    guess=None,
    unit="B",
    kind="identity",
)

# %% [markdown]
# ## A ring by hand
#
# Why 2(n-1)/n? The obvious way is to send everything to rank 0, add, and send the sum back. Then rank 0 receives
# (n-1) S bytes and sends as many, while all others watch. With 8 ranks one wire does 14 S of work and the rest idle.
#
# The ring keeps every wire busy. Cut the tensor into n chunks and let every rank talk only to its neighbours:
#
# 1. *Reduce-scatter.* In each of n-1 steps, send one chunk to the right, receive another from the left, add it to
#    yours. Chunk c travels round the ring and collects every rank's part. After n-1 steps each rank holds one
#    finished chunk.
# 2. *All-gather.* In n-1 more steps the finished chunks go round, replacing instead of adding.
#
# Each step moves one chunk of S/n bytes out of every rank, so 2(n-1) steps move 2(n-1)/n S. That is less than
# 2 S **however many ranks there are**; and where the ranks do the adding, no algorithm gets by with less on its
# busiest rank (Patarasuk & Yuan 2009). The price is the number of steps, which grows with n; we come back to it below.
#
# The next cell makes the sends of a ring, and no others, under `record.traffic`, which counts every send. (A collective
# it cannot see into: that it books as a ring would move it, whatever the backend does.) A prediction of this kind is an
# *identity*: the ratio must be exactly 1. The figure is the first half of a real ring.

# %%
def count_bytes(values):
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    chunk = torch.ones(values // axis.size, device=hpnb.device())
    with hpnb.record.traffic() as t:
        for _ in range(2 * (axis.size - 1)):
            chunk = comm.exchange(chunk, axis)  # to the right, and from the left
    return t.bytes["dp"]


sent = hpnb.launch(count_bytes, 1_000_000, ranks=N)[0]
ring = theory.bytes_sent("all_reduce", 4_000_000, N)
lesson.reveal("00.ring-bytes", sent, predicted=ring)
walk = exercises.ring_walk(min(N, 4))
names = ["before", *(f"step {k}" for k in range(1, len(walk)))]
title = "measured · how many ranks' parts are in each chunk"
plot.show(
    figures.tensors(*walk, names=names, title=title),
    alt="Every chunk begins with one part; in each step one chunk of every rank gains a part.",
)

# %% [markdown]
# ### Exercise 1: a ring all-reduce
#
# *Implement, 20 minutes.* You get this rank's `chunks` (a list of n tensors), its `rank`, and `exchange(tensor)`,
# which sends a tensor to the right neighbour and returns what the left one sent. Return the list of n summed
# chunks. The check wants the exact sum, 2(n-1) exchanges and 2(n-1)/n of the bytes, on 2, 3 and 4 ranks.
#
# Hint: in step s of the first half, rank r sends chunk (r - s) mod n and receives chunk (r - s - 1) mod n. After
# it, rank r has finished chunk (r + 1) mod n.

# %% tags=["stub-1"]
def ring_all_reduce(chunks, rank, exchange):
    ...


# %% tags=["check-1"]
lesson.check(exercises.ring, ring_all_reduce)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def ring_all_reduce(chunks, rank, exchange):
#     n = len(chunks)
#     for s in range(n - 1):                       # reduce-scatter: add what comes
#         got = exchange(chunks[(rank - s) % n])
#         chunks[(rank - s - 1) % n] += got
#     for s in range(n - 1):                       # all-gather: keep what comes
#         chunks[(rank - s) % n] = exchange(chunks[(rank + 1 - s) % n])
#     return chunks
# ```
# </details>

# %% [markdown]
# ### Exercise 2: an all-reduce from its two halves
#
# *Implement, 15 minutes.* Write `all_reduce(x, axis)` for a 1-D tensor of **any** length and dtype, with one
# `dist.reduce_scatter_tensor` and one `dist.all_gather_into_tensor` on `axis.group`. Both need equal shares. The
# check uses 12, 10 and 2 values on 3 ranks, and counts calls and bytes.
#
# Hint: pad with zeros to a multiple of `axis.size`, and cut the padding off at the end.

# %% tags=["stub-2"]
def all_reduce(x, axis):
    ...


# %% tags=["check-2"]
lesson.check(exercises.halves, all_reduce)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def all_reduce(x, axis):
#     share = -(-len(x) // axis.size)                                      # rounded up
#     padded = torch.nn.functional.pad(x, (0, share * axis.size - len(x)))
#     mine = padded.new_empty(share)
#     dist.reduce_scatter_tensor(mine, padded, group=axis.group)
#     whole = torch.empty_like(padded)
#     dist.all_gather_into_tensor(whole, mine, group=axis.group)
#     return whole[: len(x)]
# ```
# </details>

# %% [markdown]
# ## Your machine card
#
# A ring's bytes are the same everywhere; seconds are not. To first order a message of b bytes takes
#
# $$ t = \alpha + b / B $$
#
# with a latency α and a bandwidth B (Hockney 1994). A ring all-reduce is 2(n-1) such messages of S/n bytes:
#
# $$ t_{ring} = 2(n-1)\,\alpha + \frac{2(n-1)}{n}\,\frac{S}{B} $$
#
# Two numbers, then, and a third for what the ranks do besides: the rate of matrix products. The rate over the bandwidth
# runs through the whole series:
#
# $$ \rho = \frac{\text{matmul FLOP/s of a rank}}{\text{bytes/s that a rank sends}} $$
#
# ρ is an exchange rate: how many FLOP a rank could have done in the time it takes to send one byte. Where ρ is
# large, talking is dear.
#
# Here are yours, measured with all ranks at work. Put them into the formula and guess. This one is a *model*: within 0.8
# to 1.25 it is good, outside there is a term missing.

# %%
card = lesson.machine_card(N)
card.show()
megabytes = 100 if here.device == "cuda" else 8
lesson.predict(
    "00.all-reduce-time",
    f"How long do these {N} ranks take to all-reduce a gradient of {megabytes} MB?",
    guess=None,
    unit="ms",
)

# %%
def time_all_reduce(values, repeats=9):
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    x = torch.zeros(values, device=hpnb.device())
    comm.all_reduce(x, axis)  # the first call sets up connections
    with hpnb.record.timeline() as recorder:
        for _ in range(repeats):
            comm.barrier(axis)
            comm.all_reduce(x, axis)
    return statistics.median(e.duration for e in recorder.events() if e.op == "all_reduce")


took = max(hpnb.launch(time_all_reduce, megabytes * 250_000, ranks=N))
knee = theory.knee(N, card.link)
title = f"measured · all-reduce, {card.hardware}, {N} ranks"
plot.show(
    figures.costs(card.sizes, card.seconds, fit=card.curve(), knee=knee, title=title),
    alt="All-reduce time against size: flat at first, rising in proportion beyond the knee.",
)
predicted = card.predicted(megabytes * 1e6)
lesson.reveal("00.all-reduce-time", took * 1e3, predicted=predicted * 1e3)
times = {"time (s)": (predicted, took)}
lesson.ledger.add("00", Layout(dp=N), f"all-reduce of {megabytes} MB", times, card.hardware)

# %% [markdown]
# On the left of the **knee** the time hardly depends on the size: you pay for messages, not for bytes. On the
# right you pay for bytes. Sent tensor by tensor, the biases and norms of a model sit far on the left; the same gradient
# in a few large buckets sits on the right. That is why notebook 01 buckets.
#
# If your ratio is off: the model leaves out the adding itself, the time a host needs to hand a call to its GPU, caches that a
# large tensor does not fit, and whatever else uses cores and memory at that moment. With more ranks than cores, run it twice; if
# the two readings differ by more than the ratio, it is noise and not a term. (The cell also wrote a row into the *ledger*: what
# ran, measured and over predicted. It grows through the notebooks, and 08 reads it.)
#
# A ring is not always best: its 2(n-1) latencies hurt when the tensor is small and the ranks are many. A *tree* takes
# 2 log₂ n messages of S; *halving-doubling* takes 2 log₂ n messages and a ring's bytes, for n a power of two. On real
# wires its partners are far apart and share links, while a ring talks to neighbours only.
#
# **Challenge.** 64 ranks, 100 kB, a wire of 10 µs and 12.5 GB/s or worse: get under 200 µs.
#
# <details><summary>Answer</summary>
#
# `halving-doubling`, on the wire that the explorer opens with: its 12 messages wait 120 µs, its bytes take 2·63/64 of
# 8 µs, together 136 µs. A tree sends all 100 kB in each of its 12 messages: 216 µs, and all other wires allowed are
# slower. A ring waits for 126 messages: 1.28 ms. So few latencies leave room: at 2.5 GB/s halving-doubling still takes
# 199 µs. It is there because 64 is a power of two.
# </details>

# %%
lesson.explorers.all_reduce_cost()

# %% [markdown]
# ### Exercise 3: how large a bucket
#
# *Design, 10 minutes.* Gradients are to be reduced in buckets by a ring. Return the smallest bucket, in bytes, of
# which latency is at most `share` of the time. `wire.latency` is in seconds, `wire.bandwidth` in bytes/s. The check
# tries five wires.
#
# Hint: at the knee, n α B, latency is one half of the time.

# %% tags=["stub-3"]
def bucket_bytes(wire, ranks, share):
    ...


# %% tags=["check-3"]
lesson.check(exercises.bucket, bucket_bytes)

# %% [markdown]
# <details><summary>Solution</summary>
#
# Latency costs 2(n-1) α, bytes cost 2(n-1)/n S/B. Latency is the share f of the sum when bytes cost (1-f)/f as
# much; so S = n α B (1-f)/f, which is (1-f)/f times the knee.
#
# ```python
# def bucket_bytes(wire, ranks, share):
#     return ranks * wire.latency * wire.bandwidth * (1 - share) / share
# ```
# </details>

# %% [markdown]
# **Takeaway.** Messages cost latency, bytes cost bandwidth, and the knee n α B tells which of them you pay. ρ says how
# much computing a byte is worth.
#
# ## Waiting is not moving
#
# A profiler shows an all-reduce as one bar. Much of that bar may be no communication at all: a rank that arrives early
# has nothing to add to until the last one comes. Here rank 1 reads from a slow disk (it sleeps, so that ranks do not
# also fight for cores). Everybody then reduces 8 MB. Three times; the bars below are sums over the three. The guess is
# a *ranking*, and is scored by its *regret*: how much more your first choice costs than the best one. (Here a wrong
# rank costs twice a right one.)

# %%
lesson.predict(
    "00.shortest-bar",
    f"Rank 1 of {N} is slow. Which rank has the SHORTEST all-reduce bar?",
    guess=None,
    kind="ranking",
)

# %%
def step(slow):
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    gradient = torch.ones(1 << 21, device=hpnb.device())
    comm.all_reduce(gradient, axis)
    with hpnb.record.timeline() as recorder:
        for _ in range(3):
            with recorder.span("compute"):
                time.sleep(0.15 if axis.rank == slow else 0.03)
            comm.all_reduce(gradient, axis)[0].item()  # the host waits for its GPU, as for a loss
    return recorder.gather()


recorded = hpnb.launch(step, 1, ranks=N)[0]
reduces = recorded.select(["all_reduce"]).by_rank
order = sorted(reduces, key=lambda r: sum(e.duration for e in reduces[r]))
plot.show(
    figures.waits(recorded),
    alt=f"One bar a rank: compute, wait, move. Rank {order[0]} has the shortest all-reduce.",
)
costs = {r: 1 + (r != order[0]) for r in order}  # right or wrong
lesson.reveal("00.shortest-bar", order, predicted=[1], costs=costs)

# %% [markdown]
# The culprit has the *shortest* all-reduce: it comes last and waits for nobody. Everybody else's bar is long, and
# looks like a slow network. If you optimise the longest bar, you optimise a victim.
#
# **Takeaway.** Split every collective at the moment its last rank arrives. Before it, somebody was slow; after it,
# the wire was.
#
# A record also answers what you cannot run. Below, the same compute is replayed on other wires: what each rank did
# between two collectives stays, each collective is recomputed from the wire's latency and bandwidth.

# %%
wires = {"this machine": recorded}
wires |= {name: lesson.replay(recorded, wire) for name, wire in theory.LINKS.items()}


def spent(tl, op):
    return sum(e.duration for e in tl.split_waits().select([op]).events) / len(tl.ranks)


rows = []
for name, tl in wires.items():
    times = (tl.makespan, spent(tl, "wait"), spent(tl, "move"))
    rows.append((f"{name}, {tl.source}", *(lesson.number(t / 3, "s") for t in times)))
columns = ("wire", "step time", "of it waiting", "of it moving")
lesson.table(columns, rows, title="one step, mean over ranks")
names = ("this machine", "NVLink 4", "Ethernet 10 Gb")
plot.show(
    plot.timeline(*(wires[name].split_waits() for name in names), names=names, bubble=None),
    alt="As recorded, and the same compute on two other wires: moves change, waits remain.",
)

# %% [markdown]
# The moving changes with the wire. The waiting does not: no wire buys back a slow rank. The simulated rows are the
# formula alone, so compare them with each other; the measured row has, besides, what a call costs on a real machine.
# (A gap between compute and all-reduce is the copy that `comm` makes of its input.)
#
# ### Exercise 4: name the straggler
#
# *Diagnose, 10 minutes.* You get a `Timeline` that holds nothing but all-reduces: `tl.ranks`, and `tl.by_rank[r]`, a
# tuple of events with `.op`, `.start`, `.end` and `.duration`. Return the rank that kept the others waiting. The check
# makes three records of real ranks, with a different slow rank in each.
#
# Hint: whose bar would you *not* have looked at?

# %% tags=["stub-4"]
def straggler(tl):
    ...


# %% tags=["check-4"]
lesson.check(exercises.straggler, straggler)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def straggler(tl):
#     return min(tl.ranks, key=lambda rank: sum(event.duration for event in tl.by_rank[rank]))
# ```
# </details>

# %% [markdown]
# ## A deadlock's autopsy
#
# A collective is matched by *order*: in a group, the k-th call of one rank meets the k-th call of every other. There are
# no names.
#
# Swap two calls in *one* group, and the first of rank 0 meets the first of the others. With equal sizes a loss is added to
# gradients, and nobody notices: if the gradients are 100 and the losses 1 on four ranks, and rank 0 has the two calls
# swapped, the ranks get 301 and 103 instead of 400 and 4. Swap them in *two* groups, and each rank waits for a call that
# comes later in somebody else's program. No rank crashes, until PyTorch's own timeout (by default 10 minutes on NCCL, 30
# on gloo). GPUs even show 100 % use, since a waiting NCCL kernel spins.
#
# The next cell does the second on purpose, with 3 seconds to live.

# %% tags=["raises-exception"]
def mismatched():
    gradients, metrics = Mesh(Layout(dp=N)).dp, Mesh(Layout(tp=N)).tp  # two groups of the same ranks
    loss = torch.ones(1, device=hpnb.device())
    if hpnb.rank() == 0:
        comm.all_reduce(loss, gradients).item()
        comm.all_reduce(loss, metrics).item()
    else:
        comm.all_reduce(loss, metrics).item()
        comm.all_reduce(loss, gradients).item()


hpnb.launch(mismatched, ranks=N, timeout=3)

# %% [markdown]
# Read it from the top. *No answer from any rank*, and *all of them wait for others*: nobody crashed, and nobody is
# busy. Then compare **where** they wait. Rank 0 stands in the line with
# `gradients`, the others in the line with `metrics`. Two different collectives, each missing a member: that is the
# signature of mismatched order. Had one rank been outside any collective, that rank would be the culprit.
#
# **Takeaway.** Do not ask who is stuck; all are. Ask in which line each one waits, and which line lacks a member. The
# next cell begins a *field guide* with it: symptom, instrument, cause. Each notebook adds a row.

# %%
error = sys.last_value
assert isinstance(error, hpnb.RankError)
assert error.error == "timed out"
lines = {}
for rank, stack in error.stacks.items():
    lines[rank] = next(t.strip() for t in stack.splitlines() if "comm.all_reduce" in t)
assert "gradients" in lines[0]
assert all("metrics" in lines[rank] for rank in range(1, N))
lesson.table(("rank", "waits in"), list(lines.items()), title="when the time was up")
lesson.field_guide.add(
    "no progress, no error, GPUs at 100 %",
    "RankError.stacks: compare the line in which each rank waits",
    "collectives called in different order, or by some ranks only",
    notebook="00",
)
lesson.field_guide.show()

# %% [markdown]
# ### Exercise 5: three hangs
#
# *Diagnose, 20 minutes.* Each function hangs. Mend it so that **every** rank returns what its docstring says, and
# take out the line that raises. The check runs each on 3 ranks with 3 seconds to live, and shows where each rank stood.
#
# Hint: ask of each call who else makes it, and how often. A receive that all wait in has nobody left to send.

# %% tags=["stub-5"]
def pass_on(axis):
    """Hand this rank's number to the next rank, and return what the previous one handed over."""
    raise NotImplementedError  # take this line out once it is mended
    mine, got = torch.tensor([float(axis.rank)]), torch.empty(1)
    dist.recv(got, src=axis.ranks[axis.rank - 1], group=axis.group)
    dist.send(mine, dst=axis.ranks[(axis.rank + 1) % axis.size], group=axis.group)
    return got


def log_mean(axis):
    """The mean of all ranks' numbers; rank 0 prints it."""
    raise NotImplementedError  # take this line out once it is mended
    mean = torch.tensor(float(axis.rank))
    if axis.rank == 0:
        dist.all_reduce(mean, group=axis.group)
        print("mean", mean.item() / axis.size)
    return mean / axis.size


def uneven_sum(axis):
    """The sum over all batches of all ranks; rank 0 has three batches, the others two."""
    raise NotImplementedError  # take this line out once it is mended
    total = torch.zeros(())
    for batch in range(3 - (axis.rank > 0)):
        part = torch.tensor(batch + 1.0)
        dist.all_reduce(part, group=axis.group)
        total += part
    return total


# %% tags=["check-5"]
lesson.check(exercises.hangs, (pass_on, log_mean, uneven_sum))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `pass_on`: all receive first, so nobody sends. Post the send without waiting for it. `log_mean`: a collective is for
# everybody; only the printing is for rank 0. `uneven_sum`: rank 0 makes one call more than the others. Sum at home
# first, then agree once.
#
# ```python
# def pass_on(axis):
#     mine, got = torch.tensor([float(axis.rank)]), torch.empty(1)
#     sending = dist.isend(mine, dst=axis.ranks[(axis.rank + 1) % axis.size], group=axis.group)
#     dist.recv(got, src=axis.ranks[axis.rank - 1], group=axis.group)
#     sending.wait()
#     return got
#
#
# def log_mean(axis):
#     mean = torch.tensor(float(axis.rank))
#     dist.all_reduce(mean, group=axis.group)
#     if axis.rank == 0:
#         print("mean", mean.item() / axis.size)
#     return mean / axis.size
#
#
# def uneven_sum(axis):
#     total = torch.tensor(float(sum(batch + 1 for batch in range(3 - (axis.rank > 0)))))
#     dist.all_reduce(total, group=axis.group)
#     return total
# ```
# </details>

# %% [markdown]
# ## What to remember
#
# - Same program, own memory. Everything shared was sent.
# - An all-reduce is a reduce-scatter and an all-gather. By a ring, 2(n-1)/n S bytes leave each rank: less than twice
#   the tensor, however many ranks.
# - Time is messages times latency, plus bytes over bandwidth. The knee tells which of them you pay.
# - ρ is how many FLOP a byte costs. From 01 on it decides what hides behind what.
# - The slow rank has the shortest collective.
# - Collectives meet by order. In a deadlock, compare lines.
#
# **When not to use this.** If one device holds the model and the time is bearable, stop here: agreement that you need
# not reach is free. α and B as constants are a first model: it knows nothing of several wires at once, of hosts, of
# two collectives that share a link. 04 and 09 add that.
#
# **Papers.** Hockney 1994, *The communication challenge for MPP* (α and B). Thakur, Rabenseifner & Gropp 2005,
# *Optimization of collective communication operations in MPICH*. Patarasuk & Yuan 2009, *Bandwidth optimal all-reduce
# algorithms for clusters of workstations*.
