"""``python -m plimsoll``, and ``torchrun -m plimsoll``: the command line."""

from plimsoll.ui.cli.app import main

if __name__ == "__main__":
    main()
