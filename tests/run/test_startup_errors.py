"""Programs that are interrupted during startup, or that lack an extra."""

import os
import signal
import subprocess
import sys
import tomllib

import pytest

from jaxformer.extras import MODULES_BY_EXTRA, missing_extra_message
from tests.run.processes import ROOT


def begin(place, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), str(ROOT)])}
    environment.pop("JAXFORMER_TRACEBACK", None)
    return subprocess.Popen(
        arguments,
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_interrupt_during_imports_leaves_no_traceback(tmp_path):
    (tmp_path / "jax.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    # A background job ignores the signal, and so would a program that it starts.
    module = "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    module += "os.execv(sys.executable, [sys.executable, '-m', 'experiments.pretrain'])"
    with begin(tmp_path, sys.executable, "-c", module) as run:
        assert run.stdout.readline() == "here\n"
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 130
        assert run.stderr.read() == "\nInterrupted.\n"


@pytest.mark.parametrize(
    "program, module, extra",
    [("experiments.pretrain", "tyro", "train"), ("experiments.plan", "tyro", "train")],
)
@pytest.mark.slow
def test_a_program_says_which_extra_is_missing(tmp_path, program, module, extra):
    hidden = f"raise ModuleNotFoundError('No module named {module}', name='{module}')\n"
    (tmp_path / f"{module}.py").write_text(hidden)
    with begin(tmp_path, sys.executable, "-m", program) as run:
        _, errors = run.communicate(timeout=60)
    command = f"pip install 'jaxformer[{extra}]'"
    assert errors == f"error: This needs {module}, which is not installed: {command}\n"
    assert run.returncode == 1


def test_the_extras_are_those_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, modules in MODULES_BY_EXTRA.items():
        requirements = declared["optional-dependencies"][extra]
        assert [line.partition(">")[0] for line in requirements] == list(modules)


def test_a_module_of_no_extra_is_what_the_error_says():
    assert missing_extra_message(ImportError("cannot import x")) == "cannot import x"
    error = ModuleNotFoundError("No module named 'odd'", name="odd")
    assert missing_extra_message(error) == "No module named 'odd'"
