"""Break one mechanism at a time and see that the tests notice.

    python tests/breakages.py              # all of them, one after the other
    python tests/breakages.py tied norm    # those whose name contains one of these words

Each breakage replaces one piece of source in a copy of the project and runs the tests that `make test` runs
on that mechanism, until the first failure. Exit status 1 if some breakage went unnoticed.
tests/test_breakages.py keeps the list in step with the source, so that none of them stops breaking anything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Breakage:
    """One wrong line.

    Attributes:
        name: what is wrong, in a few words.
        file: where, below hpnb/.
        right, wrong: the source as it is, which stands there once, and what replaces it.
        tests: what to give to pytest.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


EXPERT_STEPS = "tests/test_expert_parallel.py::test_boosted_steps_and_their_checkpoint_equal_one_process"

BREAKAGES = (
    Breakage(
        "a bucket is sent before its last gradient",
        "data_parallel/reducer.py",
        "and not self._missing[len(self._sent)]:",
        "and self._missing[len(self._sent)] < 2:",
        ("tests/test_data_parallel.py",),
    ),
    Breakage(
        "a recomputation reads buffers that later forwards have changed",
        "hybrid/recomputed_buffers.py",
        "copies.setdefault(snapshot.buffer, snapshot.value.clone())",
        "module._buffers[name]",
        ("tests/test_recomputed_buffers.py",),
    ),
    Breakage(
        "a recomputation changes buffers once more",
        "hybrid/recomputed_buffers.py",
        "                _replace(buffers, table)\n",
        "                pass\n",
        ("tests/test_recomputed_buffers.py",),
    ),
    Breakage(
        "ZeRO sums gradients over replicas and does not average",
        "data_parallel/zero_bucket.py",
        "scale = 1.0 if background.averages or not average else 1.0 / self.axis.size",
        "scale = 1.0",
        ("tests/test_zero.py",),
    ),
    Breakage(
        "ZeRO-3 sums gradients over replicas and does not average",
        "data_parallel/flat_params.py",
        "self._scale = 1.0 / (axis.size * copies) if averages_here else 1.0",
        "self._scale = 1.0",
        ("tests/test_fully_shard.py",),
    ),
    Breakage(
        "nodes that hold the same shard do not sum its gradient",
        "data_parallel/fsdp_reductions.py",
        "                flat.sum_over_replicas()\n",
        "                pass\n",
        ("tests/test_hsdp.py",),
    ),
    Breakage(
        "experts are summed over ranks that hold others",
        "data_parallel/split_reducer.py",
        "(experts, expert_axis))",
        "(experts, axis))",
        ("tests/test_expert_parallel.py",),
    ),
    Breakage(
        "ranks of a stage replay graphs that they did not capture together",
        "pipeline_parallel/graph_agreement.py",
        "or (state == REPLAY and capture != -capture_)",
        "or False",
        ("tests/test_cuda_graphs_tensor_parallel.py::test_the_least_of_all_ranks_is_done",),
    ),
    Breakage(
        "graphs of ZeRO-3 overwrite the gradients of an earlier batch",
        "pipeline_parallel/grad_ready.py",
        "parameter = self._parameter_of.get(p, p)",
        "parameter = p",
        ("tests/test_cuda_graphs.py::test_replayed_steps_of_sharded_parameters",),
    ),
    Breakage(
        "ZeRO-3 shards experts over ranks that hold others",
        "data_parallel/fsdp_hooks.py",
        "return FlatParam(parameters, expert_axis, of_experts, expert_policy, on_complete)",
        "return FlatParam(parameters, axis, background, policy, on_complete)",
        (f"{EXPERT_STEPS}[dp 2 x ep 2, ZeRO 3-Mixtral]",),
    ),
    Breakage(
        "tp ranks do not sum the outputs of their parts of experts",
        "tensor_parallel/tp_1d_regions.py",
        "change_output(module, lambda z: comm.all_reduce(z, axis))",
        "pass",
        (f"{EXPERT_STEPS}[tp 2 x ep 2-Mixtral]",),
    ),
    Breakage(
        "tp ranks do not sum the gradients of what goes into experts",
        "tensor_parallel/tp_1d_regions.py",
        "return comm.replicate(x, axis) if isinstance(x, torch.Tensor) and x.requires_grad else x",
        "return x",
        (f"{EXPERT_STEPS}[tp 2 x ep 2-Mixtral]",),
    ),
    Breakage(
        "columns of a region share the sum of their first input, whatever they read",
        "tensor_parallel/parallel_region.py",
        "same = known.inside is x or (known.x is x and known.version == version is not None)",
        "same = known.x.shape == x.shape",
        ("tests/test_column_inputs.py::test_equal_to_one_process[cross attention-2]",),
    ),
    Breakage(
        "results of experts come back in the experts' order",
        "expert_parallel/dispatch.py",
        "results = back[place].view(",
        "results = back.view(",
        (f"{EXPERT_STEPS}[ep 2-Mixtral]",),
    ),
    Breakage(
        "the sides of an overlapped pair do not take turns",
        "overlapped_pair.py",
        "if (not is_first) not in self._left:",
        "if False:",
        ("tests/test_overlapped_pairs.py::test_sides_take_turns_at_their_messages",),
    ),
    Breakage(
        "a backward overlaps the forward that it needs",
        "pipeline_parallel/overlapped_pairs.py",
        "            pairs[rank].discard(step)\n",
        "            break\n",
        ("tests/test_overlapped_pairs.py::test_a_backward_that_needs_its_forward_makes_no_pair",),
    ),
    Breakage(
        "a triangle of a ring is full in the backward",
        "context_parallel/fused.py",
        "out, lse, self._state, self.scale, pair.is_triangle)",
        "out, lse, self._state, self.scale, False)",
        ("tests/test_context_parallel.py::test_attention_over_ranks_is_dense_attention",),
    ),
    Breakage(
        "a packed text sees the chunks before it in full",
        "context_parallel/visibility.py",
        "if (begin := max(keys.start, run.start)) < last:",
        "if (begin := keys.start) < last:",
        ("tests/test_context_parallel.py::test_attention_over_ranks_is_dense_attention",),
    ),
    Breakage(
        "the norm of a rank's queries and keys keeps this rank's gradient",
        "tensor_parallel/tp_1d.py",
        "self._sum_replicated_grads(name, [p for p in paths if _sums_grads(model.layers[p][1])], model)",
        "pass",
        ("tests/test_model_census.py",),
    ),
    Breakage(
        "an overflow on one rank is not agreed on",
        "precision/optimizer_step.py",
        "        overflows = comm.all_reduce(overflows, axis)\n",
        "        pass\n",
        ("tests/test_precision.py",),
    ),
    Breakage(
        "a tied parameter counts twice in the gradient norm",
        "grad_norm.py",
        "if p.grad is not None and placement.tied_to is None:",
        "if p.grad is not None:",
        ("tests/test_placement.py", "tests/test_precision.py", "tests/test_hybrid.py"),
    ),
    Breakage(
        "squares of a sharded gradient are not summed over its axis",
        "grad_norm.py",
        "            squares[sharded_here] = sums\n",
        "            pass\n",
        ("tests/test_placement.py", "tests/test_precision.py"),
    ),
    Breakage(
        "the loss scale survives one overflow too many",
        "precision/loss_scaler.py",
        "if self._overflows >= self.hysteresis:",
        "if self._overflows > self.hysteresis:",
        ("tests/test_precision.py",),
    ),
    Breakage(
        "the loss of a batch is a mean of means",
        "pipeline_parallel/loss.py",
        "self._grads_of_means = self._grad_of_sum * self._targets  #",
        "self._grads_of_means = self._grad_of_sum * self._targets.mean().expand_as(self._targets)  #",
        ("tests/test_pipeline.py", "tests/test_gpt2_exact.py"),
    ),
    Breakage(
        "microbatches swap their targets",
        "pipeline_parallel/loss.py",
        "inputs, true_inputs = self.inputs_of(microbatch), self._inputs[microbatch]",
        "inputs, true_inputs = self.inputs_of(len(self._inputs) - 1 - microbatch), self._inputs[microbatch]",
        ("tests/test_pipeline.py",),
    ),
    Breakage(
        "a weight gradient is skipped",
        "pipeline_parallel/weight_gradient_rules.py",
        "            grad.addmm_(dy.t(), _flatten_tokens(x))\n",
        "            pass\n",
        ("tests/test_split_backward.py",),
    ),
    Breakage(
        "the gradient of a tied weight is not summed over its stages",
        "pipeline_parallel/tied_weights.py",
        "    dist.all_reduce(holder.grad, group=ranks.group)\n",
        "",
        ("tests/test_pipeline.py", "tests/test_gpt2_exact.py"),
    ),
    Breakage(
        "slots that are too small stay in use",
        "pipeline_parallel/symmetric_transfers.py",
        "old_queues, self.queues = self.queues, {}",
        "old_queues = self.queues",
        ("tests/test_symmetric_memory.py",),
    ),
    Breakage(
        "1F1B warms up with one microbatch too many",
        "pipeline_parallel/schedules.py",
        "num_warmup_microbatches = min(rank.ranks_after, rank.num_microbatches)",
        "num_warmup_microbatches = min(rank.ranks_after + 1, rank.num_microbatches)",
        ("tests/test_schedules.py",),
    ),
    Breakage(
        "a simulated transfer costs nothing",
        "pipeline_parallel/simulate.py",
        "start = max(start, ends[need] + delay)",
        "start = max(start, ends[need])",
        ("tests/test_schedules.py",),
    ),
    Breakage(
        "the backward of a column-parallel layer sums nothing",
        "comm.py",
        "return _with_backward(x, axis, _same, partial(_sum, axis=axis))",
        "return _with_backward(x, axis, _same, _same)",
        ("tests/test_comm.py",),
    ),
    Breakage(
        "a rank takes the logit of another rank's target",
        "tensor_parallel/vocab_cross_entropy.py",
        "sums[1] = torch.where(is_local, target_logit, 0.0)",
        "sums[1] = torch.where(valid, target_logit, 0.0)",
        ("tests/test_tensor_parallel.py",),
    ),
    Breakage(
        "ranks draw the same dropout mask for different shards",
        "dropout_rng.py",
        'b"%d" % self.axis.rank',
        'b"0"',
        ("tests/test_tensor_parallel.py",),
    ),
    Breakage(
        "the last ranks get the heads that are left over",
        "split_sizes.py",
        "rank < larger_ranks",
        "ranks - rank <= larger_ranks",
        ("tests/test_comm.py", "tests/test_tensor_parallel.py"),
    ),
    Breakage(
        "an all-reduce is counted as one pass round the ring",
        "record/traffic.py",
        'return 2 * once if op == "all_reduce" else once',
        "return once",
        ("tests/test_record.py",),
    ),
    Breakage(
        "all replicas train on the same samples",
        "data/distributed_sampler.py",
        "start, stop = split_range(len(everyone), self.ranks, self.rank)",
        "start, stop = split_range(len(everyone), self.ranks, 0)",
        ("tests/test_data.py",),
    ),
    Breakage(
        "chunks of a checkpoint change places",
        "hybrid/checkpoint/state_files.py",
        "target = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, offsets, strict=True))",
        "target = tuple(slice(0, b - a) for a, b in zip(low, high, strict=True))",
        ("tests/test_checkpoint.py",),
    ),
    Breakage(
        "a damaged file of a checkpoint is loaded",
        "hybrid/checkpoint/manifest.py",
        "if number % ranks == rank and file_sum(file)[1] != crc:",
        "if False:",
        ("tests/test_checkpoint.py", "tests/test_checkpoint_faults.py"),
    ),
    Breakage(
        "a resumed run draws other random numbers",
        "hybrid/checkpoint/checkpoint.py",
        "        set_random_state(values[random_label])\n",
        "        pass\n",
        ("tests/test_checkpoint.py",),
    ),
    Breakage(
        "a ring loses what other ranks add to a block's gradient",
        "context_parallel/ring.py",
        "coming = ring.pass_on(dblock) if step > 1 else None",
        "coming = None",
        ("tests/test_context_parallel.py",),
    ),
    Breakage(
        "ZeRO-3 keeps blocks gathered after their backward",
        "data_parallel/fsdp_hooks.py",
        "            if unit not in self._kept:\n                unit.reshard()\n\n    def _end",
        "            pass\n\n    def _end",
        ("tests/test_fully_shard.py",),
    ),
    Breakage(
        "the ranks of a depth do not sum weight gradients",
        "tensor_parallel/tp_2d_linear.py",
        "return grid.depth.all_reduce(grad), pending_grads",
        "return Pending(), None",
        ("tests/test_grids.py",),
    ),
    Breakage(
        "interleaved warms up with one chunk too many",
        "pipeline_parallel/schedules.py",
        "num_warmup = min(2 * rank.ranks_after + (v - 1) * p, len(forwards))",
        "num_warmup = min(2 * rank.ranks_after + v * p, len(forwards))",
        ("tests/test_schedules.py",),
    ),
    Breakage(
        "loads of experts are those of one rank",
        "expert_parallel/load_balance.py",
        "total = comm.all_reduce(torch.cat([counted[name] for name in names]), self.axis).cpu()",
        "total = torch.cat([counted[name] for name in names]).cpu()",
        ("tests/test_expert_parallel.py", "tests/test_expert_loads.py"),
    ),
    Breakage(
        "the loss of routers is that of a stage's last layer",
        "expert_parallel/router_sums.py",
        "sums = of_layer if sums is None else sums + of_layer",
        "sums = of_layer",
        ("tests/test_router_loss.py",),
    ),
    Breakage(
        "a loaded state of ZeRO leaves the weights",
        "data_parallel/zero.py",
        "self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state\n"
        "        self._gather_parameters()\n",
        "self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state\n",
        ("tests/test_zero.py",),
    ),
    Breakage(
        "a run file's accumulation is ignored",
        "hybrid/train_command/train.py",
        "accumulation=how.accumulation)",
        "accumulation=1)",
        ("tests/test_train.py",),
    ),
    Breakage(
        "a save forgets the one that was killed before it got its name",
        "hybrid/checkpoint/atomic.py",
        "        _recover(path)\n        if replaces",
        "        if replaces",
        ("tests/test_checkpoint_faults.py",),
    ),
    Breakage(
        "packed texts see each other where a config has a cache",
        "hybrid/packed_texts.py",
        'return {} if asks and not training else {"use_cache": False}',
        "return {}",
        ("tests/test_packed_texts.py",),
    ),
    Breakage(
        "accumulated batches weigh alike, whatever they count",
        "hybrid/training/accumulation.py",
        "self._batch_weights = (n / self._step_targets).unbind()",
        "self._batch_weights = (0 * n + 1 / len(n)).unbind()",
        ("tests/test_trainer.py",),
    ),
    Breakage(
        "a plan shards experts over ranks that hold others",
        "theory/plan_memory.py",
        "for n, ranks in ((dense, replicas), (experts, replicas // layout.ep))",
        "for n, ranks in ((dense, replicas), (experts, replicas))",
        ("tests/test_plan_axes.py",),
    ),
    Breakage(
        "tensor parallelism drops the hooks of a layer that it replaces",
        "tensor_parallel/replaced_layers.py",
        "if (hook := _hook_of(layer)) is not None:",
        "if (hook := None) is not None:",
        ("tests/test_replaced_layers.py",),
    ),
    Breakage(
        "ZeRO 3 does not call the hooks of a parameter",
        "data_parallel/parameter_hooks.py",
        "has_hooks = bool(sharded._backward_hooks) and unsharded.requires_grad",
        "has_hooks = False",
        ("tests/test_parameter_hooks.py",),
    ),
    Breakage(
        "a split backward postpones gradients that a hook waits for",
        "pipeline_parallel/split_backward.py",
        "is_left = split._queue is not None and any(map(_has_users_post_hook, parameters))",
        "is_left = False",
        ("tests/test_parameter_hooks.py",),
    ),
)


def broken_source(breakage: Breakage) -> str:
    """The file's source with the breakage in it.

    Raises:
        ValueError: the right line does not stand there exactly once.
    """
    source = (ROOT / "hpnb" / breakage.file).read_text(encoding="utf-8")
    if (times := source.count(breakage.right)) != 1:
        raise ValueError(f"{breakage.name}: {breakage.right!r} stands {times} times in hpnb/{breakage.file}")
    return source.replace(breakage.right, breakage.wrong)


def caught_by(breakage: Breakage) -> str | None:
    """The first test that fails with the breakage in place; None if all pass.

    Raises:
        RuntimeError: pytest could not run the tests at all.
    """
    with tempfile.TemporaryDirectory(prefix="hpnb-breakage-") as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "executed", "__pycache__"))
        (copy / "hpnb" / breakage.file).write_text(broken_source(breakage), encoding="utf-8")
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:nbmake",
                *breakage.tests,
            ],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
    if done.returncode == 0:
        return None
    if failed := re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE):
        return failed[1]
    raise RuntimeError(f"{breakage.name}: pytest ended with {done.returncode}\n{done.stdout}{done.stderr}")


def main(words: list[str]) -> int:
    unnoticed = []
    for breakage in BREAKAGES:
        if words and not any(word in breakage.name for word in words):
            continue
        test = caught_by(breakage)
        print(f"{breakage.name:<50} {test or 'NOT NOTICED'}", flush=True)
        if test is None:
            unnoticed.append(breakage.name)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
