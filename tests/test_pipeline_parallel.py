"""The pipeline lessons: each rank holds only its own stages. test_parity.py has the numbers."""

import re

import pytest
from launch import SHORT, run


@pytest.mark.parametrize(
    ("lesson", "flags"),
    [("manual_pipeline", ()), ("pipeline_parallel", ("--schedule", "Interleaved1F1B"))],
)
def test_a_rank_holds_only_what_it_says_that_it_keeps(lesson, flags, change):
    """All parameters in its memory are counted, and the numbers are those of the docstring."""
    counted = "sum(parameter.numel() for parameter in model.parameters())\n"
    check = f"""    alive = [each for each in gc.get_objects() if type(each) is torch.nn.Parameter]
    assert sum(each.numel() for each in alive) == {counted}"""
    changed = change(lesson, (counted, counted + check), ("import os\n", "import gc\nimport os\n"))
    out = run(changed, *SHORT, *flags, processes=2).stdout
    assert re.findall(r"keeps .*?([\d,]{3,}) parameters", out) == ["54,400", "4,810"]
