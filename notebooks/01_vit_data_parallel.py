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
# # When is data parallelism free?
#
# **The question.** Every rank has the whole model and its own part of the batch. After each backward all must agree
# on one gradient. When does that agreement cost no time, and what does it cost otherwise?
#
# **You will be able to** count what a step costs one device, in FLOPs and in bytes; say what "equal to one process"
# means in floating point, and measure it; write a reducer that talks while the backward runs; predict from ρ how many
# tokens make data parallelism free; find replicas that part while the loss looks fine; say what each stage of ZeRO
# saves and sends.
#
# **You should know** notebook 00: ranks, all-reduce and its two halves, the knee of a wire, ρ.
#
# **Time.** 35 minutes to read; under 2 minutes to run on a laptop, and as long on 2 or 4 GPUs; 105 minutes for the
# exercises.
#
# **Two questions to recall** notebook 00: By a ring of d ranks (n, there), how many bytes leave each rank in an
# all-reduce of S bytes? And how large must a message be before its latency costs less than its bytes?
#
# <details><summary>Answers</summary>
# 2(d-1)/d S, less than twice the tensor however many ranks. Larger than the knee, d α B: there latency and bytes cost
# the same.
# </details>

# %% tags=["setup"]
import statistics, torch, torch.distributed as dist
import hpnb
from hpnb import Layout, Mesh, comm, lesson, plot, theory
from hpnb.lesson.figures import vit_data_parallel as figures
from hpnb.lesson.programs import device_timing, step_timing
from hpnb.lesson.exercises import vit_data_parallel as exercises
from hpnb.models import SIZES, ViTSize

N = device_timing.timed_ranks()  # on a CPU no more than cores, so that a clock means something
GPU = hpnb.ranks.choose_device("auto", N).device == "cuda"
SMALL = ViTSize(hidden=256, layers=8, heads=8, mlp=1024, patch=8, image=32)
SIZE, DTYPE, BUCKET = (SIZES["l16"], torch.bfloat16, 25.0) if GPU else (SMALL, torch.float32, 4.0)
WIDE = ViTSize(hidden=4096, layers=6, heads=32, mlp=16384, patch=16, image=224) if GPU else SIZE
IMAGES, FEW, SWEEP = (64, 64, (1, 2, 4, 8, 16, 32, 64)) if GPU else (16, 2, (1, 2, 4, 8, 16))
PARAMETERS = SIZE.parameters(classes=3)
name = f"ViT, {SIZE.layers} blocks of {SIZE.hidden}, {PARAMETERS / 1e6:.0f} M parameters, {str(DTYPE)[6:]}"
leaves = hpnb.data.beans("train", size=48, image_size=32)
here = lesson.banner(N, model=name, data=leaves.describe())

# %% [markdown]
# ## One device's bill
#
# Before dividing a bill, read it. A ViT cuts a picture into patches; with one class token they are s *tokens*,
# vectors of h numbers that pass through equal blocks. Three numbers carry this notebook:
#
# - **6 FLOPs a weight and token.** A weight does one multiplication and one addition for each token in the forward, and
#   twice that in the backward: once for the gradient of its input, once for its own.
# - **16 bytes a parameter.** In float32 with Adam: weight 4, gradient 4, two moments 8. With 16-bit weights, 2 and 2, and 12
#   for a float32 copy that the optimizer steps (the *master*) and the moments.
# - **FLOPs a byte of memory.** A matmul (m, k) by (k, n) does 2mkn FLOPs on at least mk + kn + mn values. Where that
#   ratio is below the device's FLOP/s over its memory's bytes/s, memory sets the time. That bound is the *roofline*.
#
# The cell counts, times the six matmuls of a block, and records who holds memory during one step.

# %%
card = lesson.machine_card(N)
card.show()
pool = hpnb.Ranks(N)  # these ranks stay to the end


def one_device():
    model, loss = device_timing.vit_and_loss(SIZE, IMAGES, DTYPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if DTYPE.itemsize == 2:
        hpnb.precision.Masters(optimizer)

    def step():
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # Adam's moments exist from here on
    with hpnb.record.memory(model, optimizer) as recorder:
        step()
    return recorder.profile(), device_timing.matmul_seconds(SIZE.block(IMAGES), DTYPE), device_timing.memory_rate()


profile, took, rate = pool.run(one_device)[0]
states = sum(profile.peak_of(kind) for kind in ("parameters", "gradients", "optimizer"))
flops = SIZE.training_flops(IMAGES, classes=3)
bill_rows = [("states, 16 bytes a parameter (B)", 16 * PARAMETERS, states),
             ("FLOPs, 6 a weight and token (FLOP)", 6 * PARAMETERS * SIZE.tokens * IMAGES, flops)]  # fmt: skip
ratios = lesson.comparison(bill_rows, title="one step: by rule of thumb, and as held or counted matmul by matmul")
block, rows = SIZE.block(IMAGES, DTYPE.itemsize), []
roof = {m.name: theory.roofline_seconds(m.flops, m.bytes, card.matmul, rate) for m in block.matmuls}
for m in block.matmuls:
    bound = "memory" if m.intensity < card.matmul / rate else "compute"
    cells = (lesson.number(m.intensity), bound, lesson.number(roof[m.name], "s"), lesson.number(took[m.name], "s"))
    rows.append((m.name, f"{m.count} x ({m.m}, {m.k}) ({m.k}, {m.n})", *cells))
ridge = f"This device does {card.matmul / rate:,.0f} FLOPs in the time of one byte of its memory."
if beaten := [name for name in took if took[name] < roof[name]]:
    ridge += f" Ahead of the roofline: {', '.join(beaten)}; the card's one square matmul is not this device's best."
columns = ("matmul", "shape", "FLOP a byte", "bound by", "roofline", "measured")
lesson.table(columns, rows, f"forward of one block, {IMAGES} images", ridge)
share = f"{100 * profile.at_peak.activations / profile.peak:.0f} %"
plot.show(
    plot.memory(profile, title=f"one step of {IMAGES} images: at the peak {share} are activations"),
    alt=f"Memory over a step by category; at the peak, {lesson.number(profile.peak, 'B')}, {share} are activations.",
)

# %% [markdown]
# Rows of a matrix are images x tokens; `count` is images x heads. What the exact count has more than 6 a weight and
# token are attention's two matmuls, which have no weights. They are thin and do the fewest FLOPs a byte; done one by
# one they are also far from their roofline. That is why the model's own attention is fused, and never writes its
# scores. Everything that is no matmul (norms, GELU, residuals) moves bytes and hardly computes: a real step stays
# below the matmul rate.
#
# Read the figure from the left, like a river. (Recording slows the step: trust its bytes, not its clock.) Weights and
# optimizer states are always there. Activations pile up in the forward, because the backward will need them; it
# consumes them from the last block to the first, and leaves gradients. So the peak stands where the one turns into
# the other, unless activations are few: then it moves right, to where all gradients are there. Grey is what lives for
# moments, such as what the optimizer computes with.
#
# **Takeaway.** States go with parameters, activations with tokens. Data parallelism divides the tokens. It does not
# divide the states: ZeRO, at the end, will.
#
# ## What "equal" means
#
# Each rank holds a *replica*, the whole model, and takes 1/d of the batch. It computes its own gradient; an
# all-reduce and a division by d make it the mean. `hpnb.DataParallel(model, axis)` (PyTorch: DistributedDataParallel)
# does both inside `backward()`, so the optimizer sees the mean; and when it is made it sends rank 0's weights to all,
# once. Equal weights, equal gradients and the same optimizer then keep replicas equal. If all parts are equally
# large, the mean of the parts' means is the mean over the batch: data parallelism computes what one process computes.
# On paper. In floating point, (a + b) + c is not a + (b + c), and the ranks add in another order.
#
# "Equal" therefore needs a yardstick. Take one process and run it twice, the second time with the batch in d parts
# whose gradients it adds up: the same mathematics, another order. Replicas may differ from one process by about that
# much. If they differ by a hundred times more, something is wrong, however small it looks. Distances are $\lVert a -
# b \rVert / \lVert b \rVert$ over all tensors, after three steps of SGD with momentum.

# %%
def compare(name):
    axis, policy = Mesh(Layout(dp=hpnb.world_size())).dp, hpnb.precision.policy(name)
    place = hpnb.data.ImageTransform(32, device=hpnb.device())
    loader = hpnb.data.Loader(leaves, 4 * axis.size, transform=place)  # the whole batch, on every rank
    batches = [next(iter(loader))] * 3

    def run(wrap, *parts):
        model = policy.cast(hpnb.models.vit("laptop", classes=3, device=hpnb.device()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if policy.masters:
            hpnb.precision.Masters(optimizer)
        wrapped = wrap(model)
        for batch in batches:
            optimizer.zero_grad()
            losses = []
            for rows in parts:
                loss = wrapped(**{key: value[rows] for key, value in batch.items()}).loss / len(parts)
                loss.backward()
                losses.append(loss.detach().double())
            optimizer.step()
        gradients = [p.grad for p in model.parameters()]
        return {"loss": [sum(losses)], "gradients": gradients, "weights": list(model.parameters())}

    shares = [slice(4 * rank, 4 * rank + 4) for rank in range(axis.size)]
    alone = run(lambda model: model, slice(None))
    in_parts = run(lambda model: model, *shares)
    replicas = run(lambda model: hpnb.DataParallel(model, axis), shares[axis.rank])
    replicas["loss"] = [comm.all_reduce(replicas["loss"][0], axis) / axis.size]
    return {what: [step_timing.relative_distance(run[what], alone[what]) for run in (replicas, in_parts)] for what in alone}


rows = []
for policy in ("fp64", "fp32", "bf16"):
    apart = pool.run(compare, policy)[0]
    rows += [(policy, what, *(f"{d:.1e}" for d in distances)) for what, distances in apart.items()]
columns = ("precision", "of", f"{N} ranks and one process", f"one process, in {N} parts and whole")
lesson.table(columns, rows, "relative distance")

# %% [markdown]
# The two columns belong together: within about a factor of ten, in every precision, the ranks are as far from one
# process as that process is from itself (a 0 among so few digits is luck; on two ranks a + b is b + a, and the
# columns are the same). In bf16 the distances of gradients and weights are thousands of times larger than in float32.
# So prove your code in float64, where nothing hides behind rounding, and believe it in bf16.
#
# ### Exercise 1: the exact mean of a ragged batch
#
# *Implement, 15 minutes.* The last batch of an epoch may leave 4, 1 and 0 samples to three ranks. The mean of their
# means is then not the mean over 5 samples, and an empty mean is NaN. Write `ragged_loss(losses, axis)`: `losses`
# (n,) are this rank's, n may be 0. Return a scalar such that the gradient that `DataParallel` *averages over ranks*
# is that of the mean over all samples. Only one number may be sent.
#
# Hint: all ranks need the same denominator; what `DataParallel` divides by, you must multiply with; and the sum over an
# empty batch is 0 and still depends on the weights.

# %% tags=["stub-1"]
def ragged_loss(losses, axis):
    ...


# %% tags=["check-1"]
lesson.check(exercises.ragged_mean, ragged_loss)

# %% [markdown]
# <details><summary>Solution</summary>
#
# A rank without samples joins the all-reduce with zeros. The library has it as `hpnb.data_parallel.global_mean`.
#
# ```python
# def ragged_loss(losses, axis):
#     count = torch.tensor(float(len(losses)), device=losses.device)
#     dist.all_reduce(count, group=axis.group)
#     return losses.sum() * axis.size / count
# ```
# </details>

# %% [markdown]
# ## Talk while you compute
#
# The backward makes gradients from the last block to the first. The head's gradient is final long before the first
# block's exists; why wait with it? Autograd calls a *hook* whenever a parameter's gradient is complete. Six lines
# send each one on its way while the backward goes on. `async_op=True` returns at once; `wait` waits.
#
# First commit to the bytes. The count is an identity, whatever the wire.

# %%
lesson.predict(
    "01.step-bytes",
    f"A ViT with {SIZES['laptop'].parameters(classes=3):,} float32 parameters on {N} ranks: how many bytes leave "
    "each rank in a step?",
    guess=None,
    unit="B",
    kind="identity",
)

# %%
def send_as_they_come(model, axis):
    pending = []

    def complete(p):
        pending.append(dist.all_reduce(p.grad, group=axis.group, async_op=True))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(complete)
    return pending


def count_messages():
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    model, loss = device_timing.vit_and_loss(SIZES["laptop"], 4, torch.float32)
    pending = send_as_they_come(model, axis)
    with hpnb.record.traffic() as t:
        loss(model).backward()
        for each in pending:
            each.wait()
    return t.bytes["dp"], t.calls["dp"]


sent, calls = pool.run(count_messages)[0]
gradient = 4 * SIZES["laptop"].parameters(classes=3)
lesson.reveal("01.step-bytes", sent, predicted=theory.bytes_sent("all_reduce", gradient, N))
knee = theory.knee(N, card.link)
print(f"{calls} messages of {gradient / calls / 1e3:.0f} kB in the mean; the knee of this wire is {knee / 1e3:,.0f} kB")

# %% [markdown]
# (It sums: the division by d is left out.) The bytes are right and the messages are wrong. Most tensors of a model
# are biases and norms, far left of the wire's knee (00; α, and with it the knee, differs from run to run); on a fast
# wire (see the line above) even the largest weight may be. You pay latency for each and move little. Hence *buckets*:
# gradients are laid end to end until so many bytes are full, and travel together. A larger bucket has less latency,
# but leaves later; and whatever its size, the **last** bucket is full when the backward ends, and has nothing left to
# hide behind.
#
# What a step waits for after its backward is *exposed*; the rest is hidden. Three builds of the same step:

# %%
lesson.predict("01.builds", "Which build has the shortest step: A tensor by tensor after the backward, "
               "B in buckets after it, C in buckets during it?", guess=None, kind="ranking")  # fmt: skip
BUILDS = {"A": ("tensor by tensor, after", 1e-6, False), "B": ("in buckets, after", BUCKET, False),
          "C": ("in buckets, during", BUCKET, True)}  # fmt: skip


def measure(size, images, bucket_mb, during):
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    model, loss = device_timing.vit_and_loss(size, images, DTYPE)
    alone = step_timing.time_backward(model, lambda: loss(model), bucket_mb)  # nothing is sent
    replica = hpnb.DataParallel(model, axis, bucket_mb, overlap_communication=during)
    return alone, step_timing.record_step(replica, lambda: loss(replica))

# %%
builds = {key: pool.run(measure, SIZE, FEW, mb, during)[0] for key, (_, mb, during) in BUILDS.items()}
quickest = min(alone.end for alone, _ in builds.values())  # the same compute in all three
told = {key: quickest + alone.exposed(card.link, N, BUILDS[key][2]) for key, (alone, _) in builds.items()}
seen = {key: tl.makespan for key, (_, tl) in builds.items()}
rows = [("alone", "-", lesson.number(quickest, "s"), "-", "-", lesson.number(quickest, "s"))]
for key, (_, tl) in builds.items():
    cells = [lesson.number(t, "s") for t in (told[key], seen[key], step_timing.exposed_seconds(tl), step_timing.compute_seconds(tl))]
    rows.append((f"{key} {BUILDS[key][0]}", *cells[:2], f"{seen[key] / told[key]:.2f}", *cells[2:]))
columns = ("build", "predicted", "measured", "ratio", "exposed", "computing")
hidden, paid = (seconds(builds["C"][1]) - seconds(builds["B"][1]) for seconds in (step_timing.exposed_seconds, step_timing.compute_seconds))
note = f"From B to C: {lesson.number(abs(hidden), 's')} {'less' if hidden < 0 else 'more'} exposed, "
note += f"{lesson.number(abs(paid), 's')} {'more' if paid > 0 else 'less'} computing."
lesson.table(columns, rows, f"one step of {FEW} images a rank, mean over ranks", note)
names = [f"{key} {BUILDS[key][0]}" for key in builds]
times = ", ".join(lesson.number(t, "s") for t in seen.values())
plot.show(
    plot.timeline(*(tl for _, tl in builds.values()), names=names, exposed=True, bubble=None),
    alt=f"Compute lanes over communication lanes for three builds; their steps take {times}.",
)
lesson.reveal("01.builds", seen, predicted=sorted(told, key=told.get))
alone = builds["C"][0]
wires = {wire: alone.on(theory.LINKS[wire], 8) for wire in ("NVLink 4", "InfiniBand NDR", "Ethernet 100 Gb")}
shares = ", ".join(f"{wire} {100 * alone.share(theory.LINKS[wire], 8):.0f} %" for wire in wires)
plot.show(
    plot.timeline(*wires.values(), names=list(wires), exposed=True, bubble=None, axis_labels={0: "each rank"}),
    alt=f"The recorded backward with simulated all-reduces on three wires. Exposed: {shares}.",
)

# %% [markdown]
# The prediction takes a backward measured alone, asks when each bucket is full, and sends one behind the other with the
# α and B of your card. It lacks what the grey "compute" bars show: packing gradients, launching each send, putting
# results back. (On a GPU the wire hides behind A's hundreds of launches: hardly exposed, and slowest.) And it lacks
# what sharing costs. Before you call hidden communication free, compare "computing" with the row "alone", and read the
# line under the table: an all-reduce that hides still uses something. On a GPU it takes processors and memory bandwidth
# from the backward; on a CPU the adding and copying takes the very cores. What a build hides, it may give back as
# slower computing.
#
# The second figure replays build C's backward on other wires, as one of 8 ranks.
#
# ### Exercise 2: a bucketed reducer
#
# *Implement, 30 minutes.* Write `reducer(parameters, ranks, limit, all_reduce)`. `parameters` come in the order in
# which the backward roughly completes them. Deal them into buckets of at most `limit` bytes (close a bucket before
# the tensor that would take it over), attach hooks that call `all_reduce(flat)` as soon as a bucket is complete, and
# return a function `finish()` that leaves the **mean** in every `p.grad`. `all_reduce(flat)` sums in place, later,
# and returns something to `.wait()` for. The check runs two steps on 3 ranks, with gradients set to None in between,
# and counts messages and bytes, and whether the first one left early.
#
# Hint: a bucket is complete when no `.grad` in it is None, as long as gradients start as None. The last one may never
# be *full*.

# %% tags=["stub-2"]
def reducer(parameters, ranks, limit, all_reduce):
    ...


# %% tags=["check-2"]
lesson.check(exercises.reducer, reducer)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def reducer(parameters, ranks, limit, all_reduce):
#     buckets = [[]]
#     for p in parameters:
#         if buckets[-1] and sum(q.nbytes for q in buckets[-1]) + p.nbytes > limit:
#             buckets.append([])
#         buckets[-1].append(p)
#     home = {p: bucket for bucket in buckets for p in bucket}
#     sent = []
#
#     def complete(p):
#         if all(q.grad is not None for q in home[p]):
#             flat = torch.cat([q.grad.flatten() for q in home[p]])
#             sent.append((home[p], flat, all_reduce(flat)))
#
#     def finish():
#         for bucket, flat, pending in sent:
#             pending.wait()
#             for q, part in zip(bucket, flat.split([q.numel() for q in bucket])):
#                 q.grad.copy_(part.view_as(q) / ranks)
#         sent.clear()
#
#     for p in parameters:
#         p.register_post_accumulate_grad_hook(complete)
#     return finish
# ```
#
# The library's (`hpnb.data_parallel.Reducer`) also keeps the order of buckets equal on all ranks, since collectives
# meet by order, and lets `.grad` be a view of its bucket, so that nothing is copied back.
# </details>

# %% [markdown]
# ## When is it free?
#
# Weigh one weight. A backward over T tokens does 4T FLOPs for it, at R FLOP/s. Its gradient has g bytes, of which an
# all-reduce sends 2(d-1)/d g, at B bytes/s. The first covers the second when
#
# $$ \frac{4T}{R} \ge \frac{2(d-1)}{d}\,\frac{g}{B} \qquad\text{so}\qquad T \ge \rho\,\frac{d-1}{d}\,\frac{g}{2}
# \qquad\text{with}\quad \rho = R/B $$
#
# Read what is **not** in it. Not the size of the model: a larger one has more to send, and computes longer in
# proportion. For the bytes, hardly the number of ranks: from 2 to 1000 the right side doubles. (Latency does grow
# with d: buckets must stay above the wire's knee d α B.) What counts is T, the tokens *on one rank*. This is the
# data-parallel law of the series: with few tokens a rank, no bucket will save you. Turned round, a fixed batch feeds
# as many ranks as it holds T.
#
# Call this T the *token knee*. And below it? Let the all-reduce take C seconds, and let x be tokens over the token
# knee: the backward takes xC, the forward half of that. Reduced after the backward, C of C + 3xC/2 is exposed, the
# share 1/(1 + 3x/2). Reduced during it, C - xC of C + xC/2 is: (1-x)/(1 + x/2), and nothing from x = 1 on. Those are
# the two lines of the figure below.
#
# The law does not contain the model's size, so on GPUs the cells take 6 blocks of 4096 in place of 24 of 1024:
# kernels that are long enough to measure. The CPU that launches them (the *host*) hands them over one by one, and
# those of a few pictures in narrow blocks are done before the next ones arrive. At one or two pictures even these may
# wait for it.

# %%
g = DTYPE.itemsize
lesson.predict(
    "01.knee",
    f"ρ is {card.rho:,.0f} FLOP a byte, d = {N}, g = {g} bytes: how many tokens a rank hide the all-reduce?",
    guess=None,
    unit="tokens",
)
points = {(images, during): pool.run(measure, WIDE, images, BUCKET, during)[0]
          for images in SWEEP for during in (False, True)}  # fmt: skip

# %%
WAYS = {"after the backward": False, "during it": True}


def shares_of(found):
    """{way of reducing: (tokens, shares)} of what was measured, or predicted from a backward alone."""
    tokens = [WIDE.tokens * images for images in SWEEP]
    return {way: (tokens, [found(*points[images, during], during) for images in SWEEP]) for way, during in WAYS.items()}


largest = points[SWEEP[-1], True][0]
weights = WIDE.parameters(classes=3)
pace = 4 * weights * WIDE.tokens * SWEEP[-1] / (largest.end - largest.forward)  # FLOP/s of a real backward
moving = statistics.median(step_timing.exposed_seconds(points[images, False][1]) for images in SWEEP)  # nothing beside them
measured_knee = moving * pace / (4 * weights)
lesson.reveal("01.knee", measured_knee, predicted=theory.dp_tokens_to_hide(card.rho, N, g))
line = sorted([WIDE.tokens * SWEEP[0] * 1.05**k for k in range(200) if 1.05**k <= SWEEP[-1] / SWEEP[0]] + [measured_knee])
law = {way: (line, [theory.exposed_share(t / measured_knee, during) for t in line]) for way, during in WAYS.items()}
rows = []
for images in SWEEP:
    (alone, after), (_, while_) = points[images, False], points[images, True]
    times = [lesson.number(t, "s") for t in (alone.end, after.makespan, while_.makespan)]
    rows.append((f"{images}", f"{WIDE.tokens * images:,}", *times, f"{while_.makespan / alone.end:.2f}"))
columns = ("images", "tokens a rank", "alone", "reduced after", "during", "during / alone")
lesson.table(columns, rows, f"forward and backward, {weights / 1e6:,.0f} M parameters, {N} ranks: free is 1.00")
measured = shares_of(lambda alone, tl, during: step_timing.exposed_seconds(tl) / tl.makespan)
predicted = shares_of(lambda alone, tl, during: alone.share(card.link, N, during))
slower = moving * card.bandwidth / theory.bytes_sent("all_reduce", g * weights, N)
words = f"The backward reaches {pace / card.matmul:.2f} of the card's matmul rate; the all-reduces take {slower:.2f} times what "
words += f"their bytes take on the card's wire. Together: {slower * pace / card.matmul:.2f} times the knee predicted."
plot.show(
    figures.exposure(measured, predicted, law, measured_knee, f"measured · exposed share of a step, {card.hardware}, {N} ranks", words),
    alt=f"Exposed share of a step against tokens a rank, two ways; the knee is at {measured_knee:,.0f} tokens.",
)
alone, tl = builds["C"]
sent = sum(event.bytes for event in tl.by_rank[0] if not event.is_compute)
quantities = {"sent (B)": (theory.bytes_sent("all_reduce", g * PARAMETERS, N), sent),
              "states (B)": (16 * PARAMETERS, states),
              "forward and backward (s)": (alone.on(card.link, N).makespan, tl.makespan)}  # fmt: skip
lesson.ledger.add("01", Layout(dp=N), f"{name}, {FEW} images a rank", quantities, card.hardware)
lesson.ledger.show()

# %% [markdown]
# The measured knee is the time that all buckets take when nothing runs beside them, times the pace of the largest
# backward. The predicted one takes ρ from the card: one large square matmul, and bytes without latency. The caption
# takes their ratio apart. Below 1, the backward is slower than the card's matmul (norms, softmax and residuals move
# bytes): it takes longer, hides more, and the knee moves to *fewer* tokens; above 1, that one matmul was not this
# device's best. Real all-reduces pay latency for each bucket and wait for the slowest rank.
#
# The hollow dots know more than the lines: they take the real backward at each size, which is far from 4T/R for the
# first few pictures. The filled ones lie lower there, also where nothing is shared, because launching and packing
# count as computing, and much is sent meanwhile. So a small share is not yet a fast step. The table is: where the
# last column is near 1.00, data parallelism is free.
#
# **Takeaway.** Gradients can hide from about ρ(d-1)/d tokens a rank on (g = 2), and with more, hiding costs less: a
# batch of 50,000 tokens feeds 50 ranks at a token knee of 1,000. The first remedy for exposed communication is a
# larger batch a rank, then larger or smaller buckets, and only then a faster wire.
#
# **Challenge.** A ViT-L/16 on 64 ranks of Ethernet 100 Gb, 400 TFLOP/s, at most 50,000 tokens a rank: get under 6.5 %
# exposed. Why are 25 MB, everybody's default, not the best here? (The knob is the most that a bucket may hold. Compare
# it with this wire's knee d α B, 24 MB: half of such a message's time is latency.)
#
# <details><summary>Answer</summary>
#
# 50,000 tokens and at most 40, 50, 63 or 79 MiB a bucket: 4.5, 4.9, 5.5 and 6.46 % exposed. (44,000 tokens are enough
# with 63 MiB.) 25 MiB make 24 buckets near the knee, so half of their time is latency: together they take 186 ms on the wire, and
# the backward only 152 ms. They cannot hide, and 15 % is exposed. 15 buckets of 38.6 MiB take 152 ms. With much larger ones
# the wire has time to spare, but the last one leaves when nothing is left to hide behind: 28 ms with 160 MiB, 11 %.
# </details>

# %%
lesson.explorers.overlapped_backward()

# %% [markdown]
# ### Exercise 3: buckets and tokens that hide a wire
#
# *Design, 20 minutes; it returns to 00.* Write `plan(wire, ranks, rate, parameters)`: gradients have 2 bytes, the
# backward runs at `rate` FLOP/s, the forward takes half as long. Return (bytes of a bucket, tokens a rank), with
# 2·parameters bytes in m equal buckets, m whole, such that at most 10 % of the step is exposed, with at most 5 % more
# tokens than the fewest possible.
#
# Hint: m equal buckets of c seconds each, made evenly over a backward of T seconds, expose the larger of c (the last
# bucket) and mc - (m-1)T/m (the wire never rests). 10 % of the step is a sixth of T. `theory.seconds("all_reduce",
# bytes, ranks, wire)` is c. Try every m.

# %% tags=["stub-3"]
def plan(wire, ranks, rate, parameters):
    ...


# %% tags=["check-3"]
lesson.check(exercises.overlap_plan, plan)

# %% [markdown]
# <details><summary>Solution</summary>
#
# Exposed e is a tenth of 3T/2 + e when e = T/6. Solve both cases for T, take the larger, and try every number of
# buckets. A bucket far below the knee d α B wastes the wire on latency; the largest one would be all exposed.
#
# ```python
# def plan(wire, ranks, rate, parameters):
#     def backward(m):
#         c = theory.seconds("all_reduce", 2 * parameters / m, ranks, wire)
#         return max(6 * c, m * c / (1 / 6 + 1 - 1 / m))
#
#     m = min(range(1, 1000), key=backward)
#     return 2 * parameters / m, backward(m) * rate / (4 * parameters)
# ```
# </details>

# %% [markdown]
# ## Fewer messages, smaller numbers
#
# Two ways to move the balance. *Accumulation*: split the rank's batch into microbatches, add up their gradients, and
# reduce once. It saves memory; and `no_sync` keeps the first ones quiet, or each of them would reduce. By the law, only the
# tokens of the **last** microbatch hide anything. *16 bits*: half the bytes. But matmuls
# become faster still, so ρ g, and with it the knee, usually goes up.

# %%
def four_microbatches(dtype, quiet):
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    model, loss = device_timing.vit_and_loss(SIZES["laptop"], 2, dtype)
    replica = hpnb.DataParallel(model, axis)
    with hpnb.record.traffic() as t:
        if quiet:
            with replica.no_sync():
                for _ in range(3):
                    loss(replica).backward()
        for _ in range(1 if quiet else 4):
            loss(replica).backward()
    return t.bytes["dp"]


rows, values = [], SIZES["laptop"].parameters(classes=3)
for dtype, quiet in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True)):
    expected = (1 if quiet else 4) * theory.bytes_sent("all_reduce", dtype.itemsize * values, N)
    label = f"{dtype}, {'once' if quiet else 'every microbatch'}".replace("torch.", "")
    rows.append((label, expected, pool.run(four_microbatches, dtype, quiet)[0], "B"))
ratios = lesson.comparison(rows, "identity", "four microbatches")

# %% [markdown]
# 16 bits have two dangers. In bf16 a small update vanishes: w + u = w once |u| is below |w|/512. Hence float32
# masters. In fp16 small *gradients* vanish, so the loss is multiplied by a *scale*, which doubles every so many steps
# until some gradient exceeds 65504. That is an *overflow*: the step is skipped, and the scale halves.
#
# ### An autopsy
#
# A colleague's loop sends gradients in fp16. So that an inf does not spoil everybody's sum, each rank looks at its own
# gradient first. Where it overflows, the rank sends zeros, skips its step, and halves its scale. This is `agreed=False`
# below; it differs from the right loop in one line. Both train a small ViT on 48 leaves.

# %%
def train(agreed):
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    model = hpnb.models.vit(ViTSize(64, 4, 4, 256, 8, 32), classes=3, device=hpnb.device())
    weights, optimizer = list(model.parameters()), torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = hpnb.precision.LossScaler(2.0**16, growth_interval=12, hysteresis=1)
    loader = hpnb.data.Loader(leaves, 8, axis, transform=hpnb.data.ImageTransform(32, device=hpnb.device()))
    log = []
    for epoch in range(max(12, 3 * axis.size)):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = model(**batch).loss
            scaler.scaled(loss).backward()
            flat = torch.cat([p.grad.flatten() for p in weights]).half()
            overflow = 1.0 - flat.isfinite().all().float()
            if agreed:
                overflow = comm.all_reduce(overflow, axis)  # the one line
            if overflow:
                flat.zero_()
            else:
                flat /= axis.size
            dist.all_reduce(flat, group=axis.group)
            if not overflow:
                for p, part in zip(weights, flat.float().split([p.numel() for p in weights]), strict=True):
                    p.grad = part.view_as(p) / scaler.scale
                optimizer.step()
            scaler.update(bool(overflow))
            optimizer.zero_grad()
            mean = comm.all_reduce(loss.detach(), axis).item() / axis.size
            first = [p.detach().clone() for p in weights]
            hpnb.data_parallel.broadcast(first, axis)  # rank 0's weights
            log.append((mean, step_timing.relative_distance(weights, first), bool(overflow)))
    return log

# %%
runs = {"agreed": pool.run(train, True), "each for itself": pool.run(train, False)}
losses = {run: [loss for loss, _, _ in logs[0]] for run, logs in runs.items()}
apart = {run: [max(d for _, d, _ in step) for step in zip(*logs, strict=True)] for run, logs in runs.items()}
skips = [sum(overflow for *_, overflow in step) for step in zip(*runs["each for itself"], strict=True)]
marks = [number for number, ranks in enumerate(skips, 1) if 0 < ranks < N]
ends = " and ".join(f"{series[-1]:.0e} ({run})" for run, series in apart.items())
title = f"measured · {N} ranks, fp16 gradients"
plot.show(
    plot.drift(losses, apart, marks, "some ranks, not all, overflow", title),
    alt=f"Two losses over steps, and beneath them the distance between replicas, which ends at {ends}.",
)
for run, series in losses.items():
    ends = f"mean loss {sum(series[:6]) / 6:.2f} in the first six steps, {sum(series[-6:]) / 6:.2f} in the last six"
    skipped = sum(any(overflow for *_, overflow in step) for step in zip(*runs[run], strict=True))
    print(f"{run}: {ends}; an overflow in {skipped} of {len(series)}; replicas apart by {apart[run][-1]:.1e}")
lesson.field_guide.add(
    "the loss falls, and evaluation or checkpoints differ by rank",
    "distance between replicas: || w_r - w_0 || / || w_0 ||, every hundred steps",
    "an overflow that each rank judged for itself: who skipped fell behind, and has another scale",
    notebook="01",
)
lesson.field_guide.show()

# %% [markdown]
# The wrong run's loss falls. Without the right one beside it nobody would look twice: each replica descends on its
# own. But there is no longer *a* model. The rank that skipped lacks an update; and with its scale halved it weighs in
# the sum by half, and divides the sum by a scale half as large: its own gradients come out too large, the others' too
# small. Nothing brings replicas together again, for they exchange gradients and not weights: at best another rank's
# skip cancels part of the distance, by luck, never to 0.
#
# The instrument is one number, the distance between replicas: exactly 0 in a healthy run, bit for bit. The cure is to
# decide on what all ranks share. Look at the gradient *after* the all-reduce, when an inf is everybody's; or agree,
# as `hpnb.precision.step(optimizer, [axis], scaler=scaler)` does. With `axes=()` it agrees with nobody.
#
# **Takeaway.** Every decision that changes weights (skip, clip, stop) must be taken from numbers that are equal on
# all ranks.
#
# ### Exercise 4: a sampler behind a healthy curve
#
# *Diagnose, 15 minutes.* Another silent failure: the loader. You get `seen[step][rank]`, the numbers of the samples
# that each rank saw in one epoch *of its loader*. Return a pair. First `"sharded"` if no sample was seen twice,
# `"same order"` if every rank saw what the others saw, `"own order"` if each shuffled all samples for itself. Second
# the effective batch: the different samples in a step, mean over the steps. The check trains with all three; watch
# the losses.
#
# Hint: in a set nothing is twice.

# %% tags=["stub-4"]
def diagnose(seen):
    ...


# %% tags=["check-4"]
lesson.check(exercises.sampler, diagnose)

# %% [markdown]
# <details><summary>Solution</summary>
#
# All three losses fall, and the sharded one least: in as many epochs it took 16 steps, the others 48. With the same
# order on all ranks the mean gradient is one rank's gradient: you pay three ranks and get the batch of one. With
# orders of their own the batch is nearly right, but an epoch is three.
#
# ```python
# def diagnose(seen):
#     effective = sum(len(set().union(*step)) for step in seen) / len(seen)
#     everything = [number for step in seen for part in step for number in part]
#     if len(set(everything)) == len(everything):
#         return "sharded", effective
#     alike = all(part == step[0] for step in seen for part in step)
#     return ("same order" if alike else "own order"), effective
# ```
# </details>

# %% [markdown]
# ## ZeRO in one picture
#
# Replicas keep 16 bytes a parameter on *every* rank, and all but the activations are copies. ZeRO deals the copies
# out. Between the two halves of an all-reduce, each rank holds a finished share of the gradient. Let it step just
# that share:
#
# $$ \text{reduce-scatter gradients} \;\to\; \text{step } 1/d \text{ of the weights} \;\to\; \text{all-gather weights} $$
#
# Stage 1 deals out the optimizer's states; stage 2 also the gradients, which nobody needs whole any more; stage 3
# also the weights, gathered block by block, in the forward and again in the backward (what is in no block, once). The
# cell runs all four and counts. (On CPU ranks, with a ViT of which everything divides: bytes are the same anywhere.
# Adam's counters, 4 bytes a tensor, are left out.)

# %%
def kept(stage):
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    model = hpnb.models.vit("laptop", classes=32, dtype=torch.bfloat16)
    if stage in (1, 2):
        wrapped = model
        optimizer = hpnb.ZeroOptimizer(model.parameters(), torch.optim.AdamW, axis, stage=stage)
    else:
        wrapped = hpnb.fully_shard(model, axis) if stage == 3 else hpnb.DataParallel(model, axis)
        optimizer = torch.optim.AdamW(model.parameters())
        hpnb.precision.Masters(optimizer)
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.arange(2)}

    def step():
        wrapped(**batch).loss.backward()
        optimizer.step()

    step()
    with hpnb.record.traffic() as t:
        step()
    with hpnb.record.memory(model, optimizer) as recorder:
        step()
    held = recorder.profile().samples[-1]
    counters = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.numel() == 1)
    kinds = {"parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer - counters}
    return kinds, t.bytes["dp"]

# %%
D, laptop = (4 if here.cores >= 4 else 2), SIZES["laptop"]
values = laptop.parameters(classes=32)
stages = {f"stage {stage}": theory.model_states(values, D, stage) for stage in range(4)}
with hpnb.Ranks(D, device="cpu") as few:
    found = {f"stage {stage}": few.run(kept, stage)[0] for stage in range(4)}
told = {stage: vars(states) for stage, states in stages.items()}
seen = {stage: parts for stage, (parts, _) in found.items()}
plot.show(
    figures.states(told, seen, f"what each of {D} ranks keeps of {values:,} parameters, bf16 with masters"),
    alt=f"Bytes on a rank: {', '.join(f'{stage} {sum(parts.values()):,}' for stage, parts in seen.items())}.",
)
root = values - laptop.layers * laptop.block().parameters  # gathered once: it stays until the backward is over
moved = {"stage 0": 2 * values, "stage 1": 2 * values, "stage 2": 2 * values, "stage 3": 3 * values - root}
rows = [(f"{stage}, kept", stages[stage].total, sum(seen[stage].values()), "B") for stage in stages]
rows += [(f"{stage}, sent", 2 * moved[stage] * (D - 1) / D, found[stage][1], "B") for stage in stages]
ratios = lesson.comparison(rows, "identity", f"{D} ranks")

# %% [markdown]
# Stages 1 and 2 send what plain data parallelism sends: it was always made of two halves. Stage 3 sends half as much
# again. The all-gather of stage 1 comes after the step, where no backward is left to hide it. And activations are in
# none of the bars: they go with the tokens.
#
# ### Exercise 5: ZeRO-1 by hand
#
# *Implement, 25 minutes.* `weights` (n,) are equal on all ranks, and n is a multiple of d. In `step(gradient)` you
# get this rank's own gradient (n,). Change `weights` in place to what Adam would have made of them with the mean
# gradient on one process, with one reduce-scatter and one all-gather. `self.optimizer` must be a `torch.optim.Adam`
# that keeps 1/d of the moments.
#
# Hint: `dist.reduce_scatter_tensor(share, whole, group=axis.group)` sums. The mean is yours to take, and Adam will
# hide it if you forget.

# %% tags=["stub-5"]
class Zero1:
    def __init__(self, weights, axis, lr):
        raise NotImplementedError

    def step(self, gradient):
        raise NotImplementedError


# %% tags=["check-5"]
lesson.check(exercises.zero1, Zero1)

# %% [markdown]
# <details><summary>Solution</summary>
#
# Adam divides a gradient by its own size, so a sum in place of a mean moves the weights by almost the same. Only the
# epsilon tells them apart, and a check in float64.
#
# ```python
# class Zero1:
#     def __init__(self, weights, axis, lr):
#         self.weights, self.axis = weights, axis
#         share = len(weights) // axis.size
#         self.mine = weights[axis.rank * share : (axis.rank + 1) * share].clone().requires_grad_()
#         self.optimizer = torch.optim.Adam([self.mine], lr=lr)
#
#     def step(self, gradient):
#         self.mine.grad = torch.empty_like(self.mine)
#         dist.reduce_scatter_tensor(self.mine.grad, gradient / self.axis.size, group=self.axis.group)
#         self.optimizer.step()
#         dist.all_gather_into_tensor(self.weights, self.mine.detach(), group=self.axis.group)
# ```
# </details>

# %% [markdown]
# ## What to remember
#
# - 6 FLOPs a weight and token, 16 bytes a parameter. Data parallelism divides the first bill and not the second.
# - Equal means: as close to one process as that process is to itself in another order.
# - Send while you compute, in buckets above the knee. The last bucket is always exposed.
# - It can be free from about ρ(d-1)/d g/2 tokens a rank on, whatever the model's size, with buckets above d α B.
# - Hidden is not free: compare step times, not lanes.
# - Replicas exchange gradients, and weights only at the start: what parts them stays. Measure their distance.
# - ZeRO 1 and 2 cost no extra bytes. Stage 3 costs half as many again, and divides all states.
#
# **When not to use this.** When one picture's activations, or one block, do not fit a device: no stage of ZeRO
# divides those (03 does). When d ranks leave each fewer tokens than the knee, and a larger batch would hurt training
# (05). When the wire between hosts is slow: then let another axis cross it, or none (04).
#
# **Papers.** Li et al. 2020, *PyTorch Distributed: experiences on accelerating data parallel training* (buckets,
# overlap). Micikevicius et al. 2018, *Mixed precision training* (masters, loss scaling). Rajbhandari et al. 2020,
# *ZeRO: memory optimizations toward training trillion parameter models*. Dosovitskiy et al. 2021, *An image is worth
# 16x16 words* (ViT). Williams, Waterman & Patterson 2009, *Roofline*.
