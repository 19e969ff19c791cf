"""Updates of an engine's weights, one at a time, with their files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import PartlyObeyed
from paceline.core.weight_source import WeightSource, check_version
from paceline.serve.tensor_spool import TensorSpool
from paceline.serve.worker.command_sender import to_its_end
from paceline.serve.worker.commands import UpdateWeights

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from paceline.serve.engines import Commanded
    from paceline.serve.worker.commands import Obeyed

    First = Callable[[], Awaitable[object]]


async def nothing() -> None:
    """Return at once: most updates have nothing to await first."""


class WeightUpdates:
    """Updates of an engine, one at a time.

    Files of tensors stay for as long as an engine may read them. An update goes on though its caller is
    cancelled, as the engine may take the weights all the same.
    """

    def __init__(self) -> None:
        self.spool = TensorSpool()
        self._turn = asyncio.Lock()

    async def from_place(self, commands: Commanded, place: str, version: str, first: First = nothing) -> Obeyed:
        """Take a folder or .gguf file. Raises `PacelineError`.

        first: awaited once this update's turn has come, so that no later update overtakes it.
        """
        return await to_its_end(self._from_place(commands, place, version, first))

    async def from_staged(self, commands: Commanded, version: str) -> Obeyed:
        """Take the tensors of all staged files. Raises `PacelineError`."""
        return await self.from_files(commands, self.spool.take_staged(), version)

    async def from_files(
        self, commands: Commanded, files: Sequence[Path], version: str, first: First = nothing
    ) -> Obeyed:
        """Take the tensors of files that were staged. first: as of `from_place`. Raises `PacelineError`."""
        return await to_its_end(self._from_files(commands, files, version, first))

    async def _from_place(self, commands: Commanded, place: str, version: str, first: First) -> Obeyed:
        async with self._turn:
            await first()
            update = UpdateWeights(WeightSource(model=place), check_version(version))
            try:
                reply = await commands.send(update)
            except PartlyObeyed:  # some replicas have it: later tensors change these weights
                await asyncio.to_thread(self.spool.drop_accepted)
                raise
            await asyncio.to_thread(self.spool.drop_accepted)
            return reply

    async def _from_files(self, commands: Commanded, files: Sequence[Path], version: str, first: First) -> Obeyed:
        async with self._turn:
            try:
                await first()
                folder = await asyncio.to_thread(self.spool.offer, files)
                now = commands.state.source
                last = folder if now.tensors is None else now.tensors
                whole = Path(last).parent != Path(folder).parent  # True: an earlier server took them
                source = WeightSource(now.model, folder, whole)
                reply = await commands.send(UpdateWeights(source, check_version(version)))
            except PartlyObeyed:  # a replica runs on them, and reads them when it restarts
                await asyncio.to_thread(self.spool.accept, files)
                raise
            except BaseException:
                self.spool.withdraw(files)
                raise
            await asyncio.to_thread(self.spool.accept, files)
            return reply
