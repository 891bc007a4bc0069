"""Benchmark jaxformer against other libraries on the same work, in interleaved rounds.

    python -m experiments.benchmark --preset peers             # all cases of one size
    python -m experiments.benchmark --preset peers --only machine train decode --rounds 9
    python -m experiments.benchmark --only attention --length 8192

Each program has a process of its own, prepares itself, and waits; in every round each has a turn,
so that what else the machine does falls on all alike. A ratio is the median over rounds of the
first program's time divided by another's in the same round. Programs that are not installed are
named and left out: `pip install -e '.[peers]'` has them. Writes JSON, a table and a plot; the load
of the machine stands beside the figures.
"""

if __name__ == "__main__":  # the processes that it starts import this file too
    from experiments.benchmark.run import Benchmark, main
    from experiments.command_line import parse_args, readable_errors

    with readable_errors():
        main(parse_args(Benchmark, __doc__))
