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
# # Which layout, and can you call it beforehand?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hpnb/hpnb/blob/main/notebooks/08_gpt2_hybrid_parallel.ipynb)
# [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/hpnb/hpnb/blob/main/notebooks/08_gpt2_hybrid_parallel.ipynb)
#
# **The question.** You have a model, a batch, a few devices, and three axes to lay them along. There are dozens of layouts.
# Trying them all costs more than the best one saves. Can you rank them from what *one* rank does alone, and how much
# do you lose if you trust that ranking?
#
# **You will be able to** predict a step of any layout in five parts, and its bytes and memory; say which to choose and why;
# fine-tune a GPT-2 on dp x pp x tp, lose a rank, and go on without a trace; read where each millisecond went, and name
# what a wrong prediction lacks; find a fault in a run that you have not seen before.
#
# **You should know** notebooks 04 (the mesh, Booster), 05 (memory), 06 (unequal stages); and 07 for 25 heads.
#
# **Time.** 25 minutes to read; under 2 minutes to run on a laptop, and as long on GPUs; 75 minutes for the exercises.
#
# **Two questions to recall.** From 04: why does tp get the fast wire? From 06: which stage decides how long a step takes?
#
# <details><summary>Answers</summary>
# Its all-reduces are in line, four times a block and microbatch: nothing hides them. The heaviest, once for each microbatch.
# </details>

# %% tags=["setup"]
import importlib.util

assert importlib.util.find_spec("hpnb"), (
    "hpnb is missing: run `%pip install hpnb` in a cell, then this cell again"
)
import tempfile
from dataclasses import replace
from pathlib import Path
import torch
import hpnb
from hpnb import Layout, lesson, plot, theory
from hpnb.lesson.figures import gpt2_hybrid as figures
from hpnb.lesson.programs import gpt2_hybrid, host_traffic, paraphrases
from hpnb.lesson.predictions import regret
from hpnb.lesson.exercises import gpt2_hybrid_parallel as exercises
from hpnb.models import GPT2_SIZES
from hpnb import ParallelLayout

N = min(4, hpnb.ranks.default_ranks())
pool = hpnb.Ranks(N)  # these ranks stay to the end
sizes, XL = lesson.choose_sizes("08", pool), GPT2_SIZES["1.5b"]  # the largest that fit
SIZE, DTYPE, ROWS, EACH = sizes.size, sizes.dtype, 8 * sizes.batch, sizes.batch
BUDGET = (
    24e9 * SIZE.parameters() / XL.parameters()
)  # a 24 GB card for XL, and the same share for a smaller model
name = f"GPT-2, {SIZE.layers} blocks of {SIZE.hidden}, {SIZE.vocab_size:,} words, {str(DTYPE)[6:]}, {ROWS} rows of {SIZE.length} a step"
recipe = paraphrases.training_recipe()  # MRPC, and a GPT-2 of two blocks with its own byte-level BPE
here = lesson.banner(N, model=name, data=recipe.train.describe(), sizes=sizes,
                     reading="cells with 8 ranks run tiny, on the CPU: they are about equality, not time")  # fmt: skip

# %% [markdown]
# ## Rank the layouts
#
# Start with what you have. 04's explorer put the three laws together, in `host_traffic.HostedTransformer`: blocks of 12 h², one rate for
# all matmuls, values of 2 bytes. Here it is unchanged, with this page's GPT-2 and your machine card, for every layout
# of your ranks.
#
# What does it not know? A head and a loss (06). An optimizer. That two rows take more than half the time of four, for every
# kernel has a cost that does not go by rows. So this page has a second prediction. `gpt2_hybrid.measure_rates` measures what *one rank
# alone* takes: for a block, and for the two ends (embedding; head and loss), with few rows and with more, which makes a line
# c + k·rows each; and AdamW's time for a parameter. The rest is arithmetic, `theory.layout_parts`. With m microbatches of
# r rows in each pipeline, L blocks, p stages, t ranks of tp, a step of a mean rank has five parts:
#
# | part | seconds |
# |---|---|
# | computing | m (L (c + k r/t) + ends) / p |
# | exposed tp | (4 L + 2) m/p all-reduces of an activation, in line; the 2 are the vocabulary's (07) |
# | bubble | Σ stages + (m-1) · largest stage + hops, less the two above |
# | exposed dp | what buckets leave of the gradient after the last microbatch's backward |
# | optimizer | of the parameters that the rank steps |
#
# Memory is counted likewise, `theory.layout_memory`: states by ZeRO (05); of every block what its backward needs, for as many
# microbatches as a rank has in flight (02); and three times the logits (05), on the last stage. The fullest rank counts.
#
# Nothing is fitted to the layouts: none has run yet.

# %%
card = lesson.machine_card(N)
card.show()
rates = pool.run(gpt2_hybrid.measure_rates, SIZE, EACH, 4 * EACH, DTYPE)[0]
task = gpt2_hybrid.layout_task(SIZE, ROWS, DTYPE, rates, card.link)
plans = theory.task_layouts(task, N, EACH)
plans += [ParallelLayout(N, zero_stage=3), ParallelLayout(1, N, 1, ROWS // EACH, schedule="zb-h1")]
told = {str(plan): theory.layout_parts(task, plan) for plan in plans}
held = {str(plan): theory.layout_memory(task, plan) for plan in plans}
job = host_traffic.HostedTransformer(
    SIZE.layers, SIZE.hidden, task.tokens, ROWS // EACH, rates.matmul, N, card.link, card.link
)
old = {
    str(p): sum(job.seconds(Layout(p.dp, p.pp, p.tp)).values())
    for p in plans
    if not p.zero_stage and p.schedule == "1f1b"
}
rows = [(n, lesson.number(old[n], "s") if n in old else "-", lesson.number(sum(told[n].values()), "s"), lesson.number(held[n], "B"),
         "yes" if held[n] <= BUDGET else "no") for n in told]  # fmt: skip
lesson.table(
    ("layout", "step, by 04", "step, by this page", "fullest rank", f"fits {lesson.number(BUDGET, 'B')}"),
    rows,
    f"predicted, {N} ranks, before any layout has run",
)

# %% [markdown]
# Now commit, twice. First the fastest of all. Then the one that you would train on, if every device had the budget in the last
# column; one that does not fit counts as ten times the slowest that does. Guess from the laws, from the ledger of the
# notebooks before, or from this table. A guess is a name as it stands in the first column, such as `guess="dp 4, ZeRO 3"`, or
# a list of names with the best first.

# %%
names = "; ".join(told)
lesson.predict("08.fastest", f"{names}: which has the shortest step?", guess=None, kind="ranking")
lesson.predict(
    "08.choice",
    f"The same, if a device has {lesson.number(BUDGET, 'B')}: which is the fastest that fits?",
    guess=None,
    kind="ranking",
)

# %% [markdown]
# ## Fine-tune on MRPC
#
# Before they race, a whole training run on all three axes: 2 x 2 x 2, 8 ranks. A classifier reads two sentences and says
# whether they mean the same. GPT-2 has no padding token of its own; rows are padded to the longest, so microbatches of one step
# have different shapes; and the answer is read at each row's last word. None of this changes the five lines of 04.
#
# `paraphrases.train_leg` is those five lines, a Trainer, accuracy and F1 (the harmonic mean of two shares: how many of its yeses are
# right, and how many of the paraphrases it finds). Two pairs in three are paraphrases, so a model that always says yes is right
# that often. Look at accuracy and F1 beside that model's.

# %%
KNOBS = {"pp_size": 2, "tp_size": 2, "num_microbatches": 2}
eight = hpnb.Ranks(8, device="cpu")
whole = paraphrases.with_losses(eight.run(paraphrases.train_leg, recipe, KNOBS))
common = paraphrases.majority_accuracy(recipe.test)
accuracy, f1 = (whole.last[f"eval_{each}"] for each in ("accuracy", "f1"))
rows = [
    ("2 x 2 x 2", f"{accuracy:.3f}", f"{f1:.3f}"),
    ("always yes", f"{common:.3f}", f"{2 * common / (1 + common):.3f}"),
]
noise = (accuracy * (1 - accuracy) / len(recipe.test)) ** 0.5
gain = (accuracy - common) / noise
note = (
    f"With {len(recipe.test)} pairs an accuracy is known to {noise:.3f}: this one is {gain:.1f} times that "
    + ("above always yes." if gain > 2 else "from always yes, so nothing is proved.")
)
lesson.table(
    ("model", "accuracy", "F1"),
    rows,
    f"{len(whole.losses)} steps from scratch on {len(recipe.train)} pairs, loss {whole.losses[0]:.3f} to {whole.losses[-1]:.3f}",
    note,
)

# %% [markdown]
# F1 rewards saying yes: always yes already has a high one. Report both, and what the majority would have.
#
# ### An autopsy
#
# One process was tuned for 24 rows a step and a learning rate of 2e-3. Two replicas give 48 rows, so the rate may be doubled
# (Goyal et al.; a rule of thumb, found for SGD). A colleague's script says `lr * dist.get_world_size()`. With data
# parallelism alone that was the same thing, for years. On this mesh it is not. Does the loss tell?

# %%
wrong = paraphrases.with_losses(eight.run(paraphrases.train_leg, recipe, KNOBS, scale=8.0))
rows = []
for run, leg in {"times dp": whole, "times the world's size": wrong}.items():
    more, faster = leg.rows[0] / recipe.alone, max(leg.lrs) / recipe.lr
    third = len(leg.losses) // 3
    losses = ", ".join(f"{sum(leg.losses[i * third : (i + 1) * third]) / third:.3f}" for i in range(3))
    rows.append(
        (
            run,
            losses,
            f"{leg.last['eval_accuracy']:.3f}",
            f"{leg.last['eval_f1']:.3f}",
            f"{more:g}",
            f"{faster:.3g}",
            f"{faster / more:.3g}",
        )
    )
apart = abs(accuracy - wrong.last["eval_accuracy"]) / (2**0.5 * noise)  # a difference has the noise of two
note = f"The difference of accuracies is {apart:.1f} times its uncertainty" + (
    ": not even they tell." if apart < 2 else "."
)
columns = (
    "learning rate",
    "loss, by thirds",
    "accuracy",
    "F1",
    "rows / one process's",
    "rate / one process's",
    "quotient",
)
lesson.table(columns, rows, "two runs on 2 x 2 x 2", note)
lesson.field_guide.add(
    "the loss is finite and falls; a run that was tuned on few ranks trains otherwise when pp or tp grow",
    "rows of a step and learning rate, each over one process's: their quotient must not depend on the layout",
    "the learning rate goes with the world's size, and rows only with dp",
    notebook="08",
)

# %% [markdown]
# Both losses are finite, and both fall. Seen alone, the second is a run like any other: warm-up and clipping hide what is wrong,
# and a small model that learns little from few pairs surprises nobody. Nobody can say beforehand how high a rate a model bears.
# But the factor grows with every stage and every cut that you add, so what was tuned on few ranks fails on many, and the model
# is blamed. The instrument needs no second run: log rows and rate, and divide. The last column should be 1; here it is p·t.
# `plugin.scaled_lr(lr)` multiplies by dp.
#
# **Takeaway.** pp and tp change who computes, not what a step is. Whatever follows the batch follows dp alone: learning rate,
# warm-up in steps, the number of steps in an epoch.
#
# ## Kill and resume
#
# Long runs lose ranks. The same run again, saving every 10 steps; and rank 5 is killed (SIGKILL: no exception, no farewell) after
# step 14. The seven others stand in a collective with somebody who is no longer there. Then eight others take up what is on
# the disk, up to the end of the first epoch.

# %%
lesson.predict(
    "08.twice",
    "Saved every 10 steps, killed after step 14: how many steps are computed twice?",
    guess=None,
    unit="steps",
    kind="identity",
)

# %%
with tempfile.TemporaryDirectory() as folder:
    try:
        hpnb.launch(paraphrases.train_leg, recipe, KNOBS, folder=folder, dies_at=14, ranks=8, device="cpu")
    except hpnb.RankError as error:
        died = error
    before = paraphrases.read_log(folder)
    newest = max(Path(folder).glob("step-*"))
    kept = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    after = paraphrases.with_losses(eight.run(paraphrases.train_leg, recipe, KNOBS, until=1, folder=folder))
print(died.summary)
resumed = int(newest.name.partition("-")[2])
lesson.reveal("08.twice", len(before) - resumed, predicted=14 % 10)
states = 3 * 8 * recipe.size.parameters(classes=2)
ratios = lesson.comparison([("checkpoint: weights and two moments, float64", states, kept, "B")])
same = whole.losses[:resumed] + after.losses
assert all(before[step] == whole.losses[step - 1] for step in before)
assert same == whole.losses[: len(same)]
plot.show(
    plot.by_layout([(f"until rank {died.rank} was killed", list(before.values())[:resumed]), ("resumed by eight others", after.losses)],
                   whole.losses[: len(same)], title="measured · a run that lost a rank, over the one that did not",
                   caption=f"All {len(same)} losses are equal bit for bit, and so are those of the {len(before) - resumed} steps that were lost.",
                   whose="the run that nobody killed", run="the run, leg by leg"),
    alt=f"The loss of {len(same)} steps; the resumed run lies on the unbroken one, bit for bit.",
)  # fmt: skip

# %% [markdown]
# Equal to the last bit, the lost steps too: order of samples, momenta, learning rate and random states were saved, and sums run
# in the same order on the same layout. (The checkpoint is larger than weights and moments: for so small a model the headers of its
# files count, and each rank's random states.) A save is a folder that appears when it is complete, so a kill during a save
# leaves the one before.
#
# How often should one save? Too seldom loses steps, too often spends time. 09 derives the balance.
#
# **Takeaway.** A run that is not equal after a resume has lost something. Ask for equality, not for "similar".
#
# ### Exercise 1: resume on another layout
#
# *Implement, 20 minutes.* The hosts that you get back are others. Write `save(run, folder)` and `resume(run, folder)`; every
# rank calls them. `run` has `.booster`, `.model`, `.optimizer`, `.scheduler` and `.loader`, whose batches are of 8 rows over
# all ranks. `resume` gets a fresh run on another layout, with other weights. The check trains three steps on one layout
# and four on the next, and wants all seven losses of one process, to 1e-6.
#
# Hint: what did the Trainer save for you besides weights? Read `help(hpnb.Booster.save)` and `.load`.


# %% tags=["stub-1"]
def save(run, folder): ...


def resume(run, folder): ...


# %% tags=["check-1"]
lesson.check(exercises.resume_elsewhere, {"save": save, "resume": resume})

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def save(run, folder):
#     run.booster.save(folder, run.model, run.optimizer, run.scheduler, run.loader)
#
#
# def resume(run, folder):
#     run.booster.load(folder, run.model, run.optimizer, run.scheduler, run.loader)
# ```
#
# The loader's place counts rows of the whole batch. One that counted batches of a rank would be right only on as many replicas.
# </details>

# %% [markdown]
# ## Where each millisecond went
#
# Now they race: every layout trains the same rows of the same GPT-2. Your 1F1B of 02 runs where the pipeline is longest (the
# library's stands in until it is written), beside ZB-H1.
#
# From a recorded step the five parts are read off: computing; what tp and dp send while nothing is computed; the optimizer; the
# rest is bubble. With fewer cores than ranks a clock would show who got a core. There the title says "replayed": the CPU time of
# each action is put through the simulator, and each recorded message travels on your card's wire. Then computing is tested
# against its prediction, and the time of messages is not.

# %%
mine = lesson.reader_schedule("1f1b", N, ROWS // EACH)
ran = {}
for plan in plans:
    longest = mine if plan.pp == N and plan.schedule == "1f1b" else None
    ran[str(plan)] = gpt2_hybrid.run_layout(pool, SIZE, ROWS, DTYPE, plan, card.link, longest)
order = sorted(ran, key=lambda each: ran[each].seconds)
seen = {each: ran[each].seconds for each in order}
first, ours = order[0], min(told, key=lambda each: sum(told[each].values()))
source = ran[first].source
plot.show(
    figures.waterfall({each: ran[each].parts for each in order}, told, title=f"{source} · {name}, {N} ranks",
                   caption=f"The fastest is {first}. Predicted was {ours}, which costs {100 * (seen[ours] / seen[first] - 1):.0f} % more."
                   if ours != first else f"The fastest is {first}, as predicted."),
    alt="Bars of a step by layout, with ticks where each part was predicted to end: " + ", ".join(f"{each} {lesson.number(seen[each], 's')}" for each in order) + ".",
)  # fmt: skip

# %%
rows = []
for each in order:
    one, step = ran[each], seen[each]
    ratio = step / sum(told[each].values())
    sent, fullest = one.bytes / max(theory.layout_bytes(task, one.plan), 1.0), one.peak / held[each]
    rows.append((each, lesson.number(step, "s"), f"{ratio:.2f}", f"{100 * one.parts['bubble'] / step:.0f} %", f"{lesson.number(one.bytes, 'B')} ({sent:.4f})",
                 f"{lesson.number(one.peak, 'B')} ({fullest:.2f})", f"{task.tokens / step:,.0f}", f"{100 * task.flops / step / N / rates.matmul:.0f} %"))  # fmt: skip
    quantities = {
        "step (s)": (sum(told[each].values()), step),
        "sent (B)": (theory.layout_bytes(task, one.plan), one.bytes),
        "peak (B)": (held[each], one.peak),
    }
    lesson.ledger.add(
        "08", Layout(one.plan.dp, one.plan.pp, one.plan.tp), f"{name}, {each}", quantities, card.hardware
    )
columns = (
    "layout",
    "step",
    "over predicted",
    "bubble",
    "sent by a rank",
    "fullest rank",
    "tokens/s",
    "FLOP utilisation",
)
lesson.table(
    columns,
    rows,
    f"{N} ranks, {source}; pp {N} runs {mine.name}",
    "In brackets: over its prediction. Utilisation is of a rank's own large matmul.",
)
lesson.reveal("08.fastest", seen, predicted=sorted(told, key=lambda each: sum(told[each].values())))

# %% [markdown]
# Begin with what each rank sends and holds. Bytes are all but identities: with dp and pp alone the ratio is 1, and with tp it is
# off by a fraction of a percent. (Norms and biases are whole on tp's ranks, and each reduces them; and messages under 1 kB are not
# counted.) Memory is a model within about a fifth: it knows which stage is fullest, and how many microbatches wait there; not
# what passes through in between.
#
# Then time, part by part. The first tick says whether computing was right. Where tp takes longer, every rank does all of the
# norms and residuals, and its matmuls are thinner; most so where microbatches are small too. ZB-H1's bubble is predicted with
# F = I = W and a split that costs nothing; 02 told what both are worth. What is left of dp depends on how many buckets are ready
# early. And if all bars are off by one factor, look at the rank alone: it may have been measured while the machine did something
# else. On GPUs look at the same places, for other reasons: launches, and clocks that fall when all ranks run.
#
# A ranking needs less than this. It is right as long as errors are smaller than gaps. Where two bars are close their order may be
# wrong, and little is lost.
#
# Last, the choice. Speed is up, memory to the right. The line is the frontier: off it a layout is not worth a look, for another
# one is as fast and holds less, or is faster and holds no more.

# %%
fitting = {each: took for each, took in seen.items() if ran[each].peak <= BUDGET}
able = [each for each in told if held[each] <= BUDGET]
proposed = min(able, key=lambda each: sum(told[each].values())) if able else ours
yours = regret.guessed_choice("08.choice")
picked = yours if yours in ran else proposed
best = min(fitting, key=fitting.get) if fitting else order[0]
words = f"Of {len(fitting)} that fit the fastest is {best}. " if fitting else "None fits. "
words += f"{'Your choice' if picked == yours else 'The prediction (you made no choice)'} is {picked}"
words += (
    f", for {100 * (seen[picked] / seen[best] - 1):.0f} % more."
    if picked in fitting
    else ", which does not fit."
)
plot.show(
    figures.choices({each: (ran[each].peak, task.tokens / seen[each]) for each in ran},
                 {each: (held[each], task.tokens / sum(told[each].values())) for each in told},
                 {picked: "yours" if picked == yours else "predicted"}, BUDGET, f"{source} · {N} ranks: memory and speed", words),
    alt=f"Tokens a second against memory for {len(ran)} layouts, with a budget of {lesson.number(BUDGET, 'B')}. {words}",
)  # fmt: skip
costs = {**dict.fromkeys(ran, 10 * max(fitting.values())), **fitting} if fitting else seen
lesson.reveal(
    "08.choice",
    sorted(fitting or seen, key=costs.get),
    costs=costs,
    predicted=sorted(able, key=lambda each: sum(told[each].values())) or None,
)
for times in (0.01, 0.1, 10):
    there = gpt2_hybrid.layout_task(
        SIZE, ROWS, DTYPE, rates, replace(card.link, bandwidth=card.link.bandwidth * times)
    )
    guesses = {str(p): sum(theory.layout_parts(there, p).values()) for p in plans}
    print(
        f"on a wire of {times:g} times the bandwidth it would be {min(guesses, key=guesses.get)} (predicted)"
    )

# %% [markdown]
# **Which to choose, and why.** Replicas, if they fit: they compute in large pieces, and speak once. If they do not, look for what
# is too large. States: ZeRO, then stages. Activations: small microbatches, of which a pipeline holds p at most; then tp, which
# holds parts. tp where the wire is fast and a stage still does not fit; a pipeline where it is slow. Then the smallest m whose
# bubble you can bear, for every microbatch pays for its kernels.
#
# **Takeaway.** One rank, measured alone, ranks the layouts. Trust the order where the gaps are larger than the ratios, and measure
# the two or three that are close.
#
# ### Exercise 2: explain the worst prediction
#
# *Diagnose, 20 minutes.* You get `rows`, a table as above, of a machine with one cost that the prediction lacks. Of each row you
# have `row.plan` (.dp, .pp, .tp, .num_microbatches), and seconds `row.predicted[part]` and `row.measured[part]`; parts are called as in
# the table at the top. Return three words: the layout that is off by the largest factor, `str(row.plan)`; the part of it that is
# off by the most seconds; and why: "wire" (slower than the card says), "stages" (not equal), "norms" (whole on each rank of tp),
# or "kernels" (each microbatch costs more than its rows). The check has four tables.
#
# Hint: a part may be off by a large factor and few microseconds. Two of the four make *computing* longer: on which layouts?


# %% tags=["stub-2"]
def explain(rows): ...


# %% tags=["check-2"]
verdict = lesson.check(exercises.worst_prediction, explain)
if verdict.status == "passed" and "ran" in vars():
    print(
        "on this page:",
        explain(
            [
                exercises.LayoutRow(one.plan, told[each], one.parts)
                for each, one in ran.items()
                if not one.plan.zero_stage
            ]
        ),
    )
verdict

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def explain(rows):
#     def off(row):
#         ratio = sum(row.measured.values()) / sum(row.predicted.values())
#         return max(ratio, 1 / ratio)
#
#     def computing(row):
#         return row.measured["computing"] / row.predicted["computing"]
#
#     worst = max(rows, key=off)
#     part = max(worst.measured, key=lambda p: abs(worst.measured[p] - worst.predicted[p]))
#     if part != "computing":
#         return str(worst.plan), part, "stages" if part == "bubble" else "wire"
#     cut = max(computing(row) for row in rows if row.plan.num_microbatches == 1 and row.plan.tp > 1)
#     dealt = max(computing(row) for row in rows if row.plan.num_microbatches > 1 and row.plan.tp == 1)
#     return str(worst.plan), part, "norms" if cut > dealt else "kernels"
# ```
# </details>

# %% [markdown]
# ### Exercise 3: choose under three budgets
#
# *Design, 20 minutes; it returns to 05.* GPT-2 XL is to be trained in three jobs. Each has three budgets: `job.ranks` devices, of
# `job.memory` bytes, and `job.deadline` seconds for a step of `job.rows` rows. Return the `ParallelLayout(dp, pp, tp, num_microbatches,
# zero_stage)` within all three that takes the fewest rank-seconds, `plan.world_size * job.seconds(plan)`; ranks may stay unused.
# `job.held(plan)` are bytes of the fullest rank, `job.refused(plan)` says why a plan cannot be run (None if it can). The check
# allows a regret of 5 %: so much more than the fewest.
#
# Hint: sizes that divide `job.ranks` are enough. What may m be? More microbatches also make each of them smaller to hold.


# %% tags=["stub-3"]
def choose(job): ...


# %% tags=["check-3"]
lesson.check(exercises.choose_layout, choose)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# from itertools import product
#
#
# def choose(job):
#     sizes = [n for n in range(1, job.ranks + 1) if job.ranks % n == 0]
#     counts = [m for m in range(1, job.rows + 1) if job.rows % m == 0]
#     able = []
#     for dp, pp, tp, m, zero in product(sizes, sizes, sizes, counts, range(4)):
#         plan = ParallelLayout(dp, pp, tp, m if pp > 1 else 1, zero)
#         if plan.world_size <= job.ranks and job.refused(plan) is None and job.held(plan) <= job.memory:
#             if job.seconds(plan) <= job.deadline:
#                 able.append(plan)
#     return min(able, key=lambda plan: plan.world_size * job.seconds(plan))
# ```
# </details>

# %% [markdown]
# **Challenge.** The same by hand: 32 ranks or more of 16 GB (the knob is `cap`), in hosts of 8 with Ethernet between them. It must
# fit, and use 45 % of the devices' FLOPs. You start with replicas alone. What eats the rest?
#
# <details><summary>Answer</summary>
#
# dp 4 x pp 2 x tp 4 in 4 microbatches with ZeRO 1: 46.9 %, in 14.2 GB. (Without ZeRO it holds 16.1 GB.) A replica fills a host,
# so of the axes only dp crosses Ethernet, with an eighth of the model from each rank. The bubble eats 19 %, exposed tp 18 %,
# exposed dp 11 %, and 4 % is what kernels cost whatever their size. With replicas alone, exposed dp eats 84 %, and they hold
# 45 GB.
#
# Less tp and a longer pipeline do, too: dp 4 x pp 4 x tp 2 in 8 or 16 microbatches, dp 2 x pp 8 x tp 2 in 32. On 64 ranks
# or more nothing does: the best that fits uses 36 %.
# </details>

# %%
lesson.explorers.layout_choice()

# %% [markdown]
# ## Your regret
#
# You have been asked since 00. A number that is 30 % off has a regret of 30 %; a ranking's is what its first choice costs over
# the best. A guess that you made after you had seen the answer does not count, nor does a blank. Below it is what this series'
# own formulas got wrong on your machine, and the ledger: every layout that ran. (All three are read from what you guessed and
# ran, so a page that is only read has little to show.)

# %%
score = regret.show_regret()
off = regret.wrong_predictions()
rows = [
    (
        each.key,
        each.question,
        lesson.outcome.answer_text(each.predicted, each.unit),
        lesson.outcome.answer_text(each.truth, each.unit),
    )
    for each in off[:6]
]
lesson.table(
    ("question", "", "predicted", "measured"),
    rows,
    f"{len(off)} of {score.asked} predictions did not hold",
    "" if rows else "Nothing to explain.",
)
steps = [
    (row, pair)
    for row in lesson.ledger.rows()
    if None not in (pair := row.quantities.get("step (s)", (None, None)))
]
ratios = sorted(measured / predicted for _, (predicted, measured) in steps)
print(
    f"{len(steps)} layouts with a predicted step: measured over predicted is {ratios[0]:.2f} to {ratios[-1]:.2f}, {ratios[len(ratios) // 2]:.2f} in the middle"
)
lesson.ledger.show()

# %% [markdown]
# If your rankings cost little while your numbers were far off, that is how it should be: a choice needs an order. If a ranking
# cost much, look which axis you put first, and which of the five parts you had not counted.
#
# ## Debug an unknown run
#
# Each notebook left a fault, most of them behind a healthy loss. Here are those of the notebooks that you ran. The instrument
# is never the loss.
#
# <details><summary>All nine instruments, if you only read</summary>
#
# 00: the line in which each rank waits. 01: the distance between replicas. 02: `Schedule.check()`, before anything runs.
# 03: gradients beside one process's, from the loss down. 04: the traffic atlas, and copies of norms along each axis.
# 05: survivors of a budget, by shape. 06: the distance between the two homes of a tied weight. 07: dropout masks, XOR over
# ranks. 08: rows and rate, each over one process's.
# </details>

# %%
lesson.field_guide.show()

# %% [markdown]
# ### Exercise 4: unknown runs
#
# *Diagnose, 15 minutes.* Three runs with a fault, and one without. Each made ten steps and was resumed after `run.resumed` of
# them. `run.layout` has .dp, .pp, .tp; `run.alone` are (rows, learning rate) that one process was tuned for. Of each step there
# are `run.losses`, `run.rows`, `run.rates`, `run.samples` (a set: the numbers of its rows) and `run.moved` (how far rank 0's
# weights went, a norm, over the rate). Return "right", "learning rate", "momenta" (they were lost) or "samples" (seen again too
# soon). There is more data than ten steps need. The check runs all four on 2 ranks.
#
# Hint: fresh moments make Adam's first step ±rate in every weight, whatever the gradient. That is a long one. Which step was so
# at the start, and which would be again?


# %% tags=["stub-4"]
def diagnose(run): ...


# %% tags=["check-4"]
lesson.check(exercises.diagnose, diagnose)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def diagnose(run):
#     rows, rate = run.alone
#     if abs(run.rates[0] / rate - run.rows[0] / rows) > 1e-9:
#         return "learning rate"
#     if len(frozenset().union(*run.samples)) < sum(run.rows):
#         return "samples"
#     if run.moved[run.resumed] > 1.4 * run.moved[run.resumed - 1]:
#         return "momenta"
#     return "right"
# ```
# </details>

# %% [markdown]
# ## What to remember
#
# - A step has five parts. One rank measured alone, and the wires, give all of them for every layout.
# - Rankings survive errors that numbers do not. Measure what is close.
# - Replicas if they fit; then deal out states; then stages; then tp, inside a host.
# - Fewer ranks may be cheaper: count rank-seconds, not seconds.
# - What follows the batch follows dp alone. Rows over rows, rate over rate: the quotient is 1.
# - A resumed run is equal bit for bit on its layout, and to rounding on any other. Else something was lost.
# - Report accuracy beside the majority's, and F1 beside that of always yes.
#
# **When not to use this.** When a run is short, any layout that fits will do. When rows differ much in length, or the wire is
# shared with others, a step is not one number; then measure, with your own data, for longer. And a prediction for another machine is worth
# what its card is worth: from one host to a thousand GPUs is the business of 09.
#
# **Papers.** Narayanan et al. 2021, *Efficient large-scale language model training on GPU clusters using Megatron-LM* (2104.04473; how the
# axes trade). Zheng et al. 2022, *Alpa* (2201.12023; layouts searched by a cost model). Goyal et al. 2017 (1706.02677; learning rate and
# batch). Dolan & Brockett 2005 (MRPC). Chowdhery et al. 2022, *PaLM* (2204.02311; model FLOP utilisation).
