"""What counts as an answer that fits its schema."""

from __future__ import annotations

import pytest
from tools.structured import fits

PRICE = {"type": "object", "properties": {"price": {"type": "number", "multipleOf": 0.01}}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"price": 19.99}', True),
        ('{"price": 1e2}', True),
        ('{"price": 19.995}', False),
        ('{"price": "x"}', False),
    ],
)
def test_numbers_are_decimal(text: str, expected: bool) -> None:
    assert fits(text, PRICE) is expected


@pytest.mark.parametrize("text", ["{", "", '{"price": }'])
def test_what_is_no_json_does_not_fit(text: str) -> None:
    assert not fits(text, PRICE)
