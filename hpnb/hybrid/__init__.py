"""Hybrid parallelism: data, pipeline and tensor parallelism in one Booster, and a training program around it.

plugins.py             HybridParallelPlugin: what to parallelize; presets.py has it with fewer knobs
colossal_config.py     the same from a configuration of Colossal-AI's first tutorials
refused.py             which options cannot be combined, and why
booster.py             Booster: boost, execute_pipeline, backward; booster_files.py: its files
parallelize_model.py   the order in which the strategies are applied to a model
boost_checks.py        what boost refuses before it changes anything
boosted_model.py       the model on one rank; global_loss.py and model_loss.py: the loss over all ranks
boosted_optimizer.py   the optimizer on one rank (../optimizer_state.py: its state in one process's terms)
check_model.py         hpnb.models.check: a registered model in every strategy, against its forward
compile_blocks.py      torch.compile for a model's blocks; recompute.py: activation checkpointing

checkpoint/            weights in Hugging Face's format, all other state in shards; atomic, from any layout
training/              Trainer and its hooks, metrics; HybridAdam, learning-rate schedulers
torchrun/              launch_from_torch, DistCoordinator, get_dist_logger, restarts, several nodes
train_command/         python -m hpnb train: the TOML run file, and the run that it describes
"""
