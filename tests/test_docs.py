"""The documentation runs, links to what exists, names every option, has one shape, and is what the code says."""

import importlib.util
import json
import pkgutil
import re
import runpy
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from unmask.config import Config
from unmask.config.options import option_defaults
from unmask.methods import BASES, PLUGINS, diffu_grpo
from unmask.sft.config import SftConfig
from unmask.tasks import TASKS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "LOG.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
METHODS = [*BASES, "daca", "surprise", "dispo", "positive", "keep_correct"]
SECTIONS = [
    "Equation", "Intuition", "Knobs", "Metrics to watch", "Exact when", "Reduces to", "Departures from the paper",
    "Combining", "Cost", "Results", "Use",
]  # fmt: skip


def prose(page: Path, code: bool = False) -> str:
    """A page without its blocks of code and comments, and without what is between backticks unless that is wanted."""
    spans = "" if code else r"|`[^`\n]*`"
    return re.sub(rf"^ *```.*?^ *```|<!--.*?-->{spans}", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown makes them: letters and digits, hyphens for blanks."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.strip()).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_python_block_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    exec(compile(source, str(page), "exec"), {"__name__": "__docs__"})


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_figures_lead_somewhere_and_nothing_is_left_to_fill_in(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", prose(page)):
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}#{anchor}"
    assert not re.search(r"TODO|FIXME|[A-Z]+_(TABLE|RESULTS)", page.read_text())


def test_a_list_begins_after_a_blank_line() -> None:
    """Without it MkDocs draws the list as part of the paragraph."""
    item = re.compile(r"([-*]|\d+\.) ")
    for page in DOCS.rglob("*.md"):
        for above, line in pairwise(prose(page, code=True).splitlines()):
            inside = item.match(above) or above.startswith((" ", "#"))
            assert not item.match(line) or not above.strip() or inside, f"{page.name}: {line}"


@pytest.mark.parametrize("name", METHODS)
def test_a_method_page_names_every_option_with_its_default(name: str) -> None:
    text = (DOCS / "methods" / f"{name}.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    for option, default in option_defaults({**BASES, **PLUGINS}[name]).items():
        cells = [row[2].replace("`", " ").replace(",", " ").split() for row in rows if f"`{option}`" in row[1]]
        words = {word for cell in cells for word in cell}
        numbers = {float(word) for word in words if re.fullmatch(r"[\d.e-]+", word)}
        named = isinstance(default, str | bool)
        assert str(default).lower() in words if named else default in numbers, f"{name}.{option}: {default} in {words}"


@pytest.mark.parametrize("name", METHODS)
def test_method_pages_have_one_shape(name: str) -> None:
    text = (DOCS / "methods" / f"{name}.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    sections = dict(zip(SECTIONS, re.split(r"^## .*$", text, flags=re.MULTILINE)[1:], strict=True))
    assert "```math" in sections["Equation"]
    assert "../results.md" in sections["Results"]
    assert f"unmask/methods/{name}.py" in text


def test_every_metric_that_a_page_names_is_documented() -> None:
    """Names such as train/kl: what to look at must be something a run writes."""
    told = "".join((DOCS / name).read_text() for name in ("metrics.md", "sft.md"))  # of training, of fine-tuning
    known = set(re.findall(r"`((?:train|eval|cost|memory|time|warn)/[\w@]+)`", told))
    known |= {"eval/pass@4", "eval/solved_sampled_high", "train/reward/NAME", "warn/NAME"}
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for name in re.findall(r"`((?:train|eval|cost|memory|time|warn)/[\w@]+)`", page.read_text()):
            assert name in known, f"{page.name} names {name}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ("LOG.md", "CHANGELOG.md")], ids=lambda page: page.name
)
def test_every_name_and_file_of_ours_that_a_page_names_exists(page: Path) -> None:
    """Names such as unmask.core.probes.views, unmask/core/probes.py and tests/test_docs.py."""
    text = page.read_text()
    for name in re.findall(r"(?<![\w./-])unmask(?:\.[A-Za-z_]\w*)+(?![\w-])", text):
        if not name.startswith(("unmask.integrations.trl", "unmask.integrations.lm_eval")):  # which need extras
            pkgutil.resolve_name(name)
    for file in re.findall(r"\bunmask/[\w/]+\.\w+", text):
        assert (ROOT / file).is_file(), f"{page.name} names {file}"
    for file in re.findall(r"\btest_\w+\.py", text):
        assert (ROOT / "tests" / file).is_file(), f"{page.name} names {file}"


def test_every_task_has_a_place() -> None:
    told = "".join((DOCS / f"{page}.md").read_text() for page in ("tasks", "benchmarks", "sandbox"))
    for name in {*TASKS} - {"reasoning_gym", "own"}:  # which have pages of their own
        assert re.search(rf"`{name}`|^#+ .*\b{name}\b", told, re.MULTILINE), name


def settings() -> set[str]:
    """Every key there is, with and without its section."""
    found = set()
    for model in (Config, SftConfig):
        for name, field in model.model_fields.items():
            found |= {field.alias or name, *(f"{name}.{key}" for key in getattr(field.annotation, "model_fields", ()))}
    for name, factory in {**BASES, **PLUGINS, **TASKS}.items():
        found |= {f"{name}.{option}" for option in option_defaults(factory)}
    return found | {key.partition(".")[2] for key in found}


def test_every_key_that_a_page_sets_exists() -> None:
    """Between backticks: `rollout.cache=dual`, `eval.every=20 eval.best=true`, `kl=0` on the page of a method."""
    known = settings() | {"key", "forwards", "seconds"}  # as such, and a comparison's budgets
    known |= {"halves.low", "halves.advantage", "early.strength"}  # of examples/own_method.py
    known |= {"behaviours.careless"}  # the name is a task's
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for span in re.findall(r"`((?:[a-z_.]+=[^\s`=(]+ ?)+)`", prose(page, code=True)):
            for key in re.findall(r"(?:^| )([a-z_.]+)=", span):
                assert key in known, f"{page.name} sets {key}: `{span}`"


def navigation(entry: Any) -> Iterator[str]:
    """The pages of a part of mkdocs.yml's nav."""
    for part in entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else [entry]:
        yield from [part] if isinstance(part, str) else navigation(part)


def test_the_site_has_every_page_once() -> None:
    pages = list(navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(pages) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    linked = set(re.findall(r"\]\(([\w./]+\.md)\)", (DOCS / "index.md").read_text()))
    assert linked >= set(pages) - {"index.md"}


@pytest.fixture(scope="module")
def reference() -> Any:
    spec = importlib.util.spec_from_file_location("docs_reference", DOCS / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_code_says(reference: Any) -> None:
    for path, page in reference.PAGES.items():
        assert path.read_text() == page(), f"{path.name} is stale: make reference"


def test_the_page_of_terms_has_the_facts_of_every_method() -> None:
    """Read from the page: terms, equal rewards, completed states and trajectory, for bases and for plug-ins on one."""
    text, base = (DOCS / "methods" / "terms.md").read_text(), diffu_grpo()
    rows = re.findall(r"^\| \[(\w+)\]\(\w+\.md\) \|(.*)\|$", text.partition("\n## Methods\n")[2], re.MULTILINE)
    assert [name for name, _ in rows] == [*BASES, *PLUGINS]
    for name, cells in rows:
        count, _, _, equal, completed, trajectory = map(str.strip, cells.split("|"))
        method = BASES[name]() if name in BASES else PLUGINS[name](base)
        assert sum(map(int, count.replace("base", "1").split("+"))) == len(method.terms), name
        facts = method.uses_equal_rewards, method.values is not None, method.trajectory
        for cell, fact in zip((equal, completed, trajectory), facts, strict=True):
            assert cell.replace("base", "no") == ("yes" if fact else "no"), name


def test_the_reference_has_every_key_with_a_meaning_and_every_public_name(reference: Any) -> None:
    keys = reference.keys()
    sections = [field.annotation for field in Config.model_fields.values() if hasattr(field.annotation, "model_fields")]
    for model in (Config, *sections):
        for name, field in model.model_fields.items():
            assert f"`{field.alias or name}`" in keys or field.exclude
            assert field.description, f"{model.__name__}.{name} has no docstring"
    page = reference.interface()
    assert all(re.search(rf"^::: unmask\.[\w.]*\b{name}$", page, re.MULTILINE) for name in reference.public_names())


def test_equations_become_mathml_and_links_out_of_the_pages_words() -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed: pip install -e '.[docs]'")
    pytest.importorskip("latex2mathml")
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    for page in DOCS.rglob("*.md"):
        for source in re.findall(r"```math\n(.*?)```", page.read_text(), re.DOTALL):
            drawn = hooks.equation(source, "math", "equation", {}, None)
            assert drawn.count("<math") == 1 and "\\" not in re.sub(r"<[^>]*>", "", drawn), f"{page.name}: {source}"

    class Page:
        class file:
            src_uri = "methods/daca.md"

    class Config:
        docs_dir = str(DOCS)

    text = hooks.on_page_markdown("[a](../results.md#b) [b](../../LOG.md) [c](https://x.org)", Page, Config, None)
    assert text == "[a](../results.md#b) b [c](https://x.org)"
    assert hooks.OUTSIDE.search('<script src="https://x.org/a.js">')
    assert not hooks.OUTSIDE.search('<a href="https://x.org">x</a><script src="assets/a.js">')


def test_the_citation_names_the_paper_of_every_method() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    urls = {one.get("url") for one in cited}
    assert any("ForkGRPO" in one.get("notes", "") for one in cited)  # without a number
    for name in set(METHODS) - {"surprise", "positive", "keep_correct", "fork"}:  # the first three have no paper
        text = (DOCS / "methods" / f"{name}.md").read_text()
        (paper,) = re.findall(r"^Paper:.*?\((https://arxiv.org/abs/[\d.]+)\)", text, re.MULTILINE)
        assert paper in urls, name
        assert paper in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("files", "label", "base"),
    [
        (("strata_sudoku", "daca"), "diffu_grpo+daca:strata=3", "diffu_grpo"),
        (("long_controls", "long"), "diffu_grpo+daca:strata=3", "diffu_grpo"),
        (("strata_countdown", "countdown_rates"), "diffu_grpo:optimizer.lr=4e-4+daca:strata=3", "diffu_grpo"),
        (("strata_sudoku", "prompt"), "diffu_grpo+daca:strata=3", "diffu_grpo:prompt_masking=0"),
        (("long_controls", "long_controls"), "diffu_grpo+daca:strata=3", "diffu_grpo:prompt_masking=0"),
    ],
)
def test_pages_have_the_measured_numbers_of_daca(files: tuple[str, str], label: str, base: str) -> None:
    """One set of numbers everywhere, with three strata, as benchmarks/tables.py computes it."""
    tables = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
    results, others = (json.loads((ROOT / f"benchmarks/results/compare_{name}.json").read_text()) for name in files)
    (measured,) = (cells[1] for cells in tables["less"](results, others, base) if cells[0] == label)
    for page in ("README.md", "docs/results.md", "docs/methods/daca.md", "docs/studies/daca.md"):
        assert measured in (ROOT / page).read_text(), f"{page} lacks {measured}"
