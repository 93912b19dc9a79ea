"""Sphinx's settings for the web pages."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from pages import Course

project = html_title = "The PyTorch distributed playground"
extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["attrs_block"]
myst_heading_anchors = 4
copybutton_prompt_text = r"(?:node\d)?\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = ", ".join(
    f"div.highlight-{language} pre" for language in ("console", "default", "python")
)
html_theme = "furo"
pygments_dark_style = "github-dark"
html_static_path = ["static"]
html_css_files = ["pages.css"]
course = Course()
words = f"const IDEAS = {json.dumps(course.ideas)}, ERRORS = {json.dumps(course.errors)}"
html_js_files = [(None, {"body": words}), "pages.js"]
html_favicon = "static/icon.svg"
smartquotes = html_copy_source = html_use_index = html_show_sphinx = html_show_copyright = False
