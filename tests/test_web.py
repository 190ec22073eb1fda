"""The viewer's page: the built file by itself, and where Node and a browser are there the tests that come with it."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WEB, PAGE = ROOT / "web", ROOT / "unmask" / "view" / "page.html"
BESIDE = ("index.html", "package.json", "tsconfig.json", "vite.config.ts")


@cache
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def sources_hash() -> str:
    """As vite.config.ts writes it into the page."""
    names = [str(path.relative_to(WEB)) for path in (WEB / "src").rglob("*") if path.is_file()]
    digest = hashlib.sha256()
    for name in sorted([*names, *BESIDE]):
        digest.update(name.encode() + b"\0" + (WEB / name).read_bytes() + b"\0")
    return digest.hexdigest()


def test_there_is_one_place_for_the_data_and_one_for_the_traces():
    data, script, traces = (page().index(mark) for mark in ("<!--unmask-data-->", "<script>", "<!--unmask-traces-->"))
    assert data < script < traces  # the script reads the data and need not wait for the traces
    assert page().count("<!--") == 2


def test_it_asks_for_nothing_from_elsewhere():
    # the names of the languages of a document, which nobody fetches
    addresses = {address for address in re.findall(r"https?:/+[^\s\"'`<>)]+", page())}
    assert {address for address in addresses if not address.startswith("http://www.w3.org/")} == set()
    assert re.findall(r"<(?:script|img|iframe|object|embed)[^>]*\ssrc", page()) == []
    assert re.findall(r"<link[^>]*href=\"([^\"]*)", page()) == ["data:,"]
    assert re.findall(r"@import|url\(", page()) == []


def test_its_policy_allows_its_own_script_and_style_and_no_other():
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)"', page())
    assert policy is not None and "default-src 'none'" in policy[1] and "unsafe" not in policy[1]
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in policy[1]


def test_it_never_writes_markup():
    for path in (WEB / "src").rglob("*.ts*"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", path.read_text()), path


def test_it_is_built_from_these_sources():
    assert f'<meta name="unmask-sources" content="{sources_hash()}">' in page(), "web/ has changed: run `make web`"


def ran(tool: str, *arguments: str, **environment: str) -> None:
    """One of the page's own test tools, or a skip that says what is missing."""
    node, script = shutil.which("node"), WEB / "node_modules" / ".bin" / tool
    if node is None or not script.exists():
        pytest.skip("node or web/node_modules is not there: `make web` installs what the page is tested with")
    command, settings = [node, script, *arguments], {**os.environ, **environment}
    done = subprocess.run(command, cwd=WEB, env=settings, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_its_equations():
    ran("vitest", "run", "--dir", "tests/unit")


def test_it_in_a_browser():
    """The core; `make web-test` goes on to accessibility, narrow screens, live runs and speed."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    ran("playwright", "test", "--grep", "@core", CHROMIUM=chromium)
