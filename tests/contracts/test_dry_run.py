"""What a GPU is asked in one command, asked on a CPU: contracts, peers and Plimsoll at equal peaks, one page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmarks import gpu, peers

CHEAP = "tests/contracts/test_codecs.py::test_bool_masks_come_back"


@pytest.fixture(autouse=True)
def _two_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ON_A_GPU", (peers.EAGER[0], peers.ON_A_GPU[3]))


def test_a_dry_run_prints_the_page_with_what_was_measured_and_what_was_not(capfd: pytest.CaptureFixture[str]):
    assert gpu.main(["--device", "cpu", "--rounds", "1", "--contracts", CHEAP]) == 0
    page = capfd.readouterr().out.partition("# Time against memory")[2]
    assert "\n1 passed, 0 failed, 0 skipped.\n" in page
    [row] = [line.split(" | ") for line in page.splitlines() if line.startswith("| checkpoint every block")]
    assert float(row[9]) <= float(row[4]), "ours keeps to the peer's peak"
    assert row[5:7] == ["equal", "equal"]
    assert "not measured: TRL's activation offloading: it needs " in page


def test_without_time_or_packages_it_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path
):
    assert gpu.main(["--device", "cpu", "--rounds", "1", "--minutes", "0", "--contracts"]) == 0
    page = capsys.readouterr().out
    assert "Not asked in this run." in page
    assert "checkpoint every block: it needs more time" in page
    monkeypatch.setattr(gpu, "_NEEDED", ("torch", "no_such_package"))
    assert gpu.main(["--device", "cpu"]) == 2
    assert f"{sys.executable} lacks no_such_package" in capsys.readouterr().out


def test_a_failed_contract_is_named_and_fails_the_run(tmp_path: Path, monkeypatch):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="b"><failure/></testcase>'
        '<testcase classname="tests.a" name="c"/><testcase classname="tests.a" name="d"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    found = gpu._read(report, code=1)
    assert (found.summary, found.failed, found.is_kept) == (
        "1 passed, 1 failed, 1 skipped.",
        ("tests.a::b",),
        False,
    )
