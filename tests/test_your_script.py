"""The script of your_script.md for one GPU, by DDP, and by FSDP: what differs, what does not."""

import re
import subprocess
from difflib import SequenceMatcher

import pytest
import torch
from launch import run
from lessons import ROOT

FOLDER = ROOT / "playground" / "your_script"
PAGE = (ROOT / "playground" / "pages" / "your_script.md").read_text()
CODE = {name: (FOLDER / f"{name}.py").read_text() for name in ("train", "train_ddp", "train_fsdp")}
FLAGS = ("--epochs", 3, "--batch_size", 60, "--workers", 0)
MODEL = "    model = make_model().to(device)\n"
SAVE = '    torch.save(state, path.with_suffix(".new"))\n'
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
    first, second = re.search(r"```python\n(.*?)    \.\.\.\n(.*?)```", PAGE, re.S).groups()
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
    shown = PAGE[PAGE.index("### 1.") : PAGE.index("## Several")]
    for line in re.findall(r"^    (.+)$", shown, re.M):
        assert line.strip() in CODE["train_ddp"]


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
HALF = "(args.checkpoint / '0002').mkdir(exist_ok=True)\n            "
KILLED = {
    "train_ddp": (SAVE, f"{SAVE}    if state.get('progress', [0])[0] == 2:\n        {KILL}"),
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
    """With --patience 1, after the second of three epochs, if it is no better."""
    worse = ("if accuracy > best:", "if accuracy > best and epoch == 0:")
    copy = edited(tmp_path, name, worse, ("type=int, default=3", "type=int, default=1"))
    assert len(lines(copy, None if name == "train" else 2)) == 2


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
