"""A trainer's commands to a replica that notes them, and obeys as a test decides."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.weight_source import FIRST_VERSION
from paceline.model.files.safetensors_file import open_safetensors
from paceline.serve.worker.commands import EngineState, Obeyed, UpdateWeights

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.errors import PacelineError
    from paceline.serve.worker.commands import Command


class FakeCommands:
    """See `Commanded`."""

    def __init__(self) -> None:
        self.version, self.state = FIRST_VERSION, EngineState()
        self.errors: list[PacelineError] = []  # of the next commands
        self.gate = asyncio.Event()  # no command is obeyed before it is set
        self.gate.set()
        self.taken: list[list[str]] = []  # tensors in the folder of each update that was obeyed
        self.sent: list[Command] = []
        self.obeying = False

    async def abort(self, chosen: Callable[[str], bool]) -> int:
        return 0

    async def send(self, command: Command) -> Obeyed:
        self.sent.append(command)
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.state = self.state.after(command)
        if isinstance(command, UpdateWeights):
            self.version = command.version
            self.taken.append(names_in(command.source.tensors))
        return Obeyed(self.version)


def names_in(folder: str | None) -> list[str]:
    files = [] if folder is None else sorted(Path(folder).glob("*.safetensors"))
    return [name for file in files for name in open_safetensors(file)]
