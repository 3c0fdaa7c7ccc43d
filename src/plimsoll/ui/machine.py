"""An error in, JSON out, for those who read Plimsoll by program. Artifacts have ``artifacts.store.to_json``."""

from __future__ import annotations

import json

from plimsoll.errors import PlimsollError


def render_error_json(error: PlimsollError) -> str:
    """The error's kind, its three parts and its exit code.

    Example:
        >>> print(render_error_json(PlimsollError("a", why="b", next="c")))  # doctest: +ELLIPSIS
        {
          "plimsoll": "error",
          "error": "PlimsollError",
          ...
    """
    fields = {
        "plimsoll": "error",
        "error": type(error).__name__,
        "found": error.found,
        "why": error.why,
        "next": error.next,
        "exit_code": error.exit_code,
    }
    return json.dumps(fields, indent=2, ensure_ascii=False)
