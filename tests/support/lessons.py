"""Where the lessons and the other scripts of the course are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLAYGROUND = ROOT / "playground"
TOOLS = ("bench", "first_difference", "plan", "watch")  # scripts beside the lessons
PARTS = ("", "replicated", "sharded", "split", "transformer", "language", "tools")
FOLDERS = [PLAYGROUND / name for name in PARTS]
PATHS = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.py"))}
LESSONS = sorted(PATHS.keys() - TOOLS)


def small_data(lesson: str) -> str:
    """Return the data set for a short run of a lesson that trains."""
    if lesson == "resnet":
        return "fake"  # random images
    reads_text = PATHS[lesson].parent.name == "language" or lesson == "context_parallel"
    return "text" if reads_text else "digits"
