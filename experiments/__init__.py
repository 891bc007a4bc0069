"""Command-line programs, studies and benchmarks of a clone: `python -m experiments.NAME`."""

import sys

from jaxformer.errors import prepare_imports

if sys.argv[0] == "-m":  # Python's value while it looks for the module to run
    prepare_imports()
