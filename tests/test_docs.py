"""The documentation runs, links to what exists, names every option, and holds no placeholder."""

import re
from pathlib import Path

import pytest

from unmask.config import option_help
from unmask.methods import BASES, PLUGINS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "LOG.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_python_block_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    exec(compile(source, str(page), "exec"), {"__name__": "__docs__"})


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere_and_nothing_is_left_to_fill_in(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    assert not re.search(r"TODO|FIXME|[A-Z]+_(TABLE|RESULTS)", text)


@pytest.mark.parametrize("name", [*BASES, "daca", "dispo"])
def test_a_method_page_names_every_option_with_its_default(name: str) -> None:
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    for option, default in option_help({**BASES, **PLUGINS}[name]).items():
        cells = [row[2].replace("`", " ").replace(",", " ").split() for row in rows if f"`{option}`" in row[1]]
        words = {word for cell in cells for word in cell}
        numbers = {float(word) for word in words if re.fullmatch(r"[\d.e-]+", word)}
        named = isinstance(default, str | bool)
        assert str(default).lower() in words if named else default in numbers, f"{name}.{option}: {default} in {words}"
