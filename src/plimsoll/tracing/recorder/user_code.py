"""Finds the line of the user's code that is running."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import torch

_NOT_THE_USERS = ("<", f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}")
"""Prefixes of the names of files with torch's code, our code or generated code."""


def line_of_user() -> str:
    """Return the place of the user's code that is running now, as file and line, for messages. Return "" if only other code is
    running.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def short_line_of_user() -> str:
    """Return `line_of_user` without the folder. Plans are files that others read: they name no folders of this machine."""
    return Path(line_of_user()).name
