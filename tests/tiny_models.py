"""Every architecture of transformers that publishes a tensor and a pipeline plan, as a tiny model in float64.

    planned()["Qwen3Config"]        its name, its configuration's class, and {head: class of the model}
    build(architecture, head)       4 layers, hidden size 32, 4 heads on 2 key-value heads, 4 experts

Sizes are set by the name of the option, so a new architecture needs no entry here. `SPECIAL` has the few
options whose value depends on others, such as the sections of a rotary table.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers.models
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

D = torch.float64
VOCABULARY = 40
LENGTH = 7
CLASSES = 3
CAUSAL, CLASSIFIER, BASE = "ForCausalLM", "ForSequenceClassification", "Model"

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "max_position_embeddings": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24,
    "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1, "sliding_window": 3,
    "sliding_window_size": 3,
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16, "index_head_dim": 8, "index_n_heads": 4, "index_topk": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4, "linear_head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_mtp_layers": 0, "first_k_dense_replace": 1,
    "ffn_hidden_size": 24, "expert_ffn_hidden_size": 12, "zero_expert_num": 2, "num_layers": 4,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "dense_intermediate_size": 24,
    "shared_intermediate_size": 12, "moe_hidden_size": 16, "share_expert_dim": 12, "num_code_groups": 3,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "rotary_dim": 4,
    "num_kv_shared_layers": 0, "index_kpool": 2, "index_block_size": 2, "index_topk_blocks": 2, "o_groups": 2,
    "o_lora_rank": 8, "altup_num_inputs": 2, "laurel_rank": 4, "rel_extent": 8, "block_size": 4,
    "shared_experts_intermediate_size": 12, "d_rel": 4, "prediction_head_size": 16, "embedding_dim": 16,
    "layer_group_size": 2,
}  # fmt: skip
_MAPPINGS = {
    CAUSAL: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    CLASSIFIER: modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    BASE: modeling_auto.MODEL_MAPPING,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}  # pairs of dims of a head, 8 / 2 in all
_GLOBAL = {"global_head_dim": 8, "num_global_key_value_heads": 2}
SPECIAL: dict[str, dict[str, Any]] = {
    "DiffusionGemmaTextConfig": _GLOBAL,
    "EmbeddingGemma2TextConfig": _GLOBAL,
    "Gemma4TextConfig": _GLOBAL,
    "Gemma4UnifiedTextConfig": _GLOBAL,
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    "Dots1Config": {"n_shared_experts": 1},
    "Dots3NoteTextConfig": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 12,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "Ernie4_5_VLMoeTextConfig": {
        "moe_intermediate_size": [12, 12],
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
    },
    "EsmcConfig": {"num_key_value_heads": 4},
    "Cosmos3EdgeTextConfig": _MROPE,
    "Glm4vMoeTextConfig": {
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
    },
    "Glm4vTextConfig": _MROPE,
    "GlmImageTextConfig": _MROPE,
    "GlmOcrTextConfig": _MROPE,
    "KimiLinearConfig": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "PaddleOCRTextConfig": _MROPE,
    "Qwen2VLTextConfig": _MROPE,
    "Qwen2_5OmniTextConfig": _MROPE,
    "Qwen2_5_VLTextConfig": _MROPE,
    "Glm5NextTextConfig": {"qk_rope_head_dim": 0},
    "Phi4MultimodalConfig": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "nemo_conv_channels": 16,
        },
    },
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 12},
    "T5Gemma2DecoderConfig": {"dropout_rate": 0.0},
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
    "Step3p7TextConfig": {"sliding_window": 3},
}
EXTRA_INPUTS: dict[str, dict[str, tuple[int, ...]]] = {  # of models that read more than tokens, for a sample
    "T5Gemma2DecoderConfig": {"encoder_hidden_states": (5, 32)},
}


@dataclass(frozen=True)
class Architecture:
    """A configuration with both plans.

    Attributes:
        name: of the configuration's class.
        models: {head: class of the model}; the first is causal, or else a classifier, or else has no head.
    """

    name: str
    config: type[PreTrainedConfig]
    models: dict[str, type[PreTrainedModel]]


@cache
def planned() -> dict[str, Architecture]:
    """Those of the installed transformers, by name. It imports all their models, which takes many seconds."""
    configs = _planned_configs()
    return {name: Architecture(name, configs[name], _models(configs[name])) for name in sorted(configs)}


@cache
def planned_architecture(name: str) -> Architecture:
    """`planned()[name]`, without importing the others."""
    config = _planned_configs(f"class {name}(")[name]
    return Architecture(name, config, _models(config))


def _planned_configs(text: str = "") -> dict[str, type[PreTrainedConfig]]:
    """{name: configuration with both plans}, of the files that contain `text`."""
    configs = {}
    for module in pkgutil.iter_modules(transformers.models.__path__):
        name = f"transformers.models.{module.name}.configuration_{module.name}"
        file = Path(transformers.models.__path__[0], module.name, f"configuration_{module.name}.py")
        source = file.read_text() if file.exists() else ""
        if "base_model_pp_plan" not in source or text not in source:  # importing all takes long
            continue
        for kind in vars(importlib.import_module(name)).values():
            if (
                isinstance(kind, type)
                and issubclass(kind, PreTrainedConfig)
                and kind.__module__ == name
                and getattr(kind, "base_model_pp_plan", None)
                and getattr(kind, "base_model_tp_plan", None)
            ):
                configs[kind.__name__] = kind
    return configs


def _models(config: type[PreTrainedConfig]) -> dict[str, type[PreTrainedModel]]:
    """The models that take this configuration: of its own modeling file, or else of the auto classes."""
    heads: dict[str, type[PreTrainedModel]] = {}
    own = list(_own_models(config))
    for head, mapping in _MAPPINGS.items():
        kinds = [kind for kind in own if kind.__name__.endswith(head)]
        if not own and config in mapping:
            kinds = [mapping[config]]
        heads |= {head: kinds[0]} if kinds else {}
    if not heads and own:
        heads[BASE] = own[0]
    return heads if len(heads) == 1 else {head: kind for head, kind in heads.items() if head != BASE}


def _own_models(config: type[PreTrainedConfig]) -> Iterator[type[PreTrainedModel]]:
    try:
        file = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    except ModuleNotFoundError:  # a configuration of another family's model
        return
    for kind in vars(file).values():
        if (
            isinstance(kind, type)
            and issubclass(kind, PreTrainedModel)
            and getattr(kind, "config_class", None) is config
            and kind.__module__ == file.__name__
            and not kind.__name__.endswith("PreTrainedModel")
        ):
            yield kind


def make_config(architecture: Architecture) -> Any:
    options = {f.name: f.default for f in fields(architecture.config) if f.init}
    sizes = {name: value for name, value in SIZES.items() if name in options}
    sizes |= {name: 0.0 for name, default in options.items() if "drop" in name and isinstance(default, float)}
    if options.get("sliding_window", 1) is None:
        sizes.pop("sliding_window", None)
    if "kv_lora_rank" in options:  # latent attention has as many key-value heads as heads
        sizes["num_key_value_heads"] = sizes.get("num_attention_heads", 4)
    sizes |= {"num_labels": CLASSES, "experts_implementation": "eager", **SPECIAL.get(architecture.name, {})}
    return architecture.config(**sizes)


def build(architecture: Architecture, head: str) -> Any:
    """The model in training mode, with weights, norms and biases away from what they start as."""
    config = make_config(architecture)
    torch.manual_seed(5)
    model = architecture.models[head](config).to(D).train()
    g = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for p in model.parameters():
            p.nan_to_num_().add_(torch.randn(p.shape, generator=g, dtype=D).mul_(0.1))
    return model


def make_batch(architecture: Architecture, head: str, samples: int = 8) -> dict[str, torch.Tensor]:
    """Padded texts; what is padding has no label."""
    g = torch.Generator().manual_seed(100)
    ids = torch.randint(3, VOCABULARY, (samples, LENGTH), generator=g)
    mask = torch.ones_like(ids)
    for sample in range(samples):
        mask[sample, LENGTH - sample % 4 :] = 0
    ids[mask == 0] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if head == CLASSIFIER:
        labels = torch.randint(0, CLASSES, (samples,), generator=g)
    extra = {
        name: torch.randn((samples, *shape), generator=g, dtype=D)
        for name, shape in EXTRA_INPUTS.get(architecture.name, {}).items()
    }
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **extra}


# --- float64 -----------------------------------------------------------------------------------------------


class _Torch64:
    """torch, whose float32 is float64: norms, softmax and routers of transformers compute in float32."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def float64_throughout(kind: type[nn.Module]) -> Iterator[None]:
    """Inside, models of this class compute in the dtype of their weights, also where they ask for float32."""
    files = [
        sys.modules[base.__module__]
        for base in kind.__mro__
        if base.__module__.startswith("transformers.models.")
    ]
    files += [
        sys.modules[name] for name in list(sys.modules) if name.startswith(("transformers.integrations.moe",))
    ]
    before, to_float = (
        [(file, vars(file)["torch"]) for file in files if "torch" in vars(file)],
        torch.Tensor.float,
    )

    def stay_double(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.to(D, *args, **kwargs)

    try:
        for file, _ in before:
            vars(file)["torch"] = _Torch64()
        torch.Tensor.float = stay_double  # type: ignore[method-assign, assignment]
        yield
    finally:
        torch.Tensor.float = to_float  # type: ignore[method-assign]
        for file, module in before:
            vars(file)["torch"] = module
