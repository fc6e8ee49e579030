"""What a pipeline does when a schedule, the dtype of autocast or a number in the batch changes, and with a
stage that begins in place."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from replayed_graphs import with_graphs
from torch import nn

import hpnb
from hpnb import Layout, Mesh
from hpnb.pipeline_parallel import cuda_graphs, schedules
from hpnb.pipeline_parallel.capture_watch import CaptureWatch
from hpnb.pipeline_parallel.rank_schedule import RankSchedules

X = torch.arange(32, dtype=torch.float32).reshape(8, 4).sin()
LABELS = torch.arange(8) % 3


def cross_entropy(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(outputs.float(), batch["labels"])


def make_pipe(*modules: nn.Module, loss: Callable[[Any, Any], Any] = cross_entropy) -> hpnb.Pipeline:
    mesh = Mesh(Layout(pp=hpnb.world_size()))
    schedule = schedules.make("1f1b", mesh.pp.size, 2)
    return hpnb.Pipeline(nn.Sequential(*modules), mesh.pp, schedule, loss)


# --- another schedule ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "other", "reason"),
    [
        (("1f1b", 4, 8), ("zb-h1", 4, 8), "it splits backwards, and the first schedule of this Pipeline"),
        (("1f1b", 4, 8), ("1f1b", 5, 8), "its stages are others, or on other ranks"),
        (("zb-v", 4, 8, 2), ("interleaved", 4, 8, 2), "its stages are others, or on other ranks"),
    ],
)
def test_a_schedule_that_cannot_be_exchanged_says_why(first: Any, other: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RankSchedules(schedules.make(*first), 0).follow(schedules.make(*other))


def test_a_pipeline_returns_to_split_backwards() -> None:
    followed = RankSchedules(schedules.make("zb-h1", 4, 8), 0)
    for name, microbatches in (("1f1b", 8), ("zb-h1", 4), ("gpipe", 3)):
        followed.follow(schedules.make(name, 4, microbatches))
        assert followed.schedule.name == name


# --- stages that begin in place --------------------------------------------------------------------------


class ReluInPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu_()


def nested(kind: str) -> list[nn.Module]:
    torch.manual_seed(0)
    relu: nn.Module = nn.ReLU(inplace=True) if kind == "nested" else ReluInPlace()
    return [nn.Linear(4, 8), nn.Sequential(nn.Sequential(relu), nn.Linear(8, 3))]


def train_nested(kind: str) -> list[torch.Tensor]:
    pipe = make_pipe(*nested(kind))
    pipe.step({"input": X, "labels": LABELS})
    return [p.grad for p in pipe.parameters() if p.grad is not None]


def test_a_nested_first_layer_in_place_is_trained_exactly() -> None:
    alone = nn.Sequential(*nested("nested"))
    F.cross_entropy(alone(X), LABELS).backward()
    grads = [
        grad for of_rank in hpnb.launch(train_nested, "nested", ranks=2, device="cpu") for grad in of_rank
    ]
    for grad, p in zip(grads, alone.parameters(), strict=True):
        assert torch.allclose(grad, p.grad, atol=1e-6)


def test_a_first_layer_that_changes_its_input_names_itself_and_the_cut() -> None:
    with pytest.raises(
        hpnb.RankError, match=r"layer 1, the first one of stage 1, changes its input in place.*cut"
    ):
        hpnb.launch(train_nested, "function", ranks=2, device="cpu")


# --- autocast, and numbers in a batch --------------------------------------------------------------------


def train_in_two_dtypes() -> list[bool]:
    pipe = make_pipe(nn.Linear(4, 8), nn.Linear(8, 3))
    finite = []
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            finite.append(bool(pipe.step({"input": X, "labels": LABELS}).loss.isfinite()))
    return finite


def test_steps_may_have_another_dtype_of_autocast() -> None:
    assert hpnb.launch(train_in_two_dtypes, ranks=2, device="cpu") == [[True] * 3] * 2


class Crop(nn.Module):
    """Keeps as many columns as the batch says in a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.columns = nn.Linear(4, 8), 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, : self.columns]


def train_cropped() -> None:
    crop = Crop()
    mean = lambda outputs, batch: outputs.mean()  # noqa: E731
    pipe = make_pipe(crop, nn.Tanh(), loss=mean)
    for columns in (8, 4):
        crop.columns = columns
        pipe.step({"input": X, "columns": columns})


def test_a_number_that_decides_a_shape_is_refused_in_a_sentence() -> None:
    with pytest.raises(hpnb.RankError, match="no number or text of the batch may decide the shape"):
        hpnb.launch(train_cropped, ranks=2, device="cpu")


# --- what CUDA graphs would freeze -----------------------------------------------------------------------


def test_numbers_drawn_from_numpy_are_seen() -> None:
    watch = CaptureWatch(torch.device("cpu"))
    with watch.forward(0, 0):
        pass
    assert not watch.reasons
    with watch.forward(0, 0):
        np.random.rand()
    assert "draws random numbers on the CPU" in watch.reasons[0]


def train_with_number() -> list[str]:
    pipe = make_pipe(nn.Linear(4, 3))
    with_graphs(pipe)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(cuda_graphs.MAX_FORMS + 2):
            pipe.step({"input": X, "labels": LABELS, "text": "same", "step": step})
    return [str(w.message) for w in caught if "CUDA graphs" in str(w.message)]


def test_a_number_that_changes_in_every_step_is_named() -> None:
    ((message,),) = hpnb.launch(train_with_number, ranks=1, device="cpu")
    assert "a graph repeats the value of ['step'] in the batch, which changes" in message
    assert "pad" not in message
    assert "text" not in message


def lives_after_capture() -> bool:
    pipe = make_pipe(nn.Linear(4, 3))
    graphs = with_graphs(pipe)
    for _ in range(cuda_graphs.WARM_UP + 1):
        x = X.clone()
        ref = weakref.ref(x.untyped_storage())
        pipe.step({"input": x, "labels": LABELS})
        del x
    assert graphs._graphs
    return ref() is not None


def test_a_graph_does_not_keep_the_batch_of_its_capture() -> None:
    assert hpnb.launch(lives_after_capture, ranks=1, device="cpu") == [False]
