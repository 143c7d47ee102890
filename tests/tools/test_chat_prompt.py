from __future__ import annotations

from pathlib import Path

import pytest
from prompt_toolkit.history import InMemoryHistory

from tools.chat_prompt import last_character_length, open_history


@pytest.mark.parametrize(("text", "length"), [
    ("", 0),
    ("ab", 1),
    ("日本", 1),
    ("e\u0301", 2),                             # a letter and its accent
    ("xa\u0308\u0332", 3),
    ("\u0301", 1),                              # a mark without a letter
    ("x👍", 1),
    ("x👍🏽", 2),                                # with a skin tone
    ("x❤\ufe0f", 2),                            # with a variation selector
    ("x👨\u200d👩\u200d👧", 5),                  # a family
    ("x👨\u200d", 2),
    ("x🇩🇪", 2),                                # a flag
    ("x🇩🇪🇫", 1),                               # a flag and the first half of one
    ("x🇩🇪🇫🇷", 2),
    ("x🏴\U000e0067\U000e0062\U000e007f", 4),
    ("x1\ufe0f\u20e3", 3),                      # a keycap
])
def test_one_backspace_takes_one_character(text: str, length: int) -> None:
    assert last_character_length(text) == length


def test_the_history_is_kept_for_its_user_only_and_survives_lone_surrogates(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history, notice = open_history()
    assert notice == ""
    history.append_string("one\ntwo \udcff")
    file, = (tmp_path / "troupe").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    again, _ = open_history()
    assert list(again.load_history_strings()) == ["one\ntwo \ufffd"]


def test_a_history_that_cannot_be_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "troupe").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history, notice = open_history()
    assert isinstance(history, InMemoryHistory)
    assert "the history is not kept" in notice
