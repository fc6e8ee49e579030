"""Models of transformers whose modules a user has changed, so that their config no longer describes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn

HIDDEN, WORDS, LENGTH, CLASSES = 16, 50, 9, 3
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Lora(nn.Module):
    """A frozen linear layer, and a trained one of low rank beside it."""

    def __init__(self, base: nn.Module, down: nn.Module | None = None) -> None:
        super().__init__()
        sizes = list(base.weight.shape)
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(HIDDEN, 3, bias=False) if down is None else down
        self.b = nn.Linear(3, sizes[0] if isinstance(base, nn.Linear) else sizes[1], bias=False)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.base(x) + self.b(self.a(x))  # type: ignore[no-any-return]


class Adapter(nn.Module):
    """A feed-forward layer of GPT-2 with a linear layer beside it."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.c_fc, self.c_proj, self.act, self.dropout = mlp.c_fc, mlp.c_proj, mlp.act, mlp.dropout
        self.side = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.act(self.c_fc(x))) + self.side(x)  # type: ignore[no-any-return]


class Counting(nn.LayerNorm):
    """A module with a state that is no tensor."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class LeavesOut(tf.GPT2LMHeadModel):
    """A class whose save_pretrained leaves out a weight that is trained."""

    _keys_to_ignore_on_save = ("transformer.wpe.weight",)


class TwoArguments(tf.GPT2LMHeadModel):
    """A class that no config alone makes."""

    def __init__(self, config: Any, extra: int) -> None:
        super().__init__(config)
        self.extra = nn.Linear(extra, HIDDEN)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.loss = outputs.loss + self.extra(outputs.logits[..., :4]).square().mean()
        return outputs


def _add_lora(model: nn.Module, name: str, down: nn.Module | None = None) -> nn.Module:
    for module in list(model.modules()):
        if isinstance(layer := getattr(module, name, None), nn.Module):
            setattr(module, name, Lora(layer, down))
    return model


def _gpt2(**options: Any) -> Any:
    return tf.GPT2LMHeadModel(_gpt2_config(**options))


def _gpt2_config(**options: Any) -> Any:
    sizes = {"vocab_size": WORDS, "n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": 16}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return tf.GPT2Config(**(sizes | off | _TOKENS | options))


def _llama(kind: str = "Llama", **options: Any) -> Any:
    config = getattr(tf, f"{kind}Config")(
        vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, **_TOKENS, **options,
    )  # fmt: skip
    return getattr(tf, f"{kind}ForCausalLM")(config)


def _encoder(kind: str, head: str) -> Any:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    inputs = {"image_size": 16, "patch_size": 8} if kind == "ViT" else {"vocab_size": WORDS}
    config = getattr(tf, f"{kind}Config")(**sizes, **inputs, **off, num_labels=CLASSES)
    return getattr(tf, f"{kind}For{head}Classification")(config)


def _t5() -> Any:
    return tf.T5ForConditionalGeneration(tf.T5Config(
        vocab_size=WORDS, d_model=HIDDEN, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, **_TOKENS,
    ))  # fmt: skip


def _marian() -> Any:
    sides = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in {"layers": 1, "attention_heads": 2, "ffn_dim": 24}.items()
    }
    return tf.MarianMTModel(tf.MarianConfig(
        vocab_size=WORDS, d_model=HIDDEN, max_position_embeddings=16, dropout=0.0, decoder_start_token_id=0,
        forced_eos_token_id=None, **sides, **_TOKENS,
    ))  # fmt: skip


def _lengthen(model: Any) -> None:
    model.transformer.wpe = nn.Embedding(16, HIDDEN)


def _classify(model: Any) -> None:
    model.num_labels, model.score = CLASSES, nn.Linear(HIDDEN, CLASSES, bias=False)


def _changed(model: Any, change: Callable[[Any], object]) -> Any:
    change(model)
    return model


def _mlp_head() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 9), nn.GELU(), nn.Linear(9, CLASSES))


def _widen(model: Any) -> None:
    model.transformer.h[0].mlp = Adapter(model.transformer.h[0].mlp)


def _untie(model: Any) -> None:
    model.lm_head = nn.Linear(HIDDEN, WORDS, bias=False)


def _tie(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def _compile_block(model: Any) -> None:
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")


def _drop_block(model: Any) -> None:
    model.transformer.h = model.transformer.h[:2]


CHANGED: dict[str, Callable[[], Any]] = {
    "llama lora": lambda: _add_lora(_llama(), "q_proj"),
    "gpt2 lora": lambda: _add_lora(_gpt2(), "c_attn"),
    "bert lora": lambda: _add_lora(_encoder("Bert", "Sequence"), "query"),
    "t5 lora": lambda: _add_lora(_t5(), "q"),
    "vit lora": lambda: _add_lora(_encoder("ViT", "Image"), "q_proj"),
    "mixtral lora": lambda: _add_lora(_llama("Mixtral", num_local_experts=2), "q_proj"),
    "shared lora": lambda: _add_lora(_llama(), "q_proj", nn.Linear(HIDDEN, 3, bias=False)),
    "vit head": lambda: _changed(_encoder("ViT", "Image"), lambda m: setattr(m, "classifier", _mlp_head())),
    "bert head": lambda: _changed(
        _encoder("Bert", "Sequence"), lambda m: setattr(m, "classifier", _mlp_head())
    ),
    "adapter": lambda: _changed(_gpt2(), _widen),
    "untied": lambda: _changed(_gpt2(), _untie),
    "tied mixtral": lambda: _changed(_llama("Mixtral", num_local_experts=2), _tie),
    "dropped block": lambda: _changed(_gpt2(n_layer=3), _drop_block),
    "weight norm": lambda: _changed(
        _gpt2(tie_word_embeddings=False), lambda m: nn.utils.parametrizations.weight_norm(m.lm_head)
    ),
    "compiled block": lambda: _changed(_llama(), _compile_block),
    "two arguments": lambda: TwoArguments(_gpt2_config(), 4),
}

UNCHANGED: dict[str, Callable[[], Any]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "vit": lambda: _encoder("ViT", "Image"),
    "marian": lambda: _marian(),
    "trained positions": lambda: LeavesOut(_gpt2_config()),
    "longer": lambda: _changed(_gpt2(n_positions=4), _lengthen),
    "more classes": lambda: _changed(tf.GPT2ForSequenceClassification(_gpt2_config(num_labels=2)), _classify),
    "counting": lambda: _changed(_gpt2(), lambda m: setattr(m.transformer.h[0], "ln_1", Counting(HIDDEN))),
}


def build(name: str, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return (CHANGED | UNCHANGED)[name]().train()


def batch(name: str, step: int, samples: int = 4) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    labels = torch.randint(0, CLASSES, (samples,), generator=g)
    ids = torch.randint(3, WORDS, (samples, LENGTH), generator=g)
    if name.startswith("vit"):
        return {"pixel_values": torch.randn(samples, 3, 16, 16, generator=g), "labels": labels}
    return {"input_ids": ids, "labels": labels if name.startswith(("bert", "more")) else ids}
