"""Where a model of transformers may be split, read off the pipeline plan that its configuration publishes.

    LlamaConfig.base_model_pp_plan    embed_tokens | layers | norm        and the output layer: lm_head
    Anatomy                           embedding    | blocks | head

What a layer is called with besides hidden states (rotary tables, masks with and without a window, what each
layer needs by its type) the model's own forward prepares: see `model_shell.py`.

Modules with parameters that the plan leaves out, such as the head of DeepSeek-V4's hyper-connections, stand
where the forward calls them. A layer that takes or gives more than hidden states, such as Gemma 3n's inputs
of each layer, cannot be on a stage by itself: a pipeline refuses it at its first call. `python -m hpnb.bench
models` trains every planned architecture; hpnb/bench/results/MODELS.md has the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hpnb.meta_device import fill_buffers
from hpnb.models.model_anatomy import Anatomy, Inputs, Part, tied, tokens_of_ids
from hpnb.models.model_shell import HANDS_ON, ModelShell


@dataclass(frozen=True)
class PlanAnatomy(Anatomy):
    """Of a model with a pipeline plan. It takes input_ids (B, s), and what else its forward takes.

    Attributes:
        shell: runs the model's forward around the parts.
    """

    shell: ModelShell = field(kw_only=True, repr=False)

    def embed(self, inputs: Inputs) -> torch.Tensor:
        return self.shell.embed(self.embedding, inputs)

    def run(self, block: Part, hidden: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        args, kwargs = self.shell.prepare(block.name, hidden, inputs)(hidden)
        output = block.module(*args, **kwargs)
        if not isinstance(output, tuple):
            return output  # type: ignore[no-any-return]
        if any(isinstance(value, torch.Tensor) for value in output[1:]):
            kind, extra = type(self.shell.model).__name__, f"{len(output)} values"
            raise ValueError(HANDS_ON.format(block.name, kind, extra))
        hidden_states: torch.Tensor = output[0]
        return hidden_states

    tokens = tokens_of_ids

    def finish(self, hidden: torch.Tensor, inputs: Inputs) -> Any:
        return self.shell.finish(self.head, hidden, inputs)

    def move_shared(self, device: torch.device) -> None:
        fill_buffers(self.shell, device, name="")  # the model is shell.model, so paths begin with "model."
        super().move_shared(device)


def has_plan(model: nn.Module) -> bool:
    """Whether transformers publishes how a model of this kind may be cut, by layers and by weights."""
    if not isinstance(model, PreTrainedModel):
        return False
    config = model.base_model.config
    return bool(getattr(config, "base_model_pp_plan", None)) and bool(
        getattr(config, "base_model_tp_plan", None)
    )


def core_of(model: Any) -> tuple[Any, str]:
    """The model with the layers, and its path in `model` with a dot behind it."""
    core = model.base_model
    return core, "" if core is model else f"{model.base_model_prefix}."


def anatomy(model: Any) -> PlanAnatomy:
    core, path = core_of(model)
    names = list(core.config.base_model_pp_plan)
    stacks = [name for name in names if isinstance(_child(core, name), nn.ModuleList)]
    if len(stacks) != 1 or not len(core.get_submodule(stacks[0])):
        raise ValueError(
            f"a {type(model).__name__} has no list of layers among {', '.join(names)}, which its pipeline "
            "plan names; register its parts with hpnb.models.register"
        )
    (stack,) = stacks
    position = names.index(stack)
    before = [name for name in names[:position] if _child(core, name) is not None]
    after = [name for name in names[position + 1 :] if _child(core, name) is not None]
    others = [name for name, child in core.named_children() if name not in names and _has_parameters(child)]
    blocks = tuple(Part(f"{path}{stack}.{i}", layer) for i, layer in enumerate(core.get_submodule(stack)))
    outer: list[str] = []
    if core is not model:
        outer = [
            name for name, child in model.named_children() if child is not core and _has_parameters(child)
        ]
    layers, hidden_size = [part.name for part in blocks], core.config.hidden_size
    if others:
        before, after = _place_others(model, core, path, others, before, after, outer, layers)
    embedding = tuple(Part(f"{path}{name}", core.get_submodule(name)) for name in before)
    head = tuple(
        Part(name, model.get_submodule(name)) for name in (*(f"{path}{name}" for name in after), *outer)
    )
    _check_parameters(model, (*embedding, *blocks, *head))
    shell = ModelShell(
        model, [part.name for part in embedding], layers, [part.name for part in head], hidden_size
    )
    causal = str(getattr(model, "loss_type", None)) == "ForCausalLM"
    return PlanAnatomy(embedding, blocks, head, tied(model), causal=causal, shell=shell)


def _place_others(
    model: Any, core: Any, path: str, others: list[str], before: list[str], after: list[str],
    outer: list[str], layers: list[str],
) -> tuple[list[str], list[str]]:  # fmt: skip
    """The modules before and after the layers, with those that the plan does not name.

    They stand where the forward calls them; what it is not seen to call stands before the layers, and the
    shell raises if it is called after them."""
    head = [*(f"{path}{name}" for name in after), *outer]
    shell = ModelShell(model, [f"{path}{name}" for name in before], layers, head, core.config.hidden_size)
    inputs = core.get_input_embeddings()
    first = [name for name in others if core.get_submodule(name) is inputs]
    others = [name for name in others if name not in first]
    early = shell.find_calls([f"{path}{name}" for name in others])
    late = [name for name in others if not early.get(f"{path}{name}", True)]
    return [*first, *before, *(name for name in others if name not in late)], [*after, *late]


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _child(core: nn.Module, name: str) -> nn.Module | None:
    try:
        return core.get_submodule(name)
    except AttributeError:
        return None


def _check_parameters(model: nn.Module, parts: tuple[Part, ...]) -> None:
    in_parts = {p for part in parts for p in part.module.parameters()}
    lost = [name for name, p in model.named_parameters() if p not in in_parts]
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise ValueError(
            f"{', '.join(lost[:3])}{more} of a {type(model).__name__} lie in none of the modules that its "
            "pipeline plan names; register its parts with hpnb.models.register"
        )


def refuse_router_loss(model: Any, parts: Anatomy) -> None:
    """Refuse a mixture of experts that adds a loss over its routers, which stages would leave out."""
    config = getattr(getattr(model, "base_model", model), "config", None)
    if getattr(config, "output_router_logits", False) and not parts.has_router_loss:
        raise ValueError(
            "output_router_logits=True adds a loss over the routers of all layers, which stages do not see; "
            f"call hpnb.expert_parallel.share_balancing_loss(model, mesh.dp_cp) first, as a Booster does, or "
            f"set it to False for a {type(model).__name__} that has no such loss"
        )
