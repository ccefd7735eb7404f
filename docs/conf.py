"""The settings of Sphinx for these pages."""

from __future__ import annotations

project = "Meshwright"
author = "The Meshwright authors"
project_copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
html_theme = "alabaster"
html_theme_options = {"description": "The same model on any layout of processes"}
