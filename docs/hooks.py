"""What MkDocs cannot do by itself (mkdocs.yml): equations without scripts, links out of docs/, a check of the pages."""

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

OUTSIDE = re.compile(r"<(?:script|img|iframe|source|link rel=.(?:stylesheet|preload|preconnect))[^>]*=.(?:https?:)?//")


def on_config(config: Any) -> Any:
    """```math blocks become MathML, which browsers draw without scripts or fonts of ours."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "equation", "format": equation})
    return config


def equation(source: str, language: str, css_class: str, options: Any, md: Any, **kwargs: Any) -> str:
    found = convert(source.strip(), display="block")
    if "<mi>&</mi>" in found:
        raise PluginError(f"an environment of this equation is not understood (take align*): {source}")
    return f'<div class="{css_class}">{found}</div>'


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A link out of docs/, to a file of the repository, keeps its words: the site stands alone."""
    here, root = Path(page.file.src_uri).parent, Path(config.docs_dir)

    def kept(link: re.Match[str]) -> str:
        return link[0] if (root / here / link[2]).resolve().is_relative_to(root) else link[1]

    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)(?:#[^)]*)?\)", kept, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Nothing is fetched from elsewhere when a page is read."""
    if found := OUTSIDE.search(output):
        raise PluginError(f"{page.file.src_uri} would fetch from another place: {found[0]}")
    return output
