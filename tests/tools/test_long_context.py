"""The tool for long contexts, with a tiny model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tools.measure import long_context

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

TINY = "shape:num_layers=2,hidden_size=64,intermediate_size=96,vocab_size=300"


def test_the_tool_reads_back_the_prefix_that_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages, peers = tmp_path / "pages", tmp_path / "peers"
    sizes = ["--tokens", "1000", "--answer", "8"]
    places = ["--folder", str(pages), "--peers", str(peers)]
    assert long_context.main(["--model", TINY, "--draft", "ngram:k=3", *sizes, *places]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in ("992 tokens", "no drafts", "--draft", "from disk", "61 pages", "x sooner"):
        assert words in said
    assert "llama.cpp" not in said


def test_impossible_sizes_are_refused() -> None:
    for sizes in (["--tokens", "10"], ["--tokens", "100", "--answer", "60"]):
        with pytest.raises(ConfigError, match="--tokens is 64 to"):
            long_context.main(["--model", TINY, *sizes])
