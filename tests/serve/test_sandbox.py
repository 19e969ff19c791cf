"""The sandbox: templates and grammars that would take all time or memory end as refusals."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from paceline.core.errors import BadModelFile, QueueFull, RequestError
from paceline.model.template_source import TemplateSource
from paceline.serve.sandbox import keeper
from paceline.serve.sandbox.jobs import CheckGrammar, JobDone, SetTokenizer
from paceline.serve.sandbox.keeper import Sandbox, SandboxedTemplate
from paceline.serve.tokenizer_cache import TokenizerCache
from tests.core.test_system import stop, until_it_has_ended
from tests.serve.conftest import PATIENCE_S
from tests.serve.test_faults import eventually
from tests.tiny import tiny_raw_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

HELLO: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]}
# Chat templates that outrun the limits within the template's own process, from the report on security.
BOMBS = {
    "string": '{% set a=["x"]*1000 %}{% set b=[a]*1000 %}{% set c=[b]*1000 %}{{ c|string|length }}',
    "replace": '{% set a="x"*60000 %}{{ a|replace("x",a) }}',
    "lipsum": "{{ lipsum(n=100000,max=10000)|length }}",
    "select": '{{ range(99999)|select("in",range(99999)|list)|list|length }}',
}


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox("chat template", param="messages", limit_s=PATIENCE_S)
    made._memory_bytes = 1 << 30
    yield made
    made.close()


def template(sandbox: Sandbox, text: str) -> SandboxedTemplate:
    return SandboxedTemplate(TemplateSource(text, {"bos_token": "<s>"}), sandbox)


def test_a_template_is_rendered_with_its_variables(sandbox: Sandbox) -> None:
    made = template(sandbox, "{{ bos_token }}{{ messages[0].content }}{{ thinks }}")
    assert made.render_all([{**HELLO, "thinks": 1}, HELLO]) == ["<s>hi1", "<s>hi"]


def test_numbers_beyond_64_bits_reach_a_template(sandbox: Sandbox) -> None:
    """As of a call that is sent back: amounts in wei need 70 bits."""
    made = template(sandbox, "{{ call.arguments | tojson }}")
    assert made.render_all([{**HELLO, "call": {"arguments": {"wei": 10**20}}}]) == [
        '{"wei": 100000000000000000000}'
    ]


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_end_as_refusals_and_the_next_job_is_done(sandbox: Sandbox, bomb: str) -> None:
    made = template(sandbox, "{% if messages[0].content == 'boom' %}" + BOMBS[bomb] + "{% endif %}ok")
    sandbox._limit_s = 1.5
    with pytest.raises(RequestError, match=r"did not come to an end|needs more memory|refuses"):
        made.render_all([{"messages": [{"role": "user", "content": "boom"}]}])
    sandbox._limit_s = PATIENCE_S
    assert made.render_all([HELLO]) == ["ok"]


def test_errors_of_a_template_name_the_messages(sandbox: Sandbox) -> None:
    made = template(sandbox, "{{ raise_exception('no') }}")
    with pytest.raises(RequestError, match="refuses these messages: no") as caught:
        made.render_all([HELLO])
    assert caught.value.param == "messages"
    for _ in range(2):  # the server sets it up ahead, and again when it needs it
        with pytest.raises(BadModelFile, match="not valid"):
            template(sandbox, "{% if %}")


def test_a_killed_process_is_replaced(sandbox: Sandbox) -> None:
    made = template(sandbox, "ok")
    assert sandbox._process is not None
    sandbox._process.kill()
    sandbox._process.wait()
    assert made.render_all([HELLO]) == ["ok"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_of_the_process_group_is_the_servers_to_answer(sandbox: Sandbox, number: signal.Signals) -> None:
    made = template(sandbox, "ok")
    process = sandbox._process
    assert process is not None
    process.send_signal(number)
    assert made.render_all([HELLO]) == ["ok"]
    assert sandbox._process is process


def test_a_stopped_process_ends_when_the_server_is_killed() -> None:
    code = (
        "import time; from paceline.serve.sandbox.keeper import *\n"
        "from paceline.model.template_source import TemplateSource\n"
        "sandbox = Sandbox('chat template', param='messages')\n"
        "SandboxedTemplate(TemplateSource('ok', {}), sandbox)\n"
        "print(sandbox._process.pid, flush=True); time.sleep(600)"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert server.stdout is not None
    process = psutil.Process(int(server.stdout.readline()))
    try:
        stop(process)
    finally:
        server.kill()
        server.communicate()
    until_it_has_ended(process)


def test_the_key_stays_out_of_the_process(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    template(sandbox, "ok")
    assert sandbox._process is not None
    assert b"secret" not in Path(f"/proc/{sandbox._process.pid}/environ").read_bytes()


def test_a_full_queue_refuses(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox._places = threading.BoundedSemaphore(1)
    monkeypatch.setattr(keeper, "MAX_WAITING", 1)
    made = template(sandbox, "{% if messages[0].content == 'boom' %}" + BOMBS["select"] + "{% endif %}")
    slow = threading.Thread(target=refused, args=(made, boom()))
    slow.start()
    assert eventually(sandbox._lock.locked)
    with pytest.raises(QueueFull, match="wait for the chat template"):
        made.render_all([HELLO])
    sandbox.close()
    slow.join()


def refused(made: SandboxedTemplate, values: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        made.render_all([values])


def boom() -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "boom"}]}


def test_closing_ends_the_process_and_what_it_does(sandbox: Sandbox) -> None:
    made = template(sandbox, BOMBS["select"])
    assert sandbox._process is not None
    pid = sandbox._process.pid
    slow = threading.Thread(target=refused, args=(made, HELLO))
    slow.start()
    assert eventually(sandbox._lock.locked)
    sandbox.close()
    slow.join(PATIENCE_S / 2)
    assert not slow.is_alive(), "it went on to its own limit"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_grammars_are_checked_there(sandbox: Sandbox) -> None:
    sandbox.setup(SetTokenizer(tiny_raw_tokenizer(320).to_str().encode(), (319,), None))  # starts it
    assert sandbox.call(CheckGrammar("regex", "a+", False)) == JobDone()
    with pytest.raises(RequestError, match="cannot be used"):
        sandbox.call(CheckGrammar("regex", "a(", False))
    assert sandbox.call(CheckGrammar("lark", 'start: "a" <[319]>', True)) == JobDone()


def test_the_start_of_its_process_takes_no_time_of_a_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine each grammar was refused, and ended the process that was about to be ready."""
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 4\nexec {shlex.quote(sys.executable)} "$@"\n')
    slow.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(slow))
    sandbox = TokenizerCache()._grammars
    sandbox._limit_s = 3.0
    try:
        assert sandbox.call(CheckGrammar("regex", "a+", with_tokens=False)) == JobDone()
    finally:
        sandbox.close()
