"""What `deploy/` ships: its files say what they must, and name only what the server has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.serve.server import add_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.conftest import Server

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm"
SHELL = re.compile(r"(?<!-)--[a-z][a-z-]+")


def known_flags() -> set[str]:
    parser = ArgumentParser()
    add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


# Grafana ---------------------------------------------------------------------------------------------


def test_every_metric_of_the_board_is_one_that_the_server_has(server: Server) -> None:
    with server.client() as http:
        types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", http.get("/metrics").text, re.MULTILINE))
    has = {name + end for name, kind in types.items() for end in (["_bucket"] if kind == "histogram" else [""])}
    board = json.loads((DEPLOY / "grafana" / "paceline.json").read_text())
    exprs = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = {name for expr in exprs for name in re.findall(r"paceline_\w+", expr)}
    assert len(used) > 15
    assert used <= has
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for expr in exprs:
        assert expr.count("(") == expr.count(")")
        assert expr.count("{") == expr.count("}")
        assert " - sum(" not in expr, "of a series that is not there yet, it leaves nothing of the difference"


# Docker ----------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_image_is_small_unprivileged_and_checked() -> None:
    found = instructions()
    stages = [words for name, words in found if name == "FROM"]
    assert len(stages) == 2
    assert all(re.search(r":\d", words) for words in stages), "base images have a version"
    names = [name for name, _ in found]
    assert "ADD" not in names
    last = len(names) - names[::-1].index("FROM")
    assert "USER" in names[last:]
    by_name = dict(found)
    assert not by_name["USER"].startswith(("0", "root"))
    assert "/livez" in by_name["HEALTHCHECK"]
    for name, words in found:
        if name == "RUN" and "apt-get install" in words:
            assert "--no-install-recommends" in words
            assert "rm -rf /var/lib/apt/lists" in words
        if name == "RUN" and "pip " in words:
            assert "--no-cache-dir" in words
    command = json.loads(by_name["CMD"])
    assert {word for word in command if word.startswith("--")} <= known_flags()
    for name, words in found:
        if name == "COPY":
            assert all((DEPLOY.parent / source).exists() for source in words.split()[:-1])


def test_the_composition_gives_the_keys_as_a_secret() -> None:
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = found["services"]["paceline"]
    assert service["secrets"] == list(found["secrets"])
    assert f"/run/secrets/{service['secrets'][0]}" in json.loads(dict(instructions())["CMD"])
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["read_only"]


def test_models_of_the_hub_go_where_the_process_may_write() -> None:
    """All else is read-only in the composition, in the chart and in the unit."""
    (variables,) = [words for name, words in instructions() if name == "ENV"]
    found = dict(word.split("=", 1) for word in variables.split())
    assert found["HF_HOME"].startswith(f"{found['PACELINE_CACHE']}/")
    unit = dict(re.findall(r"(\w+)=(/\S+)", (DEPLOY / "paceline.service").read_text()))
    for name in ("HF_HOME", "TRITON_CACHE_DIR"):
        assert unit[name].startswith(f"{unit['PACELINE_CACHE']}/")


# systemd ---------------------------------------------------------------------------------------------


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    text = (DEPLOY / "paceline.service").read_text()
    command = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)[0]
    assert set(SHELL.findall(command)) <= known_flags()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    unit = tmp_path / "paceline.service"
    program = tmp_path / "paceline"
    program.symlink_to(sys.executable)  # whose own path may hold a quote
    unit.write_text(text.replace("/usr/local/bin/paceline", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Helm ------------------------------------------------------------------------------------------------
# The templates use a few forms of Helm's language, and this renders those: anything else is an error.


class Chart:
    """A chart with values, rendered."""

    def __init__(self, changes: dict[str, Any]) -> None:
        values = yaml.safe_load((CHART / "values.yaml").read_text())
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        for path, value in changes.items():
            *folders, last = path.split(".")
            at = values
            for folder in folders:
                at = at[folder]
            assert last in at, f"no value {path}"
            at[last] = value
        self.scope: dict[str, Any] = {"Values": values, "Chart": {"Name": chart["name"]}, "Release": {"Name": "r"}}

    def documents(self) -> Iterator[dict[str, Any]]:
        for path in sorted((CHART / "templates").iterdir()):
            text = self.render(path.read_text(), {})
            if text.strip():
                yield yaml.safe_load(text)

    def render(self, text: str, local: dict[str, Any]) -> str:
        parts = re.split(r"(?:\s*\{\{-|\{\{)\s*(.*?)\s*\}\}", text)
        return self._body(iter(enumerate(parts)), local)

    def _body(self, parts: Iterator[tuple[int, str]], local: dict[str, Any]) -> str:
        """Text up to the end of a block."""
        out = ""
        for index, part in parts:
            if index % 2 == 0:
                out += part
            elif part == "end":
                break
            elif part.startswith("if "):
                inner = self._body(parts, local)
                asked = part.removeprefix("if ")
                value = self.value(asked.removeprefix("not "), local)
                out += inner if bool(value) != asked.startswith("not ") else ""
            elif part.startswith("range "):
                out += self._range(part.removeprefix("range "), parts, local)
            else:
                value = self.value(part, local)
                out += value if isinstance(value, str) else json.dumps(value)
        return out

    def _range(self, head: str, parts: Iterator[tuple[int, str]], local: dict[str, Any]) -> str:
        body, depth = [], 1
        for index, part in parts:
            depth += index % 2 * (part.startswith(("if ", "range ")) - (part == "end"))
            if not depth:
                break
            body.append((index, part))
        names, _, source = head.rpartition(":=")
        items = self.value(source or head, local)
        pairs = items.items() if isinstance(items, dict) else enumerate(items)
        out = ""
        for key, item in pairs:
            own = dict(zip(re.findall(r"\$\w+", names), (key, item), strict=False)) | {".": item}
            out += self._body(iter(body), local | own)
        return out

    def value(self, words: str, local: dict[str, Any]) -> Any:
        piped = [part.strip() for part in words.split("|")]
        found = self._call(piped[0], local)
        for call in piped[1:]:
            name, *given = call.split(" ", 1)
            found = self._apply(name, [*(self._call(word, local) for word in given), found])
        return found

    def _call(self, words: str, local: dict[str, Any]) -> Any:
        words = words.strip()
        if words.startswith("(") and words.endswith(")"):
            return self._call(words[1:-1], local)
        tokens = re.findall(r'"(?:[^"\\]|\\.)*"|\S+', words)
        if len(tokens) > 1:
            return self._apply(tokens[0], [self._call(token, local) for token in tokens[1:]])
        if words.startswith('"') or words.isdigit():
            return json.loads(words)
        if words in local:
            return local[words]
        found: Any = self.scope
        for name in words.removeprefix(".").split("."):
            found = found[name]
        return found

    def _apply(self, name: str, given: list[Any]) -> Any:
        return {
            "toJson": json.dumps,
            "quote": lambda v: json.dumps(str(v)),
            "default": lambda other, v: v or other,
            "printf": lambda form, *v: form % v,
            "add": lambda *v: sum(v),
            "join": lambda by, v: by.join(v),
        }[name](*given)


def test_the_chart_renders_with_its_own_values() -> None:
    found = {document["kind"]: document for document in Chart({"keys": ["a:b:all"]}).documents()}
    assert set(found) == {"Deployment", "Service", "Secret", "PersistentVolumeClaim"}
    pod = found["Deployment"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert {word.partition("=")[0] for word in container["args"][1:]} <= known_flags()
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]  # nodes still send it requests
    assert pod["terminationGracePeriodSeconds"] == 30 + 5 + 10
    assert found["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}, "one pod at a time can have the volume"
    assert found["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert found["Secret"]["stringData"]["keys"] == "a:b:all"
    names = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == names
    claim = next(v for v in pod["volumes"] if v["name"] == "cache")["persistentVolumeClaim"]["claimName"]
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]


def test_the_chart_takes_what_is_there_already() -> None:
    changes = {
        "existingSecret": "mine",
        "cache.existingClaim": "disk",
        "arguments": ["--max-rows", "32"],
        "environment": {"PACELINE_LOG_LEVEL": "INFO"},
        "strategy": "RollingUpdate",
    }
    found = {document["kind"]: document for document in Chart(changes).documents()}
    assert set(found) == {"Deployment", "Service"}
    container = found["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][-2:] == ["--max-rows", "32"]
    assert found["Deployment"]["spec"]["strategy"] == {"type": "RollingUpdate"}
    assert {"name": "PACELINE_LOG_LEVEL", "value": "INFO"} in container["env"]
