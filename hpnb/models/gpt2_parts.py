"""Where a GPT-2 may be split, and the role of each of its weights.

    wte, wpe, drop   ids (B, s) -> token + position embeddings                            (B, s, h)
    h.0 ..           x = x + attention(norm(x));  x = x + mlp(norm(x))                    (B, s, h)
    ln_f, lm_head    logits of the next token, (B, s, V): its weight is wte's, (V, h)
          score      or of a text, (B, classes), at its last token that is not padding

Radford et al. 2019, "Language models are unsupervised multitask learners". A pipeline splits between two
blocks; tensor parallelism splits the matrices in each, and the vocabulary of wte.

Weight decay follows nanoGPT: what has two dims decays, and that includes wte and wpe. wte is an embedding,
but it is the matrix of the output layer too; ViT's positions and class token are vectors and do not decay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, GPT2Model
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput, SequenceClassifierOutput

from hpnb.models.gpt2_mask import CausalMask
from hpnb.models.model_anatomy import (
    Anatomy,
    Attention,
    Inputs,
    Part,
    check_token_ids,
    set_heads,
    tied,
    tokens_of_ids,
)
from hpnb.models.role import Role, conv1d, linear, norm

AnyGPT2: TypeAlias = GPT2LMHeadModel | GPT2ForSequenceClassification | GPT2Model
REFUSED = ("inputs_embeds", "encoder_hidden_states", "encoder_attention_mask", "past_key_values")


@dataclass(frozen=True)
class GPT2Anatomy(Anatomy):
    """Of a GPT2LMHeadModel, a GPT2ForSequenceClassification or a GPT2Model.

    It takes input_ids (B, s), and if given attention_mask (B, s), position_ids (B, s) or (1, s) and
    token_type_ids (B, s).

    Attributes:
        config: of the model: its positions, its padding, its way to compute attention.
        mask: makes the mask of a batch.
    """

    config: GPT2Config = field(kw_only=True)
    mask: CausalMask = field(default_factory=CausalMask, kw_only=True, repr=False, compare=False)

    def embed(self, inputs: Inputs) -> torch.Tensor:
        wte, wpe, drop = (part.module for part in self.embedding)
        # A longer table may have replaced that of the config.
        _check(inputs, getattr(wpe, "num_embeddings", self.config.n_positions))
        ids, positions, types = inputs["input_ids"], inputs.get("position_ids"), inputs.get("token_type_ids")
        hidden = wte(ids)  # (B, s, h)
        if positions is None:
            positions = torch.arange(ids.size(1), device=ids.device).unsqueeze(0)  # (1, s)
        hidden = hidden + wpe(positions)
        if types is not None:
            hidden = hidden + wte(types)  # GPT-2 looks types up in the token embedding
        out: torch.Tensor = drop(hidden)
        return out

    def run(self, block: Part, hidden: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        mask = self.mask(self.config, hidden, inputs, block.name)
        positions = inputs.get("position_ids")
        out: torch.Tensor = block.module(hidden, None, mask, use_cache=False, position_ids=positions)
        return out

    tokens = tokens_of_ids

    def finish(self, hidden: torch.Tensor, inputs: Inputs) -> Any:
        ln_f, *last = (part.module for part in self.head)
        hidden = ln_f(hidden)  # (B, s, h)
        if not last:
            return BaseModelOutput(last_hidden_state=hidden)
        logits = last[0](hidden)
        if self.causal:
            return CausalLMOutput(logits=logits)  # (B, s, V)
        return SequenceClassifierOutput(logits=self._pooled(logits, inputs["input_ids"]))  # (B, classes)

    def _pooled(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Those at each sequence's last token that is not padding, wherever the padding is."""
        batch_size, length = ids.shape
        padding = self.config.pad_token_id
        if padding is None:
            if batch_size != 1:
                raise ValueError(
                    f"without a padding token the last tokens of {batch_size} sequences are unknown; set "
                    "config.pad_token_id, or pass one sequence at a time"
                )
            return logits[:, -1]
        positions = torch.arange(length, device=logits.device, dtype=torch.int32)  # (s,)
        last = (positions * (ids != padding).to(logits.device, torch.int32)).argmax(-1)  # (B,)
        return logits[torch.arange(batch_size, device=logits.device), last]


def anatomy(model: AnyGPT2) -> GPT2Anatomy:
    core, path = _core(model)
    head = [Part(f"{path}ln_f", core.ln_f)]
    causal = isinstance(model, GPT2LMHeadModel)
    if causal:
        head.append(Part("lm_head", model.lm_head))
    elif core is not model:
        head.append(Part("score", model.score))
    return GPT2Anatomy(
        tuple(Part(f"{path}{name}", core.get_submodule(name)) for name in ("wte", "wpe", "drop")),
        tuple(Part(f"{path}h.{i}", block) for i, block in enumerate(core.h)),
        tuple(head),
        tied(model),
        causal=causal,
        config=core.config,
    )


def roles(model: AnyGPT2) -> dict[str, Role]:
    """Roles of all that a GPT-2 may have: a head that this one lacks is in the table too."""
    core, path = _core(model)
    config = core.config
    mlp = config.n_inner if config.n_inner is not None else 4 * config.n_embd
    return dict(_table(path, len(core.h), config.n_head, mlp))


def _table(path: str, layers: int, heads: int, mlp: int) -> Iterator[tuple[str, Role]]:
    yield f"{path}wte.weight", Role("embedding", out_dim=1, decay=True, vocabulary=0)  # (V, h)
    yield f"{path}wpe.weight", Role("embedding", out_dim=1, decay=True)  # (positions, h)
    for block in (f"{path}h.{i}" for i in range(layers)):
        yield from norm(f"{block}.ln_1")
        yield from conv1d(f"{block}.attn.c_attn", "column", units=heads, fused=3)  # (h, 3h): q | k | v
        yield from conv1d(f"{block}.attn.c_proj", "row", units=heads)
        yield from norm(f"{block}.ln_2")
        yield from conv1d(f"{block}.mlp.c_fc", "column", units=mlp)
        yield from conv1d(f"{block}.mlp.c_proj", "row", units=mlp)
    yield from norm(f"{path}ln_f")
    # (V, h); it is wte's weight, under whose name it then stands, unless the config unties them
    yield "lm_head.weight", Role("head", out_dim=0, in_dim=1, decay=True, vocabulary=0)
    yield from linear("score", "head")


def attentions(model: AnyGPT2) -> tuple[Attention, ...]:
    core, path = _core(model)
    modules = ((f"{path}h.{i}.attn", block.attn) for i, block in enumerate(core.h))
    # split_size is the width of q, of k and of v.
    return tuple(
        Attention(name, attn.num_heads, partial(set_heads, name, attn, "num_heads", "split_size"))
        for name, attn in modules
    )


def _check(inputs: Inputs, most: int) -> None:
    ids = check_token_ids("GPT-2", inputs, REFUSED)
    if ids.size(1) > most and inputs.get("position_ids") is None:
        raise ValueError(f"rows of {ids.size(1)} tokens meet {most} positions; shorten them to {most}")


def _core(model: AnyGPT2) -> tuple[GPT2Model, str]:
    """The GPT2Model, and its path in `model`."""
    core, path = (model, "") if isinstance(model, GPT2Model) else (model.transformer, "transformer.")
    if core.config.add_cross_attention:
        raise ValueError("a GPT-2 with cross attention cannot be cut; set config.add_cross_attention=False")
    return core, path
