"""The sandbox's process: `python -m paceline.serve.sandbox.job_process MEMORY SECONDS`, socket on stdin."""

from __future__ import annotations

import resource
import signal
import socket
import sys
from typing import TYPE_CHECKING

import msgspec

from paceline.core.errors import PacelineError, RequestError
from paceline.core.system import leave_to_parent, wake_with_parent
from paceline.model.template import ChatTemplate
from paceline.serve.sandbox.jobs import (
    CheckGrammar,
    JobDone,
    JobRefused,
    Rendered,
    RenderPrompts,
    SetTemplate,
    SetTokenizer,
    decode_job,
    frame,
    read_frame,
)

if TYPE_CHECKING:
    from paceline.model.tokenizer import Tokenizer
    from paceline.serve.sandbox.jobs import JobResult, SandboxJob


class JobWorker:
    """State that jobs share: template and tokenizer."""

    def __init__(self) -> None:
        self._template: ChatTemplate | None = None
        self._tokenizer: Tokenizer | None = None

    def result(self, job: SandboxJob) -> JobResult:
        """Return the result of a job."""
        try:
            return self._done(job)
        except RequestError as error:
            return JobRefused(str(error), error.param)
        except PacelineError as error:
            return JobRefused(str(error), of_model=True)
        except MemoryError:
            return JobRefused("", ends=True)

    def _done(self, job: SandboxJob) -> JobResult:
        match job:
            case SetTemplate(source):
                self._template = ChatTemplate(source)
            case SetTokenizer():
                self._tokenizer = _tokenizer(job)
            case RenderPrompts(asked):
                assert self._template is not None
                return Rendered(tuple(self._template.render_all(msgspec.json.decode(asked))))
            case CheckGrammar(kind, text, with_tokens):
                _check(kind, text, self._tokenizer if with_tokens else None)
        return JobDone()


def _tokenizer(job: SetTokenizer) -> Tokenizer:
    import tokenizers

    from paceline.model.tokenizer import Tokenizer

    raw = tokenizers.Tokenizer.from_buffer(job.tokenizer_json)
    tokenizer = Tokenizer(raw, eos_ids=job.eos_ids, bos_id=job.bos_id)
    _check("lark", 'start: "a"', tokenizer)  # reads the vocabulary, which takes seconds
    return tokenizer


def _check(kind: str, text: str, tokenizer: Tokenizer | None) -> None:
    from paceline.core.params import Grammar
    from paceline.model.grammar import check

    check(Grammar(kind, text), tokenizer)


def main() -> None:
    """Work through jobs until the server closes its end."""
    memory, seconds = int(sys.argv[1]), float(sys.argv[2])
    wake_with_parent()
    leave_to_parent(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    worker = JobWorker()
    with socket.socket(fileno=0) as link:
        while (data := read_frame(link.recv)) is not None:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # ends this process though the server is gone
            result = worker.result(decode_job(data))
            link.sendall(frame(result))
            signal.setitimer(signal.ITIMER_REAL, 0)
            if isinstance(result, JobRefused) and result.ends:
                return


if __name__ == "__main__":
    main()
