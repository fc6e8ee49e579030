"""A model's own forward, run around its layers: whatever it prepares for them is not written a second time.

                        embedding   between                 layers            head
    model.forward       real        masks, rotary tables    layer 0 .. n-1    norm, lm_head, soft cap
    shell.embed         real        real                    stops here
    shell.prepare       zeros       real                    notes arguments
    shell.finish        zeros       real                    hidden states     real

A shell is a copy of the model's modules without parameters. The parts that are about to run are put into it
for the time of a forward, so a pipeline stage needs its own parts and the shell, which is a few buffers. What
layers are called with depends on the batch alone. It is kept as long as the batch's tensors live, and in
inference mode for one forward (batch_cache.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hpnb.models.batch_cache import BatchCache
from hpnb.models.model_anatomy import TARGETS, Inputs, Part, check_token_ids
from hpnb.models.shell_arguments import (
    Arguments,
    empty_hidden,
    first_argument,
    first_floats,
    split_hidden,
    with_hidden,
)
from hpnb.models.shell_copy import argument_names, copy_module, place_of

REFUSED = ("inputs_embeds", "past_key_values")
RECORDED = ("output_hidden_states", "output_attentions")
HANDS_ON = (
    "{} of a {} hands more to the next layer than hidden states ({}), and stages pass these alone; use "
    "pp_size=1, or register its parts with hpnb.models.register"
)
NEEDS_MORE = (
    "{} of a {} takes more than hidden states and what the batch gives ({}), and stages pass hidden states "
    "alone; use pp_size=1, or register its parts with hpnb.models.register"
)


class _LayerReached(Exception):
    """Ends a forward at a layer; nothing after it would be used."""

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


class ModelShell(nn.Module):
    """The forward of a transformers model with a pipeline plan, around its layers.

    Args:
        embedding, layers, head: paths of the parts in the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        embedding: Sequence[str],
        layers: Sequence[str],
        head: Sequence[str],
        hidden_size: int,
    ) -> None:
        super().__init__()
        self.model = copy_module(model, "", frozenset((*embedding, *layers, *head)))
        self.embedding, self.layers, self.head = tuple(embedding), tuple(layers), tuple(head)
        self.hidden_size = hidden_size
        self.copies = tuple(self.model.modules())  # without the parts that are put in
        self.gives_tuple: bool | None = None  # of a layer; None: not known yet
        self.names = argument_names(model, model.base_model)
        self.prepared = BatchCache()

    def embed(self, parts: Sequence[Part], inputs: Inputs) -> torch.Tensor:
        """The batch -> hidden states before layer 0, (B, s, h)."""
        arguments = self._arguments(inputs)
        self._set_training(parts[0].module.training)

        def stop(i: int, *args: Any, **kwargs: Any) -> Any:
            self._check_constants(args, kwargs)
            raise _LayerReached(split_hidden(args, kwargs)[0])

        hidden: torch.Tensor = self._run(parts, arguments, stop, inputs["input_ids"])
        return hidden

    def prepare(self, name: str, hidden: torch.Tensor, inputs: Inputs) -> Callable[[torch.Tensor], Arguments]:
        """What the layer called `name` is called with: a function of its hidden states.

        Only the device and dtype of `hidden` matter.
        """
        arguments = self._arguments(inputs)
        of_layers = self.prepared.get(arguments, hidden, lambda: self._prepare(hidden, arguments), name)
        args, kwargs = of_layers[self.layers.index(name)]
        return partial(with_hidden, args, kwargs)

    def finish(self, parts: Sequence[Part], hidden: torch.Tensor, inputs: Inputs) -> Any:
        """Hidden states after the last layer -> the model's outputs."""
        training = parts[0].module.training if parts else False
        self._set_training(False)  # a dropout before the layers draws no numbers

        def replace(i: int, *args: Any, **kwargs: Any) -> Any:
            output = split_hidden(args, kwargs)[0]
            if i == len(self.layers) - 1:
                self._set_training(training)
                output = hidden
            return (output, None) if gives_tuple else output

        arguments = self._arguments(inputs)
        gives_tuple = self._gives_tuple(arguments, hidden)
        return self._run(parts, arguments, replace, hidden)

    def find_calls(self, names: Sequence[str]) -> dict[str, bool]:
        """{path of a module: whether the forward calls it before the layers}, of those that it calls.

        It is tried on two tokens, with nothing in place of the parts and of these modules. A model that needs
        more than tokens may fail before it has called all.
        """
        calls: dict[str, bool] = {}
        reached: set[int] = set()

        def on_layer(i: int, *args: Any, **kwargs: Any) -> Any:
            reached.add(i)
            return split_hidden(args, kwargs)[0]

        def on_call(name: str, *args: Any, **kwargs: Any) -> Any:
            calls.setdefault(name, not reached)
            return first_floats(*args, **kwargs)

        for name in names:
            vars(self.model.get_submodule(name))["forward"] = partial(on_call, name)
        arguments = {"input_ids": torch.zeros((1, 2), dtype=torch.long), "use_cache": False}
        with torch.no_grad(), suppress(Exception):
            self._run((), arguments, on_layer, torch.zeros(()))
        for name in names:
            vars(self.model.get_submodule(name)).pop("forward", None)
        return calls

    def _check_constants(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What a layer is called with besides hidden states must depend on the batch alone."""
        others = {f"argument {i}": x for i, x in enumerate(args) if i}
        others |= {name: x for name, x in kwargs.items() if name != "hidden_states"}
        trained = [name for name, x in others.items() if isinstance(x, torch.Tensor) and x.requires_grad]
        if trained:
            kind, extra = type(self.model).__name__, f"{trained[0]}, which trained weights make"
            raise ValueError(NEEDS_MORE.format(self.layers[0], kind, extra))

    def _gives_tuple(self, arguments: dict[str, Any], like: torch.Tensor) -> bool:
        """Whether layers give a tuple: then the forward indexes it, and a tensor would lose a dim."""
        if self.gives_tuple is None:
            given: list[torch.Tensor] = []

            def show(x: Any, *_: Any, **__: Any) -> Any:
                raise _LayerReached(x)

            def on_layer(i: int, *args: Any, **kwargs: Any) -> Any:
                hidden = split_hidden(args, kwargs)[0]
                if i == 0:
                    given.append(hidden)
                return hidden if i == 0 else show(hidden)

            try:
                with torch.no_grad():
                    received = self._run((), arguments, on_layer, like, on_head=show)
            except ValueError as error:
                extra = "more than two values" if "unpack" in str(error) else error
                raise ValueError(HANDS_ON.format(self.layers[0], type(self.model).__name__, extra)) from error
            self.gives_tuple = (
                not isinstance(received, torch.Tensor) or received.shape[:2] != given[0].shape[:2]
            )
        return self.gives_tuple

    def _prepare(self, hidden: torch.Tensor, arguments: dict[str, Any]) -> dict[int, Arguments]:
        made: dict[int, Arguments] = {}
        self._set_training(False)
        if arguments["input_ids"].size(0) == 0:  # as a block runs on one sample of zeros then
            ids = arguments["input_ids"]
            arguments = {"input_ids": ids.new_zeros((1, *ids.shape[1:])), "use_cache": False}

        def note(i: int, *args: Any, **kwargs: Any) -> Any:
            output = split_hidden(args, kwargs)[0]
            if not output.is_floating_point():
                raise ValueError(
                    f"{self.layers[i]} of a {type(self.model).__name__} gets no hidden states where the "
                    "modules before it are on another stage; register its parts with hpnb.models.register"
                )
            made[i] = (args, kwargs)
            if len(made) == len(self.layers):
                raise _LayerReached(None)
            return (output, None) if gives_tuple else output

        gives_tuple = self._gives_tuple(arguments, hidden)
        with torch.no_grad():
            self._run((), arguments, note, hidden)
        missing = [name for i, name in enumerate(self.layers) if i not in made]
        if missing:
            raise ValueError(f"the forward of {type(self.model).__name__} never calls {', '.join(missing)}")
        return made

    def _run(
        self,
        parts: Sequence[Part],
        arguments: dict[str, Any],
        on_layer: Callable[..., Any],
        like: torch.Tensor,
        on_head: Callable[..., Any] | None = None,
    ) -> Any:
        with self._put_in(parts, on_layer, like, on_head or first_argument):
            try:
                return self.model(**arguments)
            except _LayerReached as reached:
                return reached.hidden

    @contextmanager
    def _put_in(
        self,
        parts: Sequence[Part],
        on_layer: Callable[..., Any],
        like: torch.Tensor,
        on_head: Callable[..., Any],
    ) -> Iterator[None]:
        """For one forward: these parts, functions in place of the layers, and nothing else of the parts."""
        present = {part.name for part in parts}
        forwards: dict[str, Callable[..., Any]] = {}
        last_layer_ran = False

        def in_place_of(name: str, early: bool, forward: Callable[..., Any]) -> Callable[..., Any]:
            """What runs in place of an absent part, which belongs before the layers (`early`) or after."""

            def run(*args: Any, **kwargs: Any) -> Any:
                if early == last_layer_ran:
                    when = "before the layers and after them" if early else "before the last layer"
                    raise ValueError(
                        f"the forward of a {type(self.model).__name__} calls {name} {when}, and a pipeline "
                        "has it on one stage; use pp_size=1, or register its parts with hpnb.models.register"
                    )
                return forward(*args, **kwargs)

            return run

        forwards |= {name: in_place_of(name, True, first_floats) for name in self.embedding}
        forwards |= {name: in_place_of(name, False, on_head) for name in self.head}
        if self.embedding:
            first = self.embedding[0]
            forwards[first] = in_place_of(first, True, partial(empty_hidden, self.hidden_size, like))

        def run_layer(i: int, *args: Any, **kwargs: Any) -> Any:
            nonlocal last_layer_ran
            last_layer_ran = i == len(self.layers) - 1
            return on_layer(i, *args, **kwargs)

        forwards |= {name: partial(run_layer, i) for i, name in enumerate(self.layers)}
        places = {name: place_of(self.model, name) for name in forwards}
        copies = {name: parent._modules[child] for name, (parent, child) in places.items()}
        try:
            for name, forward in forwards.items():
                if name not in present:
                    vars(copies[name])["forward"] = forward
            for part in parts:
                parent, child = places[part.name]
                parent._modules[child] = part.module
            yield
        finally:
            for name, (parent, child) in places.items():
                parent._modules[child] = copies[name]
                vars(copies[name]).pop("forward", None)

    def _set_training(self, training: bool) -> None:
        for module in self.copies:
            module.training = training

    def _arguments(self, inputs: Inputs) -> dict[str, Any]:
        check_token_ids(type(self.model).__name__, inputs, REFUSED)
        taken = {name: inputs[name] for name in self.names if name in inputs and name not in TARGETS}
        # No layers run in a shell, so it cannot record their outputs. The loss of their routers comes from
        # the parts (`hpnb.expert_parallel.router_sums`).
        off = {name: False for name in RECORDED if getattr(self.model.config, name, False) or name in taken}
        off |= {name: False for name in ("output_router_logits",) if name in self.names}
        return {**taken, "use_cache": False, **off}
