"""Tiny models of transformers that have plans, in float64 throughout."""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from torch import nn

D = torch.float64
VOCABULARY = 29
Batch = dict[str, torch.Tensor]

COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_labels": 3, "classifier_dropout": 0.0,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": True},
    "Mistral": {"num_key_value_heads": 2, "head_dim": 4, "sliding_window": 3},
    "Gemma2": {
        "num_key_value_heads": 2, "head_dim": 4, "sliding_window": 3, "query_pre_attn_scalar": 4,
        "attn_implementation": "eager",
    },
    "Phi3": {"num_key_value_heads": 2, "sliding_window": None},
    "GPTNeoX": {"rotary_pct": 0.5},
}  # fmt: skip
WITHOUT_PLAN: dict[str, dict[str, Any]] = {
    "GptOss": {
        "num_key_value_heads": 2, "head_dim": 4, "sliding_window": 3, "num_local_experts": 2,
        "num_experts_per_tok": 1, "experts_implementation": "eager",
    },
}  # fmt: skip


class _Torch64:
    """torch, whose float32 is float64: norms and softmax of transformers are computed in float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_replaced: list[tuple[Any, str, Any]] = []  # (object, attribute, its value before), the last one last


def replace_for_file(target: Any, name: str, value: Any) -> None:
    """Set an attribute of transformers, until the tests of this file are over: see `restore_replaced`."""
    _replaced.append((target, name, getattr(target, name)))
    setattr(target, name, value)


def restore_replaced() -> None:
    """What conftest.py does after every file, so that the tests of the next one get transformers as it is."""
    while _replaced:
        target, name, value = _replaced.pop()
        setattr(target, name, value)


def use_float64(kind: type[nn.Module]) -> None:
    """From now on models of this class, norms included, compute in the dtype of their weights: float64."""
    module = sys.modules[kind.__module__]
    if isinstance(module.torch, _Torch64):
        return
    replace_for_file(module, "torch", _Torch64())
    for value in list(vars(module).values()):
        if isinstance(value, type) and issubclass(value, nn.Module) and "_norm" in vars(value):
            replace_for_file(value, "forward", _gemma_norm)  # which calls float()


def _gemma_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self._norm(x) * (1.0 + self.weight)  # type: ignore[no-any-return]


def build(kind: str, head: str = "ForCausalLM", **options: Any) -> Any:
    """Norms and biases away from 1 and 0."""
    known = OPTIONS.get(kind) or WITHOUT_PLAN.get(kind, {})
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **known, **options})
    torch.manual_seed(5)
    made = getattr(transformers, f"{kind}{head}")
    use_float64(made)
    model = made(config).to(D).train()
    g = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g, dtype=D).mul_(0.2))
    return model


def batch(samples: int = 8, length: int = 7, classes: int = 0) -> Batch:
    """Padded texts; what is padding has no label."""
    g = torch.Generator().manual_seed(100)
    ids = torch.randint(3, VOCABULARY, (samples, length), generator=g)
    mask = torch.ones_like(ids)
    for sample in range(samples):
        mask[sample, length - sample % 4 :] = 0
    ids[mask == 0] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if classes:
        labels = torch.randint(0, classes, (samples,), generator=g)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
