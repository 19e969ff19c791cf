"""Real Ray: two replicas, a front, a client of OpenAI's, a killed worker, and a data set."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from paceline.ray.local_ray import PREFIX, ray_folder
from tests.serve.conftest import write_model

MOST_MB = 1500.0
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,  # Ray takes 20 seconds to start
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'paceline[ray]'"
    ),
]


def test_answers_go_on_when_a_replica_is_killed_and_a_data_set_is_answered(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    found_at, log = tmp_path / "found.json", tmp_path / "log"
    model = write_model(tmp_path / "model")
    with (
        tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder,
        log.open("w") as file,
    ):
        command = [sys.executable, "-m", "tests.ray.cluster", str(model), str(found_at), folder]
        done = subprocess.run(
            command, stdout=file, stderr=file, timeout=300, check=False, cwd=ROOT, env=dict(os.environ)
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    found = json.loads(found_at.read_text())
    assert found["hosts"] == 2
    assert all(found["same"]), "an answer changed when its replica was killed"
    assert found["same_after"]
    assert found["rows"] == 32
    assert found["data_same"], "a row of the data set has another answer than over HTTP"
    assert found["row_by_proxy"] == found["row"]
    assert found["listens"] == [], "nothing of it may be reached from outside"
    assert found["pss_mb"] <= MOST_MB


def test_a_killed_server_leaves_nothing_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The killed server's Ray agents go on, and its folder stays, until another server starts."""
    (tmp_path / "model").mkdir()
    model, log = write_model(tmp_path / "model"), tmp_path / "log"
    flags = "--on ray --threads 1 --port 0 --draft ngram:k=4 --max-len 4096 --packed-cache-bytes 0"
    command = [sys.executable, "-m", "paceline.cli", "serve", *flags.split(), "--model", str(model)]
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as parent, log.open("w") as file:
        environment = os.environ | {"HOME": str(tmp_path), "TMPDIR": parent}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, env=environment, text=True)
        try:
            assert process.stdout is not None
            told = [next(process.stdout, "")]
            while told[-1] and "serves at" not in told[-1]:
                told.append(next(process.stdout, ""))
            assert told[-1], log.read_text()[-3000:]
            assert any("1 engine of 1 core" in line for line in told)
            assert any(line.startswith("draft ") for line in told)
            (folder,) = Path(parent).glob(f"{PREFIX}*")
            of_ray = psutil.Process(process.pid).children(recursive=True)
            monkeypatch.setattr(tempfile, "tempdir", parent)
            with ray_folder():
                assert folder.exists(), "its owner lives"
                assert all(one.is_running() for one in of_ray if "raylet" in one.name())
        finally:
            process.kill()
            process.communicate()
        assert folder.exists()
        with ray_folder():
            assert not folder.exists()
            psutil.wait_procs(of_ray, 20)
            left = [one.cmdline() for one in of_ray if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
            assert left == []
