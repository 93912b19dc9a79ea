"""What the ranks have recorded: who sends what, and who waits for whom.

Times in records are in microseconds on the clock of the node. A span is a list [begin, end].
"""

import json
import linecache
import re
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

from watch_ranks.terminal import coloured, columns, ranks_in_words

PYTHON = 1000  # shorter pauses between operations are Python's own work


def show_records(paths, trace, all_ended_well=True):
    """Print what the ranks have recorded, and write it to a file, if there is a path for it."""
    in_time = sorted(paths, key=lambda path: path.stat().st_mtime)
    of_rank = {each["rank"]: each for each in (json.loads(path.read_text()) for path in in_time)}
    records = [of_rank[rank] for rank in sorted(of_rank)]
    for record in records:
        find_steps(record)
    records = [record for record in records if record["steps"]]
    # A rank that only generates, or keeps parameters for the others, has no steps to compare.
    records = [record for record in records if record["borders"]] or records
    if not records:
        return
    trains = bool(records[0]["borders"])
    if not trains:  # what a rank does before its first call is part of its time, too
        begins, ends = zip(*(record["steps"][0] for record in records), strict=True)
        for record in records:
            record["steps"] = [[min(begins), max(ends)]]
    calls_of = match_calls(records)
    for record in records:
        find_waits(record, calls_of)
    number, begin, end = typical_step(records)
    what = records[0]["part"]
    if trains:
        what = f"step {number + 1} of the {len(records[0]['steps'])} that were recorded"
    title = f"{Path(records[0]['script']).name}, {what}, {(end - begin) / 1000:.2f} ms"
    text = ["", f"watch: {title}"]
    named = {rank for one in records for call in one["calls"] for rank in call.get("ranks", [])}
    missing = sorted({*named, *of_rank} - {record["rank"] for record in records})
    if missing:
        why = "on another node, without optimizer, ended by a signal or os._exit(), or started"
        why += " in another way"
        text.append(f"(Nothing is recorded here of {ranks_in_words(missing)}: {why}.)")
    if any("group" not in call for record in records for call in record["calls"]):
        unknown = "bytes, groups and lines of some are unknown"
        text.append(f"(The calls differ from step to step, so {unknown}.)")
    others = sum(record.get("others", 0) for record in records)
    if others:
        text.append(f"({others} calls of other threads are not shown.)")
    tables = {
        "messages": rows_of_calls(records, number),
        "bytes that the ranks hold": rows_of_bytes(records),
    }
    on_gpu = any(record["gpu"] for record in records)
    if not on_gpu:
        tables["milliseconds" + (" of a step" if trains else "")] = rows_of_times(records)
    if len(records) > 1 and len(tables["messages"]) == 1:
        text.append("(No rank has sent a message in it.)")
    for caption, rows in tables.items():
        if len(rows) > 1:
            text += ["", caption, *in_columns(rows)]
    waits = []
    if on_gpu:
        text += ["", "A GPU computes later than Python asks it to, so there are no times here."]
        text.append("playground/replicated/profile_steps.py shows them.")
    else:
        waits = longest_waits(records)
        text += ["", *letters(records, begin, end)]
        text += ["", "who waits for whom" + (" in a step, on average" if trains else "")]
    for wait in waits:
        longest, *meanwhile = wait
        text += [coloured(longest, "red"), *(f"    {line}" for line in meanwhile)]
    if not all_ended_well:
        text.append("A rank did not end well.")
    elif not on_gpu and not waits and not missing:
        text.append("No rank waits long for another one.")
    # At once, so that no line of the script comes between two of these.
    print("\n".join(text) + "\n", end="", flush=True)
    if trace:
        write_trace(trace, records)


def find_steps(record):
    """Find the steps of a rank, and what is known of each call in them."""
    borders = record["borders"]
    record["steps"] = [list(pair) for pair in pairwise(borders)]
    spans = [call["span"] for call in record["calls"]] + record["computing"]
    if spans and not borders:  # there is no optimizer, so all is one step
        record["steps"] = [[min(spans)[0], max(end for _, end in spans)]]
    kept = []
    for begin, end in record["steps"]:
        calls = [call for call in record["calls"] if begin <= call["span"][0] <= end]
        if [call["kind"] for call in calls] == [noted["kind"] for noted in record["noted"]]:
            for call, noted in zip(calls, record["noted"], strict=True):
                call.update(noted)
        kept += calls
    record["calls"] = kept


def match_calls(records):
    """Return for each message the call of each rank. Each call gets the name of its message."""
    calls_of = defaultdict(dict)
    users = defaultdict(set)  # the ranks of each group
    for record in records:
        count = Counter()
        for call in record["calls"]:
            from_any = call["kind"] in ("send", "recv") and "peer" not in call
            if "group" in call and not from_any:
                name = call["group"]
                if "peer" in call:
                    pair = [record["rank"], call["peer"]]
                    name += f" {pair if call['kind'] == 'send' else pair[::-1]}"
                count[name] += 1
                call["message"] = f"{name} {count[name]}"
                calls_of[call["message"]][record["rank"]] = call
                users[call["group"]] |= {record["rank"], *call["ranks"]}
    for record in records:
        for call in record["calls"]:
            call["size"] = len(users[call.get("group")])
    return calls_of


def find_waits(record, calls_of):
    """Find when a rank waits, and for whom: [begin, end, late rank or "message", number of call].

    A rank that waits for a message continues when the message is complete. So it waits if a message
    becomes complete while the rank does not compute.
    """
    found = []
    computing = without(record["computing"])
    for number, call in enumerate(record["calls"]):
        begin, end = pause_at_end(call["span"], computing)
        late, arrival = last_to_call(record["rank"], call, calls_of)
        if late != record["rank"] and begin < min(arrival, end):
            found.append([begin, min(arrival, end), late, number])
            begin = arrival
        if begin < end:
            found.append([begin, end, "message", number])
    # Two messages may be complete in the same pause. A late rank is the better explanation.
    record["waits"] = []
    for *span, late, number in sorted(found, key=lambda wait: (wait[2] == "message", wait[:2])):
        for part in without([span], [wait[:2] for wait in record["waits"]]):
            record["waits"].append([*part, late, number])
    longer = without([[begin, end + PYTHON] for begin, end in computing])
    busy = [[begin, end - PYTHON] for begin, end in longer]
    record["computing"] = without(busy, [wait[:2] for wait in record["waits"]])
    travelling = [call["span"] for call in record["calls"]]
    record["hidden"] = without(travelling, without(travelling, record["computing"]))


def pause_at_end(span, computing):
    """Return the pause in which a message became complete: it lies inside the message's span.

    Its end may have been noted after the rank continued, and later so on a busy machine. So it may
    be an earlier pause that is long compared to what came after it.
    """
    first = bisect_right(computing, span[0], key=itemgetter(1))
    last = bisect_right(computing, span[1], key=itemgetter(0))
    pauses = without([span], computing[first:last])
    likely = [
        [begin, end] for begin, end in pauses if span[1] - end <= max(PYTHON, (end - begin) / 10)
    ]
    return max(likely, key=lambda pause: pause[1] - pause[0], default=[0, 0])


def last_to_call(rank, call, calls_of):
    """Return the rank that was the last to make its call of a message, and when."""
    others = calls_of.get(call.get("message"), {})
    if "peer" in call and call["peer"] not in others:
        return call["peer"], call["span"][1]  # it never made the call
    # A rank that calls when the message is complete here has not been waited for.
    times = {each: one["span"][0] for each, one in others.items()}
    times = {each: begin for each, begin in times.items() if begin < call["span"][1]}
    late = max(times, key=times.get, default=rank)
    return late, times.get(late, 0)


def without(spans, others=()):
    """Return the parts of spans that none of the others covers, in order; what touches is one."""
    moves = Counter()  # how many more spans there are from a moment on; one of others hides all
    for weight, several in ((1, spans), (-len(spans) - 1, others)):
        for begin, end in several:
            moves[begin] += weight
            moves[end] -= weight
    left, depth = [], 0
    for moment in sorted(moves):
        before, depth = depth, depth + moves[moment]
        if before <= 0 < depth:
            left.append([moment, moment])
        elif depth <= 0 < before:
            left[-1][1] = moment
    return left


def inside(spans, begin, end):
    """Return how long spans last between two moments."""
    return sum(max(0, min(span[1], end) - max(span[0], begin)) for span in spans)


def typical_step(records):
    """Return the number of the step with the median time, and when it begins and ends."""
    windows = []
    for number, steps in enumerate(zip(*(record["steps"] for record in records), strict=False)):
        begins, ends = zip(*steps, strict=True)
        windows.append([max(ends) - min(begins), number, min(begins), max(ends)])
    return sorted(windows)[len(windows) // 2][1:]


def code_of(record, place):
    """Return a line as text: its file, if it is not the script, its number, and what it says."""
    path, _, number = place.rpartition(":")
    text = linecache.getline(path or record["script"], int(number or 0)).split("  #")[0].strip()
    return f"{Path(path).name}:{number}: {text}".removeprefix(":") if text else ""


def rows_of_calls(records, number):
    """Return what the ranks pass to their calls in a step: rows of words, below their heads."""
    ranks_of = defaultdict(list)
    for record in records:
        begin, end = record["steps"][number]
        sizes = defaultdict(list)
        for call in record["calls"]:
            if begin <= call["span"][0] <= end:
                group = f"{call['size']} {call.get('axis', '')}".strip()
                key = call["kind"], group, code_of(record, call.get("line", ""))
                sizes[key].append(call.get("bytes", 0))
        for (kind, group, line), each in sizes.items():
            ranks_of[kind, group, str(len(each)), f"{sum(each):,}", line].append(record["rank"])
    rows = [["ranks", "call", "group", "count", "bytes", "called in line"]]
    return rows + by_ranks(ranks_of, len(records))


def rows_of_bytes(records):
    """Return how many bytes the ranks hold of what the optimizer handles."""
    ranks_of = defaultdict(list)
    for record in records:
        ranks_of[tuple(f"{size:,}" for size in record["held"].values())].append(record["rank"])
    if not records[0]["held"]:  # there is no optimizer
        return []
    return [["ranks", *records[0]["held"]], *by_ranks(ranks_of, len(records))]


def by_ranks(ranks_of, count):
    """Return rows that begin with the ranks for which they hold."""
    rows = []
    for words, ranks in ranks_of.items():
        rows.append(["all" if len(ranks) == count else ",".join(map(str, ranks)), *words])
    return rows


def rows_of_times(records):
    """Return where the time of each rank goes, as the mean over its steps."""
    rows = [["rank", "all", "= computes", "+ waits for a rank", "+ for a message", "+ other"]]
    rows[0].append("hidden")
    for record in records:
        steps = record["steps"]
        for_rank = [wait[:2] for wait in record["waits"] if wait[2] != "message"]
        for_message = [wait[:2] for wait in record["waits"] if wait[2] == "message"]
        times = []
        for spans in (steps, record["computing"], for_rank, for_message, record["hidden"]):
            times.append(sum(inside(spans, *step) for step in steps) / 1000 / len(steps))
        times.insert(4, times[0] - sum(times[1:4]))
        rows.append([str(record["rank"]), *(f"{each:.1f}" for each in times)])
    # A column without time is left out.
    kept = [column for column in zip(*rows, strict=True) if set(column[1:]) != {"0.0"}]
    return list(zip(*kept, strict=True))


def in_columns(rows):
    """Return lines with words in columns, cut where the terminal ends, if there is one."""
    limit = columns() if sys.stdout.isatty() else None
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{word:<{width}}" for word, width in zip(row, widths, strict=True)]
        lines.append("".join(cells).rstrip()[:limit])
    return lines


def letters(records, begin, end):
    """Return a line of letters for each rank, from the beginning of a step to its end."""
    count = columns() - len("rank 0  ||")
    column = (end - begin) / count
    lines = []
    for record in records:
        spans_of = defaultdict(list, {"C": record["hidden"]})
        spans_of["c"] = without(record["computing"], record["hidden"])
        for *span, late, _ in record["waits"]:
            spans_of["t" if late == "message" else str(late)[-1]].append(span)
        row = ""
        for number in range(count):
            edges = [begin + number * column, begin + (number + 1) * column]
            parts = {letter: inside(spans, *edges) for letter, spans in spans_of.items()}
            parts["."] = column - sum(parts.values())
            row += max(parts, key=parts.get)
        row = re.sub(r"\d+", lambda waits: coloured(waits[0], "red"), row)
        lines.append(f"rank {record['rank']:<3}|{row}|")
    key = "c: computes, C: while a message travels; 0 to 9: waits for this rank;"
    return [*lines, key, "t: waits while a message travels; a dot: anything else"]


def longest_waits(records):
    """Return the longest waits: which rank, for which, where, and what the late rank does then."""
    record_of = {record["rank"]: record for record in records}
    spans_of = defaultdict(list)
    for record in records:
        for *span, late, number in record["waits"]:
            if late in record_of:
                call = record["calls"][number]
                line = code_of(record, call.get("line", ""))
                spans_of[record["rank"], late, call["kind"], line].append(span)
    total = {key: sum(end - begin for begin, end in spans) for key, spans in spans_of.items()}
    steps = records[0]["steps"]
    long = sum(end - begin for begin, end in steps) / 100
    waits = []
    for key in sorted(total, key=total.get, reverse=True)[:4]:
        if total[key] < long:
            break
        rank, late, kind, line = key
        time = total[key] / 1000 / len(steps)
        text = [f"rank {rank} waits {time:.1f} ms for rank {late} in {kind}, {line}"]
        doing = lines_during(record_of[late], spans_of[key])
        for where, duration in doing.most_common(2):
            if duration > total[key] / 10:
                line = code_of(record_of[late], where) or "no line of the script"
                time = duration / 1000 / len(steps)
                text.append(f"meanwhile rank {late} is {time:.1f} ms in {line}")
        waits.append(text)
    return waits


def lines_during(record, spans):
    """Return how long a rank is at each line of the script in some spans of time."""
    times = Counter()
    last = record["steps"][-1][1]
    for (begin, line), (end, _) in pairwise([*record["lines"], [last, ""]]):
        times[line] += sum(inside([[begin, end]], *span) for span in spans)
    return times


def write_trace(path, records):
    """Write what each rank did over time, in the format of Perfetto."""
    events = []
    for record in records:
        rank, calls = record["rank"], record["calls"]
        end = max([record["steps"][-1][1], *(since for since, _ in record["lines"])])
        places = [*record["lines"], [end, ""]]
        spans = {
            "computes": [(span, "computes") for span in record["computing"]],
            "waits": [
                ([a, b], f"for {late}, {calls[n]['kind']}") for a, b, late, n in record["waits"]
            ],
            "messages": [(call["span"], call["kind"]) for call in calls],
            "line": [
                ([begin, end], code_of(record, place) or "no line of the script")
                for (begin, place), (end, _) in pairwise(places)
            ],
        }
        head = {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        events.append(head)
        rows = [(name, row) for name, found in spans.items() for row in without_overlaps(found)]
        for number, (name, row) in enumerate(rows, start=100 * (rank + 1)):  # not 0: it is idle
            head = {"ph": "M", "pid": rank, "tid": number, "name": "thread_name"}
            events.append(head | {"args": {"name": name}})
            for (begin, end), text in row:
                place = {"pid": rank, "tid": number, "ts": begin, "dur": end - begin}
                events.append({"ph": "X", "name": text} | place)
    shown = [each for each in events if each["ph"] == "X"]
    first = min((each["ts"] for each in shown), default=0)
    for each in shown:
        each["ts"] -= first  # since 1970, it has too many digits for the viewer
    Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    print(f"\nwatch: {path} has this over time: open it in ui.perfetto.dev, or by vizviewer")


def without_overlaps(spans):
    """Return rows of spans, none of which begins before the one before it in its row has ended.

    In one row, a viewer leaves out what overlaps, such as messages that travel at the same time.
    """
    rows = []
    for span in sorted(spans, key=lambda each: each[0]):
        row = next((row for row in rows if row[-1][0][1] <= span[0][0]), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return rows
