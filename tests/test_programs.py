"""What `python -m experiments` and `python -m jaxformer` list."""

import subprocess
import sys
from pathlib import Path

import pytest

import experiments
import jaxformer
from jaxformer.__main__ import program_list

PROGRAMS = {
    "experiments": "ablate benchmark choices dpo evaluate export finetune generate plan pretrain "
    "report rope_placement translate",
    "jaxformer": "data zoo",
}


@pytest.mark.parametrize("package", [experiments, jaxformer], ids=lambda x: x.__name__)
def test_every_program_has_a_line(package):
    name = package.__name__
    *lines, last = program_list(name, Path(package.__file__).parent).splitlines()
    commands = [line.split()[2].removeprefix(f"{name}.") for line in lines]
    assert sorted(commands) == PROGRAMS[name].split()
    assert all(len(line.split()) > 6 and line.endswith(".") for line in lines)
    assert last == "--help after a command describes its flags."


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_package_is_run_by_its_name(name):
    command = [sys.executable, "-m", name]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(run.stdout.splitlines()) > len(PROGRAMS[name].split())
