"""`troupe NAME ARGS` is `python -m tools.NAME ARGS`; without a name it lists the tools."""
from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path


def tools() -> dict[str, str]:
    """Name → first line of its docstring, of the modules here that can be run."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        source = path.read_text(encoding="utf-8")
        if '\nif __name__ == "__main__":' in source:
            found[path.stem] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in tools():
        sys.argv = [f"troupe {name}", *sys.argv[2:]]
        runpy.run_module(f"tools.{name}", run_name="__main__", alter_sys=False)
        return 0
    asked_for_help = name in ("", "-h", "--help")
    lines = ["usage: troupe TOOL [ARGS]   (troupe TOOL --help says more)", ""]
    lines += [f"  {tool:<12} {text}" for tool, text in tools().items()]
    if not asked_for_help:
        lines.insert(0, f"troupe: there is no tool {name[:80]!r}")
    print("\n".join(lines), file=sys.stdout if asked_for_help else sys.stderr)
    return 0 if asked_for_help else 2


if __name__ == "__main__":
    sys.exit(main())
