"""The pages of `pt_docs` as PyTerrier's site builds them.

The site's own configuration and directives live in PyTerrier's repository (`docs/conf.py`, `docs/extras`), not in its
wheel. Here are the settings that concern our pages, and stand-ins for the directives of the site's that they use.
"""

from __future__ import annotations

import ast
from typing import Any, ClassVar

import pyterrier as pt
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

project = "pyterrier_longdoc"
extensions = ["sphinx.ext.autodoc", "sphinx_autodoc_typehints", "sphinx.ext.napoleon"]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"  # others would have a type and no word
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


class HowTo(SphinxDirective):
    """A guide with a question as its title, which the site also lists on its page of guides."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        section = nodes.container()
        section += nodes.rubric(text=self.arguments[0])
        self.state.nested_parse(self.content, self.content_offset, section)
        return [section]


class Schematic(SphinxDirective):
    """A drawing of the pipeline in the last line; not drawn here, as PyTerrier looks up its own classes online."""

    has_content = True
    option_spec: ClassVar = {"input_columns": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        *before, last = ast.parse("\n".join(self.content)).body
        names: dict[str, Any] = {"pt": pt}
        exec(compile(ast.Module(before, []), "schematic", "exec"), names)
        pipeline = eval(compile(ast.Expression(last.value), "schematic", "eval"), names)
        columns = [name.strip() for name in self.options["input_columns"].split(",")]
        pt.inspect.transformer_outputs(pipeline, columns)
        return []


def setup(app) -> None:
    app.add_directive("related", Related)
    app.add_directive("how-to", HowTo)
    app.add_directive("schematic", Schematic)
