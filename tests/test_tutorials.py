"""Three training programs in the vocabulary that hpnb's users know, under torchrun, as they would write them.

Each is a script of its own: the program, on small generated data and a small model. It has to end, and the
loss of its last epoch has to be below that of its first steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import ViTForImageClassification

ROOT = Path(__file__).parents[1]
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def torchrun(folder: Path, ranks: int, text: str, *arguments: str) -> str:
    """Run a script on `ranks` processes; returns what it printed."""
    script = folder / "train.py"
    script.write_text(text)
    environ = {name: value for name, value in os.environ.items() if name not in TOLD}
    environ.update(CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
         str(script), *arguments],
        capture_output=True, text=True, timeout=240, env=environ, stdin=subprocess.DEVNULL, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning: Seems like" not in done.stderr, done.stderr  # of a scheduler that lost its optimizer
    assert "Warning: Detected call" not in done.stderr, done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    """What the rank that has the loss has printed, step by step."""
    found = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("loss ")]
    assert found, printed
    return found


def falls(values: list[float], steps: int) -> None:
    """The mean of the last epoch is clearly below that of the first."""
    first, last = values[:steps], values[-steps:]
    assert sum(last) / steps < 0.9 * sum(first) / steps, values


# --- a ViT in a pipeline -----------------------------------------------------------------------------------

VIT_PIPELINE = """
import sys
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import ViTConfig, ViTForImageClassification

import hpnb
from hpnb import Booster, CosineAnnealingWarmupLR, DistCoordinator, HybridAdam, HybridParallelPlugin
from hpnb.data import ImageTransform, beans

SEED, NUM_EPOCH, BATCH_SIZE, LEARNING_RATE, WEIGHT_DECAY, WARMUP_RATIO = 42, 20, 8, 3e-3, 0.0, 0.1

hpnb.launch_from_torch(config={}, seed=SEED)
coordinator = DistCoordinator()
world_size = coordinator.world_size

train_dataset = beans("train", size=16, image_size=32, kind="generated")
num_labels = len(train_dataset.classes)

config = ViTConfig(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
                   image_size=32, patch_size=8)
config.num_labels = num_labels
config.id2label = {str(i): c for i, c in enumerate(train_dataset.classes)}
config.label2id = {c: str(i) for i, c in enumerate(train_dataset.classes)}
model = ViTForImageClassification(config)

plugin = HybridParallelPlugin(
    tp_size=1,
    pp_size=2,
    num_microbatches=None,
    microbatch_size=1,
    enable_all_optimization=True,
    precision="fp16",
    initial_scale=1,
)
train_dataloader = plugin.prepare_dataloader(
    train_dataset, BATCH_SIZE, shuffle=True, pin_memory=True, transform=ImageTransform(32)
)
optimizer = HybridAdam(model.parameters(), lr=plugin.scaled_lr(LEARNING_RATE), weight_decay=WEIGHT_DECAY)
total_steps = len(train_dataloader) * NUM_EPOCH
num_warmup_steps = int(WARMUP_RATIO * total_steps)
lr_scheduler = CosineAnnealingWarmupLR(
    optimizer=optimizer, total_steps=total_steps, warmup_steps=num_warmup_steps
)


def criterion(outputs, inputs):
    return nn.functional.cross_entropy(outputs.logits.float(), inputs["labels"])


booster = Booster(plugin=plugin)
model, optimizer, _criterion, train_dataloader, lr_scheduler = booster.boost(
    model=model,
    optimizer=optimizer,
    criterion=criterion,
    dataloader=train_dataloader,
    lr_scheduler=lr_scheduler,
)


def run_forward_backward(
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Callable[[Any, Any], torch.Tensor],
    data_iter: Iterator,
    booster: Booster,
):
    optimizer.zero_grad()
    output_dict = booster.execute_pipeline(
        data_iter, model, criterion, optimizer, return_loss=True, return_outputs=True
    )
    return output_dict["loss"], output_dict["outputs"]


def train_epoch(epoch, model, optimizer, criterion, lr_scheduler, dataloader, booster, coordinator):
    num_steps = len(dataloader)
    dataloader.set_epoch(epoch)
    data_iter = iter(dataloader)
    enable_pbar = coordinator.is_master()
    if isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1:
        # when using pp, only the last stage of master pipeline (dp_rank and tp_rank are both zero) shows pbar
        tp_rank = dist.get_rank(booster.plugin.tp_group)
        dp_rank = dist.get_rank(booster.plugin.dp_group)
        enable_pbar = tp_rank == 0 and dp_rank == 0 and booster.plugin.stage_manager.is_last_stage()
    model.train()
    with tqdm(range(num_steps), desc=f"Epoch [{epoch + 1}]", disable=not enable_pbar) as pbar:
        for _ in pbar:
            loss, outputs = run_forward_backward(model, optimizer, criterion, data_iter, booster)
            optimizer.step()
            lr_scheduler.step()
            if enable_pbar:
                assert outputs.logits.shape == (BATCH_SIZE, num_labels)
                pbar.set_postfix({"loss": loss.item()})
                print("loss", loss.item(), flush=True)


for epoch in range(NUM_EPOCH):
    train_epoch(epoch, model, optimizer, _criterion, lr_scheduler, train_dataloader, booster, coordinator)
booster.save_model(model, sys.argv[1], shard=True)
"""


@pytest.mark.sampled(1, of="tutorials")
def test_vit_in_a_pipeline(tmp_path: Path) -> None:
    falls(losses(torchrun(tmp_path, 2, VIT_PIPELINE, str(tmp_path / "saved"))), steps=2)
    saved, told = ViTForImageClassification.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert saved.config.label2id["healthy"] is not None


# --- GPT-2 with a plugin that is made first ----------------------------------------------------------------

GPT2_HYBRID = """
import sys
from functools import partial
from typing import Callable

import torch
import torch.nn as nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import GPT2Config, GPT2ForSequenceClassification, get_linear_schedule_with_warmup

import hpnb
from hpnb import Booster, DistCoordinator, HybridAdam, HybridParallelPlugin
from hpnb.data import byte_tokenizer, mrpc
from hpnb.pipeline_parallel.microbatches import to_device

plugin = HybridParallelPlugin(
    tp_size=1,
    pp_size=int(sys.argv[1]),
    num_microbatches=None,
    microbatch_size=1,
    enable_all_optimization=True,
    zero_stage=1,
    precision="fp16",
    initial_scale=1,
)

hpnb.launch_from_torch(seed=42)
coordinator = DistCoordinator()

NUM_EPOCHS = 12
BATCH_SIZE = 4
LEARNING_RATE = 5e-3
WEIGHT_DECAY = 0.01
WARMUP_FRACTION = 0.1


def tokenize_batch(batch, tokenizer=None, max_length: int = 2048):
    texts = [sample["sentence1"] + sample["sentence2"] for sample in batch]
    data = tokenizer(texts, return_tensors="pt", padding="max_length", truncation=True, max_length=max_length)
    data = {k: v % 257 for k, v in data.items()}  # a byte each, and 50256 pads: as 141, which no text has
    data["labels"] = torch.tensor([sample["label"] for sample in batch])
    return data


tokenizer = byte_tokenizer()
dataset = {"train": mrpc("train", size=16, kind="generated")}
train_dataloader = plugin.prepare_dataloader(
    dataset["train"],
    batch_size=BATCH_SIZE,
    shuffle=True,
    drop_last=True,
    collate_fn=partial(tokenize_batch, tokenizer=tokenizer, max_length=48),
)
cfg = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=48, vocab_size=257, num_labels=2,
                 pad_token_id=50256 % 257, bos_token_id=0, eos_token_id=0)
model = GPT2ForSequenceClassification(cfg)

lr = plugin.scaled_lr(LEARNING_RATE)
no_decay = ["bias", "ln_1.weight", "ln_2.weight", "ln_f.weight"]
optimizer_grouped_parameters = [
    {
        "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
        "weight_decay": WEIGHT_DECAY,
    },
    {
        "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
        "weight_decay": 0.0,
    },
]
optimizer = HybridAdam(optimizer_grouped_parameters, lr=lr, eps=1e-8)

total_steps = len(train_dataloader) * NUM_EPOCHS
num_warmup_steps = int(WARMUP_FRACTION * total_steps)
lr_scheduler = get_linear_schedule_with_warmup(
    optimizer,
    num_warmup_steps=num_warmup_steps,
    num_training_steps=total_steps,
)


def _criterion(outputs, inputs):
    return outputs.loss


booster = Booster(plugin=plugin)
model, optimizer, _criterion, _, lr_scheduler = booster.boost(
    model, optimizer, criterion=_criterion, lr_scheduler=lr_scheduler
)


def train_epoch(epoch, model, optimizer, _criterion, lr_scheduler, train_dataloader, booster, coordinator):
    use_pipeline = isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1
    is_pp_last_stage = use_pipeline and booster.plugin.stage_manager.is_last_stage()
    print_flag = (not use_pipeline and coordinator.is_master()) or (use_pipeline and is_pp_last_stage)
    total_step = len(train_dataloader)

    model.train()
    optimizer.zero_grad()
    train_dataloader.set_epoch(epoch)
    train_dataloader_iter = iter(train_dataloader)
    with tqdm(
        range(total_step),
        desc=f"Epoch [{epoch + 1}/{NUM_EPOCHS}]",
        disable=not print_flag,
    ) as pbar:
        # Forward pass
        for _ in pbar:
            if use_pipeline:
                outputs = booster.execute_pipeline(
                    train_dataloader_iter, model, _criterion, optimizer, return_loss=True
                )
                # Backward and optimize
                if is_pp_last_stage:
                    loss = outputs["loss"]
                    pbar.set_postfix({"loss": loss.item()})
            else:
                data = next(train_dataloader_iter)
                data = to_device(data, hpnb.device())
                outputs = model(**data)
                loss = _criterion(outputs, None)
                # Backward
                booster.backward(loss, optimizer)
                pbar.set_postfix({"loss": loss.item()})

            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
            if print_flag:
                print("loss", loss.item(), flush=True)


for epoch in range(NUM_EPOCHS):
    train_epoch(epoch, model, optimizer, _criterion, lr_scheduler, train_dataloader, booster, coordinator)
"""


@pytest.mark.sampled(1, of="tutorials")
@pytest.mark.parametrize("pipeline", [2, 1])
def test_gpt2_with_zero(tmp_path: Path, pipeline: int) -> None:
    falls(losses(torchrun(tmp_path, 2, GPT2_HYBRID, str(pipeline))), steps=2 * pipeline)


# --- a ViT on every axis -----------------------------------------------------------------------------------

VIT_HYBRID = """
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn as nn
from tqdm import tqdm
from transformers import ViTConfig, ViTForImageClassification

import hpnb
from hpnb import Booster, CosineAnnealingWarmupLR, DistCoordinator, HybridAdam, HybridParallelPlugin
from hpnb.data import beans, collate_images
from hpnb.pipeline_parallel.microbatches import to_device

SEED = 42
LEARNING_RATE = 4e-3
WEIGHT_DECAY = 0.0
NUM_EPOCH = 8
WARMUP_RATIO = 0.3
TP_SIZE = 2
PP_SIZE = 2

hpnb.launch_from_torch(seed=SEED)
coordinator = DistCoordinator()

plugin = HybridParallelPlugin(
    tp_size=TP_SIZE,
    pp_size=PP_SIZE,
    num_microbatches=None,
    microbatch_size=1,
    enable_all_optimization=True,
    precision="fp16",
    initial_scale=1,
)
train_dataset = beans("train", size=16, image_size=32, kind="generated")
eval_dataset = beans("validation", size=10, image_size=32, kind="generated")
num_labels = len(train_dataset.classes)
train_dataloader = plugin.prepare_dataloader(
    train_dataset, batch_size=8, shuffle=True, drop_last=True, collate_fn=collate_images
)
eval_dataloader = plugin.prepare_dataloader(eval_dataset, batch_size=4, collate_fn=collate_images)

config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                   image_size=32, patch_size=8)
config.num_labels = num_labels
config.id2label = {str(i): c for i, c in enumerate(train_dataset.classes)}
config.label2id = {c: str(i) for i, c in enumerate(train_dataset.classes)}
model = ViTForImageClassification(config)

optimizer = HybridAdam(model.parameters(), lr=plugin.scaled_lr(LEARNING_RATE), weight_decay=WEIGHT_DECAY)
total_steps = len(train_dataloader) * NUM_EPOCH
num_warmup_steps = int(WARMUP_RATIO * total_steps)
lr_scheduler = CosineAnnealingWarmupLR(
    optimizer=optimizer, total_steps=(len(train_dataloader) * NUM_EPOCH), warmup_steps=num_warmup_steps
)


def _criterion(outputs, inputs):
    return outputs.loss


booster = Booster(plugin=plugin)
model, optimizer, _criterion, train_dataloader, lr_scheduler = booster.boost(
    model=model,
    optimizer=optimizer,
    criterion=_criterion,
    dataloader=train_dataloader,
    lr_scheduler=lr_scheduler,
)


def run_forward_backward(
    model: nn.Module,
    optimizer,
    criterion: Callable[[Any, Any], torch.Tensor],
    data_iter: Iterator,
    booster: Booster,
):
    if optimizer is not None:
        optimizer.zero_grad()
    if isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1:
        # run pipeline forward backward when enabling pp in hybrid parallel plugin
        output_dict = booster.execute_pipeline(
            data_iter, model, criterion, optimizer, return_loss=True, return_outputs=True
        )
        loss, outputs = output_dict["loss"], output_dict["outputs"]
    else:
        batch = next(data_iter)
        batch = to_device(batch, hpnb.device())
        outputs = model(**batch)
        loss = criterion(outputs, None)
        if optimizer is not None:
            booster.backward(loss, optimizer)
    return loss, outputs


def train_epoch(epoch, model, optimizer, criterion, lr_scheduler, dataloader, booster, coordinator):
    num_steps = len(dataloader)
    data_iter = iter(dataloader)
    enable_pbar = coordinator.is_master()
    if isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1:
        # when using pp, only the last stage of master pipeline (dp_rank and tp_rank are both zero) shows pbar
        tp_rank = dist.get_rank(booster.plugin.tp_group)
        dp_rank = dist.get_rank(booster.plugin.dp_group)
        enable_pbar = tp_rank == 0 and dp_rank == 0 and booster.plugin.stage_manager.is_last_stage()
    model.train()

    with tqdm(range(num_steps), desc=f"Epoch [{epoch + 1}]", disable=not enable_pbar) as pbar:
        for _ in pbar:
            loss, _ = run_forward_backward(model, optimizer, criterion, data_iter, booster)
            optimizer.step()
            lr_scheduler.step()

            # Print batch loss
            if enable_pbar:
                pbar.set_postfix({"loss": loss.item()})
                print("loss", loss.item(), flush=True)


def evaluate(model, criterion, dataloader, booster):
    model.eval()
    data_iter, seen = iter(dataloader), 0
    for _ in range(len(dataloader)):
        loss, outputs = run_forward_backward(model, None, criterion, data_iter, booster)
        assert (loss is not None) == booster.plugin.stage_manager.is_last_stage()
        seen += 0 if outputs is None else len(outputs.logits)
    assert seen == (10 if booster.plugin.stage_manager.is_last_stage() else 0)


for epoch in range(NUM_EPOCH):
    train_epoch(epoch, model, optimizer, _criterion, lr_scheduler, train_dataloader, booster, coordinator)
    evaluate(model, _criterion, eval_dataloader, booster)
"""


@pytest.mark.sampled(1, of="tutorials")
def test_vit_on_tensor_and_pipeline_ranks(tmp_path: Path) -> None:
    falls(losses(torchrun(tmp_path, 4, VIT_HYBRID)), steps=2)
