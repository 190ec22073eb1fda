"""The direction of imports between the rooms of unmask/ (docs/architecture.md), imports inside functions included."""

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from unmask.methods import BASES, PLUGINS

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


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def parameters(function: ast.FunctionDef) -> list[str]:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def test_no_function_has_more_than_seven_parameters() -> None:
    """But for commands and configuration, and for the options of a method, a plug-in or a task."""
    constructors = {*BASES, *PLUGINS, "token_clip"}  # the last: five of an Objective and its three options
    long = {
        f"{path.relative_to(ROOT)}:{function.name}": names
        for path in sorted(ROOT.glob("*/**/*.py"))
        if path.relative_to(ROOT).parts[0] not in ("cli", "config")
        for function in functions(path)
        if len(names := parameters(function)) > 7 and function.name not in constructors
        if not (path.is_relative_to(ROOT / "tasks") and function.name in ("__init__", "task"))
    }
    assert not long


def test_no_class_name_is_used_twice() -> None:
    names = [
        node.name
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert not {name for name, count in Counter(names).items() if count > 1}


def test_no_call_unpacks_a_tuple_that_was_packed_for_it() -> None:
    packed = {
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted(ROOT.glob("*/**/*.py"))
        if path.relative_to(ROOT).parts[0] not in ("cli", "config")
        for function in functions(path)
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        for argument in call.args
        if isinstance(argument, ast.Starred) and unpacks_positional_arguments(argument.value, function)
    }
    assert not packed


def unpacks_positional_arguments(value: ast.expr, function: ast.FunctionDef) -> bool:
    """A tuple that the function wrote out, or what another function of ours returns; not zip, map and their kind."""
    if isinstance(value, ast.Name):
        return value.id in tuples_of(function)
    called = value.func if isinstance(value, ast.Call) else None
    if isinstance(called, ast.Attribute):
        return isinstance(called.value, ast.Name) and called.value.id == "self"
    return isinstance(called, ast.Name) and called.id not in dir(builtins)


def tuples_of(function: ast.FunctionDef) -> set[str]:
    """The names that a function binds to a tuple that is written out."""
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    return {
        target.id
        for node in assigned
        if isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def test_the_page_of_the_architecture_names_what_there_is() -> None:
    """Every file of docs/architecture.md exists, and a function or class named beside a file is in it."""
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    files = re.findall(r"`((?:unmask|tests|benchmarks)/[\w/]+\.py)`", text)
    assert len(set(files)) > 12 and all((ROOT.parent / name).is_file() for name in files)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`unmask/" in line]
    for row in rows:
        source = (ROOT.parent / re.findall(r"`(unmask/[\w/]+\.py)`", row)[0]).read_text()
        names = [name for name in re.findall(r"`(\w+)`", row)]
        assert names and all(re.search(rf"^(def|class) {name}\b", source, re.MULTILINE) for name in names), row
    stages = text.partition("## One update")[2].partition("##")[0]
    assert len(set(re.findall(r"^\|.*?`(unmask/[\w/]+\.py)`", stages, re.MULTILINE))) == 7
    assert {room for room in re.findall(r"^\| `(\w+)/`", text, re.MULTILINE)} == LEVEL.keys()
