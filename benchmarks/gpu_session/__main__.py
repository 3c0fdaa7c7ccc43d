"""The command of a session. It prepares the environment before anything imports torch."""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.gpu_session.settings import make_importable, results_folder, set_variables


def main(arguments: list[str] | None = None) -> int:
    started = time.monotonic()
    given = sys.argv[1:] if arguments is None else arguments
    options = _parse(given)
    make_importable()
    set_variables(options.device)
    from benchmarks.gpu_session import driver

    folder = results_folder()
    if options.stage:
        return driver.run_stage(options.stage, options.part, options.device, folder, options.limit)
    command = " ".join(["python -m benchmarks.gpu_session", *given])
    return driver.drive(options.only, options.device, options.seconds, folder=folder, command=command, started=started)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_session", description="Measure on a GPU, stage by stage."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run at tiny sizes")
    parser.add_argument("--seconds", type=float, default=540.0, help="how long all of it may take (default 540)")
    parser.add_argument(
        "--only", nargs="+", metavar="STAGE", help="stages to run (default: all that there is time for)"
    )
    parser.add_argument("--stage", help="run one stage in this process")
    parser.add_argument("--part", default="", help="which part of that stage")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for that stage")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
