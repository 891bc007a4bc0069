"""Words of a process that is ended, and none of one that ends by itself."""

import signal
import subprocess
import sys

import pytest

from jaxformer.parallel import endings

PROGRAM = """
import os, runpy, signal, sys
last_words = runpy.run_path(sys.argv[1])["last_words"]
with last_words("nothing\\n"):
    pass
with last_words("Wörter\\n"):
    exec(sys.argv[2])
sys.stderr.write("after\\n")
"""


@pytest.mark.parametrize(
    "end, status, said",
    [
        ("os.abort()", -signal.SIGABRT, "Wörter\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "Wörter\n"),
        ("os._exit(3)", 3, "Wörter\n"),
        ("pass", 0, "after\n"),
        ("raise SystemExit(4)", 4, ""),
    ],
    ids=["aborted", "killed", "left", "went on", "raised"],
)
def test_words_are_said_of_a_process_that_is_ended_inside_the_block(end, status, said):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, endings.__file__, end],
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == status
    assert done.stderr.decode() == said
