"""Whole training programs, hpnb's beside PyTorch's own, for each layout of the ranks.

    python -m hpnb.bench gpt2-xl --layouts dp4,zero3,pp4     a part of the layouts, rows as they come
    python -m hpnb.bench vit-l16
    python -m hpnb.bench gpt2-xl --size tiny                 the same code on a CPU

task.py           the model and its batches, the same for all programs
layouts.py        dp4, zero1, pp4, dp2xpp2, ...
program.py        what is measured: a step, and the loss it saw
ours.py           hpnb through HybridParallelPlugin and Booster
peers.py          which programs of PyTorch contend in which layout
forms.py          their precision and compilation
data_peers.py, pipeline_peers.py, tensor_peers.py     and what they are made of
measure.py        on a rank: programs that live side by side
contest.py        one layout: who fits in memory with whom, rounds, failures
found.py          what was measured, as data
rows.py           tables of it; files.py: files of it, in ../results; chart.py: the README's picture of them
losses.py         do all layouts train as one GPU does? other_order.py: one GPU that sums otherwise
run.py            what a command does; options.py: what can be asked for
"""
