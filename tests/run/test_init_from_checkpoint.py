"""Runs that start from the weights, model and tokenizer of a folder."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer, data, generate, load_pretrained
from jaxformer import functional as F
from jaxformer.run import evaluation, exporting, finetuning, preference_training, pretraining
from jaxformer.run.beginning import run_from_checkpoint
from jaxformer.run.command_line import parse_run
from jaxformer.run.loading import learned_stop, load_run, stop_tokens
from jaxformer.run.output_folder import write_beginning
from jaxformer.run.program import with_epochs_as_steps
from jaxformer.run.train_setup import make_train_setup
from jaxformer.training.metrics import read_json_lines
from tests.interop.numpy_folders import LLAMA, llama_shapes, random_tensors, write_folder
from tests.small_models import float64_log_probs

LINES = [f"{n}: the {w} fox jumps over {n * n} lazy dogs\n" for n in range(90) for w in ("a", "b")]
SETTINGS = LLAMA | {"vocab_size": 320, "hidden_size": 24, "intermediate_size": 22}
BASE = replace(
    pretraining.RUNS["tiny"],
    corpus=data.TextFiles(path="corpus.txt"),
    held_out=0.1,
    length=16,
    batch_size=8,
    steps=4,
    schedule_steps=4,
    log_every=1,
    save_every=2,
    evaluate_rows=3,
    devices=1,
    scan=True,
    cache=Path("cache"),
    output=Path("out"),
    tensorboard=False,
    sample_tokens=None,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder as another library writes it: config.json, weights, and a tokenizer of its own."""
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("".join(LINES))
    drawn = random_tensors(llama_shapes(SETTINGS))
    tensors = {name: x if x.ndim == 1 else 0.1 * x for name, x in drawn.items()}
    folder = write_folder(tmp_path / "theirs", SETTINGS, tensors)
    data.export_tokenizer(data.train_bpe(LINES, vocab_size=300), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ messages }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def losses(output):
    lines = read_json_lines(Path(output) / "metrics.jsonl")
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
def test_the_first_loss_is_that_of_the_weights_in_the_folder(folder, capsys):
    run = run_from_checkpoint(BASE, str(folder))
    pretraining.pretrain(run)
    assert f"Initialized from the weights of {folder}." in capsys.readouterr().out
    config, params = load_pretrained(folder)
    assert run.model == config
    batch = data.Batches(pretraining.prepare_corpus(run).train, batch_size=8, seed=run.seed)[0]
    tokens, targets, positions, segments, mask = map(jnp.asarray, batch)

    @jax.jit
    def loss(params):
        inputs = {"positions": positions, "segments": segments}
        logits = Transformer(config).apply({"params": params}, tokens, **inputs)
        return F.cross_entropy(logits, targets, mask=mask)

    expected = loss(params)
    np.testing.assert_allclose(losses("out")[0], expected, rtol=1e-5)
    assert losses("out")[-1] < losses("out")[0]


@pytest.mark.slow
def test_an_export_says_what_the_folder_said(folder, tmp_path):
    config_json = json.loads((folder / "config.json").read_text())
    config_json |= {"eos_token_id": [0, 7], "bos_token_id": 3, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config_json))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 7], "top_p": 0.8}')
    pretraining.pretrain(replace(run_from_checkpoint(BASE, str(folder)), steps=2))
    text = "the fox jumps"
    ids = load_run(Path("out")).tokenizer.encode(text)
    np.testing.assert_array_equal(ids, data.load_tokenizer(folder).encode(text))
    exporting.export(exporting.Export(checkpoint=Path("out"), output=tmp_path / "given"))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        actual, expected = (
            json.loads((f / name).read_text()) for f in (tmp_path / "given", folder)
        )
        assert actual == expected
    written = json.loads((tmp_path / "given" / "config.json").read_text())
    for name in ("model_type", "eos_token_id", "bos_token_id", "max_position_embeddings"):
        assert written[name] == config_json[name]
    actual = load_pretrained(tmp_path / "given")
    jax.tree.map(np.testing.assert_array_equal, actual.params, load_run(Path("out")).params)


@pytest.fixture
def ended(folder):
    """The folder, which says that a text ends in token 0 or 9, by the second of its two files."""
    config_json = json.loads((folder / "config.json").read_text()) | {"eos_token_id": [0, 7]}
    (folder / "config.json").write_text(json.dumps(config_json))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 9]}')
    return folder


def test_what_ends_a_text_is_kept_with_a_run(ended):
    """So are the tokenizer and its template, whatever its file is called; not ids of another."""
    run, folder = run_from_checkpoint(BASE, str(ended)), Path("kept")
    folder.mkdir()
    write_beginning(run, data.load_tokenizer(ended), folder)
    tokenizer = data.load_tokenizer(folder)
    assert (folder / "tokenizer.json").read_bytes() == (ended / "tokenizer.json").read_bytes()
    assert learned_stop(folder, tokenizer) == stop_tokens(ended, tokenizer) == (0, 9)
    assert "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())

    other, path = Path("other"), ended / "another.json"
    other.mkdir()
    data.export_tokenizer(data.train_bpe(LINES, vocab_size=290), "made")
    path.write_bytes(Path("made/tokenizer.json").read_bytes())
    tokenizer = data.load_tokenizer(path)
    write_beginning(
        replace(run, tokenizer=data.PretrainedTokenizer(path=str(path))), tokenizer, other
    )
    assert data.load_tokenizer(other).to_json() == tokenizer.to_json()
    assert learned_stop(other, tokenizer) == (0,) and not (other / "config.json").exists()


@pytest.mark.slow
def test_a_run_goes_on_without_the_folder_it_began_with(ended, capsys, monkeypatch):
    """Bitwise as with it; and it answers, and ends its answers, as the folder would."""
    stops, real = [], pretraining.generate

    def spied(*arguments, stop_tokens, **options):
        stops.append(stop_tokens)
        return real(*arguments, stop_tokens=stop_tokens, **options)

    monkeypatch.setattr(pretraining, "generate", spied)
    settings = json.loads((ended / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (ended / "tokenizer_config.json").write_text(json.dumps(settings))
    lines = [{"prompt": f"the {n} fox", "answer": f"jumps {n * n}"} for n in range(60)]
    Path("x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = ["--init", str(ended), "--corpus", "Instructions(path='x.jsonl')", "--length", "48"]
    first += ["--model.dropout.residual", "0.1", "--devices", "1", "--scan", "--no-tensorboard"]
    first += ["--epochs", "None", "--batch-size", "8", "--sample-tokens", "2", "--cache", "cache"]
    first += ["--schedule-steps", "9", "--log-every", "1", "--held-out", "0.2"]

    def tuned(*arguments):
        finetuning.finetune(parse_run(finetuning.RUNS, "", [*arguments]))

    tuned(*first, "--steps", "4", "--output", "whole")
    again = ["--resume-or-begin", "--output", "out"]
    tuned(*first, *again, "--steps", "2")
    shutil.move(ended, "gone")
    tuned("--resume", "--output", "out", "--steps", "3")
    capsys.readouterr()
    tuned(*first, *again, "--steps", "4")
    assert f"  jaxformer finetune --init {ended} --" in capsys.readouterr().out
    assert losses("out") == losses("whole")
    assert stops == [(0, 9)] * 4
    model, whole = load_run(Path("out")), load_run(Path("whole"))
    assert model.stop_tokens == (0, 9) and model.config.dropout.residual == 0.1
    jax.tree.map(np.testing.assert_array_equal, model.params, whole.params)
    messages = [{"role": "user", "content": "x"}]
    assert model.load_chat_template().render(messages) == data.load_chat_template("gone").render(
        messages
    )
    exporting.export(exporting.Export(checkpoint=Path("out"), output=Path("given")))
    assert load_run(Path("given")).stop_tokens == (0, 9)


@pytest.mark.parametrize("length, given", [(None, []), (48, ["--length", "48"])])
def test_rows_beyond_the_context_of_a_folder_are_not_made_and_given_ones_are_named(
    length, given, folder, capsys
):
    config_json = json.loads((folder / "config.json").read_text())
    config_json["max_position_embeddings"] = 24
    (folder / "config.json").write_text(json.dumps(config_json))
    for program in (finetuning, pretraining, preference_training):
        flags = ["--init", str(folder), "--devices", "1", *given]
        run = parse_run(program.RUNS, "", flags).largest()
        assert run.length == (length or 24)
        make_train_setup(run, Path("out"), length=run.length)
        named = "Warning: rows have 48 tokens, but the model knows 24 positions"
        assert (named in capsys.readouterr().out) == bool(given)


@pytest.mark.slow
def test_a_run_begins_where_another_one_ended():
    pretraining.pretrain(BASE)
    again = run_from_checkpoint(BASE, "out")
    assert (again.model, again.tokenizer) == (BASE.model, data.PretrainedTokenizer(path="out"))
    assert run_from_checkpoint(finetuning.RUNS["default"], "out").largest().length == BASE.length
    pretraining.pretrain(replace(again, output=Path("more")))
    assert losses("more")[0] < losses("out")[0] - 0.1


def test_flags_change_what_comes_along(folder):
    run = parse_run(
        {"tiny": BASE},
        "",
        ["--init", str(folder), "--model.dropout.residual", "0.1", "--length", "8"],
    )
    model = load_pretrained(folder).config
    assert run.model == replace(model, dropout=replace(model.dropout, residual=0.1))
    assert (run.init, run.length, run.tokenizer) == (
        str(folder),
        8,
        data.PretrainedTokenizer(path=str(folder)),
    )


@pytest.mark.slow
def test_weights_of_another_model_are_refused(folder):
    message = r"parameters do not fit the configuration: .*/query/kernel is \[3, .*\], not \[2, "
    run = run_from_checkpoint(BASE, str(folder))
    with pytest.raises(ValueError, match=message):
        pretraining.pretrain(replace(run, model=replace(run.model, num_layers=2)))


def test_a_vocabulary_that_does_not_fit_is_refused_before_text_is_read(folder, monkeypatch):
    monkeypatch.setattr(pretraining, "prepare_corpus", None)
    data.export_tokenizer(data.train_bpe(LINES, vocab_size=340), folder)
    have = data.load_tokenizer(folder).vocab_size
    message = f"The tokenizer has {have} tokens, but the model of {folder} has 320. Pass the token"
    with pytest.raises(ValueError, match=re.escape(message)):
        pretraining.pretrain(run_from_checkpoint(BASE, str(folder)))


@pytest.mark.slow
def test_a_folder_without_a_tokenizer_begins_a_run_with_another(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    run = run_from_checkpoint(BASE, str(folder))
    pretraining.pretrain(replace(run, tokenizer=data.ByteLevel(), steps=1, schedule_steps=1))
    assert len(losses("out")) == 1


def test_a_tokenizer_or_a_text_is_named_by_its_path(folder):
    flags = ["--tokenizer", str(folder / "tokenizer.json"), "--corpus", "corpus.txt"]
    run = parse_run({"tiny": BASE}, "", flags)
    assert run.tokenizer == data.PretrainedTokenizer(path=str(folder / "tokenizer.json"))
    assert run.corpus == data.TextFiles(path="corpus.txt")
    built, expected = data.build_tokenizer(run.tokenizer, ()), data.load_tokenizer(folder)
    assert run.model.vocab_size == -(-expected.vocab_size // 128) * 128
    kept = parse_run({"tiny": BASE}, "", [*flags, "--init", str(folder)])
    assert kept.model.vocab_size == SETTINGS["vocab_size"]  # that of --init
    assert built.to_json() == expected.to_json()


def test_a_name_of_the_hub_is_downloaded(folder, monkeypatch):
    requests = []

    def download(name, *, allow_patterns):
        requests.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    actual = load_pretrained("some-maker/Model-1.5B")
    assert actual.config == load_pretrained(folder).config
    assert requests == [("some-maker/Model-1.5B", ["*.json", "model*.safetensors", "*.jinja"])]


def test_without_a_network_one_sentence_says_what_to_do(monkeypatch):
    def nowhere(name, **_):
        raise FileNotFoundError("Got: ConnectError: no name.\nCheck the connection.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", nowhere)
    with pytest.raises(ValueError) as refused:
        load_pretrained("maker/Model")
    assert str(refused.value) == (
        "maker/Model is not a local folder, and could not be downloaded from the Hugging Face hub: "
        "Got: ConnectError: no name. With network access, `hf download maker/Model` prints the "
        "folder to pass instead."
    )


@pytest.mark.slow
def test_fine_tuning_goes_through_the_text_as_often_as_asked(folder, capsys):
    flags = ["--init", str(folder), "--corpus", "corpus.txt", "--length", "16", "--epochs", "0.75"]
    flags += ["--devices", "1", "--scan", "--no-tensorboard", "--log-every", "1"]
    flags += ["--held-out", "0.1", "--cache", "cache", "--sample-tokens", "2", "--output", "out"]
    run = parse_run(finetuning.RUNS, "", [*flags, "--lr", "3e-5"])
    finetuning.finetune(run)
    rows = pretraining.prepare_corpus(run).train
    steps = math.ceil(0.75 * len(rows) / 8)
    output = capsys.readouterr().out
    assert f"Epochs: 0.75, steps: {steps}.\n" in output and steps >= 10
    assert f"shortened from 20 to {steps // 10} steps, as the schedule has {steps}." in output
    assert output.startswith(f"Run: default --init {folder}\n  --optimizer.schedule ")
    assert "model." not in output.partition("Corpus:")[0]
    lines = [line for line in read_json_lines(Path("out/metrics.jsonl")) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert max(line["learning_rate"] for line in lines) == pytest.approx(3e-5)


@pytest.mark.parametrize(
    ("epochs", "rows", "batch_size", "steps"),
    [
        (1.0, 5, 4, 2),
        (1.0, 4, 4, 1),
        (2.0, 5, 4, 3),
        (0.7, 10, 1, 7),
    ],  # in floats 7.000000000000001
)
def test_every_row_is_seen_as_often_as_epochs_say(epochs, rows, batch_size, steps, capsys):
    packed = data.PackedRows(
        tokens=np.zeros(2 * rows + 1, np.int32),
        starts=np.zeros(1, int),
        document_bytes=np.zeros(1, int),
        num_inputs=2 * rows,
        row_length=2,
        **dict.fromkeys(("end_of_text", "num_documents", "num_bytes", "num_targets"), 1),
    )
    run = replace(finetuning.RUNS["default"], batch_size=batch_size, epochs=epochs)
    run = with_epochs_as_steps(run, packed.epoch)
    assert capsys.readouterr().out.startswith(f"Epochs: {epochs:g}, steps: {steps}.\n")
    assert (run.epochs, run.steps) == (None, steps)


@pytest.mark.parametrize("epochs", ["0", "-1", "inf", "nan"])
def test_epochs_that_do_not_end_or_begin_are_refused(epochs):
    with pytest.raises(ValueError, match="epochs must be .*; got"):
        replace(finetuning.RUNS["default"], epochs=float(epochs))


def test_a_name_that_is_no_folder_and_no_hub_name_says_what_to_pass():
    message = (
        "no folder 'gpt2'. --init takes .* a hub name OWNER/NAME such as openai-community/gpt2"
    )
    with pytest.raises(ValueError, match=message):
        run_from_checkpoint(finetuning.RUNS["default"], "gpt2")


def test_fine_tuning_nothing_is_refused():
    with pytest.raises(ValueError, match="needs a pretrained model: pass --init FOLDER"):
        finetuning.finetune(finetuning.RUNS["default"])


TEMPLATE = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant:\n{% endif %}"


@pytest.mark.parametrize(
    "templated",
    [False, pytest.param(True, marks=pytest.mark.exhaustive)],
    ids=["plain", "template"],
)
@pytest.mark.slow
def test_held_out_answers_are_measured_alone(templated, folder, capsys):
    """Packed in rows, as each by itself: -sum of log2 p over the tokens of answers, over bytes."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    more = {"chat_template": TEMPLATE} if templated else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | more))
    space = "" if templated else " "  # no token is of both
    lines = [{"prompt": f"the {n} fox", "answer": f"{space}jumps {n * n}"} for n in range(60)]
    Path("x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = data.Instructions(path="x.jsonl")
    run = replace(run_from_checkpoint(BASE, str(folder)), corpus=corpus, length=48, sample_tokens=3)
    pretraining.pretrain(run)
    assert "Sample:" in capsys.readouterr().out
    model, tokenizer = load_run(Path("out")), data.load_tokenizer(folder)
    template = data.load_chat_template(folder)
    held_out = [*data.split(data.documents(corpus, template=template), held_out=0.1).held_out]
    bits, size = 0.0, 0
    for document in held_out:
        prompt, answer = document.spans[0][0], document.spans[1][0]
        start = [] if templated else [tokenizer.end_of_text]
        ends = [] if templated else [tokenizer.end_of_text]
        before = [*start, *tokenizer.encode(prompt).tolist()]
        after = [*tokenizer.encode(answer).tolist(), *ends]
        tokens = [*before, *after]
        log_probs = float64_log_probs(model.config, model.params, tokens[:-1])[len(before) - 1 :]
        bits -= log_probs[np.arange(len(after)), after].sum() / np.log(2)
        size += len(answer.encode())
    final = read_json_lines(Path("out/metrics.jsonl"))[-1]["final_held_out_bits_per_byte"]
    assert len(held_out) >= 5 and final == pytest.approx(bits / size, rel=1e-4)


def test_a_template_is_for_instructions_and_a_tokenizer_that_there_is(folder):
    for run in (BASE, run_from_checkpoint(BASE, str(folder))):
        with pytest.raises(ValueError, match="--chat-template needs a corpus of Instructions and"):
            replace(run, chat_template="chatml")


@pytest.mark.slow
def test_a_model_without_a_template_is_given_one_that_its_run_and_its_export_keep(folder):
    data.export_tokenizer(data.load_tokenizer(folder), folder)  # has no template
    lines = [{"prompt": f"the {n} fox", "answer": f"jumps {n}"} for n in range(60)]
    Path("x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus, more = data.Instructions(path="x.jsonl"), {"chat_template": "chatml", "length": 64}
    pretraining.pretrain(
        replace(run_from_checkpoint(BASE, str(folder)), corpus=corpus, steps=2, **more)
    )
    exported = exporting.export(exporting.Export(checkpoint=Path("out"), output=Path("ours")))
    talk = [{"role": "user", "content": "hi"}]
    expected = "<|im_start|>user\nhi<|endoftext|>\n<|im_start|>assistant\n"
    for at in (Path("out"), exported):
        assert data.load_chat_template(at).render(talk, add_generation_prompt=True) == expected
        ids = load_run(at).encode_chat(talk)
        assert ids.count(data.load_tokenizer(at).end_of_text) == 1
    figures, named_figures = (
        evaluation.evaluate(
            evaluation.Evaluate(checkpoint=checkpoint, text=corpus, chat_template=named)
        )
        for checkpoint, named in ((Path("out"), None), (Path("out"), "chatml"))
    )
    assert figures == named_figures


@pytest.mark.slow
def test_a_thousand_instructions_halve_the_loss_of_answers_that_are_held_out(folder):
    """Also on eight devices, and where the run is stopped and gone on with by its own flags."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    words = ("fox", "dog", "cat", "owl")
    lines = [
        {"prompt": f"say {word} {n} times, please {i}:\n", "answer": " ".join([word] * n)}
        for i in range(50)
        for word in words
        for n in range(1, 6)
    ]
    Path("x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    questions = [
        {**line, "prompt": line["prompt"].replace("please", "now")} for line in lines[::20]
    ]
    Path("held_out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in questions))
    options = ["--init", str(folder), "--corpus", "Instructions(path='x.jsonl')", "--length", "96"]
    options += ["--batch-size", "16", "--scan", "--held-out", "0.05", "--cache", "cache"]
    options += ["--optimizer.schedule", "Cosine(peak=3e-3, warmup_steps=20)", "--no-tensorboard"]
    options += ["--sample-tokens", "None", "--log-every", "1", "--evaluate-rows", "8"]

    def tuned(*flags):
        finetuning.finetune(parse_run(finetuning.RUNS, "", [*flags]))

    def bits(checkpoint):
        text = data.Instructions(path="held_out.jsonl")
        return evaluation.evaluate(evaluation.Evaluate(checkpoint=checkpoint, text=text))["text"]

    tuned(*options, "--devices", "1", "--output", "one")
    before, after = bits(folder), bits(Path("one"))
    assert before["documents"] == 50 and before["tokens"] == after["tokens"]
    assert after["bits_per_byte"] < before["bits_per_byte"] / 2
    steps = len(losses("one"))
    stopped = ["--epochs", "None", "--steps", "9", "--schedule-steps", str(steps)]
    mesh = ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2"]
    tuned(*options, *stopped, *mesh, "--devices", "8", "--output", "eight")
    np.testing.assert_allclose(losses("eight"), losses("one")[:9], rtol=2e-3)
    tuned(*options, *stopped, "--devices", "1", "--output", "cut")
    tuned("--resume", "--output", "cut", "--steps", str(steps))
    assert losses("cut") == losses("one")
    actual, expected = (load_run(Path(name)).params for name in ("cut", "one"))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["Qwen3", "Gemma2"])
def test_transformers_reads_what_was_fine_tuned_from_a_folder_of_its_own(kind, tmp_path):
    """Logits, the greedy answer to a question, the end of text, and the template."""
    torch = pytest.importorskip("torch", reason="pip install 'jaxformer[parity]'")
    transformers = pytest.importorskip("transformers", reason="pip install 'jaxformer[parity]'")
    words = ("fox", "dog", "cat")
    lines = [
        {"prompt": f"Say {word} {n} times", "answer": " ".join([word] * n)}
        for word in words
        for n in range(1, 8)
    ] * 20
    Path("x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    backend = data.train_bpe([f"{x['prompt']}\n{x['answer']}" for x in lines], vocab_size=300)
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend._backend, eos_token="<|im_end|>", chat_template=CHAT
    )
    tokens.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    ids = {"vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id, "bos_token_id": None}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **ids, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0
    )
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained("theirs")
    tokens.save_pretrained("theirs")
    same = exporting.export(exporting.Export(checkpoint=Path("theirs"), output=Path("same")))
    assert {path.name for path in same.iterdir()} == {p.name for p in Path("theirs").iterdir()}
    for path in same.iterdir():
        mine, original = path.read_bytes(), (Path("theirs") / path.name).read_bytes()
        assert mine == original or json.loads(mine) == json.loads(original), path.name
    flags = ["--init", "theirs", "--corpus", "Instructions(path='x.jsonl')", "--length", "64"]
    flags += ["--batch-size", "8", "--epochs", "3", "--devices", "1", "--scan", "--output", "out"]
    flags += ["--optimizer.schedule", "Cosine(peak=3e-3, warmup_steps=5)", "--no-tensorboard"]
    flags += ["--held-out", "0.1", "--cache", "cache", "--sample-tokens", "None"]
    finetuning.finetune(parse_run(finetuning.RUNS, "", flags))
    curve = losses("out")
    assert curve[-1] < curve[0] / 2
    exporting.export(exporting.Export(checkpoint=Path("out"), output=Path("ours")))
    again = transformers.AutoModelForCausalLM.from_pretrained("ours").eval()
    reader = transformers.AutoTokenizer.from_pretrained("ours")
    assert reader.chat_template == CHAT
    assert again.config.eos_token_id == again.generation_config.eos_token_id == ids["eos_token_id"]
    messages = [{"role": "user", "content": "Say cat 3 times"}]
    text = reader.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = torch.tensor([reader(text, add_special_tokens=False).input_ids])
    answer = again.generate(prompt, max_new_tokens=12, do_sample=False)[0].tolist()
    model = load_run(Path("out"))
    prompt_ids = model.tokenizer.encode_rendered_chat([text])[0].tolist()
    assert prompt_ids == prompt[0].tolist()
    logits = Transformer(model.config).apply({"params": model.params}, jnp.asarray([prompt_ids]))
    np.testing.assert_allclose(logits, again(prompt).logits.detach(), atol=1e-5)
    ours = generate(
        model.config, model.params, [prompt_ids], max_new_tokens=12, stop_tokens=model.stop_tokens
    )
    assert np.asarray(ours)[0, : len(answer)].tolist() == answer
