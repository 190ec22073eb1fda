"""Prepares tests, which are text, for the judge: the names they take from the program, and guards around assertions."""

import ast
import builtins
import warnings
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock

WARNING = Lock()  # warning filters are global to all threads


@lru_cache(maxsize=4096)
def with_guards(test: str) -> str:
    """The test with a guard around every assertion: the judge keeps arguments unchanged until then."""
    try:
        return ast.unparse(ast.fix_missing_locations(_Guarding().visit(parse(test))))
    except RecursionError:  # Python parses code that it cannot visit
        raise too_deep(test) from None


def too_deep(test: str) -> ValueError:
    return ValueError(f"a test is nested too deeply: {test[:100]!r}")


class _Guarding(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        hold = ast.withitem(ast.Name("__held__", ast.Load()))
        return ast.With(items=[hold], body=[node])


def parse(test: str) -> ast.Module:
    """The syntax tree, without warnings, for example about "\\w"."""
    try:
        with WARNING, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"a test is not Python: {error}: {test[:100]!r}") from None


@lru_cache(maxsize=4096)
def names_in(*texts: str) -> tuple[str, ...]:
    """All names in some texts, in order of appearance."""
    nodes = [node for text in texts for node in ast.walk(parse(text))]
    return tuple(dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name)))


@lru_cache(maxsize=4096)
def free_names(setup: str, tests: Sequence[str]) -> tuple[str, ...]:
    """The names that only the program can define: read by tests, not bound by them, and not built in."""
    nodes = [node for text in (setup, *tests) for node in ast.walk(parse(text))]
    bound = set(dir(builtins))
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
    return tuple(name for name in names_in(setup, *tests) if name not in bound)
