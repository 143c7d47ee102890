"""The line editor of the chat: history, pasted and typed lines of their own, Ctrl-C, whole characters."""
from __future__ import annotations

import os
import re
import sys
import unicodedata
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.filters import is_searching
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from tools.chat_screen import clean

ZERO_WIDTH_JOINER = "\u200d"
TRAILING_REGIONAL_INDICATORS = re.compile(r"[\U0001F1E6-\U0001F1FF]+\Z")


def history_path() -> Path:
    """Where the user's state lives on this system."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base / "troupe" / "chat_history"


class _CleanFileHistory(FileHistory):
    def store_string(self, string: str) -> None:
        super().store_string(clean(string))


def open_history() -> tuple[History, str]:
    """The history, and a line for the user where it cannot be kept."""
    try:
        path = history_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        path.chmod(0o600)                   # what one asks a model is one's own business
    except (OSError, RuntimeError) as error:        # RuntimeError: this user has no home
        return InMemoryHistory(), f"the history is not kept: {error}"
    return _CleanFileHistory(str(path)), ""


def make_prompt(history: History) -> PromptSession[str]:
    bindings = KeyBindings()

    @bindings.add("c-c", filter=~is_searching)
    def _clear_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("backspace")
    def _delete_character(event: KeyPressEvent) -> None:
        before = event.current_buffer.document.text_before_cursor
        event.current_buffer.delete_before_cursor(last_character_length(before))

    return PromptSession(history=history, key_bindings=bindings, prompt_continuation="  ")


def last_character_length(text: str) -> int:
    """Code points in the last character that a reader sees: a letter with its marks, an emoji with its parts, a flag.

    Deleting them one by one would leave marks and joiners behind that are not to be seen but would be sent.
    Source: Unicode Standard Annex 29, "Grapheme cluster boundaries", without Hangul jamo and Indic conjuncts.
    """
    start = len(text) - 1
    while start > 0 and (_extends(text[start]) or text[start - 1] == ZERO_WIDTH_JOINER):
        start -= 1
    regional = TRAILING_REGIONAL_INDICATORS.search(text, 0, start + 1)
    if regional and len(regional[0]) % 2 == 0:      # they make flags in pairs, counted from the first of a run
        start -= 1
    return len(text) - max(start, 0)


def _extends(char: str) -> bool:
    """Whether it is drawn onto the character before it."""
    return (unicodedata.category(char) in ("Mn", "Me", "Mc") or char == ZERO_WIDTH_JOINER
            or 0x1F3FB <= ord(char) <= 0x1F3FF       # skin tones
            or 0xE0020 <= ord(char) <= 0xE007F)      # tags of flags of regions
