"""Chat templates: rendered as transformers does, in a sandbox that holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import BadModelFile, RequestError
from paceline.model import template as module
from paceline.model.files.tokenizer_file import FolderText
from paceline.model.template import ChatTemplate
from paceline.model.template_source import TemplateSource

HELLO = [{"role": "user", "content": "Hi <b> é"}]


def render(text: str, messages: list[dict[str, str]] | None = None, prompt: bool = True) -> str:
    return ChatTemplate(TemplateSource(text, {"bos_token": "<s>"})).render(messages or HELLO, prompt)


def test_what_templates_use() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}") == "<s>Hi <b> é"
    assert render("{{ messages | tojson }}") == json.dumps(HELLO, ensure_ascii=False)
    assert render("{% if add_generation_prompt %}yes{% endif %}", prompt=False) == ""
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
    assert render("{% generation %}{{ 'body' }}{% endgeneration %}!") == "body!"
    assert render("{{ tools is none }}{{ '%d%%' % 5 }}{{ 'ab' * 3 }}{{ 7 % 4 }}{{ missing }}") == "True5%ababab3"
    assert (
        render("{{ 'a'.ljust(3, '.') }}{{ 'a'|center(3) }}{{ 'a\nb'|indent(2) }}{{ 7.26|round(1) }}")
        == "a.. a a\n  b7.3"
    )
    assert render("{{ 900000|round }}{{ '{:>3}'.format('a') }}{{ '%d'|format(70000) }}") == "900000  a70000"
    assert render("{{ 'a b'.split(' ', 90000) }}{{ [1, 2, 3]|slice(2)|list }}") == "['a', 'b'][[1, 2], [3]]"
    assert len(render("{{ strftime_now('%Y') }}")) == 4


def test_json_is_written_as_a_template_asks() -> None:
    values = "{{ {'b': [1, 'é'], 'a': 2} | tojson"
    assert render(values + "(separators=(',', ':'), sort_keys=true) }}") == '{"a":2,"b":[1,"é"]}'
    assert render(values + "(ensure_ascii=true) }}") == r'{"b": [1, "\u00e9"], "a": 2}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"


@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * 'x' }}",
        "{{ [1] * 1000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ ('x' * 60000) * 60000 }}",
        "{{ 'a'.ljust(300000000) }}",
        "{{ 'a'.rjust(width=300000000) }}",
        "{{ 'a'.center(300000000, '-') }}",
        "{{ 'a'.zfill(300000000) }}",
        "{{ '\t'.expandtabs(300000000) }}",
        "{{ ('\t' * 60000).expandtabs(60000) }}",
        "{{ 'a'|center(400000000) }}",
        "{{ messages[0].role|center(width=400000000) }}",
        "{{ 'a'|indent(400000000, true) }}",
        "{{ ('a\n' * 9000)|indent('x' * 60000) }}",
        "{{ [1]|batch(400000000, 'x')|list }}",
        "{{ [1]|slice(400000000)|list }}",
        "{{ 1|round(400000000, 'ceil') }}",
        "{{ '%400000000d'|format(1) }}",
        "{{ '{:400000000d}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=400000000) }}",
        "{{ [1] | tojson(indent=400000000) }}",
        "{{ [1] | tojson(separators=('x' * 60000, ':')) }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_fails_one_request(text: str) -> None:
    with pytest.raises(RequestError, match="chat template") as caught:
        render(text)
    assert caught.value.param == "messages"


def test_the_message_of_a_template_is_told() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_output_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = (
        "{% for i in range(90000) %}{% for j in range(90000) %}{{ 'xxxxxxxxxxxxxxxx' }}{% endfor %}{% endfor %}"
    )
    monkeypatch.setattr(module, "MAX_OUTPUT_CHARS", 1 << 16)
    with pytest.raises(RequestError, match="end"):
        render(endless)
    monkeypatch.setattr(module, "MAX_OUTPUT_CHARS", 1 << 40)
    monkeypatch.setattr(module, "MAX_RENDER_S", 0.0)
    with pytest.raises(RequestError, match="end"):
        render(endless)


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) if false %}{% endfor %}{% endfor %}",
        "{% set x %}{% for i in range(90000) %}{% for j in range(90000) %}{% set y = j %}{% endfor %}{% endfor %}"
        "{% endset %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{% set x = f(60) %}",
        "{% for i in [[]] recursive %}{% for j in range(90000) %}{% for k in range(90000) %}{% endfor %}"
        "{% endfor %}{{ loop(i) }}{% endfor %}",
    ],
)
def test_silence_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Each template would run for minutes or for ever."""
    monkeypatch.setattr(module, "MAX_RENDER_S", 0.05)
    with pytest.raises(RequestError, match="does not come to an end"):
        render(text)


def test_looks_at_the_clock_leave_no_trace() -> None:
    assert (
        render("{% for i in [1, 2] %}{{ loop.index }}{{ loop.last }}{% else %}none{% endfor %}") == "1False2True"
    )
    assert render("{% for i in [] %}x{% else %}none{% endfor %}") == "none"
    assert (
        render("{% macro f(a, b=2) %}{{ a }}{{ b }}{{ caller is defined }}{% endmacro %}{{ f(1) }}") == "12False"
    )
    assert (
        render("{% for i in [1, [2, [3]]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}") == "123"
    )
    assert render("{% for i in [1, 2, 3] if i != 2 %}\n{{ i }}\n{% endfor %}") == "1\n3\n"


@pytest.mark.parametrize("text", ["{% if %}", "{{ x", "{% nonsense %}", "x" * ((1 << 20) + 1)])
def test_a_template_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadModelFile, match="chat template"):
        render(text)


def test_where_a_folder_keeps_its_template(tmp_path: Path) -> None:
    text = FolderText(tmp_path)
    assert text.template() is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "beside"}))
    found = text.template()
    assert found is not None
    assert found.text == "beside"
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "one"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = text.template()
    assert found is not None
    assert (found.text, found.special["bos_token"], found.special["eos_token"]) == ("one", "<s>", "</s>")
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}, {"name": []}, 7]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    found = text.template()
    assert found is not None
    assert found.text == "plain"
    (tmp_path / "chat_template.jinja").write_text("own file")
    found = text.template()
    assert found is not None
    assert found.text == "own file"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadModelFile, match="UTF-8"):
        text.template()
