from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """Tools set these for their whole process, which here is the test run's."""
    level, interval_s = logging.getLogger("troupe").level, sys.getswitchinterval()
    yield
    logging.getLogger("troupe").setLevel(level)
    sys.setswitchinterval(interval_s)
