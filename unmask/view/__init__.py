"""The viewer: what a run writes down for it, and the page that shows it (docs/viewer.md). Imports what is below it:
studies, sft, integrations and further down.
"""

from unmask.view.page import export as export
