"""The state of a ZeRO optimizer as if it had run on one process: gathered to be saved, cut to be loaded.

    exp_avg of a parameter (4, 3)     rank 0 [0, 8)   rank 1 [8, 12)      pieces
                                      -> (4, 3), on every rank            all-gather, bucket by bucket
    step of a parameter               a number, equal wherever there is a piece

What has the shape of a piece is cut as the piece is. Anything else (a counter, a row of a factored moment)
goes with the parameter as it is. So a state loads into another number of ranks, another stage, or a plain
optimizer of PyTorch, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hpnb.background import Background
from hpnb.data_parallel.zero_bucket import ZeroBucket
from hpnb.data_parallel.zero_checks import group_options

State = dict[str, Any]
MASTER = "hpnb.master"  # a master travels with the state of its parameter, and is saved beside it


@dataclass(frozen=True)
class _Dealt:
    """In place of a tensor that is cut as the pieces are."""

    dtype: torch.dtype


def gather(
    bucket: ZeroBucket, parts: Sequence[torch.Tensor | None], dtype: torch.dtype, background: Background
) -> list[torch.Tensor]:
    """One whole tensor a parameter, from what every rank has for its pieces. All ranks call it."""
    share = torch.zeros(bucket.shares.share, dtype=dtype, device=bucket.flat.device)
    for view, part in zip(bucket.views(share), parts, strict=True):
        if part is not None:
            view.copy_(part.view_as(view))
    flat = share.new_empty(bucket.shares.numel)
    background.all_gather(flat, share).wait()
    return bucket.shares.views(flat)


def whole_state(
    optimizer: Optimizer,
    buckets: Sequence[ZeroBucket],
    numbers: Mapping[nn.Parameter, int],
    background: Mapping[torch.device, Background],
) -> tuple[dict[int, State], dict[int, torch.Tensor]]:
    """States and masters by number of the parameter, tensors whole and on the CPU, on every rank."""
    mine = _by_piece(optimizer)
    told: dict[int, State] = {}
    for bucket in buckets:
        for p, piece in zip(bucket.parameters, bucket.pieces, strict=True):
            if piece is not None and mine[piece]:
                told[numbers[p]] = {key: _told(value, piece) for key, value in mine[piece].items()}
    known = _everyones(told, buckets[0])
    for bucket in buckets:
        here = [known.get(numbers[p], {}) for p in bucket.parameters]
        for key in dict.fromkeys(key for state in here for key in state):
            kinds = [state[key].dtype for state in here if isinstance(state.get(key), _Dealt)]
            if not kinds:
                continue
            parts = [mine[piece].get(key) if piece is not None else None for piece in bucket.pieces]
            parts = [part if isinstance(state.get(key), _Dealt) else None
                     for part, state in zip(parts, here, strict=True)]  # fmt: skip
            wholes = gather(bucket, parts, kinds[0], background[bucket.flat.device])
            for state, whole in zip(here, wholes, strict=True):
                if isinstance(state.get(key), _Dealt):
                    state[key] = whole.to("cpu", copy=True)
    masters = {i: state.pop(MASTER) for i, state in sorted(known.items()) if MASTER in state}
    return {i: state for i, state in sorted(known.items()) if state}, masters


def _by_piece(optimizer: Optimizer) -> dict[torch.Tensor, State]:
    """The state of each piece, its master included."""
    local = optimizer.state_dict()
    masters = local.get("masters", {})
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
    places = [i for group in local["param_groups"] for i in group["params"]]
    return {
        piece: {**local["state"].get(i, {}), **({MASTER: masters[i]} if i in masters else {})}
        for piece, i in zip(pieces, places, strict=True)
    }


def _told(value: Any, piece: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _Dealt(value.dtype) if value.shape == piece.shape else value.to("cpu", copy=True)


def _everyones(mine: dict[int, State], bucket: ZeroBucket) -> dict[int, State]:
    """What the ranks told, by parameter; of several that have pieces of one the first."""
    everyone: list[dict[int, State]] = [mine]
    if bucket.axis.size > 1:
        everyone = [{} for _ in range(bucket.axis.size)]
        dist.all_gather_object(everyone, mine, bucket.axis.group)
    found: dict[int, State] = {}
    for told in everyone:
        for number, state in told.items():
            found.setdefault(number, dict(state))
    return found


def whole_groups(optimizer: Optimizer, given: Sequence[Mapping[str, Any]]) -> list[State]:
    """The options of each group as they are now, with the numbers of all its parameters."""
    found: list[State] = []
    first = 0
    for whole, group in zip(given, optimizer.param_groups, strict=True):
        last = first + len(whole["params"])
        names = {"param_names": whole["param_names"]} if "param_names" in whole else {}
        found.append({**group_options(group), **names, "params": list(range(first, last))})
        first = last
    return found


# --- loading -------------------------------------------------------------------------------------------


def cut_state_dict(
    state_dict: Mapping[str, Any], given: Sequence[Mapping[str, Any]], buckets: Sequence[ZeroBucket]
) -> State:
    """This rank's part of a whole state: what the optimizer over its pieces loads.

    Raises:
        ValueError: it is the state of other parameters, or of other groups of them.
    """
    saved = state_dict["param_groups"]
    found, wanted = ([len(group["params"]) for group in groups] for groups in (saved, given))
    if found != wanted:
        raise ValueError(
            f"the state to be loaded has groups of {found} parameters, and this optimizer of {wanted}; it "
            "needs the state of the same parameters in the same groups"
        )
    places = {p: (b, i) for b in buckets for i, p in enumerate(b.parameters) if b.pieces[i] is not None}
    state: dict[int, State] = {}
    masters: dict[int, torch.Tensor] = {}
    groups: list[State] = []
    count = 0
    for theirs, ours in zip(saved, given, strict=True):
        first = count
        for number, p in zip(theirs["params"], ours["params"], strict=True):
            if p in places:
                if number in state_dict["state"]:
                    state[count] = _cut(state_dict["state"][number], *places[p])
                if number in state_dict.get("masters", {}):
                    masters |= {count: _cut({MASTER: state_dict["masters"][number]}, *places[p])[MASTER]}
                count += 1
        groups.append({**group_options(theirs), "params": list(range(first, count))})
    return {"state": state, "param_groups": groups, "masters": masters}


def _cut(state: Mapping[str, Any], bucket: ZeroBucket, place: int) -> State:
    """This rank's part of the state of one parameter; it shares nothing with `state`."""
    p, piece, (start, stop) = bucket.parameters[place], bucket.pieces[place], bucket.ranges[place]
    assert piece is not None
    found: State = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            found[key] = deepcopy(value)
        elif value.shape == p.shape and (p.dim() or key != "step"):
            found[key] = value.detach().reshape(-1)[start:stop].clone().view(piece.shape)
        elif value.dim() == 0 or bucket.shares.whole:
            found[key] = value.detach().clone()
        else:
            raise ValueError(
                f"{key!r} of shape {tuple(value.shape)} cannot be cut as its parameter of shape "
                f"{tuple(p.shape)} is: it is the state of another model, or of an optimizer that needs "
                "elementwise=False"
            )
    return found
