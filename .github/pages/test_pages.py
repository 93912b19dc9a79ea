"""The web pages, and the notebook."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from html import unescape
from itertools import product
from pathlib import Path
from urllib.parse import unquote, urlsplit

import filelock
import nbclient
import nbformat
import pytest
from lessons import PATHS, READING_ORDER, docstring
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)


@pytest.fixture(scope="session")
def site(tmp_path_factory, worker_id):
    """The pages, made once for all workers of pytest by the command that a user types."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "site"
    with filelock.FileLock(f"{folder}.lock"):
        if not (folder / "README.html").exists():
            subprocess.run([ROOT / "run/pages.sh", folder], check=True)
    return folder


def test_the_pages(site):
    """Each lesson has a page with its words and its code. Each link leads to a file of the site."""
    for lesson in READING_ORDER:
        page = (site / PATHS[lesson].relative_to(ROOT)).with_suffix(".html").read_text()
        text = " ".join(unescape(re.sub("<[^>]*>", " ", page)).split())
        words = set(re.findall(r"\w{4,}", docstring(lesson)))
        assert not words - set(re.findall(r"\w{4,}", text)), lesson
    for page in site.rglob("*.html"):
        for target in re.findall(r' (?:href|src)="([^"#]+)', page.read_text()):
            parts = urlsplit(unescape(target))
            if not parts.scheme and not parts.netloc:
                assert (page.parent / unquote(parts.path)).resolve().is_file(), (page, target)


@pytest.fixture
def tab():
    """A tab of a browser without a window."""
    if BROWSER is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with sync_playwright() as playwright:
        options = {"executable_path": BROWSER, "args": ["--no-sandbox"]}
        with playwright.chromium.launch(**options) as browser:
            yield browser.new_page(viewport={"width": 1280, "height": 800})


PASTED = {
    "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)": "a run hangs",
    "Tried to allocate 2.00 GiB. CUDA out of memory": "can't allocate memory",
    "RuntimeError: Default process group has not been initialized, call": "Default process",
    "exitcode: -9": "SIGKILL",
    "  exitcode  : -6 (pid: 4242)": "SIGABRT",
    "connect to [::]:29500 (errno: 97 - Address family not supported)": "errno: 97",
    "errno: 98 - Address already in use": "EADDRINUSE",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:": "ChildFailedError",
    "command terminated with exit code 137": "SIGKILL",
    "ModuleNotFoundError: No module named 'torch'": "'torch'",
    "my training hangs": "my training hangs",
    "why is the loss different on 2 gpus?": "a different loss",
    "convert my script": "convert my script",
    "resume": "resume training",
}


def test_a_pasted_message(site, tab):
    """It leads to its row of troubleshooting.md, and a code to that of no other code."""
    tab.goto(f"file://{site}/playground/pages/troubleshooting.html")
    found = tab.locator("textarea + table tr")
    for message, row in PASTED.items():
        tab.fill("textarea", message)
        assert row in found.first.inner_text(), message
        assert "exitcode" not in message or found.count() == 1, message
    tab.fill("textarea", "hello world")
    assert found.count() == 0


def test_no_table_is_cut(site, tab):
    """On a laptop, no table is wider than its box, and on a phone, no page than the screen."""
    cut = "[...document.querySelectorAll('article table')]"
    cut += ".filter(e => e.scrollWidth > e.parentElement.clientWidth).length"
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    for page in site.glob("**/[!_]*.html"):
        if "_static" not in page.parts:
            tab.goto(f"file://{page}")
            assert tab.evaluate(cut) == 0, page
            tab.set_viewport_size({"width": 390, "height": 800})
            assert not tab.evaluate(wide), page
            tab.set_viewport_size({"width": 1280, "height": 800})


def test_a_figure_to_play_with(site, tab):
    """Orders are those of manual_pipeline.py."""
    lesson = runpy.run_path(str(ROOT / "playground/split/manual_pipeline.py"))
    tab.goto(f"file://{site}/playground/split/manual_pipeline.html")
    tab.frame_locator("iframe").get_by_text("Try it for real").wait_for()
    [figure] = [each for each in tab.frames if each.url.endswith("/pipeline.html")]
    for name, order in (("GPipe", "gpipe"), ("1F1B", "one_forward_one_backward")):
        for place in product(range(2), (2, 3, 4), (1, 4, 7)):
            assert figure.evaluate(f"SCHEDULES['{name}']{place}") == lesson[order](*place)
    figure.select_option("#schedule", "your own lists")
    figure.fill("#own", "F0")  # a wrong list leaves nothing of the lists before it
    assert "rank 0 needs F0" in figure.inner_text("#says")
    assert figure.inner_text("#command") == figure.inner_html("#chart") == ""
    figure.fill("#own", "F0,B0 F0,B0")
    assert figure.inner_text("#command").endswith("--schedule F0,B0 F0,B0")


STUB = """#!/bin/sh
echo "{program} $*"
case "$*" in
*/check.py*) exec {python} "$@" ;;
*broken.py*)
    grep -q "numbers + 5" playground/broken.py && exec {python} "$@"
    grep -q "One process on one device" playground/broken.py && exec {python} "$@" --dataset digits
esac
true
"""


def test_the_notebook(monkeypatch, tmp_path):
    """Jupyter runs its cells: the first ten lessons, with commands of their docstrings.

    A cell to edit has a function as its lesson has it. test_readme.py runs the commands: here a
    script takes their place, and runs a changed lesson, one as it is, and the check of an exercise.
    Without an address, the first cell stops with a sentence.
    """
    for program in ("python", "torchrun"):
        (tmp_path / program).write_text(STUB.format(program=program, python=sys.executable))
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    made = nbformat.read(ROOT / "run/notebook.ipynb", 4)
    ten = [lesson for lesson in READING_ORDER[:10] if lesson != "distributed_data_parallel2"]

    def execute(folder):
        options = {"timeout": 600, "resources": {"metadata": {"path": folder}}}
        nbclient.NotebookClient(made, **options).execute()

    with pytest.raises(nbclient.exceptions.CellExecutionError):
        execute(tmp_path)
    assert made.cells[1].outputs[-1].traceback[0].startswith("Write the address ")
    cells = [cell for cell in made.cells if cell.source.startswith("%%changed ")]
    for lesson, cell in zip(ten, cells, strict=True):  # without detectron2's
        command, _, function = cell.source.partition("\n")
        command = command.removeprefix("%%changed ").removesuffix(" {device}")
        assert f"{PATHS[lesson].relative_to(ROOT)}" in command
        assert command in " ".join(docstring(lesson).split()), command
        assert f"\n{function}\n\n\n" in PATHS[lesson].read_text(), f"{lesson}: copy it again"
    cells[0].source = cells[0].source.replace("send(numbers,", "send(numbers + 5,")
    shutil.copytree(ROOT / "playground", tmp_path / "copy/playground")  # it writes broken.py
    for name in ("common", "run", "requirements.txt"):
        (tmp_path / "copy" / name).symlink_to(ROOT / name)
    execute(tmp_path / "copy")
    outputs = [output for cell in made.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs).replace("\r\n", "\n")
    started = re.findall(r"^(?:python|torchrun) .*playground/broken.py", printed, re.M)
    assert len(started) == len(ten)
    assert "rank 1 has [5.0, 6.0, 7.0, 8.0]" in printed and "epoch 3/3  loss " in printed
    assert "your turn: write the function" in printed
    shown = [output.data["text/plain"] for output in outputs if "data" in output]
    for lesson in ten:
        assert docstring(lesson).splitlines()[0] in printed
        new = re.findall("# NEW: .*", PATHS[lesson].read_text())
        assert any(all(line in code for line in new) for code in shown), lesson
