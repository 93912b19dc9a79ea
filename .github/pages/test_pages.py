"""What the web pages are made of, and how they behave in a browser.

Those in a browser are skipped without Chromium or Google Chrome.
"""

import collections
import functools
import html
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from itertools import product
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
        page = re.sub("^```diff.*?^```", "", course.lesson(lesson), flags=re.S | re.M)
        assert set(words(lesson.title + lesson.doc) - words(page)) <= {"run", "it"}
    for part, tasks in course.tasks.items():
        text = "".join(task.title + task.doc for task in tasks)
        assert not words(text) - words(course.exercises(part))


def test_the_code_is_whole_and_what_is_new_is_never_folded(course):
    """Each line below the docstring is there once, in order."""
    for lesson in course.lessons:
        shown, folded = [], set()
        for first, last, label in lesson.parts():
            lines = range(first, last + 1)
            shown += lines
            folded |= {*lines} if label else set()
        assert shown == [*range(lesson.first, len(lesson.lines) + 1)]
        assert "".join(lesson.lines[: lesson.first - 1]).endswith('"""')
        new = {number for number, line in enumerate(lesson.lines, 1) if "# NEW:" in line}
        assert new <= lesson.lit and not lesson.lit & folded
    assert sum("Unchanged from" in lesson.code() for lesson in course.lessons) > 25


def calls(data):
    """Return the calls of each rank in the step that a page shows: their kinds, sizes, bytes."""
    recorded = json.loads(data)
    begin, end = recorded["step"]
    return {
        each["rank"]: {
            (call["kind"], call.get("size"), call.get("bytes"))
            for call in each["calls"]
            if begin <= call["span"][0] <= end
        }
        for each in recorded["ranks"]
    }


@pytest.mark.parametrize("name", recordings.RECORDINGS)
def test_a_recorded_run_has_the_lines_of_its_lesson(name):
    """The lesson has changed since, if this fails: record it again."""
    recorded = json.loads((recordings.RECORDED / f"{name}.json").read_text())
    command = recordings.RECORDINGS[name].command
    for place, text in recorded["text_of"].items():
        *file, number = place.split(":")
        path = f"common/{file[0]}" if file else re.search(r"page.html (\S+)", command)[1]
        line = (ROOT / path).read_text().splitlines()[int(number or 0) - 1]
        assert text in ("", f"{place}: {line.partition('  #')[0].strip()}")


@pytest.mark.parametrize("name", ["deadlock", "bucket", "pipeline"])
def test_a_recorded_run_has_the_calls_of_a_new_one(name):
    """Ranks, kinds of calls, sizes and bytes are those that are committed. Times differ.

    So may the numbers of calls, because a call of one rank may fall into the next step of another.
    """
    committed = (recordings.RECORDED / f"{name}.json").read_text()
    assert str(Path.home()) not in committed
    assert all(calls(committed).values())
    assert calls(recordings.record(name)) == calls(committed)


STUB = """#!/bin/sh
echo "{program} $*"
case "$*" in
playground/single_gpu.py*) exec {python} "$@" --dataset digits ;;
*/check.py*) exec {python} "$@" ;;
playground/broken.py*) ! grep -q "numbers + 5" "$1" || exec {python} "$@" ;;
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

    test_readme.py runs these commands. Here a script takes their place, and runs only one of them,
    the check of an exercise, in which an answer is written, and a lesson with a changed function.
    """
    made = notebook.make()
    assert nbformat.read(notebook.NOTEBOOK, 4) == made
    for cell in made.cells:
        cell.source = cell.source.replace("/tmp/", f"{tmp_path}/")
        if cell.source.startswith("%%writefile"):
            check = ROOT / pages.EXERCISES / "judging/checks/swap_with_neighbour.py"
            answer = re.search(r"^def swap_.*?(?=\n\n\n)", check.read_text(), re.M | re.S)[0]
            cell.source = cell.source.partition("def ")[0] + answer
        cell.source = cell.source.replace("send(numbers,", "send(numbers + 5,")
    sources = "\n".join(cell.source for cell in made.cells)
    for path in re.findall(r"playground/[\w/]+\.(?:py|md|svg)", sources):
        assert path == "playground/broken.py" or (ROOT / path).exists(), path  # a copy
    commands = re.findall(r"^!((?:python|torchrun) .*?)(?: \{device\})?$", sources, re.M)
    docstrings = " ".join("".join(lesson.doc for lesson in course.lessons).split())
    of_lessons = [command for command in commands[1:] if "check.py" not in command]
    changes = re.findall(r"^%%changed (.*?)(?: \{device\})?$", sources, re.M)
    assert set(changes) < set(of_lessons) and len(changes) == len(notebook.IDEAS)
    assert len(of_lessons) > 8 and all(command in docstrings for command in of_lessons)
    stub(monkeypatch, tmp_path)
    copy = tmp_path / "copy"  # the notebook writes playground/broken.py
    shutil.copytree(ROOT / "playground", copy / "playground")
    for name in ("common", "run", "requirements.txt"):
        (copy / name).symlink_to(ROOT / name)
    execute(made, copy)
    outputs = [output for cell in made.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs).splitlines()
    started = [line for line in printed if line.startswith(("python ", "torchrun "))]
    assert [line for line in started if "broken.py" not in line] == commands
    copies = [re.sub(r"playground/\w+", "playground/broken", command) for command in changes]
    assert [line for line in started if "broken.py" in line] == copies
    assert any("rank 1 has [5.0, 6.0, 7.0, 8.0]" in line for line in printed)
    assert any(line.startswith("epoch 3/3  loss ") for line in printed)
    assert any("RIGHT" in line for line in printed)  # in colour
    shown = [output.data for output in outputs if "data" in output]
    assert sum("image/svg+xml" in data for data in shown) == sources.count("SVG(") > 2
    for cell in made.cells:
        if cell.source.startswith("show("):
            lesson = next(each for each in course.lessons if f'"{each.file}"' in cell.source)
            code = cell.outputs[0].data["text/plain"]
            assert all(lesson.lines[number - 1] in code for number in lesson.lit), lesson.file
            assert lesson.title not in code, lesson.file


def test_links_of_the_notebook(monkeypatch, tmp_path):
    """Names of files are links to the repository, if its address is known."""
    made = notebook.make()
    monkeypatch.setattr(notebook, "NOTEBOOK", tmp_path / "notebook.ipynb")
    for address in ("", "https://localhost/you/your-copy"):
        setup = re.sub('^REPOSITORY = ".*?"', f'REPOSITORY = "{address}"', made.cells[1].source)
        made.cells[1].source = setup
        nbformat.write(made, notebook.NOTEBOOK)
        made = notebook.make()
        assert made.cells[1].source == setup
        text = "".join(cell.source for cell in made.cells if cell.cell_type == "markdown")
        links = re.findall(r"\]\((.*?)\)", text)
        assert len(links) > 10 if address else not links
        for link in links:
            path = link.removeprefix(f"{address}/blob/main/").partition("#")[0]
            assert (ROOT / path).exists(), link


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


def attributes(page, names):
    """Return the values of attributes in a page."""
    return {
        html.unescape(each) for each in re.findall(rf' (?:{names})="([^"]+)"', page.read_text())
    }


def test_links(site, course):
    """Each link leads to a file of the site, and to a place in it that exists."""
    places, downloads = functools.cache(functools.partial(attributes, names="id")), {}
    for page in site.rglob("*.html"):
        for target in attributes(page, "href|src"):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                assert parts.scheme in ("http", "https"), (page, target)
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert path.is_file(), (page, target)
            if path.suffix == ".py":
                downloads[path.name] = path.read_text()
            if path.suffix == ".html" and parts.fragment:
                assert unquote(parts.fragment) in places(path), (page, target)
    assert downloads == {each.path.name: each.path.read_text() for each in course.lessons}


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
    assert {each.scheme for each in asked} <= {"file", "data", "blob"}


def test_a_lesson(tab, site, course):
    """Lit lines, folds, tips, answers, commands to copy, recorded runs, the way to the next."""
    lesson = next(each for each in course.lessons if each.path.stem == "overlapped_data_parallel")
    tab.goto(f"file://{site}/{lesson.file.removesuffix('.py')}.html")
    assert tab.locator(".hll").count() == len(lesson.lit) and tab.locator(".hll").first.is_visible()
    for words in ("imports", "You can stop here", "Unchanged from"):
        label = tab.locator("summary", has_text=words)
        code = tab.locator("details", has=label).locator("pre")
        assert not code.is_visible()
        label.click()
        assert code.is_visible()

    tab.goto(f"file://{site}/{LESSON}")
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

    tab.goto(f"file://{site}/index.html")
    chart = tab.frame_locator("iframe").locator("svg#chart")
    chart.get_by_text("rank 1", exact=True).wait_for()
    assert chart.bounding_box()["y"] < 800

    tab.goto(f"file://{site}/{LESSON}")
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


def test_search_and_colours(tab, site):
    """The page of a symptom, a name, an idea or a word in code comes first. Dark is followed.

    A pasted message leads to its row of troubleshooting.md.
    """
    for wanted, title in (
        ("NCCL timeout", "Finding hangs"),
        ("out of memory", "CUDA out of memory"),
        ("slow rank", "Which rank is slow"),
        ("does my model fit", "Which parallelism when"),
        ("slurm", "Starting lessons on several machines"),
        ("multi node", "(distributed_data_parallel.py)"),
        ("FSDP2", "(fully_sharded_data_parallel.py)"),
        ("tensor parallel", "(tensor_parallel.py)"),
        ("zigzag", "(context_parallel.py)"),
        ("reduce_scatter", "(collectives.py)"),
        (
            "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
            "a run hangs",
        ),
        ("Tried to allocate 2.00 GiB. CUDA out of memory", "can't allocate memory"),
        ("RuntimeError: Default process group has not been initialized, call", "Default process"),
        ("exitcode: -9", "SIGKILL"),
    ):
        tab.goto(f"file://{site}/{LESSON}")
        tab.fill("input[name=q]", wanted)
        tab.press("input[name=q]", "Enter")
        found = tab.locator("ul.search a").first
        found.wait_for()
        assert title in found.inner_text()
    found.click()
    cell = tab.locator("td:has(:target)")  # the row, by its name
    cell.wait_for()
    assert "SIGKILL" in cell.inner_text()
    colour = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(colour)
    tab.emulate_media(color_scheme="dark")
    assert tab.evaluate(colour) != light
    tab.goto(f"file://{site}/index.html")
    tab.evaluate("document.body.dataset.theme = 'light'")  # as the page's own switch does
    tab.frames[1].wait_for_function(f"{colour} === '{light}'")


def test_figures_to_play_with(tab, site):
    """Orders are those of manual_pipeline.py, and bytes those that thousand_ranks.py counts."""
    lesson = runpy.run_path(str(ROOT / "playground/split/manual_pipeline.py"))
    tab.goto(f"file://{site}/playground/split/manual_pipeline.html")
    frame = tab.frame_locator(".recording:not(:has(button)) iframe")
    frame.get_by_text("Try it for real").wait_for()
    [figure] = [each for each in tab.frames if each.url.endswith("/pipeline.html")]
    for name, order in (("GPipe", "gpipe"), ("1F1B", "one_forward_one_backward")):
        for place in product(range(2), (2, 3, 4), (1, 4, 7)):
            assert figure.evaluate(f"SCHEDULES['{name}']{place}") == lesson[order](*place)
    lists = "timed([['F0', 'B0', 'F1', 'B1'], ['F0', 'F1', 'B0', 'B1']]).stuck"
    assert figure.evaluate(lists) == ["B0", "F1"]  # each waits for the other
    tab.goto(f"file://{site}/_static/memory.html")
    doc = (ROOT / "playground/language/thousand_ranks.py").read_text()
    shown = re.findall(r"^    (?:holds|keeps) +([\d,.]+) MB", doc, re.M)
    plan = "{dp: 128, tp: 8, pp: 1, gpus: 8, micro: 1, again: 0, count: 1, sequence: 4096}"
    model = "{parameters: 6302208000, layers: 32, width: 4096, heads: 32, kv_heads: 32,"
    model += " vocabulary: 32000, matrices: 2}"
    held = tab.evaluate(f"held({model}, 'fsdp', {plan})")
    parts = [held[part] / 1e6 for part in ("parameters", "gradients", "adam", "activations")]
    counted = [float(each.replace(",", "")) for each in shown]
    assert parts[:3] == pytest.approx(counted[:3], rel=0.01)
    assert parts[3] == pytest.approx(counted[3], rel=0.15)  # a CPU keeps more of some operations


@pytest.mark.parametrize("width", [1280, 1366])
def test_no_line_of_code_is_cut_on_a_laptop(browser, site, course, width):
    """A lesson's code is as wide as its box, or narrower."""
    tab = browser.new_page(viewport={"width": width, "height": 800})
    cut = "[...document.querySelectorAll('details')].forEach(e => { e.open = true }),"
    cut += "[...document.querySelectorAll('.highlight-python pre')]"
    cut += ".map(e => e.scrollWidth - e.clientWidth)"
    for lesson in course.lessons:
        tab.goto(f"file://{site}/{lesson.file.removesuffix('.py')}.html")
        assert {*tab.evaluate(cut)} == {0}, lesson.file
    tab.close()


def test_no_page_is_wider_than_a_phone(browser, site):
    """Wide outputs and tables of numbers scroll by themselves. A tip opens at a touch."""
    phone = {"width": 390, "height": 844}
    context = browser.new_context(viewport=phone, is_mobile=True, has_touch=True)
    tab = context.new_page()
    width = "[...document.querySelectorAll('html, .content, .sentences')].map(e => e.scrollWidth)"
    for page in sorted(site.rglob("*.html")):
        if "recorded" not in page.parts:
            tab.goto(f"file://{page}")
            assert max(tab.evaluate(width)) <= 390, page
    tab.goto(f"file://{site}/{LESSON}")
    tab.locator("abbr", has_text="global batch").first.tap()
    shown = "getComputedStyle(document.activeElement, '::after').content"
    assert "of one step, over all ranks" in tab.evaluate(shown)
    context.close()
