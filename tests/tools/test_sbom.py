"""The bill of materials."""

from __future__ import annotations

import json
import subprocess
import sys

from tools.sbom import LOCKS, bill, components


def test_every_locked_package_is_listed_with_its_hashes() -> None:
    """L8: of the runtime and of all that tests need."""
    for name in ("runtime.txt", "dev.txt"):
        lock = LOCKS / name
        found = components(lock)
        assert len(found) == lock.read_text().count("==")
        assert all(entry["externalReferences"][0]["hashes"] for entry in found)
    assert len(bill([LOCKS / "runtime.txt"] * 2)["components"]) == len(components(LOCKS / "runtime.txt"))


def test_the_bill_is_written_as_json() -> None:
    done = subprocess.run([sys.executable, "-m", "tools.sbom"], capture_output=True, check=True, timeout=240)
    written = json.loads(done.stdout)
    assert written["bomFormat"] == "CycloneDX"
    assert any(entry["purl"].startswith("pkg:pypi/uvicorn@") for entry in written["components"])
