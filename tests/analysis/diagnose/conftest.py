"""Comparisons of two traces that a test has written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.diagnose.builders import ChromeBuilder, NsysBuilder
from plimsoll.analysis.diagnose.comparison import compare_profiles
from plimsoll.analysis.diagnose.diagnose import read_profiles
from plimsoll.artifacts.finding import Finding

Builder = ChromeBuilder | NsysBuilder
Compare = Callable[..., Finding]


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    """Write two builders' traces, read them back and compare them."""

    def run(baseline: Builder, plan: Builder, *, bandwidth: float | None = None) -> Finding:
        suffix = "json" if isinstance(baseline, ChromeBuilder) else "sqlite"
        paths = baseline.write(tmp_path / f"baseline.{suffix}"), plan.write(tmp_path / f"plan.{suffix}")
        before, after, origin = read_profiles(*paths)
        finding = compare_profiles(before, after, origin=origin, bandwidth=lambda name: bandwidth)
        assert sum(part.seconds for part in finding.parts) == pytest.approx(finding.overhead_seconds, abs=1e-12)
        return finding

    return run
