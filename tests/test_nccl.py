"""watch.py --nccl: what it says of messages that gloo and NCCL treat differently."""

import pytest
from launch import DIGITS, ranks
from lessons import ROOT, lesson_path

PROGRAM = ROOT / "tests" / "programs" / "on_nccl.py"
FITS = ["no rank waits for ever, and what the ranks call fits together."]
SENDS = ["may hang:", "rank 0 waits for rank 1 in send", "rank 1 waits for rank 0 in send"]
CIRCLE = ["may hang:", "rank 0 waits for rank 1", "rank 1 waits for rank 2", "rank 2 waits for"]
ORDER = "All ranks must make such calls in the same order."
LAZY, EAGER = "may hang without device_id:", "may hang with device_id:"
# By the rules. Those that hang with gloo, too, are known from what they have called until then.
SAID = {
    "sends_first": SENDS,
    "sends_first --first": SENDS,
    "ring": CIRCLE,
    "ring --first": CIRCLE,
    "chain": FITS,
    "isends_first": SENDS,
    "isends_first --first": SENDS,
    "batch": FITS,
    "batch_in_another_order": [
        "may go wrong:",
        "rank 0 calls send (4 fl",
        "rank 1 calls recv (8 fl",
    ],
    "tags": ["may go wrong:", "tag=1", "tag=2", "NCCL has no tags"],
    "batch_meets_call": [LAZY, "A batch does not meet a call outside of one."],
    "batch_meets_call --first": [LAZY, "A batch does not meet a call outside of one."],
    "groups_in_another_order": [LAZY, "(a), ", "(b), ", EAGER, "calls all_reduce", ORDER],
    "groups_in_another_order_waiting": ["may hang", "waits for rank 1 in all_reduce", ORDER],
    "groups_in_one_order": FITS,
    "collectives_in_another_order": ["may go wrong:", "calls all_reduce", "calls broadcast"],
    "shapes": ["may go wrong:", "all_reduce (4 float32)", "all_reduce (8 float32)"],
    "dtypes": ["may go wrong:", "all_reduce (4 float32)", "all_reduce (4 int32)"],
    "barrier_in_a_branch": ["may go wrong:", "rank 0 calls barrier", "rank 1 calls all_reduce"],
    "interleaved": [EAGER, "rank 1 in all_reduce (4 float32)", "rank 0 in recv", ORDER],
}


@pytest.mark.parametrize("program", SAID)
def test_what_is_said_of_a_program(program, tmp_path):
    """Who waits for whom at which line, or what does not fit; and no more than that."""
    name, *first = program.split()
    size = 3 if name in ("ring", "chain") else 2
    flags = ("--nccl", "--hang", 2, PROGRAM, name, *first)
    first, *others = ranks("watch", *flags, processes=size, env={"TMPDIR": str(tmp_path)})
    lines = iter(first.process.stdout)
    assert any("by NCCL's rules:" in line for line in lines), first.process.stderr.read()
    for job in (first, *others):  # with gloo, some of them hang, too
        job.kill()
    said = "".join(lines)
    assert [words for words in SAID[program] if words not in said] == [], said
    assert ("may " in said) == (SAID[program] != FITS)


def said_of(lesson, *flags):
    """Return what is said of a lesson on two ranks."""
    flags = (*DIGITS, "--epochs", 1, "--batch_size", 600, *flags)
    path = {"PYTHONPATH": str(ROOT)}  # for a changed copy
    jobs = ranks("watch", "--nccl", lesson_path(lesson), *flags, env=path)
    done = [job.wait() for job in jobs]
    assert not any(each.returncode for each in done), done
    return done[0].stdout.partition("by NCCL's rules:\n")[2]


RIGHT = ("manual_pipeline", "pipeline_parallel", "expert_parallel")


@pytest.mark.parametrize("lesson", RIGHT)
def test_lessons_are_right(lesson):
    """No alarm: what they send fits together, in two groups, batches and all_to_all."""
    assert said_of(lesson) == FITS[0] + "\n"


def test_a_pipeline_needs_two_groups(tmp_path):
    """Exercise 3 of manual_pipeline.py: gloo trains with one group, and NCCL may hang."""
    text = lesson_path("manual_pipeline").read_text()
    line = "self.gradients = dist.new_group(timeout=timeout)"
    assert text.count(line) == 1
    (tmp_path / "one.py").write_text(text.replace(line, "self.gradients = self.activations"))
    said = said_of(tmp_path / "one.py", "--schedule", "1F1B")
    answers = (ROOT / "playground" / "pages" / "answers.md").read_text()
    assert all(words in said and f"`{words}`" in answers for words in SENDS[1:])


def test_calls_of_another_thread(tmp_path):
    """They are not noted, so there is no verdict."""
    lines = [
        "import threading, torch, torch.distributed as dist",
        "dist.init_process_group('gloo')",
    ]
    lines += ["other = threading.Thread(target=dist.all_reduce, args=[torch.ones(2)])"]
    lines += ["other.start()", "other.join()", "dist.destroy_process_group()"]
    (tmp_path / "script.py").write_text("\n".join(lines))
    done = [job.wait() for job in ranks("watch", "--nccl", tmp_path / "script.py")]
    words = "nothing is found in what is noted.\n(This is not all: other threads have sent messages"
    assert words in done[0].stdout, done
