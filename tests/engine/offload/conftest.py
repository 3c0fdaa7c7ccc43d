"""Links over real files, for every test that wants one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from engine.offload.simulated import SimulatedLink
from plimsoll.engine.offload.disk import DiskLink
from plimsoll.engine.offload.protocol import Link

LINKS: dict[str, Callable[[str], Link]] = {
    "disk": lambda directory: DiskLink(directory),
    "simulated": lambda directory: SimulatedLink(),
}


@pytest.fixture(params=sorted(LINKS))
def link(request: pytest.FixtureRequest, tmp_path: object) -> Iterator[Link]:
    with LINKS[request.param](str(tmp_path)) as opened:
        yield opened


@pytest.fixture
def disk(tmp_path: object) -> Iterator[DiskLink]:
    with DiskLink(str(tmp_path)) as opened:
        yield opened
