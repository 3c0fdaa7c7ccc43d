"""Writes messages of the library with the options of the command line: ``--max-error 1%`` for ``max_error="1%"``.

Errors are written for Python, because the same functions are called from Python and from the command line. Only the notation
of options changes here; the sentences stay.
"""

from __future__ import annotations

import re
import shlex

from plimsoll.errors import PlimsollError

_FLAGS = {
    name: f"--{flag or name.replace('_', '-')}"
    for name, flag in {
        **dict.fromkeys(
            (
                "budget",
                "strategy",
                "regions",
                "device_profile",
                "allow",
                "max_error",
                "host_budget",
                "link",
                "optimizer",
            ),
            "",
        ),
        **dict.fromkeys(("layout", "techniques", "precision", "export", "device", "global_batch", "accumulation"), ""),
        **dict.fromkeys(
            ("most_batch", "keep_traces", "held_out", "target_loss", "steps", "seed", "receipt", "verdict"), ""
        ),
        "overrides": "override",
        "sequences": "seq",
        "sequence": "seq",
        "curve_steps": "curve",
        "most_solves": "solves",
        "has_master_weights": "master-weights",
    }.items()
}
"""For each keyword of a public function, the option of the command line with the same meaning."""
_LOSS = re.compile(r"(pass|give) loss=lambda output: \.\.\.")
_SEVERAL = r"""[({](?:\s*["'][^"']*["']\s*,?)+[)}]"""
_VALUE = rf"""{_SEVERAL}|"[^"]*"|'[^']*'|[^\s,;()"']+(?<![.:])|"""
_OPTION = re.compile(rf"(?<![\w.\-/\\])({'|'.join(_FLAGS)})=({_VALUE})")
_WORDS = re.compile(r"""["']([^"']*)["']""")


def in_flags(text: str) -> str:
    """Return a part of an error message with options of Python functions written as options of the command line.

    Example:
        >>> in_flags("pass allow=('recompute', 'offload') or allow={'recompute'}, leave max_error out: budget='7GiB'")
        'pass --allow recompute,offload or --allow recompute, leave --max-error out: --budget 7GiB'
        >>> in_flags("runs/budget=8/plan.json cannot be read")
        'runs/budget=8/plan.json cannot be read'
    """
    text = _LOSS.sub("let the target return (model, batch, loss), with a function loss(output)", text)
    text = _OPTION.sub(lambda found: _as_flag(*found.groups()), text)
    return _LEFT_OUT.sub(lambda found: f"{found[1]} {_FLAGS[found[2]]} out", text)


_LEFT_OUT = re.compile(rf"\b(leave) ({'|'.join(name for name in _FLAGS if '_' in name)}) out")


def _as_flag(name: str, value: str) -> str:
    words = _WORDS.findall(value)
    if value.startswith(("(", "{")):
        value = ",".join(words)
    elif words:
        value = shlex.quote(words[0])
    return f"{_FLAGS[name]} {value}" if value else _FLAGS[name]


def as_typed(error: PlimsollError) -> tuple[str, str, str]:
    """Return the three parts of an error (what was found, why, and what to do next) with Python options written as command-line
    options.
    """
    return in_flags(error.found), in_flags(error.why), in_flags(error.next)
