"""Commands of `paceline chat` that begin with a slash."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import PacelineError, RequestError, suggest
from paceline.core.params import OFF, Speculation
from paceline.core.sampling_defaults import default_params

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.serve.terminal.chat_session import Chat

HELP = '''/help                    this text
/reset                   forget the conversation
/system TEXT             set the system message; without TEXT, none
/set NAME VALUE          sampling, such as /set temperature 0.2; VALUE "model": as the model says; /set shows all
/draft off|auto|NAME     speculation of the next answers: it changes their speed, never their text
/retry                   another answer to the last message
/edit                    change the last message in $EDITOR and send it again
/save FILE, /load FILE   the conversation as JSON
/stats                   sums over this session
/quit                    leave (so does the end of input)
Ctrl-C                   stop the answer, or forget the message of several lines that is being typed
A line that ends in \\ goes on in the next one; """ begins and ends a message of several lines.
'''
MAX_FILE_BYTES = 16 << 20
MAX_LOADED = 4096  # messages
ROLES = ("system", "user", "assistant")
SETTABLE: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "max_tokens": int,
    "seed": int,
}


def obey(chat: Chat, line: str) -> bool | None:
    """Obey a line. Returns False to leave."""
    word, _, rest = line.partition(" ")
    command = COMMANDS.get(word)
    if command is None:
        chat.write(f"unknown command {word[:64]}{suggest(word, COMMANDS)}\n")
        return None
    try:
        return command(chat, rest.strip())
    except (PacelineError, OSError, ValueError, RuntimeError) as error:  # such as ~nobody, or a quote in $EDITOR
        chat.write(f"error: {error}\n")
        return None


def _reset(chat: Chat, _: str) -> None:
    chat.reset()
    chat.write("forgotten\n")


def _system(chat: Chat, text: str) -> None:
    chat.system = text or None
    others = [m for m in chat.messages if m["role"] != "system"]
    chat.messages = [*([{"role": "system", "content": text}] if text else []), *others]
    chat.write("set\n" if text else "no system message\n")


def _set(chat: Chat, text: str) -> None:
    name, _, value = text.partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    if name and name not in SETTABLE:
        raise RequestError(f"there is nothing named {name[:64]!r} to set{suggest(name, SETTABLE)}")
    if value == "model":
        chat.given.pop(name, None)
    elif value:
        try:
            number = SETTABLE[name](value)
        except ValueError:
            raise RequestError(f"{name} must be a number, not {value[:64]!r}") from None
        number = None if name == "seed" and number < 0 else number
        default_params({name: number} if number is not None else {})
        chat.given[name] = number
    shown = chat.speaker.sampling(chat.given)
    chat.write(", ".join(f"{key} {value}" for key, value in shown.items()) + "\n")


def _draft(chat: Chat, text: str) -> None:
    if text:
        chat.draft = Speculation(text).draft
    about = ": plain decoding" if chat.draft == OFF else ""
    chat.write(f"draft {chat.draft}{about}; the text stays the same\n")


def _edit(chat: Chat, _: str) -> None:
    editor = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "")
    if not editor:
        raise RequestError("set EDITOR to a program that edits a file, such as nano")
    last, earlier = _last(chat)
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        file = Path(folder) / "message.txt"
        file.write_text(last, encoding="utf-8")
        subprocess.run([*editor, str(file)], check=False)  # noqa: S603 - the user's own editor
        changed = file.read_text(encoding="utf-8", errors="replace").strip()
    if changed:
        chat.answer(changed, earlier)


def _last(chat: Chat) -> tuple[str, list[dict[str, str]]]:
    """Return the user's last message, and the messages before it. Raises `RequestError`."""
    index = max((i for i, m in enumerate(chat.messages) if m["role"] == "user"), default=-1)
    if index < 0:
        raise RequestError("there is no message yet")
    return chat.messages[index]["content"], chat.messages[:index]


def _save(chat: Chat, name: str) -> None:
    if not name:
        raise RequestError("say where: /save FILE")
    path = Path(name).expanduser()
    path.write_text(json.dumps({"messages": chat.messages}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    chat.write(f"saved {len(chat.messages)} messages to {path}\n")


def _load(chat: Chat, name: str) -> None:
    if not name:
        raise RequestError("say from where: /load FILE")
    path = Path(name).expanduser()
    if path.stat().st_size > MAX_FILE_BYTES:
        raise RequestError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MB")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        messages = [{"role": m["role"], "content": m["content"]} for m in found["messages"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RequestError(f"{path} is no saved conversation") from None
    texts = all(m["role"] in ROLES and isinstance(m["content"], str) for m in messages)
    if not texts or len(messages) > MAX_LOADED:
        raise RequestError(f"{path} is no conversation of at most {MAX_LOADED} messages of text")
    chat.messages = messages
    chat.system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    chat.write(f"loaded {len(messages)} messages\n")


COMMANDS: dict[str, Callable[[Chat, str], bool | None]] = {
    "/help": lambda chat, _: chat.write(HELP),
    "/reset": _reset,
    "/system": _system,
    "/set": _set,
    "/draft": _draft,
    "/retry": lambda chat, _: chat.answer(*_last(chat)),
    "/edit": _edit,
    "/save": _save,
    "/load": _load,
    "/stats": lambda chat, _: chat.write(chat.totals.told()),
    "/quit": lambda *_: False,
    "/exit": lambda *_: False,
}
