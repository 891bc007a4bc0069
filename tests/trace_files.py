"""Print the files that are entered from `Transformer.__call__` to logits, and in a run.

python -m tests.trace_files [PRESET]    # a token's way, by package
python -m tests.trace_files pretrain    # from the command to the first update, in jaxformer.run
"""

import ast
import io
import sys
import tempfile
import tokenize
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxformer
from jaxformer import Transformer, zoo
from jaxformer import run as programs


def entered_functions(package, last, function, *args):
    """Functions of a package that a call enters, by file, in order, until the one named `last`."""
    root, files = Path(package.__file__).parent, {}

    def on_call(frame, event, _):
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if event == "call" and root in path.parents and name != "<module>":
            files.setdefault(str(path.relative_to(root)), {})[name.partition(".<locals>")[0]] = None
            if name == last:
                sys.setprofile(None)

    sys.setprofile(on_call)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return files


def forward_files(preset="llama-2-7b"):
    """Files of a forward pass: modules, the options that they ask, the formulas that they call."""
    config, tokens = zoo.get(preset).tiny(), jnp.ones((1, 8), int)
    model = Transformer(config)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return entered_functions(jaxformer, "", jax.eval_shape, model.apply, variables, tokens)


def pretrain_files():
    """Files of a run: flags, text, training, up to the log line of the first update."""
    from jaxformer.run import pretraining

    def run(folder):
        (folder / "text.txt").write_text("Files that a run passes. " * 1000)
        flags = ["--corpus", f'TextFiles(path="{folder}/text.txt")', "--output", f"{folder}/out"]
        flags += ["--cache", f"{folder}/cache", "--steps", "1", "--sample-tokens", "None"]
        pretraining.main(["tiny", *flags])

    with tempfile.TemporaryDirectory() as folder:
        return entered_functions(programs, "Recorder.log", run, Path(folder))


def code_lines(path):
    """Number of a file's lines that are neither blank nor of a comment or docstring."""
    source, lines = path.read_text(), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def main(what="llama-2-7b"):
    """Print them by package, and how many functions and code lines they are together."""
    files = pretrain_files() if what == "pretrain" else forward_files(what)
    root = Path((programs if what == "pretrain" else jaxformer).__file__).parent
    packages = [file.split("/")[0] if what != "pretrain" else "" for file in files]
    for package in dict.fromkeys(packages):
        inside = [file for file, of in zip(files, packages, strict=True) if of == package]
        print(f"\n{package or 'run'}: {len(inside)} files")
        for file in inside:
            print(f"  {file}: {', '.join(files[file])}")
    functions = sum(map(len, files.values()))
    lines = sum(code_lines(root / file) for file in files)
    print(f"\n{functions} functions in {len(files)} files of {lines} code lines")


if __name__ == "__main__":
    main(*sys.argv[1:])
