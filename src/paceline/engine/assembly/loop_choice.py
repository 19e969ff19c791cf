"""Which loop an engine runs, and why."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from paceline.control.controller import ClosedLoop
from paceline.control.overlap import OverlapSwitch
from paceline.core.errors import ConfigError, suggest
from paceline.engine.overlap import OverlappedLoop
from paceline.engine.serial import SerialLoop

if TYPE_CHECKING:
    from paceline.engine.assembly.placement import Placement
    from paceline.engine.engine import Engine
    from paceline.engine.rounds import Loop

AUTO, ON, OFF = OVERLAPS = ("auto", "on", "off")


def check_overlap(asked: str) -> None:
    """Raise `ConfigError` unless `--overlap` can be that."""
    if asked not in OVERLAPS:
        raise ConfigError(f"--overlap {asked}: it is one of {', '.join(OVERLAPS)}{suggest(asked, OVERLAPS)}")


def choose_loop(asked: str, engine: Engine, placement: Placement) -> tuple[Loop, str]:
    """Return the loop for an engine, and why."""
    serial = SerialLoop()
    if asked == OFF or not engine.drafting.drafters:
        return serial, "off, as asked"
    if asked == ON:
        return OverlappedLoop(placement.worker(), lambda _: True), "on, as asked"
    if not placement.apart:
        return serial, "off: target and drafters have the same device, so nothing runs beside anything"
    if not isinstance(engine.controller, ClosedLoop) or engine.controller.cost is None:
        return serial, "off: only --draft auto knows what passes and drafting cost; --overlap on insists"
    switch = OverlapSwitch(apart=True)

    def wanted(engine: Engine) -> bool:
        controller = engine.controller
        return isinstance(controller, ClosedLoop) and switch.ask(controller, perf_counter())

    return OverlappedLoop(placement.worker(), wanted), "where drafting takes longer than a pass's fixed cost"
