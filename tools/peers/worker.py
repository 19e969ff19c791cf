"""Worker process, `python -m tools.peers.worker MODULE OPTIONS`: questions on stdin, answers on stdout."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from importlib import import_module
from typing import TYPE_CHECKING

from tools.peers.protocol import Peer, PeerSetting, reply

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TextIO

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9  # see prctl(2)


def main(argv: Sequence[str]) -> int:
    """Load, report it, then answer until stdin ends."""
    module, options = argv
    _die_with_parent()
    answers = _own_stdout()
    try:
        peer: Peer = _load(module, json.loads(options))
        _say(answers, {"ready": peer.describe()})
    except Exception as error:
        _say(answers, _failure(error))
        return 1
    for line in sys.stdin:
        try:
            _say(answers, reply(peer, json.loads(line)))
        except Exception as error:
            _say(answers, _failure(error))
    return 0


def _load(module: str, options: dict[str, Any]) -> Peer:
    """Call `MODULE.load(PeerSetting, **OPTIONS)`."""
    setting = PeerSetting(**options.pop("setting"))
    return import_module(f"tools.peers.{module}").load(setting, **options)  # type: ignore[no-any-return]


def _own_stdout() -> TextIO:
    """Return the real stdout; send later prints of libraries to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _die_with_parent() -> None:
    """End this process with its driver: a stopped worker would outlive a killed driver."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _failure(error: Exception) -> dict[str, Any]:
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
