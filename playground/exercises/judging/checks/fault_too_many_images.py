"""How fault_too_many_images is checked."""

import torch
from judging.single import of_all_ranks
from torch.utils.data import Dataset

NAME = "test"
FAULT = "WRONG with 2 ranks, 11 images ... image 0 is read on ranks 0 and 1"
CASES = {"11 images": {"length": 11}, "3 images": {"length": 3}, "20 images": {"length": 20}}
RIGHT = "each image is read on one rank"
EQUAL = "the numbers of images differ by at most one"
HINTS = """
How many images does each rank read, and how many images are there in all? Which images are read
twice?

DistributedSampler gives all ranks the same number of images. To do so, it repeats some images, or
leaves some out. A DataLoader takes any list of indices as its sampler.

indices = rank r, r + n, r + 2n, ... below len(dataset)
loader = a DataLoader with these indices as its sampler
"""


class Recorded(Dataset):
    """Images that note which of them are read."""

    def __init__(self, length):
        generator = torch.Generator().manual_seed(length)
        self.images = torch.randn(length, 3, generator=generator)
        self.labels = torch.arange(length) % 2
        self.read = []

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(f"there is no image {index}: the last one is {len(self) - 1}")
        self.read.append(int(index))
        return self.images[index], self.labels[index]


def make_model():
    torch.manual_seed(1)
    return torch.nn.Linear(3, 2, bias=False)


def run(test, rank, world_size, length):
    dataset = Recorded(length)
    counts = test(make_model(), dataset)
    read = of_all_ranks(dataset.read)
    return {
        "the images": words_on(read, length),
        "the parts": words_on_parts(read),
        "hits and images": counts,
    }


def expected(rank, world_size, length):
    dataset = Recorded(length)
    hits = make_model()(dataset.images).argmax(dim=1) == dataset.labels
    counts = [hits.sum().item(), length]
    return {"the images": RIGHT, "the parts": EQUAL, "hits and images": counts}


def words_on(read, length):
    """Return in words which images the ranks have read, or RIGHT. `read` has a list of each."""
    if len(read) > 1 and all(sorted(mine) == list(range(length)) for mine in read):
        return "every rank reads all images"
    for index in range(length):
        ranks = [rank for rank, mine in enumerate(read) if index in mine]
        if not ranks:
            return f"image {index} of {length} is not read"
        if len(ranks) > 2:
            return f"image {index} is read on {len(ranks)} ranks"
        if len(ranks) == 2:
            return f"image {index} is read on ranks {ranks[0]} and {ranks[1]}"
        if read[ranks[0]].count(index) > 1:
            return f"image {index} is read twice on rank {ranks[0]}"
    return RIGHT


def words_on_parts(read):
    """Return in words whether the ranks read equally many images, or EQUAL. See words_on."""
    lengths = [len(mine) for mine in read]
    equal = max(lengths) <= min(lengths) + 1
    return EQUAL if equal else f"the ranks read {', '.join(map(str, lengths))} images"


REPAIR = (
    "DistributedSampler(dataset, shuffle=False)",
    "range(dist.get_rank(), len(dataset), dist.get_world_size())",
)
WHY = "DistributedSampler repeats images to make the parts equal, and a range repeats none."
SAMPLER, RANGE = REPAIR
MISTAKES = {
    "image 10 of 11 is not read": (RANGE, SAMPLER.replace(")", ", drop_last=True)")),
    "every rank reads all images": (
        *(RANGE, "range(len(dataset))"),
        *("counts.tolist()", "(counts // dist.get_world_size()).tolist()"),
    ),
    "Only `hits and images` is wrong.": ("    dist.all_reduce(counts)\n", ""),
}
