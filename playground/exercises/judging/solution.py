"""The solution of an exercise, as text and as a function. Nothing here imports PyTorch.

A check has its solution as a function or a class. Edits are pairs of texts. The first one of a pair
stands once in the text, and the second one replaces it.
"""

import ast
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]


def parts_of(path):
    """Return the functions, classes and constants of a file by name, as nodes."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
    return found


def path_of(name):
    """Return the path of an exercise's check."""
    return FOLDER / "judging" / "checks" / f"{name}.py"


def name_of(parts, name):
    """Return the name of what a learner writes, which is that of the solution, too."""
    return parts["NAME"].value if "NAME" in parts else name


def text_of(path, name):
    """Return the text of a function or class of a file, with its decorators."""
    node = parts_of(path)[name]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[first - 1 : node.end_lineno]) + "\n"


def source_of(name, edits=()):
    """Return the text of an exercise's solution, without its HELPERS, with some more edits."""
    path = path_of(name)
    return edited(text_of(path, name_of(parts_of(path), name)), edits)


def hint(name, number):
    """Return hint 1, 2 or 3 of an exercise. There are empty lines between them."""
    return parts_of(path_of(name))["HINTS"].value.strip().split("\n\n")[number - 1]


def answer(name):
    """Return an exercise's solution with its HELPERS."""
    parts = parts_of(path_of(name))
    helpers = ast.literal_eval(parts["HELPERS"]) if "HELPERS" in parts else ()
    texts = [text_of(path_of(name), helper) for helper in helpers]
    return "\n\n".join([*texts, source_of(name)]).rstrip()


def edited(text, edits):
    """Return a text with edits."""
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        if text.count(old) != 1:
            raise ValueError(f"there is {text.count(old)} times {old!r} in\n{text}")
        text = text.replace(old, new)
    return text


def solution_of(check, edits=()):
    """Return the solution of a check, a module, with some more edits. It may be a class."""
    name = check.__name__.rpartition(".")[2]
    wanted = getattr(check, "NAME", name)
    names = dict(vars(check))
    if edits:
        exec(compile(source_of(name, edits), check.__file__, "exec"), names)
    return names[wanted]
