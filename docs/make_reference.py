"""Build the API reference from the docstrings: one page for each public package, in build/docs.

    make docs        # or: python docs/make_reference.py build/docs

Any warning of pdoc fails the build: a name in `__all__` that does not exist, a type that cannot be read.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import typing
import warnings
from pathlib import Path
from types import ModuleType

import pdoc

import hpnb

# hpnb.lesson is for the notebooks alone.
PACKAGES = [name for name in hpnb.__all__ if inspect.ismodule(getattr(hpnb, name)) and name != "lesson"]


def load_lazy_names(module: ModuleType) -> None:
    """Put the names that a package imports when they are first used where pdoc looks for them."""
    for name in getattr(module, "__all__", ()):
        setattr(module, name, getattr(module, name))


def resolve_inherited_annotations(module: ModuleType) -> None:
    """A dataclass inherits fields with annotations that only the module of their class can read."""
    for value in vars(module).values():
        if inspect.isclass(value) and value.__module__.startswith("hpnb") and "__init__" in vars(value):
            names: dict[str, object] = {}
            for base in reversed(value.__mro__):
                names |= vars(sys.modules[base.__module__])
            # What is imported for type checkers alone stays a text.
            try:
                value.__init__.__annotations__ = typing.get_type_hints(value.__init__, names)
            except NameError:
                continue


def show_undocumented_bases(module: ModuleType, documented: set[object]) -> None:
    """Methods of a base without an entry, as `Schedule` has them from its lists, become the class's own."""
    for value in filter(inspect.isclass, (getattr(module, name) for name in getattr(module, "__all__", ()))):
        for base in value.__mro__[1:]:
            if base.__module__.startswith("hpnb.") and base not in documented:
                for name, member in vars(base).items():
                    is_method = callable(member) or isinstance(member, (property, functools.cached_property))
                    is_shown = name == "__init__" or not name.startswith("_")
                    if is_method and is_shown and name not in vars(value):
                        setattr(value, name, member)


def shadowed_files(module: ModuleType) -> list[str]:
    """Files named as a function of theirs, such as hpnb.plot.timeline: the function is documented."""
    names = [name for name in getattr(module, "__all__", ()) if not inspect.ismodule(getattr(module, name))]
    return [f"{module.__name__}.{name}" for name in names if f"{module.__name__}.{name}" in sys.modules]


def main(folder: Path) -> None:
    modules = [hpnb, *(importlib.import_module(f"hpnb.{name}") for name in PACKAGES)]
    for module in modules:
        load_lazy_names(module)
        resolve_inherited_annotations(module)
    names = ((module, name) for module in modules for name in getattr(module, "__all__", ()))
    documented = {value for module, name in names if inspect.isclass(value := getattr(module, name))}
    for module in modules:
        show_undocumented_bases(module, documented)
    pdoc.render.configure(docformat="google", show_source=False, footer_text=f"hpnb {hpnb.__version__}")
    hidden = ["hpnb.lesson", *(name for module in modules for name in shadowed_files(module))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc("hpnb", *(f"!{name}" for name in hidden), output_directory=folder)
    print(f"{len(list(folder.rglob('*.html')))} pages: {folder / 'index.html'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
