"""Benchmark jaxformer against other libraries on the same work, in interleaved rounds.

    python -m experiments.benchmark --preset peers             # all cases of one size
    python -m experiments.benchmark --preset peers --only machine train decode --rounds 9
    python -m experiments.benchmark --only attention --length 8192

Each program runs in a separate process. Every round times each program once, so that other load on
the machine affects all alike. A ratio is the median over rounds of the first program's time divided
by another's in the same round. Programs that are not installed are listed and left out; install
them by `pip install -e '.[peers]'`. Writes JSON, tables with the load average, and a plot.
"""

if __name__ == "__main__":  # the processes that it starts import this file too
    from experiments.benchmark.run import Benchmark, main
    from jaxformer.run.command_line import run_program

    run_program(main, Benchmark, __doc__)
