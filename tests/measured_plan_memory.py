"""The memory that `hpnb plan` predicts, beside what real ranks take.

    python tests/measured_plan_memory.py --out memory.json

Ranks may share one GPU: an allocator counts the bytes of its own process. Every case is built, takes two
steps and is dropped (`rank_memory.py`). Without a GPU the models are tiny, and `hpnb.record.memory` counts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rank_memory import MemoryCase, RankMemory, measure_rank

from hpnb import RankError
from hpnb.bench.harness import rank_pools
from hpnb.bench.result_files import current_commit
from hpnb.files import write_text
from hpnb.ranks.devices import choose_device
from hpnb.theory.plan_memory import rank_memory

_GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 1024, "n_layer": 24,
         "n_head": 16, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
_VIT = {"model_type": "vit", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "intermediate_size": 4096, "image_size": 224, "patch_size": 16, "num_labels": 1000}  # fmt: skip
_LLAMA = {"model_type": "llama", "hidden_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 12,
          "num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 32000,
          "max_position_embeddings": 1024, "tie_word_embeddings": False, "use_cache": False}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"gpt2": _GPT2, "vit": _VIT, "llama": _LLAMA}
TINY: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT2, "vocab_size": 1000, "n_positions": 64, "n_embd": 192, "n_layer": 12, "n_head": 6},
    "vit": {**_VIT, "hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 6,
            "intermediate_size": 768, "image_size": 64, "patch_size": 8},
    "llama": {**_LLAMA, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2,
              "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 64},
}  # fmt: skip

# model, layout, microbatches, precision. Cases that compile the same blocks stand together.
_CASES = """
gpt2  dp2-mb2                            1 bf16
gpt2  dp2-mb2-full                       1 bf16
gpt2  dp2-zero1-mb2                      2 bf16
gpt2  dp2-zero2-mb2                      1 bf16
gpt2  dp2-zero3-mb2                      1 bf16
gpt2  dp2-zero3-mb2-full                 1 bf16
gpt2  dp2-zero1-mb2-selective            1 bf16
gpt2  pp2-1f1b-mb2                       4 bf16
gpt2  tp2-mb2                            1 bf16
gpt2  tp2-mb2-sp                         1 bf16
gpt2  dp2-zero2-mb2                      1 fp32
llama dp2-mb2                            1 bf16
llama dp2-zero2-mb2-full                 1 bf16
llama dp2-zero3-mb2-full                 1 bf16
llama pp2-interleaved2-mb2               4 bf16
llama tp2-mb2                            1 bf16
llama tp2-mb2-sp                         1 bf16
llama dp2-zero3-mb2                      1 fp32
vit   dp2-mb16                           1 bf16
vit   dp2-zero3-mb16-full                1 bf16
vit   tp2-mb16-sp                        1 bf16
vit   pp2-1f1b-mb16                      4 bf16
vit   dp2-zero1-mb16                     1 fp32
gpt2  pp4-1f1b-mb2                       8 bf16
gpt2  dp2-pp2-zero1-zb-h1-mb2            4 bf16
gpt2  dp2-tp2-zero2-mb2-sp               1 bf16
gpt2  pp2-tp2-interleaved2-mb2-sp        4 bf16
llama dp2-pp2-zero3-1f1b-mb2             4 bf16
llama dp4-zero2-mb2                      2 bf16
llama pp4-interleaved3-mb2-full          4 bf16
vit   pp4-zb-h1-mb16                     8 bf16
vit   dp2-tp2-zero3-mb16                 1 bf16
"""


TIMEOUT = 120.0  # seconds for one case
OFF = 0.05  # rows that are further off get the largest tensors at the peak
STACK_LINES = 16  # of each rank of a case that failed


CASES = tuple(
    MemoryCase(model, layout, int(count), dtype)
    for model, layout, count, dtype in (line.split() for line in _CASES.strip().splitlines())
)


@dataclass(frozen=True)
class MemoryRow:
    """A case: what was predicted and what was measured, rank by rank."""

    case: MemoryCase
    predicted: tuple[dict[str, float], ...]
    ranks: tuple[RankMemory, ...]
    seconds: float

    @property
    def fullest(self) -> int:
        """The rank with the highest peak."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].peak)

    @property
    def ratio(self) -> float:
        """Predicted over measured, both of their fullest rank."""
        return max(sum(parts.values()) for parts in self.predicted) / self.ranks[self.fullest].peak


# --- the command -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelFiles:
    """Configurations as files, since ranks read the model from its name."""

    folder: Path
    sizes: dict[str, dict[str, Any]]

    def name_of(self, model: str) -> str:
        path = self.folder / f"{model}.json"
        if not path.exists():
            path.write_text(json.dumps(self.sizes[model]))
        return str(path)


def run(
    device: str = "auto",
    size: str | None = None,
    models: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    ranks: int | None = None,
    out: Path | None = None,
) -> list[MemoryRow]:
    """Print a row for each case, write all to `out`, and return them.

    Args:
        size: "full" or "tiny"; by default full on a GPU.
        models, layouts: a part of them; a case is in if its text contains one of the words.
        ranks: cases of so many ranks alone.

    Raises:
        ValueError: no such model, or no case is left.
    """
    if unknown := [model for model in models or () if model not in MODELS]:
        raise ValueError(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    cases = [
        case
        for case in CASES
        if (not models or case.model in models)
        and (not layouts or any(word in str(case) for word in layouts))
        and ranks in (None, case.parallel.world_size)
    ]
    if not cases:
        raise ValueError(f"no such case; there are {', '.join(map(str, CASES))}")
    chosen = choose_device(device, 2).device
    tiny = size == "tiny" or (size is None and chosen == "cpu")
    # One cold compilation would start as many processes as there are cores, on every rank.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    rows: list[MemoryRow] = []
    about: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M", time.gmtime()), "commit": current_commit(),
        "torch": torch.__version__, "device": chosen, "size": "tiny" if tiny else "full",
        "compiled": chosen == "cuda",
    }  # fmt: skip
    if chosen == "cuda":
        about["device"] = torch.cuda.get_device_name()
    print(_HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder, rank_pools(chosen, TIMEOUT) as pools:
        names = ModelFiles(Path(folder), TINY if tiny else MODELS)
        for case in cases:
            name, layout, start = names.name_of(case.model), case.parallel, time.monotonic()
            task = case.task(name)
            predicted = tuple(
                rank_memory(task, layout, layout.coordinates(rank)["pp"], about["compiled"])
                for rank in range(layout.world_size)
            )
            try:
                measured = pools.get(layout.world_size).run(measure_rank, name, case)
            except RankError as error:
                print("\n".join(format_failure(case, error)), flush=True)
                continue
            row = MemoryRow(case, predicted, tuple(measured), time.monotonic() - start)
            rows.append(row)
            print("\n".join(format_row(row)), flush=True)
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                write_text(out, json.dumps({**about, "rows": [asdict(one) for one in rows]}, indent=1) + "\n")
    print("\n".join(format_summary(rows)), flush=True)
    return rows


# --- what is printed ---------------------------------------------------------------------------------------

_SHORT = {"parameters": "weights", "gradients": "grads", "optimizer": "optim", "activations": "activ",
          "temporary": "temp"}  # fmt: skip
_HEAD = (
    "GB of the fullest rank\n"
    f"{'model layout x microbatches':44}{'predicted':>10}{'measured':>10}{'ratio':>7}  predicted / measured"
)


def format_row(row: MemoryRow) -> Iterator[str]:
    """GB of the fullest rank; of rows that are off, also the other ranks and the largest tensors."""
    fullest = row.ranks[row.fullest]
    largest = max(row.predicted, key=lambda parts: sum(parts.values()))
    beside = row.predicted[row.fullest]  # of the same rank
    parts = "  ".join(
        f"{short} {beside[name] / 1e9:.3f}/{fullest.parts[name] / 1e9:.3f}" for name, short in _SHORT.items()
    )
    notes = f"  workspaces {fullest.workspaces / 1e9:.3f}" if fullest.workspaces else ""
    notes += f"  kept {fullest.kept / 1e9:.3f}" if fullest.kept > 1e8 else ""
    notes += f"  leftover {fullest.leftover / 1e9:.3f}" if fullest.leftover > 1e7 else ""
    yield (
        f"{row.case!s:44}{sum(largest.values()) / 1e9:10.3f}{fullest.peak / 1e9:10.3f}{row.ratio:7.3f}  "
        f"{parts}{notes}  {row.seconds:.0f} s"
    )
    if abs(row.ratio - 1) <= OFF:
        return
    peaks = " ".join(
        f"{sum(p.values()) / 1e9:.3f}/{r.peak / 1e9:.3f}"
        for p, r in zip(row.predicted, row.ranks, strict=True)
    )
    yield f"      rank {row.fullest}: {fullest.operator or 'compiled'}; predicted / measured by rank: {peaks}"
    for phase in fullest.phases:
        started = " ".join(f"{_SHORT[name]} {n / 1e9:.3f}" for name, n in phase.at_start.items() if n)
        yield f"      to {phase.until:6} peak {phase.peak / 1e9:.3f}, started with {started}"
    for category, what, nbytes in fullest.tensors:
        yield f"      {nbytes / 1e9:8.3f} GB  {category:12} {what}"


def format_failure(case: MemoryCase, error: RankError) -> Iterator[str]:
    """Why a case has no row, and the innermost calls of each rank."""
    yield f"{case}: {error.summary}"
    for rank, stack in sorted(error.stacks.items()):
        yield f"      rank {rank}:"
        yield from (f"        {line}" for line in stack.rstrip().splitlines()[-STACK_LINES:])


def format_summary(rows: Iterable[MemoryRow]) -> Iterator[str]:
    errors = {str(row.case): abs(row.ratio - 1) for row in rows}
    if errors:
        within = sum(error <= OFF for error in errors.values())
        worst = max(errors, key=lambda case: errors[case])
        yield (
            f"{within} of {len(errors)} within {OFF:.0%}; mean error "
            f"{sum(errors.values()) / len(errors):.1%}, worst {errors[worst]:.1%} ({worst})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--size", choices=("full", "tiny"), help="tiny is for a CPU, and the default there")
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--layouts", nargs="+", help="cases that contain one of these words")
    parser.add_argument("--ranks", type=int, help="cases of so many ranks alone: 2 or 4")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON of all rows")
    run(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
