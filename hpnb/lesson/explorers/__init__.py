"""The explorers of the series, one a notebook: a formula, its knobs, and a challenge."""

from hpnb.lesson.explorers.activation_memory import kept_by_rank
from hpnb.lesson.explorers.all_reduce_cost import all_reduce_cost
from hpnb.lesson.explorers.cluster_layouts import cluster_layouts
from hpnb.lesson.explorers.expert_layer import expert_layer
from hpnb.lesson.explorers.layout_choice import layout_choice
from hpnb.lesson.explorers.layouts_on_nodes import layouts_on_nodes
from hpnb.lesson.explorers.overlapped_backward import overlapped_backward
from hpnb.lesson.explorers.pipeline_bubble import pipeline_bubble
from hpnb.lesson.explorers.ring_or_ulysses import ring_or_ulysses
from hpnb.lesson.explorers.sharded_step import sharded_step
from hpnb.lesson.explorers.tensor_modes import tensor_modes
from hpnb.lesson.explorers.uneven_layers import uneven_layers

__all__ = [
    "all_reduce_cost",
    "cluster_layouts",
    "expert_layer",
    "kept_by_rank",
    "layout_choice",
    "layouts_on_nodes",
    "overlapped_backward",
    "pipeline_bubble",
    "ring_or_ulysses",
    "sharded_step",
    "tensor_modes",
    "uneven_layers",
]
