"""Programs that train, measure and report; each is started with `python -m experiments.NAME`."""

import sys

from experiments.starting import start_process

if sys.argv[0] == "-m":  # so Python has it while it looks for the program that was named
    start_process()
