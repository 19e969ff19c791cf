"""The server that clients talk to: the session's own, or the one that PACELINE_CLIENTS_URL names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.conftest import Server, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if url := os.environ.get("PACELINE_CLIENTS_URL"):
        process: Any = None
        yield Server(process, url, "")
        return
    model: Path = request.getfixturevalue("model")
    with running(model) as found:
        yield found
