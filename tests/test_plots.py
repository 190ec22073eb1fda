"""Figures that are written to files leave the plots of a notebook alone."""

from pathlib import Path

import pytest

from unmask.util.plots import new_figure


def test_a_figure_is_saved_and_the_backend_of_pyplot_stays(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    before = matplotlib.get_backend()
    matplotlib.use("svg")
    try:
        figure = new_figure(1, 1)
        assert figure is not None
        figure.savefig(tmp_path / "one.png")
        assert matplotlib.get_backend() == "svg"
    finally:
        matplotlib.use(before)
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
