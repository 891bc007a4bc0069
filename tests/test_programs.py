"""The commands: `jaxformer NAME`, `python -m jaxformer NAME`, `python -m experiments.NAME`."""

import ast
import importlib
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from experiments.__main__ import program_files
from jaxformer import errors
from jaxformer.__main__ import main, program_list

OF_THE_PACKAGE = "data dpo evaluate export finetune generate plan pretrain zoo".split()
OF_THE_CLONE = "ablate benchmark choices report rope_placement translate".split()
ENTRIES = sorted({*OF_THE_PACKAGE, *OF_THE_CLONE} - {"data", "zoo"})


@pytest.fixture
def run(monkeypatch):
    """Run `jaxformer` with arguments; what `main` sets in a process of its own stays as it is."""
    monkeypatch.setattr("jaxformer.__main__.prepare_imports", lambda: None)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["jaxformer", *arguments])
        main()

    return run


def check_lines(lines, commands):
    *lines, last = lines
    assert len(lines) == len(commands)
    for line, command in zip(lines, commands, strict=True):
        assert line.startswith(f"{command} ") and line.endswith(".")
        assert len(line.removeprefix(command).split()) > 4
    assert last == "--help after a command describes its flags."


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_command_without_a_program_lists_them(arguments, run, capsys):
    run(*arguments)
    lines = capsys.readouterr().out.splitlines()
    check_lines(lines, [f"jaxformer {name}" for name in OF_THE_PACKAGE])


def test_the_programs_of_a_clone_have_lines():
    lines = program_list(program_files()).splitlines()
    check_lines(lines, [f"python -m experiments.{name}" for name in ENTRIES])


def test_a_misspelt_program_is_named(run, capsys):
    with pytest.raises(SystemExit) as ended:
        run("finetun", "--init", "x")
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "error: There is no program 'finetun'. Did you mean finetune? Programs: "
        f"{', '.join(OF_THE_PACKAGE)}.\n"
    )


FUNCTIONS = {
    "pretrain": "pretraining.train_on_text",
    "finetune": "finetuning.train_pretrained",
    "dpo": "preference_training.train_on_pairs",
    "generate": "text_generation.generate",
    "export": "exporting.export",
    "evaluate": "evaluation.evaluate",
    "plan": "planning.plan_text",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_program_of_the_package_starts_without_flags(name, run, monkeypatch, capsys):
    runs = []
    monkeypatch.setattr(f"jaxformer.run.{FUNCTIONS[name]}", runs.append)
    try:
        run(name)
    except SystemExit:  # it asks for something to work on
        assert name in ("evaluate", "export", "plan")
        assert "required" in " ".join(capsys.readouterr().err.split())
    else:
        assert len(runs) == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_help_has_the_command_that_was_called(name, run, monkeypatch, capsys):
    """Its usage and its examples, of `jaxformer NAME` and of `python -m experiments.NAME`."""
    with pytest.raises(SystemExit):
        run(name, "--help")
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: jaxformer {name} ")
    entry = importlib.import_module(f"experiments.{name}")
    monkeypatch.setattr("sys.modules", {**sys.modules, "__main__": entry})
    with pytest.raises(SystemExit):
        run(name, "--help")
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: python -m experiments.{name} ")
    assert f"jaxformer {name}" not in shown


@pytest.mark.parametrize("name", ["zoo", "data"])
def test_the_help_of_a_reader_has_the_installed_command(name, run, capsys):
    with pytest.raises(SystemExit):
        run(name, "--help")
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: jaxformer {name} ") and "python -m" not in shown
    assert shown.count(f"jaxformer {name} ") > 3


@pytest.mark.parametrize("name", OF_THE_CLONE)
def test_a_program_of_a_clone_starts_without_flags(name, monkeypatch, capsys):
    """The lines under `if __name__ == "__main__"` read a command of no arguments."""
    file, runs = program_files()[f"python -m experiments.{name}"], []
    module = importlib.import_module(
        f"experiments.{name}.__main__" if file.stem == "__main__" else f"experiments.{name}"
    )
    last = ast.parse(file.read_text()).body[-1]
    monkeypatch.setattr(sys, "argv", [str(file)])
    monkeypatch.setattr("experiments.benchmark.run.main", runs.append)
    code = compile(ast.Module(last.body, []), name, "exec")
    try:
        exec(code, {**vars(module), "main": lambda *run: runs.append(run)})
    except SystemExit:  # it asks for something to work on
        printed = " ".join(capsys.readouterr().err.split())
        assert name == "ablate" and "required" in printed
    else:
        assert len(runs) == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_entry_of_a_clone_runs_the_program_of_its_name(name):
    entry, calls = importlib.import_module(f"experiments.{name}"), []
    last = ast.parse(Path(entry.__file__).read_text()).body[-1]
    code = compile(ast.Module(last.body, []), name, "exec")
    exec(code, {**vars(entry), "main": calls.append})
    assert calls == [name]


@pytest.mark.slow
@pytest.mark.parametrize("package, count", [("jaxformer", 10), ("experiments", 14)])
def test_a_package_is_run_by_its_name(package, count):
    command = [sys.executable, "-m", package]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert len(lines) == count and all(x.startswith(f"python -m {package}") for x in lines[:-1])


def test_ctrl_c_in_a_callback_of_the_garbage_collector_comes_again():
    """Python ignores exceptions there, and JAX has such a callback."""
    lost = types.SimpleNamespace(exc_value=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        errors._print_unraisable(lost)
        time.sleep(10)
