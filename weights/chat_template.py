"""Chat messages and the model's Jinja template that turns them into one prompt.

A template comes with the model, that is from a stranger: it runs in Jinja's sandbox, on a copy of the messages that it
cannot change, and whatever it raises becomes a ValueError with its own message.

Source: the template functions and settings of Hugging Face transformers, which templates are written for.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]

_GIVEN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
                          "raise_exception", "strftime_now"})


class ChatTemplate:
    """A compiled template. `variables` are what it may use beside the messages: bos_token, eos_token and the like."""

    def __init__(self, source: str, origin: str, variables: Mapping[str, str]) -> None:
        """`origin` names where the template came from. Raises: ValueError for a syntax error."""
        try:
            self._template = _environment().from_string(source)
        except (TemplateError, SyntaxError, RecursionError) as error:   # the last two from the code that Jinja makes
            raise ValueError(f"{origin}: the chat template does not compile: {error}") from None
        self._variables = dict(variables)

    @property
    def reserved_names(self) -> frozenset[str]:
        """What a template is given by us alone."""
        return _GIVEN_NAMES | self._variables.keys()

    def render(self, messages: list[Message], add_generation_prompt: bool,
               kwargs: Mapping[str, Any] | None = None) -> str:
        """The prompt as text. `messages` as `check_messages` returns them; kwargs: what else the caller has for the
        template, e.g. enable_thinking; none of `reserved_names`. Raises: ValueError."""
        try:
            # Templates ask `tools is not none`: an undefined name would be taken for tools.
            return self._template.render({**(kwargs or {}), **self._variables, "messages": messages, "tools": None,
                                          "documents": None, "add_generation_prompt": add_generation_prompt})
        except Exception as error:          # a stranger's program: no error of it may end more than this request
            raise ValueError(f"chat template: {error}") from None


def check_messages(messages: object) -> list[Message]:
    """Messages as OpenAI's API has them, made ready for a template: content is a string.

    A list of text parts becomes the texts one after the other, with nothing between. An assistant's missing content is
    an empty turn. Keys other than role and content stay as they are.

    Raises: ValueError naming the field, e.g. "messages[1].content[0].type".
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages: must be a list of at least one message")
    checked = []
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ValueError(f"{field}: must be an object with role and content")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{field}.role: must be a string, got {message.get('role')!r}")
        content = _text_content(message.get("content"), message["role"], f"{field}.content")
        checked.append(cast(Message, map_strings({**message, "content": content}, require_unicode, field)))
    return checked


def map_strings(value: Any, change: Callable[[str, str], str], field: str) -> Any:
    """A copy of nested JSON-like `value` with `change(text, field)` in the place of every string, keys included."""
    if isinstance(value, str):
        return change(value, field)
    if isinstance(value, dict):
        return {map_strings(key, change, field): map_strings(inner, change, f"{field}.{key}")
                for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(inner, change, f"{field}[{index}]") for index, inner in enumerate(value)]
    return value


def require_unicode(text: str, field: str) -> str:
    """`text`, if it has no lone surrogate (half of a character, which JSON can spell but UTF-8 cannot).

    Raises: ValueError naming the field.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{field}: character {error.start} is the lone surrogate "
                         f"U+{ord(text[error.start]):04X}, which is no text") from None
    return text


def _text_content(content: object, role: str, field: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list) or not content:
        raise ValueError(f"{field}: must be a string or a list of text parts, got {content!r:.100}")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise ValueError(f"{field}[{index}]: must be an object with type and text")
        if part.get("type") != "text":
            raise ValueError(f"{field}[{index}].type: {part.get('type')!r} is not supported, only text is")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{field}[{index}].text: must be a string")
        texts.append(require_unicode(part["text"], f"{field}[{index}].text"))
    return "".join(texts)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks, for training, what an assistant wrote; here it is its body."""
    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    # NOTE: Jinja's own filter escapes HTML characters, which a model has never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
