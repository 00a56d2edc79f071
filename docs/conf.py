"""How the documentation is built: ``make docs``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import fedtangent

sys.path.insert(0, str(Path(__file__).parent))

project = "fedtangent"
author = "the fedtangent authors"
release = version = fedtangent.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "generated",
]
myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
smartquotes = False  # options keep their two dashes
nitpicky = False

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_static_path = ["style"]
html_css_files = ["wide.css"]
html_show_copyright = False
html_math_renderer = "mathml"
html_title = f"fedtangent {release}"
html_theme_options = {"navigation_with_keys": True}


def without_fields_of_tuples(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what is said of a field of a NamedTuple by itself: that it is one."""
    return True if str(getattr(thing, "__doc__", "")).startswith("Alias for field number") else None


def with_fields(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Add the comments beside the fields of a NamedTuple or a dataclass to what is said of it.

    Fields that have docstrings are documented by themselves; all stand in the signature, with their types.
    """
    if what != "class" or not (hasattr(thing, "_fields") or dataclasses.is_dataclass(thing)):
        return
    source = inspect.getsource(thing).splitlines()
    (found,) = ast.parse(textwrap.dedent("\n".join(source))).body
    lines.append("")
    for field in found.body if isinstance(found, ast.ClassDef) else ():
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            comment = re.search(r"  # (.*)", source[(field.end_lineno or 0) - 1])
            if comment:
                said = re.sub(r"([*|\\]|_(?!\w))", r"\\\1", comment[1])
                lines.append(f"- **{field.target.id}**: {said}")
    lines.append("")


def inline_formula(page: Any, node: nodes.math) -> None:
    """A formula in a line, as MathML: browsers show it without a script, and without a network."""
    page.body.append(str(tex2mathml(node.astext())))
    raise nodes.SkipNode


def displayed_formula(page: Any, node: nodes.math_block) -> None:
    """A formula on lines of its own."""
    page.body.append(f"<div class='formula'>{tex2mathml(node.astext(), as_block=True)}</div>\n")
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Connect the functions above."""
    app.add_html_math_renderer("mathml", (inline_formula, None), (displayed_formula, None))
    app.connect("autodoc-skip-member", without_fields_of_tuples)
    app.connect("autodoc-process-docstring", with_fields)
