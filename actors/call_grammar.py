"""Tool calls that an answer has to consist of, as a form for it: [{"name": …, "arguments": …}, …].

NOTE: calls are so whatever a model is used to: a list of JSON objects is what all of them have seen most of.
"""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from actors.sampling_params import ParameterError, StructuredOutputs, structured_output


class Callee(NamedTuple):
    """A function that may be called. parameters: a JSON schema of an object; field: that it came by, for errors."""
    name: str
    parameters: Mapping[str, Any]
    field: str


def enforced_calls(callees: Sequence[Callee], field: str, parallel: bool = True) -> StructuredOutputs:
    """The form of an answer that calls one of them, or if parallel one or more. field: that asks for it, for errors.

    Raises: ParameterError for parameters that are no schema of an object, or that are too large together.
    """
    functions = []
    for callee in callees:
        if callee.parameters.get("type", "object") != "object":
            raise ParameterError(f"{callee.field}.type", "must be object")
        schema = {**callee.parameters, "type": "object"}
        structured_output("json", schema, callee.field)
        functions.append([callee.name, schema])
    structured_output("json", {"anyOf": [schema for _, schema in functions]}, field)
    wanted = {"functions": functions, "parallel": parallel}
    return StructuredOutputs("calls", json.dumps(wanted, ensure_ascii=False, separators=(",", ":")), field)


def call_grammar(text: str, json_options: Mapping[str, Any]) -> str:
    """The form as a grammar in llguidance's Lark. json_options: for the parameters' schemas, as its compiler has
    them."""
    wanted = json.loads(text)
    several = "(/,[ \\n]?/ call)*" if wanted["parallel"] else ""
    rules = [f'start: "[" call {several} "]"']
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(wanted["functions"]))))
    for number, (name, schema) in enumerate(wanted["functions"]):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        rules.append(f'call_{number}: {head} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {json.dumps({**schema, 'x-guidance': dict(json_options)})}")
    return "\n".join(rules)
