"""``python -m plimsoll``, ``torchrun -m plimsoll`` and the installed ``plimsoll``: the command line."""

import sys


def main() -> None:
    """Run the command line, and return its exit status. Ctrl-C during the imports also ends with exit code 130, without a
    traceback.
    """
    try:
        from plimsoll.ui.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
