"""Every check of the source: `python -m tools.check` runs ruff, mypy and the tests; `--fast` leaves the tests out."""
from __future__ import annotations

import argparse
import subprocess
import sys

CHECKS = [
    ["ruff", "check", "."],
    ["mypy"],
]
TESTS = ["pytest", "-q"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.check", description="ruff, mypy (strict) and the tests")
    parser.add_argument("--fast", action="store_true", help="leave the tests out")
    parser.add_argument("--slow", action="store_true", help="the long suites too")
    args = parser.parse_args()
    commands = list(CHECKS)
    if not args.fast:
        commands.append([*TESTS, "-m", ""] if args.slow else TESTS)
    failed = []
    for command in commands:
        print("+", " ".join(command), flush=True)
        if subprocess.run([sys.executable, "-m", *command]).returncode != 0:
            failed.append(command[0])
    if failed:
        print("failed:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
