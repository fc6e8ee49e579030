"""Which model a plan is for: a name of this library's sizes, or a configuration of transformers.

gpt2, gpt2-medium, gpt2-large, gpt2-xl, vit-b16, vit-l16      this library's
a folder with config.json, a JSON file, a name in the local cache of the Hugging Face hub
"""

from __future__ import annotations

import difflib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpnb.models import GPT2_SIZES, SIZES, GPT2Size, ViTSize
from hpnb.theory.model_shape import IMAGE_CHANNELS, ModelShape

GPT2_NAMES = {"gpt2": "124m", "gpt2-medium": "355m", "gpt2-large": "774m", "gpt2-xl": "1.5b"}
VIT_NAMES = {"vit-b16": "b16", "vit-l16": "l16"}
CLASSES = 1000
_EXPERTS = ("mixtral", "qwen3_moe")
_LATENT = ("deepseek_v2", "deepseek_v3")
_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", *_EXPERTS)
SUPPORTED = (*_LLAMA_LIKE, *_LATENT, "gpt2", "vit")


def read_model(name: str, mtp: bool = False) -> ModelShape:
    """The shape of the model that `name` means; with `mtp`, with its modules of multi-token prediction."""
    if mtp:
        shape, modules = read_model(name), read_mtp_modules(name)
        if not (modules and shape.experts):
            what = "no blocks with experts, as a module has" if modules else "no num_nextn_predict_layers"
            raise ValueError(f"{shape.name} has {what}; leave --mtp out")
        return replace(shape, mtp_modules=modules)
    if name.lower() in GPT2_NAMES:
        return shape_of_gpt2(name.lower(), GPT2_SIZES[GPT2_NAMES[name.lower()]])
    if name.lower() in VIT_NAMES:
        return shape_of_vit(name.lower(), SIZES[VIT_NAMES[name.lower()]])
    return shape_of_config(read_config(name), Path(name).stem if name.endswith(".json") else name)


def read_mtp_modules(name: str) -> int:
    """Modules of multi-token prediction of the model that `name` means; transformers trains without."""
    if name.lower() in {**GPT2_NAMES, **VIT_NAMES}:
        return 0
    return getattr(read_config(name), "num_nextn_predict_layers", None) or 0


def mtp_sentence(name: str, shape: ModelShape) -> str:
    """What a program that trains the model leaves out; empty for a model without modules."""
    if shape.mtp_modules:
        return (
            f"this program trains without num_nextn_predict_layers={shape.mtp_modules}, which --mtp counts: "
            "transformers builds no such module for training"
        )
    modules = read_mtp_modules(name)
    return (
        f"num_nextn_predict_layers={modules} is not counted, since transformers builds no such module for "
        "training; --mtp counts it" if modules else ""
    )  # fmt: skip


def read_size(name: str) -> str | GPT2Size | ViTSize | None:
    """The model that `name` means as `hpnb train` takes it: a name of a size, or a size of its own; None for
    architectures that it does not build."""
    if (known := {**GPT2_NAMES, **VIT_NAMES}.get(name.lower())) is not None:
        return known
    config = read_config(name)
    if config.model_type == "gpt2":
        return GPT2Size.of(config)
    return ViTSize.of(config) if config.model_type == "vit" else None


def shape_of_gpt2(name: str, size: GPT2Size) -> ModelShape:
    return ModelShape(
        name, size.hidden, size.layers, size.heads, size.heads, size.hidden // size.heads, size.mlp,
        outputs=size.vocab_size, embedding_parameters=(size.vocab_size + size.length) * size.hidden,
        head_parameters=0, positions=size.length,
        qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True,
    )  # fmt: skip


def shape_of_vit(name: str, size: ViTSize, classes: int = CLASSES) -> ModelShape:
    h = size.hidden
    return ModelShape(
        name, h, size.layers, size.heads, size.heads, h // size.heads, size.mlp, outputs=classes,
        embedding_parameters=(IMAGE_CHANNELS * size.patch**2 + 2 + size.tokens) * h,
        head_parameters=classes * h + classes, positions=size.tokens, causal=False,
        qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True,
    )  # fmt: skip


def shape_of_config(config: Any, name: str = "") -> ModelShape:
    """The shape that a configuration of transformers describes."""
    kind = config.model_type
    name = name or kind
    if kind == "gpt2":
        return shape_of_gpt2(name, GPT2Size.of(config))
    if kind == "vit":
        return shape_of_vit(name, ViTSize.of(config), config.num_labels)
    if kind in _LATENT:
        return shape_of_deepseek(name, config)
    if kind not in _LLAMA_LIKE:
        raise ValueError(
            f"{name} is a {kind}, whose parameters are not known here; there are {', '.join(SUPPORTED)}"
        )
    h, vocab_size = config.hidden_size, config.vocab_size
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    all_biases = bool(getattr(config, "attention_bias", False)) and kind != "qwen2"
    experts = config.num_local_experts if kind in _EXPERTS else 0
    if kind == "qwen3_moe" and (config.mlp_only_layers or config.decoder_sparse_step != 1):
        raise ValueError(
            f"{name} has experts in some of its blocks alone, and the plan needs equal blocks; use a model "
            "with mlp_only_layers=[] and decoder_sparse_step=1"
        )
    return ModelShape(
        name, h, config.num_hidden_layers, config.num_attention_heads, kv_heads,
        getattr(config, "head_dim", None) or h // config.num_attention_heads,
        config.moe_intermediate_size if kind == "qwen3_moe" else config.intermediate_size,
        outputs=vocab_size, embedding_parameters=vocab_size * h,
        head_parameters=0 if config.tie_word_embeddings else vocab_size * h,
        positions=config.max_position_embeddings, gated=True,
        qkv_bias=all_biases or kind == "qwen2", out_bias=all_biases,
        norms=4 if kind in ("gemma2", "gemma3_text") else 2,
        qk_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
        experts=experts, chosen=config.num_experts_per_tok if experts else 1,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
    )  # fmt: skip


def shape_of_deepseek(name: str, config: Any) -> ModelShape:
    """Latent attention, and experts in all blocks but the first; no modules of multi-token prediction."""
    h, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    dense_layers = min(config.first_k_dense_replace, layers)
    table, biases = config.vocab_size * h, bool(config.attention_bias)
    if dense_layers == layers:
        experts: dict[str, Any] = {"mlp": config.intermediate_size}
    else:
        experts = {
            "mlp": config.moe_intermediate_size,
            "experts": config.n_routed_experts,
            "chosen": config.num_experts_per_tok,
            "shared_mlp": config.moe_intermediate_size * config.n_shared_experts,
            "wide_router": True,
            "dense_layers": dense_layers,
            "dense_mlp": config.intermediate_size if dense_layers else 0,
        }
    return ModelShape(
        name, h, layers, heads, heads, config.qk_nope_head_dim + config.qk_rope_head_dim,
        outputs=config.vocab_size, embedding_parameters=table,
        head_parameters=0 if config.tie_word_embeddings else table,
        positions=config.max_position_embeddings, gated=True, qkv_bias=biases,
        out_bias=biases, mlp_bias=config.model_type == "deepseek_v2" and bool(config.mlp_bias),
        kv_lora_rank=config.kv_lora_rank, q_lora_rank=config.q_lora_rank or 0,
        rope_head_size=config.qk_rope_head_dim, value_head_size=config.v_head_dim,
        shards_attention=any("self_attn" in path for path in config.base_model_tp_plan), **experts,
    )  # fmt: skip


def read_config(name: str) -> Any:
    """The configuration of transformers that `name` means."""
    from transformers import AutoConfig

    path = Path(name).expanduser()
    try:
        if path.is_file():
            return AutoConfig.for_model(**json.loads(path.read_text(encoding="utf-8")))
        return AutoConfig.from_pretrained(str(path) if path.is_dir() else name, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if path.exists():
            raise ValueError(f"{name} holds no configuration of transformers: {error}") from error
        names = (*GPT2_NAMES, *VIT_NAMES)
        near = difflib.get_close_matches(name.lower(), names, 1)
        raise ValueError(
            f"no model {name!r}: it is no file or folder, and not in the local cache; use "
            f"{near[0] + ', or one of ' if near else ''}{', '.join(names)}, or a config.json"
        ) from error
    except Exception as error:  # of transformers' checks of sizes, whose class is neither of these
        cause = error.__cause__ or error
        text = " ".join(str(cause).split()) or type(cause).__name__
        raise ValueError(f"{name} holds a configuration that transformers refuses: {text}") from error
