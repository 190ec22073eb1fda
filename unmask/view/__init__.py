"""The viewer: it reads run folders and shows them in a page (docs/viewer.md). It may import every room below it."""

from unmask.view.animation import animate as animate
from unmask.view.page import export as export
