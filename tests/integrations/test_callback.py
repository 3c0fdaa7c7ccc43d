"""``from plimsoll import PlimsollCallback`` gives the callback of the trainer that the program uses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from plimsoll.errors import UnsupportedFramework
from plimsoll.integrations import callback
from plimsoll.integrations.callback import PlimsollCallback

pytestmark = pytest.mark.long

HOMES = {
    "from transformers import Trainer": "plimsoll.integrations.transformers",
    "import lightning.pytorch": "plimsoll.integrations.lightning",
}


@pytest.mark.parametrize("line", HOMES)
def test_the_trainer_that_is_imported_decides_also_if_it_comes_later(line: str):
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    script = f"""
from plimsoll import PlimsollCallback
import sys
assert "torch" not in sys.modules
{line}
made = PlimsollCallback("1GiB", verify_every=0)
assert isinstance(made, PlimsollCallback)
print(type(made).__module__)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout.strip() == HOMES[line], run.stderr[-2000:]


def imported(monkeypatch: pytest.MonkeyPatch, *modules: str, installed: tuple[str, ...] = ()) -> None:
    monkeypatch.setattr(callback, "sys", type("sys", (), {"modules": dict.fromkeys(modules)}))
    monkeypatch.setattr(callback, "find_spec", lambda name: name if name in installed else None)


@pytest.mark.parametrize(
    ("modules", "installed", "found"),
    [
        (("transformers.trainer",), ("transformers", "lightning"), "transformers"),
        (("transformers", "pytorch_lightning"), ("transformers", "pytorch_lightning"), "lightning"),
        ((), ("transformers",), "transformers"),
        ((), ("lightning",), "lightning"),
    ],
)
def test_the_framework_in_use_comes_before_one_that_is_only_installed(monkeypatch, modules, installed, found):
    imported(monkeypatch, *modules, installed=installed)
    assert callback._framework() == found


def test_without_a_framework_the_error_names_what_to_install(monkeypatch):
    imported(monkeypatch)
    with pytest.raises(UnsupportedFramework, match="neither is installed") as caught:
        PlimsollCallback("1GiB")
    assert "pip install transformers" in caught.value.next


@pytest.mark.parametrize("modules", [(), ("transformers.trainer", "lightning.pytorch")])
def test_with_both_the_error_names_both_addresses(monkeypatch, modules):
    imported(monkeypatch, *modules, installed=("transformers", "lightning"))
    with pytest.raises(UnsupportedFramework, match="cannot tell which trainer") as caught:
        PlimsollCallback("1GiB")
    assert "plimsoll.integrations.transformers" in caught.value.next
    assert "plimsoll.integrations.lightning" in caught.value.next
