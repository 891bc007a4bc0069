"""Words for a process that ends before it can say any."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

# Reads until the other end is closed: by the process itself, after a zero, or by its end.
LISTENER = """
import sys
words, zero, _ = sys.stdin.buffer.read().partition(b"\\0")
if not zero:
    sys.stderr.buffer.write(words)
"""


@contextlib.contextmanager
def last_words(words: str) -> Iterator[None]:
    """Have words written to standard error if this process ends inside the block.

    For ends that Python does not see: JAX aborts a process when it loses another one, and a
    system without memory kills it. A small process beside this one waits for that.

    Args:
        words: What to write, with its newline; nothing is added to it.

    Returns:
        The context manager of the block; leaving it, by an exception too, writes nothing.
    """
    reading, writing = os.pipe()
    listener = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LISTENER],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for it
    )
    os.close(reading)
    with listener, open(writing, "wb", buffering=0) as pipe:
        pipe.write(words.encode())
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                pipe.write(b"\0")
