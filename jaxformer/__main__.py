"""Run a program: `jaxformer pretrain` or `python -m jaxformer pretrain`; no name lists all."""

import ast
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

import jaxformer
from jaxformer.errors import did_you_mean, exit_with_error, own_command, prepare_imports

PROGRAMS = {
    "data": "data.__main__",
    "dpo": "run.preference_training",
    "evaluate": "run.evaluation",
    "export": "run.exporting",
    "finetune": "run.finetuning",
    "generate": "run.text_generation",
    "plan": "run.planning",
    "pretrain": "run.pretraining",
    "zoo": "zoo.__main__",
}


def main(*program: str) -> None:
    """Run the program named by `program`, else by the first argument; without a name list all."""
    name, *arguments = [*program, *sys.argv[1:]] or ["--help"]
    if name in ("-h", "--help", "help"):
        root = Path(__file__).parent
        paths = {k: root / f"{x.replace('.', '/')}.py" for k, x in PROGRAMS.items()}
        print(program_list({own_command(k): path for k, path in paths.items()}))
    elif name == "--version":
        print(f"jaxformer {jaxformer.__version__}")
    elif name in PROGRAMS:
        prepare_imports()
        importlib.import_module(f"jaxformer.{PROGRAMS[name]}").main(arguments)
    else:
        hint = did_you_mean(name, PROGRAMS)
        exit_with_error(f"There is no program {name!r}.{hint} Programs: {', '.join(PROGRAMS)}.")


def program_list(files: Mapping[str, Path]) -> str:
    """A line for each program: its command, and the first line of its file's docstring."""
    width, lines = max(map(len, files)), list[str]()
    for command, path in files.items():
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"{command:<{width}} {text.partition(chr(10))[0]}")
    return "\n".join([*lines, "--help after a command describes its flags."])


if __name__ == "__main__":
    main()
