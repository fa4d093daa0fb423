"""The pages of `pt_docs` as PyTerrier's site builds them.

The site's own configuration and directives live in PyTerrier's repository (`docs/conf.py`, `docs/extras`), not in its
wheel. Here are the settings that concern our pages, and a stand-in for the only directive of the site's that they use.
"""

from __future__ import annotations

from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

project = "pyterrier_longdoc"
extensions = ["sphinx.ext.autodoc", "sphinx_autodoc_typehints", "sphinx.ext.napoleon"]
autodoc_typehints = "description"
autodoc_default_options = {"member-order": "bysource"}
autodoc_inherit_docstrings = False
autoclass_content = "both"
always_use_bars_union = True
html_theme = "basic"


class Related(SphinxDirective):
    """A link to this section beneath the named entry of the reference."""

    required_arguments = 1
    option_spec: ClassVar = {"title": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        return []


def setup(app) -> None:
    app.add_directive("related", Related)
