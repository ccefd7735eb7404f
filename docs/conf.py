"""The settings of Sphinx for these pages."""

from __future__ import annotations

project = "Meshwright"
author = "The Meshwright authors"
project_copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
html_theme = "furo"
html_title = "Meshwright"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
copybutton_exclude = ".linenos, .gp, .go"
