"""Options of chat: template, parsers of calls and reasoning, control tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.flags import of_flags
from paceline.model.template_source import MAX_TEMPLATE_CHARS, TemplateSource
from paceline.serve.api.tool_calls.plan import AnswerForms
from paceline.serve.api.tool_calls.reasoning import NONE, check_marks, marks_of
from paceline.serve.api.tool_calls.registry import check_family, family_of
from paceline.serve.control_text import ControlGuard
from paceline.serve.prompts import Prompts

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from paceline.core.sampling_defaults import Defaults
    from paceline.model.tokenizer import Tokenizer
    from paceline.serve.prompts import Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of chat. Checked when made; raises `ConfigError`."""

    template: str | None = None  # a template's source, in place of the model's own
    tool_parser: str | None = None  # a family of calls; None: as the model shows
    reasoning_parser: str | None = None  # markers of reasoning; None: as the model shows
    allow_control_tokens: bool = False  # users' text may become control tokens

    def __post_init__(self) -> None:
        if self.tool_parser is not None:
            check_family(self.tool_parser)
        if self.reasoning_parser is not None:
            check_marks(self.reasoning_parser)

    def source(self, own: TemplateSource | None) -> TemplateSource | None:
        """Return the template to use. own: the model's."""
        if self.template is None:
            return own
        return TemplateSource(self.template, {} if own is None else own.special)

    def prompts(
        self,
        tokenizer: Tokenizer,
        template: Renderer | None,
        max_len: int,
        vocab_size: int | None,
        sampling: Defaults,
    ) -> Prompts:
        """Return the conversion of prompts for a model. template: already the one to use."""
        if template is None:
            return Prompts(tokenizer, None, max_len, vocab_size, sampling=sampling)
        source = template.source.text
        forms, guard = self.forms(tokenizer, source), self.guard(tokenizer, source)
        return Prompts(tokenizer, template, max_len, vocab_size, forms, guard, sampling=sampling)

    def forms(self, tokenizer: Tokenizer, template: str) -> AnswerForms:
        """Return how a model writes calls and reasoning."""
        added = tokenizer.raw.get_added_tokens_decoder()
        tokens = {token.content for token in added.values()}
        special = {token.content: token_id for token_id, token in added.items() if token.special}
        return AnswerForms(
            tokenizer,
            family_of(template, tokens, self.tool_parser),
            marks_of(template, tokens, self.reasoning_parser),
            special,
        )

    def guard(self, tokenizer: Tokenizer, template: str) -> ControlGuard | None:
        """Return what keeps control tokens out of users' text; None if they are allowed."""
        return None if self.allow_control_tokens else ControlGuard(tokenizer, template)


def add_chat_arguments(parser: ArgumentParser) -> None:
    """Add the flags of chat."""
    group = parser.add_argument_group("chat")
    group.add_argument("--chat-template", metavar="FILE", help="Jinja template in place of the model's own")
    group.add_argument("--tool-parser", metavar="NAME", help="how the model writes calls of tools; else found out")
    group.add_argument(
        "--reasoning-parser", metavar="NAME", help=f"how the model marks its reasoning, or {NONE}; else found out"
    )
    group.add_argument(
        "--allow-control-tokens",
        action="store_true",
        help="let users' text become control tokens, such as the end of a turn",
    )


def chat_options(args: Namespace) -> ChatOptions:
    """Return the options that parsed flags ask for. Raises `ConfigError`."""
    template = None if args.chat_template is None else read_template(Path(args.chat_template))
    return of_flags(ChatOptions, args, template=template)


def read_template(path: Path) -> str:
    """Return a template file's text. Raises `ConfigError`."""
    try:
        if not path.is_file():
            raise ConfigError(f"--chat-template: there is no file {path}")
        if path.stat().st_size > MAX_TEMPLATE_CHARS:
            raise ConfigError(f"--chat-template: {path} is longer than any real template")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: cannot read {path}: {error}") from None
