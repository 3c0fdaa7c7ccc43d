"""Writes the page of a session from its lines, also of a session that was cut off.

python -m benchmarks.gpu_session.page                    # lines of $OUT or build/gpu-session; benchmarks/results/gpu.md
python -m benchmarks.gpu_session.page --lines FOLDER --page FILE
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_session.settings import ROOT, make_importable, results_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page and write it; 0, or 1 where a contract failed, or 2 where the folder is empty."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_session.page", description="Write the page of a session from its lines."
    )
    parser.add_argument("--lines", type=Path, default=results_folder(), help="folder of the lines")
    parser.add_argument("--page", type=Path, help="the file to write (a dry run is only printed, unless this is given)")
    options = parser.parse_args(arguments)
    from benchmarks.gpu_session.report import Results, write

    results = Results.read(options.lines)
    if not results.runs:
        print(f"{options.lines} holds nothing that was measured. First: python -m benchmarks.gpu_session")
        return 2
    text = "\n".join(write(results)) + "\n"
    page = options.page or (None if results.is_dry else ROOT / "benchmarks" / "results" / "gpu.md")
    if page is not None:
        page.write_text(text, encoding="utf-8")
    print(text)
    return 1 if results.failed_contracts else 0


if __name__ == "__main__":
    make_importable()
    raise SystemExit(main())
