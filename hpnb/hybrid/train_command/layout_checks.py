"""What a [layout] asks of the model of a run file, and the model does not have: experts, blocks, logits in
chunks. The sentences are those that `Booster.boost` would say on the ranks."""

from __future__ import annotations

from hpnb.expert_parallel.parallelize import without_experts
from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.models.gpt2_chunked_loss import without_chunks
from hpnb.pipeline_parallel.partition import check_count

# [data] name -> the class of the model that `run_task.py` makes
_OF_DATA = {"mrpc": "GPT2ForSequenceClassification", "text": "GPT2LMHeadModel"}


def check_layout(plugin: HybridParallelPlugin, data: str, blocks: int | None, heads: int | None) -> None:
    """Raise ValueError unless the model for the data of this name fits the options of `plugin`.

    Args:
        blocks, heads: of a model that starts from scratch; None for a pretrained one, which ranks look at.
    """
    kind = _OF_DATA.get(data, "ViTForImageClassification")
    if plugin.cp_size > 1 and data == "mrpc":
        raise ValueError(
            f"[layout] cp_size = {plugin.cp_size} splits the tokens of a causal language model or of a ViT, "
            "and [data] name = 'mrpc' trains a classifier of texts; use cp_size = 1 with pp_size or tp_size, "
            "or name = 'text'"
        )
    if plugin.ep_size > 1:
        raise ValueError(f"[layout] ep_size = {plugin.ep_size}: {without_experts(kind)}")
    if plugin.selection_bias_rate:
        rate = plugin.selection_bias_rate
        raise ValueError(f"[layout] selection_bias_rate = {rate:g}: {without_experts(kind, biased=True)}")
    if plugin.loss_chunk and kind != "GPT2LMHeadModel":
        raise ValueError(f"[layout] loss_chunk = {plugin.loss_chunk}: {without_chunks(kind)}")
    if heads is not None and plugin.tp_mode == "1d" and plugin.tp_size > heads:
        raise ValueError(
            f"[layout] tp_size = {plugin.tp_size} shares the heads of the model, which has {heads}; use "
            f"tp_size = {heads} or less"
        )
    if blocks is not None and plugin.pp_size > 1 and plugin.cut == "uniform":
        try:
            check_count(blocks, plugin.pp_size * plugin.chunks, "blocks")
        except ValueError as error:
            raise ValueError(f"[layout] pp_size = {plugin.pp_size}: {error}") from None
