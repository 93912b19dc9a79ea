"""The shell scripts in run/: set-up, quickstart, tests."""

import os
import shutil
import subprocess

import pytest
from conftest import ROOT, epochs


@pytest.fixture
def checkout(tmp_path):
    """A copy of the checkout without environment and data."""
    ignore = shutil.ignore_patterns(".venv", ".git", "data", "__pycache__", "checkpoints")
    return shutil.copytree(ROOT, tmp_path / "a checkout", ignore=ignore)


def script(name, *flags, cwd="/", **env):
    """Run a script as a user would, from another folder."""
    command = ["bash", name, *flags]
    return subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=120)


def test_a_wrong_python_is_one_clear_line(checkout):
    """Status 1, and how to name another Python."""
    for python in ("/no/such/python", "/bin/false"):
        done = script(checkout / "run" / "quickstart.sh", PYTHON=python)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert "Python 3.11 or newer" in done.stderr
        assert "PYTHON=" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_failed_installation_is_one_clear_line(checkout):
    """pip can't find a package: the last line says so, and the next run tries again instead of using half of it."""
    (checkout / "requirements.txt").write_text("./no-such-package\n")
    for name in ("quickstart.sh", "test.sh"):
        done = script(checkout / "run" / name)
        assert done.returncode == 1
        assert done.stdout == ""
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert "no-such-package" in errors[0]


def test_a_second_run_installs_nothing_and_passes_flags_on(checkout):
    """With the environment there, the lesson starts at once, and gets the flags."""
    (checkout / ".venv").symlink_to(os.path.realpath(ROOT / ".venv"))
    if not (ROOT / ".venv" / "installed.txt").exists():
        pytest.skip("no .venv in this checkout: run the tests with run/test.sh")
    done = script(checkout / "run" / "quickstart.sh", "--dataset", "digits", "--epochs", "2")
    assert done.returncode == 0, done.stderr
    assert len(epochs(done.stdout)) == 2
    assert "Installing" not in done.stderr
    done = script(checkout / "run" / "test.sh", "--version")
    assert "pytest" in done.stdout + done.stderr
    assert "Installing" not in done.stderr


def test_the_scripts_are_executable():
    """A fresh clone runs them by name."""
    for path in [*(ROOT / "run").iterdir(), ROOT / ".ci" / "run"]:
        assert os.access(path, os.X_OK), path
