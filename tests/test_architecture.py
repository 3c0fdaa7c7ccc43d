"""The import law, read from the source: stages do not know each other, and some of them do not know torch."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import plimsoll

PACKAGE = Path(plimsoll.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
STAGES = {
    "advising",
    "allocating",
    "compiler",
    "diagnosis",
    "estimating",
    "explaining",
    "fitting",
    "profiling",
    "tracing",
    "costing",
    "planning",
    "runtime",
    "verification",
    "ui",
    "probing",
    "sharding",
    "layouts",
    "pipelining",
    "gradient_compression",
    "metering",
    "traffic",
}
"""What hands over artifacts; only the wiring below may know several of them."""
WIRING = {"pipeline", "cli", "distributed"}
WITHOUT_TORCH = {
    "artifacts",
    "diagnosis",
    "planning",
    "ui",
    "schedule",
    "units",
    "errors",
    "catalogue",
    "caching",
    "advising",
    "allocating",
    "changes",
    "estimating",
    "explaining",
    "fitting",
    "layouts",
    "pipelining",
    "traffic",
}
BASES = {
    "chunked": {"pipeline"},
    "codecs": {"costing", "runtime", "pipeline", "gradient_compression"},
    "links": {"costing", "runtime", "pipeline"},
    "ranks": {"runtime", "pipeline", "distributed", "gradient_compression", "cli"},
    "recording": {"tracing", "runtime", "verification", "pipeline", "probing", "compiler", "distributed"},
    "resuming": {"distributed"},
    "targets": {"cli", "pipeline"},
    "caching": {"cli", "pipeline"},
    "measuring": {"tracing", "costing", "runtime", "verification", "pipeline", "probing", "distributed"},
    "wrappers": {
        "resuming",
        "recording",
        "measuring",
        "tracing",
        "runtime",
        "verification",
        "pipeline",
        "probing",
        "distributed",
    },
}
"""Shared torch code, and who may import it."""
MOST_LINES = 500
MOST_FUNCTION_LINES = 60
MOST_PUBLIC_NAMES = 16


@functools.cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Absolute names of everything that a file imports anywhere: lazily, or for type checking only."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
    package = ["plimsoll", *path.relative_to(PACKAGE).with_suffix("").parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def home_of(path: Path) -> str:
    """The stage or top-level module that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def parts_used_by(path: Path) -> set[str]:
    """Stages and top-level modules of Plimsoll that a file imports."""
    names = (name.split(".") for name in imports_of(path))
    return {parts[1] for parts in names if parts[0] == "plimsoll" and len(parts) > 1}


def show(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", [p for p in MODULES if home_of(p) in STAGES], ids=show)
def test_stages_never_import_each_other(path: Path):
    assert parts_used_by(path) & STAGES <= {home_of(path)}


@pytest.mark.parametrize("path", [p for p in MODULES if home_of(p) not in STAGES | WIRING], ids=show)
def test_only_the_wiring_imports_stages(path: Path):
    assert not parts_used_by(path) & (STAGES - {home_of(path)})


@pytest.mark.parametrize("path", [p for p in MODULES if home_of(p) not in {"cli", "__main__"}], ids=show)
def test_only_the_command_line_imports_the_command_line(path: Path):
    assert "cli" not in parts_used_by(path)


@pytest.mark.parametrize("path", [p for p in MODULES if home_of(p) not in WIRING | {"__init__"}], ids=show)
def test_nothing_below_the_wiring_imports_the_wiring(path: Path):
    assert "pipeline" not in parts_used_by(path)


@pytest.mark.parametrize("path", [p for p in MODULES if home_of(p) in WITHOUT_TORCH], ids=show)
def test_plans_can_be_solved_and_shown_without_torch(path: Path):
    assert not [name for name in imports_of(path) if name.split(".")[0] in {"torch", "transformers"}]


@pytest.mark.parametrize("path", [p for p in MODULES if home_of(p) in {"artifacts", "schedule", "units"}], ids=show)
def test_artifacts_know_nothing_but_artifacts(path: Path):
    assert parts_used_by(path) <= {"artifacts", "errors", "units", "schedule"}


@pytest.mark.parametrize("base", BASES)
def test_shared_torch_code_is_imported_only_by_those_who_may(base: str):
    users = {home_of(path) for path in MODULES if base in parts_used_by(path)} - {base}
    assert users <= BASES[base]


@pytest.mark.parametrize("path", [p for p in MODULES if home_of(p) in {"demo"}], ids=show)
def test_the_demo_uses_the_public_surface_alone(path: Path):
    allowed = {"demo", "units", "artifacts", *plimsoll.__all__}
    assert parts_used_by(path) <= allowed


@pytest.mark.parametrize("path", MODULES, ids=show)
def test_files_and_functions_stay_small(path: Path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < MOST_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = (ast.get_docstring(node, clean=False) or "").count("\n")
            assert (node.end_lineno or 0) - node.lineno - docstring < MOST_FUNCTION_LINES, f"{node.name} is long"


@pytest.mark.parametrize("path", [p for p in MODULES if p.read_text(encoding="utf-8").strip()], ids=show)
def test_every_file_says_what_it_is_for(path: Path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


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
    script = "import sys, plimsoll; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "scipy", "numpy", "rich", "typer", "networkx", "msgspec"} & set(loaded)


def test_reading_a_plan_loads_no_torch():
    script = "import sys, plimsoll.artifacts.store, plimsoll.artifacts.summary, plimsoll.schedule; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "scipy", "rich"} & set(loaded)


def test_importing_plimsoll_takes_less_than_a_tenth_of_a_second():
    script = "import time; t = time.perf_counter(); import plimsoll; print(time.perf_counter() - t)"
    taken_seconds = []
    for _ in range(5):
        output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        taken_seconds.append(float(output))
        time.sleep(0.01)
    assert min(taken_seconds) < 0.1
