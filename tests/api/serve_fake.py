"""`tools.serve` over the FakeEngine: python -m tests.api.serve_fake ARGS. The line "release" on its input lets HOLD go.

--model never: it is never ready; --model bad: it cannot be loaded. A prompt with DIE kills the engine.
"""
from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from api.engine import Engine, PromptInput, SamplingParams
from tests.api.fake_engine import FakeEngine
from tools.serve import run


class MortalEngine(FakeEngine):
    def _encode(self, prompt: PromptInput, sampling: SamplingParams) -> tuple[str, tuple[int, ...]]:
        text, ids = super()._encode(prompt, sampling)
        if "DIE" in text:
            self.kill("the device fell off")
        return text, ids


@asynccontextmanager
async def start(model: str, progress: Callable[[str], None], **config: Any) -> AsyncIterator[Engine]:
    if model == "never":
        progress("loading for ever")
        await asyncio.Event().wait()
    if model == "bad":
        raise ValueError("the model is bad,\nand this is a second line")
    progress(f"settings {sorted(config)}")
    engine = MortalEngine()

    def obey() -> None:
        for line in sys.stdin:
            if line == "release\n":
                engine.release()

    threading.Thread(target=obey, daemon=True).start()
    try:
        yield cast("Engine", engine)
    finally:
        engine.kill("stopped")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], start))
