"""What a file of your own adds to the library's options, and then uses as the library's own.

    @options.activation      a function of arrays: `GLU(activation="its_name")`
    options.ScoreBias        a term of attention's scores: `MultiHead(positions=(YourBias(),))`
    options.Mixer            what stands where attention stands: `attention=YourMixer(num_heads=8)`
    options.FeedForward      what a layer makes of each token: `feed_forward=(YourOwn(),)`
    options.Parameter        what an option learns

Programs know what stands in the file by `--import`: `python -m experiments.pretrain --import
my_ideas --model.attention.positions "YourBias()"`.
"""

from importlib import import_module
from pathlib import Path

from jaxformer.config.feed_forward import FeedForward as FeedForward
from jaxformer.config.mixer import Mixer as Mixer
from jaxformer.config.mixer import MixerInputs as MixerInputs
from jaxformer.config.option import Parameter as Parameter
from jaxformer.config.positions import ScoreBias as ScoreBias
from jaxformer.functional.activations import activation as activation

IMPORT = "With --import NAME a module of your own is imported, and its options are known by name."


IMPORTED: list[str] = []  # by this program's command line


def imported(arguments: list[str]) -> list[str]:
    """Import the modules that --import names.

    Args:
        arguments: Of a program.

    Returns:
        The other arguments.

    Raises:
        ValueError: There is no such module, or no name.
    """
    others, waiting = [], iter(arguments)
    IMPORTED.clear()
    for argument in waiting:
        flag, _, name = argument.partition("=")
        if flag != "--import":
            others.append(argument)
            continue
        name = name or next(waiting, "")
        try:
            import_module(name)
        except (ModuleNotFoundError, ValueError) as error:
            if name and getattr(error, "name", None) != name.partition(".")[0]:
                raise
            raise ValueError(
                f"--import takes the name of a module in {Path.cwd()} or of one that is installed; "
                f"got {name!r}."
            ) from None
        IMPORTED.append(name)
    return others
