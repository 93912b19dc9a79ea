"""Runs a script as Python would, with a tool in each process that joins a group.

A process joins by init_process_group, which is wrapped here. One that is forked inherits this. In a
new Python (of spawn, subprocess, torchrun, accelerate) the module started/sitecustomize.py does it.
"""

import argparse
import builtins
import contextlib
import functools
import importlib.util
import inspect
import json
import os
import runpy
import signal
import sys
import types
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
# The scripts of the tools are beside the package in a clone, and in it if it is installed.
TOOLS = PACKAGE.parent if (PACKAGE.parent / "first_difference.py").is_file() else PACKAGE
COMMANDS = ("watch-ranks", "first-difference")  # what pip has made in front of them
STARTED = str(Path(__file__).with_name("started"))
TOOL = "PLAYGROUND_TOOL"  # a variable: the module of the tool, and its settings
C10D = "torch.distributed.distributed_c10d"
LAUNCHERS = (  # how they name a process' rank, and the number of ranks
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
# At this signal a rank writes its stack. Programs have handlers of their own for SIGUSR1 and 2.
ASK = signal.SIGRTMAX if hasattr(signal, "SIGRTMAX") else signal.SIGINFO  # macOS has the latter
given_up = []  # the error of the tool in this process


def harmless(function):
    """Return a function whose error ends the tool in this process, and never the script."""

    @functools.wraps(function)
    def guarded(*args, **named):
        try:
            return None if given_up else function(*args, **named)
        except Exception as error:
            given_up.append(error)
            what = f"process {os.getpid()} notes nothing more, and continues"
            print(f"watching: {what}: {error!r}", file=sys.stderr)

    return guarded


def launched():
    """Return this process' rank and the number of ranks, from a launcher of several. Or None."""
    for names in LAUNCHERS:
        rank, size = (os.environ.get(name, "") for name in names)
        if rank.isdigit() and size.isdigit() and int(size) > 1:
            return int(rank), int(size)
    return None


def running():
    """Return the path of the script that this process runs; "": it runs a tool, or no file."""
    path = getattr(sys.modules["__main__"], "__file__", None) or ""
    return "" if Path(path).parent == TOOLS or Path(path).name in COMMANDS else path


@functools.cache
def is_own(path, script):
    """Return whether a file is the script, or one of its author: not of Python or a package."""
    file = Path(path)
    others = [folder for folder in (Path(os.__file__).parent, TOOLS) if folder in file.parents]
    installed = {"site-packages", "dist-packages"} & {*file.parts}
    is_command = file.name in COMMANDS
    return path == script or not (others or installed or is_command) and file.is_file()


def add_script(parser):
    """Let a command line end with a script and its flags, or with -m and a module."""
    words = "the script is the name of a module, as in `python -m`"
    parser.add_argument("-m", action="store_true", dest="is_module", help=words)
    parser.add_argument("script")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the script")


def path_of(script, is_module):
    """Return the file of a script or module, and put its folder first in the search path.

    What Python has put there to start the tool is taken away: the script is to find nothing of it.
    """
    command = Path(sys.argv[0]).resolve()
    own = [str(TOOLS), *([str(command.parent)] if command.name in COMMANDS else [])]
    sys.path[:] = [folder for folder in sys.path if folder not in own]
    sys.path.insert(0, os.getcwd() if is_module else str(Path(script).resolve().parent))
    if not is_module:
        return Path(script).resolve()
    found = None
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec(script)
        if found and found.submodule_search_locations:
            found = importlib.util.find_spec(f"{script}.__main__")
    return Path(found.origin) if found else Path(script)


def run_with(tool, settings, script, is_module, flags):
    """Run a script with a module as a tool.

    Before a process joins a group, tool.joins(rank, size, *settings) is called, with -1 for what
    the process does not say. Afterwards tool.has_joined() is called.
    """
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTED, path]))
    os.environ[TOOL] = json.dumps([tool, *settings])
    init = sys.modules[C10D].init_process_group
    replace(init, wrapped(init, tool, *settings))
    sys.argv = [script, *flags]
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            run_file(script)
    finally:  # a notebook continues after the script
        replace(sys.modules[C10D].init_process_group, init)
        for name, value in ((TOOL, None), ("PYTHONPATH", path)):
            os.environ.pop(name, None)
            if value:
                os.environ[name] = value


def run_file(script):
    """Run a file as Python does: its name stays as it was given, links and all."""
    if zipfile.is_zipfile(script) or script.endswith(".pyc"):
        runpy.run_path(script, run_name="__main__")
        return
    module = types.ModuleType("__main__")
    module.__file__ = os.path.abspath(script)
    module.__builtins__ = builtins
    before, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        exec(compile(Path(script).read_bytes(), module.__file__, "exec"), vars(module))
    finally:
        sys.modules["__main__"] = before


def replace(old, new):
    """Replace a function in all modules that have it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(old.__name__) is old:
            setattr(module, old.__name__, new)


def wrapped(init, tool, *settings):
    """Return init_process_group with a tool around it."""

    @harmless
    def tell(moment, *words):
        getattr(importlib.import_module(tool), moment)(*words)

    @harmless
    def place(*args, **named):
        given = inspect.signature(init).bind_partial(*args, **named).arguments
        return given.get("rank", -1), given.get("world_size", -1)

    @functools.wraps(init)
    def init_process_group(*args, **named):
        tell("joins", *(place(*args, **named) or ()), *settings)
        init(*args, **named)
        tell("has_joined")

    return init_process_group


def notice():
    """Wrap init_process_group as soon as this process has imported it."""
    words = json.loads(os.environ.get(TOOL, "[]"))

    class Finder:
        @staticmethod
        def find_spec(name, path, target=None):
            if name != C10D:
                return None
            sys.meta_path.remove(Finder)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module

            def load_and_wrap(module):
                load(module)
                module.init_process_group = wrapped(module.init_process_group, *words)

            spec.loader.exec_module = load_and_wrap
            return spec

    if words:
        sys.meta_path.insert(0, Finder)
