"""The server's flags that say how answers are read."""
from __future__ import annotations

import subprocess
import sys

import pytest

from api.answers.formats import REASONING_PARSERS, TOOL_PARSERS
from tools.serve_args import door_config, serve_parser


def test_parsers_are_chosen_by_the_template_unless_named() -> None:
    config = door_config(serve_parser("").parse_args([]))
    assert (config.tool_call_parser, config.reasoning_parser) == ("auto", "auto")
    config = door_config(serve_parser("").parse_args(["--tool-call-parser", "hermes", "--reasoning-parser", "none"]))
    assert (config.tool_call_parser, config.reasoning_parser) == ("hermes", "none")


def test_help_names_every_format() -> None:
    text = " ".join(serve_parser("").format_help().split())
    for name in (*TOOL_PARSERS, *REASONING_PARSERS):
        assert name in text


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_unknown_parsers_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        serve_parser("").parse_args([flag, "nobody"])
    assert ended.value.code == 2
    assert "'nobody'" in capsys.readouterr().err


def test_flags_are_read_without_what_computes_a_model() -> None:
    """A port that is in use is told of at once."""
    code = ("import sys; from tools.serve_args import serve_parser; serve_parser('').parse_args([]); "
            "print(sorted({'numpy', 'pydantic', 'starlette', 'tokenizers', 'numba'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
