"""A line of a lesson does one thing, so that it is understood at the first reading."""

import ast

from conftest import ROOT

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def below(node, kinds):
    """Return the nodes of some kinds inside a node, without itself."""
    return [inner for inner in ast.walk(node) if isinstance(inner, kinds) and inner is not node]


def crowded(text):
    """Return the lines of Python that do several things: numbers and reasons."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and below(node, ast.NamedExpr):
            found.add((node.lineno, "an assignment inside a call"))
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


def test_one_statement_does_one_thing():
    """In every lesson, in common/, in the exercises and in what measures, but not in watching/."""
    bad = ("f(y := 1)", "x = 1 if a else 2 if b else 3", "x = [z for y in w for z in y]")
    assert [len(crowded(line)) for line in (*bad, "a, b, c = 1, 2, 3")] == [1] * 4
    for folder in ("common", "playground"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.parent.name != "watching":
                assert not crowded(path.read_text()), path
