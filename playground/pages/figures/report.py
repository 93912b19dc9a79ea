"""The tables that compare.py prints."""

# The format of each column by its head.
PARITY = {
    "lesson": "{name}",
    "loss": "{loss:.4f}",
    "train": "{train:.2f}%",
    "test": "{test:.2f}%",
    "loss, float64": "{loss_float64:.12f}",
    "differs by": "{difference:.0g}",
}
SPEED = {
    "lesson": "{name}",
    "images/s": "{images_per_s:,.0f}",
    "start-up s": "{start_up_s:.1f}",
    "peak memory MiB": "{memory_mib:,.0f}",
    "on a GPU MiB": "{gpu_memory_mib:,.0f}",
}
STEPS = {  # step = data + computing + messages; hidden messages travel while the rank computes
    "ms of a step of": "{name}",
    "step": "{step:.2f}",
    "data": "{data:.2f}",
    "computing": "{compute:.2f}",
    "messages": "{waiting:.2f}",
    "hidden": "{hidden:.2f}",
}
WIDTHS = {
    "width": "{width}",
    "1 process, images/s": "{one:,.0f}",
    "DDP, images/s": "{several:,.0f}",
    "waits for messages": "{messages:.0%}",
}


def table(title: str, rows: list, columns: dict[str, str]) -> None:
    """Print a Markdown table with a row for each run. A note says why a run has failed.

    Args:
        title: is printed above the table.
        rows: the Runs, or a dict for each row. What a run has not reported is shown as a dash.
        columns: the format of each column, such as "{loss:.4f}", by its head.
    """
    columns = columns | {"note": "{note}"}
    cells = [list(columns)]
    for row in rows:
        values = row if isinstance(row, dict) else vars(row)
        cells.append([_cell(text, values) for text in columns.values()])
    widths = []
    for column in zip(*cells, strict=True):
        widths.append(max(map(len, column)))
    widths[-1] = 4  # of the notes, which may be long
    cells.insert(1, ["-" * width for width in widths])
    print(f"\n## {title}\n")
    for row in cells:
        texts = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        texts[0] = row[0].ljust(widths[0])
        texts[-1] = row[-1].ljust(widths[-1])
        print("|", " | ".join(texts), "|")
    print()


def _cell(text: str, row: dict) -> str:
    """Return a cell of a table, without the sign between cells."""
    try:
        return text.format(**row).replace("|", "/")
    except (KeyError, TypeError):
        return "–"
