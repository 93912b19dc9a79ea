"""Make the Markdown of the web pages from the course's files, which are read as they are.

    python pages.py FOLDER

Sphinx makes the pages from that (`run/pages.sh`). A lesson's page has its docstring as prose, its
code with what earlier lessons have shown folded, and the answers to its questions behind a click.
"""

import ast
import html
import os
import re
import shutil
import sys
from difflib import unified_diff
from pathlib import Path
from textwrap import dedent

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from recordings import RECORDINGS, command_of

COURSE = Path(__file__).resolve().parents[2]
EXERCISES = "playground/exercises"
REPOSITORY = os.environ.get("GITHUB_REPOSITORY")  # OWNER/NAME. Only the hosted workflow has it
GITHUB = f"https://github.com/{REPOSITORY}"
NOTEBOOK = "blob/main/run/notebook.ipynb"
COLAB = f"https://colab.research.google.com/github/{REPOSITORY}/{NOTEBOOK}"
KAGGLE = f"https://www.kaggle.com/kernels/welcome?src={GITHUB}/{NOTEBOOK}"
COMMAND = re.compile(r"(?:[A-Z_0-9]+=\S+ )*(?:python|torchrun|tensorboard|git|pip|run/\w+\.sh) ")
# A docstring's blocks: a numbered list, another list, indented lines, or a paragraph.
BLOCK = re.compile(
    r"(?P<list>(?:^ *\d+\. .*\n(?:^ {3,}\S.*\n)*)+)"
    r"|(?P<bullets>(?:^- .*\n(?:^ +\S.*\n|^\n(?=^ {2,}\S))*)+)"
    r"|(?P<indented>(?:^ .*\n(?:^\n(?=^ ))*)+)"
    r"|(?P<text>(?:^(?!- )\S.*\n)+)",
    re.M,
)
# What becomes code in a paragraph, without backticks there, and characters that Markdown reads.
WORD = re.compile(
    r"`[^`\n]+`|https?://[\w./#?=&-]+\w|\(cp \S+ \S+\)|(?<![\w-])--?[a-z][\w-]*"
    r"|(?:\w+/)*\w+\.(?:py|md|sh|png)\b|(?:\w+/)+\w*|[\w.]+\([^() ]*(?:, [^() ]+)*\)"
    r"|(?:\w+\.)*\w*[a-z]_\w+|\b[a-z]\w+(?:\.[a-z]\w+)+"
    r"|[\\*_<>\[\]#$|]"
)
# Words of the glossary with a plain meaning, too, in which lessons often use them.
PLAIN = {"block", "buffer", "gather", "handle", "load", "norm", "pass", "reduce", "scatter"}
PLAIN |= {"stage", "store", "trace", "word"}


class LackingError(ValueError):
    """A lesson lacks something that its page needs."""


class Source:
    """A Python file: its title, the rest of its docstring, and its lines."""

    def __init__(self, path: Path):
        self.path, self.file = path, str(path.relative_to(COURSE))
        self.page = self.file.removesuffix(".py") + ".md"
        self.anchor = ""  # where it is on its page
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        self.title, _, self.doc = (ast.get_docstring(tree) + "\n").partition(".\n")
        self.lines = text.splitlines()
        self.rows = highlight(text, PythonLexer(), HtmlFormatter(nowrap=True)).split("\n")
        self.body = tree.body[1:]
        self.first = tree.body[0].end_lineno  # the index of the first line after the docstring
        self.new, self.near = set(), set()  # the indices of lines, from 0
        for number, line in enumerate(self.lines):
            if "# NEW:" in line:
                self._mark(number, tree)

    def _mark(self, number: int, tree: ast.AST) -> None:
        """Mark a comment that begins with NEW, and the statement that it explains."""
        last = number
        while self.lines[last].lstrip().startswith("#"):
            last += 1
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt) and node.lineno == last + 1:
                # Of what has a body, such as a function or a loop, only the head.
                last = node.body[0].lineno - 2 if hasattr(node, "body") else node.end_lineno - 1
                break
        self.new |= {*range(number, last + 1)}
        self.near |= {*self._around(number)} - self.new

    def _around(self, number: int) -> list[int]:
        """Return the heads of what a line stands in: its loops, conditions and functions."""
        heads, branch = [], False
        indent = len(self.lines[number]) - len(self.lines[number].lstrip())
        for i in range(number - 1, self.first, -1):
            code = self.lines[i].lstrip()
            width = len(self.lines[i]) - len(code)
            begins = branch and width == indent and re.match("(?:if|for|while|try)\\b", code)
            if code and code[0] != "#" and (width < indent or begins):
                heads.append(i)
                indent, branch = width, bool(re.match("(?:else|elif|except|finally)\\b", code))
        return heads

    def link(self, file: str) -> str:
        """Return a link to the page of this file, as seen from the page of another one."""
        return f'<a href="{relative(self.page, file, ".html")}">{self.path.name}</a>'

    def definitions(self) -> dict[str, tuple[int, int, str, str]]:
        """Return where functions and classes begin and end, what they do, and their plain text."""
        found = {}
        for node in self.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
                lines = "\n".join(self.lines[first : node.end_lineno])
                does = re.split(r"\.\s|\.$", ast.get_docstring(node) or "")[0]
                plain = lines.replace("# NEW: ", "# ").lower()
                found[node.name] = (first, node.end_lineno, does, plain)
        return found

    def show(self, first: int, end: int) -> str:
        """Return lines as HTML, without an empty line, where Markdown would resume."""
        shown = ""
        for i in range(first, end):
            number, kind = i + 1, " new" * (i in self.new) or " near" * (i in self.near)
            kind += " cut" * (i - 1 not in self.new | self.near)
            shown += f'<span class="line{kind}" id="L{number}" data-n="{number}">{self.rows[i]}\n'
            shown += "</span>"
        return f"<pre>{shown}</pre>" if shown else ""

    def fold(self, first: int, end: int, label: str) -> str:
        """Return lines that are shown after a click."""
        label = f"<summary>{label} · {end - first} lines</summary>"
        return f"<details>{label}{self.show(first, end)}</details>"

    def code(self, earlier: list["Source"] = ()) -> str:
        """Return the file as HTML, folded but for its idea.

        The folds are the functions of earlier lessons, and the helpers that follow the idea.
        """
        folds = [(0, self.first, "the text of this page")] if self.first > 2 else []
        imports = [node for node in self.body if isinstance(node, ast.Import | ast.ImportFrom)]
        if imports and earlier:
            folds.append((imports[0].lineno - 1, imports[-1].end_lineno, "imports"))
        found = self.definitions()
        _, idea, *_ = found.get("train") or found.get("talk") or (0, 0)
        rule = next((i for i, line in enumerate(self.lines) if line.startswith("# -----")), 0)
        for name, (first, end, does, text) in found.items():
            where = [each for each in earlier if each.definitions().get(name, ("",))[-1] == text]
            if where:
                label = f"<b>{name}</b> unchanged from {where[-1].link(self.file)}"
                folds.append((first, end, label))
            elif earlier and idea < first < rule and text.startswith("def "):
                folds.append((first, end, f"<b>{name}</b> · {html.escape(does)}"))
        folds = [fold for fold in folds if not self.new & {*range(fold[0], fold[1])}]
        result, shown = "", 0
        for first, end, label in folds:
            result += self.show(shown, first)
            shown = end
            while self.lines[shown : shown + 1] == [""]:
                shown += 1  # empty lines after a fold are in it
            result += self.fold(first, shown, label)
        result += self.show(shown, len(self.lines))
        return f'<div class="code highlight" data-file="{self.path.name}">{result}</div>\n\n'

    def difference(self, base: "Source") -> str:
        """Return what has changed below the docstring since another lesson, folded."""
        rows, added, gone = "", 0, 0
        kinds = {"+": "add", "-": "gone", " ": "same", "@": "gap"}
        changes = unified_diff(base.rows[base.first :], self.rows[self.first :], n=2, lineterm="")
        for change in list(changes)[2:]:
            kind = kinds[change[0]]
            added, gone = added + (kind == "add"), gone + (kind == "gone")
            text = "" if kind == "gap" else change[1:]
            rows += f'<span class="line {kind}">{text}\n</span>'
        label = f"What has changed since {base.link(self.file)}: {added} lines are new, {gone} gone"
        return details(label, f'<div class="code highlight"><pre>{rows}</pre></div>')


def relative(page: str, file: str, suffix: str = ".md") -> str:
    """Return the path of a page, as seen from the page of a file."""
    page, sharp, anchor = page.partition("#")
    return os.path.relpath(page, Path(file).parent).removesuffix(".md") + suffix + sharp + anchor


def details(label: str, text: str) -> str:
    """Return Markdown that is shown after a click on its label."""
    return f'<details class="more"><summary>{label}</summary>\n\n{text}\n\n</details>\n\n'


class Course:
    """The course's files, and what their pages say to each other."""

    def __init__(self):
        self.parts, self.tasks, self.ideas = {}, {}, {}  # the first two by the name of the part
        table = (COURSE / EXERCISES / "README.md").read_text(encoding="utf-8")
        for title, text in self.chapters("playground/README.md").items():
            rows = re.findall(r"^\| \d+\. \[`\w+\.py`\]\((\S+)\) \| (.*) \|$", text, re.M)
            if not rows:  # the tools
                continue
            self.parts[title] = [Source(COURSE / "playground" / file) for file, _ in rows]
            for lesson, (_, idea) in zip(self.parts[title], rows, strict=True):
                words = f"{lesson.path.name} {lesson.title} {idea}".lower().replace("`", "")
                self.ideas[lesson.page.removesuffix(".md")] = re.sub("[-_]", " ", words)
            part = title.partition(":")[0]
            files = re.findall(r"\w+\.py", re.search(rf"^\| {part} \| (.*)", table, re.M)[1])
            self.tasks[part] = [Source(COURSE / EXERCISES / file) for file in files]
            for task in self.tasks[part]:
                task.page = f"{EXERCISES}/part{len(self.parts)}.md"
                task.anchor = "#" + task.path.stem.replace("_", "-")
        self.lessons = [lesson for lessons in self.parts.values() for lesson in lessons]
        self.common = [Source(path) for path in sorted(COURSE.glob("common/[a-z]*.py"))]
        pages = [*COURSE.glob("playground/**/*.md"), *COURSE.glob("*/README.md")]
        pages.append(COURSE / ".github/CONTRIBUTING.md")
        files = {str(path.relative_to(COURSE)) for path in pages}
        self.markdown = sorted(files, key=lambda file: (not file.startswith("playground"), file))
        self.pages = {"README.md": "index.md"} | {file: file for file in self.markdown}
        self.pages[EXERCISES] = self.pages[f"{EXERCISES}/"] = f"{EXERCISES}/README.md"
        sources = [*self.common, *(task for tasks in self.tasks.values() for task in tasks)]
        for source in [*sources, *self.lessons]:
            # Docstrings name most files without their folder.
            for name in (source.file, source.file.removeprefix("playground/"), source.path.name):
                self.pages[name] = source.page + source.anchor
        for file in self.markdown:
            self.pages.setdefault(Path(file).name, file)
        glossary = (COURSE / "playground/pages/glossary.md").read_text(encoding="utf-8")
        self.tips = {}
        for words, meaning in re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]*\|$", glossary, re.M):
            for word in words.replace("`", "").split(", "):
                if word not in PLAIN:
                    meaning = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", meaning)
                    self.tips[word] = self.tips[word[0].upper() + word[1:]] = meaning
        longest_first = "|".join(sorted(map(re.escape, self.tips), key=len, reverse=True))
        self.tip_words = re.compile(rf"(?<![\w-])({longest_first})(?:e?s)?(?![\w-])")
        self.answers = self.chapters("playground/pages/answers.md")
        self.pictures = self.chapters("playground/pages/pictures.md")

    def chapters(self, file: str) -> dict[str, str]:
        """Return the text below each heading of a page."""
        parts = re.split(r"^## (.*)\n", (COURSE / file).read_text(encoding="utf-8"), flags=re.M)
        return dict(zip(parts[1::2], parts[2::2], strict=True))

    def linked(self, text: str, file: str, here: str | None = None) -> str:
        """Return Markdown of a file with links to pages, as seen from a page in another place.

        A file without a page is on GitHub, if the repository is known. Otherwise its name stays.
        """

        def link(match: re.Match) -> str:
            image, words, target = match.groups()
            target, sharp, anchor = target.partition("#")
            if "://" in target or (not target and here is None):
                return match[0]
            path = os.path.normpath(Path(file).parent / target) if target else file
            if image:
                return f"![{words}]({os.path.relpath(path, Path(here or file).parent)})"
            if path in self.pages:
                return f"[{words}]({relative(self.pages[path], here or file)}{sharp}{anchor})"
            return f"[{words}]({GITHUB}/tree/main/{path})" if REPOSITORY else words

        return re.sub(r"(!?)\[([^]]*)\]\(([^)\s]+)\)", link, text)

    def inline(self, text: str, file: str, explained: set[str]) -> str:
        """Return a paragraph of a docstring as Markdown, with code, links and tips for words."""

        def explain(match: re.Match) -> str:
            meaning = self.tips[match[1]]
            if meaning in explained:
                return match[0]
            explained.add(meaning)
            return f'<abbr tabindex="0" data-tip="{html.escape(meaning)}">{match[0]}</abbr>'

        result, end = "", 0
        for match in WORD.finditer(text):
            result += self.tip_words.sub(explain, text[end : match.start()])
            word, end = match[0], match.end()
            page = self.pages.get(word.strip("`"))
            if word.startswith("http"):
                result += f"<{word}>"
            elif page and page != self.pages[file]:
                result += f"[`{word.strip('`')}`]({relative(page, file)})"
            elif word.startswith("("):
                result += f"(`{word[1:-1]}`)"
            elif len(word) == 1:
                result += f"\\{word}"
            else:
                result += word if word.startswith("`") else f"`{word}`"
        return result + self.tip_words.sub(explain, text[end:])

    def questions(self, text: str, lesson: Source, explained: set[str]) -> str:
        """Return the questions of a lesson, each with its answer behind a click."""
        answers = self.answers.get(f"`{lesson.path.name}`", "")
        answers = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", answers, re.M | re.S)
        answers = {number: dedent(f"   {answer}") for number, answer in answers}
        result = ""
        for number, question in re.findall(r"^ *(\d+)\. (.*?)(?=^ *\d+\. |\Z)", text, re.M | re.S):
            if number not in answers:
                raise LackingError(f"{lesson.file}: answers.md has no answer to question {number}")
            question = self.inline(" ".join(question.split()), lesson.file, explained)
            answer = self.linked(answers[number], "playground/pages/answers.md", lesson.file)
            result += f"**{number}.** {question}\n\n{details('Answer', answer.strip())}"
        return result

    def prose(self, source: Source, text: str, explained: set[str]) -> str:
        """Return a part of a docstring as Markdown."""
        result = ""
        for match in BLOCK.finditer(text):
            block = dedent(match[0]).rstrip()
            term = r"(--\S+ \S+|\w+) {2,}(?=\S)"
            if block == "Run it:":  # the heading above says so
                continue
            if match.lastgroup in ("text", "bullets"):
                result += self.inline(block, source.file, explained) + "\n\n"
            elif match.lastgroup == "list":
                result += self.questions(match[0], source, explained)
            elif re.match(term, block) and re.search(r"\n {20,}\S|^--", block):
                parts = re.split(rf"^{term}", block, flags=re.M)[1:]
                for name, meaning in zip(parts[::2], parts[1::2], strict=True):
                    meaning = self.inline(" ".join(meaning.split()), source.file, explained)
                    result += f"`{name}`\n: {meaning}\n\n"
            else:
                lines = re.sub(r" *\\\n *", " ", block).splitlines()
                commands = [f"$ {line}" if COMMAND.match(line) else line for line in lines]
                kind = "console" if commands != lines else "text"
                result += f"```{kind}\n" + "\n".join(commands) + "\n```\n\n"
        return result

    def sections(self, lesson: Source) -> dict[str, str]:
        """Return the parts of a lesson's docstring: of it, no word is lost.

        Raises:
            LackingError: one of the parts is not there.
        """
        parts = re.fullmatch(
            r"\n(?P<before>.*?)(?P<run>^Run it.*?)(?P<broken>^Try breaking it.*?)"
            r"(?P<write>^Now (?:write|repair).*?)?(?:^Builds on: (?P<base>\w+\.py)\n)?"
            r"(?P<next>^(?:The next|This is the last) lesson.*)",
            lesson.doc,
            re.M | re.S,
        )
        if not parts:
            raise LackingError(
                f"{lesson.file}: its docstring needs 'Run it', 'Try breaking it' and 'The next"
                " lesson', each at the start of a line, in this order"
            )
        sections = parts.groupdict(default="")
        # What it runs and prints comes first. The idea begins with the first paragraph of another
        # kind.
        paragraphs = re.split(r"(?<=\n)\n(?=\S)", sections["run"])
        count = 0
        while count < len(paragraphs) and re.match(
            r"(?:Run|Resume|Start from) |Run it|(?s:.{0,300}\bprints?\b)", paragraphs[count]
        ):
            count += 1
        sections["run"] = "\n".join(paragraphs[:count])
        sections["idea"] = "\n".join(paragraphs[count:])
        return sections

    def drawings(self, lesson: Source) -> str:
        """Return the pictures that name a lesson, with their texts."""
        result = ""
        for title, text in self.pictures.items():
            if re.search(rf"/{lesson.path.name}\)", text) and "![" in text:
                text = self.linked(text, "playground/pages/pictures.md", lesson.file)
                result += f'<div class="picture">\n\n**{title}**\n\n{text.strip()}\n\n</div>\n\n'
        return result

    def recordings(self, lesson: Source, explained: set[str]) -> str:
        """Return the recorded runs of a lesson, each behind a question about it."""
        result = ""
        for name, each in RECORDINGS.items():
            if each.lesson != lesson.path.name:
                continue
            page = os.path.relpath(f"_static/recorded/{name}.html", Path(lesson.page).parent)
            buttons = ""
            for answer in sorted(each.answers):
                right = " data-right" * (answer == each.answers[0])
                buttons += f'<button type="button"{right}>{html.escape(answer)}</button>\n'
            why = html.escape(each.why)
            result += f"```console\n$ {command_of(name)}\n```\n\n"
            result += self.inline(each.question, lesson.file, explained) + "\n\n"
            result += f'<div class="recording" data-page="{page}">{buttons}<p hidden>{why}</p>\n'
            result += f'<p><a href="{page}">Show the recorded run</a></p></div>\n\n'
        return "## A recorded run\n\n" + result if result else ""

    def title(self, source: Source, facts: str, explained: set[str]) -> str:
        """Return the head of a page: its title up to a colon, some facts, the rest of the title."""
        head, _, lead = source.title.partition(": ")
        page = f"# {head}\n\n{{.facts}}\n{facts}\n\n"
        if lead:
            lead = f"{lead[0].upper()}{lead[1:]}."
            page += "{.lead}\n" + self.inline(lead, source.file, explained) + "\n\n"
        return page

    def lesson(self, lesson: Source) -> str:
        """Return the page of a lesson."""
        earlier = self.lessons[: self.lessons.index(lesson)]
        sections, explained = self.sections(lesson), set()
        title, part = next(part for part in self.parts.items() if lesson in part[1])
        facts, base = f"{title} · Lesson {part.index(lesson) + 1} of {len(part)}", None
        if sections["base"]:
            base = next(each for each in self.lessons if each.path.name == sections["base"])
            facts += f" · Builds on: [`{base.path.name}`]({relative(base.page, lesson.file)})"
        page = self.title(lesson, facts, explained)
        page += self.prose(lesson, sections["before"], explained)
        page += "## Run it\n\n" + self.prose(lesson, sections["run"], explained)
        page += "## The idea\n\n" * bool(sections["idea"])
        page += self.prose(lesson, sections["idea"], explained) + self.drawings(lesson)
        page += self.recordings(lesson, explained)
        count = len(lesson.lines) - lesson.first
        page += f"## The code\n\n`{lesson.file}` has {count} lines below its docstring"
        if lesson.new:
            page += f", of which {len(lesson.new)} are lit, because they carry a new idea"
        code = lesson.code(earlier)
        if "<b>" in code:
            page += ". What earlier lessons have, and helpers without a new idea, are folded"
        page += f".\n\n{code}" + (lesson.difference(base) if base else "")
        broken = sections["broken"].replace("Try breaking it, in", "In", 1)
        page += "## Try breaking it\n\n" + self.prose(lesson, broken, explained)
        page += "## What next\n\n" + self.prose(lesson, sections["write"], explained)
        return page + self.prose(lesson, sections["next"], explained)

    def exercises(self, part: str) -> str:
        """Return the page with the exercises of a part."""
        page = f"# Exercises of {part[0].lower()}{part[1:]}\n\n"
        page += "[How they work](README.md)\n\n"
        for task in self.tasks[part]:
            page += f"## `{task.path.stem}`\n\n"
            page += "{.lead}\n" + self.inline(f"{task.title}.", task.file, set())
            page += "\n\n" + self.prose(task, task.doc.removeprefix("\n"), set())
            page += details("The file", task.code())
            for number, hint in enumerate(hints(task), 1):
                page += details(f"Hint {number}", f"<pre>{html.escape(hint)}</pre>")
        return page


def hints(task: Source) -> list[str]:
    """Return the three hints of an exercise, from the file that checks it."""
    check = COURSE / EXERCISES / "judging/checks" / task.path.name
    for node in ast.parse(check.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "HINTS":
            return ast.literal_eval(node.value).strip().split("\n\n")
    raise LackingError(f"{check}: no HINTS")


def tree(entries: list[str], caption: str = "") -> str:
    """Return the hidden list of pages from which Sphinx makes the navigation."""
    options = ":hidden:\n" + f":caption: {caption}\n" * bool(caption)
    return "\n```{toctree}\n" + options + "\n" + "\n".join(entries) + "\n```\n"


def main() -> None:
    """Write all pages into a folder, which is emptied first."""
    out = Path(sys.argv[1])
    shutil.rmtree(out, ignore_errors=True)
    course = Course()

    def write(page: str, text: str) -> None:
        (out / page).parent.mkdir(parents=True, exist_ok=True)
        (out / page).write_text(text, encoding="utf-8")

    index = course.linked((COURSE / "README.md").read_text(encoding="utf-8"), "README.md")
    if REPOSITORY:
        links = [f"[The files]({GITHUB})", '<a href="pages.zip">these pages as one file</a>']
        links.append(f"the first ten as a notebook in [Colab]({COLAB}) or on [Kaggle]({KAGGLE})")
        title, _, text = index.partition("\n\n")
        index = f"{title}\n\n" + "{.facts}\n" + " · ".join(links) + f"\n\n{text}"
    for title, lessons in course.parts.items():
        entries = []
        for number, lesson in enumerate(lessons, 1):
            write(lesson.page, course.lesson(lesson))
            short = re.split(": |, ", lesson.title)[0]
            entries.append(f"{number}. {short} <{lesson.page}>")
        index += tree(entries, title)
    entries = [f"{EXERCISES}/README.md"]
    for part, tasks in course.tasks.items():
        write(tasks[0].page, course.exercises(part))
        entries.append(f"{part}: {len(tasks)} <{tasks[0].page}>")
    index += tree(entries, "Exercises")
    for source in course.common:
        explained = set()
        page = course.title(source, f"`{source.file}`", explained)
        write(source.page, page + course.prose(source, source.doc, explained) + source.code())
    others = [*course.markdown, *(source.page for source in course.common)]
    index += tree([page for page in others if page != entries[0]], "Pages")
    write("index.md", index)
    for file in course.markdown:
        write(file, course.linked((COURSE / file).read_text(encoding="utf-8"), file))
    shutil.copytree(
        COURSE / "playground/pages/figures",
        out / "playground/pages/figures",
        ignore=lambda _, names: [name for name in names if not name.endswith(".png")],
    )


if __name__ == "__main__":
    main()
