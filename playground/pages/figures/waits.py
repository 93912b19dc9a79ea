"""Who waits for whom in the exchanges of both point-to-point lessons."""

from itertools import chain
from pathlib import Path

from figures.style import BLUE, GREY, RED, box, new_figure, save


def draw(counts: dict, path: Path) -> None:
    """Draw in which call each of two ranks is, in four exchanges."""
    titles = {
        "rank 0 is late": "rank 0 sends, rank 1 receives; rank 0 starts late",
        "rank 1 is late": "rank 0 sends, rank 1 receives; rank 1 starts late",
        "blocking": "both send and receive, then compute; rank 0 starts late",
        "nonblocking": "both compute between isend, irecv and wait(); rank 0 starts late",
    }
    colours = {"asleep": GREY, "computing": BLUE, "send": RED, "recv": RED, "wait": RED}
    texts = {"asleep": "asleep", "computing": "computes"}
    texts |= {"send": "waits in send", "recv": "waits in recv", "wait": "waits in wait"}
    title = "The rank that comes first waits, unless it computes"
    figure, panels = new_figure(title, 4, 1, 6.4, sharex=True)
    for panel, (name, title) in zip(panels[:, 0], titles.items(), strict=True):
        for rank, kind, start, end in counts[name]:
            text = texts[kind] if end - start > 0.15 else ""  # seconds
            box(panel, (start, 0.6 - rank), (end - start, 0.8), colours[kind], text)
        panel.set_yticks([1, 0], ["rank 0", "rank 1"])
        panel.set_ylim(-0.5, 1.5)
        panel.set_title(title, loc="left")
    last_end = max(end for _, _, _, end in chain(*counts.values()))
    panels[-1, 0].set_xlim(0, 1.02 * last_end)
    panels[-1, 0].set_xlabel("seconds")
    save(figure, path)
