"""How models write tool calls and thoughts: one declaration a format, and which of them a chat template asks for."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AUTO, NONE = "auto", "none"                     # beside the names of formats

NAME = r"(?P<name>[A-Za-z0-9_.-]+)"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written: begin, opening, call, between, call, …, after; white space may stand anywhere between.

    begin: what begins calls anywhere in an answer. bare: characters that begin them without it, at an answer's start.
    body: "json": {"name": …, "arguments": {…}}; "named": a header, then the object of the arguments;
    "python": name(key=value); "mapping": call:name{key:value}.
    """
    name: str
    body: Literal["json", "named", "python", "mapping"]
    begin: tuple[str, ...] = ()
    bare: str = ""
    opening: tuple[str, ...] = ()
    needs_opening: bool = False
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()                 # what may stand behind a call and means nothing more
    header: str = NAME                          # of "named": a pattern
    quote: str = ""                             # of "mapping": what stands round texts
    signs: tuple[str, ...] = ()                 # one of them is in the chat templates of such models
    unlike: tuple[str, ...] = ()                # none of these is
    short_ids: bool = False                     # templates of such models refuse others than nine letters and digits


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """What stands round the thoughts that an answer begins with."""
    name: str
    begin: str
    end: str


# The first that fits a template is taken.
TOOL_FORMATS = (
    # Source: NousResearch, "Hermes Function Calling"; Qwen 2.5 and 3; SmolLM2 writes lists.
    ToolFormat("hermes", "json", begin=("<tool_call>",), opening=("[",), between=(",",), after=("]", "</tool_call>"),
               signs=("<tool_call>",), unlike=("<function=", "<arg_key>")),
    # Source: Microsoft, Phi-4-mini; IBM, Granite 3 (without the mark at the end).
    ToolFormat("phi4", "json", begin=("<|tool_call|>",), opening=("[",), between=(",",), after=("]", "<|/tool_call|>"),
               signs=("<|tool_call|>",)),
    # Source: Mistral's "Tool calling": a list in older models, name[ARGS]{…} in newer ones.
    ToolFormat("mistral", "named", begin=("[TOOL_CALLS]",), opening=("[",), between=(",",), after=("]",),
               header=NAME + r"\s*(\[CALL_ID\]\w+)?\s*(\[ARGS\])?\s*", signs=("[TOOL_CALLS]",), short_ids=True),
    # Source: DeepSeek-V3 and R1, function<sep>name and a fenced object; V3.1: name<sep> and the object.
    ToolFormat("deepseek", "named", begin=("<｜tool▁calls▁begin｜>",), opening=("<｜tool▁call▁begin｜>",),
               needs_opening=True, between=("<｜tool▁call▁begin｜>",),
               after=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
               header=rf"(function\s*<｜tool▁sep｜>\s*)?{NAME}\s*(<｜tool▁sep｜>)?\s*(```json)?\s*",
               signs=("<｜tool▁calls▁begin｜>",)),
    # Source: Google, "FunctionGemma formatting"; Gemma 4 has other marks.
    ToolFormat("gemma", "mapping", begin=("<start_function_call>",), after=("<end_function_call>",),
               quote="<escape>", signs=("<start_function_call>",)),
    ToolFormat("gemma4", "mapping", begin=("<|tool_call>",), after=("<tool_call|>",), quote='<|"|>',
               signs=("<|tool_call>",)),
    # Source: Google, "Function calling with Gemma": no template of Gemma 3 itself asks for it.
    ToolFormat("gemma3", "python", begin=("```tool_code", "```tool_call"), opening=("[",), between=(",",),
               after=("]", "```"), signs=("```tool_code", "```tool_call")),
    # Source: Meta, "Llama 3.2 prompt format": [name(key=value), …].
    ToolFormat("pythonic", "python", begin=("<|python_tag|>",), bare="[", opening=("[",), needs_opening=True,
               between=(",",), after=("]",), signs=("func_name1(", "function_name(", "params_name1=")),
    # Source: Meta, "Llama 3.1 prompt format".
    ToolFormat("llama3_json", "json", begin=("<|python_tag|>",), bare="{", between=(";",),
               signs=("<|python_tag|>", "<|start_header_id|>", "<|header_start|>")),
    ToolFormat("json", "json", bare="{[`", opening=("[", "```json", "```"), between=(",",), after=("]", "```"),
               signs=('"arguments', '"parameters'), unlike=("<function=", "<arg_key>")),
)

REASONING_FORMATS = (
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
    ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
    # Source: DeepSeek-R1, QwQ, Qwen 3 and many after them.
    ReasoningFormat("think", "<think>", "</think>"),
)

TOOL_PARSERS = {form.name: form for form in TOOL_FORMATS}
REASONING_PARSERS = {form.name: form for form in REASONING_FORMATS}


def tool_format(chosen: str, template: str | None) -> ToolFormat | None:
    """chosen: a name, AUTO or NONE. template: the model's, of which AUTO looks for signs. None: no calls are parsed."""
    if chosen == NONE:
        return None
    if chosen != AUTO:
        return TOOL_PARSERS[chosen]
    return next((form for form in TOOL_FORMATS if template is not None and _shows(template, form)), None)


def _shows(template: str, form: ToolFormat) -> bool:
    return any(sign in template for sign in form.signs) and not any(sign in template for sign in form.unlike)


def reasoning_format(chosen: str, template: str | None) -> ReasoningFormat | None:
    """The same for thoughts."""
    if chosen == NONE:
        return None
    if chosen != AUTO:
        return REASONING_PARSERS[chosen]
    return next((form for form in REASONING_FORMATS if template is not None
                 and (form.begin in template or form.end in template)), None)
