"""The ground that the house stands on: requirements, the wheel, the Makefile, the order of the rooms."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hpnb.lesson.pages import execute

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# From top to bottom; a room imports only rooms below it, and rooms of one line do not know each other.
HOUSE = (
    ("lesson",),
    ("bench",),
    ("hybrid",),
    ("data_parallel", "pipeline_parallel", "tensor_parallel", "context_parallel", "expert_parallel"),
    ("models",),
    ("data",),
    ("plot",),
    ("theory",),
    ("gradients",),
    ("precision",),
    ("grad_norm",),
    ("optimizer_state",),
    ("meta_device",),
    ("placement",),
    ("background",),
    ("symmetric_all_reduce",),
    ("symmetric_memory",),
    ("comm", "dropout_rng"),
    ("overlapped_pair",),
    ("mesh",),
    ("record",),
    ("ranks",),
    ("files", "split_sizes", "layout"),
    ("lazy_names", "caller_frame", "user_hooks"),
)
LEVEL = {room: level for level, rooms in enumerate(HOUSE) for room in rooms}
ON_TOP = {"__init__", "__main__", "doctor"}  # they open the whole house
MAY_USE_THE_DOOR = {"lesson", "bench"}  # they use hpnb as a reader does: `import hpnb`


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run without a keyboard, and without what a `make` around the tests would pass on to one inside."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        stdin=subprocess.DEVNULL,
    )


def requirements() -> dict[str, Requirement]:
    """Everything that pyproject.toml asks for, extras included, by canonical name."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    lines = [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): r for r in parsed if r.name != PROJECT["project"]["name"]}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, version = line.split("==")
            assert canonicalize_name(name) not in found, f"{name} is pinned twice"
            found[canonicalize_name(name)] = version
    return found


# --- requirements ----------------------------------------------------------------------------------


def test_environment_yml_asks_for_what_pyproject_asks_for() -> None:
    listed = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    assert listed.pop() == {"pip": ["-e ."]}
    conda = {requirement.name: requirement for requirement in map(Requirement, listed)}
    assert conda.pop("pip").specifier == ""
    assert str(conda.pop("python").specifier) == PROJECT["project"]["requires-python"]
    (build,) = map(Requirement, PROJECT["build-system"]["requires"])
    assert conda.pop(build.name).specifier == build.specifier
    wanted = {{"torch": "pytorch"}.get(name, name): r.specifier for name, r in requirements().items()}
    assert {name: r.specifier for name, r in conda.items()} == wanted


def test_constraints_are_exact_and_within_the_ranges_of_pyproject() -> None:
    pinned = pins()
    for name, requirement in requirements().items():
        assert name in pinned, f"constraints.txt does not pin {name}"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} forbids {pinned[name]}"
    assert PROJECT["project"]["name"] not in pinned


def test_constraints_are_pins_and_nothing_else() -> None:
    """No index, no address, no path, no editable install, no build of one machine: usable anywhere."""
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line), line


def test_constraints_leave_the_cuda_libraries_to_torch() -> None:
    assert [name for name in pins() if name.startswith(("nvidia-", "cuda-"))] == []


# --- the wheel -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves its working files beside the source."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("hpnb", "tests", "notebooks"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    done = run(sys.executable, "-m", "pip", "wheel", ".", *options, folder=source)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_has_the_library_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hpnb").rglob("*.py")}
    assert "hpnb/py.typed" in names
    assert wheel.name.startswith(f"hpnb-{PROJECT['project']['version']}-")
    assert wheel.stat().st_size < 2e6
    assert not [name for name in names if name.endswith((".ipynb", ".png", ".gif"))]
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.split("/")[0] for name in names} == {"hpnb"}


@pytest.mark.parametrize(
    "more",
    [
        "",
        pytest.param(
            "for m in pkgutil.walk_packages(hpnb.__path__, 'hpnb.'): importlib.import_module(m.name)\n",
            marks=pytest.mark.slow,  # the wheel has all modules, and the API reference is made of each
        ),
    ],
    ids=["a lesson", "every module"],
)
def test_modules_import_from_the_wheel_and_a_lesson_alone_is_light(
    wheel: Path, tmp_path: Path, more: str
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, 'site'); import importlib, pkgutil, hpnb\n"
        "from hpnb import lesson\n"
        "print([m for m in ('matplotlib', 'ipywidgets', 'IPython', 'hpnb.plot') if m in sys.modules])\n"
        f"{more}"
        "print(hpnb.__file__, hpnb.__version__)"
    )
    done = run(sys.executable, "-c", code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    heavy, *_, last = done.stdout.splitlines()
    assert heavy == "[]"
    file, version = last.split()
    assert (tmp_path / file).resolve().is_relative_to(tmp_path.resolve())
    assert version == PROJECT["project"]["version"]


def test_the_wheel_has_a_console_script_and_keeps_the_torch_that_is_there(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    (scripts,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "hpnb = hpnb.__main__:main" in archive.read(scripts).decode()
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(metadata).decode().splitlines()
    asked = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    plain = {r.name: r for r in asked if r.marker is None}
    assert {"torch", "torchvision", "transformers", "datasets", "matplotlib", "ipywidgets"} <= set(plain)
    assert not {"pytest", "ruff", "mypy", "jupytext", "nbmake"} & set(plain)
    bounds = {specifier.operator for r in plain.values() for specifier in r.specifier}
    assert bounds == {">="}  # an upper bound would replace what is installed


@pytest.mark.slow
def test_the_sdist_builds_the_wheel(wheel: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "hpnb", source / "hpnb", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = "import setuptools.build_meta as build; build.build_sdist('dist')"
    assert run(sys.executable, "-c", code, folder=source).returncode == 0
    (sdist,) = (source / "dist").glob("*.tar.gz")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path)]
    done = run(sys.executable, "-m", "pip", "wheel", str(sdist), *options, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (again,) = tmp_path.glob("*.whl")
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


# --- a page alone ----------------------------------------------------------------------------------

PAGES = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_opens_in_colab_and_kaggle_and_says_how_to_install(page: Path) -> None:
    repository = PROJECT["project"]["urls"]["Documentation"].partition("#")[0]
    where = f"/blob/main/notebooks/{page.name}"
    links = [
        "https://colab.research.google.com/github" + repository.removeprefix("https://github.com") + where,
        f"https://kaggle.com/kernels/welcome?src={repository}{where}",
    ]
    nb = nbformat.read(page, as_version=4)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for link in links:
        assert f"]({link})" in nb.cells[0].source
        assert page != PAGES[0] or f"]({link})" in readme  # README opens the first; the pages have their own
    first = next(cell.source for cell in nb.cells if cell.cell_type == "code")
    said = next(i for i, line in enumerate(first.splitlines()) if "pip install hpnb" in line)
    assert all("hpnb" not in line for line in first.splitlines()[:said])  # before anything of it is imported


# --- what is committed -----------------------------------------------------------------------------


def committed() -> list[Path]:
    """Files that git tracks or is about to."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    done = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=ROOT)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


# Put together from pieces, or this file would be its own first finding.
FOLDERS = "|".join(["work", "root", "home", "Users"])
HOSTS = "|".join(["python" + "hosted", "py" + r"pi[\w-]*\.[a-z]", "conda" + r"\.anaconda"])
ELSEWHERE = re.compile(rf"(?<![\w.~*)}}\]-])/(?:{FOLDERS})/\w|{HOSTS}")


def test_no_committed_file_knows_a_machine_or_a_registry() -> None:
    found = []
    for path in committed():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # pictures
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := ELSEWHERE.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert found == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("open('/" + "home/ada/x')", True),
        ("at /" + "root/x.py", True),
        ("https://files.python" + "hosted.org/x", True),
        ("~/" + "work/x and notebooks/" + "work/x and https://example.org/" + "home/x", False),
    ],
)
def test_the_search_for_machines_and_registries_finds_them(text: str, found: bool) -> None:
    assert bool(ELSEWHERE.search(text)) is found


# --- the house -------------------------------------------------------------------------------------


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module, package: list[str]) -> list[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands; a `from` import gives each name in full."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            found += [(node.lineno, ".".join([*module, alias.name])) for alias in node.names]
    return found


def upward_imports(source: Path) -> list[str]:
    """Every import under source/hpnb that goes up, or sideways between rooms of one level, in words."""
    found = []
    for path in sorted((source / "hpnb").rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts  # ("hpnb", "ranks", "pool")
        room, where = parts[1], path.relative_to(source).as_posix()
        if room in ON_TOP:
            continue
        if room not in LEVEL:
            found.append(f"{where}: no room of that name in the house")
            continue
        for line, name in imported(parsed(path), list(parts[:-1])):
            package, _, rest = name.partition(".")
            target = rest.split(".")[0]
            if package != "hpnb" or target == room or target == "__version__":
                continue
            if target not in LEVEL:
                allowed = room in MAY_USE_THE_DOOR and target not in ON_TOP
            else:
                allowed = LEVEL[target] > LEVEL[room]
            if not allowed:
                found.append(f"{where}:{line}: {room} imports {name}")
    return found


def test_a_room_imports_only_rooms_below_it() -> None:
    assert upward_imports(ROOT) == []


@pytest.mark.parametrize(
    ("file", "code", "allowed"),
    [
        ("mesh.py", "from hpnb.ranks import rank", True),
        ("mesh.py", "from hpnb import comm", False),
        ("mesh.py", "from .comm import x", False),
        ("mesh.py", "def f():\n    import hpnb.plot.timeline", False),
        ("record/traffic.py", "if TYPE_CHECKING:\n    from hpnb.mesh import Axis", False),
        ("record/traffic.py", "from . import timeline\nfrom .timeline import Event", True),
        ("record/traffic.py", "from .. import ranks", True),
        ("record/traffic.py", "from ..plot import timeline", False),
        ("data_parallel/ddp.py", "from hpnb.pipeline_parallel import x", False),
        ("data_parallel/ddp.py", "from hpnb.gradients import GradientSink", True),
        ("theory/laws.py", "import hpnb", False),
        ("theory/laws.py", "from hpnb import __version__", True),
        ("theory/laws.py", "from hpnb import launch", False),
        ("theory/laws.py", "from hpnb import doctor", False),
        ("bench/launch.py", "import hpnb\nfrom hpnb import launch", True),
        ("bench/launch.py", "from hpnb.lesson import predict", False),
        ("lesson/ledger.py", "from hpnb.bench import launch", True),
        ("attic.py", "", False),
        ("doctor/report.py", "from hpnb.lesson import banner", True),
    ],
)
def test_the_rule_of_the_house(tmp_path: Path, file: str, code: str, allowed: bool) -> None:
    path = tmp_path / "hpnb" / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert (upward_imports(tmp_path) == []) is allowed


def arrows_between_files(source: Path) -> dict[str, set[str]]:
    """{module: the modules that it imports names from, also for type checkers alone or inside a function}."""
    paths = {path: path.relative_to(source).with_suffix("").parts for path in (source / "hpnb").rglob("*.py")}
    modules = {".".join(parts).removesuffix(".__init__") for parts in paths.values()}
    arrows: dict[str, set[str]] = {}
    for path, parts in paths.items():
        module = ".".join(parts).removesuffix(".__init__")
        targets = arrows.setdefault(module, set())
        for _, name in imported(parsed(path), list(parts[:-1])):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target not in (module, "hpnb"):  # `import hpnb` is the door of a page
                targets.add(target)
    return arrows


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Modules that need each other, such as [["hpnb.a", "hpnb.b"]]."""
    left = {module: set(targets) for module, targets in arrows.items()}
    while True:  # without those that import nothing that is left, and those that nothing left imports
        needed = set().union(*left.values())
        kept = {
            m: {t for t in targets if t in left} for m, targets in left.items() if m in needed and targets
        }
        if kept == left:
            break
        left = kept

    def reached(start: str) -> set[str]:
        seen, to_visit = set[str](), [start]
        while to_visit:
            new = left.get(to_visit.pop(), set()) - seen
            seen |= new
            to_visit += new
        return seen

    reach = {module: reached(module) for module in left}
    groups = {
        tuple(sorted(o for o in reach if o in reach[m] and m in reach[o])) for m in reach if m in reach[m]
    }
    return [list(group) for group in sorted(groups)]


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(arrows_between_files(ROOT)) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a": "from hpnb.b import x", "b": "from hpnb import c", "c": ""}, []),
        (
            {"a": "from hpnb.b import x", "b": "from .a import y", "c": "from . import a"},
            [["hpnb.a", "hpnb.b"]],
        ),
        ({"a": "from hpnb.b import x", "b": "def f():\n    from hpnb.a import y"}, [["hpnb.a", "hpnb.b"]]),
        (
            {"a": "from hpnb.b import x", "b": "import hpnb.c", "c": "from hpnb import a"},
            [["hpnb.a", "hpnb.b", "hpnb.c"]],
        ),
    ],
)
def test_what_a_circle_is(tmp_path: Path, files: dict[str, str], expected: list[list[str]]) -> None:
    (tmp_path / "hpnb").mkdir()
    for name, code in files.items():
        (tmp_path / "hpnb" / f"{name}.py").write_text(code)
    assert circles(arrows_between_files(tmp_path)) == expected


def test_two_files_name_a_module_above_them_and_import_it_later() -> None:
    upward = set()
    for path in (ROOT / "hpnb").rglob("*.py"):
        room = path.relative_to(ROOT).with_suffix("").parts[1]
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Constant) and re.fullmatch(r"hpnb\.\w[\w.]*", str(node.value)):
                module = str(node.value)
                if room in LEVEL and LEVEL.get(module.split(".")[1], len(HOUSE)) < LEVEL[room]:
                    upward.add((path.relative_to(ROOT).as_posix(), module))
    check = ("hpnb/models/__init__.py", "hpnb.hybrid.check_model")
    assert upward == {check, ("hpnb/ranks/forkserver.py", "hpnb.plot")}  # which a server imports ahead


def test_type_checkers_know_the_arguments_of_the_check() -> None:
    arguments = set()
    for name in ("models/__init__.py", "hybrid/check_model.py"):
        tree = ast.parse((ROOT / "hpnb" / name).read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        arguments |= {ast.unparse(function.args) for function in functions if function.name == "check"}
    assert len(arguments) == 1


# --- the Makefile ----------------------------------------------------------------------------------


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("no make")
    return run("make", "--no-print-directory", *arguments, folder=folder)


def test_make_alone_says_what_there_is() -> None:
    done = make(ROOT)
    assert done.returncode == 0
    for target in ("notebooks", "lab", "test", "clean"):
        assert f"make {target} " in done.stdout


@pytest.mark.parametrize(
    ("python", "said"),
    [("./old-python", "'./old-python' is Python 3.9.2"), ("./none", "there is no './none'")],
)
def test_make_refuses_an_old_python_in_one_sentence(tmp_path: Path, python: str, said: str) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2 || exit 1\n')
    old.chmod(0o755)
    done = make(tmp_path, f"PYTHON={python}", "notebooks")
    sentence, *rest = done.stderr.splitlines()
    assert done.returncode != 0
    assert sentence.startswith("hpnb needs Python 3.11 or newer")
    assert said in sentence
    assert all(line.startswith("make") for line in rest)
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


# --- running the series ----------------------------------------------------------------------------


def notebook(path: Path, *cells: str) -> None:
    content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    content.metadata["kernelspec"] = {"name": "elsewhere", "display_name": "a kernel of someone's own"}
    nbformat.write(content, path)


def test_notebooks_run_in_order_with_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    user = tmp_path / "user" / "kernels" / "python3"
    user.mkdir(parents=True)
    user.joinpath("kernel.json").write_text('{"argv": ["false"], "display_name": "x", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "user"))
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    notebook(source / "01-second.ipynb", "print('before')", "1 / 0", "print('after')")
    notebook(source / "00-first.ipynb", "import sys, os", "print(sys.executable, os.getcwd())")
    assert execute.main([str(source), str(target)]) == 1

    output = capsys.readouterr()
    first, second = output.out.splitlines()
    assert re.fullmatch(r"00-first\.ipynb +\d+\.\d s  ok", first)
    assert re.fullmatch(r"01-second\.ipynb +\d+\.\d s  FAILED", second)
    assert output.err.splitlines() == [f"{target / '01-second.ipynb'}: ZeroDivisionError: division by zero"]
    assert sorted(path.name for path in target.iterdir()) == ["00-first.ipynb", "01-second.ipynb"]

    printed = nbformat.read(target / "00-first.ipynb", as_version=4).cells[1].outputs[0].text.split()
    assert printed == [sys.executable, str(source)]
    failed = nbformat.read(target / "01-second.ipynb", as_version=4).cells
    assert failed[1].outputs[0].ename == "ZeroDivisionError"
    assert failed[2].outputs == []


def test_a_notebook_that_hangs_is_stopped(tmp_path: Path) -> None:
    """The limit is the notebook's: it holds over cells that would each have stayed within it."""
    notebook(tmp_path / "slow.ipynb", *["import time; time.sleep(2)"] * 9)
    start = time.perf_counter()
    failure = execute.execute(tmp_path / "slow.ipynb", tmp_path / "out.ipynb", timeout=3.0)
    assert failure == "stopped after 3 s"
    assert time.perf_counter() - start < 15


def test_no_notebooks_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "not yet"):
        assert execute.main([str(folder), str(tmp_path / "out")]) == 0
        assert capsys.readouterr().out.startswith("no notebooks")
    with pytest.raises(SystemExit):
        execute.main([str(tmp_path / "none.ipynb"), str(tmp_path / "out")])
