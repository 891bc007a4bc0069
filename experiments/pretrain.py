"""Pretrain a decoder on text.

    python -m experiments.pretrain                                  # minutes on a laptop's CPU
    python -m experiments.pretrain --steps 200 --model.num-layers 2 # any field is a flag
    python -m experiments.pretrain small --corpus my.txt            # text of your own
    python -m experiments.pretrain --init Qwen/Qwen3-0.6B --corpus my.txt  # a model that there is
    python -m experiments.pretrain --resume --steps 2000            # go on where it stopped
    python -m experiments.pretrain --output X --resume-or-begin     # the same, however often given

Trains on the source code of Python's standard library unless told otherwise, reports bits per byte
on held-out text beside gzip, and ends with a sample. Everything is written under --output.

SIGINT (Ctrl-C), SIGTERM and SIGHUP end a run once the update it is in is made and saved; the exit
status is 130, 143 or 129, and --resume goes on from there. The third such signal ends it at once.
One folder is one run's at a time.
"""

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.command_line import parse, readable_errors
from experiments.trained import learned_stop, origin, started_from
from experiments.training.loop import Machinery, check_vocabulary, machinery, train
from experiments.training.plot import plot_run
from experiments.training.resume import (
    asked_before,
    describe,
    explained_end,
    goes_on,
    own_beginning,
    settled,
)
from experiments.training.run import Run, check_uses, output_folder, prepare_devices, show_run
from jaxformer import data
from jaxformer import functional as F
from jaxformer.config import GLU, Decoder, Head, MultiHead, QKNorm, TransformerConfig
from jaxformer.generation import Sample, generate
from jaxformer.parallel import is_first, local_rows, put_batch
from jaxformer.training import loop, step
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.metrics import read_json_lines
from jaxformer.training.optimizers import Muon, OptimizerConfig
from jaxformer.training.progress import Progress, format_count, format_times, printable
from jaxformer.training.schedules import Cosine

# What a resumed run may not change, for its result would be another one. Devices, remat and scan
# may change; they round differently, and devices draw other dropout.
FIXED = (
    "model", "tokenizer", "chat_template", "held_out", "length", "batch_size", "accumulation",
    "schedule_steps", "optimizer", "objective", "expert_room", "dtype", "seed",
)  # fmt: skip


SECONDS_BETWEEN = 10  # lines that say how much text is tokenised


@dataclass(frozen=True, kw_only=True)
class Pretrain(Run):
    """Options of a pretraining run: corpus, tokenizer, row length, epochs, sample.

    Attributes:
        corpus: The text.
        chat_template: How instructions are written, instead of as the tokenizer's folder says: a
            file of Jinja, or "chatml". The run keeps it.
        held_out: Share of the text that is kept for evaluation.
        length: Tokens of a row.
        epochs: How often to go through the text, instead of --steps: every row, of each part of a
            mixture too, is read at least so often. None counts steps.
        cache: Folder for tokenised text.
        evaluate_rows: Held-out rows of an evaluation during the run; the last one reads all.
        prompt: Text that the sample at the end continues.
        sample_tokens: Length of that sample; None is no sample.
    """

    corpus: data.Corpus = data.StandardLibrary()
    tokenizer: data.TokenizerConfig = data.BPE(vocab_size=4096)
    chat_template: str | None = None
    held_out: float = 0.05
    length: int = 256
    batch_size: int = 8
    steps: int = 600
    epochs: float | None = None
    cache: Path = Path("runs/cache")
    evaluate_every: int = 100
    evaluate_rows: int = 64
    prompt: str = "def "
    sample_tokens: int | None = 160

    def __post_init__(self):
        super().__post_init__()
        check_uses(self, needs={"prompt": "sample_tokens"})
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must lie between 0 and 1; got {self.held_out}.")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be above 0 and finite, or None; got {self.epochs}.")
        longest = self.model.max_length
        if longest is not None and self.length > longest:
            raise ValueError(
                f"length {self.length} exceeds the model's {longest} learned positions."
            )
        if not isinstance(self.model.topology, Decoder):
            raise ValueError(f"Pretraining on text takes a Decoder; got {self.model.topology}.")
        if self.chat_template is not None and not (
            instructs(self.corpus) and isinstance(self.tokenizer, data.Saved)
        ):
            raise ValueError(
                "--chat-template is for Instructions, and for a tokenizer that there is: pass "
                "--init FOLDER or --tokenizer FOLDER."
            )

    def files(self) -> dict[str, str]:
        """The chat template that the run was given."""
        if self.chat_template is None or (template := chat_template(self)) is None:
            return {}
        return {"chat_template.jinja": template.source}


def llama(*, model_dim: int, num_layers: int, num_heads: int, vocab_size: int) -> TransformerConfig:
    """A small Qwen3-like decoder: RoPE, RMSNorm, SwiGLU, QK-norm, tied embeddings."""
    return TransformerConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=num_layers,
        attention=MultiHead(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=model_dim // num_heads,
            qk_norm=QKNorm(),
        ),
        feed_forward=(GLU(hidden_dim=8 * model_dim // 3 // 32 * 32),),
        head=Head(tied=True),
    )


def muon(*, warmup_steps: int) -> OptimizerConfig:
    """Muon with a cosine schedule, the optimizer of all named runs."""
    return OptimizerConfig(
        schedule=Cosine(peak=0.02, warmup_steps=warmup_steps), optimizer=Muon(adamw_rate=0.15)
    )


RUNS = {
    "default": Pretrain(
        model=llama(model_dim=192, num_layers=4, num_heads=4, vocab_size=4096),
        optimizer=muon(warmup_steps=20),
    ),
    "tiny": Pretrain(
        model=llama(model_dim=64, num_layers=2, num_heads=4, vocab_size=512),
        tokenizer=data.BPE(vocab_size=512),
        length=64,
        steps=20,
        evaluate_every=10,
        save_every=10,
        optimizer=muon(warmup_steps=2),
    ),
    "small": Pretrain(
        model=llama(model_dim=768, num_layers=12, num_heads=12, vocab_size=32768),
        tokenizer=data.BPE(vocab_size=32768),
        length=1024,
        batch_size=64,
        steps=10_000,
        evaluate_every=500,
        evaluate_rows=256,
        save_every=1000,
        dtype="bfloat16",
        remat="dots",
        scan=True,
        optimizer=muon(warmup_steps=200),
    ),
}


class Tokenising:
    """Prints tokenization progress every few seconds."""

    def __init__(self) -> None:
        self._told_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._told_at > SECONDS_BETWEEN:
            self._told_at = time.monotonic()
            print(f"  tokenised {done / total:.0%} of {format_count(total)} bytes", flush=True)


class Text(NamedTuple):
    """Packed training and evaluation rows, with their tokenizer and held-out documents.

    Attributes:
        tokenizer: Of the text.
        template: That wrote the instructions.
        stop: Tokens that end a text.
        train: Rows to train on.
        held_out: Rows to evaluate on.
        documents: Those that are held out.
        cache: Folder of the rows.
    """

    tokenizer: data.Tokenizer
    template: data.ChatTemplate | None
    stop: tuple[int, ...]
    train: data.AnyRows
    held_out: data.AnyRows
    documents: data.Documents
    cache: Path


def main(run: Pretrain, runs: Mapping[str, Pretrain] = RUNS) -> Path:
    """Pretrain, evaluate and sample; returns the output folder."""
    prepare_devices(run)
    with output_folder(run) as output:
        if not goes_on(run, output):
            check_length(run, runs)
        again = show_run(run, runs, started_from)
        using = machinery(run, output, length=run.length)
        text = read_corpus(own_beginning(run, output))
        check_vocabulary(run.model, text.tokenizer, init=run.init)
        if run.epochs is not None:
            run = in_epochs(run, run.epochs, text.train)
        run = settled(run, output)
        if run.sample_tokens is not None:
            encode_prompt(run, text)
        work(run, text, using)
        print(f"\nEverything is in {using.kept}. To repeat the run:\n  {again}")
    return output


def check_length(run: Pretrain, runs: Mapping[str, Pretrain]) -> None:
    """Refuse a run whose length is told twice, once otherwise than by a named run."""
    if run.epochs is not None and run.steps not in {named.steps for named in runs.values()}:
        raise ValueError(
            f"--steps {run.steps} and --epochs {run.epochs:g} exclude each other; --epochs None "
            "counts steps."
        )


def in_epochs(run: Pretrain, epochs: float, rows: data.AnyRows) -> Pretrain:
    """Replace epochs by the number of steps that they are."""
    # As the number is written: 0.7 times 10 rows are 7, not 8.
    steps = math.ceil(Fraction(str(epochs)) * rows.epoch / run.batch_size)
    updates = f"{steps:,} update{'s' * (steps > 1)}"
    print(f"{format_times(epochs).capitalize()} through the text: {updates}.")
    return replace(run, steps=steps, epochs=None)


def work(run: Pretrain, text: Text, using: Machinery) -> None:
    """Train, print the sample and plot the losses."""
    output = using.output
    gzip = data.gzip_bits_per_byte(
        data.Document(document.name, data.counted_text(document, text.tokenizer))
        for document in text.documents
    )
    with (
        Checkpoints(using.kept / "checkpoints", keep=run.keep) as checkpoints,
        explained_end(run, checkpoints, using.kept),
    ):
        trained = train_on(run, text, using, checkpoints, gzip)
    if trained is not None:
        state, numbers = trained
        bits = numbers["final_held_out_bits_per_byte"]
        print(f"\nHeld-out text: {bits:.3f} bits per byte; gzip -9 needs {gzip:.3f}.")
        if run.sample_tokens is not None:
            print_sample(run, text, state.params, using.mesh, new=run.sample_tokens)
    if is_first():
        plot_run(output / "run.png", read_json_lines(output / "metrics.jsonl"), gzip=gzip)


def read_corpus(run: Pretrain) -> Text:
    """Read, split, tokenize and pack the corpus, or open the packed rows of an earlier run.

    Raises:
        ValueError: The text cannot be read, split or encoded, or a part fills no row.
    """
    print(f"Corpus: {run.corpus}", flush=True)
    sources = run.corpus.parts if isinstance(run.corpus, data.Mixture) else (run.corpus,)
    template = chat_template(run)
    parts = [
        data.split(data.documents(source, template=template), held_out=run.held_out)
        for source in sources
    ]
    texts = (document.text for part in parts for document in part.train)
    tokenizer = data.build_tokenizer(run.tokenizer, texts)
    packed = [read_part(run, *each, tokenizer) for each in zip(sources, parts, strict=True)]
    weights = run.corpus.weights if isinstance(run.corpus, data.Mixture) else None
    train, held_out = (data.mix(rows, weights) for rows in zip(*packed, strict=True))
    documents = data.Documents(lambda: chain.from_iterable(part.held_out for part in parts))
    stop = learned_stop(origin(run, tokenizer), tokenizer)
    return Text(tokenizer, template, stop, train, held_out, documents, run.cache)


def read_part(
    run: Pretrain, source: data.Source, parts: data.Split, tokenizer: data.Tokenizer
) -> tuple[data.PackedRows, data.PackedRows]:
    """Tokenize and pack the training part and the held-out part of one source."""
    if source is not run.corpus:
        print(f"  {source}", flush=True)
    names, packed = ("to train on", "held out"), []
    for name, documents in zip(names, parts, strict=True):
        try:
            packed.append(
                data.pack(
                    documents, tokenizer, row_length=run.length, folder=run.cache, told=Tokenising()
                )
            )
        except ValueError as error:
            raise ValueError(f"{source}, {name}: {error}") from error
    train, held_out = packed
    for rows, name in zip(packed, names, strict=True):
        if rows.num_targets < run.length and rows.counted is None:
            raise ValueError(
                f"held_out {run.held_out} of {train.num_bytes + held_out.num_bytes} bytes leaves "
                f"{rows.num_targets} tokens {name}, less than one row of length {run.length}; give "
                "more text, another share or a smaller length."
            )
        print(
            f"  {name}: {rows.num_documents} documents, {format_count(rows.num_bytes)} bytes, "
            f"{format_count(rows.num_targets)} tokens",
            flush=True,
        )
    return train, held_out


def train_on(
    run: Pretrain, text: Text, using: Machinery, checkpoints: Checkpoints, gzip: float
) -> tuple[step.TrainState, dict[str, float]] | None:
    """Train on the packed rows; returns last state and metrics, None if already complete."""
    mesh = using.mesh
    digests = {"train": text.train.digest(), "held_out": text.held_out.digest()}
    rows = local_rows(mesh, run.batch_size)
    batches = data.Batches(text.train, batch_size=run.batch_size, seed=run.seed, local=rows)
    tally = step.make_tally(using.model, mesh)

    def evaluate(at: int, params: Any, progress: Progress) -> dict[str, float]:
        last = at == run.steps
        rows = None if last else run.evaluate_rows
        bits = held_out_bits(run, text.held_out, mesh, tally, params, rows=rows)
        progress.update(at, bits_per_byte=bits)
        if not last:
            return {"held_out_bits_per_byte": bits}
        return {
            "final_held_out_bits_per_byte": bits,
            "gzip_bits_per_byte": gzip,
            "tokens_per_byte": text.train.num_targets / text.train.num_bytes,
        }

    return train(
        run,
        using,
        text.tokenizer,
        checkpoints,
        describe(run, FIXED, text.tokenizer, data=digests),
        fetch=lambda at: put_batch(batches[at], mesh, run.batch_size),
        length=run.length,
        evaluate=evaluate,
        loss=lambda numbers: numbers["held_out_bits_per_byte"],
    )


def held_out_bits(
    run: Pretrain,
    whole: data.AnyRows,
    mesh: Mesh,
    tally: Any,
    params: Any,
    *,
    rows: int | None = None,
) -> float:
    """Bits per byte of held-out text, of all rows or of an even sample."""
    held_out, size = whole, run.batch_size
    if rows is not None and rows < len(whole):
        held_out = whole.part(np.linspace(0, len(whole) - 1, rows).astype(int))
    batches = data.evaluation_batches(held_out, batch_size=size, local=local_rows(mesh, size))
    nats, tokens = loop.evaluate(tally, params, (put_batch(b, mesh, size) for b in batches))
    return float(F.bits_per_byte(nats * whole.num_targets / tokens, whole.num_bytes))


def instructs(corpus: data.Corpus) -> bool:
    """Whether any source of the corpus has instructions."""
    parts = corpus.parts if isinstance(corpus, data.Mixture) else (corpus,)
    return any(isinstance(part, data.Instructions) for part in parts)


def chat_template(run: Pretrain) -> data.ChatTemplate | None:
    """Chat template for the instructions of a run, if the tokenizer has one."""
    if instructs(run.corpus) and isinstance(run.tokenizer, data.Saved):
        return data.load_chat_template(run.tokenizer.path, run.chat_template)
    return None


def encode_prompt(run: Pretrain, text: Text) -> list[int]:
    """The prompt of the sample at the end, after what begins a text; to an assistant, a question.

    Raises:
        ValueError: The tokenizer does not know it, or it leaves no room in a row.
    """
    template, tokenizer = text.template, text.tokenizer
    try:
        if template is not None:
            asked = [{"role": "user", "content": run.prompt}]
            prompt = data.asked_tokens(asked, template, tokenizer)
        else:
            prompt = [data.begin_of_text(tokenizer), *tokenizer.encode(run.prompt).tolist()]
    except ValueError as error:
        raise ValueError(f"prompt {run.prompt[:40]!a} cannot be encoded: {error}") from error
    longest = run.model.max_length or run.length
    if len(prompt) >= longest:
        raise ValueError(
            f"prompt has {len(prompt)} tokens, the first of a text included, which leave no room "
            f"in the length of {longest}; shorten it."
        )
    return prompt


def print_sample(run: Pretrain, text: Text, params: Any, mesh: Mesh, *, new: int) -> None:
    """Print the model's continuation of the sample prompt."""
    tokenizer = text.tokenizer
    prompt = encode_prompt(run, text)
    longest = run.model.max_length or run.length
    tokens = generate(
        run.model,
        params,
        np.asarray(prompt, np.int32),
        max_new_tokens=min(new, longest - len(prompt)),
        vocab_size=tokenizer.vocab_size,
        sampler=Sample(temperature=0.8, top_p=0.95),
        stop_tokens=text.stop if instructs(run.corpus) else (),
        key=jax.random.key(run.seed),
        dtype=run.dtype,
        mesh=mesh,
    )
    print(f"\nSample:\n{printable(tokenizer.decode(np.asarray(tokens)), sys.stdout)}")


if __name__ == "__main__":
    with readable_errors():
        main(parse(RUNS, __doc__, begin=started_from, resume=asked_before))
