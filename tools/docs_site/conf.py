"""The configuration of Sphinx for the site. Everything comes from the site itself: no fonts or scripts of others."""

from __future__ import annotations

from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

project = "Charonia"
author = "the authors of Charonia"
version = release = version_of("charonia")
html_title = "Charonia"
html_baseurl = ""

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns: list[str] = []

myst_heading_anchors = 4
myst_links_external_new_tab = False
highlight_language = "text"
# outputs of commands are shortened with "..." and shown in the language of what they are
suppress_warnings = ["misc.highlighting_failure"]
nitpicky = False
default_role = "code"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autoclass_content = "both"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"Inputs": "Inputs", "Tensor": "Tensor"}
python_use_unqualified_type_names = True

html_theme = "furo"
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"sidebar_hide_name": False, "footer_icons": []}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"


def _as_markup(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Docstrings are prose with code in single backticks; the wording of a bare "*" is no emphasis."""
    lines[:] = [line.replace("*", r"\*") for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _as_markup)
