"""The programs of five Colossal-AI tutorials in hpnb's vocabulary, as users would write them.

Each is a script of its own, with a small model, and small files in the format in which its data is published.
It has to end, and the loss of its last epoch has to be below that of its first steps. With --slow torchrun
runs the scripts. Without it forked ranks do, because under torchrun every rank imports everything for itself,
and tests/test_launch_hybrid.py tests torchrun.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from real_files import write_beans, write_cifar10, write_mrpc
from scripts_here import run_script_here
from transformers import ViTForImageClassification

import hpnb

ROOT = Path(__file__).parents[1]
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


Run = Callable[..., str]


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script on `ranks` processes in `tmp_path`; returns what it printed."""

    def run(ranks: int, text: str, *arguments: str) -> str:
        script = tmp_path / "train.py"
        script.write_text(text)
        if request.config.getoption("--slow"):
            printed, errors = torchrun(script, ranks, *arguments)
        else:
            monkeypatch.setenv("DATA", str(tmp_path))
            monkeypatch.chdir(tmp_path)
            both = hpnb.launch(run_script_here, script, arguments, ranks=ranks, device="cpu", timeout=240)
            printed, errors = ("".join(texts) for texts in zip(*both, strict=True))
        assert "Warning: Seems like" not in errors, errors  # of a scheduler that lost its optimizer
        assert "Warning: Detected call" not in errors, errors
        return printed

    return run


def torchrun(script: Path, ranks: int, *arguments: str) -> tuple[str, str]:
    """What all ranks print, and their errors."""
    folder = script.parent
    environ = {name: value for name, value in os.environ.items() if name not in TOLD}
    environ.update(CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", DATA=str(folder))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
         str(script), *arguments],
        capture_output=True, text=True, timeout=240, env=environ, stdin=subprocess.DEVNULL, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


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

train_dataset = beans("train", image_size=32, kind="real")
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
def test_vit_in_a_pipeline(tmp_path: Path, run: Run) -> None:
    write_beans(tmp_path, train=16)
    falls(losses(run(2, VIT_PIPELINE, str(tmp_path / "saved"))), steps=2)
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

NUM_EPOCHS = 24 // int(sys.argv[1])  # 48 steps, whatever part of the batch a rank has
BATCH_SIZE = 4
LEARNING_RATE = 6e-3 / (3 - int(sys.argv[1]))  # of which two replicas take twice as much
WEIGHT_DECAY = 0.01
WARMUP_FRACTION = 0.1


def tokenize_batch(batch, tokenizer=None, max_length: int = 2048):
    texts = [sample["sentence1"] + sample["sentence2"] for sample in batch]
    data = tokenizer(texts, return_tensors="pt", padding="max_length", truncation=True, max_length=max_length)
    data = {k: v % 257 for k, v in data.items()}  # a byte each, and 50256 pads: as 141, which no text has
    data["labels"] = torch.tensor([sample["label"] for sample in batch])
    return data


tokenizer = byte_tokenizer()
dataset = {"train": mrpc("train", kind="real")}
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
def test_gpt2_with_zero(tmp_path: Path, run: Run, pipeline: int) -> None:
    write_mrpc(tmp_path, train=16)
    falls(losses(run(2, GPT2_HYBRID, str(pipeline))), steps=2 * pipeline)


# --- a ViT on every axis -----------------------------------------------------------------------------------

VIT_HYBRID = """
from functools import partial
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn as nn
from tqdm import tqdm
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

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
image_processor = ViTImageProcessor(size={"height": 32, "width": 32})
beans_collator = partial(collate_images, processor=image_processor)
train_dataset = beans("train", kind="real")
eval_dataset = beans("validation", kind="real")
num_labels = len(train_dataset.classes)
train_dataloader = plugin.prepare_dataloader(
    train_dataset, batch_size=8, shuffle=True, drop_last=True, collate_fn=beans_collator
)
eval_dataloader = plugin.prepare_dataloader(eval_dataset, batch_size=4, collate_fn=beans_collator)

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
def test_vit_on_tensor_and_pipeline_ranks(tmp_path: Path, run: Run) -> None:
    write_beans(tmp_path, image_size=40, train=16, validation=10)
    falls(losses(run(4, VIT_HYBRID)), steps=2)


# --- 003: a ViT of timm's parts as an nn.Sequential, in a pipeline, by a Trainer with hooks ----------------

VIT_SEQUENTIAL = """
import os
from collections import OrderedDict

import torch
import torch.nn as nn
from torchvision import transforms

import hpnb
from hpnb import Booster, HybridParallelPlugin, Trainer


class PatchEmbed(nn.Module):  # as in timm.models.vision_transformer, like the classes below
    def __init__(self, img_size, patch_size, in_chans, embed_dim):
        super().__init__()
        self.num_patches = (img_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class DropPath(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if not self.drop_prob or not self.training:
            return x
        keep = torch.rand(len(x), 1, 1, device=x.device) >= self.drop_prob
        return x * keep / (1 - self.drop_prob)


class Block(nn.Module):
    def __init__(self, dim, num_heads, drop_path):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.drop_path = DropPath(drop_path)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.drop_path(self.attn(y, y, y, need_weights=False)[0])
        return x + self.drop_path(self.mlp(self.norm2(x)))


class ViTEmbedding(nn.Module):
    def __init__(self, img_size=224, patch_size=16, in_chans=3, embed_dim=768, drop_rate=0., distilled=False):
        super().__init__()
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.dist_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if distilled else None
        num_tokens = 2 if distilled else 1
        self.pos_embed = nn.Parameter(torch.zeros(1, self.patch_embed.num_patches + num_tokens, embed_dim))
        self.pos_drop = nn.Dropout(p=drop_rate)
        for p in (self.cls_token, self.pos_embed, *([self.dist_token] if distilled else [])):
            nn.init.trunc_normal_(p, std=.02)

    def forward(self, x):
        x = self.patch_embed(x)
        tokens = [t.expand(x.shape[0], -1, -1) for t in (self.cls_token, self.dist_token) if t is not None]
        return self.pos_drop(torch.cat((*tokens, x), dim=1) + self.pos_embed)


class ViTHead(nn.Module):
    def __init__(self, embed_dim=768, num_classes=10, distilled=False, representation_size=None):
        super().__init__()
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.distilled, num_features = distilled, embed_dim
        self.pre_logits = nn.Identity()
        if representation_size and not distilled:
            num_features = representation_size
            self.pre_logits = nn.Sequential(OrderedDict([
                ("fc", nn.Linear(embed_dim, representation_size)), ("act", nn.Tanh())
            ]))
        self.head = nn.Linear(num_features, num_classes)
        self.head_dist = nn.Linear(embed_dim, num_classes) if distilled else None

    def forward(self, x):
        x = self.norm(x)
        if self.distilled:
            return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2
        return self.head(self.pre_logits(x[:, 0]))


def sequential_vit(img_size, patch_size, embed_dim, depth, num_heads, num_classes,
                   representation_size=None, distilled=False, drop_rate=0., drop_path_rate=0.):
    embedding = ViTEmbedding(img_size, patch_size, 3, embed_dim, drop_rate, distilled)
    dpr = [x.item() for x in torch.linspace(0, drop_path_rate, depth)]  # stochastic depth decay rule
    blocks = [Block(embed_dim, num_heads, dpr[i]) for i in range(depth)]
    head = ViTHead(embed_dim, num_classes, distilled, representation_size)
    return nn.Sequential(embedding, *blocks, head)


def build_cifar(plugin, batch_size):
    normalize = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    transform_train = transforms.Compose([
        transforms.RandomCrop(32, padding=4),
        transforms.AutoAugment(policy=transforms.AutoAugmentPolicy.CIFAR10),
        transforms.ToTensor(), normalize,
    ])
    transform_test = transforms.Compose([transforms.ToTensor(), normalize])
    train_dataset = CIFAR10(root=os.environ["DATA"], train=True, transform=transform_train)
    test_dataset = CIFAR10(root=os.environ["DATA"], train=False, transform=transform_test)
    train_dataloader = plugin.prepare_dataloader(train_dataset, batch_size, shuffle=True, pin_memory=True)
    test_dataloader = plugin.prepare_dataloader(test_dataset, batch_size, pin_memory=True)
    return train_dataloader, test_dataloader


BATCH_SIZE = 8
NUM_EPOCHS = 20
CONFIG = dict(NUM_MICRO_BATCHES=4, NUM_CHUNKS=2, parallel=dict(pipeline=2))

hpnb.disable_existing_loggers()
hpnb.launch_from_torch()
logger = hpnb.get_dist_logger()
plugin = HybridParallelPlugin.from_config(CONFIG, precision="fp32")

model = sequential_vit(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=4, num_classes=10,
                       DISTILLED_OR_NOT, drop_path_rate=0.1)
cross_entropy = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0)
train_dataloader, test_dataloader = build_cifar(plugin, BATCH_SIZE)


def criterion(outputs, batch):
    images, labels = batch
    return cross_entropy(outputs, labels)


booster = Booster(plugin=plugin)
model, optimizer, criterion, train_dataloader, _ = booster.boost(
    model, optimizer, criterion, train_dataloader, verbose=True
)
loss = hpnb.LossHook()
trainer = Trainer(
    booster, model, optimizer, criterion,
    hooks=[loss, hpnb.AccuracyHook(), hpnb.MetricsByEpochHook()], display_progress=True,
)
with hpnb.record.timeline() as timer:  # named spans, as a MultiTimer has them
    with timer.span("fit"):
        history = trainer.fit(train_dataloader, NUM_EPOCHS, evaluate=test_dataloader, evaluate_every=1)
    with timer.span("evaluation"):
        trainer.evaluate(test_dataloader)
timeline = timer.gather()
seconds = {name: timeline.select([name]).makespan for name in ("fit", "evaluation")}
assert seconds["fit"] > seconds["evaluation"] > 0
assert 0.9 * seconds["fit"] < sum(epoch["seconds"] for epoch in history) < seconds["fit"]
logger.info("timed %s", ", ".join(seconds), ranks=[0])
if hpnb.rank() == 0:
    for value in loss.curve:
        print("loss", value, flush=True)
"""


@pytest.mark.sampled(1, of="tutorials")
@pytest.mark.parametrize(
    ("head", "last"), [("representation_size=16", "head"), ("distilled=True", "head_dist")]
)
def test_sequential_vit_with_trainer_and_hooks(tmp_path: Path, run: Run, head: str, last: str) -> None:
    program = write_cifar10(tmp_path, 4) + VIT_SEQUENTIAL.replace("DISTILLED_OR_NOT", head)
    printed = run(2, program)
    falls(losses(printed), steps=12)  # four epochs: augmentation makes single steps differ
    lines = printed.splitlines()
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert len(epochs) == 20  # printed by the rank that has the loss alone
    assert "eval_accuracy" in epochs[-1]
    stages = [line for line in lines if line.startswith("stage ")]
    assert [line.split(",")[0] for line in stages] == [
        "stage 0 of 4 on pipeline rank 0: 0.cls_token to 0.patch_embed.proj.bias",
        "stage 1 of 4 on pipeline rank 1: 1.norm1.weight to 2.mlp.2.bias",
        "stage 2 of 4 on pipeline rank 0: 3.norm1.weight to 4.mlp.2.bias",
        f"stage 3 of 4 on pipeline rank 1: 5.norm.weight to 5.{last}.bias",
    ]


# --- 004: a ViT in every layout, from a config file, with mixup, accumulation and clipping -----------------

VIT_CONFIG = """
AMP_TYPE = type("AMP_TYPE", (), {"NAIVE": "naive"})  # colossalai.amp has it
TENSOR_PARALLEL_SIZE = 2
TENSOR_PARALLEL_MODE = "1d"
parallel = dict(pipeline=2, tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE))

fp16 = dict(mode=AMP_TYPE.NAIVE, initial_scale=1)
gradient_accumulation = 2
clip_grad_norm = 1.0
dali = dict(gpu_aug=True, mixup_alpha=0.2)

BATCH_SIZE = 8
DROP_RATE = 0.1
LEARNING_RATE = 6e-3
WEIGHT_DECAY = 0.3
NUM_EPOCHS = 12
WARMUP_EPOCHS = 2

IMG_SIZE = 32
PATCH_SIZE = 8
HIDDEN_SIZE = 32
DEPTH = 2
NUM_HEADS = 4
MLP_RATIO = 2
NUM_CLASSES = 10
CHECKPOINT = True
NUM_MICRO_BATCHES = parallel["pipeline"]
"""

VIT_FROM_CONFIG = """
import runpy
import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torchvision.transforms import v2
from transformers import ViTConfig, ViTForImageClassification

import hpnb
from hpnb import Booster, CosineAnnealingWarmupLR, HybridAdam, HybridParallelPlugin, Trainer

hpnb.launch_from_torch(seed=42)
config = runpy.run_path(sys.argv[sys.argv.index("--config") + 1])
args = SimpleNamespace(**config)
plugin = HybridParallelPlugin.from_config(
    config, activation_checkpointing="full" if args.CHECKPOINT else False
)
train_transform = hpnb.data.ImageTransform(
    args.IMG_SIZE,
    augment=v2.Compose([v2.RandomCrop(args.IMG_SIZE, padding=2), v2.RandomHorizontalFlip()]),
    mixup=args.dali["mixup_alpha"],
    classes=args.NUM_CLASSES,
    device=hpnb.device() if args.dali["gpu_aug"] else None,
)
train_dataset, test_dataset = (hpnb.data.cifar10(split, kind="real") for split in ("train", "test"))
train_dataloader = plugin.prepare_dataloader(
    train_dataset, args.BATCH_SIZE // plugin.dp_size, shuffle=True, transform=train_transform
)
test_dataloader = plugin.prepare_dataloader(
    test_dataset, args.BATCH_SIZE, transform=hpnb.data.ImageTransform(args.IMG_SIZE)
)
model = ViTForImageClassification(ViTConfig(
    image_size=args.IMG_SIZE, patch_size=args.PATCH_SIZE, hidden_size=args.HIDDEN_SIZE,
    num_hidden_layers=args.DEPTH, num_attention_heads=args.NUM_HEADS,
    intermediate_size=args.MLP_RATIO * args.HIDDEN_SIZE, num_labels=args.NUM_CLASSES,
    hidden_dropout_prob=args.DROP_RATE,
))
optimizer = HybridAdam(
    hpnb.models.decay_groups(model, args.WEIGHT_DECAY), lr=plugin.scaled_lr(args.LEARNING_RATE)
)
lr_scheduler = CosineAnnealingWarmupLR(optimizer, args.NUM_EPOCHS, args.WARMUP_EPOCHS)


def criterion(outputs, inputs):  # of classes, or of their probabilities
    return F.cross_entropy(outputs.logits.float(), inputs["labels"])


booster = Booster(plugin=plugin)
model, optimizer, criterion, train_dataloader, lr_scheduler = booster.boost(
    model, optimizer, criterion, train_dataloader, lr_scheduler
)
loss = hpnb.LossHook()
norms = []


class NormHook(hpnb.Hook):
    def after_step(self, trainer):
        assert trainer.optimizer.last_step.stepped
        norms.append(float(trainer.optimizer.last_step.norm))


trainer = Trainer(
    booster, model, optimizer, criterion, accumulation=args.gradient_accumulation,
    hooks=[loss, hpnb.AccuracyHook(), hpnb.LRSchedulerHook(lr_scheduler, by="epoch"), NormHook()],
)
history = trainer.fit(train_dataloader, args.NUM_EPOCHS, evaluate=test_dataloader, evaluate_every=6)
assert trainer.step == args.NUM_EPOCHS * -(-len(train_dataloader) // args.gradient_accumulation)
rates = [epoch["lr"] for epoch in history]
assert max(rates) == rates[args.WARMUP_EPOCHS - 1] == plugin.scaled_lr(args.LEARNING_RATE), rates
assert max(norms) > args.clip_grad_norm  # of the gradients before they are clipped
if hpnb.rank() == 0:
    for value in loss.curve:
        print("loss", value, flush=True)
"""


@pytest.mark.sampled(1, of="tutorials")
@pytest.mark.parametrize(
    ("ranks", "pipeline", "tensor"),
    [
        (2, 1, None), (2, 2, None), (4, 2, "dict(mode='1d', size=2)"), (4, 1, "dict(mode='2d', size=4)"),
        pytest.param(8, 1, "dict(mode='2.5d', size=8, depth=2)", marks=pytest.mark.slow),
        pytest.param(8, 1, "dict(mode='3d', size=8)", marks=pytest.mark.slow),
    ],
    ids=["data", "pipeline", "1d", "2d", "2.5d", "3d"],
)  # fmt: skip
def test_vit_from_data_to_hybrid_parallelism(
    tmp_path: Path, run: Run, ranks: int, pipeline: int, tensor: str | None
) -> None:
    config = VIT_CONFIG.replace("pipeline=2, ", f"pipeline={pipeline}, ")
    config = config.replace("dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE)", str(tensor))
    (tmp_path / "config.py").write_text(config)
    printed = run(ranks, write_cifar10(tmp_path, 4) + VIT_FROM_CONFIG, "--config", "config.py")
    falls(losses(printed), steps=8)  # four epochs, because mixup makes single steps differ
