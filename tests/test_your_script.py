"""The script of your_script.md for one GPU, by DDP, and by FSDP: what differs, what does not."""

import re
import subprocess
from difflib import SequenceMatcher
from math import cos, pi

import pytest
import torch
from filelock import FileLock
from launch import ranks, run
from lessons import ROOT

FOLDER = ROOT / "playground" / "your_script"
PAGE = (ROOT / "playground" / "pages" / "your_script.md").read_text()
CODE = {name: (FOLDER / f"{name}.py").read_text() for name in ("train", "train_ddp", "train_fsdp")}
FLAGS = ("--epochs", 3, "--batch_size", 60, "--workers", 0)
MODEL = "    model = make_model().to(device)\n"
SAVE = "        torch.save(state, file)\n"
DCP = "        dcp.save("


def edited(folder, name, *pairs):
    """Write a copy of a script in which texts are replaced. Returns its path."""
    code = CODE[name]
    for old, new in pairs:
        assert code.count(old) == 1, f"{old!r} is there {code.count(old)} times"
        code = code.replace(old, new)
    copy = folder / f"{name}.py"
    copy.write_text(code)
    return copy


def exact(folder, name, *pairs):
    """Write a copy without randomness, as the page says."""
    check = PAGE[PAGE.index("## Check it") :]
    first, second = re.search(r"```python\n(.*?)    \.\.\.\n(.*?)```", check, re.S).groups()
    flags = "    args = parser.parse_args()\n"
    steps = [(flags, flags + first), (MODEL, MODEL + second), ("augment=True", "augment=False")]
    steps.append(("loss:.4f}", "loss:.12f}"))
    if name == "train":
        sampler = "sampler=DistributedSampler(train_set, 1, 0, drop_last=True)"
        steps.append(("shuffle=True", sampler))
        train = "        model.train()\n"
        steps.append((train, f"        train_loader.sampler.set_epoch(epoch)\n{train}"))
        steps.append(("DataLoader, Dataset\n", "DataLoader, Dataset, DistributedSampler\n"))
    return edited(folder, name, *steps, *pairs)


def lines(path, processes=None):
    """Run a copy in its folder. Returns its lines (loss, accuracy, images), one for each epoch."""
    done = run(path, *FLAGS, processes=processes, cwd=path.parent)
    found = re.findall(r"epoch \d+  loss (\S+)  accuracy (\S+)% of (\d+)$", done.stdout, re.M)
    return [tuple(map(float, line)) for line in found]


WHERE = {"train": "checkpoint.pt", "train_ddp": "checkpoint.pt", "train_fsdp": "checkpoint"}
ONE = ("--batch_size", 500, "--workers", 0)  # two steps in an epoch


def said(path, *flags, **options):
    """Run a copy in its folder. Returns the lines that it prints."""
    return run(path, *flags, cwd=path.parent, **options).stdout.splitlines()


def test_every_change_has_a_number_and_the_page_explains_it():
    """Lines of code that the page shows are in the script."""
    before, after = (CODE[name].splitlines() for name in ("train", "train_ddp"))
    numbers = []
    for kind, _, _, start, end in SequenceMatcher(None, before, after, False).get_opcodes():
        new = "\n".join(after[start:end])
        if kind != "equal" and start > after.index("def main():"):
            numbers += (found := re.findall(r"# (\d+)\b", new))
            assert found or not new.strip(), new
    headings = re.findall(r"^### (\d+)\. ", PAGE, re.M)
    diff = ("diff", "-uw", FOLDER / "train.py", FOLDER / "train_ddp.py")
    added = subprocess.run(diff, text=True, capture_output=True).stdout
    assert len(re.findall(r"^\+[^+\n]", added, re.M)) <= 62
    assert sorted(set(numbers), key=int) == headings == [str(number) for number in range(1, 13)]
    shown = PAGE[PAGE.index("### 1.") : PAGE.index("## Run it")]
    for line in re.findall(r"^    (.+)$", shown, re.M):
        assert line.strip() in CODE["train_ddp"]


def test_at_one_glance(tmp_path):
    """The program at the top of the page prints the same digits with one to three ranks."""
    path = tmp_path / "ddp.py"
    path.write_text(re.search(r"```python\n(.*?)```", PAGE, re.S)[1])
    jobs = [ranks(path, processes=count) for count in (1, 2, 3)]
    ends = [[job.wait() for job in each] for each in jobs]
    assert not any(end.returncode for each in ends for end in each)
    printed = [each[0].stdout for each in ends]
    assert len(re.findall(r"^epoch \d  loss \d\.\d{12}$", printed[0], re.M)) == 3
    assert printed[1:] == printed[:1] * 2


def test_all_print_the_same_numbers(tmp_path):
    """One process, DDP and FSDP without torchrun, and with one to three ranks: as the page says."""
    right = []
    for loss, accuracy, images in re.findall(r"loss (\S+)  accuracy (\S+)% of (\d+)$", PAGE, re.M):
        right.append((pytest.approx(float(loss), abs=1e-4), float(accuracy), float(images)))
    runs = [("train", None)]
    runs += [(name, count) for name in ("train_ddp", "train_fsdp") for count in (None, 1, 2, 3)]
    got = []
    for number, (name, processes) in enumerate(runs):
        folder = tmp_path / str(number)
        folder.mkdir()
        got.append(lines(exact(folder, name), processes))
    assert got[0] == right
    apart = 1e-9 if torch.__version__.startswith("2.9.") else 1e-11
    alike = [tuple(pytest.approx(value, abs=apart) for value in line) for line in got[0]]
    for other in got[1:]:
        assert other == alike


KILL = "os.kill(os.getpid(), 9)\n"
TWELVE = " " * 12
HALF = "(args.checkpoint / '0002').mkdir(exist_ok=True)\n            "
KILLED = {
    "train_ddp": (SAVE, f"{SAVE}        if state.get('progress', [0])[0] == 2:\n{TWELVE}{KILL}"),
    "train_fsdp": (DCP, f"        if epoch == 1:\n            {HALF}{KILL}{DCP}"),
}


@pytest.mark.parametrize("name", KILLED)
def test_killed_while_it_saves_and_started_again(name, tmp_path):
    """With dropout, augmentation and batch norm, it prints what it would have printed."""
    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    digits = ("loss:.4f}", "loss:.12f}")
    whole = lines(edited(folders[0], name, digits), 2)
    run(edited(folders[1], name, KILLED[name]), *FLAGS, processes=2, status=-9, cwd=folders[1])
    assert lines(edited(folders[1], name, digits), 2) == whole[1:]


@pytest.mark.parametrize("name", CODE)
def test_all_ranks_stop_alike(name, tmp_path):
    """With --patience 1, after the second of three epochs, if it is no better.

    Started again, they train no further, and say why.
    """
    worse = ("if accuracy > best:", "if accuracy > best and epoch == 0:")
    copy = edited(tmp_path, name, worse, ("type=int, default=3", "type=int, default=1"))
    processes = None if name == "train" else 2
    assert len(lines(copy, processes)) == 2
    words = [f"{WHERE[name]}: 2 of 3 epochs are done", "no better accuracy since epoch 1"]
    assert said(copy, *FLAGS, processes=processes) == words


SUMS = "        dist.all_reduce(sums)\n"
PADDED = "sampler=DistributedSampler(val_set, shuffle=False), **options"
FAULTS = {
    2: ("per_rank = args.batch_size // world_size", "per_rank = args.batch_size", 2, "{loss:.4f}"),
    3: ("sampler=sampler, drop", "shuffle=True, drop", 2, "{loss:.4f}"),
    4: ("sampler=own, **options", "**options", 0, "{accuracy:.2f}% of {images:.0f}"),
    4.5: ("sampler=own, **options", PADDED, 0, "{accuracy:.2f}% of {images:.0f}"),
    6: ("ddp_model(images), labels)  # 6", "model(images), labels)", 2, "{loss:.4f}"),
    8: ("        sampler.set_epoch(epoch)", "        pass", 1, "{loss:.4f}"),
    10: (SUMS, "", 0, "{accuracy:.2f}% of {images:.0f}"),
}


@pytest.mark.parametrize("number", FAULTS)
def test_what_the_page_says_of_a_missing_change(number, tmp_path):
    """The page has the numbers that a copy prints without this change."""
    old, new, epoch, form = FAULTS[number]
    loss, accuracy, images = lines(exact(tmp_path, "train_ddp", (old, new)), 2)[epoch]
    words = form.format(loss=loss, accuracy=accuracy, images=images)
    assert words in PAGE.split(f"### {int(number)}.")[1].split("\n### ")[0]


@pytest.mark.parametrize("name", CODE)
def test_started_again_with_more_epochs(name, tmp_path):
    """It says what is done. The learning rate is that of the longer schedule, in each epoch."""
    step = "            scheduler.step()\n"
    copy = edited(tmp_path, name, (step, f"            print(*scheduler.get_last_lr())\n{step}"))
    said(copy, "--epochs", 1, *ONE)
    assert said(copy, "--epochs", 1, *ONE) == [f"{WHERE[name]}: 1 of 1 epochs are done"]
    first, *rates, _ = said(copy, "--epochs", 2, *ONE)
    assert first == f"{WHERE[name]}: 1 of 2 epochs are done"
    right = [1e-3 * (1 + cos(pi * step / 4)) for step in (2, 3)]
    assert [float(rate) for rate in rates] == pytest.approx(right)


@pytest.mark.parametrize("name", CODE)
def test_what_it_says_before_it_trains(name, tmp_path):
    """Fewer images than a batch has; a folder that is not there; another job."""
    copy = edited(tmp_path, name, ("timeout=20", "timeout=1"))
    few = run(copy, "--batch_size", 1200, status=2, cwd=tmp_path).stderr
    assert "10 epochs of 1000 images have no whole batch" in few
    path = tmp_path / "not" / "there" / WHERE[name]
    flags = (copy, *ONE, "--checkpoint", path, "--epochs")
    said(*flags, 1)
    assert path.exists()
    with FileLock(path / "lock" if name == "train_fsdp" else f"{path}.lock"):
        second = run(*flags, 2, status="error", cwd=tmp_path)
    assert "could not be acquired" in second.stderr.splitlines()[-1] and not second.stdout


@pytest.mark.parametrize("name", ["train", "train_ddp"])
def test_a_full_disk(name, tmp_path):
    """The error has its own message, and the old checkpoint is whole."""
    said(edited(tmp_path, name), "--epochs", 1, *ONE)
    old = (tmp_path / "checkpoint.pt").read_bytes()
    full = "__import__('resource').setrlimit(1, (9000, 9000))"
    copy = edited(tmp_path, name, ("    for epoch in", f"    {full}\n    for epoch in"))
    error = run(copy, "--epochs", 2, *ONE, status="error", cwd=tmp_path).stderr
    assert "OSError: [Errno 27] File too large" in error
    assert (tmp_path / "checkpoint.pt").read_bytes() == old


def test_each_checkpoint_has_a_best_model_of_its_own(tmp_path):
    """It is never the checkpoint itself. train_ddp.py continues what train.py has begun."""
    paths = {"best.pt": "train", "b.pt": "train", "b.bin": "train", "c": "train_fsdp"}
    for path, name in paths.items():
        said(edited(tmp_path, name), "--epochs", 1, *ONE, "--checkpoint", path)
    names = {path.name for path in tmp_path.iterdir() if path.suffix not in (".lock", ".py")}
    assert names == {*paths, "best-best.pt", "b-best.pt", "b-best.bin"}
    assert "progress" in torch.load(tmp_path / "best.pt") and (tmp_path / "c" / "best.pt").exists()
    flags = ("--epochs", 2, *ONE, "--checkpoint", "b.pt")
    more = said(edited(tmp_path, "train_ddp"), *flags, processes=2)
    assert more[0] == "b.pt: 1 of 2 epochs are done" and more[1].startswith("epoch 2 ")


MIXES = """  # torchrun sets os.environ["LOCAL_RANK"]
import torch, torch.distributed as dist, torch.distributed.nn.functional
from torch.nn import functional as F
torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
{gather}
torch.manual_seed(0)
model = torch.nn.Linear(8, 6)
model.scale = torch.nn.Parameter(torch.ones(()))
ddp_model = torch.nn.parallel.DistributedDataParallel(model)
parts = [each[rank::world_size] for each in torch.randn(2, 12, 8)]
one, other = [gather(F.normalize(ddp_model(part))) for part in parts]
loss = F.cross_entropy(model.scale * one @ other.T, torch.arange(12))
loss.backward()
print(loss.item(), *(x for each in model.parameters() for x in each.grad.flatten().tolist()))
del ddp_model
dist.destroy_process_group()
"""


def test_a_loss_that_compares_examples(tmp_path):
    """With gather() of the page, gradients are those of one process, also of the temperature."""
    gather = re.search(r"```python\n(def gather.*?)```", PAGE, re.S)[1]
    path = tmp_path / "mixes.py"
    path.write_text(MIXES.format(gather=gather))
    one, *more = [said(path, processes=count)[-1].split() for count in (1, 2, 3)]
    assert len(one) == 1 + 8 * 6 + 6 + 1
    for other in more:
        assert [*map(float, other)] == pytest.approx([*map(float, one)], abs=1e-12)
