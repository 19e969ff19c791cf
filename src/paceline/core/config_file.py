"""TOML file of options: a section for each command, a key for each flag."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, suggest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

FLAG, VARIABLE = "--config", "PACELINE_CONFIG"
MAX_BYTES = 1 << 20


def config_path(argv: list[str], environ: Mapping[str, str]) -> Path | None:
    """Return the file asked for, else the usual one, else None. Raises `ConfigError`."""
    for number, word in enumerate(argv):
        if word == FLAG and number + 1 < len(argv):
            return _existing(argv[number + 1], FLAG)
        if word.startswith(f"{FLAG}="):
            return _existing(word.partition("=")[2], FLAG)
    if given := environ.get(VARIABLE, "").strip():
        return _existing(given, VARIABLE)
    base = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".config")
    usual = Path(base) / "paceline" / "config.toml"
    return usual if usual.is_file() else None


def _existing(name: str, what: str) -> Path:
    if not Path(name).is_file():
        raise ConfigError(f"{what}: there is no file {name!r}")
    return Path(name)


def read_section(path: Path, command: str, commands: Collection[str]) -> dict[str, Any]:
    """Return a command's keys, with - for _.

    Raises `ConfigError` for a file that is not TOML, and for sections that are no commands.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES >> 10} KB")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML file: {error}") from None
    groups = {name.partition(" ")[0] for name in commands if " " in name}
    for section, keys in values.items():
        if section not in {*commands, *groups}:
            hint = suggest(section, {*commands, *groups})
            raise ConfigError(
                f"{path}: there is no command {section!r}{hint}; options stand in a section [COMMAND]"
            )
        if not isinstance(keys, dict):
            raise ConfigError(f"{path}: {section} must be a section, [{section}]")
        _check_inner(path, section, keys, commands)
    found: Any = values
    for word in command.split():
        found = found.get(word, {})
    inner = {name.partition(" ")[2] for name in commands if name.startswith(f"{command} ")}
    return {_key(path, key): value for key, value in found.items() if key not in inner}


def _check_inner(path: Path, section: str, keys: dict[str, Any], commands: Collection[str]) -> None:
    for name, value in keys.items():
        inner = f"{section} {name}"
        if inner not in commands and (isinstance(value, dict) or section not in commands):
            known = [command for command in commands if command.startswith(f"{section} ")]
            hint = suggest(inner, known) if known else ""
            raise ConfigError(f"{path}: there is no command {inner!r}{hint}")
        if inner in commands and not isinstance(value, dict):
            raise ConfigError(f"{path}: {inner} must be a section, [{section}.{name}]")


def _key(path: Path, key: str) -> str:
    if len(key) > 64:
        raise ConfigError(f"{path}: {key[:64]!r}... is no option")
    return key.replace("_", "-")


def as_toml(value: object) -> str:
    """Return a value of an option as TOML: a string, number, boolean or list."""
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
