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
# # What if only some weights work on a token?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hpnb/hpnb/blob/main/notebooks/11_experts.ipynb)
# [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/hpnb/hpnb/blob/main/notebooks/11_experts.ipynb)
#
# **The question.** In all models so far, every weight works on every token. A
# *mixture of experts* replaces the MLP of a block by E smaller MLPs, the *experts*, and sends each token to k of them.
# DeepSeek-V3 has 671 billion weights, and 37 billion work on a token. Memory, not FLOPs, limits the number of
# weights. So we shard the experts over the ranks: *expert parallelism*. What does a token's journey to its experts
# cost, and who waits?
#
# **You will be able to** write a router; dispatch tokens to experts on other ranks and combine the results; see
# which rank makes all others wait; balance experts by a loss or by a bias; say which ranks reduce which
# gradient, and find out when the wrong ones do.
#
# **You should know** data parallelism from notebook 01, and the all-to-all, waiting and moving from notebook 00.
# Exercise 3 and the last section need pipelines, from 02 and 06.
#
# **Time.** 30 minutes to read, 1 to run, 65 for the exercises.
#
# **Two questions to recall.** From 00: which rank has the shortest collective, and what share of its
# tensor does a rank send in an all-to-all over p ranks?
#
# <details><summary>Answers</summary>
# The straggler, because it arrives last and waits for nobody. (p - 1)/p of it: one piece stays.
# </details>
#
# **Letters.** A token has h values of w bytes and chooses k of E experts. A rank has n tokens. The *expert axis* ep has p ranks, and
# each holds E/p experts. A *row* is a token on its way to one expert. A rank has k n rows; those for its own experts stay.
# All numbers come from one run, on <data value="11.hardware">4 x NVIDIA H100 80GB HBM3</data>.

# %% tags=["setup"]
import importlib.util

assert importlib.util.find_spec("hpnb"), "run %pip install hpnb, then this cell again"
import itertools, statistics, torch, torch.distributed as dist
import hpnb
from hpnb import Layout, Mesh, comm, lesson, theory
from hpnb.expert_parallel import ExpertLoads, SelectionBias, balancing_loss, parallelize
from hpnb.expert_parallel import combine_rows, dispatch_rows, plan_dispatch
from hpnb.lesson.exercises import experts as exercises
from hpnb.lesson.figures import experts as figures
from hpnb.lesson.programs import experts as moe, experts_words as words, step_timing
from hpnb.pipeline_parallel import Costs, overlapped_pairs, schedules
from hpnb.record import Event, Timeline

E, K = 8, 2  # experts, and experts of a token
N = 4  # ranks; they share GPUs if there are fewer
pool = hpnb.Ranks(N)  # these ranks stay to the end
text = hpnb.data.text("train", block=64)  # packed into sequences of 64 tokens
batches = list(itertools.islice(hpnb.data.Loader(text, 8), 64))
batches, held_out = batches[:60], batches[60:]
model = "a small DeepSeek-V3 of two blocks, each with 8 experts"
here = lesson.banner(N, model=model, data=text.describe())
steps, few_steps = moe.training_steps(here.device)  # of the two trainings below
lesson.record("11.steps", steps)

# %% [markdown]
# ## A router
#
# The router is one small matrix. It gives each expert a score, also called *logit*. A softmax makes
# them probabilities. A token goes to the k likeliest experts. Their k probabilities, divided by their sum, are the weights of
# their outputs:
#
# ```text
# x (n, h) ── router (E, h) ──► scores (n, E) ── softmax, k largest ──► chosen (n, k), weights (n, k)
#
# output of a token = sum over its k experts of   weight * expert(token)
# ```
#
# In one process a loop over experts is enough.


# %%
def route(x, router, k):  # (n, h), (E, h)
    probability = (x @ router.T).softmax(-1)  # (n, E)
    weights, chosen = probability.topk(k)  # (n, k) twice
    return chosen, weights / weights.sum(-1, keepdim=True)

def mixture(x, router, experts, k):
    chosen, weights = route(x, router, k)
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        token, place = torch.where(chosen == number)  # this expert's rows
        out[token] += weights[token, place, None] * expert(x[token])
    return out


block, router, experts = moe.transformers_block(E, K)  # of Qwen3-MoE
x = torch.randn(64, router.size(1))
out = mixture(x, router, experts, K)
off = step_timing.relative_distance([out], [block(x[None])[0]])
block.requires_grad_()(x[None, :1])[0].sum().backward()  # of one token
weights = [p for name, p in block.named_parameters() if "experts" in name]
used = sum(int((p.grad != 0).sum()) for p in weights)  # it has a gradient there
counted = {"all experts": sum(p.numel() for p in weights), "work on a token": used}
title = words.used_title(used, counted["all experts"])
lesson.show(counted=counted, key="11.weights", title=title)
lesson.claim("Our mixture gives what transformers' block gives", (off, "<", 1e-5))

# %% [markdown]
# The block of Qwen3-MoE in transformers has <data value="11.weights.all-experts.counted">36,864</data> weights in its experts, and <data value="11.weights.work-on-a-token.counted">9,216</data> of them work on a token. The
# choice has no gradient. The router learns because each expert's output is multiplied by a weight: if the expert helps,
# the gradient raises its weight. With k = 1, leave out the division by the sum. It would make each weight 1, and the
# router would get no gradient.
#
# **Takeaway.** A router chooses k of E experts for each token. FLOPs follow k, memory follows E.
#
# ## Dispatch is a permutation
#
# Now tokens must travel to experts on other ranks and come back. If we sort a
# rank's rows by expert, they are sorted by rank as well, because rank 0 has the first experts, rank 1 the next. Then one
# *uneven* all-to-all moves them: a rank sends each other rank the rows for that rank's experts, so messages differ in size.
#
# ```text
# x (n, h)          chosen (n, k)
#   │ sort by expert
# rows (k n, h)     [ for rank 0 | for rank 1 | ... ]         counts (E,) travel first, so that all know the sizes
#   │ dispatch: all-to-all
# rows (r, h)       [ from rank 0 | from rank 1 | ... ]       r differs from rank to rank
#   │ this rank's experts, each on its rows from all ranks
# results (r, h)    [ for rank 0 | for rank 1 | ... ]
#   │ combine: all-to-all, send and receive sizes swapped
# results (k n, h)  ── inverse permutation, times weights, sum over k ──►  output (n, h)
# ```
#
# On average over ranks that route alike, (p-1)/p of the rows go to others. In the
# figure, expert 2 is ten times as likely as any other.

# %%
question = f"What share of its rows does a rank send away, of {N} ranks?"
lesson.predict("11.away", question, unit="%", rule_of_thumb=100)
chosen = [moe.routed_rows(8, E, K, popular=10, seed=10 + r) for r in range(N)]
marks = [c.tolist() for c in chosen]
title = words.dispatch_title(marks, E, popular=2)
lesson.show(figures.dispatched_rows(marks, E, title=title))
away = [(c // (E // N) != r).double().mean().item() for r, c in enumerate(chosen)]
predicted, counted = 100 * (N - 1) / N, 100 * sum(away) / N
lesson.reveal("11.away", counted, predicted=predicted, source="counted")

# %% [markdown]
# Here is dispatch and combine by hand, for k = 1. `comm.exchange_rows` is the uneven all-to-all. Its
# backward swaps send and receive sizes. Rows arrive sender by sender, and those of one sender are sorted by expert.
# `numbers` lists this rank's experts, from 0 on, once for every sender.
# Repeated by the counts in `arriving`, it gives each row's
# expert.
#
# <details><summary>A small example</summary>
#
# Of two ranks, this one has two experts, which it numbers 0 and 1 even if they are experts 2 and 3 of all. So
# `numbers` is 0 1 0 1. If 2 and 1 rows arrive from one rank, and 0 and 3 from the other, the rows' experts are
# 0 0 1 1 1 1.
# </details>


# %%
def send_to_experts(x, chosen, compute, axis):  # (n, h), (n,): one expert a token
    order = chosen.argsort(stable=True)  # by expert, and so by rank
    counts = chosen.bincount(minlength=E)  # (E,)
    arriving = torch.empty_like(counts)  # from each rank, for each expert of this one
    dist.all_to_all_single(arriving, counts, group=axis.group)
    sent, received = (c.view(axis.size, -1).sum(1).tolist() for c in (counts, arriving))
    rows = comm.exchange_rows(x[order], axis, sent, received)  # (r, h)
    numbers = torch.arange(E // axis.size, device=x.device).repeat(axis.size)
    results = compute(rows, numbers.repeat_interleave(arriving))  # rows, their experts
    return comm.exchange_rows(results, axis, received, sent)[order.argsort()]  # (n, h)


# %%
def by_hand(x, chosen, weights, compute, axis):
    return weights * send_to_experts(x, chosen[:, 0], compute, axis)

def library(x, chosen, weights, compute, axis):
    plan = plan_dispatch(chosen, E, axis)
    rows = dispatch_rows(x, plan, axis)
    return combine_rows(compute(rows, plan.experts), weights, plan, axis)


layers = {"by hand, k = 1": (by_hand, 1), "library, k = 1": (library, 1)}
layers["library, k = 2"] = library, 2
ran = {name: pool.run(moe.compare_layer, layer, E, k)[0]
       for name, (layer, k) in layers.items()}  # fmt: skip
exact = lesson.Parity({name: layer.distances for name, layer in ran.items()})
what = "what" if exact.equal else "other numbers than"
lesson.show(exact, title=f"Experts on {N} ranks compute {what} one process computes")
lesson.claim("Dispatch and combine are exact, forward and backward", exact.equal)
counts = (N - 1) / N * 8 * E  # bytes of the counts, which are sent first
h, w = 8, 8  # values of a token; bytes of a float64
predicted = {name: theory.experts.rows_sent(layer.there, layer.back, h, w) + counts
             for name, layer in ran.items()}  # fmt: skip
counted = {name: layer.sent for name, layer in ran.items()}
title = "bytes that leave rank 0 in a forward and backward"
lesson.show(predicted=predicted, counted=counted, unit="B", key="11.sent", title=title)
lesson.claim("The formula counts every byte", counted == predicted)

# %% [markdown]
# Rank 0 sends its rows for other ranks. Each row that it receives goes back as a result.
# The backward does both once more, for gradients. So this many bytes leave rank 0 for rows:
#
# $$ 2\,(\text{rows sent} + \text{rows received})\,h\,w \quad\text{bytes}, \qquad\text{on average}\qquad
# 4\,\tfrac{p-1}{p}\,k\,n\,h\,w. $$
#
# In the table n = 16. The counts add 8 (p - 1)/p E bytes, once. Apart from these, the average doesn't contain E: more
# experts cost memory, and hardly more bytes on the link.
#
# **Takeaway.** Sort by expert, all-to-all, compute, all-to-all, sort back.
#
# ### Exercise 1: dispatch and combine
#
# *Core. Implement, 25 minutes.* Write `layer(x, chosen, weights, compute, axis)` for k experts a token, with the
# collectives of `send_to_experts` and nothing from `hpnb.expert_parallel`. `chosen` and `weights` are n x k. `compute(rows,
# experts)` applies this rank's experts, which it numbers from 0. The check doesn't use E experts:
# `compute.num_experts` is their number on all ranks. It compares output and gradients with one process.
#
# <details><summary>Hint</summary>
#
# Row j of the n k rows, in order, belongs to token j // k.
# </details>


# %% tags=["stub-1"]
def layer(x, chosen, weights, compute, axis): ...


# %% tags=["check-1"]
lesson.check(exercises.dispatch_and_combine, layer)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def layer(x, chosen, weights, compute, axis):
#     k, flat = chosen.size(1), chosen.flatten()  # (n k,)
#     order = flat.argsort(stable=True)
#     counts = flat.bincount(minlength=compute.num_experts)
#     arriving = torch.empty_like(counts)
#     dist.all_to_all_single(arriving, counts, group=axis.group)
#     sent, received = (c.view(axis.size, -1).sum(1).tolist() for c in (counts, arriving))
#     rows = comm.exchange_rows(x[order // k], axis, sent, received)
#     numbers = torch.arange(len(counts) // axis.size, device=x.device).repeat(axis.size)
#     results = compute(rows, numbers.repeat_interleave(arriving))
#     back = comm.exchange_rows(results, axis, received, sent)[order.argsort()]  # (n k, h)
#     return (back.view(*chosen.shape, -1) * weights[..., None]).sum(1)
# ```
# </details>

# %% [markdown]
# ## Imbalance is a straggler
#
# Nothing makes routers fair. A rank with a popular expert gets more rows and computes longer, and in the combine all
# others wait for it. Ranks that share cores or a GPU would also slow each other down. So we *replay* the
# layer: we time each rank's computing alone (on a CPU, its CPU time), and let every rank wait until the slowest has finished. Experts are now
# large. Expert 2, on rank 1, is again ten times as likely as any other.


# %%
def rows_of_ranks(popular):
    chosen = [moe.routed_rows(512, E, K, popular, seed=rank) for rank in range(N)]
    counts = torch.cat(chosen).flatten().bincount(minlength=E)  # rows of each expert
    return counts.view(N, -1).sum(1).tolist()  # a rank has E / N of them


question = "One popular expert: how many times as long as with even rows?"
lesson.predict("11.slower", question, rule_of_thumb=1)  # no more rows than before
rows = {"even": rows_of_ranks(1), "popular": rows_of_ranks(10)}
seconds = pool.run(moe.seconds_of_ranks, rows, E // N)[0]
title = words.waiting_title(seconds["popular"], 2 // (E // N))
lesson.show(figures.computing_and_waiting(seconds["popular"], title=title))

# %%
slowest = {name: max(took) for name, took in seconds.items()}
busiest = {name: N * max(counts) / sum(counts) for name, counts in rows.items()}
slower, ratio = (x["popular"] / x["even"] for x in (slowest, busiest))
columns = {"busiest rank's rows / mean, counted": busiest}
title = "the slowest rank's computing"
lesson.show(replayed=slowest, unit="s", columns=columns, key="11.layer", title=title)
lesson.reveal("11.slower", slower, predicted=ratio, source="replayed")
lesson.claim("Computing grows as the busiest rank's rows do",
             abs(slower / ratio - 1) < 0.25)  # fmt: skip

# %% [markdown]
# With the popular expert, the busiest rank has <data value="11.layer.popular.busiest-rank-s-rows-mean-counted:.2f">2.04</data> times the mean number of rows. With even routing it has
# <data value="11.layer.even.busiest-rank-s-rows-mean-counted:.2f">1.03</data> times. So we predict the quotient, <data value="11.slower.predicted:.2f">1.98</data>.
# Replayed, computing takes <data value="11.slower:.2f">1.94</data> times as long. The busiest *rank* counts: two popular experts do less harm
# on two ranks.
#
# **Takeaway.** All ranks wait for the busiest one. If it has twice the mean number of rows, experts take about twice as long.
#
# ## Balance, or drop
#
# **A loss.** Let f_e be the share of tokens that chose expert e, and P_e its mean probability. The
# *balancing loss* is $E \sum_e f_e P_e$, added to the model's loss with a small factor, such as 0.01. f comes from counting and has no gradient.
# P has one, and it pushes probability away from experts with a large f. With even loads every f_e is k/E, the P_e add up to
# 1, and the balancing loss is k.
#
# **A bias.** Add a *selection bias* to the scores, for the choice only. After each step, raise it for experts with less
# than the mean load, and lower it for the others: `bias += rate * sign(mean - load)`. DeepSeek-V3 does this. The bias
# has no gradient, so it never competes with the model's loss.
#
# **A capacity.** Drop an expert's surplus rows.
#
# The balancing loss multiplies two means, f and P. So the loss of all tokens isn't the mean of the ranks' losses. That
# mean also asks each rank's few tokens to be balanced, which is stricter.


# %%
def balance(scores, k):  # (n, E)
    f = scores.topk(k).indices.flatten().bincount(minlength=E) / len(scores)  # (E,)
    return E * (f * scores.softmax(-1).mean(0)).sum()


draws = torch.Generator().manual_seed(0)
shards = [torch.randn(4, E, generator=draws) for _ in range(N)]  # each rank's scores
shared = pool.run(lambda: balancing_loss([moe.this_rank(shards)], K, moe.expert_axis()))
right, mean = balance(torch.cat(shards), K), sum(balance(x, K) for x in shards) / N
losses = {"all tokens": right, "library, on ranks": shared[0], "mean of ranks": mean}
lesson.show(columns={"loss": losses}, key="11.balance", title="Not a mean over ranks")
off = abs(right - shared[0])
lesson.claim("The library's loss is that of all tokens", (off, "<", 1e-5))

# %% [markdown]
# The balancing loss of all tokens is <data value="11.balance.all-tokens.loss:.2f">2.16</data>. The mean of the ranks' losses is <data value="11.balance.mean-of-ranks.loss:.2f">2.46</data>, because a
# rank's few tokens are rarely spread evenly.
#
# Now we train a small DeepSeek-V3 three times for <data value="11.steps">60</data> steps. Each block also has a *shared expert*, which works on every
# token. In so few steps we balance harder than usual: the loss has a factor of 0.3, the bias a rate of 0.01.
# `parallelize` keeps this rank's experts. `ExpertLoads` counts each expert's rows.
#
# <details><summary>How this model routes</summary>
#
# It weighs the experts' outputs by a sigmoid of each score instead of our softmax. Its routers already hold a selection bias.
# </details>


# %%
def train(way):
    mesh = Mesh(Layout(dp=N, ep=N))
    model = moe.mixture(E, K)
    experts = parallelize(model, mesh.ep)
    logits = moe.router_logits(model)  # a list, which each forward fills anew
    # edp: next section. No other rank has the same experts here: nothing to reduce
    replica = hpnb.DataParallel(model, mesh.dp, expert_axis=mesh.edp)
    bias = SelectionBias(model, experts, mesh.dp, 0.01) if way == "bias" else None
    loads = bias.loads if bias else ExpertLoads(experts, mesh.dp)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for batch in batches[:steps]:
        loss = total = replica(**moe.shard(batch, mesh.dp)).loss
        if way == "loss":
            total = loss + 0.3 * balancing_loss(logits, K, mesh.dp)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        bias.step() if bias else loads.end_step()
        losses.append(comm.all_reduce(loss.detach(), mesh.dp).item() / N)
    weights = hpnb.placement.full_state_dict(model, [mesh.ep])
    return losses, loads.imbalances, loads.steps, weights


# %%
names = {"no balancing": "", "balancing loss": "loss", "selection bias": "bias"}
runs = {name: pool.run(train, way)[0] for name, way in names.items()}
imbalances = {name: run[1] for name, run in runs.items()}
title = words.loads_title(imbalances)
lesson.show(hpnb.plot.expert_loads(imbalances, title=title))
lesson.record("11.peak", min(max(run) for run in imbalances.values()))
late = {name: statistics.mean(run[1][-10:]) for name, run in runs.items()}
last = {name: statistics.mean(run[0][-10:]) for name, run in runs.items()}
# mean rows of the busiest rank of a step, of the second busiest, and so on
rows = {name: moe.sorted_rows(run[2][-10:], N) for name, run in runs.items()}
rows["even"] = [8 * 64 * K / N] * N  # 8 sequences of 64 tokens
seconds = pool.run(moe.seconds_of_ranks, rows, E // N)[0]
slower = {name: max(seconds[name]) / max(seconds["even"]) for name in names}
columns = {"busiest expert / mean, counted": late, "loss, measured": last}
columns["computing of a layer / of one with even loads, replayed"] = slower
lesson.show(columns=columns, key="11.run", title="the last ten steps")
worse = max(late["balancing loss"], late["selection bias"])
lesson.claim("Both ways balance", (worse, "<", late["no balancing"]))
lesson.claim("Balancing saves time", slower["selection bias"] < slower["no balancing"])
lesson.record("11.gap", gap := max(last.values()) - min(last.values()))
lesson.claim("Balancing costs little loss here, if any", (gap, "<", 0.1))
loads = moe.busiest_experts(runs["no balancing"][3], held_out, E, K)
title = "counted · no balancing, on text that it hasn't seen: rows of an expert / mean"
lesson.show(columns=loads, key="11.loads", title=title)

# %% [markdown]
# In each block we divide the rows of the step's busiest expert by the mean. The figure shows the mean of the two blocks. In
# each run some expert soon gets <data value="11.peak:.2f">3.52</data> times the mean load or more. Loads become more even without balancing, too, so compare
# runs in the same steps. In the last ten, the busiest expert has
# <data value="11.run.no-balancing.busiest-expert-mean-counted:.2f">2.78</data> times the mean without balancing, and
# <data value="11.run.selection-bias.busiest-expert-mean-counted:.2f">1.35</data> times with the bias. Without balancing, a layer's experts
# compute <data value="11.run.no-balancing.computing-of-a-layer-of-one-with-even-loads-replayed:.2f">1.63</data> times as long as with even loads.
#
# A mean can conceal a block: on new text, the busiest expert of block 1 has <data value="11.loads.block-1.busiest:.2f">1.46</data> times the
# mean, that of block 2 <data value="11.loads.block-2.busiest:.2f">4.00</data> times: nearly every token chose it.
#
# The three losses differ by at most <data value="11.gap:.3f">0.035</data>. Each model was trained once, so this doesn't say which way trains better. In
# the longer trainings of Wang et al., a large factor of the balancing loss makes the model worse.
#
# ### Capacity
#
# The early models GShard and Switch gave each expert a tensor of constant size, its *capacity*: the mean load times c,
# the *capacity factor*.
# Missing rows are padded, and surplus rows are dropped. A dropped row contributes nothing to its token. We give two
# trained models a capacity afterwards, and measure their loss on new text.


# %%
def keep_within(chosen, capacity):  # (n, k) -> (n, k): does the row have a place?
    flat = chosen.flatten()
    order, counts = flat.argsort(stable=True), flat.bincount(minlength=E)
    first = counts.cumsum(0) - counts  # where each expert's rows begin
    place = torch.empty_like(flat)
    place[order] = torch.arange(len(flat), device=flat.device) - first[flat[order]]
    return (place < capacity).view_as(chosen)


factors = (0.0, 0.5, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
models = {name: runs[name][3] for name in ("no balancing", "selection bias")}
points = pool.run(moe.loss_within_capacity, models, keep_within,
                  (*factors, float("inf")), held_out, E, K)[0]  # inf: no drops
dropped = {name: [share for share, _ in run[:-1]] for name, run in points.items()}
rise = {name: [x - run[-1][1] for _, x in run[:-1]] for name, run in points.items()}
title = words.capacity_title(dropped, factors.index(1.25), 1.25)
lesson.show(figures.capacity(factors, dropped, rise, title))
at, at_3 = factors.index(1.25), 100 * dropped["no balancing"][factors.index(3.0)]
lost, few = (100 * dropped[name][at] for name in models)
lesson.record("11.dropped", {"free": lost, "bias": few, "at-3": at_3}, "%")
free, balanced = rise.values()
cost = {"words": "less" if free[at] < lost / 100 * free[0] else "more"}
lesson.record("11.rise", cost | {"free": free[at], "all": free[0], "bias": balanced[0]})
lesson.claim("Balance saves rows from being dropped", (few, "<", lost))
lesson.claim("Both models need experts", (min(free[0], balanced[0]), ">", 0.02))

# %% [markdown]
# With a capacity of 1.25 times the mean, the unbalanced model drops <data value="11.dropped.free">24.1 %</data> of its rows, the balanced one <data value="11.dropped.bias">0.525 %</data>. If
# all rows are dropped, the shared expert works alone, and the unbalanced model's loss rises by only <data value="11.rise.all:.3f">0.058</data>: after so few
# steps the experts have learned little. At 1.25 times the mean this loss changes by <data value="11.rise.free:+.3f">-0.001</data>, which means
# nothing on so little text.
#
# At 3 times the mean, the unbalanced model still drops <data value="11.dropped.at-3">6.23 %</data> of its rows. No expert gets more than E/k = 4 times the
# mean, because a token's experts differ.
#
# <details><summary>Padding, and layers without it</summary>
#
# With padding, an expert always computes c times the mean load, balanced or not, and surplus rows are still dropped. *Dropless*
# layers, as in MegaBlocks, in this library and by default in Megatron-Core, multiply groups of any size instead, and all ranks wait for
# the busiest one.
# </details>
#
# **Takeaway.** Balance first. A selection bias does it without a term in the loss. Then little is left to drop.
#
# ### Exercise 2: the balancing loss
#
# *Core. Derive, 20 minutes.* Write `balancing(logits, k)`, without autograd. It returns the balancing loss of n x E
# logits and its gradient with respect to them, n x E.
#
# <details><summary>Hint</summary>
#
# A softmax has ∂p_j/∂z_i = p_j (δ_ij - p_i). Which logits of a token does P_e depend on?
# </details>


# %% tags=["stub-2"]
def balancing(logits, k): ...


# %% tags=["check-2"]
lesson.check(exercises.balancing_loss, balancing)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def balancing(logits, k):
#     n, num_experts = logits.shape
#     p = logits.softmax(-1)
#     f = p.topk(k).indices.flatten().bincount(minlength=num_experts).to(p) / n
#     loss = num_experts * (f * p.mean(0)).sum()
#     gradient = num_experts / n * p * (f - (p * f).sum(-1, keepdim=True))
#     return loss, gradient
# ```
#
# A logit is pushed down if its expert's f is above a weighted mean of all f. The weights are this token's probabilities.
# </details>

# %% [markdown]
# ## Which ranks share an expert?
#
# The expert axis has no ranks of its own. It takes them from dp, where every rank has other tokens. With dp = 4 and ep = 2:
#
# ```text
# dp rank     0              1              2              3
# router      a copy         a copy         a copy         a copy         all four reduce its gradient
# experts     0 1 2 3        4 5 6 7        0 1 2 3        4 5 6 7
#             └── ep group ───┘              └── ep group ───┘             together they have every expert
#             └───────── edp group ──────────┘                             the same experts: they reduce
# ```
#
# After the backward, rank 0 holds the gradient of expert 0 for the tokens of ranks 0 and 1, because their rows came
# through the all-to-all. Rank 2 holds the gradient of the same expert for the tokens of ranks 2 and 3. So an expert's
# gradient is summed over its *edp group* (expert data parallel) alone. These 2 terms cover the tokens of all 4 ranks,
# as the 4 terms of the router's gradient do. The loss is a mean over the 4 dp ranks, so both sums are divided by 4.
#
# `HybridParallelPlugin(ep_size=2)` knows this. We train three steps, compare the losses with one process, and count the bytes
# of the last step.


# %%
def train_boosted():
    plugin = hpnb.HybridParallelPlugin(precision="fp32", ep_size=2)
    booster, model, losses = hpnb.Booster(plugin=plugin), moe.mixture(E, K), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    dp, named = plugin.mesh.dp, list(model.named_parameters())
    weights = [sum(p.nbytes for name, p in named if (".experts." in name) == is_expert)
               for is_expert in (False, True)]  # fmt: skip
    for batch in batches[:3]:
        with hpnb.record.traffic() as traffic:
            loss = model(**moe.shard(batch, dp)).loss
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(comm.all_reduce(loss.detach(), dp).item() / dp.size)
    return torch.tensor(losses, dtype=torch.float64), traffic.bytes, weights


# %%
groups = {axis: str(Layout(dp=N, ep=2).groups(axis)) for axis in ("dp", "edp")}
model, alone = moe.mixture(E, K), []  # one process, plain PyTorch
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in batches[:3]:
    optimizer.zero_grad()
    loss = model(**{key: x.to(hpnb.device()) for key, x in batch.items()}).loss
    loss.backward()
    optimizer.step()
    alone.append(loss.item())
losses, sent, (dense, local) = pool.run(train_boosted)[0]
predicted = {"dp": 2 * (N - 1) / N * dense, "edp": 2 * (2 - 1) / 2 * local}
counted = {axis: sent[axis] for axis in predicted}
lesson.show(predicted=predicted, counted=counted, unit="B", columns={"groups": groups},
            title="a step: experts' gradients go over edp, others over dp")  # fmt: skip
off = step_timing.relative_distance([losses], [losses.new_tensor(alone)])
lesson.claim("The plugin trains as one process", (off, "<", 1e-5))
lesson.claim("The bytes of experts are exact", counted["edp"] == predicted["edp"])
lesson.record("11.besides", counted["dp"] - predicted["dp"], "B")

# %% [markdown]
# <details><summary>What else goes over dp?</summary>
#
# Over dp, rank 0 sends <data value="11.besides">96 B</data> besides the gradients. It broadcasts buffers, such as the selection biases, and a
# small all-reduce makes the loss a mean over all ranks' targets.
# </details>
#
# <details><summary>In your tools: experts</summary>
#
# hpnb: `HybridParallelPlugin(ep_size=4, selection_bias_rate=0.001)`. Megatron-Core: `--num-experts 8
# --expert-model-parallel-size 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall`; to balance,
# `--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01`, which balances each microbatch, or `global_aux_loss`, which
# balances the batch of all ranks, or `--moe-router-enable-expert-bias`; to drop,
# `--moe-expert-capacity-factor 1.25`; for two microbatches at once, `--overlap-moe-expert-parallel-comm`. torchtitan: `expert_parallel_degree` in the section `parallelism` of its
# configuration. DeepSpeed: `deepspeed.moe.layer.MoE(hidden_size, expert, num_experts=8, ep_size=4, k=2,
# capacity_factor=1.25)`, with `drop_tokens=False` for dropless. transformers: each model's plan `base_model_ep_plan`,
# switched on so:
#
# ```python
# from transformers import AutoModelForCausalLM
# from transformers.distributed import DistributedConfig
#
# config = DistributedConfig(tp_size=4, ep_size=4)
# model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", distributed_config=config)
# ```
# </details>
#
# ### The silent failure
#
# A training loop that doesn't know of experts averages all gradients over dp. Shapes agree, so nobody complains that expert 0 gets the gradient of expert 4 mixed in. We write the
# loop by hand and change only the axis. The second cell also prints the *field guide*.


# %%
def train_by_hand(axis_of_experts):
    mesh = Mesh(Layout(dp=N, ep=2))
    model = moe.mixture(E, K)
    parallelize(model, mesh.ep)
    named, losses = list(model.named_parameters()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def reduce():
        for name, p in named:
            axis = mesh.axes[axis_of_experts] if ".experts." in name else mesh.dp
            p.grad.copy_(comm.all_reduce(p.grad, axis) / N)

    few = batches[0]["input_ids"][:1, :3]  # the same 3 tokens on all ranks
    # a forward and backward of these, `reduce`, and the norm of each expert's gradient
    probe = moe.probe_experts(model, reduce, mesh.ep, N, few)
    for batch in batches[:few_steps]:
        loss = model(**moe.shard(batch, mesh.dp)).loss
        optimizer.zero_grad()
        loss.backward()
        reduce()
        optimizer.step()
        losses.append(comm.all_reduce(loss.detach(), mesh.dp).item() / N)
    return losses, probe


# %%
right, wrong = "reduced over edp", "averaged over dp"
axes = {right: "edp", wrong: "dp"}
ran = {name: pool.run(train_by_hand, axis)[0] for name, axis in axes.items()}
losses, probes = ({name: run[i] for name, run in ran.items()} for i in (0, 1))
norms = {name: probe.norms for name, probe in probes.items()}
unused = {name: probe.unused_with_gradient for name, probe in probes.items()}
title = words.fault_title(losses, unused)
tokens = probes[right].tokens
lesson.record("11.unused", tokens.count(0))
lesson.show(figures.losses_and_experts(losses, norms, tokens, title=title))
last = {name: run[-1] for name, run in losses.items()}
off = {name: probe.distance for name, probe in probes.items()}
columns = {"last loss, measured": last, "experts' gradients off by, measured": off,
           "unused experts with a gradient, counted": unused}  # fmt: skip
lesson.show(columns=columns, key="11.fault", title=words.unused_title(unused))
start, end = losses[right][0], losses[right][-1]
lesson.claim("The last losses differ by less than a fifth of their fall",
             (abs(losses[wrong][-1] - end), "<", (start - end) / 5))  # fmt: skip
lesson.claim("Reduced over edp, unused experts have no gradient", unused[right] == 0)
lesson.claim("Averaged over dp, some have one", (unused[wrong], ">", 0))
lesson.field_guide.add(
    "the loss falls, and experts' gradients are not those of one process",
    "tokens of each expert beside the norm of its gradient, in a step of a few tokens",
    "experts' gradients are averaged over all of dp", notebook="11")  # fmt: skip
lesson.field_guide.show()

# %% [markdown]
# The losses end at <data value="11.fault.reduced-over-edp.last-loss-measured:.2f">5.11</data> and
# <data value="11.fault.averaged-over-dp.last-loss-measured:.2f">5.16</data>. Each model was trained once, so this difference can't say what
# the fault costs. The second curve alone looks healthy, because everything except the experts is trained correctly, and
# experts matter little after few steps: under *Capacity*, dropping all their rows raised the loss by only <data value="11.rise.all:.3f">0.058</data>.
#
# The instrument is a backward of three tokens before the first step, with equal weights in both runs. There, <data value="11.unused">4</data> of the last block's eight experts have no
# token, so their gradient must be zero. With the wrong axis,
# <data value="11.fault.averaged-over-dp.unused-experts-with-a-gradient-counted">2</data> of these have a gradient; 3 and 7 stay at zero because they
# are mixed with each other. All experts' gradients
# together are off from those of one process by <data value="11.fault.averaged-over-dp.experts-gradients-off-by-measured:.2f">1.00</data> of their norm.
#
# **Takeaway.** Reduce an expert's gradient over the ranks that hold it, and divide by dp. Check once that unused experts
# have no gradient.
#
# ### Exercise 3: which ranks reduce what
#
# *Core. Design, 20 minutes.* Write `reduces(rank, dp, pp, ep)`, where pp is the number of pipeline stages. Ranks are in the order of a layout: rank =
# dp_index · pp + pp_index. ep groups are neighbours along dp. Return
# `{"router": (ranks, divisor), "expert": (ranks, divisor)}`: which ranks sum this rank's gradients, and what the sum is
# divided by. Each rank's loss is the mean over its
# own tokens, equally many on all.
#
# <details><summary>Hint</summary>
#
# Go through the picture with pp = 1 first. How far apart along dp are the ranks of an edp group?
# </details>


# %% tags=["stub-3"]
def reduces(rank, dp, pp, ep): ...


# %% tags=["check-3"]
lesson.check(exercises.who_reduces, reduces)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def reduces(rank, dp, pp, ep):
#     dp_index, pp_index = divmod(rank, pp)
#     router = [i * pp + pp_index for i in range(dp)]
#     expert = [i * pp + pp_index for i in range(dp_index % ep, dp, ep)]
#     return {"router": (router, dp), "expert": (expert, dp)}
# ```
# </details>

# %% [markdown]
# ## Two microbatches at once
#
# Balance shortens the waiting, but messages remain. Experts wait for the dispatch, and the next layer waits for the
# combine. With one microbatch, nothing but a shared expert can compute meanwhile. So take two: while one goes forward,
# the other goes backward, and each computes while the other's rows travel. That is DeepSeek-V3's schedule, *DualPipe*.
#
# ```text
# compute     attention 1   | experts 0 ←   | experts 1     | attention 0 ←  | ...
# link        combine 0 ←   | dispatch 1    | dispatch 0 ←  | combine 1      | ...
#
# ←  the backward of microbatch 0; without an arrow, the forward of microbatch 1
# ```
#
# We predict it for layers of DeepSeek-V3's shape: tokens of 7,168 values, and for each token one shared expert and 8 of
# 256 experts, 2,048 wide.
#
# <details><summary>Machine, batch and pipeline of this prediction</summary>
#
# H100s at 400 TFLOP/s, ep = 64, and 4,096 tokens a microbatch, with 2 bytes a value. InfiniBand NDR has 50 GB/s and a latency
# of 10 µs, which an all-to-all pays for each of 63 messages.
#
# The third cell below simulates a pipeline with `exposed_time`: each of 4 ranks holds 2 chunks of three layers, and `s` is the
# seconds of one all-to-all.
# </details>
#
# In the figure after the next two cells, digits are microbatches. Each passes three layers. The forward of microbatch 0 ran earlier.


# %%
question = "A forward and a backward together: their share of the time one by one?"
lesson.predict("11.saved", question, unit="%", rule_of_thumb=100)


def run_together(*chains):  # each a list of (op, microbatch, seconds), run in order
    free, ready, events = {"compute": 0.0, "link": 0.0}, [0.0] * len(chains), []
    waiting = [list(chain) for chain in chains]
    while any(waiting):
        starts = {}
        for i, chain in enumerate(waiting):
            if chain:
                lane = "link" if chain[0][0] == "all_to_all" else "compute"
                starts[i] = max(ready[i], free[lane]), lane
        i = min(starts, key=starts.get)  # whatever can start first
        (start, lane), (op, microbatch, took) = starts[i], waiting[i].pop(0)
        ready[i] = free[lane] = start + took
        axis = "ep" if lane == "link" else ""
        rank = stage = 0
        events.append(Event(rank, stage, op, microbatch, start, ready[i], axis))
    return Timeline(tuple(events), "simulated")


# %%
layer = moe.deepseek_v3_layer(4096, 64, 400e12, theory.LINKS["InfiniBand NDR"])
attention, experts, sending = layer.values()  # seconds, forward
sends = [("all_to_all", microbatch, sending) for microbatch in (0, 1)]
forward = [("F", 1, attention), sends[1], ("F", 1, experts), sends[1]] * 3
backward = [sends[0], ("B", 0, 2 * experts), sends[0], ("B", 0, 2 * attention)] * 3
apart, both = run_together(forward + backward), run_together(backward, forward)
lesson.show({"one after the other": apart, "together": both}, exposed=True, bubble=None,
            title="Two microbatches overlap each other's messages")  # fmt: skip
lesson.reveal("11.saved", 100 * both.makespan / apart.makespan, source="simulated")
lesson.record("11.shared", 3 * 3 * experts / 9, "s")  # 1 of 9 experts, F and B

# %%
# 4 ranks, and each has 2 chunks of layers: 8 stages
schedule = schedules.make("dualpipe-v", stages=8, microbatches=16, chunks=2)
chunk = 3 * (attention + experts)  # seconds that three layers compute in a forward
costs = Costs(chunk, chunk, chunk)  # gradients of inputs, of weights: as many FLOPs
# of each action: what it computes between its messages, and the bytes of these
segments = overlapped_pairs.even_segments(schedule, costs, layers=3, nbytes=1)
pairs = overlapped_pairs.overlapped_pairs(schedule)  # rank: places where a pair begins
no_pairs = (frozenset(),) * 4
ways = {"one after the other": (no_pairs, sending), "in pairs": (pairs, sending),
        "no messages": (no_pairs, 0)}  # fmt: skip
# the last argument turns a message's bytes into seconds: s here, whatever the bytes
steps = {name: overlapped_pairs.exposed_time(schedule, of, segments, lambda _, s=s: s)
         for name, (of, s) in ways.items()}  # fmt: skip
simulated = {name: step.makespan for name, step in steps.items()}
title = "dualpipe-v on 4 ranks, 16 microbatches, 24 layers"
lesson.show(simulated=simulated, unit="s", key="11.step", title=title)
lesson.record("11.pairs", 100 * sum(map(len, pairs)) / (8 * 16), "%")
waits = {"apart": step_timing.exposed_seconds(apart)}
lesson.record("11.exposed", waits | {"paired": step_timing.exposed_seconds(both)}, "s")
dualpipe = {"pp_size": 2, "ep_size": 2, "pp_style": "dualpipe-v", "num_microbatches": 4}
paired, alone = (torch.tensor(pool.run(moe.pipeline_losses, options, batches[:3])[0],
                              dtype=torch.float64)
                 for options in (dualpipe, {"num_microbatches": 1}))  # fmt: skip
off = step_timing.relative_distance([paired], [alone])
lesson.claim("In pairs, the plugin trains as without a pipeline", (off, "<", 1e-5))

# %% [markdown]
# Run together, a forward and a backward need <data value="11.saved">58.5 %</data> of the time that they need one after the other. *Exposed*
# messages, during which nothing computes, shrink from <data value="11.exposed.apart">119 ms</data> to <data value="11.exposed.paired">18.3 ms</data>. In this
# layer, computing and messages take about equally long.
#
# Notebook 06 has a relative of DualPipe, `dualpipe-v`. In its order, <data value="11.pairs">70.3 %</data> of the forwards are followed at once by a backward of another microbatch.
# We run such two together, as a pair. Other forwards run alone, and all their messages are exposed. In pairs, some still are. A
# simulated step then takes <data value="11.step.in-pairs.simulated">5.96 s</data> instead of <data value="11.step.one-after-the-other.simulated">8.21 s</data>. Without messages it would take <data value="11.step.no-messages.simulated">4.06 s</data>.
#
# <details><summary>DualPipe and dualpipe-v</summary>
#
# DualPipe keeps two copies of the layers, so that microbatches enter at both ends of the pipeline. `dualpipe-v` needs one copy,
# on half as many ranks, and each rank has two *chunks* of layers: a microbatch goes down the ranks through the first chunks,
# and back up through the second ones. So 4 ranks have 8 stages.
#
# DeepSeek-V3 itself lets a token reach at most 4 nodes: it crosses the network once for each, and goes on over NVLink,
# so at most half as much is sent as in our simulation, where it crosses once for each of its 8 experts. Our simulated
# shared expert waits for the dispatch, too. A real one need not, and could cover <data value="11.shared">8.12 ms</data> of the exposed <data value="11.exposed.paired">18.3 ms</data>.
# </details>
#
# ### What a layer costs
#
# An expert has three matrices of h x m, and m is its *width*. A rank computes 3 x 6 k n h m FLOPs forward and backward, and sends up to 4 k n h w bytes.
# Their ratio, 4.5 m/w, has neither k nor E in it. *Narrow experts are expensive to reach.*
#
# The *explorer* keeps the weights of all experts together constant. Twice as many experts are half as wide, so a token
# costs half the FLOPs and the same bytes. Imbalance is the busiest rank's rows over the mean; it lengthens computing
# and messages alike. The *ideal* is computing with equal loads, without messages.
#
# **Challenge:** Keep InfiniBand NDR, at least 16 experts, an imbalance of at least 1.2, and at most 1 GB of experts on a
# rank. Make the layer take at most 1.6 times its ideal.

# %%
lesson.explorers.expert_layer()

# %% [markdown]
# <details><summary>Answer</summary>
#
# 16 experts, ep 4, an imbalance of 1.2: 1.6 times the ideal. With 32 experts it takes 2.0 times, because they are half
# as wide, and with ep 8 it takes 1.7 times. Top-k hardly matters, because FLOPs and bytes both grow with k. The layer
# takes more milliseconds than the one that the explorer opens with, because its wider experts do 4 times the FLOPs, but
# a larger share of its time is computing.
# </details>
#
# **Takeaway.** Messages of one microbatch can overlap with another one's computing. Wide experts need fewer bytes per FLOP.
#
# ## What to remember
#
# - A token visits k of E experts. FLOPs and bytes follow k, memory follows E.
# - Dispatch sorts rows by expert. An uneven all-to-all moves them, another brings results back.
# - All ranks wait for the busiest one. Balance by a term in the loss, or by a selection bias.
# - Gradients of experts are summed over edp and divided by dp.
# - In a step of a few tokens, experts without a token must have a gradient of zero.
#
# **When not to use this.** A dense model (one MLP for all tokens) is simpler, if you can afford a good one. If all experts fit on
# each rank, replicate them, and nothing travels but gradients.
#
# <details><summary>Where to look, and papers</summary>
#
# **Where to look.** Here: `hpnb/expert_parallel/`, and `hpnb/theory/experts.py` for bytes. Megatron-Core:
# `megatron/core/transformer/moe/`, with `token_dispatcher.py` and `router.py`. PyTorch: `torch._grouped_mm` for groups of any
# size.
#
# **Papers.** Lepikhin et al. 2020, *GShard*, arXiv 2006.16668. Fedus, Zoph & Shazeer 2021, *Switch transformers*, 2101.03961.
# Gale et al. 2022, *MegaBlocks*, 2211.15841. Wang et al. 2024,
# *Auxiliary-loss-free load balancing*, 2408.15664. DeepSeek-AI 2024, *DeepSeek-V3 technical report*, 2412.19437.
# </details>
#
# **Next.** This is the last page. Take a model of your own, predict its best layout with `python -m hpnb plan`, run it, and explain the
# difference.
