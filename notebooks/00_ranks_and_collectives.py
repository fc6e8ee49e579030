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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hpnb/hpnb/blob/main/notebooks/00_ranks_and_collectives.ipynb)
# [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/hpnb/hpnb/blob/main/notebooks/00_ranks_and_collectives.ipynb)
#
# **The question.** When several GPUs train one model, each computes on its own data, and then all of them must agree
# on one result. How many bytes does it take, how many seconds, and who waits for whom?
#
# **You will be able to** run code on several processes from a notebook cell; say what a collective leaves on each
# rank and how many bytes it sends; write a ring all-reduce; predict its time from latency and bandwidth; find the
# slow rank in a timeline; read a deadlock.
#
# **You should know** how to train a model in PyTorch on one GPU, and nothing about more than one.
#
# **Time.** 30 minutes to read; under 2 minutes to run; 70 minutes for the exercises.
#
# **Two questions to recall.** How many bytes has the gradient of a model with 25 million
# float32 parameters? And which decides how long a message of one byte takes, a network's latency or its bandwidth?
#
# <details><summary>Answers</summary>
#
# 100 MB: the gradient has one number for each parameter, and a float32 has four bytes. The latency: a single byte
# takes about as long as an empty message.
# </details>

# %% tags=["setup"]
import importlib.util

assert importlib.util.find_spec("hpnb"), "run `%pip install hpnb`, then this cell again"
import statistics, sys, time
import torch, torch.distributed as dist
import hpnb
from hpnb import Layout, Mesh, comm, lesson, theory
from hpnb.lesson.exercises import ranks_and_collectives as exercises
from hpnb.lesson.figures import ranks_and_collectives as figures
from hpnb.lesson.programs.tcp_traffic import tcp_traffic

# %load_ext hpnb
N = hpnb.ranks.default_ranks()
choice = hpnb.ranks.choose_device("auto", N)
DEVICE = "cpu" if choice.shares_gpus else "auto"  # two ranks on one GPU: use the CPU
why = "ranks that share a GPU have no link between them, so this page runs on the CPU"
here = lesson.banner(N, DEVICE, reading=why if choice.shares_gpus else "")
counting = "" if here.device == "cpu" else ", and over gloo where it counts bytes"
lesson.record("00.ran", {"ranks": N, "backend": here.backend + counting})

# %% [markdown]
# <details><summary>Words that a banner may have, and words of the cells</summary>
#
# `hpnb` is the library of this series. *Contended*: ranks share cores, so measured times include waiting for a core.
# *Simulated*: a formula gives the times of messages. *Replayed*: recorded compute times with messages from a formula.
# `lesson.record` and `lesson.ledger` save numbers for this text and for later pages.
# </details>
#
# ## Several processes, no shared memory
#
# A training job on several GPUs is one program that runs several times. Each copy is a *process* with its
# own memory and usually its own GPU. PyTorch numbers the processes from 0 and calls each a *rank*. A machine is a *node*.
#
# ```text
#   notebook ── starts ──▶  rank 0       rank 1       rank 2       rank 3      own memory each
#      ▲                      │            │            │            │
#      │                      └────────────┴── backend ─┴────────────┘         carries the bytes
#      └──── one result from each rank
# ```
#
# No rank can read another rank's memory, so whatever they share has to be sent. A *backend* carries the bytes: NCCL
# between GPUs, gloo on CPUs. This page ran <data value="00.ran.ranks">4</data> ranks over <data value="00.ran.backend">NCCL, and over gloo where it counts bytes</data>.
#
# The cell magic `%%ranks` runs a cell on every rank. The first such cell starts the processes, and they stay for the
# cells that follow.

# %%
# %%ranks $N --device $DEVICE
x = torch.full((2,), float(hpnb.rank()), device=hpnb.device())  # (2,)
x

# %% [markdown]
# Next rank 0 *sends* the tensor `x + N` to rank 1, which *receives* it into `x`. Once a call has returned, you can use
# its tensor again.

# %%
# %%ranks
if hpnb.rank() == 0:
    dist.send(x + N, dst=1)  # x belongs to the rank, N to the notebook
elif hpnb.rank() == 1:
    dist.recv(x, src=0)
x

# %% [markdown]
# Only rank 1's `x` has changed.
#
# <details><summary>Where a variable lives</summary>
#
# Outputs of ranks come in the order in which they answer. If a `%%ranks` cell uses a variable from the notebook, such
# as `N`, each rank gets a copy, and a fresh copy whenever you reassign it. If you change a notebook variable in
# place, the ranks do not see the change. A variable created on a rank, such as `x`, stays on that rank for later
# `%%ranks` cells, and the notebook does not see it. A function that you launch also gets copies of the notebook
# variables that it uses.
# </details>
#
# `hpnb.launch(function, ranks=N)` starts fresh processes, which have no `x`. It runs the function on each, and returns
# the list of results.
#
# <details><summary>In your tools: starting ranks</summary>
#
# Outside a notebook a launcher starts one process for each GPU: `torchrun --nproc_per_node=4 train.py` for PyTorch
# and Megatron-LM, `deepspeed --num_gpus=4 train.py`, or `accelerate launch --num_processes=4 train.py`. Megatron-LM,
# DeepSpeed and accelerate are libraries for training on many GPUs. Each process then joins the others. The launcher
# has set `RANK`, its number; `LOCAL_RANK`, its number inside the node; and `WORLD_SIZE`, the number of all ranks:
#
# ```python
# import os
# import torch
# import torch.distributed as dist
#
# torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # one GPU each
# dist.init_process_group("nccl")  # reads RANK, WORLD_SIZE and the address to meet at
# print(dist.get_rank(), "of", dist.get_world_size())
# ```
# </details>
#
# **Takeaway.** All ranks run the same program, each with its own memory. They share only what they send.
#
# ## Collectives: what each rank holds before and after
#
# Two ranks can send to each other. More often all ranks of a group call one operation together, a *collective*. A
# *group* is a list of ranks with its own message channels, and the default group is all ranks.
#
# The table is for n ranks and a tensor of S bytes. Its last column is the least that the busiest rank must send, if
# the ranks do the adding.
#
# | collective | input of each rank | each rank gets | bytes from the busiest rank |
# |---|---|---|---|
# | broadcast | S on one rank, nothing on the others | a copy of S | S (the average over ranks is (n-1)/n S) |
# | reduce-scatter | S | its shard of the sum, S/n | (n-1)/n S |
# | all-gather | its shard, S/n | all shards, S | (n-1)/n S |
# | all-reduce | S | the sum, S | 2(n-1)/n S |
# | all-to-all | n pieces of S/n | one piece from every rank | (n-1)/n S |
# | barrier | nothing | a return, once all have called it | 0 |
#
# A *shard* is one of n equal parts of a tensor, and each rank keeps one. The cell runs four of these collectives in
# plain `torch.distributed`, and draws the tensors of every rank.


# %%
def four_collectives():
    rank, n = hpnb.rank(), hpnb.world_size()
    before = torch.arange(float(n), device=hpnb.device()) + 10 * rank  # (n,)
    shard, gathered = torch.empty_like(before[:1]), torch.empty_like(before)
    dist.reduce_scatter_tensor(shard, before)  # (1,), the sum of one column
    dist.all_gather_into_tensor(gathered, shard)  # (n,)
    pieces = torch.empty_like(before)
    dist.all_to_all_single(pieces, before)  # (n,), one number from every rank
    copy = pieces.clone()
    dist.broadcast(copy, src=0)  # (n,), rank 0's; what the others had is lost
    return [x.tolist() for x in (before, shard, gathered, pieces, copy)]


tensors = hpnb.launch(four_collectives, ranks=N, device=DEVICE)  # of each rank
before, shard, gathered, pieces, copy = zip(*tensors, strict=True)
names = ["before", "after reduce-scatter", "after all-gather"]
title = "reduce-scatter leaves one sum on each rank, all-gather copies all"
lesson.show(figures.tensors(before, shard, gathered, names=names, title=title))
names = ["before", "after all-to-all", "after broadcast"]
title = "all-to-all gives rank r number r of every rank, broadcast copies rank 0's"
lesson.show(figures.tensors(before, pieces, copy, names=names, title=title))
VALUES = 1_000_000 // N * N  # float32, four bytes each
question = f"All-reduce 4 MB over {N} ranks: how many bytes leave each rank?"
answer = {"unit": "B", "kind": "identity", "rule_of_thumb": 4 * VALUES}  # exact
lesson.predict("00.ring-bytes", question, guess=None, **answer)

# %% [markdown]
# A reduce-scatter and an all-gather are together an *all-reduce*: each rank starts with a tensor and ends with the sum of all. Training
# uses it most, to add gradients of different data.
#
# The cell ends with a question, `lesson.predict`. Write a number for `guess` before you read on. Until then the page
# scores a rule of thumb: each rank sends its tensor once. Later `lesson.reveal` shows the answer beside the formula's
# number, *predicted*, and `lesson.claim` marks a true statement ✓.
#
# **Takeaway.** What each rank holds before and after defines a collective.
#
# ### Exercise 1: an all-reduce from its two halves
#
# *Core, 15 minutes.* Write `all_reduce(x)` for a 1-D tensor of **any** length and dtype, with one
# `dist.reduce_scatter_tensor` and one `dist.all_gather_into_tensor` over all ranks. Both need shards of equal size.
# The check tries 12, 10 and 2 values on 3 ranks.
#
# <details><summary>Hint</summary>
#
# Pad with zeros to a multiple of the number of ranks, and drop the padding at the end.
# </details>


# %% tags=["stub-1"]
def all_reduce(x): ...


# %% tags=["check-1"]
lesson.check(exercises.halves, all_reduce)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def all_reduce(x):
#     ranks = dist.get_world_size()
#     size = -(-len(x) // ranks)                        # of a shard, rounded up
#     padded = torch.nn.functional.pad(x, (0, size * ranks - len(x)))
#     shard = padded.new_empty(size)
#     dist.reduce_scatter_tensor(shard, padded)
#     gathered = torch.empty_like(padded)
#     dist.all_gather_into_tensor(gathered, shard)
#     return gathered[: len(x)]
# ```
# </details>

# %% [markdown]
# ## A ring all-reduce, send by send
#
# Why does an all-reduce send $2(n-1)/n \, S$ from each rank? The obvious algorithm sends every tensor to rank 0, which
# adds them up and sends the sum back. Then $(n-1) \, S$ bytes leave rank 0 while the links between the others are
# idle. A ring keeps all links busy. Split the tensor into n *chunks*, as large as shards, and let each rank send only to the next rank:
#
# ```text
#   ┌─▶ rank 0 ──▶ rank 1 ──▶ rank 2 ──▶ rank 3 ─┐     each step sends one chunk of S/n bytes
#   └────────────────────────────────────────────┘     out of every rank
# ```
#
# 1. *Reduce-scatter*, n-1 steps. Each rank adds the chunk that it receives to its own copy of that chunk. A chunk
#    collects one part from every rank as it travels, so afterwards each rank holds one finished chunk.
# 2. *All-gather*, n-1 steps. The finished chunks go round once more, and each rank keeps what it receives.
#
# The cell yields the chunks after every step. A step starts its send and its receive together. A send may finish only
# when the other side receives: if every rank first waited for its send, no rank would ever receive.


# %%
def send_right(chunk):
    """Send `chunk` to the next rank, and return what the previous rank sent."""
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(chunk)
    # isend and irecv return at once; a P2POp is one such call, to be made below
    sending = dist.P2POp(dist.isend, chunk, (rank + 1) % n)
    receiving = dist.P2POp(dist.irecv, received, (rank - 1) % n)
    for transfer in dist.batch_isend_irecv([sending, receiving]):  # starts both
        transfer.wait()  # before it returns, touch neither tensor
    return received


def ring_steps(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = list(x.clone().chunk(n))  # n of (len(x) / n,)
    yield torch.cat(chunks)
    # A rank sends the chunk of its number first, then what it has just received.
    for step in range(n - 1):  # reduce-scatter: add what arrives
        chunks[(rank - step - 1) % n] += send_right(chunks[(rank - step) % n])
        yield torch.cat(chunks)
    for step in range(n - 1):  # all-gather: keep what arrives
        chunks[(rank - step) % n] = send_right(chunks[(rank - step + 1) % n])
        yield torch.cat(chunks)


# %% [markdown]
# If the tensor holds only ones, a chunk's value is the number of ranks whose part it contains.
# On other numbers we compare with the library.


# %%
def ring_all_reduce(x):
    *_, result = ring_steps(x)
    return result


def compare_with_library():
    n = hpnb.world_size()
    ones = torch.ones(n, device=hpnb.device())  # (n,), one value in a chunk
    x = torch.arange(8.0 * n, device=hpnb.device()) + hpnb.rank()  # (8 n,)
    expected = x.clone()
    dist.all_reduce(expected)
    history = [state.tolist() for state in ring_steps(ones)]
    return history, torch.equal(ring_all_reduce(x), expected)


results = hpnb.launch(compare_with_library, ranks=N, device=DEVICE)
histories, equal = zip(*results, strict=True)
steps = [*range(min(N, 4)), 2 * (N - 1)]  # the first ones, and the end
stages = [[history[step] for history in histories] for step in steps]
names = ["before", *(f"step {step}" for step in steps[1:-1]), f"… step {steps[-1]}"]
title = f"{N - 1} steps add a part to a chunk of each rank, {N - 1} copy the sums"
lesson.show(figures.tensors(*stages, names=names, title=title))
lesson.claim("the ring and dist.all_reduce give every rank the same sum", all(equal))

# %% [markdown]
# Each of the $2(n-1)$ steps moves one chunk of S/n bytes out of every rank. Together that stays below 2 S **however
# many ranks there are**. No algorithm in which the ranks do the adding sends fewer bytes from its busiest rank
# (Patarasuk and Yuan 2009).
#
# Do so many bytes really leave a rank? We count on CPUs over gloo, whose TCP connections can be counted.
#
# - *Predicted* is the formula.
# - *Counted* adds up our ring's sends, with `hpnb.record.traffic`. It cannot see the sends inside of `dist.all_reduce`,
#   so there the column is empty.
# - *Measured* is what the operating system counts on these connections, inside the machine.


# %%
def count_bytes(runs):
    counted, measured = {}, {}
    for name, (all_reduce, length) in runs.items():
        x = torch.ones(length)  # float32 on the CPU, so gloo sends it
        all_reduce(x.clone())  # the first call opens connections
        with hpnb.record.traffic() as calls, tcp_traffic() as tcp:
            all_reduce(x)
        counted[name], measured[name] = calls.total, tcp.bytes
    return counted, measured


ours, large, small = "our ring, 4 MB", "dist.all_reduce, 4 MB", "dist.all_reduce, 1 kB"
runs = {ours: (ring_all_reduce, VALUES)}
runs |= {large: (dist.all_reduce, VALUES), small: (dist.all_reduce, 256)}
counted, measured = hpnb.launch(count_bytes, runs, ranks=N, device="cpu")[0]
predicted = {name: 2 * (N - 1) / N * 4 * length for name, (_, length) in runs.items()}
title = "bytes that leave rank 0 over gloo; measured on its TCP connections"
sends = {"counted (B)": {ours: counted[ours]}}
shown = {"predicted": predicted, "measured": measured, "columns": sends}
lesson.show(**shown, unit="B", title=title)
extra = {name: measured[name] - predicted[name] for name in (large, small)}
lesson.record("00.extra", extra, "B")
lesson.reveal("00.ring-bytes", counted[ours], "B", predicted[ours], source="counted")
more = 100 * extra[large] / predicted[large]
lesson.claim("of 4 MB gloo sends under 1 % more than a ring", (more, "<", 1))

# %% [markdown]
# Our ring sends exactly the bytes of the formula. `dist.all_reduce` sends <data value="00.extra.dist.all_reduce-4-mb">1.73 kB</data> more than its formula for 4 MB, and
# <data value="00.extra.dist.all_reduce-1-kb">1.73 kB</data> more for 1 kB. So the extra bytes do not grow with the tensor.
#
# <details><summary>Does gloo really use a ring?</summary>
#
# The bytes alone do not prove it, because other algorithms send as many. gloo's source does: a ring is the default in
# `gloo/allreduce.cc`. It sends each chunk in two halves, so that a rank can add one half while the other travels. The
# extra bytes fit that too. In a ring of 4 ranks a rank sends 6 chunks, or 12 halves. Each half comes with three headers
# of 48 bytes, and 12 · 3 · 48 = 1,728 bytes.
# </details>
#
# Where a later page counts a collective, it counts what a ring would send.
#
# <details><summary>What NCCL sends</summary>
#
# Inside a node NCCL sends over NVLink, NVIDIA's link between GPUs, or over the slower PCIe, the bus that every GPU
# sits on. The counter above sees neither. NCCL does not always use a ring. It may use a *tree*, in which ranks pass
# partial sums up to one rank and the result back down. Or it lets network switches do the adding, so that each rank
# sends fewer bytes.
# </details>
#
# <details><summary>In your tools: which algorithm, how many bytes</summary>
#
# - PyTorch with NCCL: `NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,TUNING` in the environment prints the algorithm that
#   NCCL chose. `NCCL_ALGO=Ring` forces a ring, to compare.
# - On GPUs `nvidia-smi nvlink -gt d` reads how much data each NVLink has carried.
# - `all_reduce_perf` of nccl-tests, NVIDIA's benchmark, reports a *bus bandwidth*: 2(n-1)/n S, the ring's bytes, over the seconds.
# - DeepSpeed: `"comms_logger": {"enabled": true}` in the configuration, then `deepspeed.comm.log_summary()`.
# - accelerate: `accelerator.reduce(tensor, reduction="sum")` is an all-reduce, `accelerator.gather(tensor)` an
#   all-gather.
# </details>
#
# **Takeaway.** A ring all-reduce sends less than twice the tensor from each rank, in $2(n-1)$ steps.
#
# ### Exercise 2: an all-reduce in log₂ n steps
#
# *Extra, 15 minutes.* A ring of 4 ranks takes 6 steps. Two are enough if in each step a rank swaps its **whole**
# tensor with a partner, and both add what they receive:
#
# ```text
#   step 1, distance 1:   0 ⇄ 1   2 ⇄ 3          step 2, distance 2:   0 ⇄ 2   1 ⇄ 3
# ```
#
# Return the sum, for any power of two. `exchange(tensor, peer)` sends a tensor to rank `peer` and returns what that
# rank sent. The check wants log₂ n exchanges of S bytes on 2, 4 and 8 ranks.
#
# <details><summary>Hint</summary>
#
# At distance d, a power of two, the partner of `rank` is `rank ^ d`.
# </details>


# %% tags=["stub-2"]
def doubling_all_reduce(x, rank, ranks, exchange): ...


# %% tags=["check-2"]
lesson.check(exercises.doubling, doubling_all_reduce)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def doubling_all_reduce(x, rank, ranks, exchange):
#     distance = 1
#     while distance < ranks:
#         x = x + exchange(x, rank ^ distance)
#         distance *= 2
#     return x
# ```
# </details>

# %% [markdown]
# ## Latency and bandwidth
#
# A ring sends the same bytes on every machine. The seconds depend on the *link* between the ranks, such as NVLink
# inside a node or Ethernet between nodes.
#
# *Latency* α is the time that even an empty message takes. *Bandwidth* B is how many bytes follow each second. A message
# of b bytes takes
#
# $$ t = \alpha + b / B $$
#
# and a ring all-reduce is $2(n-1)$ such messages of S/n bytes, one after the other:
#
# $$ t_{ring} = 2(n-1)\,\alpha + \frac{2(n-1)}{n}\,\frac{S}{B} $$
#
# A small tensor pays for the first term and is *latency-bound*, a large one for the second and is *bandwidth-bound*.
# The two terms are equal at S = n α B, the *knee*.
#
# What does a byte cost in compute?
#
# $$ \rho = \frac{\text{matmul FLOP/s of a rank}}{\text{bytes/s that a rank sends}} $$
#
# A FLOP is one floating-point operation, so ρ is how many of them a rank could have done while it sent one byte.
#
# A transformer computes on *tokens*, such as pieces of words or patches of images. With T tokens on each rank, the
# all-reduce of its gradients takes at most $2\rho / (3T)$ times as long as its computing, if both run at their peak
# rates.
#
# <details><summary>Where 2ρ / (3T) comes from</summary>
#
# The forward multiplies and adds once for each of P parameters and each token, which is 2 P FLOP. The backward does
# twice as much. Together that is 6 P FLOP a token, or 6 P T. The bf16 gradients have 2 P bytes, so a ring sends at
# most 4 P bytes from a rank. That takes as long as 4 P ρ FLOP. The ratio is at most 4 P ρ / (6 P T), and P cancels.
# </details>
#
# The cell measures a *machine card* with all ranks at work: it times all-reduces of many sizes, fits α and B to them,
# and times a matrix product.

# %%
card = lesson.machine_card(N, DEVICE)
card.show()
knee = theory.knee(N, card.link)
off = torch.tensor(card.seconds) / torch.tensor([*map(card.predicted, card.sizes)])
fit = {"most": off.log().abs().max().exp()}  # the dot that is furthest, as a factor
fit["large"] = card.seconds[card.sizes.index(2**23)], "s"  # 8.4 MB
lesson.record("00.fit", fit)
title = f"measured dots, fitted curve · an all-reduce over {N} ranks"
lesson.show(figures.costs(card.sizes, card.seconds, card.curve(), knee, title=title))
fitted = {"latency": (card.latency, "s"), "bandwidth": (card.bandwidth, "B/s")}
fitted |= {"rho": card.rho, "knee": (knee, "B"), "hardware": card.hardware}
lesson.record("00.card", fitted)
rho = {name: 989e12 / link.bandwidth for name, link in theory.LINKS.items()}
T = 16_384  # tokens on each rank
lesson.record("00.share", {name: 2 * r / (3 * T) for name, r in rho.items()})
more = {"ρ at published rates (FLOP/B)": rho}
links = theory.LINKS.items()
more["published B (B/s)"] = {name: link.bandwidth for name, link in links}
more["typical α (s)"] = {name: link.latency for name, link in links}
title = "an H100 or H200 (989 TFLOP/s in bf16, published) on six links"
lesson.show(columns=more, key="00.rho", title=title)
question = "100 all-reduces of 80 kB instead of one of 8 MB: how many times as long?"
lesson.predict("00.many-calls", question, guess=None, rule_of_thumb=1)

# %% [markdown]
# On <data value="00.card.hardware">4 x NVIDIA H100 80GB HBM3</data> the fit gives a latency of <data value="00.card.latency">20.6 µs</data>, a bandwidth of <data value="00.card.bandwidth">322 GB/s</data> and a
# knee at <data value="00.card.knee">26.6 MB</data>. No dot is more than a factor of <data value="00.fit.most:.2f">1.22</data> from the curve.
#
# Here the measured ρ is <data value="00.card.rho:,.0f">2,270</data> FLOP a byte. By published rates an H100 or H200 has <data value="00.rho.nvlink-4.at-published-rates">2,200 FLOP/B</data> over NVLink and
# <data value="00.rho.ethernet-10-gb.at-published-rates">791,000 FLOP/B</data> over 10 Gb Ethernet.
#
# With 16,384 tokens on each rank, $2\rho / (3T)$ at published rates is <data value="00.share.nvlink-4:.2f">0.09</data> over NVLink, so computing takes far
# longer than the all-reduce. Over 10 Gb Ethernet it is <data value="00.share.ethernet-10-gb:.0f">32</data>.
#
# <details><summary>The links of the table</summary>
#
# NVLink 4 joins the GPUs of one node. PCIe is the bus of a node: 4 and 5 are generations, x16 is 16 lanes. InfiniBand
# and Ethernet join nodes; NDR is InfiniBand of 400 Gb/s. *Published* is the peak that the maker's data sheet gives, for
# one direction. No data sheet has α, so its column is an order of magnitude.
# </details>
#
# Now we test the formula. A gradient of 8 MB can go in one call, or tensor by tensor in many.


# %%
def time_all_reduces(counts, repeats):
    gradient, seconds = torch.zeros(2_000_000, device=hpnb.device()), []  # 8 MB
    for count in [*counts] * (repeats + 1):  # in turn
        dist.barrier()
        begin = time.perf_counter()
        for part in gradient.chunk(count):
            dist.all_reduce(part)
        started = time.perf_counter() - begin
        gradient[-1].item()  # a GPU runs behind its process: wait for it
        seconds.append((started, time.perf_counter() - begin))
    return seconds[len(counts) :]  # the first turn opens connections

calls = {"1 call of 8 MB": 1, "100 calls of 80 kB": 100}
predicted = {name: n * card.predicted(8e6 / n) for name, n in calls.items()}
repeats = 3 if here.device == "cpu" else 5  # a hundred calls take long on a CPU
seconds = hpnb.launch(time_all_reduces, [1, 100], repeats, ranks=N, device=DEVICE)
turns = torch.tensor(seconds).amax(0).view(-1, 2, 2)  # (turn, 1 or 100, start or done)
(_, took), (started, took_100) = turns.median(0).values.tolist()
timed = dict(zip(calls, (took, took_100), strict=True))
title = f"slowest rank, median of {repeats}"
lesson.show(predicted=predicted, measured=timed, unit="s", key="00.calls", title=title)
expected, expected_100 = predicted.values()
lesson.record("00.off", figures.describe_calls(predicted, timed, started, card))
lesson.reveal("00.many-calls", took_100 / took, predicted=expected_100 / expected)
lesson.claim("100 calls take longer than one of the same bytes", (took_100, ">", took))

# %% [markdown]
# One call took <data value="00.calls.1-call-of-8-mb.measured">212 µs</data>, and a hundred took <data value="00.calls.100-calls-of-80-kb.measured">5.67 ms</data>: <data value="00.many-calls:.1f">26.7</data> times as long for the same bytes. Every call costs something whatever
# its size: a latency, by the formula $2(n-1)\,\alpha$ or <data value="00.off.latency">124 µs</data>, and the time to start it. That is why notebook 01 collects gradients in *buckets*,
# each of many tensors in one call.
#
# The formula says <data value="00.many-calls.predicted:.1f">77.1</data> times as long. It describes single calls.
# Calls in a series overlap, as follows. The single call also took longer than its
# prediction, <data value="00.calls.1-call-of-8-mb.predicted">161 µs</data>; a fold lists possible causes.
#
# On average each of the hundred took <data value="00.off.call">56.7 µs</data>, bytes included. That is <data value="00.off.than">shorter than</data> the <data value="00.off.latency">124 µs</data>
# of latency that the formula charges each call. On a GPU the fit times one call from start to end: the process starts it, then its bytes move. When many calls follow, the process starts the
# next one while earlier bytes still move, so each costs about the longer of start and move.
# <data value="00.off.started">The process needed 5.60 ms only to start the hundred, so here starting calls, not the link, sets the time</data>.
#
# <details><summary>On a laptop</summary>
#
# Four ranks on two cores wait for a core as well as for a message, and the fit counts that as latency, so α is much
# larger than on GPUs. ρ is much smaller because cores compute far more slowly.
# </details>
#
# <details><summary>If the prediction is off on your machine</summary>
#
# If a measured time is too long, these calls pay a cost that the fit does not contain. Ranks may leave the barrier
# late. Other programs may use the cores or the links. On GPUs a process needs time to hear that its GPU is done.
#
# If it is too short, the fit contains a cost that these calls do not pay. On GPUs the fit starts each call on an idle
# GPU, so start and move come one after the other. With many calls, the start of one overlaps the move of an earlier one.
#
# Of these causes the cell times only the starts, and only on GPUs. Run the cell twice. What differs between the runs
# is noise.
# </details>
#
# A ring is not always best: its $2(n-1)$ latencies hurt when the tensor is small and the ranks are many. The *explorer*
# below, a figure with sliders called *knobs*, draws the formulas of four algorithms.
#
# <details><summary>The other algorithms of the explorer</summary>
#
# *Naive* sends everything to rank 0 and back. A *tree* takes 2 log₂ n messages of S bytes. *Halving-doubling* takes as
# many messages, with a ring's bytes, for n a power of two: it first swaps halves, then quarters, and collects them
# likewise. Its formula ignores one cost: in some steps all ranks of a node send to another node at once and share that
# link. In a ring only one rank of a node does, so on several nodes halving-doubling is slower than drawn.
# </details>
#
# **Challenge.** 64 ranks all-reduce 100 kB over a link of 10 µs and 12.5 GB/s. Which algorithm gets under 200 µs?
#
# <details><summary>Answer</summary>
#
# `halving-doubling` on the link that the explorer opens with. Its 12 messages cost 120 µs of latency, and its bytes
# take 2·63/64 of 8 µs: together 136 µs. A tree sends all 100 kB in each of its 12 messages and takes 216 µs. A ring
# pays 126 latencies, 1.26 ms, and with its bytes 1.28 ms.
# </details>

# %%
lesson.explorers.all_reduce_cost()

# %% [markdown]
# **Takeaway.** A call costs latency, its bytes cost bandwidth. For a single call, the knee n α B tells which costs
# more. One large call takes less time than many small ones with the same bytes.
#
# ### Exercise 3: how large a bucket
#
# *Extra, 10 minutes.* Return the smallest bucket, in bytes, for which latency is at most `share` of a ring's time.
# `link.latency` is in seconds, `link.bandwidth` in bytes/s. The check tries five links.
#
# <details><summary>Hint</summary>
#
# At the knee, n α B, latency is one half of the time.
# </details>


# %% tags=["stub-3"]
def bucket_bytes(link, ranks, share): ...


# %% tags=["check-3"]
lesson.check(exercises.bucket, bucket_bytes)

# %% [markdown]
# <details><summary>Solution</summary>
#
# Latency takes $2(n-1) \alpha$, and the bytes take $2(n-1)/n \cdot S/B$. Latency is the share f of the sum if the
# bytes take $(1-f)/f$ times as long. So the bucket is $(1-f)/f$ times the knee.
#
# ```python
# def bucket_bytes(link, ranks, share):
#     return ranks * link.latency * link.bandwidth * (1 - share) / share
# ```
# </details>

# %% [markdown]
# ## Waiting is not moving
#
# So far all ranks called the all-reduce at about the same time. In training they rarely do, and an early rank waits:
#
# ```text
#   rank 0   ▇▇ compute ▇▇░░░░░░░░░ wait ░░░░░░░░░▒▒ move ▒▒
#   rank 1   ▇▇▇▇▇▇▇▇▇▇▇▇ compute ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▒▒ move ▒▒     the straggler
# ```
#
# A profiler shows wait and move as **one** bar, named all-reduce. We split it when the last rank arrives: before that
# moment a rank *waits*, afterwards bytes *move*. The last one is the *straggler*, here rank 1, which sleeps 100 ms longer.
#
# A `Layout` arranges ranks as a grid. Here all lie along its axis `dp`: in *data parallelism* (notebook 01) each rank
# trains a copy of the model on its own data. `Mesh(layout).dp` is the group along that axis, and its `rank` is this
# rank's number in it.
#
# The next two cells run three cases with 8 MB: all ranks at once, all after a pause of 30 ms, and rank 1 late. They record a *timeline*, the start and end of each event on each rank. The figure shows the last case. Below it, a
# rank's *cost* is its wait plus its move.

# %%
question = f"Rank 1 of {N} is slow. Which rank has the SHORTEST all-reduce bar?"
answer = {"guess": None, "kind": "ranking", "rule_of_thumb": ["rank 0"]}
lesson.predict("00.shortest-bar", question, **answer)


def record_steps(cases, steps=5):
    axis, recorded = Mesh(Layout(dp=hpnb.world_size())).dp, {}
    gradient = torch.ones(2_000_000, device=hpnb.device())  # 8 MB
    dist.all_reduce(gradient, group=axis.group)  # the first call opens connections
    sent = theory.bytes_sent("all_reduce", gradient.nbytes, axis.size)
    for name, (pause, late) in cases.items():
        with hpnb.record.timeline() as recorder:
            for _ in range(steps):
                comm.barrier(axis)  # dist.barrier, and notes itself in the timeline
                with recorder.span("compute"):  # notes this block, under a name
                    time.sleep(pause + late * (axis.rank == 1))
                # A GPU notes start and end itself, when it gets there (CUDA events).
                # -1: it belongs to no pipeline stage and no microbatch (notebook 02)
                with recorder.span("all_reduce", -1, -1, "dp", sent, axis.ranks):
                    dist.all_reduce(gradient, group=axis.group)
                gradient[0].item()  # a GPU runs behind its process: wait for it
        recorded[name] = recorder.gather()  # the events of all ranks, on every rank
    return recorded


# %%
cases = {"at once": (0, 0), "after a pause": (0.03, 0), "rank 1 late": (0.03, 0.1)}
recorded = hpnb.launch(record_steps, cases, ranks=N, device=DEVICE)[0]
late = recorded["rank 1 late"]
title = "measured · compute is a sleep, longest on rank 1"
lesson.show(figures.waits(late, title=title, steps=5))
spent = figures.time_by_part(late.split_waits("all_reduce"), 5)  # as in the figure
costs = {f"rank {r}": part["wait"] + part["move"] for r, part in spent.items()}
order = sorted(costs, key=costs.get)
lesson.reveal("00.shortest-bar", order, predicted=["rank 1"], costs=costs)
lesson.claim("the late rank has the shortest all-reduce", order[0] == "rank 1")
times = {"time (s)": (expected, took)}  # of the one 8 MB call, for notebook 08's table
lesson.ledger.add("00", Layout(dp=N), "all-reduce of 8 MB", times, card.hardware)

# %% [markdown]
# The straggler has the *shortest* all-reduce because it arrives last and waits for nobody.
#
# We also *replay* the last case on two other links: compute takes as long as recorded, and collectives what the formula says.


# %%
def median(tl, part, ranks=range(N)):
    """Median seconds that an all-reduce of these ranks spends in "wait" or "move"."""
    events = tl.split_waits("all_reduce").select([part]).events
    return statistics.median(event.duration for event in events if event.rank in ranks)

others = [rank for rank in range(N) if rank != 1]
wait = {name: median(tl, "wait", others) for name, tl in recorded.items()}
move = {name: median(tl, "move") for name, tl in recorded.items()}
parts = {"measured wait (s)": wait, "measured move (s)": move}
parts["predicted move (s)"] = dict.fromkeys(cases, card.predicted(8e6))
title = "medians of an all-reduce of 8 MB; wait without rank 1, move of all"
lesson.show(columns=parts, key="00.bar", title=title)
two = {name: theory.LINKS[name] for name in ("NVLink 4", "Ethernet 10 Gb")}
replays = {name: lesson.replay(late, link) for name, link in two.items()}
waits = {name: median(tl, "wait", others) for name, tl in replays.items()}
moves = {name: median(tl, "move") for name, tl in replays.items()}
lesson.show(columns={"wait (s)": waits, "move (s)": moves}, key="00.replay",
            title="replayed · the steps with the late rank, on two links")  # fmt: skip
once, paused, late = recorded.values()
lesson.record("00.pause", figures.compare_moves(once, paused))
lesson.record("00.late", figures.compare_moves(paused, late, "the late rank"))
arrivals = figures.describe_arrivals(once, wait["at once"], move["at once"])
lesson.record("00.once", arrivals)
waiting, moving = wait["rank 1 late"], move["rank 1 late"]
lesson.claim("with a late rank most of the bar is waiting", (waiting, ">", moving))

# %% [markdown]
# Rank 1 slept 100 ms longer, so the others waited <data value="00.bar.rank-1-late.measured-wait">100 ms</data> in an all-reduce. The move, which begins when rank 1
# arrives, took <data value="00.bar.rank-1-late.measured-move">669 µs</data>. In both tables, *wait* leaves out
# rank 1, and *move* covers all ranks, because bytes move on all.
#
# With published B and typical α the move takes <data value="00.replay.nvlink-4.move">44.7 µs</data> on NVLink 4 and <data value="00.replay.ethernet-10-gb.move">9.90 ms</data> on 10 Gb Ethernet.
# The wait stays at <data value="00.replay.ethernet-10-gb.wait">100 ms</data>.
#
# The formula predicts <data value="00.bar.at-once.predicted-move">161 µs</data> in all three cases. The move took <data value="00.bar.at-once.measured-move">177 µs</data> "at once" and
# <data value="00.bar.after-a-pause.measured-move">374 µs</data> after the pause. Could that be noise? We pair each of the five steps of one case with each of
# the other's.
#
# After the pause the move is longer than "at once" in <data value="00.pause.longer">25</data> of <data value="00.pause.pairs">25</data> pairs: <data value="00.pause.words">in this run moves after the pause are longer</data>. With rank 1 late it is
# longer than after the pause in <data value="00.late.longer">24</data> of <data value="00.late.pairs">25</data>: <data value="00.late.words">in this run moves after the late rank are longer</data>.
#
# <details><summary>How we tell a difference from noise</summary>
#
# A step's move is the median over its ranks. We count in how many of the 25 pairs the second case's step is longer. We
# call the moves different only if this count is at least 23 or at most 2, which noise alone reaches in 3 % of cases (a
# rank-sum test).
# </details>
#
# <details><summary>How long does an 8 MB all-reduce take, then?</summary>
#
# Even in the case "at once", the ranks leave the barrier at different times. The last to arrive was <data value="00.once.last">rank 0 in 2 of 5 steps</data>. The
# median wait, <data value="00.bar.at-once.measured-wait">30.6 µs</data>, was <data value="00.once.wait-is">shorter than</data> the move.
#
# The formula counts until the slowest rank is done. The previous section's times do so too: <data value="00.calls.1-call-of-8-mb.measured">212 µs</data> for one call, and
# <data value="00.fit.large">178 µs</data> for 8.4 MB in the fit. A move in the table is a median over ranks and steps. A move that is much longer than
# the fit's time contains something besides the link, because the fit used the same link.
#
# One candidate is a *cold start*: after a pause, the code that launches a call has left the caches, and GPUs and
# links may be saving power. The first count above tests this for a pause of 30 ms. In the last case rank 1 sleeps 130 ms, and the others wait inside the call. The second count cannot say which of these two matters. Before you blame a
# link, time the call with and without a pause before it. With more ranks than cores, ranks also wait for a core, and
# cold starts are lost in that noise.
# </details>
#
# <details><summary>In your tools: stragglers</summary>
#
# - PyTorch: record one trace a rank with `torch.profiler`, and compare the **starts** of one NCCL kernel over the
#   ranks. The rank that starts last is the straggler.
# - Megatron-LM has `--log-straggler`, which logs how fast each rank computes.
# - DeepSpeed: `deepspeed.comm.log_summary(show_straggler=True)` separates waiting from moving.
# </details>
#
# **Takeaway.** Split every collective's bar at the moment its last rank arrives. Before, ranks wait for the slowest. Afterwards bytes
# move, and whatever else the call costs counts as move too.
#
# ### Exercise 4: name the straggler
#
# *Core, 10 minutes.* You get a `Timeline` of all-reduces: `tl.ranks`, and `tl.by_rank[r]`, a tuple of events that have
# `.start`, `.end` and `.duration`. Return the rank that kept the others waiting. The check records three runs.
#
# <details><summary>Hint</summary>
#
# Whose bar would you *not* have looked at?
# </details>


# %% tags=["stub-4"]
def straggler(tl): ...


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
# ## A deadlock, and how to read it
#
# Collectives carry no names. In each group, the first call of one rank meets the first call of every other, and so on.
# Only order counts:
#
# ```text
#              rank 0                           ranks 1, 2, 3
#   1st call   all-reduce in group gradients    all-reduce in group metrics
#   2nd call   all-reduce in group metrics      all-reduce in group gradients
# ```
#
# Both groups contain all ranks. Every rank waits for a call that comes later in another rank's program: a
# *deadlock*.
#
# <details><summary>With one group: wrong sums</summary>
#
# With one group nothing would hang, and the sums would be wrong. Let each rank's gradient be 100 and its metric 1. The first calls then add up to 100 + 3 = 103, the
# second to 1 + 300 = 301. Ranks 1 to 3 take 301 for the sum of gradients, and rank 0 takes 103. Right would be 400.
# </details>
#
# The next cell makes the deadlock. It needs two groups of all ranks. One Layout lays them along `dp`, for
# `gradients`. Another lays them along a second axis, `tp`, for `metrics`. `comm.all_reduce` is `dist.all_reduce` in a
# group, on a copy. After 3 seconds the launch stops the ranks and raises a `RankError`.


# %% tags=["raises-exception"]
def mismatched():
    gradients, metrics = Mesh(Layout(dp=N)).dp, Mesh(Layout(tp=N)).tp  # same ranks
    gradient, metric = torch.tensor([[100.0], [1.0]], device=hpnb.device())
    if hpnb.rank() == 0:
        comm.all_reduce(gradient, gradients).item()
        comm.all_reduce(metric, metrics).item()
    else:
        comm.all_reduce(metric, metrics).item()
        comm.all_reduce(gradient, gradients).item()


hpnb.launch(mismatched, ranks=N, device=DEVICE, timeout=3)

# %% [markdown]
# On GPUs a rank may stand in the call itself, or in a later line that waits for the GPU. Compare the **lines**.

# %%
error = sys.last_value
assert isinstance(error, hpnb.RankError)
assert error.error == "timed out"
lesson.show(error, title="measured · where each rank waited when the time was up")
in_gradients = [rank for rank in range(N) if "gradients)" in error.stacks[rank]]
lesson.claim("rank 0 alone waits in the all-reduce over gradients", in_gradients == [0])
lesson.field_guide.add(
    "no progress, until a time limit raises an error",
    "RankError.stacks: compare the line in which each rank waits",
    "collectives called in different order, or by some ranks only",
    notebook="00",
)
lesson.field_guide.show()

# %% [markdown]
# Every notebook adds a row to the *field guide*, which leads from a symptom to its cause.
#
# <details><summary>In your tools: hangs</summary>
#
# - PyTorch with NCCL: set `TORCH_NCCL_TRACE_BUFFER_SIZE=2000` and `TORCH_NCCL_DUMP_ON_TIMEOUT=1`. This *flight
#   recorder* writes the last collectives of each rank to a file. `py-spy dump --pid PID` shows where a live rank stands.
# - A GPU monitor may show 100 % use in a hang: an NCCL kernel that waits keeps asking whether the data has come.
# - PyTorch itself raises an error if a collective has not ended after 10 minutes over NCCL, or 30 over gloo.
# - On gloo, `monitored_barrier` names the rank that does not come:
#
# ```python
# from datetime import timedelta
# from torch.distributed import monitored_barrier
#
# monitored_barrier(timeout=timedelta(seconds=30))
# ```
# </details>
#
# **Takeaway.** In a deadlock, ask in which line each rank waits, and which rank has not made that call.
#
# ### Exercise 5: three hangs
#
# *Core, 20 minutes.* Each function hangs without its `raise` line. Repair it so that **every** rank returns what the docstring says. The check
# runs each for 3 seconds on 3 ranks, and shows where each rank stood.
#
# <details><summary>Hint</summary>
#
# Ask of each call which other ranks make it, and how often. If all ranks receive first, nobody sends.
# </details>


# %% tags=["stub-5"]
def pass_on(rank, ranks):
    """Send this rank's number to the next rank; return what the previous one sent."""
    raise NotImplementedError  # delete this line when the function is repaired
    received = torch.empty(1)
    dist.recv(received, src=(rank - 1) % ranks)
    dist.send(torch.tensor([float(rank)]), dst=(rank + 1) % ranks)
    return received


def log_mean(rank, ranks):
    """The mean of all ranks' numbers."""
    raise NotImplementedError  # delete this line when the function is repaired
    mean = torch.tensor(float(rank))
    if rank == 0:  # which writes the log
        dist.all_reduce(mean)
    return mean / ranks


def uneven_sum(rank, ranks):
    """The sum over all batches of all ranks; rank 0 has three batches, others two."""
    raise NotImplementedError  # delete this line when the function is repaired
    parts = [torch.tensor(batch + 1.0) for batch in range(3 - (rank > 0))]
    for part in parts:
        dist.all_reduce(part)
    return sum(parts)


# %% tags=["check-5"]
lesson.check(exercises.hangs, (pass_on, log_mean, uneven_sum))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `pass_on`: all ranks receive first, so nobody sends. Start the send without waiting for it. `log_mean`: all ranks
# must call the collective, even if only rank 0 needs its result. `uneven_sum`: rank 0 makes one call more than the
# others. Add up on each rank, then call once.
#
# ```python
# def pass_on(rank, ranks):
#     received = torch.empty(1)
#     sending = dist.isend(torch.tensor([float(rank)]), dst=(rank + 1) % ranks)
#     dist.recv(received, src=(rank - 1) % ranks)
#     sending.wait()
#     return received
#
#
# def log_mean(rank, ranks):
#     mean = torch.tensor(float(rank))
#     dist.all_reduce(mean)
#     return mean / ranks
#
#
# def uneven_sum(rank, ranks):
#     total = torch.tensor(float(sum(batch + 1 for batch in range(3 - (rank > 0)))))
#     dist.all_reduce(total)
#     return total
# ```
# </details>

# %% [markdown]
# ## What to remember
#
# - An all-reduce is a reduce-scatter and an all-gather. A ring sends less than twice the tensor from each rank.
# - Time is latency for each message plus bytes over bandwidth. The knee n α B separates the two.
# - The straggler has the shortest collective.
# - Collectives are matched by order. In a deadlock, compare the lines in which ranks wait.
#
# **When not to use this.** If one GPU is fast enough and holds the model, stay there.
#
# <details><summary>Where to look, and papers</summary>
#
# **Where to look.** PyTorch: `torch/distributed/distributed_c10d.py` has all collectives of this page. Megatron-Core:
# `megatron/core/parallel_state.py` builds the groups of ranks that later notebooks use.
#
# **Papers.** Hockney 1994, *The communication challenge for MPP* (α and B). Thakur, Rabenseifner and Gropp 2005,
# *Optimization of collective communication operations in MPICH*. Patarasuk and Yuan 2009, *Bandwidth optimal
# all-reduce algorithms for clusters of workstations*.
# </details>
#
# **Next.** [Notebook 01](01_vit_data_parallel.ipynb) puts the model on every rank and all-reduces its gradients. It
# asks when that costs no time at all.
