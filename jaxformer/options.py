"""Extension points: add activations, score biases, mixers and feed-forwards from your own module.

    @options.activation      a function of arrays: `GLU(activation="its_name")`
    options.ScoreBias        a bias of attention scores: `MultiHead(positions=(YourBias(),))`
    options.Mixer            a replacement for attention: `attention=YourMixer(num_heads=8)`
    options.FeedForward      a feed-forward network: `feed_forward=(YourNetwork(),)`
    options.Residual         how a branch joins the stream: `residual=YourResidual()`
    options.Parameter        a learned parameter of an option

On the command line, `--import` imports the module: `jaxformer pretrain --import
my_ideas --model.attention.positions "YourBias()"`.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from traceback import walk_tb

from jaxformer.config.attention.mixer import Mixer as Mixer
from jaxformer.config.attention.mixer import MixerInputs as MixerInputs
from jaxformer.config.feed_forward import FeedForward as FeedForward
from jaxformer.config.parameter import Parameter as Parameter
from jaxformer.config.positions import ScoreBias as ScoreBias
from jaxformer.config.residual.protocol import Place as Place
from jaxformer.config.residual.protocol import Residual as Residual
from jaxformer.errors import IMPORTED_MODULES
from jaxformer.functional.activations import activation as activation

IMPORT_FLAG_HELP = "--import MODULE imports your own module, which registers its options by name."


def import_from_flags(argv: list[str]) -> list[str]:
    """Import the modules named by --import flags and return the remaining arguments.

    Args:
        argv: Arguments of the program.

    Returns:
        The other arguments.

    Raises:
        ValueError: The name is missing, there is no such module, or it raises an exception; then
            the message has the line.
    """
    remaining_args, arg_iterator = [], iter(argv)
    if os.getcwd() not in sys.path:  # as `python -m` has it, and an installed command has not
        sys.path.insert(0, os.getcwd())
    IMPORTED_MODULES.clear()
    for argument in arg_iterator:
        flag, _, name = argument.partition("=")
        if flag != "--import":
            remaining_args.append(argument)
            continue
        name = name or next(arg_iterator, "")
        try:
            import_module(name)
        except (Exception, SystemExit) as error:
            raise ValueError(_import_error_message(name, error)) from error
        IMPORTED_MODULES.append(name)
    return remaining_args


def _import_error_message(name: str, error: BaseException) -> str:
    """Return the error message for a failed import."""
    lacks = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    if name[:1] in ("", ".") or (lacks is not None and f"{name}.".startswith(f"{lacks}.")):
        return (
            f"--import needs the name of a module in {Path.cwd()} or of an installed package; "
            f"got {name!r}."
        )
    what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] == name.partition(".")[0]
    ]
    if isinstance(error, SyntaxError):
        what, lines = error.msg, [(error.filename or name, error.lineno or 1)]
    at = [f"line {line} of {Path(file).name}: " for file, line in lines[-1:]]
    return f"--import {name}: {''.join(at)}{what}"
