"""Write docs/licences.md: the licence of each package that pyproject.toml asks for, from its metadata.

python docs/make_licences.py        # in an environment with all extras
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_HEAD = """# Licences of the dependencies

hpnb itself is under the [MIT licence](../LICENSE) and contains no code of these packages. Licences are as the
packages declare them; `python docs/make_licences.py` writes this table from the installed metadata.

| package | licence | needed for |
|---|---|---|
"""


def direct_dependencies() -> dict[str, str]:
    """{package: what needs it} of the packages that pyproject.toml names."""
    groups = {"the library": PROJECT["dependencies"]}
    groups |= {f"`hpnb[{extra}]`": lines for extra, lines in PROJECT["optional-dependencies"].items()}
    needed = {}
    for group, lines in groups.items():
        for line in lines:
            name = re.split(r"[<>=!~\\[; ]", line)[0]
            if name != PROJECT["name"]:
                needed.setdefault(name, group)
    return needed


def licence_of(package: str) -> str:
    """The licence that its metadata declares: an expression, a short text, or classifiers."""
    fields = metadata(package)
    if expression := fields.get("License-Expression"):
        return expression
    declared = fields.get("License") or ""
    if declared and len(declared) < 60 and "\\n" not in declared:
        return declared
    classifiers = [c.split(" :: ")[-1] for c in fields.get_all("Classifier") or [] if c.startswith("License")]
    return ", ".join(classifiers) or "not declared; see the package"


def table() -> str:
    rows = sorted(direct_dependencies().items(), key=lambda row: row[0].lower())
    return _HEAD + "".join(f"| {name} | {licence_of(name)} | {group} |\n" for name, group in rows)


if __name__ == "__main__":
    PAGE.write_text(table(), encoding="utf-8")
