"""What the README says can be done and found."""
from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def command(heading: str) -> str:
    """The code under a heading, which CI runs as it stands."""
    return README.split(f"### {heading}\n")[1].split("```\n")[1].strip()


def test_the_two_commands_are_one_line_each_and_complete() -> None:
    for heading, ends in (("Talk to it", 'python -m tools.chat "What is the capital of France?"'),
                          ("Run the tests", "python -m pytest -q")):
        line = command(heading)
        assert "\n" not in line
        assert line.startswith("python -m pip install")
        assert line.endswith(ends)


def test_the_tree_has_a_line_for_every_module() -> None:
    listed: set[str] = set()
    folder = ""
    for line in README.split("## Where things are\n")[1].split("```")[1].strip().splitlines():
        name, text = line.split(maxsplit=1)
        if not line.startswith(" "):
            folder = name
        elif name.endswith("/"):
            listed.update(path.relative_to(ROOT).as_posix() for path in (ROOT / folder / name).glob("[a-z]*.py"))
        else:
            listed.add(folder + name)
        extra = re.search(r"\(([a-z_, ]+)\)$", text)
        for module in extra[1].split(", ") if extra else ():
            listed.add(f"{folder}{module}.py")
    modules = {path.relative_to(ROOT).as_posix() for package in ("weights", "cuda", "actors", "api", "tools")
               for path in (ROOT / package).rglob("*.py") if path.name not in ("__init__.py", "__main__.py")}
    assert listed == modules


def test_the_program_in_the_readme_is_python() -> None:
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        compile(block, "README.md", "exec")
