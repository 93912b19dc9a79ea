"""What troubleshooting.md says about an error."""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGES = [HERE / "troubleshooting.md", HERE.parents[1] / "pages" / "troubleshooting.md"]


def advice_on(text: str) -> list[str]:
    """Return the rows of troubleshooting.md whose messages stand in the text of an error.

    They are at most three, that with the longest message first. A message that has no space is the
    name of a function, which also stands in other errors, unless it names the error itself.
    """
    text = " ".join(text.split())
    found = []
    page = "".join(path.read_text(encoding="utf-8") for path in PAGES if path.is_file())
    for row in re.findall(r"^\| (.*) \|$", page, re.M):
        seen, *cells = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", row).split(" | ")
        for message in re.findall(r"`([^`]+)`", seen):
            parts = [part.strip() for part in message.split("...")]
            is_own = " " in message.strip(". ") or re.fullmatch(r"\w+(Error|Exception)", message)
            # "signal: 1" is not in "signal: 15".
            if is_own and all(re.search(rf"{re.escape(part)}(?!\d)", text) for part in parts):
                found.append((len(message), f"`{message}`: " + ". To do: ".join(cells)))
    found.sort(key=lambda each: each[0], reverse=True)
    return list(dict.fromkeys(row for _, row in found))[:3]
