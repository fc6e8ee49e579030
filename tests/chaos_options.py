"""Draws options of a plugin and run files, with sense and without: each runs, or is refused in a sentence."""

from __future__ import annotations

import copy
import math
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import torch

import hpnb
from hpnb.hybrid.plugin_options import PluginOptions
from hpnb.hybrid.train_command.run_file import load, parse
from hpnb.models import GPT2Size, ViTSize
from hpnb.pipeline_parallel import schedules

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2.5, math.nan, math.inf, -math.inf, 10**30, "", "1", "x", [], {}, (1,),
    [1, "x"], object(), torch.float16, torch.int32, torch.zeros(2), b"1f1b",
]  # fmt: skip
SENSIBLE: dict[str, list[Any]] = {
    "tp_size": [1, 1, 2, 4], "pp_size": [1, 1, 2, 4], "zero_stage": [0, 1, 2, 3],
    "precision": ["fp32", "fp64", "bf16", "amp-bf16", "fp16"], "num_microbatches": [None, 1, 2, 4, 8],
    "microbatch_size": [None, 1, 2, 4], "pp_style": [*schedules.NAMES], "num_model_chunks": [1, 1, 2, 3],
    "max_norm": [0, 0.5, 1], "tp_mode": ["1d", "1d", "2d", "2.5d", "3d"], "tp_depth": [1, 1, 2],
    "ddp_bucket_cap_mb": [0.001, 25, 25.0], "zero_bucket_size_in_m": [0.001, 12],
    "communication_dtype": [None, torch.float32, torch.bfloat16], "activation_checkpointing": [False, "full"],
    "initial_scale": [2.0**16, 2**10], "growth_interval": [1, 1000], "hysteresis": [1, 2],
    "loss_chunk": [0, 8], "seed": [None, 0, 7],
    "cut": ["uniform", "parameters", [2, 2], [1, 3], [1, 1, 1, 1]],
}  # fmt: skip
NAMES = [option.name for option in fields(PluginOptions) if option.init]


def draw_options(draw: Random) -> dict[str, Any]:
    """A few options; in half of the draws one has a senseless value."""
    chosen = {}
    for name in draw.sample(NAMES, draw.randint(1, 8)):
        chosen[name] = draw.choice(SENSIBLE.get(name, [True, False, 1.5]))
    if draw.random() < 0.5:
        chosen[draw.choice(NAMES)] = draw.choice(ODD)
    return chosen


def is_sentence(error: BaseException, names: list[str]) -> bool:
    """Whether an error has words, and a number or one of the names in them."""
    text = str(error)
    has_words = len(text.split()) > 3
    return (
        isinstance(error, ValueError | TypeError | OSError)
        and has_words
        and bool(re.search(r"\d", text) or any(name in text for name in names))
    )


def make(options: dict[str, Any]) -> hpnb.HybridParallelPlugin:
    return hpnb.HybridParallelPlugin(**options)


def train(options: dict[str, Any], kind: str) -> tuple[str, str]:
    """One step with these options: ("unharmed", "named" or "wrong", what was said). All ranks call it."""
    torch.set_num_threads(1)
    try:
        plugin = make(options)
        booster = hpnb.Booster(plugin=plugin)
        torch.manual_seed(0)
        model: Any
        if kind == "vit":
            size = ViTSize(hidden=16, layers=4, heads=4, mlp=32, patch=8, image=16)
            model = hpnb.models.vit(size, classes=4)
            batch = {"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.randint(0, 4, (8,))}
        else:
            gpt = GPT2Size(hidden=16, layers=4, heads=4, mlp=32, vocab_size=32, length=8)
            model = hpnb.models.gpt2(gpt)
            ids = torch.randint(1, 32, (8, 8))
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, *_ = booster.boost(model, sgd)
        result = booster.execute_pipeline(iter([batch]), model, lambda out, _: out.loss, optimizer)
        optimizer.step()
        loss = result["loss"]
        if loss is not None and not 0 < float(loss) < 100:
            return "wrong", f"a loss of {float(loss)}"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return ("named" if is_sentence(error, NAMES) else "wrong"), text[:300]
    return "unharmed", ""


# --- run files ---------------------------------------------------------------------------------------------

VIT = """
[model]
family = "vit"
size = { hidden = 16, layers = 2, heads = 2, mlp = 32, patch = 8, image = 16 }
dropout = 0.0
[data]
name = "beans"
kind = "generated"
batch_size = 2
rows = 8
workers = 0
[layout]
tp_size = 1
pp_size = 1
zero_stage = 0
[training]
steps = 2
learning_rate = 1e-3
warmup_steps = 0
weight_decay = 0.1
max_norm = 1.0
precision = "fp32"
accumulation = 1
seed = 1
[checkpoint]
every = 1
keep = 1
resume = true
background = false
"""
GPT2 = VIT.replace('"vit"', '"gpt2"').replace('"beans"', '"mrpc"')
GPT2 = GPT2.replace("patch = 8, image = 16", "vocab_size = 300, length = 16")
_IN_FILE: list[Any] = [
    True,
    0,
    -1,
    1,
    2,
    3,
    2.5,
    math.nan,
    math.inf,
    10**18,
    -(10**18),
    "",
    "x",
    "1",
    [],
    [1, 2],
    {},
    {"x": 1},
    "no/where",
    "fp16",
    "2d",
    "zb-v",
    1e-300,
    1e300,
    "\0",
    "x" * 10_000,
]


def mutate_tables(draw: Random) -> dict[str, Any]:
    """One of the two files with one to three changes."""
    tables = copy.deepcopy(tomllib.loads(draw.choice([VIT, GPT2])))
    for _ in range(draw.randint(1, 3)):
        table = draw.choice(list(tables))
        inside = tables[table] if isinstance(tables[table], dict) else {}
        key = draw.choice(list(inside)) if inside else ""
        kind = draw.random()
        if kind < 0.08:
            tables.pop(table)
        elif kind < 0.16:
            tables[table] = draw.choice(_IN_FILE)
        elif kind < 0.24:
            tables[draw.choice(["optimiser", "", "layouts"])] = {}
        elif kind < 0.34 and inside:
            inside.pop(key)
        elif kind < 0.44:
            inside[draw.choice([*NAMES, "x", ""])] = draw.choice(_IN_FILE)
        elif kind < 0.54 and isinstance(size := inside.get("size"), dict) and size:
            size[draw.choice(list(size))] = draw.choice(_IN_FILE)
        elif inside:
            inside[key] = draw.choice(_IN_FILE)
    return tables


def mutate_text(draw: Random) -> bytes:
    """One of the two files with bytes changed."""
    text = bytearray(draw.choice([VIT, GPT2]).encode())
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text))
        change = draw.random()
        if change < 0.4:
            text[at] = draw.randrange(256)
        elif change < 0.7:
            del text[at : at + draw.randint(1, 40)]
        else:
            text[at:at] = draw.choice([b"=", b"[", b"]]", b'"', b"\xff", b"1e999", b"[[", b"a.b.c = 1\n"])
    return bytes(text)


def read(content: dict[str, Any] | bytes, folder: Path) -> tuple[str, str, Any]:
    """What reading a run file does: (outcome, what was said, the file or None)."""
    try:
        if isinstance(content, bytes):
            (folder / "run.toml").write_bytes(content)
            return "unharmed", "", load(folder / "run.toml")
        return "unharmed", "", parse(content)
    except (ValueError, OSError) as error:
        is_plain = type(error) in (ValueError, OSError)
        named = is_plain and is_sentence(error, ["[", "run.toml", "table", *NAMES]) and "\n" not in str(error)
        return ("named" if named else "wrong"), f"{type(error).__name__}: {error}"[:300], None
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"[:300], None


def run_file(file: Any, folder: Path) -> tuple[str, str]:
    """Train what a file says. All ranks call it."""
    from hpnb.hybrid.train_command.train import train as train_file

    torch.set_num_threads(1)
    table = file.checkpoint.model_copy(update={"dir": str(folder)})
    try:
        train_file(file.model_copy(update={"checkpoint": table}))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        names = [*NAMES, "[model]", "[data]", "[training]", "[layout]", "[checkpoint]"]
        return ("named" if is_sentence(error, names) else "wrong"), text[:300]
    return "unharmed", ""
