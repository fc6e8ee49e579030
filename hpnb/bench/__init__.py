"""hpnb against PyTorch-native programs that train the same model, in one run.

    python -m hpnb.bench data-parallel | pipeline | tensor | launch | checkpoint      one mechanism
    python -m hpnb.bench gpt2-xl --layouts dp4,zero3,pp4      whole training programs, layout by layout
    python -m hpnb.bench vit-l16
    python -m hpnb.bench gpt2-xl --size tiny                  the same code on a CPU
    python -m hpnb.bench table | chart                        tables and a picture of the results in results/

harness.py              one layout: programs take turns; which fit in memory together, rounds, failures
tasks.py, layouts.py    the model and its batches, the same for all programs; dp4, zero1, dp2xpp2, ...
program.py              a program: a step, and the loss of that step
hpnb_programs.py        hpnb through HybridParallelPlugin and Booster
torch_programs.py       which programs of PyTorch contend in which layout
torch_precision.py      their precision and compilation
torch_data_parallel.py, torch_pipeline.py, torch_tensor_parallel.py      and what they are made of
worker.py               on a rank: programs side by side; a step is timed to the last rank's end
results.py              what was measured, as data; result_files.py: files of it, in results/
tables.py, chart.py     tables and a picture of it
loss_agreement.py       do all layouts train as one GPU does?
layouts_command.py      the commands gpt2-xl and vit-l16
"""
