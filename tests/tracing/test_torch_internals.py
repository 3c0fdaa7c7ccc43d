"""A torch that lacks a private name is refused; one that is newer than those that were tried is warned of, once."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import plimsoll
from plimsoll.distributed import compress_gradients
from plimsoll.errors import PlimsollError, UnsupportedTorch, UntriedTorch
from plimsoll.tracing.torch_internals import TRIED, internal, is_at_least, warn_if_untried
from samples import make_plan

MAJOR, MINOR = TRIED[-1]
NEWER = f"{MAJOR}.{MINOR + 1}.0"


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> Iterator[None]:
    warn_if_untried.cache_clear()
    yield
    warn_if_untried.cache_clear()


def warned_with(version: str) -> list[str]:
    """The warnings of two calls under a torch of that version."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(torch, "__version__", version)
        warn_if_untried()
        warn_if_untried()
    return [str(each.message) for each in caught if each.category is UntriedTorch]


@pytest.mark.parametrize(
    "version", [NEWER, f"{NEWER}.dev20261201+cu132", f"{MAJOR}.{MINOR + 1}.0a0+git1a2b3c", "3.0.0rc1"]
)
def test_a_newer_minor_version_is_warned_of_once_before_its_release_too(version):
    (text,) = warned_with(version)
    assert f"torch {version} is newer" in text
    assert "UntriedTorch" in text


@pytest.mark.parametrize("version", [".".join(map(str, each)) for each in TRIED] + ["2.12"])
@pytest.mark.parametrize("rest", [".0", ".9", ".0+cpu", ".0.dev20261101+cu130", ".0rc2", ".0a0+git1a2b3c"])
def test_every_build_of_a_version_that_was_tried_and_whatever_is_older_passes(version, rest):
    assert warned_with(version + rest) == []


def test_versions_are_compared_as_numbers(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert is_at_least(2, 9)
    assert not is_at_least(2, 11)


@pytest.mark.parametrize(
    "verb",
    [
        lambda model: plimsoll.plan(model, None, budget="1GiB"),
        lambda model: plimsoll.apply(model, None),
        lambda model: plimsoll.attach(model, budget="1GiB"),
        lambda model: plimsoll.verify(model, None),
        lambda model: plimsoll.compare(model, None, budget="1GiB"),
        lambda model: plimsoll.explain(model, None),
        lambda model: plimsoll.advise(model, None),
        lambda model: plimsoll.probe(model, None, None, steps=1),
        lambda model: plimsoll.diagnose(model, None, make_plan()),
        lambda model: plimsoll.estimate(model, batch=None),
        lambda model: plimsoll.fit(model, None, budget="1GiB"),
        lambda model: compress_gradients(nn.Linear(1, 1), "topk:1%"),
    ],
)
def test_the_first_verb_that_takes_a_model_warns_at_the_users_line(monkeypatch, verb):
    monkeypatch.setattr(torch, "__version__", NEWER)
    with pytest.warns(UntriedTorch) as caught, pytest.raises(PlimsollError):
        verb(["no model"])
    assert [Path(each.filename) for each in caught if each.category is UntriedTorch] == [Path(__file__)]


def test_a_filter_silences_the_warning_or_makes_it_an_error_in_every_call(monkeypatch):
    monkeypatch.setattr(torch, "__version__", NEWER)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UntriedTorch)
        for _ in range(2):
            with pytest.raises(UntriedTorch):
                warn_if_untried()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=UntriedTorch)
        warn_if_untried()
    assert caught == []


def test_importing_the_verbs_does_not_warn():
    script = f"import torch; torch.__version__ = {NEWER!r}; from plimsoll import plan, apply, attach"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_private_name_that_is_missing_names_the_versions_that_have_it():
    with pytest.raises(UnsupportedTorch, match=f"2.11 to {MAJOR}.{MINOR}"):
        internal("torch._C._no_such_name")
