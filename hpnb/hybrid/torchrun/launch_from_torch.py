"""Many machines, one program: `torchrun` runs a copy of it for every rank, and each copy calls this first.

    torchrun --standalone --nproc_per_node 4 train.py                                       # one machine
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint first:29500 train.py

A copy learns from its environment who it is: RANK of WORLD_SIZE over all machines, LOCAL_RANK of
LOCAL_WORLD_SIZE on its own, and MASTER_ADDR and MASTER_PORT, where all of them meet.
"""

from __future__ import annotations

import atexit
import os
import random
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from hpnb.hybrid.colossal_config import plugin_options
from hpnb.hybrid.torchrun.network_interface import name_interface
from hpnb.hybrid.torchrun.restart_store import fresh
from hpnb.ranks import DeviceChoice, choose_device
from hpnb.ranks.current_rank import current
from hpnb.ranks.gpu_limits import limit_gpu_memory
from hpnb.ranks.shared_gpu_group import share_gpu

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_SEEDS = 2**32  # numpy takes no more


def launch_from_torch(config: Any = None, backend: str | None = None, seed: int = 1024) -> None:
    """Join the ranks that torchrun has started; then hpnb.rank(), world_size() and device() are right.

    Where every rank of a machine can have a GPU it gets the one of its LOCAL_RANK, over NCCL. On one machine
    with fewer GPUs than ranks, ranks share the GPUs. On several such machines, and without GPUs, they compute
    on the CPU, over gloo. Without torchrun a program is one rank alone. A rank that is in a group already is
    only seeded anew.

    Args:
        config: of the old tutorials; may be left out, None or empty.
        backend: "nccl" insists on GPUs, "gloo" on the CPU.
        seed: of python, numpy and torch, alike on all ranks, so that they build the same model. What is to
            differ from rank to rank (dropout) is seeded again by `Booster.boost`.

    Raises:
        ValueError: config asks for something, too few GPUs for NCCL, another backend than ranks have already,
            or a seed outside 0 to 2**32 - 1.
        RuntimeError: the environment has RANK, WORLD_SIZE or LOCAL_RANK, and lacks another of them or
            MASTER_ADDR or MASTER_PORT; or some machines compute on GPUs and others on the CPU.
    """
    if config:
        raise ValueError(_instead(config))
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed={seed} must be from 0 to {_SEEDS - 1}, which is what numpy takes")
    if backend not in (None, "nccl", "gloo"):
        raise ValueError(f"backend={backend!r} is not known; use 'nccl', 'gloo', or None for what fits")
    if not dist.is_initialized():
        _join(backend)
    elif current.device is None:  # by somebody else's init_process_group
        current.device = _device("cuda" if "nccl" in _backends() else "cpu", torch.cuda.device_count())
    if backend is not None and backend not in _backends():
        raise ValueError(
            f"backend={backend!r}, but the ranks are joined already over {_backends()}; leave it out"
        )
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _join(backend: str | None) -> None:
    names = (*RANK_VARIABLES, *ADDRESS_VARIABLES)
    environment = {name: os.environ[name] for name in names if name in os.environ}
    if environment.keys().isdisjoint(RANK_VARIABLES):
        rank, world, locals_ = 0, 1, 1
        store: Store = HashStore()
    else:
        if missing := [name for name in names if name not in environment]:
            raise RuntimeError(
                f"the environment has {', '.join(environment)} and lacks {', '.join(missing)}; start the "
                "program with torchrun, which sets all of them, or with none of them set as one rank alone"
            )
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        locals_ = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    choice = _choose(backend, locals_, world)
    if world > 1 or environment.keys() >= set(RANK_VARIABLES):
        store, rank, world = next(rendezvous("env://", rank, world))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it outlives the ranks
            store = fresh(store, rank, world)
        _agree(store, rank, choice)
    if world == locals_:  # ranks of one machine meet on its loopback, whatever its host name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    else:
        name_interface(store, rank, world)
    if not choice.shares_gpus:  # streams that share a hardware queue wait for each other: give each its own
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        # A pipeline's first step sends over NCCL; every rank would warn that such sends wait for one another.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # no rank waits for another one in a capture
    device = _device(choice.device, choice.gpus)
    gpu = device if device.type == "cuda" and not choice.shares_gpus else None
    if choice.shares_gpus:
        current.device = device
        share_gpu()
        limit_gpu_memory(device, sum(other % choice.gpus == device.index for other in range(locals_)))
    dist.init_process_group(choice.backend, store=store, rank=rank, world_size=world, device_id=gpu)
    current.device = device
    atexit.register(_leave)


def _choose(backend: str | None, ranks: int, world: int) -> DeviceChoice:
    """For the `ranks` of this machine, of `world` in all."""
    gpus = torch.cuda.device_count()
    if backend == "nccl" and gpus < ranks:
        fits = f"--nproc_per_node {gpus}, or " if gpus else ""
        raise ValueError(
            f"backend='nccl' needs {ranks} GPUs for the {ranks} ranks of this machine, which has {gpus}; use "
            f"{fits}backend='gloo'"
        )
    # The buffers of ranks that share GPUs do not reach other machines.
    on_cpu = backend == "gloo" or (gpus < ranks and ranks < world)
    choice = choose_device("cpu" if on_cpu else "auto", ranks)
    if backend is None and 0 < gpus < ranks and os.environ.get("LOCAL_RANK") == "0":
        on_what = "all of them compute on the CPU" if on_cpu else "ranks share GPUs"
        print(f"hpnb: {ranks} ranks here and {gpus} GPUs, so {on_what}", file=sys.stderr)
    return choice


def _agree(store: Store, rank: int, choice: DeviceChoice) -> None:
    """Ranks that join over different backends would wait for each other without end."""
    if rank == 0:
        store.set("hpnb/device", choice.device)
    first = store.get("hpnb/device").decode()
    if first != choice.device:
        raise RuntimeError(
            f"rank 0 computes on {first}, and rank {rank} has to on {choice.device}, for its machine has "
            f"{torch.cuda.device_count()} GPUs for {choice.ranks} ranks; backend='gloo' would work on both"
        )


def _device(kind: str, gpus: int) -> torch.device:
    if kind != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus)
    torch.cuda.set_device(device)
    return device


def _backends() -> str:
    return str(dist.get_backend_config())


def _leave() -> None:
    """At the end of the program. After an error others may be waiting for this rank: then do not wait too."""
    if dist.is_initialized() and current.device is not None and current.device.type == "cuda":
        failed = getattr(sys, "last_value", None) is not None
        if not failed:
            dist.destroy_process_group()


def _instead(config: Any) -> str:
    """One sentence: how to say here what `config` says."""
    if not isinstance(config, dict):
        return f"config={config!r} is not read: pass what it says to HybridParallelPlugin, and leave it out"
    options = ", ".join(f"{name}={value!r}" for name, value in plugin_options(config).items())
    return (
        f"config with {', '.join(map(str, config))} is not read here: make the plugin of it after this call, "
        f"by HybridParallelPlugin.from_config(config), which is HybridParallelPlugin({options}), pass "
        "Trainer(accumulation=...) and prepare_dataloader(batch_size=...), and leave config out"
    )
