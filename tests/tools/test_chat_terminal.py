"""tools.chat in a pseudo-terminal, over the scripted engine."""
from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("there are no pseudo-terminals", allow_module_level=True)

from tests.tools.terminal import Terminal

ROOT = Path(__file__).parents[2]


def start(tmp_path: Path, *argv: str, columns: int = 200, lines: int = 24) -> Terminal:
    return Terminal(["-m", "tests.tools.scripted_engine", *argv], columns=columns, lines=lines, env={
        "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path), "LC_ALL": "C.UTF-8",
        "SCRIPTED_ENGINE_REPORT": str(tmp_path / "report.json")})


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with start(tmp_path) as terminal:
        terminal.wait_for("/help lists the commands", "\n>")
        yield terminal


def leave(terminal: Terminal) -> None:
    terminal.type("\x04")
    assert terminal.wait_for_exit() == 0


def test_a_conversation(terminal: Terminal) -> None:
    terminal.type("hi there\r")
    terminal.wait_for("you said: hi there", "(TTFT ", " 4 tokens, ", " tokens/s)")
    terminal.type("/help\r")
    terminal.wait_for("/system TEXT", "/reset", "/stats", "/exit")
    terminal.type("/system be brief\r")
    terminal.wait_for("(the system prompt is set)")
    terminal.type("/stats\r")
    terminal.wait_for("(model fake, 1 answers, 4 tokens generated)", "(the conversation takes 14 tokens of the ")
    terminal.type("/exit\r")
    assert terminal.wait_for_exit() == 0


def test_markdown_is_rendered(terminal: Terminal) -> None:
    terminal.type("markdown\r")
    lines = terminal.wait_for("tokens/s")
    assert "Some bold text." in lines
    assert " • one" in lines
    assert not any("**" in line or "```" in line for line in lines)
    leave(terminal)


def test_raw_shows_the_text_as_it_is(tmp_path: Path) -> None:
    with start(tmp_path, "--raw") as terminal:
        terminal.type("markdown\r")
        lines = terminal.wait_for("tokens/s")
        assert "Some **bold** text." in lines
        leave(terminal)


def test_an_answer_longer_than_the_screen_is_there_once(tmp_path: Path) -> None:
    with start(tmp_path, columns=40, lines=8) as terminal:
        terminal.type("lines 50\r")
        lines = terminal.wait_for("tokens/s")
        assert [line for line in lines if line.startswith("line ")] == [f"line {number}" for number in range(50)]
        leave(terminal)


def test_ctrl_c_stops_the_answer_and_keeps_what_came(terminal: Terminal, tmp_path: Path) -> None:
    terminal.type("hang partial\r")
    terminal.wait_for("\npartial")
    terminal.type("\x03")
    terminal.wait_for("(stopped; what came so far stays in the conversation)", "7 tokens")
    terminal.type("messages\r")
    terminal.wait_for('"role": "assistant", "content": "partial"')
    leave(terminal)
    assert json.loads((tmp_path / "report.json").read_text()) == {
        "num_left": 1, "questions": ["hang partial", "messages"]}


def test_ctrl_c_before_the_first_token_forgets_the_question(terminal: Terminal) -> None:
    terminal.type("silent\r")
    terminal.wait_for("[silent]")
    terminal.type("\x03")
    terminal.wait_for("(stopped before the answer began; the question is not kept)")
    terminal.type("messages\r")
    terminal.wait_for('[{"role": "user", "content": "messages"}]')
    leave(terminal)


def test_ctrl_c_at_the_prompt_clears_the_line_and_says_how_to_leave(terminal: Terminal) -> None:
    terminal.type("not this")
    terminal.wait_for("> not this")
    terminal.type("\x03but that\r")
    terminal.wait_for("you said: but that", "tokens/s)\n\n>")
    terminal.type("\x03")
    terminal.wait_for("(Ctrl-D or /exit leaves)")
    leave(terminal)


def test_what_is_typed_during_an_answer_waits_for_the_prompt(terminal: Terminal) -> None:
    terminal.type("hang x\r")
    terminal.wait_for("\nx")
    terminal.type("typed ahead")
    terminal.type("\x03")
    lines = terminal.wait_for("(stopped;", "> typed ahead")
    assert sum("typed ahead" in line for line in lines) == 1
    terminal.type("\r")
    terminal.wait_for("you said: typed ahead")
    leave(terminal)


def test_pasted_lines_are_one_turn(terminal: Terminal) -> None:
    terminal.paste("messages\r\nsecond\r\n\tthird")
    terminal.wait_for("third")
    terminal.type("\r")
    terminal.wait_for("you said:")
    terminal.type("messages\r")
    terminal.wait_for(r'"content": "messages\nsecond\n\tthird"')
    leave(terminal)


def test_alt_enter_begins_a_new_line(terminal: Terminal) -> None:
    terminal.type("a\x1b\rb\r")
    terminal.wait_for("you said: a")
    terminal.type("messages\r")
    terminal.wait_for(r'"content": "a\nb"')
    leave(terminal)


@pytest.mark.parametrize(("typed", "submitted", "width"), [
    ("日本語", "日本語", 6),
    ("cafe\u0301", "cafe\u0301", 4),
    ("日本x\x7f\x7f語", "日語", 4),                        # a wide character is deleted whole
    ("e\u0301\x7fa", "a", 1),                             # a letter with its mark
    ("👨\u200d👩\u200d👧\x7fb", "b", 1),                   # a family
    ("a👍🏽\x7fb", "ab", 2),
    ("👩\u200d🚀 🇩🇪", "👩\u200d🚀 🇩🇪", None),            # how wide these are differs between terminals
    ("日本\x1b[D\x7f中\x1b[F文", "中本文", 6),             # to the left, over a wide character, and to the end
])
def test_what_is_sent_is_what_was_typed(typed: str, submitted: str, width: int | None, terminal: Terminal,
                                        tmp_path: Path) -> None:
    terminal.type("<" + typed)
    if width is not None:
        terminal.wait_for_cursor(2, len("> <") + width)
    terminal.type(">\r")
    terminal.wait_for("tokens/s")
    leave(terminal)
    assert json.loads((tmp_path / "report.json").read_text())["questions"] == [f"<{submitted}>"]


def test_the_history_is_there_the_next_time(tmp_path: Path) -> None:
    for question in ("first\r", "\x1b[A\r"):
        with start(tmp_path) as terminal:
            terminal.wait_for("\n>")
            terminal.type(question)
            terminal.wait_for("you said: first")
            leave(terminal)


def test_a_failed_answer_leaves_the_prompt(terminal: Terminal) -> None:
    terminal.type("fail\r")
    terminal.wait_for("(the logits are not finite)")
    terminal.type("fill\r")
    terminal.wait_for("(the answer was cut off: the model's context of 1000 tokens is full; /reset makes room)")
    terminal.type("full\r")
    terminal.wait_for("(the question is not kept; /reset forgets the conversation and makes room)")
    terminal.type("dead\r")
    terminal.wait_for("(the device is gone)")
    assert terminal.wait_for_exit() == 1


def test_bytes_that_are_no_text(terminal: Terminal) -> None:
    terminal.child.send(b"messages a\xffb\r")
    terminal.wait_for('"messages a\ufffdb"')
    leave(terminal)


def test_an_ascii_locale(tmp_path: Path) -> None:
    with Terminal(["-m", "tests.tools.scripted_engine"], env={
            "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0",
            "PYTHONUTF8": "0"}) as terminal:
        terminal.wait_for("\n>")
        terminal.type("日本\r")
        terminal.wait_for("you said: ??")
        terminal.type("markdown\r")
        terminal.wait_for("Some bold text.")
        leave(terminal)


def test_one_question_shows_its_figures_on_a_terminal(tmp_path: Path) -> None:
    with start(tmp_path, "markdown") as terminal:
        assert terminal.wait_for_exit() == 0
        assert "Some **bold** text." in terminal.lines()
        assert "tokens/s)" in terminal.text()
