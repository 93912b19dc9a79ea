"""What pytest gives to the tests: its header, its last lines, and fixtures."""

import importlib
import os
import re
import shutil
import subprocess
import sys

import pytest
from launch import DATA, DETECTRON2, IS_REAL, LAUNCHER_VARIABLES, MNIST, STANDIN, Job, once
from lessons import ROOT, lesson_path
from nodes import Nodes
from sshd import Sshd


def pytest_report_header():
    """Say first what the results depend on."""
    mnist = "found" if MNIST else "not found: tests that need it are skipped"
    return [f"distributed_data_parallel2.py runs with {DETECTRON2}", f"MNIST files: {mnist}"]


def pytest_terminal_summary(terminalreporter):
    """Say last what tests have measured for a page."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties if report.when == "call" else ():
            terminalreporter.write_line(f"{name}: {value}")


@pytest.fixture(scope="session", autouse=True)
def shared(tmp_path_factory, worker_id):
    """Tell once() which folder all workers of pytest share."""
    own = tmp_path_factory.getbasetemp()
    once.folder = own if worker_id == "master" else own.parent


@pytest.fixture(autouse=True)
def nothing_goes_on():
    """A test that fails ends what it has started, too."""
    yield
    while Job.running:
        Job.running.pop().kill()


@pytest.fixture
def change(tmp_path):
    """Return a function that copies the course and replaces texts in the code of a lesson.

    Each text must be there once. `path` names another file than the lesson's.
    """

    def changed(lesson, *pairs, path=None):
        ignored = shutil.ignore_patterns("__pycache__")
        for folder in ("playground", "common"):
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored, dirs_exist_ok=True)
        copy = tmp_path / lesson_path(lesson).relative_to(ROOT)
        file = tmp_path / path if path else copy
        docstring, code = re.fullmatch(r'(r?""".*?""")(.*)', file.read_text(), re.S).groups()
        for old, new in pairs:
            assert code.count(old) == 1, f"{old!r} is there {code.count(old)} times"
            code = code.replace(old, new)
        file.write_text(docstring + code)
        return copy

    return changed


@pytest.fixture
def main(monkeypatch, capsys):
    """Return a function like `run` for what ends at its flags: it calls main() in this process."""

    def called(name, *flags, status=2, env=None):
        if not IS_REAL:
            monkeypatch.syspath_prepend(STANDIN)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, flags)])
        kept = {key: os.environ.pop(key) for key in LAUNCHER_VARIABLES if key in os.environ}
        os.environ.update(env or {})
        try:
            with pytest.raises(SystemExit) as end:
                importlib.import_module(name).main()
        finally:
            for key in LAUNCHER_VARIABLES:  # a lesson that is alone sets them
                os.environ.pop(key, None)
            os.environ.update(kept)
        assert end.value.code == status
        return subprocess.CompletedProcess(sys.argv, status, *capsys.readouterr())

    return called


@pytest.fixture(scope="session")
def mnist(tmp_path_factory):
    """A data folder with the real MNIST archives."""
    if not MNIST:
        pytest.skip("MNIST is not in data/: run/quickstart.sh downloads it")
    folder = tmp_path_factory.mktemp("mnist")
    shutil.copytree(DATA, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture
def nodes():
    """Two nodes with a network of their own. Skips where they can't be made."""
    with Nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    """Two nodes with ssh servers, for all tests of a file. Skips where they can't be made."""
    with Nodes() as nodes, Sshd(nodes, tmp_path_factory.mktemp("sshd")) as sshd:
        yield sshd
