"""The configuration of Colossal-AI's first tutorials, as options of `HybridParallelPlugin`.

    CONFIG = dict(NUM_MICRO_BATCHES=4, parallel=dict(pipeline=2, tensor=dict(mode="1d", size=2)),
                  fp16=dict(mode="naive"), clip_grad_norm=1.0)
    plugin = hpnb.HybridParallelPlugin.from_config(CONFIG)      # or of runpy.run_path("config.py")

    parallel.pipeline, parallel.tensor    pp_size; tp_size, tp_mode, tp_depth
    NUM_MICRO_BATCHES, NUM_CHUNKS         num_microbatches; num_model_chunks, with pp_style="interleaved"
    fp16                                  precision "fp16", for mode "torch" "amp-fp16"; the loss scaler
    clip_grad_norm                        max_norm

The rest of such a file is read by the program: BATCH_SIZE, gradient_accumulation and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpnb.hybrid.plugin_options import SCALER_OPTIONS

_TENSOR = {"size": "tp_size", "mode": "tp_mode", "depth": "tp_depth"}


def plugin_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `config` says of the plugin, under the names of its options."""
    if "zero" in config:
        raise ValueError("config['zero'] is not read: leave it out, and pass zero_stage=1, 2 or 3")
    parallel = dict(config.get("parallel") or {})
    parallel.pop("data", None)  # what the other axes leave of the ranks
    options: dict[str, Any] = {}
    for axis, sizes in (("pipeline", {"size": "pp_size"}), ("tensor", _TENSOR)):
        asked = parallel.pop(axis, None) or {}
        options |= _renamed(asked if isinstance(asked, Mapping) else {"size": asked}, sizes, axis)
    options = {name: value for name, value in options.items() if value is not None}  # mode=None is 1d
    if parallel:
        raise ValueError(f"config['parallel'] has {', '.join(parallel)}; it takes data, pipeline and tensor")
    if "NUM_MICRO_BATCHES" in config:
        options["num_microbatches"] = config["NUM_MICRO_BATCHES"]
    if config.get("NUM_CHUNKS", 1) > 1:
        options |= {"num_model_chunks": config["NUM_CHUNKS"], "pp_style": "interleaved"}
    if "clip_grad_norm" in config:
        options["max_norm"] = config["clip_grad_norm"]
    if config.get("fp16") is not None:
        scaler = dict(config["fp16"])
        mode = scaler.pop("mode", "naive")
        mode = getattr(mode, "value", mode)  # of an AMP_TYPE
        options["precision"] = "amp-fp16" if mode == "torch" else "fp16"
        options |= _renamed(scaler, {"init_scale": "initial_scale", **{n: n for n in SCALER_OPTIONS}}, "fp16")
    return options


def _renamed(table: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    if unknown := [name for name in table if name not in names]:
        raise ValueError(f"{where} has {', '.join(unknown)}; it takes {', '.join(names)}")
    return {names[name]: value for name, value in table.items()}
