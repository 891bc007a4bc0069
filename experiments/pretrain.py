"""Pretrain a decoder on text.

    python -m experiments.pretrain                                  # minutes on a laptop's CPU
    python -m experiments.pretrain small --corpus my.txt            # your own text
    python -m experiments.pretrain --resume --steps 2000            # resume the newest run

This is the command `jaxformer pretrain`; --help describes its flags.
"""

from jaxformer.__main__ import main

if __name__ == "__main__":
    main("pretrain")
