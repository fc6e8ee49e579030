"""English that is on every machine with Python, the documentation in its installation; or the reader's files.

    topic with               pydoc_data/topics.py: the language reference, as `help("with")` shows it
    module email/policy.py   the docstrings of one module of the standard library, one after the other
    notes/monday.md          a file of the reader's: .txt, .md and .rst of a folder, or any one file

A document is a topic, a module, or a file; a file that holds <|endoftext|> is several documents. Paragraphs
are separated by an empty line. A paragraph that appears word for word a second time is left out.

Python's documentation is indented, and rows of = or - underline its headings. Its paragraphs are dedented,
tabs become spaces, and such rows are left out. Lines of the reader's files stay as they are.
"""

from __future__ import annotations

import ast
import gc
import os
import re
import sysconfig
import textwrap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from platform import python_version

import numpy as np

from hpnb.data import synthetic_sentences
from hpnb.data.dataset import Source, note_of_skipped
from hpnb.data.tokenizer import END

SUFFIXES = (".txt", ".md", ".rst")
NAME = "Python documentation"
COMPOSED = 400  # documents, where there is nothing to read
# Modules that are tests, tables, or programs more than they are documentation.
_LEFT_OUT = {
    *("site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo"),
    *("pydoc_data", "encodings", "tkinter", "ensurepip"),
}
_RULE = re.compile(r"[\s*=~^#+\-]*")  # a line that underlines a heading
_MOST_NAMED = 10  # files that a message names
_LEAST = 200  # characters of a docstring: shorter ones say little more than the name


@dataclass(frozen=True)
class Document:
    """One text: what it is called, and its paragraphs."""

    name: str
    paragraphs: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)


@dataclass(frozen=True)
class TextSource:
    """What a dataset is read from, as bytes.

    Attributes:
        source: what these are and where they come from.
        raw: their bytes, by name, in order.
        with_modules: whether it is Python's documentation. A name that begins with "module " is a Python file
            then, whose docstrings are read, and paragraphs are dedented.
    """

    source: Source
    raw: Mapping[str, bytes]
    with_modules: bool = False

    def documents(self) -> list[Document]:
        """In the order of their names.

        Raises:
            ValueError: files that are not UTF-8, all of them, or no words in any.
        """
        seen: set[str] = set()
        collects = gc.isenabled()
        gc.disable()  # syntax trees are so many objects that collections take as long as the parser
        try:
            documents = [
                Document(name, paragraphs)
                for name, text in self._texts()
                if (paragraphs := _split_paragraphs(text, seen, self.with_modules))
            ]
        finally:
            if collects:
                gc.enable()
        if not documents:
            raise ValueError(f"{self.source.where} holds no words to read")
        return documents

    def check(self) -> None:
        """Raise ValueError with the names of files that are not UTF-8, if there are any."""
        self._texts()

    def _texts(self) -> list[tuple[str, str]]:
        texts: list[tuple[str, str]] = []
        others: list[str] = []  # files that are not UTF-8, and from which byte on
        for name, raw in self.raw.items():
            if self.with_modules and name.startswith("module "):
                texts.append((name, _docstrings(raw)))
                continue
            try:
                text = raw.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                others.append(f"{name} is not UTF-8 from byte {error.start} on")
                continue
            parts = text.split(END)
            texts += [(name if len(parts) == 1 else f"{name} {i}", part) for i, part in enumerate(parts)]
        if others:
            more = f", and {len(others) - _MOST_NAMED:,} more are not" if len(others) > _MOST_NAMED else ""
            them = "it or leave it" if len(others) == 1 else "them or leave them"
            raise ValueError(f"{', '.join(others[:_MOST_NAMED])}{more}; convert {them} out")
        return texts


def python_documentation() -> TextSource | None:
    """Of the Python that runs; None if its documentation was not installed."""
    raw: dict[str, bytes] = {}
    places = []
    with suppress(ImportError):  # of a Python cut down
        from pydoc_data.topics import topics

        raw |= {f"topic {name}": topics[name].encode() for name in sorted(topics)}
        places.append("the language reference")
    root = Path(sysconfig.get_path("stdlib"))
    if modules := _modules_below(root):
        raw |= {f"module {path.as_posix()}": (root / path).read_bytes() for path in modules}
        places.append("the docstrings of the standard library")
    if not raw:
        return None
    source = Source(NAME, "real", f"{' and '.join(places)} of Python {python_version()}")
    return TextSource(source, raw, with_modules=True)


def _modules_below(root: Path) -> list[Path]:
    """Relative to `root`. What is left out is not looked into: site-packages may hold 100,000 files."""
    modules: list[Path] = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _LEFT_OUT]
        place = Path(folder).relative_to(root)
        modules += [place / name for name in files if name.endswith(".py")]
    return sorted(modules)


def text_files(path: str | Path) -> TextSource:
    """Of a file, or of the texts in a folder and below. Other files are counted, and hidden ones are ignored,
    such as those of .git and .venv.

    Raises:
        FileNotFoundError: there is none.
    """
    place = Path(path).expanduser()
    files: list[Path] = []
    skipped: list[Path] = []
    if place.is_file():
        files = [place]
    elif place.is_dir():
        for folder, below, names in os.walk(place):
            below[:] = [name for name in below if not name.startswith(".")]
            for file in (Path(folder, name) for name in names if not name.startswith(".")):
                if file.is_file():
                    (files if file.suffix.lower() in SUFFIXES else skipped).append(file)
        files.sort()
    else:
        raise FileNotFoundError(f"source={str(path)!r} is neither a file nor a folder")
    if not files:
        raise FileNotFoundError(f"{place} holds no {', '.join(SUFFIXES)}; name a folder that does, or a file")
    names = [file.relative_to(place).as_posix() if file != place else file.name for file in files]
    raw = {name: file.read_bytes() for name, file in zip(names, files, strict=True)}
    count = f"{len(files):,} files" if len(files) > 1 else "1 file"
    empty = sum(not content.strip() for content in raw.values())
    notes = [f"{empty:,} of them empty"] if empty else []
    if skipped:
        notes.append(note_of_skipped(skipped, "texts"))
    source = Source(f"Text of {place.name}", "real", f"{count} of {place.name}", "; ".join(notes))
    return TextSource(source, raw)


def composed_news(why: str) -> TextSource:
    """Sentences as `synthetic_sentences` composes them, for where there is nothing to read."""
    raw = {}
    for number in range(COMPOSED):
        rng = np.random.default_rng([zlib.crc32(b"composed text"), number])
        paragraphs = [" ".join(synthetic_sentences.compose_pair(1, rng)) for _ in range(12)]
        raw[f"report {number:03d}"] = "\n\n".join(paragraphs).encode()
    return TextSource(Source("Composed news", "generated", why), raw)


def split_documents(documents: Sequence[Document]) -> dict[str, list[Document]]:
    """ "train" and "test": a tenth of the documents, at least one, drawn by their names. Of a single document
    the last tenth of its paragraphs.

    Raises:
        ValueError: one document of one paragraph.
    """
    if len(documents) == 1:
        (only,) = documents
        kept = len(only.paragraphs) - max(1, len(only.paragraphs) // 10)
        if not kept:
            raise ValueError(
                f"{only.name} is one paragraph, which leaves nothing to test on; use a longer text"
            )
        parts = only.paragraphs[:kept], only.paragraphs[kept:]
        return {
            name: [Document(only.name, part)] for name, part in zip(("train", "test"), parts, strict=True)
        }
    by_lot = sorted(documents, key=lambda document: (zlib.crc32(document.name.encode()), document.name))
    held_out = {document.name for document in by_lot[: max(1, len(documents) // 10)]}
    return {
        "train": [document for document in documents if document.name not in held_out],
        "test": [document for document in documents if document.name in held_out],
    }


def _docstrings(source: bytes) -> str:
    """Of a module, its classes and its functions, in the order of the file."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a template, not a module
        return ""
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = sorted(
        (node for node in (tree, *_statements_in(tree)) if isinstance(node, described)),
        key=lambda node: getattr(node, "lineno", 0),
    )
    docstrings = [ast.get_docstring(node) or "" for node in nodes]
    return "\n\n".join(text for text in docstrings if len(text) >= _LEAST)


def _statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """The statements inside `node`, at any depth. Expressions, most of the tree, are not entered: none of
    them holds a class or a function with a docstring."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from _statements_in(child)


def _split_paragraphs(text: str, seen: set[str], is_documentation: bool) -> tuple[str, ...]:
    paragraphs = []
    for part in re.split(r"\n[ \t\r]*\n", text.replace("\r\n", "\n")):
        paragraph = _without_layout(part) if is_documentation else part.strip("\n").rstrip()
        if paragraph and paragraph not in seen:
            seen.add(paragraph)
            paragraphs.append(paragraph)
    return tuple(paragraphs)


def _without_layout(paragraph: str) -> str:
    """Without its indentation, and without lines that underline a heading."""
    lines = [line.rstrip() for line in textwrap.dedent(paragraph.expandtabs().strip("\n")).split("\n")]
    return "\n".join(line for line in lines if not _RULE.fullmatch(line)).strip()
