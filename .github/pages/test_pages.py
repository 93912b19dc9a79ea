"""What the web pages are made of, and how they behave in a browser.

Those in a browser are skipped without Chromium or Google Chrome.
"""

import ast
import collections
import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import filelock
import nbclient
import nbformat
import notebook
import pages
import pytest
import recordings
from playwright.sync_api import sync_playwright

ROOT = pages.COURSE
LESSON = "playground/manual_data_parallel.html"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)


@pytest.fixture(scope="module")
def course():
    """The course, as its pages see it."""
    return pages.Course()


def words(text):
    """Return the words and numbers of a text, with how often it has each."""
    return collections.Counter(re.findall(r"[a-z0-9]+", text.lower()))


def test_no_word_of_a_docstring_is_lost(course):
    """The page of a lesson has each word at least as often, and so have those of the exercises."""
    for lesson in course.lessons:
        parts = re.split(r'<div class="code.*?</div>', course.lesson(lesson), flags=re.S)
        assert set(words(lesson.title + lesson.doc) - words("".join(parts))) <= {"run", "it"}
    for part, tasks in course.tasks.items():
        text = "".join(task.title + task.doc for task in tasks)
        assert not words(text) - words(course.exercises(part))


def functions(source):
    """Return what each function of a file does: its tree, without comments."""
    body = ast.parse(source.path.read_text()).body
    return {node.name: ast.dump(node) for node in body if hasattr(node, "name")}


def test_the_code_is_whole_and_what_is_new_is_never_folded(course):
    """Each line is there once, in order. A fold names a lesson with the same function."""
    by_name = {lesson.path.name: lesson for lesson in course.lessons}
    for number, lesson in enumerate(course.lessons):
        code = lesson.code(course.lessons[:number])
        assert re.findall(r'id="L(\d+)"', code) == [str(i + 1) for i in range(len(lesson.lines))]
        folded = "".join(re.findall(r"<details>.*?</details>", code, re.S))
        assert "# NEW:" not in folded and 'class="line new"' not in folded
        assert "<b>train</b>" not in folded and "<b>talk</b>" not in folded
        for name, origin in re.findall(r"<b>(\w+)</b> unchanged from <a [^>]*>([\w.]+)<", folded):
            assert functions(lesson)[name] == functions(by_name[origin])[name]
            assert course.lessons.index(by_name[origin]) < number
    pipeline = by_name["pipeline_parallel.py"].code(course.lessons[:1])
    for helper in ("cut", "connect", "check_flags"):
        assert f"<summary><b>{helper}</b> · " in pipeline


@pytest.mark.parametrize("part", ["Run it", "Try breaking it", "The next lesson"])
def test_a_lesson_that_lacks_a_part_stops_the_build(course, monkeypatch, part):
    """Its page would lack it, too. The error has the name of the lesson."""
    lesson = course.lessons[5]
    monkeypatch.setattr(lesson, "doc", lesson.doc.replace(part, "..."))
    with pytest.raises(pages.LackingError, match=f"{lesson.file}: .*{part}"):
        course.lesson(lesson)


def test_a_question_without_an_answer_stops_the_build(course, monkeypatch):
    """A click would show nothing."""
    lesson = course.lessons[5]
    monkeypatch.setitem(course.answers, f"`{lesson.path.name}`", "1. The only answer.\n")
    with pytest.raises(pages.LackingError, match=f"{lesson.file}: .*no answer to question 2"):
        course.lesson(lesson)


@pytest.mark.parametrize("name", ["deadlock", "bucket", "pipeline"])
def test_a_recorded_run_has_the_calls_of_a_new_one(name, tmp_path):
    """Ranks, kinds of calls, sizes and bytes are those that are committed. Times differ.

    So may the numbers of calls, because a call of one rank may fall into the next step of another.
    """
    committed = recordings.FOLDER / f"{name}.html"
    assert committed.stat().st_size < 300_000 and str(Path.home()) not in committed.read_text()
    recordings.record(name, tmp_path / "page.html")
    for rank, calls in recordings.calls(committed).items():
        again = recordings.calls(tmp_path / "page.html")[rank]
        assert set(again) == set(calls) != set()


STUB = """#!/bin/sh
echo "{program} $*"
case "$*" in
playground/single_gpu.py*) exec {python} "$@" --dataset digits ;;
esac
"""


def stub(monkeypatch, folder):
    """Put scripts in the place of python and torchrun, as the cells of a notebook start them."""
    for program in ("python", "torchrun"):
        (folder / program).write_text(STUB.format(program=program, python=sys.executable))
        (folder / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def execute(made, folder):
    """Let Jupyter run a notebook in a folder."""
    nbclient.NotebookClient(made, timeout=600, resources={"metadata": {"path": folder}}).execute()


def test_the_notebook(course, monkeypatch, tmp_path):
    """It is what the docstrings make of it. Jupyter runs its cells, with the docstrings' commands.

    test_readme.py runs these commands. Here a script takes their place, and runs only one of them.
    """
    made = notebook.make()
    assert nbformat.read(notebook.NOTEBOOK, 4) == made
    sources = "\n".join(cell.source for cell in made.cells)
    for path in re.findall(r"[\w/]+/\w+\.(?:py|md|png)", sources):
        assert (ROOT / path).exists(), path
    commands = re.findall(r"^!((?:python|torchrun) .*?)(?: \{device\})?$", sources, re.M)
    docstrings = " ".join("".join(lesson.doc for lesson in course.lessons).split())
    assert len(commands) > 8 and all(command in docstrings for command in commands[1:])
    stub(monkeypatch, tmp_path)
    execute(made, ROOT / "run")
    outputs = [output.get("text", "") for cell in made.cells for output in cell.get("outputs", ())]
    printed = "".join(outputs).splitlines()
    assert [line for line in printed if line.startswith(("python ", "torchrun "))] == commands
    assert any(line.startswith("epoch 3/3  loss ") for line in printed)


def test_the_notebook_without_the_course(monkeypatch, tmp_path):
    """It needs one line, the address of the repository. Without it, it stops with a sentence."""
    stub(monkeypatch, tmp_path)
    made = notebook.make()
    made.cells = made.cells[:2]
    setup = made.cells[1]
    for address, words in (("", "Write the address "), ("/nowhere", "/nowhere could not ")):
        setup.source = re.sub('^REPOSITORY = ".*?"', f'REPOSITORY = "{address}"', setup.source)
        with pytest.raises(nbclient.exceptions.CellExecutionError):
            execute(made, tmp_path)
        [error] = [output for output in setup.outputs if output.output_type == "error"]
        assert len(error.traceback) == 1 and error.traceback[0].startswith(words)
    repository = tmp_path / "repository"
    (repository / "playground").mkdir(parents=True)
    (repository / "playground/file").touch()
    git = ["git", "-C", repository, "-c", "user.name=me", "-c", "user.email=me@localhost"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    setup.source = setup.source.replace("/nowhere", str(repository))
    execute(made, tmp_path)
    assert (tmp_path / "course/playground").is_dir()


@pytest.fixture(scope="session")
def site(tmp_path_factory, worker_id):
    """The pages, made once for all workers of pytest by the command that a user types."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "site"
    with filelock.FileLock(f"{folder}.lock"):
        if not (folder / "index.html").exists():
            subprocess.run([ROOT / "run/pages.sh", folder], check=True)
    return folder


class Page(HTMLParser):
    """What a page links to, and the names of its places."""

    def __init__(self, path):
        super().__init__()
        self.targets, self.places = [], {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.places.add(attributes.get("id"))
        if tag not in ("form", "meta"):
            self.targets += [attributes[name] for name in ("href", "src") if attributes.get(name)]


def test_links(site):
    """Each link leads to a file of the site, and to a place in it that exists."""
    parsed = functools.cache(Page)
    for page in site.rglob("*.html"):
        for target in parsed(page).targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                assert parts.scheme in ("http", "https"), (page, target)
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert path.is_file(), (page, target)
            if path.suffix == ".html" and "recorded" not in path.parts:
                assert unquote(parts.fragment) in parsed(path).places, (page, target)


def test_the_way_through_the_course(site, course):
    """What is next, from the front page: the lessons, the exercises of each part, other pages."""
    expected = [lesson.page for lesson in course.lessons] + [f"{pages.EXERCISES}/README.md"]
    expected += [tasks[0].page for tasks in course.tasks.values()]
    page, found = site / "index.html", []
    while following := re.search(r'class="next-page" href="([^"]+)"', page.read_text()):
        page = (page.parent / following[1]).resolve()
        found.append(str(page.relative_to(site.resolve()).with_suffix(".md")))
    assert found[: len(expected) + 1] == [*expected, "playground/README.md"]


@pytest.fixture(scope="session")
def server(site):
    """The address of a server of the site."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    handler = functools.partial(Handler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture(params=["folder", "http"])
def address(request):
    """Where the browser finds the site: in a folder, or at a server."""
    if request.param == "http":
        return request.getfixturevalue("server")
    return f"file://{request.getfixturevalue('site')}"


@pytest.fixture(scope="session")
def browser():
    """A browser without a window."""
    if BROWSER is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser):
    """A tab of the browser. The test fails if a script in a page fails, or asks for a far file."""
    context = browser.new_context(viewport={"width": 1400, "height": 950})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab, errors, asked = context.new_page(), [], []
    tab.set_default_timeout(60_000)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("request", lambda request: asked.append(urlsplit(request.url)))
    yield tab
    context.close()
    # The search shows excerpts, too. In a folder, a browser does not let it read the pages.
    assert [error for error in errors if error != "Failed to fetch"] == []
    assert {(each.scheme, each.hostname) for each in asked} <= {
        ("file", None),
        ("file", ""),
        ("http", "127.0.0.1"),
        ("data", None),
        ("blob", None),
    }


def test_a_lesson(tab, address):
    """Its three views, tips, answers, commands to copy, a recorded run, and the way to the next."""
    tab.goto(f"{address}/{LESSON}")
    join, new = tab.locator(".code[data-file] .line", has_text="def fit("), tab.locator(".new")
    button = functools.partial(tab.get_by_role, "button")
    folded = tab.locator(".code[data-file] details .line").last
    assert new.first.is_visible() and not folded.is_visible() and join.is_visible()
    button(name="New ideas").click()
    assert new.first.is_visible() and not folded.is_visible() and not join.is_hidden()
    button(name="All lines").click()
    assert folded.is_visible()
    button(name="Folded").click()
    assert not folded.is_visible()

    answer = tab.locator("details.more", has_text="Answer").first
    assert not answer.locator("p").first.is_visible()
    answer.locator("summary").click()
    assert answer.locator("p").first.is_visible()
    word = tab.locator("abbr", has_text="global batch").first
    word.hover()
    assert "of one step, over all ranks" in word.evaluate(
        "e => getComputedStyle(e, '::after').content"
    )

    block = tab.locator("div.highlight-console").first
    block.hover()
    block.locator("button.copybtn").click()
    tab.locator("button.copybtn.success").wait_for()
    copied = "navigator.clipboard.readText()"
    assert tab.evaluate(copied).strip() == "python playground/manual_data_parallel.py -g 2"

    question = tab.locator(".recording").first
    assert question.locator("iframe").count() == 0
    question.get_by_role("button", name="one for each image").click()
    assert question.locator("button.wrong").count() == question.locator("button.right").count() == 1
    assert question.locator("p").first.is_visible()
    chart = question.frame_locator("iframe").locator("svg#chart")
    chart.get_by_text("rank 1", exact=True).wait_for()

    tab.locator("a.next-page").click()
    tab.wait_for_url("**/distributed_data_parallel.html")
    tab.locator("a.prev-page").click()
    tab.wait_for_url(f"**/{LESSON}")


def test_copy_the_file(tab, server, course):
    """The clipboard has each lesson, byte by byte."""
    for lesson in course.lessons:
        tab.goto(f"{server}/{lesson.page.removesuffix('.md')}.html")
        tab.get_by_role("button", name="Copy the file").click()
        tab.get_by_role("button", name="Copied").wait_for()
        assert tab.evaluate("navigator.clipboard.readText()") == lesson.path.read_text()


def test_search_and_colours(tab, address):
    """The lesson of a name, an idea or a word in code comes first. A wish for dark is followed."""
    for wanted, title in (
        ("tensor parallel", "Tensor parallelism"),
        ("deadlock", "Blocking messages"),
        ("DDP", "DistributedDataParallel"),
        ("zigzag", "Context parallelism"),
        ("reduce_scatter", "Collectives"),
    ):
        tab.goto(f"{address}/{LESSON}")
        tab.fill("input[name=q]", wanted)
        tab.press("input[name=q]", "Enter")
        found = tab.locator("ul.search a").first
        found.wait_for()
        assert found.inner_text() == title
    colour = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(colour)
    tab.emulate_media(color_scheme="dark")
    assert tab.evaluate(colour) != light


def test_no_page_is_wider_than_a_phone(browser, site):
    """Wide tables and outputs scroll by themselves. A tip opens at a touch."""
    phone = {"width": 390, "height": 844}
    context = browser.new_context(viewport=phone, is_mobile=True, has_touch=True)
    tab = context.new_page()
    width = "Math.max(...[...document.querySelectorAll('html, .content')].map(e => e.scrollWidth))"
    for page in sorted(site.rglob("*.html")):
        if "recorded" not in page.parts:
            tab.goto(f"file://{page}")
            assert tab.evaluate(width) <= 390, page
    tab.goto(f"file://{site}/{LESSON}")
    tab.locator("abbr", has_text="global batch").first.tap()
    shown = "getComputedStyle(document.activeElement, '::after').content"
    assert "of one step, over all ranks" in tab.evaluate(shown)
    context.close()
