"""How long to wait before a process that ended is started again."""

from __future__ import annotations

from paceline.core.process import FIRST_WAIT_S, MAX_WAIT_S, STEADY_S, BackOff


def test_waits_are_doubled_up_to_the_longest_however_often_it_dies() -> None:
    back_off = BackOff()
    waits = [back_off.wait_s(0.0) for _ in range(3000)]
    assert waits[:3] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert waits == sorted(waits)
    assert set(waits[10:]) == {MAX_WAIT_S}
    assert back_off.wait_s(STEADY_S + 1) == FIRST_WAIT_S
