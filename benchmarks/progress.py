"""What a long run is doing, on stderr."""

from __future__ import annotations

import sys
import time

_START = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _START:6.0f} s] {text}", file=sys.stderr, flush=True)
