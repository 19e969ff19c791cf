"""The page's files: what is sent, with which headers, and that every library is what its manifest says."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import re
from argparse import ArgumentParser

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from tools.vendor_page import LIBRARIES, MANIFEST, VENDOR, recorded, sha256

from paceline.serve.api.auth import AuthMiddleware
from paceline.serve.api.keys import KeyRing
from paceline.serve.observe.page_files import FOLDER, TYPES, PageMiddleware, load_page
from paceline.serve.server import add_arguments, http_config
from tests.test_rules import ROOT

MAX_LINES = 2_500  # of our own scripts and styles
OWN = sorted(path for path in FOLDER.iterdir() if path.is_file())
FILES = load_page()


def behind_the_page(headers: dict[str, str]) -> httpx.AsyncClient:
    """The page in front of an application that wants a key."""

    async def secret(_: object) -> PlainTextResponse:
        return PlainTextResponse("secret")

    inner = AuthMiddleware(Starlette(routes=[Route("/v1/models", secret)]), KeyRing("k", None), lambda _: None)
    transport = httpx.ASGITransport(PageMiddleware(inner, FILES))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


def ask(method: str, path: str, **headers: str) -> httpx.Response:
    async def send() -> httpx.Response:
        async with behind_the_page(headers) as client:
            return await client.request(method, path)

    return asyncio.run(send())


def test_every_file_is_sent_whole_without_a_key():
    for path, file in FILES.items():
        answer = ask("GET", path)
        assert answer.status_code == 200
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.content == file.plain
        plain = ask("GET", path, **{"accept-encoding": "identity"})
        assert plain.content == file.plain
        assert "content-encoding" not in plain.headers
        assert gzip.decompress(file.packed) == file.plain


def test_every_answer_has_strict_headers():
    for path in FILES:
        headers = ask("GET", path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'self'; script-src 'self' 'sha256-")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-opener-policy"] == "same-origin"


def test_the_only_inline_script_is_the_import_map_and_its_hash_is_allowed():
    html = FILES["/"].plain.decode()
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", html, re.DOTALL)
    inline = [(attributes, text) for attributes, text in scripts if text]
    assert [attributes.strip() for attributes, _ in inline] == ['type="importmap"']
    digest = base64.b64encode(hashlib.sha256(inline[0][1].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in FILES["/"].headers["content-security-policy"]
    assert not re.search(r"\son\w+=|style=", html)
    for address in json.loads(inline[0][1])["imports"].values():
        assert address.removeprefix(".") in FILES


def test_the_start_is_asked_for_again_and_all_else_is_kept_for_good():
    for path in FILES:
        kept = "immutable" in ask("GET", path).headers["cache-control"]
        assert kept == (path != "/")


def test_a_file_that_the_browser_has_is_not_sent_again():
    first = ask("GET", "/")
    for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}'):
        again = ask("GET", "/", **{"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
    assert ask("GET", "/", **{"if-none-match": '"other"'}).status_code == 200


def test_head_has_the_headers_and_no_body():
    answer = ask("HEAD", "/")
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) > 0
    assert answer.content == b""


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/page/", "/page/../app.js", "/page/x/app.js", "/%2e%2e/pyproject.toml", "/index.html"],
)
def test_anything_else_still_needs_the_key(path):
    assert ask("GET", path).status_code == 401


def test_other_methods_are_passed_on():
    assert ask("POST", "/").status_code == 401


def test_no_page_turns_it_off():
    parser = ArgumentParser()
    add_arguments(parser)
    assert http_config(parser.parse_args([])).page
    assert not http_config(parser.parse_args(["--no-page"])).page


def test_every_library_is_what_the_manifest_records():
    entries = recorded()
    assert sorted(entries) == sorted(library.package for library in LIBRARIES)
    listed = {MANIFEST.name}
    for library in LIBRARIES:
        entry = entries[library.package]
        assert {file["file"] for file in entry["files"]} == library.files.keys() | library.licences.keys()
        for file in entry["files"]:
            assert sha256((VENDOR / file["file"]).read_bytes()) == file["sha256"], file["file"]
            listed.add(file["file"])
    there = {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*") if path.is_file()}
    assert there == listed


def test_every_library_is_named_with_its_licence_in_the_notice():
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    for package, entry in recorded().items():
        assert package in notice
        assert entry["licence"] in ("MIT", "Apache-2.0", "(MPL-2.0 OR Apache-2.0)")


def test_types_are_checked_against_the_versions_that_are_served():
    wanted = json.loads((ROOT / "scripts/page/package.json").read_text(encoding="utf-8"))["devDependencies"]
    for package, entry in recorded().items():
        assert wanted.get(package, entry["version"]) == entry["version"]
    assert "resolved" not in (ROOT / "scripts/page/package-lock.json").read_text(encoding="utf-8")


def test_our_own_files_name_no_other_host():
    for path in OWN:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(?:https?|wss?):?//|[\"'(]//", text), path.name


def test_our_own_scripts_run_no_text_and_set_html_in_one_place():
    for path in OWN:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\beval\(|new Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
        if "dangerouslySetInnerHTML" in text:
            assert path.name == "markdown.js"


def test_every_module_is_asked_for_at_once():
    html = FILES["/"].plain.decode()
    version = re.findall(r"page/(\w+)/app\.js", html)[0]
    named = set(re.findall(rf"(?:href|src)=\"page/{version}/([^\"]+)\"", html))
    there = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.suffix in TYPES}
    assert named == there - {"index.html", "types.js"}


def test_the_page_is_no_larger_than_its_budget():
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in OWN}
    assert sum(lines.values()) <= MAX_LINES
    assert max(lines.values()) <= 500
