"""Bytes of a line: pieces over TCP, behind a secret that Ray has carried."""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
import struct
from hmac import compare_digest
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.errors import PacelineError
from paceline.serve.worker.messages import MAX_TO_ENGINE_BYTES, MAX_TO_SERVER_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

BEAT_S = 5.0  # between two signs of life of each end
SILENCE_S = 20.0  # after which the other end is taken for dead
HELLO_S = 5.0  # for a front to say who it is
SECRET_BYTES = 32
NAME_BYTES = 16  # of a front's name
PART_BYTES = 1 << 20  # of each part of a long piece; each part counts as a sign of life
_LENGTH = struct.Struct("<I")
ENDED = (OSError, EOFError, TimeoutError)  # what `receive` raises when the other end has gone or is silent


class TooLong(PacelineError):  # noqa: N818
    """A piece of a line has more bytes than its receiver takes."""


class LineAddress(NamedTuple):
    """Place of a replica's lines, told by Ray to those who may call its actor."""

    host: str
    port: int
    secret: bytes


class Pieces:
    """One end of a line. An empty piece is a sign of life.

    All methods are for the event loop's thread.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most_bytes: int) -> None:
        """most_bytes: of the largest piece that `receive` takes."""
        self._reader, self._writer, self._most_bytes = reader, writer, most_bytes
        self._beating = asyncio.create_task(self._beat())

    def send(self, piece: bytes) -> None:
        """Send a piece behind all before it."""
        self._writer.write(_LENGTH.pack(len(piece)) + piece)

    async def sent(self) -> None:
        """Wait while the other end lags too far behind. Raises one of `ENDED`."""
        await self._writer.drain()

    async def receive(self) -> bytes:
        """Return the next piece. Raises one of `ENDED`, or `TooLong`."""
        while not (length := _LENGTH.unpack(await self._read(_LENGTH.size))[0]):
            pass
        if length > self._most_bytes:
            raise TooLong(f"a piece of {length} bytes came, at most {self._most_bytes} are taken")
        if length <= PART_BYTES:
            return await self._read(length)
        sizes = [min(PART_BYTES, length - at) for at in range(0, length, PART_BYTES)]
        return b"".join([await self._read(size) for size in sizes])

    def close(self) -> None:
        """End the line; the other end sees it."""
        self._beating.cancel()
        self._writer.close()

    async def _read(self, size: int) -> bytes:
        async with asyncio.timeout(SILENCE_S):
            return await self._reader.readexactly(size)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.send(b"")


async def connect(address: LineAddress, front: str) -> Pieces:
    """Open a line for a front. Raises `OSError`, `TimeoutError`."""
    async with asyncio.timeout(HELLO_S):
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls(os.environ))
    writer.write(address.secret + front.encode())
    return Pieces(reader, writer, MAX_TO_SERVER_BYTES)


async def accept(secret: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, Pieces]:
    """Return a front's name, and its line. Raises one of `ENDED`, `ValueError` for a stranger."""
    async with asyncio.timeout(HELLO_S):
        hello = await reader.readexactly(SECRET_BYTES + NAME_BYTES)
    if not compare_digest(hello[:SECRET_BYTES], secret):
        raise ValueError("somebody who does not know the secret has connected")
    return hello[SECRET_BYTES:].decode(), Pieces(reader, writer, MAX_TO_ENGINE_BYTES)


def new_name() -> str:
    """Return a name for a front."""
    return secrets.token_hex(NAME_BYTES // 2)


def tls(environ: Mapping[str, str], *, serves: bool = False) -> ssl.SSLContext | None:
    """Return TLS with Ray's own certificates if Ray uses it between machines."""
    if environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    purpose = ssl.Purpose.CLIENT_AUTH if serves else ssl.Purpose.SERVER_AUTH
    context = ssl.create_default_context(purpose, cafile=environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(environ["RAY_TLS_SERVER_CERT"], environ["RAY_TLS_SERVER_KEY"])
    context.check_hostname = False  # as in Ray, a machine is trusted by its certificate's authority, not its name
    context.verify_mode = ssl.CERT_REQUIRED  # at both ends
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # as lax as Ray, which takes authorities of plain openssl
    return context
