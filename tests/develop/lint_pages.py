"""Check what the pages and the docstrings of the lessons name, and their form, without running it.

    python tests/develop/lint_pages.py

It prints how many lines of Python there are, and a line for each fault. Its status is 1 if there is
one. Whether commands print what is shown is checked by test_readme.py, which runs them.
"""

import re
import subprocess
import sys
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from fold import FOLD
from lessons import LESSONS, PATHS, ROOT, docstring

PAGES = {}
for pattern in ("*.md", "playground/**/*.md", "run/*.md", "tests/*.md", ".github/*.md"):
    for path in sorted(ROOT.glob(pattern)):
        PAGES[path.relative_to(ROOT)] = path.read_text()
LIST = PAGES[Path("playground/README.md")]
TESTS_README = PAGES[Path("tests/README.md")]
DOCSTRINGS = {lesson: docstring(lesson) for lesson in LESSONS}
FILES = set()
for folder in ("common", "playground", "tests"):
    FILES |= {path.name for path in (ROOT / folder).rglob("*.py")}
NAMES = r"(?:playground(?:/\w+)?|run|common|tests)/\w+\.(?:py|sh|sbatch)\b"
MADE_BY_THE_READER = ("playground/broken.py",)
# By hand are all lines but those below a fold, of pictures, and of the notebook.
CEILINGS = {"Python that is no lesson": 19_500, "lines by hand": 36_000}


def without_code(text):
    """Remove the code blocks with fences from a page."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def anchors(text):
    """Return the anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", without_code(text), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def too_wide(text):
    """Find lines above 100 columns. Tables, pictures and outside addresses may be wider."""
    for line in without_code(text).splitlines():
        may_be = line.startswith(("|", "!", "    ")) or "](http" in line
        if len(line) > 100 and not may_be:
            yield f"a line has more than 100 columns: {line}"


def broken_links(page, text):
    """Find links to files and sections that are not there, and names of scripts that are not."""
    prose = re.sub(r"`[^`\n]*`|\n", " ", text)
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists():
            yield f"there is no {link}"
        elif anchor and anchor not in anchors(target.read_text()):
            yield f"there is no section {link}"
    for name in re.findall(NAMES, text):
        if not (ROOT / name).exists() and name not in MADE_BY_THE_READER:
            yield f"there is no {name}"
    for name in set(re.findall(r"`(\w+\.py)`", text)) - FILES:
        yield f"there is no file {name}"


def rows_that_lean(text):
    """Find rows of tables that say nothing without the row above, which may be a different one."""
    for row in re.findall(r"^\| [Tt]he same\b.*", text, re.M):
        yield f"a row begins with the same: {row[:60]}"


def faults_of_figures():
    """Find figures that no page shows, and those on a page without words."""
    text = "".join(PAGES.values())
    shown = {Path(name).name: words for words, name in re.findall(r"!\[(.*?)\]\((.*?)\)", text)}
    for path in (ROOT / "playground" / "pages" / "figures").glob("*.svg"):
        if len(shown.get(path.name, "")) < 20:
            yield f"no page shows {path.name}, with words that say what is on it"


def faults_of_lessons():
    """Find what a docstring lacks. playground/README.md lists the lessons in order."""
    listed = []
    for part in re.split(r"^## ", LIST, flags=re.M):
        rows = re.findall(r"^\| (\d+)\. \[`(\w+)\.py`\]\((?:\w+/)?\2\.py\) \| .+ \|$", part, re.M)
        if [int(number) for number, _ in rows] != [*range(1, len(rows) + 1)]:
            yield "playground/README.md does not number the lessons of each part 1, 2, 3 ..."
        listed += [lesson for _, lesson in rows]
    if sorted(listed) != sorted(DOCSTRINGS):
        yield "playground/README.md does not list each lesson once"
    front = PAGES[Path("README.md")]
    for lesson in listed[:10]:
        if f"(playground/{lesson}.py)" not in front:
            yield f"README.md has no link to {lesson}.py"
    for lesson, following in zip(listed, [*listed[1:], None], strict=True):
        text = DOCSTRINGS.get(lesson, "")
        if len(text.splitlines()) > 50:
            yield f"{lesson}.py: its docstring has more than 50 lines"
        for heading in ("Run it", r".*\bprints?", "Try breaking it, in a copy", "  1[.] "):
            if not re.search(rf"^{heading}\b", text, re.M):
                yield f"{lesson}.py: the docstring has no line that begins with {heading}"
        last = text.strip().split("\n\n")[-1]
        end = f"The next lesson, {following}.py, " if following else ""
        if following and PATHS[lesson].parent != PATHS[following].parent:
            end = f"This is the last lesson of this part. The next part begins with {following}.py."
        if lesson == listed[9]:
            end = "This is the last lesson of the ten. playground/README.md has the others"
        if end not in last.replace("`", ""):
            yield f"{lesson}.py: the docstring does not end with: {end}"


def faults_of_tests():
    """Find tests that tests/README.md names, and that are not there."""
    text = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", TESTS_README):
        if f"def {name}(" not in text:
            yield f"tests/README.md: there is no test {name}"


def faults_of_workflows():
    """Find jobs that wait for a job that is not there. GitHub refuses such a file."""
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        for name, job in jobs.items():
            needs = job.get("needs", [])
            for other in {*([needs] if isinstance(needs, str) else needs)} - jobs.keys():
                yield f"{path.name}: {name} needs {other}, which is no job"


def count_lines():
    """Print how many lines there are. Find a sum above its ceiling, which may only be lowered."""
    words = ["git", "ls-files"]
    listed = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, check=True)
    lessons = {PATHS[lesson] for lesson in LESSONS}
    others = ("playground/museum/", "playground/your_script/", ".github/")  # read, or no machinery
    of_lessons = around = by_hand = 0
    for path in filter(Path.exists, map(ROOT.joinpath, listed.stdout.split())):
        text = path.read_text()
        lines = len(text.splitlines())
        fold = FOLD.search(text) if path in lessons else None
        folded = len(text[fold.start() :].splitlines()) if fold else 0
        of_lessons += lines * (path in lessons)
        is_read = path in lessons or str(path.relative_to(ROOT)).startswith(others)
        around += lines * (path.suffix == ".py" and not is_read)
        by_hand += (lines - folded) * (path.suffix not in (".svg", ".ipynb"))
    print(f"{of_lessons:,} lines of lessons, {around:,} of Python around them, {by_hand:,} by hand")
    for name, count in (("Python that is no lesson", around), ("lines by hand", by_hand)):
        if count > CEILINGS[name]:
            yield f"{name}: {count:,}, above the ceiling of {CEILINGS[name]:,}"


def main():
    """Print all faults. Returns the exit status."""
    found = []
    for page, text in PAGES.items():
        for fault in (*too_wide(text), *broken_links(page, text), *rows_that_lean(text)):
            found.append(f"{page}: {fault}")
    found += [
        *faults_of_figures(),
        *faults_of_lessons(),
        *faults_of_tests(),
        *faults_of_workflows(),
        *count_lines(),
    ]
    for fault in found:
        print(fault)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
