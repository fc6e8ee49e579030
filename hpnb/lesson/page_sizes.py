"""How large a model and a batch a page trains: the largest of its list that fits this machine.

    pool = hpnb.Ranks(N)
    sizes = lesson.choose_sizes("05", pool)
    sizes.size, sizes.batch, sizes.dtype         # GPT2Size, rows of a rank, torch.bfloat16
    print(sizes)     # GPT-2 medium (355 M parameters), ...: predicted peak 10.8 of 19.1 GB free a rank

A page asks for sizes by its number, and `hpnb.lesson.page_needs` lists what it could train, the best first.
The first entry is taken whose predicted peak on the fullest rank is at most 80 % of a rank's memory and whose
predicted computing, at half the rate of the machine's matrix products, is within the page's time. On a CPU it
is the small model that the page has always trained there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

import hpnb
from hpnb.lesson.page_needs import NEEDS, VIT_S16, Trial, parameters_of
from hpnb.lesson.rank_share import RankShare, measure_share
from hpnb.models import GPT2_SIZES, SIZES, GPT2Size, ViTSize
from hpnb.precision import LossScaler, PrecisionPolicy, policy

FILL = 0.8  # of a rank's memory: the rest is for workspaces, fragmentation, and what a prediction leaves out
EFFICIENCY = 0.5  # of the rate of large matrix products, which a training step reaches

_NAMES: dict[object, str] = {
    SIZES["b16"]: "ViT-B/16",
    VIT_S16: "ViT-S/16",
    SIZES["l16"]: "ViT-L/16",
    GPT2_SIZES["124m"]: "GPT-2 small",
    GPT2_SIZES["355m"]: "GPT-2 medium",
    GPT2_SIZES["774m"]: "GPT-2 large",
    GPT2_SIZES["1.5b"]: "GPT-2 XL",
}


@dataclass(frozen=True)
class PageSizes:
    """What a page trains on this machine.

    Attributes:
        need: the page's number, "05", or one of its experiments, "01.wide".
        trial: the model and the batch.
        share: what a rank may use.
        peak: predicted bytes of the fullest rank; 0 on a CPU.
        seconds: predicted seconds of computing on the page; 0 on a CPU.
    """

    need: str
    trial: Trial
    share: RankShare
    peak: float = 0.0
    seconds: float = 0.0

    @property
    def size(self) -> Any:
        return self.trial.size

    @property
    def batch(self) -> int:
        """What the need counts: images a rank or in all, rows of a rank or of a microbatch."""
        return self.trial.batch

    @property
    def few(self) -> int:
        """A batch that leaves little computing beside the messages: on a GPU `batch` is one."""
        return (NEEDS[self.need].laptop_few if self.device == "cpu" else 0) or self.batch

    @property
    def bucket_mb(self) -> float:
        """Of gradients: PyTorch's 25 MB, or an eighth of a small model's."""
        if self.device == "cpu":
            return NEEDS[self.need].laptop_bucket_mb
        return min(25.0, self.dtype.itemsize * parameters_of(self.size) / 8 / 2**20)

    @property
    def laptop(self) -> Any:
        """The size that this page trains on a CPU."""
        return NEEDS[self.need].laptop.size

    @property
    def device(self) -> str:
        return self.share.device

    @property
    def dtype(self) -> torch.dtype:
        return self.share.dtype

    @property
    def precision(self) -> PrecisionPolicy:
        """fp32 on a CPU, else bf16 or fp16 with master weights."""
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        return policy(names[self.dtype])

    def scaler(self) -> LossScaler | None:
        """What the loss is multiplied by in fp16; None in another dtype."""
        return LossScaler() if self.precision.scaled else None

    @property
    def fits(self) -> bool:
        """Whether even this choice is predicted to fit; the smallest one is taken if nothing does."""
        return self.peak <= FILL * self.share.memory

    def __str__(self) -> str:
        batch = NEEDS[self.need].batch_words(self.trial).strip()
        line = f"{model_name(self.size)}, {batch} in {str(self.dtype).removeprefix('torch.')}"
        if self.device == "cpu":
            return f"{line}: small, because {self.share.ranks} ranks train on a CPU"
        line += f": predicted peak {self.peak / 1e9:.1f} of {self.share.memory / 1e9:.1f} GB free a rank"
        return line + ("" if self.fits else ", which will not fit")


def choose_sizes(need: str, ranks: hpnb.Ranks | RankShare | int) -> PageSizes:
    """The first entry of the page's list that fits.

    Args:
        need: a key of `hpnb.lesson.page_needs.NEEDS`.
        ranks: the page's pool, whose ranks are asked; a number of ranks to start for that; or a RankShare.

    Raises:
        ValueError: no such need.
    """
    if need not in NEEDS:
        raise ValueError(f"no sizes are listed for {need!r}; use one of {', '.join(NEEDS)}")
    listed, share = NEEDS[need], ranks if isinstance(ranks, RankShare) else measure_share(ranks)
    if share.device == "cpu":
        return PageSizes(need, listed.laptop, share)
    choices = [predict_trial(need, trial, share) for trial in listed.candidates(share.ranks)]
    affordable = (sizes for sizes in choices if sizes.fits and sizes.seconds <= listed.seconds)
    return next(affordable, choices[-1])


def predict_trial(need: str, trial: Trial, share: RankShare) -> PageSizes:
    """What a trial takes on the ranks of `share`."""
    listed = NEEDS[need]
    peak = listed.peak(trial, share.ranks, share.dtype.itemsize)
    rate = EFFICIENCY * share.flop_rate
    seconds = listed.flops(trial, share.ranks) / rate if math.isfinite(rate) else 0.0
    return PageSizes(need, trial, share, peak, seconds)


def model_name(size: ViTSize | GPT2Size) -> str:
    """ "GPT-2 medium (355 M parameters)", or the shape of a model that has no name."""
    kind, count = "ViT" if isinstance(size, ViTSize) else "GPT-2", parameters_of(size)
    named = _NAMES.get(size, f"{kind} of {size.layers} blocks of {size.hidden}")
    return f"{named} ({count / 1e6:,.{0 if count > 1e8 else 1}f} M parameters)"
