"""Evaluate a model: bits per byte of text, multiple choice, or lm-evaluation-harness tasks.

    python -m experiments.evaluate runs/pretrain-1 --text my.txt

This is the command `jaxformer evaluate`; --help describes its flags.
"""

from jaxformer.__main__ import main

if __name__ == "__main__":
    main("evaluate")
