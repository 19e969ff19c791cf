"""For all tests: no example of a property has a deadline, and no engine begins with what another learnt."""

import pytest
from hypothesis import settings

settings.register_profile("paceline", deadline=None)  # machines are shared and stall
settings.load_profile("paceline")


class NothingKept:
    """In place of what controllers learnt, as tests begin cold and leave nothing behind."""

    def read(self, key):
        return None

    def write(self, key, data):
        return None


@pytest.fixture(autouse=True)
def nothing_learnt(monkeypatch):
    """Engines of this process begin cold."""
    monkeypatch.setattr("paceline.engine.assembly.auto.LEARNT", NothingKept())
