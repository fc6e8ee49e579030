"""Which models tensor parallelism refuses, with a sentence, before it changes them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from hpnb.mesh import Axis
from hpnb.models import Anatomy, anatomy
from hpnb.ranks.current_rank import device as this_device
from hpnb.tensor_parallel.mode import ModelToShard
from hpnb.tensor_parallel.vocab_embedding import check_embedding


def places_of_blocks(parts: Anatomy) -> dict[nn.Module, list[str]]:
    """{block: the names under which it is listed}, in order."""
    places: dict[nn.Module, list[str]] = {}
    for block in parts.blocks:
        places.setdefault(block.module, []).append(block.name)
    return places


def check_sections(parts: Anatomy) -> None:
    """A module becomes a layer of one section, so it cannot serve two."""
    sections = {"the embedding": parts.embedding, "the blocks": parts.blocks, "the head": parts.head}
    place: dict[nn.Module, str] = {}
    for section, of_section in sections.items():
        for part in of_section:
            if place.setdefault(part.module, section) != section:
                raise ValueError(
                    f"the module {part.name} is a Part of {place[part.module]} and of {section}, and tensor "
                    "parallelism makes it a layer of one of them: give each a module of its own with the "
                    f"same Parameter, as in net.output.weight = net.{part.name}.weight, and a Part"
                )


def check_fused_attentions(model: ModelToShard) -> None:
    """PyTorch's attention gives its weights to a function of all heads, and does not call its out_proj."""
    sharded = [name for name, role in model.roles.items() if role.cut_dim is not None]
    for path, module in model.module.named_modules():
        if isinstance(module, nn.MultiheadAttention) and any(n.startswith(f"{path}.") for n in sharded):
            raise ValueError(
                f"{path} is an nn.MultiheadAttention, which computes all heads in one function of PyTorch, "
                "so tensor parallelism cannot give a rank some of them: write it with an nn.Linear for each "
                "of q, k, v and the output and F.scaled_dot_product_attention, or use a pipeline or ZeRO, "
                "which take it as it is"
            )


def check_embeddings(model: ModelToShard) -> None:
    for path, (section, roles) in model.layers.items():
        old, weight = model.module.get_submodule(path), roles.get("weight")
        is_sharded = section == "embedding" and weight is not None and weight.vocabulary is not None
        if is_sharded and isinstance(old, nn.Embedding):
            check_embedding(old)


def check_has_blocks(model: ModelToShard) -> None:
    if not model.anatomy.blocks:
        raise ValueError(
            f"a {type(model.module).__name__} is registered without blocks, and sequence parallelism, 2D, "
            "2.5D and 3D split hidden states in front of the first block: use mode '1d' without sequence "
            "parallelism, a pipeline or ZeRO, or register what lies between embedding and head as blocks"
        )


def check_repeated(model: nn.Module) -> None:
    """What splits activations is a hook on the first block, which must not run at its other places."""
    for names in places_of_blocks(anatomy(model)).values():
        if len(names) > 1:
            where = " and ".join(dict.fromkeys(names)) + " twice" * (len(set(names)) == 1)
            raise ValueError(
                f"the same block stands at {where}, and sequence parallelism, 2D, 2.5D and 3D need another "
                "module at each place: use mode '1d' without sequence parallelism, which takes it, or a "
                "pipeline or ZeRO"
            )


def check_no_gradients(model: nn.Module, axis: Axis) -> None:
    """Raises ValueError on all ranks if one has a gradient; a rank alone would leave the others waiting."""
    with_gradient = next((name for name, p in model.named_parameters() if p.grad is not None), None)
    has_none = torch.tensor(int(with_gradient is None), device=this_device())
    if axis.size > 1:
        dist.all_reduce(has_none, dist.ReduceOp.MIN, group=axis.group)
    if with_gradient is not None or not bool(has_none):
        raise ValueError(
            f"{with_gradient or f'on another rank of {axis.name}, a parameter'} has a gradient, which would "
            "not fit its shard; shard the model before a backward, or call model.zero_grad() first"
        )
