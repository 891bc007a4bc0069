"""Print the survey, one preset, or the names of all.

python -m jaxformer.zoo [NAME | --list | --markdown]
"""

import argparse
import signal
import sys

from jaxformer.zoo import printing


def main() -> None:
    """Read the command line and print."""
    parser = argparse.ArgumentParser(prog="python -m jaxformer.zoo", description=__doc__)
    parser.add_argument("name", nargs="?", help="a preset, such as llama-2-70b")
    parser.add_argument("--list", action="store_true", help="name all presets")
    parser.add_argument("--markdown", action="store_true", help="the survey, for a README")
    arguments = parser.parse_args()
    if arguments.list:
        print(printing.listing())
    elif arguments.markdown:
        print(printing.markdown())
    elif arguments.name is None:
        print(printing.table())
    else:
        try:
            print(printing.preset(arguments.name))
        except ValueError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a pager that was left ends us quietly
    main()
