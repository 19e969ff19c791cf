"""The project's own rules, checked by a machine: a rule that CI does not run is a wish."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import paceline
from paceline.backend.registry import BACKENDS
from paceline.draft.registry import DRAFTERS
from paceline.model.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(paceline.__file__).parent
ROOT = Path(__file__).parents[1]
FILES = sorted(SOURCE.rglob("*.py"))
COMPILED = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".h"))
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_ATTRIBUTES, MAX_WORDS = 500, 60, 15, 15
MAX_SOURCE_LINES, MAX_SOURCE_FILES, MAX_COMPILED_LINES = 63_800, 418, 10_500
GPU_FOLDER = SOURCE / "backend" / "cuda"  # counted apart: kernels, what runs instead of them elsewhere, their rows
MAX_GPU_LINES, MAX_GPU_FILES = 9_400, 50
# File names that stand in several folders, and why.
SHARED_FILE_NAMES = {
    "__init__": "every package",
    "decoder": "each backend's folder has the same file names",
    "head": "each backend's folder has the same file names",
    "block_head": "each backend's folder has the same file names",
    "cut_model": "each backend's folder has the same file names, and model/heads has the format",
    "load": "each backend's folder has the same file names",
    "attention": "the reference's and the GPU's",
    "registry": "backends and drafters: what exists, as data",
    "sampling": "core has the transforms of one row, backend the choices of a pass",
    "errors": "core has the tree, serve/api its replies over HTTP",
    "config": "frozen dataclasses beside the code that reads them: model, draft heads, engine",
}

PLAIN_TEMPLATES = "chat templates need the ImmutableSandboxedEnvironment"
BANNED_IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}
BANNED_CALLS = {
    "eval": "code from outside must never run",
    "exec": "code from outside must never run",
    "os.system": "it runs a shell",
    "torch.load": "it unpickles",
    "yaml.load": "it constructs objects",
    "jinja2.Environment": PLAIN_TEMPLATES,
    "jinja2.sandbox.SandboxedEnvironment": PLAIN_TEMPLATES,
    "jinja2.nativetypes.NativeEnvironment": PLAIN_TEMPLATES,
}
PICKLING_METHODS = {"recv_pyobj", "send_pyobj"}
HEAVY = {"torch", "numpy"}
# A first docstring line is an imperative or a noun phrase; these words begin a clause.
CLAUSES = {"As", "Do", "How", "If", "It", "Let", "That", "What", "When", "Where", "Whether", "Which", "Who"}
NAMES = {*DRAFTERS, *FAMILIES, *BACKENDS}  # only a registry may know them


def _problems(rule, files=FILES) -> list[str]:
    """Apply a rule (tree -> iterator of (line, what)) to every file and return what it finds."""
    found = []
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        where = path.relative_to(SOURCE) if path.is_relative_to(SOURCE) else path
        found += [f"{where}:{line} {what}" for line, what in rule(tree)]
    return found


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


# Rules -------------------------------------------------------------------------------------------


def long_functions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines"


def big_classes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Classes that assign more than so many distinct `self.x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            targets = [t for n in ast.walk(node) for t in _targets(n)]
            own = {t.attr for t in targets if isinstance(t, ast.Attribute) and _dotted(t.value) == "self"}
            if len(own) > MAX_ATTRIBUTES:
                yield node.lineno, f"{node.name} has {len(own)} attributes"


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    roots = getattr(node, "targets", None) or [getattr(node, "target", None)]
    for root in roots:
        yield from root.elts if isinstance(root, ast.Tuple | ast.List) else [root]


def banned_words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _banned_imports(node)
        elif isinstance(node, ast.Call):
            yield from _banned_calls(node)
        elif isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
            yield node.lineno, f"{node.value!r}: the server binds 127.0.0.1 unless the user says otherwise"


def _banned_imports(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[int, str]]:
    home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        name = home + alias.name
        if name.split(".")[0] in BANNED_IMPORTS or name in BANNED_CALLS:
            yield node.lineno, f"imports {name}"


def _banned_calls(node: ast.Call) -> Iterator[tuple[int, str]]:
    name = _dotted(node.func)
    if name in BANNED_CALLS or name.rpartition(".")[2] in PICKLING_METHODS:
        yield node.lineno, f"{name}: {BANNED_CALLS.get(name, 'it pickles')}"
    for keyword in node.keywords:
        if keyword.arg == "shell" and getattr(keyword.value, "value", True) is not False:
            yield node.lineno, "shell=True"


def heavy_at_module_level(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in _module_level(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.split(".")[0] in HEAVY:
                yield node.lineno, f"imports {name} at module level"


def _module_level(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements that run on import: not those in functions or under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.If) and _dotted(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from _module_level(child)


def branches_on_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Comparisons (==, !=, in) and match cases with the name of a drafter, a backend or a family of models."""
    for node in ast.walk(tree):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        sides += [node.value] if isinstance(node, ast.MatchValue) else []
        for side in sides:
            for value in side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]:
                if isinstance(value, ast.Constant) and value.value in NAMES:
                    yield value.lineno, f"branches on the name {value.value!r}; declare it in the registry"


def unsafe_starts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Commands that start Python without `-P`."""
    for node in ast.walk(tree):
        words = node.elts if isinstance(node, ast.List | ast.Tuple) else []
        for word, then in zip_longest(words, words[1:]):
            if _dotted(word) == "sys.executable" and getattr(then, "value", None) != "-P":
                yield word.lineno, "starts Python without -P, so it imports from the current folder first"


def slow_twins(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Functions named as a readable twin of compiled code: these live in tests/oracles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_slow"):
            yield node.lineno, f"{node.name} is a twin for tests; tests/oracles is the place of it"


def long_first_lines(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """First docstring lines of more than `MAX_WORDS` words, or that open with a word of `CLAUSES`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").partition("\n")[0].split()
            if len(words) > MAX_WORDS or CLAUSES & set(words[:1]):
                yield node.body[0].lineno, f"{' '.join(words[:4])}...: {len(words)} words in the first line"


# Rules over all files ----------------------------------------------------------------------------


def num_lines(path: Path) -> int:
    """Lines of a text file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def long_files(files: list[Path], most: int = MAX_FILE_LINES) -> dict[str, int]:
    """Lines of the files that have more than `most`."""
    return {p.name: n for p in files if (n := num_lines(p)) > most}


def shared_class_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Public class names that stand in more than one file: name -> files."""
    found = defaultdict(list)
    for name, code in sources.items():
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name)
    return {name: files for name, files in found.items() if len(files) > 1}


def shared_file_names(paths: list[Path]) -> dict[str, list[str]]:
    """Names of modules that stand in more than one folder and are not listed: name -> folders."""
    found = defaultdict(list)
    for path in paths:
        if path.stem not in SHARED_FILE_NAMES:
            found[path.stem].append(str(path.parent))
    return {name: folders for name, folders in found.items() if len(folders) > 1}


def import_circle(sources: dict[str, str]) -> list[str]:
    """One circle of imports among modules, as dotted names; imports for types and in functions count, too."""
    graph = {module: set(_imported(ast.parse(code), sources)) - {module} for module, code in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def _imported(tree: ast.AST, modules: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _sources() -> dict[str, str]:
    """Every module's code by dotted name. `paceline` itself imports lazily and is left out."""
    named = {".".join(["paceline", *p.relative_to(SOURCE).with_suffix("").parts]): p for p in FILES}
    return {
        name.removesuffix(".__init__"): p.read_text(encoding="utf-8")
        for name, p in named.items()
        if name != "paceline.__init__"
    }


# The rules hold ----------------------------------------------------------------------------------


def test_no_file_is_long():
    assert long_files(FILES) == {}
    assert long_files(COMPILED) == {}


def test_the_whole_is_no_larger_than_its_budget():
    gpu_files = [path for path in FILES if path.is_relative_to(GPU_FOLDER)]
    others = [path for path in FILES if path not in gpu_files]
    assert len(others) <= MAX_SOURCE_FILES
    assert sum(map(num_lines, others)) <= MAX_SOURCE_LINES
    assert len(gpu_files) <= MAX_GPU_FILES
    assert sum(map(num_lines, gpu_files)) <= MAX_GPU_LINES
    assert sum(map(num_lines, COMPILED)) <= MAX_COMPILED_LINES


def test_a_class_name_means_one_class():
    assert shared_class_names(_sources()) == {}


def test_a_file_name_means_one_module_or_is_listed():
    assert shared_file_names(FILES) == {}


def test_no_module_imports_itself_by_way_of_others():
    assert import_circle(_sources()) == []


@pytest.mark.parametrize(
    "rule", [long_functions, big_classes, banned_words, branches_on_names, unsafe_starts, slow_twins]
)
def test_rule_holds(rule):
    assert _problems(rule) == []


def test_core_imports_neither_torch_nor_numpy_at_module_level():
    assert _problems(heavy_at_module_level, sorted((SOURCE / "core").glob("*.py"))) == []


def test_first_docstring_lines_are_short():
    assert _problems(long_first_lines, [*FILES, *sorted((ROOT / "tools").rglob("*.py"))]) == []


PLAIN = sorted(p for folder in ("control", "core") for p in (SOURCE / folder).rglob("*.py"))
PLAIN += [SOURCE / "cli.py", *(SOURCE / "engine" / f"{name}.py" for name in ("scheduler", "pages"))]
PLAIN += [SOURCE / "engine" / "assembly" / "cli_options.py"]


def test_plain_logic_never_imports_torch():
    """In a process of its own, whatever it imports in turn."""
    modules = [".".join(["paceline", *p.relative_to(SOURCE).with_suffix("").parts]) for p in PLAIN]
    modules = [m.removesuffix(".__init__") for m in modules]
    code = (
        f"import importlib, sys\nfor m in {modules}: importlib.import_module(m)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_public_names_are_what_can_be_imported():
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert sorted(paceline.__all__) == sorted([*paceline._HOMES, "__version__"])
    for name, home in paceline._HOMES.items():
        assert getattr(importlib.import_module(home), name) is getattr(paceline, name)


# The rules can fail ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (long_functions, "def f():\n" + "    x = 1\n" * 60),
        (big_classes, "class A:\n def f(self):\n  " + "; ".join(f"self.x{i} = 0" for i in range(16))),
        (big_classes, "class A:\n def f(self):\n  " + ", ".join(f"self.x{i}" for i in range(16)) + " = g()"),
        (banned_words, "import pickle"),
        (banned_words, "from torch import load"),
        (banned_words, "def f(): torch.load('x')"),
        (banned_words, "eval('1')"),
        (banned_words, "socket.recv_pyobj()"),
        (banned_words, "from jinja2 import Environment"),
        (banned_words, "subprocess.run('ls', shell=True)"),
        (banned_words, "host = '0.0.0.0'"),
        (heavy_at_module_level, "import numpy as np"),
        (heavy_at_module_level, "try:\n  from torch.nn import functional\nexcept ImportError: pass"),
        (branches_on_names, "x = 1 if drafter == 'ngram' else 2"),
        (branches_on_names, "if backend in ('reference', 'x'): pass"),
        (branches_on_names, "match name:\n case 'eagle3': pass"),
        (unsafe_starts, "command = [sys.executable, '-m', 'a.b']"),
        (unsafe_starts, "run((sys.executable, *words))"),
        (slow_twins, "def pack_slow(x): pass"),
        (long_first_lines, f"'{'word ' * 16}'"),
        (long_first_lines, "def f():\n 'What it does.'"),
        (long_first_lines, "class A:\n async def f():\n  'Let it run.'"),
    ],
)
def test_rule_finds(rule, code):
    assert list(rule(ast.parse(code)))


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (banned_words, "model.eval()\nsubprocess.run(['ls'], shell=False)\nloads(json.load(f))"),
        (heavy_at_module_level, "if TYPE_CHECKING:\n import numpy\ndef f():\n import torch"),
        (branches_on_names, "DRAFTERS = {'ngram': 'a:b'}\nx = y == 'off'"),
        (unsafe_starts, "command = ['nice', sys.executable, '-P', '-m', 'a.b']"),
        (banned_words, "from jinja2.sandbox import ImmutableSandboxedEnvironment"),
        (long_first_lines, f"def f():\n '''{'word ' * 15}\n\n{'word ' * 30}'''"),
        (long_first_lines, "class A:\n 'Italic text, where it is.'\n x = 1"),
    ],
)
def test_rule_spares(rule, code):
    assert not list(rule(ast.parse(code)))


def test_rules_over_all_files_find(tmp_path):
    long = tmp_path / "long.h"
    long.write_text("x\n" * (MAX_FILE_LINES + 1))
    assert long_files([long]) == {"long.h": MAX_FILE_LINES + 1}
    assert shared_class_names({"a": "class A: pass", "b": "def f():\n class A: pass"}) == {"A": ["a", "b"]}
    assert shared_file_names([Path("a/same.py"), Path("b/same.py"), Path("b/other.py")]) == {"same": ["a", "b"]}
    round_trip = {
        "p.a": "from p import b",
        "p.b": "def f():\n import p.c",
        "p.c": "if TYPE_CHECKING:\n from p.a import x",
    }
    assert set(import_circle(round_trip)) == {"p.a", "p.b", "p.c"}


def test_rules_over_all_files_spare():
    assert shared_class_names({"a": "class A: pass", "b": "class B: pass"}) == {}
    assert shared_file_names([Path("reference/decoder.py"), Path("native/decoder.py")]) == {}
    assert import_circle({"p.a": "from p.b import x", "p.b": "import numpy"}) == []
