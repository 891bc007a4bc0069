"""Processes whose streams are closed, that are interrupted early, or that lack an extra."""

import os
import signal
import subprocess
import sys
import tomllib

import pytest

from jaxformer.extras import EXTRAS, missing
from tests.experiments.processes import ROOT

PRINTS = """
import sys
from pathlib import Path
from experiments.starting import keep_printed, start_process
start_process()
file = open("mine", "w")
print("first", flush=True)
keep_printed(Path("."))
sys.stdin.readline()
for text in ("second", "third \\u2717"):
    print(text, flush=True)
print("to errors", file=sys.stderr)
file.write("whole")
"""


def begin(place, *arguments, **how):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), str(ROOT)])}
    environment.pop("JAXFORMER_TRACEBACK", None)
    return subprocess.Popen(
        arguments,
        cwd=place,
        env=environment | how.pop("more", {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )


def test_a_reader_that_leaves_ends_nothing(tmp_path):
    with begin(tmp_path, sys.executable, "-c", PRINTS) as run:
        assert run.stdout.readline() == "first\n"
        run.stdout.close()
        run.stdin.write("\n")
        run.stdin.close()
        assert run.wait(60) == 0
        assert run.stderr.read() == "to errors\n"
    first, *rest = (tmp_path / "printed.txt").read_text().splitlines()
    assert first.endswith(": stdout is closed (Broken pipe); it goes on here.")
    assert rest == ["second", "third ✗"]


def test_streams_that_are_closed_from_the_start_end_nothing_and_no_file_takes_their_place(tmp_path):
    (tmp_path / "prints.py").write_text(PRINTS)
    with begin(tmp_path, "sh", "-c", f"{sys.executable} prints.py >&- 2>&-") as run:
        run.communicate("\n", timeout=60)
        assert run.returncode == 0
    assert (tmp_path / "mine").read_text() == "whole"
    lines = (tmp_path / "printed.txt").read_text().splitlines()
    assert [line.partition(": ")[2] or line for line in lines] == [
        "stdout is closed (it was so from the start); it goes on here.",
        "stderr is closed (it was so from the start); it goes on here.",
        *("second", "third ✗", "to errors"),
    ]


def test_a_full_disk_under_standard_output_ends_nothing(tmp_path):
    with begin(tmp_path, "sh", "-c", f"{sys.executable} -c '{PRINTS}' > /dev/full") as run:
        run.communicate("\n", timeout=60)
        assert run.returncode == 0
    lines = (tmp_path / "printed.txt").read_text().splitlines()
    assert "No space left on device" in lines[0] and lines[1:] == ["second", "third ✗"]


def test_what_an_encoding_does_not_have_is_shown_as_its_number(tmp_path):
    more = {"PYTHONIOENCODING": "ascii"}
    with begin(tmp_path, sys.executable, "-c", PRINTS, more=more) as run:
        out, _ = run.communicate("\n", timeout=60)
    assert (run.returncode, out) == (0, "first\nsecond\nthird \\u2717\n")


IMPORTS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
from experiments.starting import start_process
start_process()
import experiments.pretrain
"""


def test_an_interrupt_during_imports_leaves_no_traceback(tmp_path):
    (tmp_path / "jax.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    with begin(tmp_path, sys.executable, "-c", IMPORTS) as run:
        assert run.stdout.readline() == "here\n"
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 130
        assert run.stderr.read() == "\nInterrupted.\n"


@pytest.mark.parametrize(
    "program, module, extra",
    [
        ("experiments.pretrain", "tyro", "train"),
        ("experiments.reference", "pdoc", "docs"),
        ("jaxformer.parallel", "tyro", "train"),
    ],
)
@pytest.mark.slow(but=["experiments.pretrain-tyro-train"])
def test_a_program_says_which_extra_is_missing(tmp_path, program, module, extra):
    hidden = f"raise ModuleNotFoundError('No module named {module}', name='{module}')\n"
    (tmp_path / f"{module}.py").write_text(hidden)
    with begin(tmp_path, sys.executable, "-m", program) as run:
        _, said = run.communicate(timeout=60)
    command = f"pip install 'jaxformer[{extra}]'"
    assert said == f"error: This needs {module}, which is not installed: {command}\n"
    assert run.returncode == 1


def test_the_extras_are_those_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, modules in EXTRAS.items():
        said = declared["optional-dependencies"][extra]
        assert [line.partition(">")[0] for line in said] == list(modules)


def test_a_module_of_no_extra_is_what_the_error_says():
    assert missing(ImportError("cannot import x")) == "cannot import x"
    error = ModuleNotFoundError("No module named 'odd'", name="odd")
    assert missing(error) == "No module named 'odd'"


ABORTS = """
import os, sys
from experiments.starting import start_process
start_process()
print("said before the end", file=sys.stderr)
os.abort()
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_errors_are_seen_of_a_process_that_is_aborted(tmp_path, unbuffered):
    more = {"PYTHONUNBUFFERED": unbuffered}
    with begin(tmp_path, sys.executable, "-c", ABORTS, more=more) as run:
        assert run.wait(60) == -signal.SIGABRT
        assert "said before the end" in run.stderr.read()
