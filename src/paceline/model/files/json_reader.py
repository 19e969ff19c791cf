"""Typed reads of the values of a JSON file."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.core.errors import BadModelFile

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def computing(where: str) -> Iterator[None]:
    """Turn arithmetic errors of computing with a file's numbers into `BadModelFile`."""
    try:
        yield
    except (ArithmeticError, IndexError):
        raise BadModelFile(f"{where} has numbers that no model has; download it again or convert it") from None


class JsonReader:
    """Typed reads of an object; null counts as absent."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        """where: text before the key in every error."""
        self.values = values
        self.where = where

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number. Raises `BadModelFile`."""
        value = self._get(key, default)
        if type(value) is not int:
            raise BadModelFile(f"{self.where}{key} = {repr(value)[:80]} must be an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number. Raises `BadModelFile`."""
        value = self._get(key, default)
        # JSON integers may exceed every float, and float() would raise.
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise BadModelFile(f"{self.where}{key} = {repr(value)[:80]} must be a finite number")
        return float(value)

    def factor(self, key: str) -> float | None:
        """Return a number, None where there is none. Raises `BadModelFile`."""
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false. Raises `BadModelFile`."""
        value = self._get(key, default)
        if type(value) is not bool:
            raise BadModelFile(f"{self.where}{key} = {repr(value)[:80]} must be true or false")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """Return an object, empty where there is none. Raises `BadModelFile`."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise BadModelFile(f"{self.where}{key} = {repr(value)[:80]} must be an object")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value
