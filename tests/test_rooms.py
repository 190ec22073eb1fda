"""The direction of imports between the rooms of unmask/ (docs/architecture.md), imports inside functions included."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "unmask"
LEVELS = (
    {"util"}, {"core"}, {"distributed"}, {"models"}, {"rollout"}, {"methods"}, {"sandbox"}, {"tasks"}, {"config"},
    {"evaluation"}, {"training"}, {"sft", "studies", "integrations"}, {"view"}, {"cli"},
)  # fmt: skip
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


def imported_rooms(source: str) -> set[str]:
    """The rooms that a module imports from, wherever in it the import stands."""
    names = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("unmask.")} & LEVEL.keys()


def upward_imports(room: str, source: str) -> set[str]:
    """The rooms among the imports of a module in `room` that are neither the room itself nor below it."""
    return {other for other in imported_rooms(source) if other != room and LEVEL[other] >= LEVEL[room]}


def test_imports_point_down() -> None:
    upward = {
        str(path.relative_to(ROOT)): found
        for path in sorted(ROOT.glob("*/**/*.py"))
        if (found := upward_imports(path.relative_to(ROOT).parts[0], path.read_text()))
    }
    assert not upward


def test_an_upward_import_inside_a_function_is_seen() -> None:
    assert upward_imports("core", "def f():\n    from unmask.training.loop import train\n") == {"training"}
    assert upward_imports("sft", "from unmask import studies\n") == {"studies"}
    assert not upward_imports("cli", "import unmask.core.trace\nfrom unmask.cli import display\n")


def test_the_package_has_rooms_only_and_each_says_what_it_is_for() -> None:
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert rooms == LEVEL.keys() and len(rooms) <= 16
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}
    for init in ROOT.rglob("*/__init__.py"):
        assert len(ast.get_docstring(ast.parse(init.read_text())) or "") > 80, init
