"""Lessons stand by themselves: in a project of a reader's own, with plain PyTorch."""

import re

import pytest
import torch
from launch import SHORT, ranks, run
from lessons import lesson_path

LESSON = "distributed_data_parallel_torchrun"  # the one to copy


PARSER = """    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--timeout", type=int, default=60)
    parser.set_defaults(unit="images")"""
FAKE = "        FakeData({}, (1, 28, 28), 10, ToTensor())"
SETS = f"    train_set, test_set = (\n{FAKE.format(600)},\n{FAKE.format(99)},\n    )"
DATA = """from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor"""
MODEL = "    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).to(device)"
# What a reader writes in place of the lines that lean on this project, as the course's README says.
# If it is empty, the line is deleted.
CHANGES = {
    r"^sys\.path\.insert\(.*\n": "",
    r"^from common import flags\n": "",
    r"^import sys\n": "import argparse\nimport sys\n",
    r"^from common\.models import .*\n": "",
    r"^    model = make_model\(args\)\.to\(device\)": MODEL,
    r"^from common\.data import .*": DATA,
    r"^    args\.dataset = fetch\(.*\n": "",
    r'"collate_fn": whole_batch, ': "",
    r"^    dtype = torch\.float64 if args\.double else torch\.float32\n": "",
    r"^    train_set, test_set = load\(.*": SETS,
    r"^    parser\.check_batch\(.*\n": "",
    r"^    parser = flags\.ranks\(__doc__\)": PARSER,
    r"^    parser\.check_torchrun\(args\).*\n": "",
    r"^    flags\.check_same\(.*\n": "",
    r"type=flags\.new_file, ": "",
}


def test_a_lesson_lifted_into_a_project_of_its_own(tmp_path):
    """In an empty folder, with those lines replaced by plain PyTorch, it trains."""
    after = lesson_path(LESSON).read_text()
    for pattern, mine in CHANGES.items():
        after, count = re.subn(pattern, mine, after, flags=re.M)
        assert count >= 1, pattern
    code = after[after.index('"""', 4) + 3 :]
    assert "common" not in code
    copy = tmp_path / "mine.py"
    copy.write_text(after)
    # With this PYTHONPATH, nothing of ours is found.
    done = run(copy, "--epochs", 2, processes=2, env={"PYTHONPATH": ""}, cwd=tmp_path)
    assert re.findall(r"^epoch (\d)/2  loss \d", done.stdout, re.M) == ["1", "2"]


def test_fewer_images_than_a_batch(change):
    """In a copy, which does not call fetch() with its own data, or few test images: one error."""
    few = "train_set, test_set = load(args.dataset, args.data_dir, dtype)"
    for pair in (("args.batch_size // world_size", "10**6"), (few, f"{few}\n    test_set = [0]")):
        done = run(change(LESSON, pair), *SHORT, processes=2, status=1)
        assert "ValueError: fewer training images than a batch has, or" in done.stderr


@pytest.mark.parametrize("lesson", [LESSON, "distributed_data_parallel"])
def test_all_ranks_test_the_same_batch_norm(lesson, change, tmp_path):
    """Before the test, each rank has running averages of its own. DDP sends those of rank 0."""
    made, norm = "make_model(args)", "torch.nn.Sequential({}, torch.nn.BatchNorm1d(10))"
    test = "    _, test_correct, test_images = run_epoch(model, test_loader, device)\n"
    save = '    torch.save([*model.buffers()], "{}/%d.{}" % rank)\n'
    before, after = (save.format(tmp_path, name) for name in ("before", "after"))
    copy = change(lesson, (made, norm.format(made)), (test, before + test + after))
    run(copy, *SHORT, processes=2)
    found = {path.name: torch.load(path)[0] for path in tmp_path.glob("[01].*")}
    assert len(found) == 4 and not torch.equal(found["0.before"], found["1.before"])
    for name in ("0.after", "1.after"):
        assert torch.equal(found[name], found["0.before"])


THREADS = 'os.popen(f"cat /proc/{os.getpid()}/task/*/comm 2>/dev/null").read().count("gloo")'


def test_no_thread_of_the_group_outlives_it(change):
    """A thread that is left may abort Python's shutdown: there is none when train has returned."""
    show = f"print('threads of gloo:', {THREADS}, flush=True)\n"
    before = ("    del model", f"    {show}    del model")
    after = ("    train(args)\n", f"    train(args)\n    {show}")
    # They are started: what they import, and when, matters.
    for job in ranks(change(LESSON, before, after), *SHORT, cold=True):
        done = job.wait()
        assert done.returncode == 0, done.stderr
        first, last = re.findall(r"threads of gloo: (\d+)", done.stdout)
        assert int(first) > 0 and int(last) == 0
