"""Sampling of requests that say nothing: of the model's files, checked, else usual values."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.core.sampling_defaults import FIELDS, MODEL, NEUTRAL, USUAL, checked, chosen, told


def test_a_models_own_values_come_first_and_then_all_others_are_neutral():
    found = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": 7, "min_p": None}
    assert chosen(MODEL, found)[0] == {"temperature": 0.6, "top_k": 20}
    assert chosen(MODEL, {"do_sample": True})[0] == USUAL == {"temperature": 0.7, "top_p": 0.95}
    assert chosen(NEUTRAL, found)[0] == {}
    assert told(USUAL) == "temperature 0.7, top_p 0.95"
    assert told({}) == "temperature 1, no filter"


JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers())


@given(found=st.dictionaries(st.sampled_from(FIELDS), JUNK))
def test_whatever_a_file_says_the_defaults_are_parameters(found):
    logging.disable()
    try:
        kept = checked(found)
    finally:
        logging.disable(logging.NOTSET)
    assert SamplingParams(**kept)
    assert kept.items() <= found.items()


def test_a_value_out_of_bounds_is_logged(caplog: pytest.LogCaptureFixture):
    assert checked({"temperature": 99, "top_p": 0.5}) == {"top_p": 0.5}
    assert "temperature must be between" in caplog.text
