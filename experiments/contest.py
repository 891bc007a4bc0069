"""A contest of programs that do the same work: each in a process of its own, turn by turn.

A contestant is a function of a size, and of options, that does what comes before the clock starts,
and returns a round: a function without arguments that does the work once, to its end.
"""

import contextlib
import importlib
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, NamedTuple, cast

Round = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Size:
    """The shape of what is done; a model is like Llama's, with a gated feed-forward.

    Attributes:
        model_dim: Width of the model.
        num_heads: Heads, of keys and values too.
        num_layers: Layers.
        hidden_dim: Width inside the feed-forward.
        vocab_size: Token ids.
        length: Tokens of a row in training, and of a prompt that is read at once.
        batch_size: Rows.
        prompt: Tokens of a prompt that is continued.
        new_tokens: That it is continued by.
        dtype: Of the computation.
        matrix: Rows and columns of the matrices that tell what the machine can do.
        copied: Numbers of the arrays that tell how fast its memory is.
    """

    model_dim: int = 256
    num_heads: int = 8
    num_layers: int = 6
    hidden_dim: int = 688
    vocab_size: int = 2048
    length: int = 512
    batch_size: int = 8
    prompt: int = 64
    new_tokens: int = 128
    dtype: str = "float32"
    matrix: int = 2048
    copied: int = 2**25


def with_working_space(do_round: Round, count: int) -> Round:
    """A round that says what a device's memory holds beside arguments and results, in bytes."""
    do_round.working_bytes = count  # type: ignore[attr-defined]
    return do_round


class Entry(NamedTuple):
    """A contestant: where its function is, and what it must have installed."""

    name: str
    function: str  # module:function
    needs: tuple[str, ...] = ()  # modules
    options: Mapping[str, Any] = {}


class MissingError(Exception):
    """A contestant cannot take part here."""


class Contestant:
    """A process that waits for its turn."""

    def __init__(self, entry: Entry, size: Size, environment: dict[str, str]):
        """Start it, and wait until it is prepared and has done its first round.

        Raises:
            MissingError: It ended.
        """
        self.entry = entry
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "experiments.contest", entry.function]
            + [json.dumps(given) for given in (asdict(size), dict(entry.options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
        )
        self.prepared = self._hear()  # how long that took, and what it knows of its round

    def _say(self, word: str) -> None:
        stdin = cast(IO[str], self.process.stdin)
        with contextlib.suppress(BrokenPipeError):  # it has ended, as will be heard
            stdin.write(word + "\n")
            stdin.flush()

    def _hear(self) -> dict[str, Any]:
        for line in cast(IO[str], self.process.stdout):
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        status = self.process.wait()
        self.errors.seek(0)
        last = self.errors.read().strip().splitlines()[-1:] or [f"status {status}"]
        self.close()
        raise MissingError(f"ended: {last[0][:200]}")

    def turn(self) -> float:
        """Seconds of one more round.

        Raises:
            MissingError: It ended.
        """
        self._say("go")
        return self._hear()["seconds"]

    def end(self) -> dict[str, Any]:
        """Its last words: what memory it had at most."""
        self._say("end")
        said = self._hear()
        self.process.wait(60)
        return said

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(BrokenPipeError):  # of a word that it did not read
                if file is not None:
                    file.close()


MARK = "contest: "


@contextlib.contextmanager
def contestants(
    entries: Sequence[Entry], size: Size, environment: dict[str, str]
) -> Iterator[dict[str, Contestant | str]]:
    """Start and prepare all, one after the other; a reason stands for one that cannot."""
    found: dict[str, Contestant | str] = {}
    try:
        for entry in entries:
            missing = [name for name in entry.needs if importlib.util.find_spec(name) is None]
            if missing:
                found[entry.name] = f"needs {' and '.join(missing)}"
                continue
            try:
                found[entry.name] = Contestant(entry, size, environment)
            except MissingError as reason:
                found[entry.name] = str(reason)
        yield found
    finally:
        for one in found.values():
            if isinstance(one, Contestant):
                one.close()


def take_part(function: str, size: Size, options: Mapping[str, Any]) -> None:
    """Prepare, then do a round for each line of standard input until it says end."""
    module, name = function.split(":")
    since = time.perf_counter()
    do_round: Round = getattr(importlib.import_module(module), name)(size, **options)
    do_round()
    first = time.perf_counter() - since
    tell(first=first, working_bytes=getattr(do_round, "working_bytes", None), **where())
    for line in sys.stdin:
        if line.strip() == "end":
            break
        since = time.perf_counter()
        do_round()
        tell(seconds=time.perf_counter() - since)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tell(peak_bytes=peak)


def where() -> dict[str, Any]:
    """The devices that JAX or torch has here."""
    if "jax" in sys.modules:
        import jax

        return {"devices": len(jax.devices()), "device": jax.devices()[0].device_kind}
    return {"devices": 1, "device": None}


def tell(**said: Any) -> None:
    """One line that the contest reads."""
    print(MARK + json.dumps(said), flush=True)


if __name__ == "__main__":
    take_part(sys.argv[1], Size(**json.loads(sys.argv[2])), json.loads(sys.argv[3]))
