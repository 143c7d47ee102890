"""Chat messages and the model's Jinja template that turns them into one prompt.

A template comes with the model, that is from a stranger: it runs in Jinja's sandbox, on a copy of the messages that it
cannot change, and whatever it raises becomes a ValueError with its own message.

Source: the template functions and settings of Hugging Face transformers, which templates are written for.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import TemplateError, meta, nodes
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
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._names = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except (TemplateError, SyntaxError, RecursionError) as error:   # the last two from the code that Jinja makes
            raise ValueError(f"{origin}: the chat template does not compile: {error}") from None
        self._variables = dict(variables)
        self._asks_for_none = re.search(r"""content['"\]]* is (not )?none""", source) is not None
        self.source = source

    def uses(self, name: str) -> bool:
        """Whether the template looks at a variable of that name."""
        return name in self._names

    @property
    def reserved_names(self) -> frozenset[str]:
        """What a template is given by us alone."""
        return _GIVEN_NAMES | self._variables.keys()

    def render(self, messages: list[Message], add_generation_prompt: bool,
               kwargs: Mapping[str, Any] | None = None, tools: list[dict[str, Any]] | None = None) -> str:
        """The prompt as text. `messages` as `check_messages` returns them; kwargs: what else the caller has for the
        template, e.g. enable_thinking; none of `reserved_names`; tools: as OpenAI's API has them. Raises: ValueError.
        """
        if tools and not self.uses("tools"):
            raise ValueError("tools: this model's chat template knows no tools")
        try:
            # Templates ask `tools is not none`: an undefined name would be taken for tools.
            return self._template.render({**(kwargs or {}), **self._variables, "messages": self._with_calls(messages),
                                          "tools": tools or None, "documents": None,
                                          "add_generation_prompt": add_generation_prompt})
        except Exception as error:          # a stranger's program: no error of it may end more than this request
            raise ValueError(f"chat template: {error}") from None


    def _with_calls(self, messages: list[Message]) -> list[Message]:
        """What templates read in messages that have calls: those that ask whether such a message's content is none are
        told so where it is empty, others join it to a text."""
        made = []
        for message in messages:
            if message.get("tool_calls"):
                message = _with_arguments(message)
                if self._asks_for_none and not message["content"]:
                    message["content"] = None
            made.append(message)
        return made


def check_messages(messages: object) -> list[Message]:
    """Messages as OpenAI's API has them, made ready for a template: content is a string.

    A list of text parts becomes the texts one after the other, with nothing between. An assistant's missing content is
    an empty turn. Arguments of its calls become objects, which templates ask for: see `call_arguments`. Keys other than
    these stay as they are.

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
        calls = {"tool_calls": _calls(message["tool_calls"], field)} if message.get("tool_calls") is not None else {}
        checked.append(cast(Message, map_strings({**message, "content": content, **calls}, require_unicode, field)))
    return checked


def _calls(calls: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ValueError(f"{field}.tool_calls: must be a list")
    checked = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError(f"{field}.tool_calls[{index}].function: must be an object with name and arguments")
        try:
            arguments = call_arguments(function.get("arguments"))
        except ValueError as error:
            raise ValueError(f"{field}.tool_calls[{index}].function.arguments: {error}") from None
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def call_arguments(value: object) -> dict[str, Any]:
    """Arguments of a call in the history, as an object: they are one, or its JSON text. None and "" are {}.

    Raises: ValueError for anything else.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("are not JSON") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


class _Arguments(dict[str, Any]):
    """Arguments for templates: some read them as an object, others as its JSON text, and add that to a text."""

    def __str__(self) -> str:
        return _to_json(self)

    def __add__(self, other: object) -> str:
        return str(self) + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + str(self)


def _with_arguments(message: Message) -> Message:
    """With the arguments of its calls as `_Arguments`."""
    return {**message, "tool_calls": [
        {**call, "function": {**call["function"], "arguments": _Arguments(call["function"]["arguments"])}}
        for call in message["tool_calls"]]}


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
