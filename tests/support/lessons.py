"""Where the lessons are, and what their docstrings say."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLAYGROUND = ROOT / "playground"
TOOLS = ("bandwidth", "first_difference", "stacks", "watch")  # scripts beside the lessons
NEWER = ("pipeline_parallel", "four_axes")  # which torch 2.9 cannot run
PARTS = ("", "replicated", "sharded", "split", "transformer", "language", "tools")
FOLDERS = [PLAYGROUND / name for name in PARTS]
PATHS = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.py"))}
LESSONS = sorted(PATHS.keys() - TOOLS)
LIST = (PLAYGROUND / "README.md").read_text()
READING_ORDER = re.findall(r"^\| \d+\. \[`(\w+)\.py`\]\(", LIST, re.M)


def docstring(lesson: str) -> str:
    """Return what a lesson says about itself."""
    return ast.get_docstring(ast.parse(PATHS[lesson].read_text()))


def lesson_path(name):
    """Return the path of a lesson, or of another script by its name in playground/ or its path."""
    if Path(name).is_absolute():
        return Path(name)
    return PATHS.get(name, ROOT / "playground" / f"{name}.py")


def by_torchrun(name):
    """Whether a lesson gets its rank from the environment, and starts no processes itself."""
    text = lesson_path(name).read_text()
    return 'os.environ["LOCAL_RANK"]' in text and "mp.spawn(" not in text


def talks(name):
    """Whether a lesson trains nothing, such as one that sends numbers from rank to rank."""
    return "def talk(" in lesson_path(name).read_text()


def described_commands(lesson: str) -> list[str]:
    """Return the commands in a lesson's docstring that start it, each in one line."""
    text = re.sub(r" *\\\n +", " ", docstring(lesson))
    found = re.findall(rf"^ +((?:\w+=\S+ )*(?:python|torchrun) .*\b{lesson}\.py.*)$", text, re.M)
    return [command.partition("  #")[0].strip() for command in found]


def small_data(lesson: str) -> str:
    """Return the data set for a short run of a lesson that trains."""
    if lesson == "resnet":
        return "fake"  # random images
    others = ("context_parallel", "ulysses", "vocabulary_parallel")
    reads_text = PATHS[lesson].parent.name == "language" or lesson in others
    return "text" if reads_text else "digits"


def own_flags(lesson: str, folder: Path) -> list:
    """Return the flags with which a lesson writes only into a folder."""
    of = {"resumable": ["--run_dir", folder / "run"], "profile_steps": ["--out", folder / "traces"]}
    of["sharded_data"] = ["--files", folder / "files"]
    return of.get(lesson, [])
