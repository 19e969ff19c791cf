"""The fixtures of the bench: a tiny model in a folder, and a few prompts."""

from tests.bench.conftest import model, prompts

__all__ = ["model", "prompts"]
