"""Command `paceline`: one entry point that imports only the module of the chosen command.

A command module has `add_arguments(parser)` and `run(args) -> int`. Every flag can also be given by an environment
variable, `--max-rows` by PACELINE_MAX_ROWS, or in a TOML file, as `max-rows` in the command's section. The command
line wins, then the environment.
"""

from __future__ import annotations

import argparse
import codecs
import gc
import importlib
import io
import json
import os
import shlex
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.core.config_file import FLAG as CONFIG_FLAG
from paceline.core.config_file import as_toml, config_path, read_section
from paceline.core.errors import ConfigError, PacelineError, suggest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

# A new command is one module, or a class in it, and one line here: name -> (module[:class], description).
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("paceline.serve.server", "serve a model over HTTP, as OpenAI does"),
    "fleet": ("paceline.serve.terminal.running_fleet", "show the replicas of a running server"),
    "fleet drain": ("paceline.serve.terminal.running_fleet:Drain", "let other replicas take over from one"),
    "fleet move": ("paceline.serve.terminal.running_fleet:Move", "let another replica go on with an answer"),
    "chat": ("paceline.serve.terminal.chat", "talk to a model in the terminal"),
    "generate": ("paceline.serve.terminal.generate", "write one answer, or one for each prompt of a file"),
    "bench": ("paceline.bench.bench_command", "measure decoding with and without speculation"),
    "bench kernels": (
        "paceline.bench.kernel_bench",
        "measure the native kernels against the machine's limits",
    ),
    "compare": ("paceline.bench.compare", "compare the controller with what one could choose by hand"),
    "timeline": ("paceline.bench.timeline", "watch target and drafter by the clock, both loops"),
    "train data": ("paceline.train.data", "let a target write the answers that draft heads learn from"),
    "train features": (
        "paceline.train.head_commands:TrainFeatures",
        "let a target read its answers, ahead of training",
    ),
    "train eagle3": ("paceline.train.head_commands:TrainEagle3", "train an EAGLE-3 head for a target"),
    "train block": ("paceline.train.block_command", "train a block head for a target"),
    "train peagle": ("paceline.train.head_commands:TrainPEagle", "train a P-EAGLE head for a target"),
    "train draft-model": ("paceline.train.cut_model_recipe", "train a small model cut from a target's layers"),
    "train plot": ("paceline.train.summary", "draw a run's acceptance over its steps"),
    "profile": ("paceline.bench.profiling", "measure what a step costs on this machine"),
    "explain": (
        "paceline.bench.explain",
        "replay a trace of the controller: what it knew, chose and got",
    ),
    "simulate": ("paceline.sim.command", "serve without a model: compare policies on measured costs"),
    "pull": ("paceline.serve.terminal.model_commands:PullModel", "fetch a model before it is needed"),
    "list": ("paceline.serve.terminal.model_commands:ListModels", "list the models that are here"),
    "rm": ("paceline.serve.terminal.model_commands:RemoveModel", "remove a model that is here"),
    "completion": ("paceline.cli_completion", "write the completion of a shell"),
    "key new": ("paceline.serve.terminal.key_command", "make a key for clients of a server"),
    "doctor": ("paceline.bench.doctor", "check a target and its drafter, and say what speed to expect"),
}
# Modules whose `begin` runs before a command is imported. The command finds the result of `begin` in `args.begun`,
# and the time of that moment in `args.began_s`.
BEGUN_FIRST = {"serve": "paceline.serve.worker.child"}
# Modules that run a command elsewhere, by the value of its option --on.
ELSEWHERE = {"ray": "paceline.ray.serve_command"}
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")  # values of a switch
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_PIPE_CLOSED = 141  # 128 + SIGPIPE
_RESUMABLE = ("train", "compare")  # commands that resume where they stopped
_SECRET = ("api-key",)  # options printed as a comment, without their value
_REFUSE = "paceline-refuse"  # error handler of standard input for bytes that are no text
_ESCAPE = "paceline-escape"  # error handler of standard output for characters that its encoding lacks


class _Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `ConfigError` rather than printing its whole usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists the options")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its status: 2 for a user's error, 130 if interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _check_stdin()
        _open_stdout()
        return _main(words)
    except PacelineError as error:
        if os.environ.get("PACELINE_DEBUG") == "1":
            traceback.print_exc()
        _print_error(str(error))
        return 2
    except KeyboardInterrupt:
        _print_interrupted(words)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has ended; the last flush must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED


def _main(argv: list[str]) -> int:
    words = 2 if " ".join(argv[:2]) in COMMANDS else 1
    name = " ".join(argv[:words]) if argv else "--help"
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        return 0
    if name in ("-V", "--version"):
        from paceline.serve.terminal.banner import version_line

        sys.stdout.write(f"{version_line()}\n")
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}{suggest(name, COMMANDS)}")
    rest = argv[words:]
    began_s, begun = time.monotonic(), _begun(name, rest)
    module, parser = _imported(COMMANDS[name][0], name), parser_of(name)
    section = _section(name, rest, os.environ)
    args = parse(parser, rest, os.environ, section)
    if args.print_config:
        sys.stdout.write(_resolved(name, parser, args, rest, section))
        return 0
    if name in BEGUN_FIRST:
        args.begun, args.began_s = begun, began_s
    elsewhere = ELSEWHERE.get(getattr(args, "on", ""))
    status: int = (_imported(elsewhere, name) if elsewhere else module).run(args)
    return status


def _begun(name: str, argv: list[str]) -> Any:
    """Begin what a command surely needs, before its options are read; None if nothing."""
    if name not in BEGUN_FIRST or {"-h", "--help", "--print-config", "--on", "--on=ray"} & set(argv):
        return None
    return importlib.import_module(BEGUN_FIRST[name]).begin()


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    module_name, about = COMMANDS[name]
    parser = _Parser(prog=f"paceline {name}", description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False)
    _imported(module_name, name).add_arguments(parser)
    group = parser.add_argument_group("options of every command")
    about = f"TOML file with options in its section [{name.replace(' ', '.')}]"
    group.add_argument(CONFIG_FLAG, metavar="FILE", help=f"{about} (default: paceline/config.toml in ~/.config)")
    group.add_argument("--print-config", action="store_true", help="print what each option is and who set it; end")
    return parser


def _imported(place: str, command: str) -> Any:
    """Import a command. Raises `ConfigError` where it needs PyTorch and that is not installed.

    place: its module[:class].
    """
    module_name, _, part = place.partition(":")
    gc.disable()  # collecting takes an eighth of an import's time, and a module is never garbage
    try:
        module = importlib.import_module(module_name)
        return getattr(module, part) if part else module
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError(f"`paceline {command}` needs PyTorch: pip install 'paceline[torch]'") from None
    finally:
        gc.enable()


def _overview() -> str:
    width = 2 + max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}{about}" for name, (_, about) in COMMANDS.items())
    return (
        "usage: paceline COMMAND [OPTIONS]\n\n"
        "An inference engine in which speculative decoding is how the engine decodes.\n\n"
        f"commands:\n{commands}\n\n"
        "`paceline COMMAND --help` lists a command's options; `paceline --version` tells the version.\n"
        "Begin with `paceline serve` or `paceline chat`; the guides are in docs/guide.\n"
        "Each option can also be set by an environment variable, --max-rows by PACELINE_MAX_ROWS, or in a TOML\n"
        "file: --config FILE, else ~/.config/paceline/config.toml; `paceline serve --print-config` shows all.\n"
        "PACELINE_DEBUG=1 shows where an error came from.\n"
    )


@dataclass(frozen=True, slots=True)
class Section:
    """Options of one command in a file."""

    path: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)  # by flag, without its dashes


def _section(name: str, argv: list[str], environ: Mapping[str, str]) -> Section:
    path = None if "-h" in argv or "--help" in argv else config_path(argv, environ)
    return Section() if path is None else Section(path, read_section(path, name, COMMANDS))


def parse(
    parser: argparse.ArgumentParser, argv: list[str], environ: Mapping[str, str], section: Section | None = None
) -> argparse.Namespace:
    """Parse arguments of file, environment and command line; the last one wins.

    Raises `ConfigError`.
    """
    _complete_help(parser)
    given = [*_from_file(parser, argv, environ, section or Section()), *_from_environment(parser, argv, environ)]
    args, unknown = parser.parse_known_args([*given, *argv])
    if unknown:
        flag = next((u for u in unknown if u.startswith("-")), unknown[0])
        known = ["--help", *(option for action in _flags(parser) for option in action.option_strings)]
        raise ConfigError(f"{parser.prog} does not know {flag!r}{suggest(flag.partition('=')[0], known)}")
    return args


def _flags(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield all options with a long name except --help; argparse has no public list."""
    for action in parser._actions:
        if action.option_strings and action.option_strings[-1].startswith("--") and action.dest != "help":
            yield action


def _variable(action: argparse.Action) -> str:
    return "PACELINE_" + _long(action).removeprefix("--").replace("-", "_").upper()


def _complete_help(parser: argparse.ArgumentParser) -> None:
    """Add each flag's default and environment variable to its help text."""
    for action in _flags(parser):
        if action.help is not argparse.SUPPRESS:
            shown = action.default not in (None, False, argparse.SUPPRESS) and "default" not in (action.help or "")
            default = "default %(default)s, " if shown else ""
            action.help = f"{action.help or ''} [{default}{_variable(action)}]".strip()


def _from_environment(parser: argparse.ArgumentParser, argv: list[str], environ: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    for action in _flags(parser):
        value = environ.get(_variable(action), "").strip()
        if value:
            found += _as_arguments(action, value, argv)
    return found


def _as_arguments(action: argparse.Action, value: str, argv: list[str]) -> list[str]:
    """Return the arguments an environment variable stands for."""
    flag = _long(action)
    if action.nargs == 0:
        return _switch(action, value)
    if isinstance(action, argparse._AppendAction):  # a list on the command line replaces that of the environment
        return [] if _is_given(action, argv) else [f"{flag}={part}" for part in _words(action, value)]
    return [f"{flag}={value}"]


def _from_file(
    parser: argparse.ArgumentParser, argv: list[str], environ: Mapping[str, str], section: Section
) -> list[str]:
    """Return the arguments of a file's section. Raises `ConfigError` that names the key."""
    actions = {_long(action).removeprefix("--"): action for action in _flags(parser)}
    found: list[str] = []
    for key, value in section.values.items():
        if key not in actions or key in (CONFIG_FLAG.removeprefix("--"), "print-config"):
            raise ConfigError(f"{section.path}: {parser.prog} has no option {key[:64]!r}{suggest(key, actions)}")
        action = actions[key]
        adds = isinstance(action, argparse._AppendAction) or action.nargs == 0
        if adds and (_is_given(action, argv) or environ.get(_variable(action), "").strip()):
            continue  # set there already: that list replaces this one, and no flag takes a switch back
        found += _file_arguments(action, value, f"{section.path}: {key}")
    return found


def _file_arguments(action: argparse.Action, value: object, where: str) -> list[str]:
    flag = _long(action)
    if action.nargs == 0 or _has_no(action):
        if not isinstance(value, bool):
            raise ConfigError(f"{where} must be true or false, not {str(value)[:64]!r}")
        return _switch(action, str(value))
    parts = value if isinstance(value, list) else [value]
    is_list = isinstance(action, argparse._AppendAction) or action.nargs == "+"
    if not all(isinstance(part, str | int | float) and not isinstance(part, bool) for part in parts):
        raise ConfigError(f"{where} must be a text or a number{', or a list of them' if is_list else ''}")
    if isinstance(value, list) and not is_list:
        raise ConfigError(f"{where} takes one value, not a list")
    for part in parts:
        _check_value(action, str(part), where)
    if action.nargs == "+":
        return [flag, *map(str, parts)] if parts else []
    return [f"{flag}={part}" for part in parts]


def _check_value(action: argparse.Action, text: str, where: str) -> None:
    try:
        converted = action.type(text) if callable(action.type) else text
    except (ValueError, TypeError, argparse.ArgumentTypeError):
        raise ConfigError(
            f"{where} must be {getattr(action.type, '__name__', 'right')}, not {text[:64]!r}"
        ) from None
    if action.choices is not None and converted not in action.choices:
        raise ConfigError(f"{where} is one of {', '.join(map(str, action.choices))}, not {text[:64]!r}")


def _resolved(
    name: str, parser: argparse.ArgumentParser, args: argparse.Namespace, argv: list[str], section: Section
) -> str:
    """Return a TOML section with every option, and who set it."""
    lines = [f"[{name.replace(' ', '.')}]"]
    for action in _flags(parser):
        key, value = _long(action).removeprefix("--"), getattr(args, action.dest)
        if key in (CONFIG_FLAG.removeprefix("--"), "print-config") or action.help == argparse.SUPPRESS:
            continue
        from_file = str(section.path) if key in section.values else "default"
        variable = _variable(action)
        setter = variable if os.environ.get(variable, "").strip() else from_file
        setter = "command line" if _is_given(action, argv) else setter
        is_hidden = value is None or key in _SECRET
        shown, text = ("# ", "") if is_hidden else ("", as_toml(value))
        lines.append(f"{shown}{key} = {text}  # {setter}".replace("=   #", "=  #"))
    return "\n".join(lines) + "\n"


def _is_given(action: argparse.Action, argv: list[str]) -> bool:
    return any(a == option or a.startswith(f"{option}=") for a in argv for option in action.option_strings)


def _long(action: argparse.Action) -> str:
    return next(option for option in action.option_strings if option.startswith("--"))


def _words(action: argparse.Action, value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        hint = "write it as a shell would, a quotation mark of its own as \\' or \\\""
        raise ConfigError(f"{_variable(action)}: {str(error).lower()} in {value[:64]!r}; {hint}") from None


def _switch(action: argparse.Action, value: str) -> list[str]:
    if value.lower() not in (*_ON, *_OFF):
        raise ConfigError(f"{_variable(action)} must be 1 or 0, not {value!r}")
    if value.lower() in _ON:
        return [action.option_strings[0]]
    return (
        [option for option in action.option_strings if option.startswith("--no-")][:1] if _has_no(action) else []
    )


def _has_no(action: argparse.Action) -> bool:
    return isinstance(action, argparse.BooleanOptionalAction)


def _check_stdin() -> None:
    """Make standard input that its encoding cannot decode raise `ConfigError`."""
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors != _REFUSE:
        codecs.register_error(_REFUSE, _refuse)
        sys.stdin.reconfigure(errors=_REFUSE)


def _refuse(error: UnicodeError) -> NoReturn:
    encoding = error.encoding if isinstance(error, UnicodeDecodeError) else "text"
    raise ConfigError(f"standard input is not {encoding.upper()}")


def _open_stdout() -> None:
    """Make standard output take any text: characters its encoding lacks are escaped as in JSON."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        codecs.register_error(_ESCAPE, _escape)
        sys.stdout.reconfigure(errors=_ESCAPE)


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _print_interrupted(words: Sequence[str]) -> None:
    """Write that Ctrl-C ended the command, and whether it can be resumed."""
    kept = "; the same command goes on where it stopped" if words and words[0] in _RESUMABLE else ""
    before = "\n" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{before}interrupted{kept}\n")


def _print_error(message: str) -> None:
    """Write one line to stderr, red on a terminal."""
    from paceline.serve.terminal.display import is_screen

    line = f"error: {' '.join(message.split())}"
    red = is_screen(sys.stderr) and not os.environ.get("NO_COLOR")
    sys.stderr.write(f"\033[31m{line}\033[0m\n" if red else f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
