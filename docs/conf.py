"""Sphinx configuration: ``make docs``."""

import mojolearn

project = "mojolearn"
author = "The mojolearn authors"
copyright = "The mojolearn authors"
version = release = mojolearn.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.mathjax", "numpydoc", "myst_parser"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

# The summaries of classes are one list on their page, not a page for each method.
numpydoc_show_class_members = False
autosummary_generate = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "none"

html_theme = "alabaster"
html_theme_options = {
    "description": "Mamba-3 and attention language models on the CPU, with reproducible bits",
    "fixed_sidebar": True,
    "page_width": "1080px",
    "sidebar_width": "240px",
}
html_sidebars = {"**": ["about.html", "searchbox.html", "navigation.html"]}
