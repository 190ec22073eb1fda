"""Writes what follows from the code: the pages of docs/reference, and the tables of docs/methods/terms.md.

python docs/reference.py        # make reference; tests/test_docs.py fails where a page is not what this writes
"""

import ast
import inspect
import json
import re
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import unmask
from unmask.cli.examples import EXAMPLES
from unmask.cli.main import app
from unmask.config import Config
from unmask.config.json_schema import json_schema
from unmask.config.options import CHOICES, meaning, option_defaults
from unmask.config.published import FILE
from unmask.core.method import Method, Term, uniform_credit
from unmask.core.probes import Probes
from unmask.methods import BASES, PLUGINS
from unmask.sft.config import SftConfig
from unmask.sft.json_schema import pretrain_schema, sft_schema
from unmask.tasks import TASKS

HERE = Path(__file__).parent / "reference"
TERMS = Path(__file__).parent / "methods" / "terms.md"
NOTE = "<!-- written by docs/reference.py: change the code, then `make reference` -->"
WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path"}
DOORS = {
    "unmask.config.parse": ["read_config", "parse_config"],
    "unmask.training.loop": ["train", "resume"],
    "unmask.evaluation.evaluate": ["Evaluator"],
    "unmask.view.page": ["export"],
    "unmask.models.lora": ["add_adapter", "merge", "save_adapter", "load_adapter"],
    "unmask.models.checkpoint": ["save"],
}
"""What is not in `unmask` itself: it touches a disk, a configuration or a whole run."""
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def commands() -> str:
    """reference/cli.md, from the functions behind the typer app."""
    found = {command.name or command.callback.__name__: command.callback for command in app.registered_commands}
    lines = ["# Commands", NOTE, ""]
    lines += ["`unmask COMMAND --help` prints the same. A mistake is one line on standard error and exit code 2.", ""]
    lines += ["| command | what it does |", "|---|---|"]
    lines += [f"| [`{name}`](#unmask-{name}) | {_cell(_paragraphs(function)[0])} |" for name, function in found.items()]
    for name, function in found.items():
        lines += ["", f"## unmask {name}", ""]
        lines += [line for paragraph in _paragraphs(function) for line in (paragraph, "")]
        lines += ["```sh", *EXAMPLES[name], "```", ""]
        lines += ["| argument or option | type | default | what it is |", "|---|---|---|---|", *_parameters(function)]
    return "\n".join(lines) + "\n"


def _paragraphs(function: Callable[..., Any]) -> list[str]:
    return [" ".join(part.split()) for part in inspect.cleandoc(function.__doc__ or "").split("\n\n")]


def _parameters(function: Callable[..., Any]) -> Iterator[str]:
    for parameter in inspect.signature(function).parameters.values():
        kind, info = get_args(parameter.annotation)
        needed = parameter.default is inspect.Parameter.empty
        if isinstance(info, typer.models.ArgumentInfo):
            name = info.metavar or parameter.name.upper()
        else:
            switch = f"--{parameter.name.replace('_', '-')}"
            pair = f"{switch}, --no-{switch[2:]}" if kind is bool else switch
            first = info.default if isinstance(info.default, str) else None  # Annotated[..., typer.Option("--with")]
            name = ", ".join([first, *info.param_decls] if first else [pair])
        least = f" >= {info.min}" if info.min is not None else ""
        told = "" if "bool" in str(kind) else f"{_kind(kind)}{least}"
        default = "needed" if needed else "" if parameter.default is False else _default(parameter.default)
        yield f"| `{_cell(name)}` | {told} | {default} | {_cell(info.help or '')} |"


def keys() -> str:
    """reference/keys.md, from the pydantic models and the signatures of methods, plug-ins and tasks."""
    lines = ["# Configuration keys", NOTE, ""]
    lines += ["How files, overrides and flags come together, and what an error looks like: "]
    lines[-1] += "[configuration](../configuration.md). The defaults are those of a file."
    lines += ["", "## Top level", "", *_table(Config)]
    for name, model in _sections(Config).items():
        lines += ["", f"## {name}", "", *_table(model)]
    lines += ["", "## Options of methods and plug-ins", ""]
    lines += ["A section named after a method, plug-in or task holds its options. Its page says more.", ""]
    lines += [*_options({**BASES, **PLUGINS}, lambda name: f"[`{name}`](../methods/{_method_page(name)})")]
    lines += ["", "## Options of tasks", ""]
    lines += [*_options(TASKS, lambda name: f"`{name}`")]
    lines += ["", "## Fine-tuning", "", "Of [`unmask adapt`](../adapt.md) and [`unmask sft`](../sft.md).", ""]
    lines += [*_table(SftConfig), "", "## Fine-tuning eval", "", *_table(_sections(SftConfig)["eval"])]
    lines += ["", "## Named formulas", "", "Options that name a formula take one of these.", ""]
    lines += ["| option | names |", "|---|---|"]
    lines += [f"| `{name}` | {', '.join(f'`{one}`' for one in choices)} |" for name, choices in CHOICES.items()]
    return "\n".join(lines) + "\n"


def _sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    kinds = {name: field.annotation for name, field in model.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def _table(model: type[BaseModel]) -> Iterator[str]:
    sections, shared = _sections(model), _sections(Config)
    yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    for name, field in model.model_fields.items():
        if field.exclude:
            continue
        place = name if sections.get(name) is shared.get(name) else f"fine-tuning-{name}"
        key = f"[`{name}`](#{place})" if name in sections else f"`{field.alias or name}`"
        meaning = _cell(" ".join((field.description or "").split()))
        if name in sections:
            yield f"| {key} | section | | {meaning} |"
            continue
        default = "needed" if field.is_required() else _default(field.get_default(call_default_factory=True))
        yield f"| {key} | {_cell(_kind(field.annotation, field))} | {default} | {meaning} |"


def _options(catalogue: Mapping[str, Callable[..., Any]], named: Callable[[str], str]) -> Iterator[str]:
    yield from ("| section | option | default | meaning |", "|---|---|---|---|")
    for name, factory in catalogue.items():
        for number, (option, default) in enumerate(option_defaults(factory).items()):
            row = f"| {'' if number else named(name)} | `{option}` | {_default(default)} |"
            yield f"{row} {_cell(meaning(name, option))} |"


def _kind(annotation: Any, field: FieldInfo | None = None) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    rules = field.metadata if field else ()
    given = [(sign, getattr(rule, key, None)) for rule in rules for key, sign in SIGNS.items()]
    bounds = [f"{sign} {bound}" for sign, bound in given if bound is not None and bound < 2**16]
    if origin is Annotated:
        return _kind(inside[0])
    if origin is Literal:
        return ", ".join(f"`{name}`" for name in inside)
    if origin in (Union, types.UnionType):
        parts = [_kind(one) for one in inside if one is not type(None)]
        return " ".join([" or ".join(parts), ", ".join(bounds)]).strip()
    if origin is list:
        return f"{_kind(inside[0])}s"
    if origin is dict and inside[0] is str and get_origin(inside[1]) is Annotated:
        return f"{_kind(inside[1])}s by name"
    if origin is tuple:
        return f"list of {_kind(inside[0])}s" if inside[-1] is Ellipsis else f"{len(inside)} {_kind(inside[0])}s"
    return " ".join([WORDS.get(annotation, "list"), ", ".join(bounds)]).strip()


def _default(value: Any) -> str:
    if value is None or value is ... or str(value).startswith("PydanticUndefined"):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list | tuple):
        return f"`[{', '.join(str(one) for one in value)}]`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`" if value != "" else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def public_names() -> dict[str, str]:
    """The names that `unmask` exports, each with its module: read from the stub."""
    stub = ast.parse(Path(unmask.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module]
    return {name.name: f"unmask.{node.module}" for node in imports for name in node.names}


def interface() -> str:
    """reference/api.md: a directive of mkdocstrings for every public name, by the module it lives in."""
    homes: dict[str, list[str]] = {}
    for name, home in public_names().items():
        module = getattr(getattr(unmask, name), "__module__", home)  # a method's own, not that of its package
        homes.setdefault(module if module.startswith("unmask.") else home, []).append(name)
    lines = ["# Python", NOTE, "", "What `import unmask` offers; used in [the parts alone](../python.md).", ""]
    lines += ["Names end in their shape, one letter a dimension: B traces, L positions of the canvas, V vocabulary, "]
    lines[-1] += "T steps, S masked states, N questions, M units."
    for module, names in {**homes, **DOORS}.items():
        told = inspect.cleandoc(import_module(module).__doc__ or "").split("\n\n")[0]
        lines += ["", f"## {module}", "", " ".join(told.split()).replace("](", "\\]("), ""]
        lines += [f"::: {module}.{name}" for name in names]
    return "\n".join(lines) + "\n"


def _method_page(name: str) -> str:
    return f"{'daca' if name in ('sml', 'dps') else name}.md"


def terms() -> str:
    """methods/terms.md with its two tables written anew, from the methods with their defaults. Plug-ins are applied to
    diffu_grpo; "base" is what they leave as it is."""
    base, text = BASES["diffu_grpo"](), TERMS.read_text()
    term_rows = {name: [("first", _term_cells(build()))] for name, build in BASES.items()}
    method_rows = {name: _method_cells(build()) for name, build in BASES.items()}
    for name, plugin in PLUGINS.items():
        method = plugin(base)
        first = [("first", _changes(_term_cells(method), _term_cells(base)))]
        term_rows[name] = (first if set(first[0][1]) != {"base"} else []) + _further_cells(method)
        added = f"base + {len(method.further)}" if method.further else "base"
        method_rows[name] = [added, *_changes(_method_cells(method), _method_cells(base))[1:]]
    exact = _further_cells(PLUGINS["sml"](base, exact_negative=1.0))
    term_rows["sml"] += [(f"{label}, with `exact_negative`", cells) for label, cells in exact]
    columns = "method | term | probe | advantage | credit | objective | normaliser | weight | KL | old policy"
    lines = [[_link(name), label, *cells] for name, rows in term_rows.items() for label, cells in rows]
    text = _with_table(text, "terms", columns, lines)
    columns = "method | terms | records | tokens that count | equal rewards | completes states | trajectory"
    return _with_table(text, "methods", columns, [[_link(name), *cells] for name, cells in method_rows.items()])


def _term_cells(term: Term) -> list[str]:
    normaliser = _arguments(term.objective).get("normaliser")
    kl = f"{term.kl:g} {_name(_arguments(term.divergence)['kl'])}" if term.kl else "0"
    if term.distillation:
        kl = f"{kl}; {term.distillation:g} to the teacher" if term.kl else f"{term.distillation:g} to the teacher"
    if price := getattr(term, "reward_kl", 0.0):
        kl += f"; {price:g} k1 in the reward"
    return [
        f"`{_estimator(term)}`",
        f"`{_name(term.advantage)}`",
        "one" if term.credit is uniform_credit else f"`{_name(term.credit)}`",
        f"`{_name(term.objective)}`",
        f"`{_name(normaliser)}`" if normaliser else "its own",
        f"{term.weight:g}",
        kl,
        "yes" if term.uses_old_logprobs else "no",
    ]


def _further_cells(method: Method) -> list[tuple[str, list[str]]]:
    return [(f"`{term.label}`", _term_cells(term)) for term in method.further]


def _method_cells(method: Method) -> list[str]:
    records = [f"top {method.record.top}"] * (method.record.top > 0) + ["entropy"] * method.record.entropy
    records += ["confidence"] * method.record.confidence + ["choice"] * method.record.choice
    facts = method.uses_equal_rewards, method.values is not None, method.trajectory
    marks = ["yes" if fact else "no" for fact in facts]
    return [str(len(method.terms)), ", ".join(records) or "none", f"`{_name(method.counted)}`", *marks]


def _changes(cells: list[str], base_cells: list[str]) -> list[str]:
    return ["base" if cell == other else cell for cell, other in zip(cells, base_cells, strict=True)]


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of a formula, or of a partial of one."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}


def _estimator(term: Term) -> str:
    """The name of the function that makes the Probes: the probe itself, or what its lambda calls."""
    if (name := _name(term.probe)) != "<lambda>":
        return name
    variables = inspect.getclosurevars(term.probe)
    called = [*variables.nonlocals.values(), *variables.globals.values()]
    probes = [_name(each) for each in called if callable(each) and inspect.signature(each).return_annotation is Probes]
    return probes[0]


def _link(name: str) -> str:
    return f"[{name}]({_method_page(name)})"


def _with_table(text: str, name: str, columns: str, rows: list[list[str]]) -> str:
    """A page with the table between its two comments replaced."""
    lines = [f"| {columns} |", "|---" * (columns.count("|") + 1) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    pattern, table = rf"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)", "\n".join(lines)
    return re.sub(pattern, lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text, flags=re.DOTALL)


def published_schema() -> str:
    """The JSON schema of the configuration: in the package, which reads it, and on the site, for editors."""
    return json.dumps(json_schema(), indent=1) + "\n"


PAGES = {
    HERE / "cli.md": commands,
    HERE / "keys.md": keys,
    HERE / "api.md": interface,
    HERE / "schema.json": published_schema,
    HERE / "sft_schema.json": lambda: json.dumps(sft_schema(), indent=1) + "\n",
    HERE / "pretrain_schema.json": lambda: json.dumps(pretrain_schema(), indent=1) + "\n",
    FILE: published_schema,
    TERMS: terms,
}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page())
