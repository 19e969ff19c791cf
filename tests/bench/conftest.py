"""A tiny model in a folder, and a few prompts of three categories."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.serve.conftest import write_model

if TYPE_CHECKING:
    from pathlib import Path

CATEGORIES = ("writing", "qa", "rag")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [
        {"question_id": i, "category": CATEGORIES[i % 3], "turns": [f"the other one in the rain {i}", "ignored"]}
        for i in range(9)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path
