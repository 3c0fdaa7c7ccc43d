"""What a notebook and a prompt show of an artifact: a few lines, and charts without scripts."""

from __future__ import annotations

import html
import re

import pytest
import torch

from plimsoll.artifacts.store import Artifact
from plimsoll.artifacts.trace import Trace
from plimsoll.tracing.trace import trace
from plimsoll.ui.views import view
from samples import make_plan
from steps import Stack, mean_square
from ui.view_samples import ARTIFACTS

MOST_LINES, MOST_LETTERS = 8, 2000


@pytest.mark.parametrize("artifact", ARTIFACTS.values(), ids=ARTIFACTS)
def test_the_repr_of_an_artifact_is_a_few_lines(artifact: Artifact):
    shown = repr(artifact)
    assert shown.startswith(view(artifact).headline)
    assert len(shown) < MOST_LETTERS
    assert shown.count("\n") < MOST_LINES


@pytest.mark.parametrize("artifact", ARTIFACTS.values(), ids=ARTIFACTS)
def test_a_notebook_shows_the_headline_and_everything_as_text(artifact: Artifact):
    shown = artifact._repr_html_()
    text = html.unescape(re.sub(r"<[^>]*>", "", shown))
    assert view(artifact).headline in text
    assert str(artifact) in text
    assert "<script" not in shown


def test_names_of_a_model_are_escaped_in_a_notebook():
    shown = make_plan(model="<img src=x>")._repr_html_()
    assert "<img" not in shown
    assert "&lt;img src=x&gt;" in shown


def test_the_repr_of_a_trace_counts_what_it_holds():
    found: Trace = trace(Stack(2, 8), torch.randn(4, 8), loss=mean_square)
    assert repr(found).startswith("Trace of Stack on cpu\n")
    assert f"{len(found.ops)} ops, 2 region calls" in repr(found)
    assert found._repr_html_().startswith("<pre>Trace of Stack")
