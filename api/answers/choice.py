"""Which formats a server reads answers in, and the parser of one answer."""
from __future__ import annotations

from dataclasses import dataclass

from actors.policy.thought_reader import is_open
from api.answers.formats import (
    AUTO,
    ReasoningFormat,
    ToolFormat,
    reasoning_format,
    tool_format,
)
from api.answers.parser import AnswerParser, ReasoningParser
from api.answers.tool_calls import ToolCallParser, Tools
from api.surface import EngineInfo

SINGLE_CALLS = "only supports single tool-calls"    # what templates of Llama 3 say when they refuse several


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """None: such parts of an answer stay content."""
    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    control_tokens: frozenset[str] = frozenset()
    parallel: bool = True                       # templates of some models refuse a turn with several calls

    def shows_control_tokens(self, with_tools: bool) -> bool:
        """Whether control tokens are among the marks: then they must be in the text."""
        marks: set[str] = set()
        if self.reasoning is not None:
            marks |= {self.reasoning.begin, self.reasoning.end}
        if with_tools and self.tools is not None:
            marks |= {*self.tools.begin, *self.tools.opening, *self.tools.between, *self.tools.after, self.tools.quote}
        return not marks.isdisjoint(self.control_tokens)

    def parser(self, prompt_end: str, tools: Tools | None = None, form: ToolFormat | None = None) -> AnswerParser:
        """prompt_end: the end of the prompt's text. tools: that may be called; form: how, if not as the model does."""
        form = form or self.tools
        return AnswerParser(
            None if self.reasoning is None else ReasoningParser(
                self.reasoning, is_open(self.reasoning.begin, prompt_end)),
            None if tools is None or form is None else ToolCallParser(form, tools))


def answer_formats(info: EngineInfo, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> AnswerFormats:
    """tool_parser, reasoning_parser: names of formats, AUTO (by the model's chat template), or NONE."""
    return AnswerFormats(tool_format(tool_parser, info.chat_template),
                         reasoning_format(reasoning_parser, info.chat_template), info.control_tokens,
                         SINGLE_CALLS not in (info.chat_template or ""))
