"""Keys of a file: hashed, with a role and a cache salt.

One key a line:

    NAME:HASH or NAME:HASH:ROLE

HASH is `sha256$SALT$HEX`, of the salt and the key together, or the plain SHA-256 of the key in hex. ROLE is `all`;
`admin` for a key that may operate a fleet, too; or `metrics` for one that may only read /metrics. A key is 256
random bits, so one pass of SHA-256 is enough.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 1024
MAX_KEY_BYTES = 1024  # of a key in a request
ADMIN = "admin"
ROLES = ("all", "metrics", ADMIN)
PREFIX = "pk-"  # of our own keys
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9_.-]{1,64}):(?:sha256\$(?P<salt>[0-9a-f]{0,64})\$)?(?P<digest>[0-9a-f]{64})(?::(?P<role>\w{1,16}))?"
)


@dataclass(frozen=True, slots=True)
class StoredKey:
    """One key as the file holds it."""

    name: str
    salt: str
    digest: str
    role: str = "all"

    @property
    def line(self) -> str:
        """The line that stores it."""
        return f"{self.name}:sha256${self.salt}${self.digest}:{self.role}"

    @property
    def cache_salt(self) -> str:
        """Salt of its requests in the prefix cache, so that keys share no cached pages."""
        return hashlib.sha256(f"{self.name}:{self.salt}:{self.digest}".encode()).hexdigest()

    def fits(self, key: bytes) -> bool:
        """Return whether a request's key is this one, in constant time."""
        return hmac.compare_digest(hashlib.sha256(self.salt.encode() + key).hexdigest(), self.digest)


def new_key(name: str, role: str = "all") -> tuple[str, StoredKey]:
    """Return a fresh key and what to store of it. Raises `ConfigError`."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"a key's name has 1 to 64 letters, digits and _.-, unlike {name[:64]!r}")
    key, salt = PREFIX + secrets.token_urlsafe(32), secrets.token_hex(16)
    return key, StoredKey(name, salt, hashlib.sha256((salt + key).encode()).hexdigest(), role)


def read_keys(path: Path) -> tuple[StoredKey, ...]:
    """Return the keys of a file. Raises `ConfigError` that names the line."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"--api-key-file {path} is larger than {MAX_FILE_BYTES >> 20} MiB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --api-key-file {path}: {error}") from None
    keys: dict[str, StoredKey] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            key = _stored(text, f"{path}, line {number}")
            if key.name in keys:
                raise ConfigError(f"{path}, line {number}: the name {key.name!r} is there twice")
            keys[key.name] = key
    if not 0 < len(keys) <= MAX_KEYS:
        raise ConfigError(f"--api-key-file {path} must hold 1 to {MAX_KEYS} keys, not {len(keys)}")
    return tuple(keys.values())


def _stored(text: str, where: str) -> StoredKey:
    found = _LINE.fullmatch(text)
    if found is None:
        raise ConfigError(f"{where} is not NAME:HASH or NAME:HASH:ROLE; `paceline key new NAME` makes one")
    role = found["role"] or "all"
    if role not in ROLES:
        raise ConfigError(f"{where}: the role must be one of {', '.join(ROLES)}, not {role!r}")
    return StoredKey(found["name"], found["salt"] or "", found["digest"], role)


class KeyRing:
    """Keys that a server takes: one of a flag, and those of a file."""

    def __init__(self, api_key: str | None, path: Path | None) -> None:
        """Read the file. Raises `ConfigError`."""
        self._single = None if api_key is None else StoredKey("", "", _digest(api_key), ADMIN)
        self._path = path
        self._of_file = () if path is None else read_keys(path)

    def __bool__(self) -> bool:
        return self._single is not None or self._path is not None

    def reload(self) -> None:
        """Read the file again; if it is bad, the old keys stay."""
        if self._path is None:
            return
        try:
            self._of_file = read_keys(self._path)
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.warning("read %d keys of %s", len(self._of_file), self._path)

    def find(self, given: bytes) -> StoredKey | None:
        """Return the key that a request came with.

        Compares with all keys, so that the time taken tells nothing about them.
        """
        known = self._of_file if self._single is None else (self._single, *self._of_file)
        key = given[:MAX_KEY_BYTES]
        fitting = [stored for stored in known if stored.fits(key)]
        return fitting[0] if fitting else None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def salted(own: str, asked: str) -> str:
    """Return the salt of a request: its key's, together with what its client asked for."""
    return hashlib.sha256(f"{own}\0{asked}".encode()).hexdigest()
