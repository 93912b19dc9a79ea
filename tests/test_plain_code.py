"""A line of a lesson does one thing, so that it is understood at the first reading."""

import ast

from conftest import ROOT

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
    """Return the lines of Python that do several things: numbers and reasons."""
    found = set()
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


def test_the_check_finds_it():
    """Each rule finds a line that breaks it, and what is easy to read passes."""
    for line in (
        "f(y := 1)",
        "x = 3 - isinstance(y, int)",
        'x = "a" * (y > 1 and not z)',
        "x = 1 if a else 2 if b else 3",
        "x = [[z for z in y] for y in w]",
        "x = {a: b for a in c for b in d}",
        "a, b, c = 1, 2, 3",
    ):
        assert len(crowded(line)) == 1, line
    assert not crowded("a, b = 1, 2\na, b, c = f()\nx = [y for y in z if y]\nx = 1 if a else 2")


def test_one_statement_does_one_thing():
    """In every lesson, in common/, in the exercises and in what measures, but not in watching/."""
    for folder in ("common", "playground"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.parent.name != "watching":
                assert not crowded(path.read_text()), path
