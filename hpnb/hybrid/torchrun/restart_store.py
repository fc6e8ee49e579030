"""A store without entries of earlier runs, for ranks that torchrun has restarted.

torchrun's agent keeps one store over all restarts. The sockets and the NCCL id that the ranks of an earlier
run have left in it look valid, so some new ranks would connect to processes that are gone. The variable
TORCHELASTIC_RESTART_COUNT does not help, because every node counts for itself. So the ranks agree on a name
that no run had before:

    every rank     writes a new random token
    rank 0         writes the list of all tokens, again whenever one has changed
    every rank     acknowledges a list that has its token
    rank 0         says go, once all have acknowledged the same list

A list that all have acknowledged has nobody's old token, and is the name.
"""

from __future__ import annotations

import hashlib
import time
import uuid

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

_PAUSE = 0.01  # seconds between two looks


def fresh(store: Store, rank: int, world: int, patience: float = 600.0) -> Store:
    """A part of `store` that no earlier ranks have written to, the same for all `world` ranks, which call it
    within `patience` seconds."""
    token, acknowledged = uuid.uuid4().hex, ""
    store.set(f"hpnb/token/{rank}", token)
    deadline = time.monotonic() + patience
    while True:
        if rank == 0:
            _write_list(store, world)
        tokens = _read(store, "hpnb/tokens").split()
        if len(tokens) == world and tokens[rank] == token:
            name = hashlib.sha256(" ".join(tokens).encode()).hexdigest()[:16]
            if name != acknowledged:
                store.set(f"hpnb/acknowledged/{rank}", acknowledged := name)
            if rank == 0 and all(_read(store, f"hpnb/acknowledged/{r}") == name for r in range(world)):
                store.set("hpnb/go", name)
            if _read(store, "hpnb/go") == name:
                return PrefixStore(f"hpnb/{name}", store)
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"rank {rank} has waited {patience:g} s for all of {world} ranks; some have not called "
                "launch_from_torch, or have ended: see what they say"
            )
        time.sleep(_PAUSE)


def _write_list(store: Store, world: int) -> None:
    tokens = [_read(store, f"hpnb/token/{r}") for r in range(world)]
    if all(tokens) and _read(store, "hpnb/tokens").split() != tokens:
        store.set("hpnb/tokens", " ".join(tokens))


def _read(store: Store, key: str) -> str:
    """What is there now; "" if there is nothing."""
    return str(store.get(key).decode()) if store.check([key]) else ""
