"""Print the files that a token passes from `Transformer.__call__` to logits, in order.

python -m tests.trace_files [PRESET]
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxformer
from jaxformer import Transformer, zoo

ROOT = Path(jaxformer.__file__).parent


def entered_functions(function, *args):
    """Functions of the package that a call enters, by file, in the order of their first call."""
    files = {}

    def on_call(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and ROOT in path.parents:
            name = frame.f_code.co_qualname.partition(".<locals>")[0]
            files.setdefault(str(path.relative_to(ROOT)), {})[name] = None

    sys.setprofile(on_call)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return files


def main(preset="llama-2-7b"):
    """Print them by package: modules, the options that they ask, the formulas that they call."""
    config, tokens = zoo.get(preset).tiny(), jnp.ones((1, 8), int)
    model = Transformer(config)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    files = entered_functions(jax.eval_shape, model.apply, variables, tokens)
    for package in dict.fromkeys(file.split("/")[0] for file in files):
        inside = {f: names for f, names in files.items() if f.split("/")[0] == package}
        print(f"\njaxformer/{package}: {len(inside)} files")
        for file, names in inside.items():
            print(f"  {file}: {', '.join(names)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
