"""The pages of `pt_docs` as PyTerrier's site builds them.

The site's own configuration and directives live in PyTerrier's repository (`docs/conf.py`, `docs/extras`), not in its
wheel. Here are the settings that concern our pages, and stand-ins that take the same directives and show their content.
"""

from __future__ import annotations

from typing import ClassVar

import pyterrier as pt
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


class Schematic(SphinxDirective):
    """The drawing of the transformer that the last line names."""

    has_content = True
    option_spec: ClassVar = {"input_columns": str, "show_code": directives.flag}

    def run(self) -> list[nodes.Node]:
        *before, last = self.content
        namespace = {"pt": pt}
        exec("\n".join(before), namespace)
        columns = self.options.get("input_columns")
        drawn = pt.schematic.draw(
            eval(last, namespace), input_columns=columns and [each.strip() for each in columns.split(",")]
        )
        return [nodes.raw("", drawn, format="html")]


class HowTo(SphinxDirective):
    """A section that the site's index of how-tos lists, beneath a line; no section may begin with a line."""

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        title, messages = self.state.inline_text(self.arguments[0], self.lineno)
        content = [nodes.title("", "", *title), *messages, *self.parse_content_to_nodes()]
        section = nodes.section("", *content, ids=[nodes.make_id(self.arguments[0])])
        return [nodes.transition(), section]


class Cite(SphinxDirective):
    """A paper, its address and its BibTeX."""

    has_content = True
    required_arguments = 1
    option_spec: ClassVar = {"citation": str, "link": str}

    def run(self) -> list[nodes.Node]:
        return [nodes.literal_block("", "\n".join([*self.arguments, *self.options.values(), *self.content]))]


class CiteDblp(Cite):
    """A paper whose BibTeX the site fetches from DBLP."""

    has_content = False


class Related(SphinxDirective):
    """A link to this section beneath the named entry of the reference."""

    required_arguments = 1
    option_spec: ClassVar = {"title": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        return []


def setup(app) -> None:
    stand_ins = {"schematic": Schematic, "how-to": HowTo, "cite": Cite, "cite.dblp": CiteDblp, "related": Related}
    for name, directive in stand_ins.items():
        app.add_directive(name, directive)
