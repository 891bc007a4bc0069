"""Train an encoder-decoder to rewrite English and Chinese dates as ISO 8601.

    python -m experiments.translate                                 # minutes on two CPU cores
    python -m experiments.translate --steps 1000 --model.num-layers 3
    python -m experiments.translate --resume --steps 6000           # resume the newest run

"the second of April nineteen eighty-seven" and "一九八七年四月二日" become "1987-04-02". Texts are
generated from a seed (see date_forms.py); a tenth of all days is held out, in every form. At the
end the average of the newest checkpoints is evaluated: exact match on held-out texts, with greedy
decoding and beam search. All files are written to --output.

Signals are handled as in `experiments.pretrain`.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.translate.date_forms import FORMS
from experiments.translate.dates import WrittenDate, written_date
from experiments.translate.runs import RUNS, Translate
from jaxformer import data
from jaxformer.generation import Beam, Greedy, Sampler, generate
from jaxformer.parallel import join_parameters, put_batch, split_parameters
from jaxformer.run.command_line import run_program
from jaxformer.run.program import train
from jaxformer.run.recorder import Evaluation, Recorder, TrainData, TrainResult
from jaxformer.run.train_setup import TrainSetup
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.progress import format_count, format_duration, sanitize_text

TARGET_LENGTH = len("1987-04-02") + 1  # with the end of text
NUM_TOKENIZER_TEXTS = 5_000  # texts that show every character
NUM_EXAMPLES = 8

Decoded = dict[str, list[str]]  # the decoded held-out texts, by decoding method


def main(run: Translate) -> Path:
    """Train, decode held-out dates and report; returns the output folder."""
    make_data, sources = partial(DateData, started_at=time.monotonic()), run.source_lengths
    return train(run, RUNS, make_data, length=TARGET_LENGTH, source_lengths=sources)


def make_tokenizer(run: Translate) -> data.Tokenizer:
    """Train the tokenizer on texts of training days."""
    shown = [written_date(i, seed=run.seed) for i in range(NUM_TOKENIZER_TEXTS)]
    tokenizer = data.build_tokenizer(run.tokenizer, [text for d in shown for text in d.pair])
    print(
        f"Dates: {len(FORMS)} forms, {tokenizer.vocab_size} tokens, "
        f"{format_count(run.steps * run.batch_size)} training texts, for example "
        f"{sanitize_text(shown[0].text, sys.stdout)!r} -> {shown[0].pair.target!r}",
        flush=True,
    )
    return tokenizer


def held_out_dates(run: Translate, count: int) -> list[WrittenDate]:
    """Held-out dates, cycling through the forms."""
    forms = list(FORMS)
    return [
        written_date(i, seed=run.seed, split="held_out", form=forms[i % len(forms)])
        for i in range(count)
    ]


class DateData(TrainData):
    """Batches of generated dates, and exact match on held-out ones.

    Attributes:
        decoded: The decoded texts of the last evaluation.
    """

    sequence_length = TARGET_LENGTH

    def __init__(self, run: Translate, setup: TrainSetup, *, started_at: float):
        """Prepare batches of the texts of this run, which started at this time."""
        self._run, self._mesh, self._started_at = run, setup.mesh, started_at
        self.tokenizer = make_tokenizer(run)
        self._batches = data.PairBatches(
            lambda i: written_date(i, seed=run.seed).pair,
            self.tokenizer,
            batch_size=run.batch_size,
            lengths=data.PaddedLengths(run.source_lengths, TARGET_LENGTH),
            group=run.group,
        )
        self.decoded: Decoded = {}

    def get_batch(self, step: int) -> data.PairBatch:
        """The sharded batch of step `step` + 1."""
        return put_batch(self._batches[step], self._mesh, self._run.batch_size)

    def batch_of_each_shape(self, step: int) -> Iterator[data.PairBatch]:
        """One batch of each source length."""
        size = self._run.batch_size
        for length in self._run.source_lengths:
            blank = np.zeros((size, length), np.int32)
            sized = self._batches[step]._replace(source=blank, source_segments=blank)
            yield put_batch(sized, self._mesh, size)

    def evaluate(self, step: int, params: Any, recorder: Recorder, *, final: bool) -> Evaluation:
        """Exact match; the final one is of averaged parameters, also with beam search."""
        run = self._run
        dates = held_out_dates(run, run.held_out_texts if final else run.evaluate_texts)
        ways: dict[str, Sampler | Beam] = {"greedy": Greedy()}
        if final:
            ways["beam"] = run.beam
            params = average_checkpoints(recorder.checkpoints, params, recorder.run)
        for name, sampler in ways.items():
            texts = decode_dates(run, params, self._mesh, self.tokenizer, dates, sampler)
            self.decoded[name] = list(texts)
        shares = {name: exact_match(dates, texts) for name, texts in self.decoded.items()}
        shown = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
        recorder.progress.print(
            f"step {step:,}: exact match {shown} of {len(dates)} held-out texts"
        )
        metrics = {f"{'final_' if final else ''}exact_{n}": share for n, share in shares.items()}
        return Evaluation(metrics, loss=-shares["greedy"])

    def report(self, result: TrainResult | None) -> None:
        """Print exact match by form, some examples, and the wall time."""
        if result is not None:
            dates = held_out_dates(self._run, self._run.held_out_texts)
            print(sanitize_text("\n".join(format_report(dates, self.decoded)), sys.stdout))
        print(f"\nWall time: {format_duration(time.monotonic() - self._started_at)}.")


def average_checkpoints(checkpoints: Checkpoints, params: Any, run: Any) -> Any:
    """Average of the parameters of the last checkpoint and the newest at --save-every.

    References:
        Vaswani et al., Attention Is All You Need, 2017, section 6.1. arXiv:1706.03762
    """
    checkpoints.wait_until_finished()
    regular = [x for x in checkpoints.all_steps() if x % run.save_every == 0 or x == run.steps]
    frozen, trained = split_parameters(run.model.adapter, params)
    part = {"trained": trained}
    saved = [checkpoints.restore(at, part, partial=True) for at in regular[-run.average :]]
    means = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *saved)
    return join_parameters(frozen, means["trained"])


def decode_dates(
    run: Translate,
    params: Any,
    mesh: Mesh,
    tokenizer: data.Tokenizer,
    dates: Sequence[WrittenDate],
    sampler: Sampler | Beam,
) -> Iterator[str]:
    """Decode each text."""
    end, size = tokenizer.end_of_text, run.batch_size
    batches = data.evaluation_pair_batches(
        [date.pair for date in dates],
        tokenizer,
        batch_size=size,
        lengths=data.PaddedLengths(run.source_lengths[-1:], TARGET_LENGTH),
    )
    for first, batch in zip(range(0, len(dates), size), batches, strict=True):
        tokens = generate(
            run.model,
            params,
            np.full((size, 1), end, np.int32),
            max_new_tokens=TARGET_LENGTH,
            sampler=sampler,
            stop_tokens=(end,),
            source=batch.source,
            source_segments=batch.source_segments,
            vocab_size=tokenizer.vocab_size,
            dtype=run.dtype,
            mesh=mesh,
        )
        yield from map(tokenizer.decode, np.asarray(tokens)[: len(dates) - first, 1:])


def exact_match(dates: Sequence[WrittenDate], texts: Sequence[str]) -> float:
    """Exact match: share of outputs that equal the ISO 8601 date."""
    pairs = zip(dates, texts, strict=True)
    return float(np.mean([text == date.pair.target for date, text in pairs]))


def format_report(dates: Sequence[WrittenDate], decoded: Decoded) -> Iterator[str]:
    """Text report: exact match for each form, and some examples."""
    forms = list(FORMS)
    groups = {
        **{name: {name} for name in forms},
        "English": {name for name in forms if FORMS[name].language == "en"},
        "Chinese": {name for name in forms if FORMS[name].language == "zh"},
        "all": set(forms),
    }
    targets = np.array([date.pair.target for date in dates], object)
    is_right = np.array([targets == np.array(texts, object) for texts in decoded.values()])
    yield "\nExact match on held-out texts:\n"
    yield "    greedy      beam  texts  form"
    for name, members in groups.items():
        picked = [date.form in members for date in dates]
        if any(picked):
            shares = (f"{share:>8.2%}" for share in is_right[:, picked].mean(axis=1))
            yield "  ".join([*shares, f"{sum(picked):>5}", name])
    wrong = np.flatnonzero(~is_right.all(axis=0))
    shown = range(0, min(len(dates), NUM_EXAMPLES * 7), 7)  # of eight different forms
    for title, numbers in (("Examples", shown), ("Errors", wrong[:NUM_EXAMPLES])):
        if len(numbers):
            yield f"\n{title}:"
        for i in numbers:
            yield format_example(dates[i], {name: texts[i] for name, texts in decoded.items()})
    yield f"\n{len(wrong)} of {len(dates)} texts were wrong with greedy decoding or beam search."


def format_example(date: WrittenDate, written: dict[str, str]) -> str:
    """One line with source, output and expected date."""
    right = date.pair.target
    same = set(written.values()) == {right}
    became = right if same else ", ".join(f"{name} {text!r}" for name, text in written.items())
    return f"  {date.text}  ->  {became}" + ("" if same else f"  ✗ {right}")


if __name__ == "__main__":
    run_program(main, RUNS, __doc__)
