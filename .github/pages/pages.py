"""Make the Markdown of the web pages from the course's files, which are read as they are.

    python pages.py FOLDER

Sphinx makes the pages from that (`run/pages.sh`). A lesson's page has its docstring as prose, its
code with what a reader can skip folded, and the answers to its questions behind a click.
"""

import ast
import html
import json
import os
import re
import shutil
import sys
from difflib import unified_diff
from itertools import pairwise
from pathlib import Path
from textwrap import dedent, shorten

from recordings import RECORDINGS, page_of

COURSE = Path(__file__).resolve().parents[2]
EXERCISES = "playground/exercises"
ERRORS = "playground/pages/troubleshooting.md"
REPOSITORY = os.environ.get("GITHUB_REPOSITORY")  # OWNER/NAME. Only the hosted workflow has it
GITHUB = f"https://github.com/{REPOSITORY}"
NOTEBOOK = "blob/main/run/notebook.ipynb"
COLAB = f"https://colab.research.google.com/github/{REPOSITORY}/{NOTEBOOK}"
KAGGLE = f"https://www.kaggle.com/kernels/welcome?src={GITHUB}/{NOTEBOOK}"
COMMAND = re.compile(r"(?:[A-Z_0-9]+=\S+ )*(?:python|torchrun|tensorboard|git|pip|run/\w+\.sh) ")
# What the first page shows in place of its picture.
FIRST_RUN = """Two processes train a model, and average its gradients ([lesson
6](playground/manual_data_parallel.md)). Red is waiting. Zoom in, and point at anything:

<div class="recording first">
<p><a href="recorded/each_gradient.html">Show the recorded run</a></p></div>
"""
PLAYED = {  # a figure to play with, and what its link says
    "manual_pipeline": ("pipeline", "Play with a pipeline"),
    "model_parallel": ("pipeline", "Play with a pipeline"),
    "choosing": ("memory", "Play with what a rank holds"),
}
# A docstring's blocks: a numbered list, another list, indented lines, or a paragraph.
BLOCK = re.compile(
    r"(?P<list>(?:^ *\d+\. .*\n(?:^ {3,}\S.*\n)*)+)"
    r"|(?P<bullets>(?:^- .*\n(?:^ +\S.*\n|^\n(?=^ {2,}\S))*)+)"
    r"|(?P<indented>(?:^ .*\n(?:^\n(?=^ ))*)+)"
    r"|(?P<text>(?:^(?!- )\S.*\n)+)",
    re.M,
)
# Where a lesson says that a reader can stop, and where another part of it begins.
PART = re.compile(r"# (You can stop here.*)\.|# -{10} (.*) -{10}")
# Words of a search about a problem. For these words, these pages come first.
SYMPTOMS = {
    "playground/pages/hangs": "hang stuck deadlock NCCL timeout timed out watchdog desync py-spy",
    "playground/pages/troubleshooting": "error message symptom crash NCCL timeout OOM out of"
    " memory connection refused closed reset address already in use port NaN stuck deadlock hang"
    " uneven mismatch",
    "playground/pages/stragglers": "slow rank GPU straggler late",
    "playground/pages/choosing": "does my model fit how much memory calculator estimate",
    "playground/exercises/README": "exercises puzzles",
    "run/README": "Slurm PBS MPI ssh cluster several machines Kubernetes",
    "playground/pages/installing": "install CPU one GPU Windows macOS Docker detectron2",
}
# Words of the glossary with a plain meaning, too, in which lessons often use them.
PLAIN = {"block", "buffer", "gather", "handle", "load", "norm", "pass", "reduce", "scatter"}
PLAIN |= {"stage", "store", "trace", "word"}


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
        self.first = tree.body[0].end_lineno + 1  # the number of the first line of code
        while not self.lines[self.first - 1]:
            self.first += 1
        kinds = ast.Import | ast.ImportFrom
        self.imports = [node for node in tree.body if isinstance(node, kinds)]
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        self.lit = set()  # the numbers of lines with a new idea
        for number, line in enumerate(self.lines, 1):
            if "# NEW:" in line:
                self.lit |= self._explained(number, statements)

    def _explained(self, number: int, statements: list[ast.stmt]) -> set[int]:
        """Return the lines of a comment that begins with NEW, and of the statement below it."""
        last = number
        while self.lines[last - 1].lstrip().startswith("#"):
            last += 1
        node = next((node for node in statements if node.lineno == last), None)
        if node:
            # Of what has a body, such as a function or a loop, only the head.
            last = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
        return {*range(number, last + 1)}

    def show(self, first: int = 0, last: int = 0) -> str:
        """Return Markdown that shows lines, or all of the code, with new ideas lit."""
        first, last = first or self.first, last or len(self.lines)
        while not self.lines[first - 1]:
            first += 1
        while not self.lines[last - 1]:
            last -= 1
        lit = ",".join(str(n - first + 1) for n in sorted(self.lit) if first <= n <= last)
        lit = f":emphasize-lines: {lit}\n" if lit else ""
        options = f":language: python\n:lines: {first}-{last}\n:lineno-match:\n{lit}"
        return f"```{{literalinclude}} {self.path.name}\n{options}```\n\n"

    def parts(self) -> list[tuple[int, int, str]]:
        """Return the parts of the code: first line, last line, and a label if one can skip it."""
        labels = {self.first: ""}
        if "Builds on:" in self.doc:  # an earlier lesson has shown the imports that are not new
            first, last = self.imports[0].lineno, self.imports[-1].end_lineno
            new = sorted(n for n in self.lit if first <= n <= last)
            for before, after in pairwise([first - 1, *new, last + 1]):
                begin = before + 1
                while self.lines[begin - 1].startswith(" "):
                    begin += 1
                if after - begin > 2:
                    labels |= {begin: "imports", after: ""}
        for number, line in enumerate(self.lines, 1):
            if part := PART.match(line):
                label = part[1] or part[2]
                labels[number] = label if label.startswith(("You can stop", "Unchanged")) else ""
        parts = []
        for first, end in pairwise([*labels, len(self.lines) + 1]):
            has_new_idea = self.lit & {*range(first, end)}
            parts.append((first, end - 1, "" if has_new_idea else labels[first]))
        return parts

    def code(self) -> str:
        """Return the code as Markdown, with the parts that one can skip folded."""
        result = ""
        for first, last, label in self.parts():
            shown = self.show(first, last)
            result += details(f"{label} · {last - first + 1} lines", shown) if label else shown
        return result

    def difference(self, base: "Source") -> str:
        """Return what has changed below the docstring since another lesson, folded."""
        before, after = base.lines[base.first - 1 :], self.lines[self.first - 1 :]
        changes = "\n".join([*unified_diff(before, after, n=2, lineterm="")][2:])
        label = f"What has changed since {base.path.name}"
        return details(label, f"```diff\n{changes}\n```")


def relative(page: str, file: str) -> str:
    """Return the path of a page, as seen from the page of a file."""
    return os.path.relpath(page, Path(file).parent)


def details(label: str, text: str) -> str:
    """Return Markdown that is shown after a click on its label."""
    return f'<details class="more"><summary>{label}</summary>\n\n{text}\n\n</details>\n\n'


class Course:
    """The course's files, and what their pages say to each other."""

    def __init__(self):
        self.parts, self.tasks = {}, {}  # by the name of the part
        self.ideas = dict(SYMPTOMS)
        self.keywords = {f"{page}.md": ", ".join(self.ideas[page].split()) for page in self.ideas}
        table = (COURSE / EXERCISES / "README.md").read_text(encoding="utf-8")
        self.rows = self.chapters("playground/README.md")
        for title, text in self.rows.items():
            rows = re.findall(r"^\| \d+\. \[`\w+\.py`\]\((\S+)\) \| (.*) \| (.*) \|$", text, re.M)
            if not rows:
                tools = text
                continue
            self.parts[title] = [Source(COURSE / "playground" / row[0]) for row in rows]
            for lesson, (_, idea, also) in zip(self.parts[title], rows, strict=True):
                words = [lesson.path.name, lesson.title, idea, also]
                self.ideas[lesson.page.removesuffix(".md")] = " ".join(words)
                self.keywords[lesson.page] = ", ".join(re.findall(r"\w+", also))
            part = title.partition(":")[0]
            files = re.findall(r"\w+\.py", re.search(rf"^\| {part} \| (.*)", table, re.M)[1])
            self.tasks[part] = [Source(COURSE / EXERCISES / file) for file in files]
            for task in self.tasks[part]:
                task.page = f"{EXERCISES}/part{len(self.parts)}.md"
                task.anchor = "#" + task.path.stem.replace("_", "-")
        self.lessons = [lesson for lessons in self.parts.values() for lesson in lessons]
        self.common = [Source(path) for path in sorted(COURSE.glob("common/[a-z]*.py"))]
        pages = [*COURSE.glob("playground/**/*.md"), *COURSE.glob("[a-z]*/README.md")]
        pages.append(COURSE / ".github/CONTRIBUTING.md")
        files = {str(path.relative_to(COURSE)) for path in pages}
        self.markdown = sorted(files, key=lambda file: (not file.startswith("playground"), file))
        self.pages = {"README.md": "index.md"} | {file: file for file in self.markdown}
        self.pages[EXERCISES] = self.pages[f"{EXERCISES}/"] = f"{EXERCISES}/README.md"
        tasks = [task for tasks in self.tasks.values() for task in tasks]
        self.sources = [*self.common, *tasks, *self.lessons]
        for source in self.sources:
            # Docstrings name most files without their folder.
            for name in (source.file, source.file.removeprefix("playground/"), source.path.name):
                self.pages[name] = source.page + source.anchor
        # A tool has no page of its own, but one that is about it.
        for file, page in re.findall(r"^\| \[`(tools/.*?)`\].*?\((pages/\w+\.md)", tools, re.M):
            for name in (f"playground/{file}", file, Path(file).name):
                self.pages[name] = f"playground/{page}"
        for file in self.markdown:
            self.pages.setdefault(Path(file).name, file)
            if file.startswith(("playground/pages/", "run/")):
                headings = re.findall("^#+ .*", (COURSE / file).read_text(encoding="utf-8"), re.M)
                self.ideas.setdefault(file.removesuffix(".md"), " ".join(headings))
        for page, words in self.ideas.items():
            self.ideas[page] = " " + re.sub("[^a-z0-9.]+", " ", words.lower())
        glossary = (COURSE / "playground/pages/glossary.md").read_text(encoding="utf-8")
        self.tips = {}
        for words, meaning in re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]*\|$", glossary, re.M):
            for word in words.replace("`", "").split(", "):
                if word not in PLAIN:
                    meaning = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", meaning)
                    self.tips[word] = self.tips[word[0].upper() + word[1:]] = meaning
        longest_first = "|".join(sorted(map(re.escape, self.tips), key=len, reverse=True))
        # Code between backticks, an address, a sign that Markdown reads, or a word of the glossary.
        self.words = re.compile(
            r"`([^`\n]+)`|(https?://[^\s)]*\w)|([\\*<>\[\]#$|])"
            rf"|(?<![\w-])({longest_first})(?:e?s)?(?![\w-])"
        )
        self.errors = []  # of each row of ERRORS: its messages, and what you see
        self.named = self.with_rows((COURSE / ERRORS).read_text(encoding="utf-8"))
        self.explained, self.drawn = set(), set()  # the meanings and pictures of a page
        self.answers = self.chapters("playground/pages/answers.md")
        self.pictures = self.chapters("playground/pages/pictures.md")

    def chapters(self, file: str) -> dict[str, str]:
        """Return the text below each heading of a page."""
        parts = re.split(r"^## (.*)\n", (COURSE / file).read_text(encoding="utf-8"), flags=re.M)
        return dict(zip(parts[1::2], parts[2::2], strict=True))

    def with_rows(self, text: str) -> str:
        """Return the text of ERRORS with a name for each row, for the search."""

        def named(row: re.Match) -> str:
            seen = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", row[1])
            self.errors.append([re.findall("`([^`]+)`", seen), seen.replace("`", "")])
            return f'| <a id="row-{len(self.errors)}"></a>{row[1]} |'

        return re.sub(r"^\| (?!what you see|---)(.*?) \|(?= )", named, text, flags=re.M)

    def linked(self, text: str, file: str, here: str | None = None) -> str:
        """Return Markdown of a file with links to pages, as seen from a page in another place.

        A file without a page is on GitHub, if the repository is known. Otherwise its name stays.
        """

        def link(match: re.Match) -> str:
            image, words, target, name = match.groups()
            if name:
                path = os.path.normpath(Path(file).parent / name)
                page = self.pages.get(path, self.pages.get(name))
                own = not page or page == self.pages.get(here or file)
                return match[0] if own else f"[{match[0]}]({relative(page, here or file)})"
            if not target:
                return match[0]
            target, sharp, anchor = target.partition("#")
            if "://" in target or (not target and here is None):
                return match[0]
            path = os.path.normpath(Path(file).parent / target) if target else file
            if image:
                return f"![{words}]({relative(path, here or file)})"
            if path in self.pages:
                return f"[{words}]({relative(self.pages[path], here or file)}{sharp}{anchor})"
            return f"[{words}]({GITHUB}/tree/main/{path})" if REPOSITORY else words

        code = r"^ *```.*?^ *```|^ {4}[^\n]*"
        code_link_name = rf"{code}|(!?)\[([^]]*)\]\(([^)\s]+)\)|`([\w./]+)`"
        return re.sub(code_link_name, link, text, flags=re.M | re.S)

    def inline(self, text: str, file: str) -> str:
        """Return a paragraph of a docstring as Markdown, with links and tips for words."""

        def written(match: re.Match) -> str:
            code, address, sign, word = match.groups()
            page = self.pages.get(code)
            if page and page != self.pages[file]:
                return f"[`{code}`]({relative(page, file)})"
            if address:
                return f"<{address}>"
            if sign:
                return f"\\{sign}"
            if code or self.tips[word] in self.explained:
                return match[0]
            self.explained.add(self.tips[word])
            tip = html.escape(self.tips[word])
            return f'<abbr tabindex="0" data-tip="{tip}">{match[0]}</abbr>'

        return self.words.sub(written, text)

    def questions(self, text: str, lesson: Source) -> str:
        """Return the questions of a lesson, each with its answer behind a click."""
        answers = self.answers.get(f"`{lesson.path.name}`", "")
        answers = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", answers, re.M | re.S)
        answers = {number: dedent(f"   {answer}") for number, answer in answers}
        result = ""
        for number, question in re.findall(r"^ *(\d+)\. (.*?)(?=^ *\d+\. |\Z)", text, re.M | re.S):
            if number not in answers:
                raise ValueError(f"{lesson.file}: answers.md has no answer to question {number}")
            question = self.inline(" ".join(question.split()), lesson.file)
            answer = self.linked(answers[number], "playground/pages/answers.md", lesson.file)
            result += f"**{number}.** {question}\n\n{details('Answer', answer.strip())}"
        return result

    def prose(self, source: Source, text: str) -> str:
        """Return a part of a docstring as Markdown. Pictures stand below what names them."""
        result = ""
        for match in BLOCK.finditer(text):
            block = dedent(match[0]).rstrip()
            if block == "Run it:":  # the heading above says so
                continue
            if match.lastgroup in ("text", "bullets"):
                result += self.inline(block, source.file) + "\n\n"
                result += self.drawings(source, *re.findall(r"figures/\w+\.\w+", block))
            elif match.lastgroup == "list":
                result += self.questions(match[0], source)
            else:
                lines = re.sub(r" *\\\n *", " ", block).splitlines()
                commands = [f"$ {line}" if COMMAND.match(line) else line for line in lines]
                kind = "console" if commands != lines else "text"
                result += f"```{kind}\n" + "\n".join(commands) + "\n```\n\n"
        return result

    def sections(self, lesson: Source) -> dict[str, str]:
        """Return the parts of a lesson's docstring: of it, no word is lost.

        Raises:
            ValueError: one of the parts is not there.
        """
        parts = re.fullmatch(
            r"\n(?P<before>.*?)(?P<run>^Run it.*?)(?P<broken>^Try breaking it.*?)"
            r"(?P<write>^Now (?:write|repair).*?)?(?:^Builds on: (?P<base>\w+\.py)\n)?"
            r"(?P<next>^(?:The next|This is the last) lesson.*)",
            lesson.doc,
            re.M | re.S,
        )
        if not parts:
            raise ValueError(
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

    def drawings(self, lesson: Source, *wanted: str) -> str:
        """Return those of a page's pictures that have not been drawn, with their texts."""
        result = ""
        for title, text in self.pictures.items():
            found = "![" in text and any(f"{each})" in text for each in wanted)
            if found and title not in self.drawn:
                self.drawn.add(title)
                text = self.linked(text, "playground/pages/pictures.md", lesson.file)
                result += f'<div class="picture">\n\n**{title}**\n\n{text.strip()}\n\n</div>\n\n'
        return result

    def recordings(self, lesson: Source) -> str:
        """Return the recorded runs of a lesson, each behind a question about it."""
        result = ""
        for name, each in RECORDINGS.items():
            if lesson.file not in each.command:
                continue
            page = relative(f"recorded/{name}.html", lesson.file)
            buttons = ""
            for answer in sorted(each.answers):
                right = " data-right" * (answer == each.answers[0])
                buttons += f'<button type="button"{right}>{html.escape(answer)}</button>\n'
            result += f"```console\n$ {each.command}\n```\n\n"
            result += self.inline(each.question, lesson.file) + "\n\n"
            why = f'<p role="status" hidden>{html.escape(each.why)}</p>'
            result += f'<div class="recording">{buttons}{why}\n'
            result += f'<p><a href="{page}">Show the recorded run</a></p></div>\n\n'
        return "## A recorded run\n\n" + result if result else ""

    def title(self, source: Source, facts: str) -> str:
        """Return the head of a page: the file's name, some facts, and what it is."""
        self.explained, self.drawn = set(), set()
        if REPOSITORY:
            facts += f" · [the file on GitHub]({GITHUB}/blob/main/{source.file})"
        lead = self.inline(f"{source.title}.", source.file)
        words = " ".join(source.title.replace("`", "").split())
        tab = f"```{{title}} {words} ({source.path.name})\n```"
        return f"# {source.path.name}\n\n{tab}\n\n{{.facts}}\n{facts}\n\n{{.lead}}\n{lead}\n\n"

    def lesson(self, lesson: Source) -> str:
        """Return the page of a lesson."""
        sections = self.sections(lesson)
        title, part = next(part for part in self.parts.items() if lesson in part[1])
        facts, base = f"{title} · Lesson {part.index(lesson) + 1} of {len(part)}", None
        if sections["base"]:
            base = next(each for each in self.lessons if each.path.name == sections["base"])
            facts += f" · Builds on: [`{base.path.name}`]({relative(base.page, lesson.file)})"
        page = self.title(lesson, facts)
        page += self.prose(lesson, sections["before"])
        page += "## Run it\n\n" + self.prose(lesson, sections["run"])
        page += "## The idea\n\n" + self.prose(lesson, sections["idea"])
        page += self.drawings(lesson, f"/{lesson.path.name}") + player(lesson.page)
        page += self.recordings(lesson)
        page += f"## The code\n\n{{download}}`{lesson.file} <{lesson.path.name}>` has"
        page += f" {len(lesson.lines)} lines. Those with a new idea are lit, and what you can skip"
        page += f" is folded.\n\n{lesson.code()}"
        page += "".join(map(lesson.difference, self.compared(lesson) or [base] * bool(base)))
        broken = sections["broken"].replace("Try breaking it, in", "In", 1)
        page += "## Try breaking it\n\n" + self.prose(lesson, broken)
        page += "## What next\n\n" + self.prose(lesson, sections["write"])
        return page + self.prose(lesson, sections["next"])

    def compared(self, lesson: Source) -> list[Source]:
        """Return the lessons with which a docstring's commands (git diff) compare this one."""
        names = set()
        pairs = re.findall(r"playground/(\w*)\{(\w*),(\w*)\}(\w*)\.py", lesson.doc)
        for begin, other, own, end in pairs:
            if begin + own + end == lesson.path.stem:
                names.add(begin + other + end)
        return [each for each in self.lessons if each.path.stem in names]

    def exercises(self, part: str) -> str:
        """Return the page with the exercises of a part."""
        page = f"# Exercises of {part[0].lower()}{part[1:]}\n\n"
        page += "[How they work](README.md)\n\n"
        for task in self.tasks[part]:
            self.explained = set()
            page += f"## `{task.path.stem}`\n\n"
            page += "{.lead}\n" + self.inline(f"{task.title}.", task.file) + "\n\n"
            text = re.sub(r"^Lesson: (\S+)\.$", r"Lesson: `\1`.", task.doc, flags=re.M)
            page += self.prose(task, text.removeprefix("\n"))
            page += details("The file", task.show())
            for number, hint in enumerate(hints(task), 1):
                page += details(f"Hint {number}", f"<pre>{html.escape(hint)}</pre>")
        return page


def hints(task: Source) -> list[str]:
    """Return the three hints of an exercise, from the file that checks it."""
    check = COURSE / EXERCISES / "judging/checks" / task.path.name
    for node in ast.parse(check.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "HINTS":
            return ast.literal_eval(node.value).strip().split("\n\n")
    raise ValueError(f"{check}: no HINTS")


def described(text: str) -> str:
    """Return the first sentences of a page, for a search engine."""
    for paragraph in text.split("\n\n"):
        if not paragraph.startswith(("#", "```", "{.facts}", "<", "---")):
            paragraph = re.sub(r"\[([^]]*)\]\([^)]*\)|<[^>]*>|[`*\\]", r"\1", paragraph)
            return shorten(paragraph.removeprefix("{.lead}"), 160, placeholder=" ...")
    return ""


def player(page: str) -> str:
    """Return a figure to play with, if a page has one."""
    if Path(page).stem not in PLAYED:
        return ""
    name, words = PLAYED[Path(page).stem]
    link = f'<a href="{relative(f"_static/{name}.html", page)}">{words}</a>'
    return f'<div class="recording"><p>{link}</p></div>\n\n'


def tree(entries: list[str], caption: str = "") -> str:
    """Return the hidden list of pages from which Sphinx makes the navigation."""
    options = ":hidden:\n" + f":caption: {caption}\n" * bool(caption)
    return "\n```{toctree}\n" + options + "\n" + "\n".join(entries) + "\n```\n"


def main() -> None:
    """Write all pages into a folder, which is emptied first."""
    out = Path(sys.argv[1])
    shutil.rmtree(out, ignore_errors=True)
    course = Course()

    about = {}

    def write(page: str, text: str) -> None:
        if page.endswith(".md"):
            about[page] = described(text)
            known = {"keywords": course.keywords.get(page), "description": about[page]}
            known = {name: words for name, words in known.items() if words}
            text = f"---\n{json.dumps({'myst': {'html_meta': known}})}\n---\n\n{text}"
        (out / page).parent.mkdir(parents=True, exist_ok=True)
        (out / page).write_text(text, encoding="utf-8")

    index = course.linked((COURSE / "README.md").read_text(encoding="utf-8"), "README.md")
    index = re.sub(r"!\[[^]]*\]\(\S*/watch\.\w+\)", FIRST_RUN, index)
    if REPOSITORY:
        links = [f"[The files]({GITHUB})", '<a href="pages.zip">these pages as one file</a>']
        links.append(f"the first ten as a notebook in [Colab]({COLAB}) or on [Kaggle]({KAGGLE})")
        title, _, text = index.partition("\n\n")
        index = f"{title}\n\n" + "{.facts}\n" + " · ".join(links) + f"\n\n{text}"
        index = index.replace("<address of this repository>", GITHUB)
    groups, below = {"The playground": [], "Going further": ["playground/README.md"]}, {}
    for title, lessons in course.parts.items():
        entries = []
        for number, lesson in enumerate(lessons, 1):
            write(lesson.page, course.lesson(lesson))
            name = lesson.path.stem.replace("_", "_\u200b")  # a long name breaks between words
            entries.append(f"{number}. {name} </{lesson.page}>")
        if title in groups:
            groups[title] = entries
            continue
        page = f"{lessons[0].path.parent.relative_to(COURSE)}/index.md"
        text = course.linked(course.rows[title], "playground/README.md", page)
        part = course.tasks[title.partition(":")[0]][0].page
        more = f"[Exercises of this part]({relative(part, page)})\n"
        write(page, f"# {title}\n{text}{more}" + tree(entries))
        groups["Going further"].append(page)
    entries = []
    for part, tasks in course.tasks.items():
        write(tasks[0].page, course.exercises(part))
        entries.append(f"{part}: {len(tasks)} </{tasks[0].page}>")
    below[f"{EXERCISES}/README.md"] = tree(entries)
    groups["Going further"].append(f"{EXERCISES}/README.md")
    for title, text in course.chapters("playground/pages/README.md").items():
        if files := re.findall(r"^\| \[(\w+\.md)\]", text, re.M):
            groups[title] = [f"playground/pages/{file}" for file in files]
    groups["To look up"] += ["run/README.md", "playground/pages/README.md"]
    groups["For contributors"] = [".github/CONTRIBUTING.md"]
    for source in course.common:
        page = course.title(source, f"`{source.file}`")
        write(source.page, page + course.prose(source, source.doc) + source.show())
    others = {*course.markdown}.difference(*groups.values())
    others = [*sorted(others), *(source.page for source in course.common)]
    below[".github/CONTRIBUTING.md"] = tree([f"/{page}" for page in others])
    for file in course.markdown:
        text = course.named if file == ERRORS else (COURSE / file).read_text(encoding="utf-8")
        text = course.linked(text, file)
        write(file, text + "\n" + player(file) + below.get(file, ""))
    write("index.md", index + "".join(tree(pages, title) for title, pages in groups.items()))
    # For programs that read (llmstxt.org). run/pages.sh copies the Markdown beside the pages.
    listed = "".join(f"- [{page}]({page}): {words}\n" for page, words in about.items())
    write("extra/llms.txt", f"# The PyTorch distributed playground\n\n{listed}")
    for name in RECORDINGS:
        write(f"extra/recorded/{name}.html", page_of(name))
    pictures = COURSE.glob("playground/pages/figures/*.[ps][nv]g")
    for path in [*pictures, *(source.path for source in course.sources)]:
        (out / path.relative_to(COURSE)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, out / path.relative_to(COURSE))


if __name__ == "__main__":
    main()
