"""The pages read alike as plain Markdown and through the parser of the site."""

from __future__ import annotations

import re
import warnings

import pytest
from docutils.core import publish_parts
from markdown_it import MarkdownIt
from myst_parser.parsers.docutils_ import Parser

from support.docs.blocks import PAGES, ROOT


def rendered(page: str, by: str) -> str:
    """A page as HTML: by plain Markdown, as code hosts show it, or by the parser of the site."""
    text = re.sub(r"```\{.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    if by == "Markdown":
        return str(MarkdownIt("commonmark").enable("table").render(text))
    settings = {"myst_heading_anchors": 3, "report_level": 5, "embed_stylesheet": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        html = publish_parts(text, parser=Parser(), writer="html5", settings_overrides=settings)
    return str(html["html_body"])


@pytest.mark.parametrize("page", [page for page in PAGES if "/reference/" not in page])
def test_a_page_reads_alike_as_markdown_and_on_the_site(page: str) -> None:
    plain, site = (rendered(page, by) for by in ("Markdown", "the site"))
    for html in (plain, site):
        assert not re.search(r"<a [^>]*>\s*</a>", html), "a link without words"
        assert not re.search(r"<p>[^<]*\n: ", html), "a definition list is a paragraph elsewhere"
        assert "<dl" not in html
    for tag in ("h[1-6]", "tr", "li"):  # docutils may count headings from another level
        assert len(re.findall(f"<{tag}[ >]", plain)) == len(re.findall(f"<{tag}[ >]", site)), tag
