"""The viewer: what a run writes down for it, and the page that shows it (docs/viewer.md)."""

from unmask.view.page import export as export
