"""Context parallelism: the tokens of one sequence on several ranks (`mesh.cp`).

context = hpnb.context_parallel.parallelize(model, mesh.cp, "ring")
outputs = model(**context.shard_batch(batch))

shard_patches    the tokens of a ViT, whose class token every rank's classifier gets
shard_timm_vit   the same for a ViT of timm
shard_sequence   which tokens a rank has: contiguous, or zigzag for equal causal work
visibility       which keys a query sees, and which blocks are computed
blockwise        attention to one block of keys, and how two blocks are merged
fused            the same by PyTorch's fused kernels
ring             keys and values travel, queries stay
all_gather       every rank has all keys and values for the time of an attention
ulysses          all-to-all: heads are sharded instead of tokens
parallelize      a model of transformers, its batches and its loss
"""

from hpnb.context_parallel.all_gather import all_gather_attention
from hpnb.context_parallel.blockwise import block_forward, merge_blocks
from hpnb.context_parallel.fused import BlockAttention
from hpnb.context_parallel.parallelize import ContextParallel, parallelize
from hpnb.context_parallel.ring import Ring, ring_attention
from hpnb.context_parallel.shard_sequence import Chunk, shard_batch, split_sequence, token_places
from hpnb.context_parallel.ulysses import ulysses_attention
from hpnb.context_parallel.visibility import Visibility

__all__ = [
    "BlockAttention",
    "Chunk",
    "ContextParallel",
    "Ring",
    "Visibility",
    "all_gather_attention",
    "block_forward",
    "merge_blocks",
    "parallelize",
    "ring_attention",
    "shard_batch",
    "split_sequence",
    "token_places",
    "ulysses_attention",
]
