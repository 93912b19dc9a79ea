"""Sphinx's settings for the web pages: Markdown and lessons are read where they are.

A lesson's page has its docstring as Markdown, and its code, in which the lines with a new idea are
lit, and what an earlier lesson has shown is folded.
"""

import ast
import re

from myst_parser.parsers.sphinx_ import MystParser

project = html_title = "The PyTorch distributed playground"
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "README"
parts = ("", "replicated/", "sharded/", "split/", "transformer/", "language/")
include_patterns = ["README.md", "run/README.md", "playground/**.md", ".github/CONTRIBUTING.md"]
include_patterns += [f"playground/{part}*.py" for part in parts]
source_suffix = {".md": "markdown", ".py": "lesson"}
suppress_warnings = ["toc.not_included", "myst.xref_missing", "myst.header"]
myst_heading_anchors = 4
copybutton_prompt_text = r"(?:node\d)?\$ "
copybutton_prompt_is_regexp = True
html_theme = "furo"
html_static_path = ["static"]
html_css_files, html_js_files = ["pages.css"], ["paste.js"]
smartquotes = html_copy_source = html_use_index = html_show_sphinx = html_show_copyright = False
FIGURES = {  # to play with, at the end of a page
    "playground/model_parallel": "pipeline",
    "playground/split/manual_pipeline": "pipeline",
}
NAVIGATION = """
```{{toctree}}
:hidden:
:caption: {caption}

{pages}
```
"""


class LessonParser(MystParser):
    """Reads a lesson: a Python file whose docstring is nearly Markdown."""

    supported = ("lesson",)

    def parse(self, inputstring, document):
        """Parse what Sphinx has read as Markdown."""
        tree = ast.parse(inputstring)
        title, _, text = ast.get_docstring(tree).partition("\n")
        text = re.sub(r"^  (?=\d\. )", "", text, flags=re.M)  # a list, and no block of code
        text = re.sub(r"^(?!\d\. )(\S.*)\n(?= {4})", r"\1\n\n", text, flags=re.M)
        lines = inputstring.splitlines()
        above, _, below = inputstring.partition("\n# ---------- Unchanged")
        first, fold = tree.body[0].end_lineno + 2, len(above.splitlines())
        page = f"# {title.rstrip('.')}\n{text}\n\n## The code\n\n"
        page += code(lines, first, fold)
        if below:
            shown = code(lines, fold + 1, len(lines))
            page += f"<details><summary>Unchanged{below.splitlines()[0].rstrip(' -')}</summary>"
            page += f"\n\n{shown}\n\n</details>\n"
        super().parse(page, document)


def code(lines, first, last):
    """Return a block of code as Markdown. Comments with a new idea are lit."""
    lit = [str(n - first + 1) for n in range(first, last + 1) if "# NEW:" in lines[n - 1]]
    options = f":lineno-start: {first}\n" + f":emphasize-lines: {','.join(lit)}\n" * bool(lit)
    text = "\n".join(lines[first - 1 : last])
    return f"````{{code-block}} python\n{options}\n{text}\n````\n\n"


def add_navigation(app, name, source):
    """Add the lessons in their order, and the other pages, to the first page."""
    if name == root_doc:
        listed = (app.srcdir / "playground/README.md").read_text()
        lessons = re.findall(r"^\| \d+\. \[`\w+\.py`\]\((\S+)\.py\)", listed, re.M)
        groups = {"The ten": lessons[:10], "Going further": ["README", *lessons[10:]]}
        others = re.findall(
            r"\((\w+)\.md\)", (app.srcdir / "playground/pages/README.md").read_text()
        )
        groups["Pages"] = [*(f"pages/{each}" for each in others), "exercises/README"]
        for caption, pages in groups.items():
            pages = "\n".join(f"playground/{each}" for each in dict.fromkeys(pages))
            source[0] += NAVIGATION.format(caption=caption, pages=pages)


def add_figure(app, name, template, context, doctree):
    """Add a figure to play with to some pages."""
    if name in FIGURES:
        path = context["pathto"](f"_static/{FIGURES[name]}.html", resource=True)
        context["body"] += f'<h2>Try it</h2><iframe src="{path}" title="A figure"></iframe>'


def setup(app):
    """Let Sphinx read lessons."""
    app.add_source_parser(LessonParser)
    app.connect("html-page-context", add_figure)
    app.connect("source-read", add_navigation)
