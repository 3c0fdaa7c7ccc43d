"""The law of layers, read from every import (lazy and type-checking ones too), and what keeps the house readable."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import plimsoll

PACKAGE = Path(plimsoll.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LAYERS = (
    {"errors"},
    {"units"},
    {"artifacts"},
    {"planning", "tracing"},
    {"engine"},
    {"session"},
    {"analysis", "estimator"},
    {"distributed"},
    {"integrations"},
    {"ui"},
)
"""A room imports from itself and from layers above its own line; two rooms of one line do not know each other."""
FRONT = {"__init__", "__main__", "chunked", "lengths"}
"""Public pages: they name what the rooms hold, and no room imports them."""
WITHOUT_TORCH = {"errors", "units", "artifacts", "planning"}
"""Plans can be read, solved and shown where there is no torch."""
MOST_PACKAGES = 11
MOST_PARAMETERS = 9
MOST_PUBLIC_NAMES = 16
PUBLIC_VERBS = {
    *plimsoll.__all__,
    *("chunk_loss", "linear_cross_entropy", "longest_sequence"),
    *("attach_schedule", "apply_stages", "compress_gradients", "advise_compression"),
}
"""What users call: keywords are their interface."""


def name_of(path: Path) -> str:
    """The dotted name of the module in a file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """Absolute names of everything that a file imports anywhere: lazily, by name, or for type checking only."""
    return frozenset(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
    package = path.relative_to(PACKAGE.parent).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in MODULES:
            yield node.value


def neighbours(path: Path) -> set[str]:
    """The modules of Plimsoll that a file imports, itself and package pages aside."""
    found = set()
    for name in imports_of(path):
        while name not in MODULES and "." in name:
            name = name.rpartition(".")[0]
        if name in MODULES and MODULES[name].name != "__init__.py":
            found.add(name)
    return found - {name_of(path)}


def room_of(module: str) -> str:
    """The room, or the top-level file, that a module belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def definitions(kind: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    """Every definition of one kind in the package, with its file."""
    for path in FILES:
        yield from (
            (path, node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kind)
        )


def show(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_every_room_imports_only_from_the_layers_before_its_own():
    level = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
    broken = [
        f"{show(path)} -> {module}"
        for path in FILES
        for module in neighbours(path)
        if (here := room_of(name_of(path))) not in FRONT and here != (there := room_of(module))
        if there in FRONT or level[there] >= level[here]
    ]
    assert not broken


def test_no_room_has_a_circle_of_files():
    graph = {name_of(path): neighbours(path) for path in FILES if path.name != "__init__.py"}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_plans_can_be_solved_and_shown_without_torch():
    broken = [
        f"{show(path)} -> {name}"
        for path in FILES
        if room_of(name_of(path)) in WITHOUT_TORCH
        for name in imports_of(path)
        if name.split(".")[0] in {"torch", "transformers"}
    ]
    assert not broken


PRIVATE_BY_NAME_ALONE = (
    *("torch._ops", "torch._subclasses", "torch._dynamo", "torch._functorch", "torch.ops.", "torch._foreach"),
    *("torch.utils._pytree", "torch.utils._python_dispatch", "torch.distributed._functional_collectives"),
)
"""What torch's own guides tell writers of extensions to use."""


def private_names_of_torch(path: Path) -> Iterator[str]:
    """Dotted private names that a file takes from torch, by import, as an attribute or as a text."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = set(known.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"\w+(\.\w+)+", name := ast.unparse(node)):
            root, _, rest = name.partition(".")
            found |= {f"{known[root]}.{rest}"} if root in known else set()
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value)):
            found.add(node.value)
    for name in found:
        is_private = name.startswith("torch._C.") or re.search(r"\._(?!_)\w*$", name)
        if is_private and not name.startswith(PRIVATE_BY_NAME_ALONE):
            yield name


def test_a_private_name_of_torch_is_used_in_one_file_which_says_where_it_was_seen():
    users = {path: set(private_names_of_torch(path)) for path in FILES}
    counts = Counter(name for names in users.values() for name in names)
    assert [name for name, count in counts.items() if count > 1] == []
    assert [
        show(path)
        for path, names in users.items()
        if names
        if not re.search(r"[Ss]een in torch 2\.\d", path.read_text())
    ] == []


def test_the_demo_uses_the_public_surface_alone():
    allowed = {"ui.demo", "units", "artifacts", *plimsoll.__all__}
    for path in FILES:
        if show(path).startswith("ui/demo/"):
            used = {name for name in neighbours(path) if not name.startswith("plimsoll.ui.demo")}
            assert {room_of(name) for name in used} <= allowed


def test_the_house_has_few_rooms():
    packages = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert {path.name for path in packages} == set().union(*LAYERS) - {"errors", "units"}
    assert len(packages) <= MOST_PACKAGES


def test_the_page_of_concepts_names_files_that_exist():
    page = (PACKAGE.parents[1] / "docs" / "project" / "design" / "where-is-what.md").read_text(encoding="utf-8")
    addresses = re.findall(r"^\| .+ \| `(.+)` \|$", page, re.MULTILINE)
    assert len(addresses) >= 30
    assert [address for address in addresses if not (PACKAGE / address).exists()] == []


def test_functions_inside_the_library_take_few_parameters():
    crowded = [
        f"{show(path)}: {node.name}"
        for path, node in definitions(ast.FunctionDef)
        if not show(path).startswith("ui/cli/") and node.name not in PUBLIC_VERBS
        if len(parameters_of(node)) > MOST_PARAMETERS
    ]
    assert crowded == []


def parameters_of(node: ast.FunctionDef) -> list[str]:
    """Names of a function's parameters, the object itself aside."""
    given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return [each.arg for each in given if each.arg not in {"self", "cls"}]


def test_no_public_class_has_a_namesake():
    names = Counter(node.name for _, node in definitions(ast.ClassDef) if not node.name.startswith("_"))
    shared = {"PlimsollCallback"}  # a framework's users look it up in the framework's own file
    assert {name for name, count in names.items() if count > 1} <= shared


@pytest.mark.parametrize("path", FILES, ids=show)
def test_every_file_says_what_it_is_for_in_plain_words(path: Path):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring
    first = docstring.split("\n\n")[0].replace("\n", " ").rstrip(".")
    assert not (first.endswith(" out") and (" in, " in first or " in; " in first)), first


def test_what_several_ranks_need_is_there_without_an_import_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(plimsoll, "distributed", raising=False)
    assert "attach_schedule" in plimsoll.distributed.__all__


def test_the_public_surface_is_sorted_and_small():
    assert list(plimsoll.__all__) == sorted(plimsoll.__all__)
    assert len(plimsoll.__all__) <= MOST_PUBLIC_NAMES
    assert set(plimsoll.__all__) <= set(dir(plimsoll))


@pytest.mark.parametrize("name", plimsoll.__all__)
def test_every_public_name_exists_and_is_documented(name: str):
    assert getattr(plimsoll, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="estimate_everything"):
        plimsoll.estimate_everything  # noqa: B018 - reading it is the test


def test_importing_plimsoll_loads_nothing_heavy():
    loaded = modules_after("import plimsoll")
    assert not {"torch", "scipy", "numpy", "rich", "typer", "networkx", "msgspec"} & loaded


def test_reading_a_plan_loads_no_torch():
    loaded = modules_after("import plimsoll.artifacts.store, plimsoll.planning.replay_schedule")
    assert not {"torch", "scipy", "rich"} & loaded


def modules_after(script: str) -> set[str]:
    """What a fresh interpreter has loaded after a line of Python."""
    command = [sys.executable, "-c", f"{script}; import sys; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_importing_plimsoll_takes_less_than_a_tenth_of_a_second():
    script = "import time; t = time.process_time(); import plimsoll; print(time.process_time() - t)"
    taken_seconds = []
    for _ in range(5):
        output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        taken_seconds.append(float(output))
        time.sleep(0.01)
    assert min(taken_seconds) < 0.1
