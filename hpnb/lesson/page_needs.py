"""What each page could train, the best first, and what that takes: predicted bytes and FLOPs of a rank.

    NEEDS["05"].peak(Trial(GPT2_SIZES["355m"], 2), ranks=4, value_bytes=2)  bytes of the fullest rank
    NEEDS["05"].flops(Trial(GPT2_SIZES["355m"], 2), ranks=4)                 of one rank, over the page

Bytes come from `hpnb.theory`; added to them is what a page keeps beside one step: several pipelines that take
turns, buckets, the full model that a rank builds before it is split. FLOPs are the forward and backward times
the number of steps that a page runs, counted in its programs. To give a page another experiment, add a line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hpnb import theory
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2_SIZES, SIZES, GPT2Size, ViTSize
from hpnb.theory import LINKS, LayerCost, LayoutTask

VIT_S16 = ViTSize(hidden=384, layers=12, heads=6, mlp=1536, patch=16, image=224)
SMALL_VIT = ViTSize(hidden=256, layers=8, heads=8, mlp=1024, patch=8, image=32)
PIPELINE_MICROBATCHES = 8  # of notebooks 02, 04, 06 and 08
_CLASSES = 3
_GELU_COPIES = {ViTSize: 2, GPT2Size: 5}  # of an MLP's inner values, see `theory.activation_terms`


@dataclass(frozen=True)
class Trial:
    """A model that a page could train, and its batch: see `PageNeed.counts`."""

    size: ViTSize | GPT2Size
    batch: int


@dataclass(frozen=True)
class PageNeed:
    """What one page, or one of its experiments, could train.

    Attributes:
        counts: what a trial's batch counts, such as "images a rank".
        laptop: trained on a CPU.
        trials: for GPUs, the best first.
        peak: (trial, ranks, bytes of a value) -> bytes of the fullest rank.
        flops: (trial, ranks) -> FLOPs of a rank on the whole page.
        seconds: of computing that the page may take.
        splits_heads: whether the page needs a head for each rank.
        laptop_few: a smaller batch for a CPU, where a page compares messages with little computing.
        laptop_bucket_mb: of gradients, on a CPU.
    """

    counts: str
    laptop: Trial
    trials: tuple[Trial, ...]
    peak: Callable[[Trial, int, int], float]
    flops: Callable[[Trial, int], float]
    seconds: float = 90.0
    splits_heads: bool = False
    laptop_few: int = 0
    laptop_bucket_mb: float = 25.0

    def candidates(self, ranks: int) -> list[Trial]:
        """The trials that `ranks` ranks can split, and the laptop's after them."""
        least = ranks if self.splits_heads else 1
        able = [trial for trial in self.trials if least <= trial.size.heads]
        return [*able, self.laptop]

    def batch_words(self, trial: Trial) -> str:
        """ "2 x 1,024 tokens a rank", "64 images"."""
        if not isinstance(trial.size, GPT2Size):
            return f"{trial.batch:,} {self.counts}"
        return f"{trial.batch} x {trial.size.length:,} tokens {self.counts}"


# --- what models take ---------------------------------------------------------------------------------


def parameters_of(size: ViTSize | GPT2Size) -> int:
    """Of the model that a page trains; a ViT has three classes."""
    return size.parameters(_CLASSES) if isinstance(size, ViTSize) else size.parameters()


def _flops(size: ViTSize | GPT2Size, batch: int) -> float:
    """Forward and backward of `batch` images or sequences."""
    if isinstance(size, ViTSize):
        return size.training_flops(batch, _CLASSES)
    return size.training_flops(batch)


def _kept(size: ViTSize | GPT2Size, batch: int, value_bytes: int, ranks: int = 1) -> float:
    """Activations of one block, split over `ranks` ranks by tensor parallelism."""
    block = size.block(batch, bytes_per_value=value_bytes)
    return theory.activation_bytes(block, "1d", ranks, mlp_copies=_GELU_COPIES[type(size)])


def _flow(size: ViTSize | GPT2Size, batch: int, value_bytes: int) -> float:
    """Temporary bytes of a block's backward: three of the MLP's inner values, two of the block's."""
    block = size.block(batch)
    return value_bytes * block.batch * block.sequence * (3 * block.mlp_ratio + 2) * block.hidden


def _logits(size: ViTSize | GPT2Size, batch: int) -> float:
    """Logits and two gradients of them in float32, where there is a vocabulary."""
    return 12.0 * size.vocab_size * batch * size.length if isinstance(size, GPT2Size) else 0.0


def _serial_step(size: ViTSize | GPT2Size, batch: int, value_bytes: int) -> float:
    """The peak of a step of one rank that holds everything, with AdamW."""
    vocabulary, positions = (
        (size.vocab_size, size.length) if isinstance(size, GPT2Size) else (_CLASSES, size.tokens)
    )
    block, copies = size.block(batch, bytes_per_value=value_bytes), _GELU_COPIES[type(size)]
    return theory.step_memory(block, size.layers, vocabulary, positions, mlp_copies=copies).peak


# --- a page's fullest rank ----------------------------------------------------------------------------


def _step_of_one_rank(trial: Trial, ranks: int, value_bytes: int) -> float:
    """01: every rank trains the whole model on its own images."""
    return _serial_step(trial.size, trial.batch, value_bytes)


def _replica(trial: Trial, ranks: int, value_bytes: int) -> float:
    """01's sweep and its causes: three models without an optimizer take turns, two of them with buckets, and
    one message of a model's size is reduced in turn with them or beside them."""
    size = trial.size
    states = (3 * 2 + 2 + 1) * value_bytes * parameters_of(size)
    return (
        states + size.layers * _kept(size, trial.batch, value_bytes) + _flow(size, trial.batch, value_bytes)
    )


def _pipelines(trial: Trial, ranks: int, value_bytes: int) -> float:
    """02: five schedules take turns, and GPipe holds the activations of all microbatches."""
    size, microbatch = trial.size, -(-trial.batch // PIPELINE_MICROBATCHES)
    stage = -(-size.layers // ranks)
    states = value_bytes * parameters_of(size) * (1 + 5 * 2 * stage / size.layers)
    return states + stage * _kept(size, trial.batch, value_bytes) + 2 * _flow(size, microbatch, value_bytes)


def _two_tensor_blocks(trial: Trial, ranks: int, value_bytes: int) -> float:
    """03: models of one and of two blocks, split over all ranks."""
    size = trial.size
    states = 3 * value_bytes * parameters_of(replace(size, layers=2))
    return (
        states + 2 * _kept(size, trial.batch, value_bytes, ranks) + 2 * _flow(size, trial.batch, value_bytes)
    )


def _modes(trial: Trial, ranks: int, value_bytes: int) -> float:
    """03: three modes of a block take turns, and each keeps its input and that input's gradient."""
    size = trial.size
    states = 2 * value_bytes * parameters_of(size) * (1 + 3 / 4)
    inputs = 3 * 2 * value_bytes * trial.batch * size.block().sequence * size.hidden
    kept = size.layers * _kept(size, trial.batch, value_bytes, 4)
    return states + inputs + kept + _flow(size, trial.batch, value_bytes)


def _one_axis(trial: Trial, ranks: int, value_bytes: int) -> float:
    """04: the same batch along dp, pp and tp; the fullest of the three."""
    size, parameters, blocks = trial.size, parameters_of(trial.size), trial.size.layers
    share, microbatch = -(-trial.batch // ranks), -(-trial.batch // PIPELINE_MICROBATCHES)
    flying = min(ranks, PIPELINE_MICROBATCHES) * -(-blocks // ranks)
    built = value_bytes * parameters
    dp = 3 * built + blocks * _kept(size, share, value_bytes) + _flow(size, share, value_bytes)
    pp = (
        built * (1 + 2 / ranks)
        + flying * _kept(size, microbatch, value_bytes)
        + 2 * _flow(size, microbatch, value_bytes)
    )
    tp = built * (1 + 2 / ranks) + blocks * _kept(size, trial.batch, value_bytes, ranks)
    return max(dp, pp, tp + _flow(size, trial.batch, value_bytes))


def _unsharded(trial: Trial, ranks: int, value_bytes: int) -> float:
    """05: ZeRO stage 0 with nothing recomputed, and the logits of five steps that a list keeps alive."""
    size = trial.size
    assert isinstance(size, GPT2Size)
    return (
        _serial_step(size, trial.batch, value_bytes)
        + 5 * value_bytes * size.vocab_size * trial.batch * size.length
    )


def _gpt2_pipelines(trial: Trial, ranks: int, value_bytes: int) -> float:
    """06: pipelines with other cuts or schedules take turns. They share one full model, and one at a time has
    gradients. Interleaving holds up to half as much again in flight, and a split backward keeps the gradient
    of each waiting microbatch's logits."""
    size, stage = trial.size, -(-trial.size.layers // ranks)
    assert isinstance(size, GPT2Size)
    table = size.vocab_size * size.hidden
    states = value_bytes * (parameters_of(size) + stage * size.block().parameters + table)
    flying = 1.5 * min(ranks, PIPELINE_MICROBATCHES) * stage * _kept(size, trial.batch, value_bytes)
    waiting = 2.0 * ranks * value_bytes * size.vocab_size * trial.batch * size.length
    return states + flying + _logits(size, trial.batch) + waiting


def _tensor_ends(trial: Trial, ranks: int, value_bytes: int) -> float:
    """07: two blocks, embedding and head, split over all ranks; logits gathered once for comparison."""
    size = trial.size
    states = 3 * value_bytes * parameters_of(replace(size, layers=2))
    kept = 2 * _kept(size, trial.batch, value_bytes, ranks) + _flow(size, trial.batch, value_bytes)
    return states + kept + 2 * _logits(size, trial.batch) / ranks


def _layouts(trial: Trial, ranks: int, value_bytes: int) -> float:
    """08: the fullest layout, by `theory.layout_memory`; layers are timed for four microbatches at once."""
    size, rows = trial.size, PIPELINE_MICROBATCHES * trial.batch
    assert isinstance(size, GPT2Size)
    nothing = LayerCost(0.0, 0.0)
    block = size.block(bytes_per_value=value_bytes)
    task = LayoutTask(
        block, size.layers, size.vocab_size, rows, nothing, nothing, 0.0, next(iter(LINKS.values()))
    )
    layouts = [*theory.task_layouts(task, ranks, trial.batch), ParallelLayout(ranks, zero_stage=3)]
    timed = (
        value_bytes * parameters_of(size)
        + _kept(size, 4 * trial.batch, value_bytes)
        + _logits(size, 4 * trial.batch)
    )
    built = value_bytes * parameters_of(size)
    return max(timed, built + max(theory.layout_memory(task, layout) for layout in layouts))


def _steps(count: float, split: bool, per_batch: float = 1.0) -> Callable[[Trial, int], float]:
    """FLOPs of `count` steps of `per_batch` times a trial's batch; `split` over the ranks or on each."""
    return lambda trial, ranks: count * _flops(trial.size, trial.batch) * per_batch / (ranks if split else 1)


def _block_steps(count: float) -> Callable[[Trial, int], float]:
    """FLOPs of `count` forwards and backwards of the model's blocks, split over the ranks."""

    def flops(trial: Trial, ranks: int) -> float:
        size = trial.size
        return count * size.layers * size.block(trial.batch).training_flops / ranks

    return flops


# --- what there is to choose from ----------------------------------------------------------------------


def _vits(*choices: tuple[str, int]) -> tuple[Trial, ...]:
    sizes = {**SIZES, "s16": VIT_S16}
    return tuple(Trial(sizes[name], images) for name, images in choices)


def _gpt2s(*choices: tuple[str, int, int]) -> tuple[Trial, ...]:
    """(name, sequences, tokens of each)."""
    sizes = {
        **GPT2_SIZES,
        "451m": GPT2Size(1600, 12, 25, 6400, 50257, 1024),
        "302m": GPT2Size(1280, 12, 20, 5120, 50257, 1024),
        "254m": GPT2Size(1024, 16, 16, 4096, 50257, 1024),
        "81m": GPT2Size(768, 6, 12, 3072, 50257, 1024),
        "64m": GPT2Size(512, 12, 8, 2048, 50257, 1024),
        "45m": GPT2Size(512, 6, 8, 2048, 50257, 1024),
        "41m": GPT2Size(384, 12, 8, 1536, 50257, 1024),
    }
    return tuple(Trial(replace(sizes[name], length=length), rows) for name, rows, length in choices)


def _wide_vits(layers: int, head_width: int, *choices: tuple[int, int]) -> tuple[Trial, ...]:
    """(hidden size, images): a few blocks, so wide that a GPU computes for longer than launching takes."""
    return tuple(Trial(ViTSize(h, layers, h // head_width, 4 * h, 16, 224), images) for h, images in choices)


_ONE_RANK = [(name, n) for name in ("l16", "b16", "s16") for n in (64, 32, 16)]
_FULL_BATCH = [("l16", 1024), ("l16", 512), ("l16", 256), ("l16", 128), ("b16", 256), ("b16", 128),
               ("l16", 64), ("b16", 64), ("b16", 32), ("b16", 16)]  # fmt: skip
_ROWS = [("1.5b", 4, 1024), ("1.5b", 2, 1024), ("774m", 4, 1024), ("774m", 2, 1024), ("774m", 1, 1024),
         ("355m", 4, 1024), ("355m", 2, 1024), ("355m", 1, 1024), ("124m", 2, 1024), ("124m", 1, 1024),
         ("124m", 1, 512), ("124m", 1, 256), ("45m", 1, 1024), ("45m", 1, 512), ("45m", 1, 256),
         ("45m", 1, 128)]  # fmt: skip
_AT_MOST_TWO = [choice for choice in _ROWS if choice[1] <= 2]
# Twelve blocks or more: 08 splits them into eight stages, and into four with two chunks each.
# Eight ranks divide the largest evenly, 16 blocks of 16 heads. If they share several GPUs, messages are
# copied through the node's memory, and with a larger model or microbatch that takes longer than the page may.
_DEEP = [("254m", 1, 1024), *(c for c in _AT_MOST_TWO if c[0] == "124m"),
         ("64m", 2, 1024), ("64m", 1, 1024), ("64m", 1, 512), ("64m", 1, 256), ("41m", 1, 512),
         ("41m", 1, 256), ("41m", 1, 128)]  # fmt: skip
# Enough tokens a rank, and blocks wide enough, that a GPU computes for longer than its CPU needs to launch
# the operators: a few wide blocks of many tokens before many narrow ones.
_MANY_TOKENS = [("1.5b", 4, 1024), ("774m", 4, 1024), ("451m", 4, 1024), ("451m", 3, 1024),
                ("355m", 8, 1024), ("355m", 4, 1024), ("355m", 2, 1024), ("124m", 8, 1024),
                ("124m", 4, 1024), ("124m", 2, 1024), ("124m", 1, 1024), ("81m", 1, 1024),
                ("124m", 1, 512), ("124m", 1, 256),
                *(choice for choice in _AT_MOST_TWO if choice[0] == "45m")]  # fmt: skip

# By the FLOPs of a block, too: if launching them takes longest, a head and a block cost nearly the same.
_WIDE_STAGES = [("1.5b", 4, 1024), ("774m", 4, 1024), ("451m", 4, 1024), ("451m", 3, 1024),
                ("451m", 2, 1024), ("451m", 1, 1024), ("302m", 1, 1024), ("451m", 1, 512),
                ("302m", 1, 512), *(c for c in _ROWS if c[0] in ("124m", "45m") and c[1] == 1)]  # fmt: skip

NEEDS: dict[str, PageNeed] = {
    "01": PageNeed(
        "images a rank", Trial(replace(SMALL_VIT, layers=4), 16), _vits(*_ONE_RANK), _step_of_one_rank,
        _steps(60, False), 40.0, laptop_few=2, laptop_bucket_mb=2.0,
    ),
    "01.wide": PageNeed(
        "images a rank", Trial(replace(SMALL_VIT, layers=1), 64),
        _wide_vits(6, 128, *((h, n) for h in (4096, 2048, 1024, 512) for n in (64, 32, 16))), _replica,
        _steps(72, False), 60.0,
    ),
    "02": PageNeed(
        "images", Trial(SMALL_VIT, 16), _vits(*_FULL_BATCH), _pipelines, _steps(244, True)
    ),
    "03": PageNeed(
        "images", Trial(SMALL_VIT, 64), _vits(*_FULL_BATCH), _two_tensor_blocks,
        lambda trial, ranks: 60 * _flops(replace(trial.size, layers=1), trial.batch) / ranks, 30.0,
        splits_heads=True,
    ),
    "03.modes": PageNeed(
        "images", Trial(replace(SMALL_VIT, heads=16, layers=1), 32),
        _wide_vits(2, 64, (4096, 256), (4096, 128), (2048, 256), (2048, 128), (1024, 256), (1024, 128),
                   (1024, 64), (512, 128), (256, 64)), _modes,
        _block_steps(40), 60.0,
    ),
    "04": PageNeed(
        "images", Trial(ViTSize(128, 4, 4, 512, 8, 32), 64),
        _vits(*(c for c in _FULL_BATCH if 32 <= c[1] <= 512)), _one_axis,
        _steps(42, True), splits_heads=True,
    ),
    "05": PageNeed(
        "a rank", Trial(GPT2Size(192, 8, 6, 768, 1511, 64), 2), _gpt2s(*_MANY_TOKENS), _unsharded,
        _steps(100, False), laptop_bucket_mb=2.0,
    ),
    "06": PageNeed(
        "a microbatch", Trial(GPT2Size(128, 9, 4, 512, 8009, 48), 2), _gpt2s(*_WIDE_STAGES),
        _gpt2_pipelines,
        _steps(120, True, PIPELINE_MICROBATCHES),
    ),
    "07": PageNeed(
        "", Trial(GPT2Size(400, 2, 25, 1600, 12_601, 256), 1), _gpt2s(*_ROWS), _tensor_ends,
        lambda trial, ranks: 60 * _flops(replace(trial.size, layers=2), trial.batch) / ranks,
        splits_heads=True,
    ),
    "08": PageNeed(
        "a microbatch", Trial(GPT2Size(128, 8, 8, 512, 1009, 64), 2), _gpt2s(*_DEEP), _layouts,
        _steps(90, True, PIPELINE_MICROBATCHES), 60.0, splits_heads=True,
    ),
}  # fmt: skip
