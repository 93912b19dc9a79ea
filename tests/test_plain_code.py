"""A line of a lesson does one thing, so that it is understood at the first reading."""

import ast

import pytest
from conftest import ROOT

FOLDERS = ("common", "playground", "playground/figures", "playground/exercises")
FOLDERS += ("playground/exercises/judging", "playground/figures")
FILES = sorted(
    str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).glob("*.py")
)
YES_OR_NO = {"isinstance", "issubclass", "hasattr", "callable", "bool", "any", "all"}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def is_boolean(node):
    """Return whether an expression is certainly a boolean."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool)
    if isinstance(node, ast.BoolOp):
        return all(is_boolean(value) for value in node.values)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return isinstance(node, ast.Compare) or (called and node.func.id in YES_OR_NO)


def below(node, kinds):
    """Return the nodes of some kinds inside a node, without itself."""
    return [inner for inner in ast.walk(node) if isinstance(inner, kinds) and inner is not node]


def crowded(text):
    """Return the lines of Python that do several things or are too long: numbers and reasons."""
    found = set()
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > 100:
            found.add((number, "more than 100 columns"))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and below(node, ast.NamedExpr):
            found.add((node.lineno, "an assignment inside a call"))
        if isinstance(node, ast.BinOp) and (is_boolean(node.left) or is_boolean(node.right)):
            found.add((node.lineno, "arithmetic on a boolean"))
        if isinstance(node, ast.IfExp) and below(node, ast.IfExp):
            found.add((node.lineno, "a conditional expression inside another"))
        several = isinstance(node, COMPREHENSIONS) and len(node.generators) > 1
        if several or (isinstance(node, COMPREHENSIONS) and below(node, COMPREHENSIONS)):
            found.add((node.lineno, "more than one for in a comprehension"))
        at_once = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        targets = node.targets if at_once else []
        if any(isinstance(each, ast.Tuple) and len(each.elts) > 2 for each in targets):
            found.add((node.lineno, "more than two targets of one assignment"))
    return sorted(found)


@pytest.mark.parametrize(
    "line",
    [
        f"x = {'1' * 100}",
        "f(y := 1)",
        "x = 3 - isinstance(y, int)",
        'x = "a" * (y > 1 and not z)',
        "x = 1 if a else 2 if b else 3",
        "x = [[z for z in y] for y in w]",
        "x = {a: b for a in c for b in d}",
        "a, b, c = 1, 2, 3",
    ],
)
def test_the_check_finds_it(line):
    """Each rule finds a line that breaks it."""
    assert len(crowded(line)) == 1


@pytest.mark.parametrize(
    "line", ["a, b = 1, 2", "a, b, c = f()", "x = [y for y in z if y]", "x = 1 if a else 2"]
)
def test_the_check_finds_no_more(line):
    """What is easy to read passes."""
    assert not crowded(line)


@pytest.mark.parametrize("file", FILES)
def test_one_statement_does_one_thing(file):
    """In every lesson, in common/ and in what measures."""
    assert not crowded((ROOT / file).read_text())
