"""Figures of a model on texts and questions: those of the softmax of its logits."""

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxformer import data
from jaxformer.parallel import MeshConfig
from jaxformer.run import evaluation, evaluator
from jaxformer.run.command_line import parse_args
from jaxformer.run.evaluation import Evaluate
from jaxformer.run.loading import load_run
from tests.interop.numpy_folders import LLAMA, llama_shapes, random_tensors, write_folder
from tests.small_models import float64_log_probs

TEXTS = ["the quick fox jumps over the lazy dog\n", "sphinx of black quartz, judge my vow →\n"]
SIZES = {"hidden_size": 24, "intermediate_size": 22}
SETTINGS = LLAMA | SIZES | {"bos_token_id": 1, "eos_token_id": 0}
QUESTIONS = [
    {"prompt": "the quick ", "choices": ["fox", "dog jumps", "q"], "answer": 1},
    {"prompt": "", "choices": ["the lazy", "vow"], "answer": 0},
    {"prompt": "judge my", "choices": [" vow", " black quartz fox", " dog"], "answer": 0},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluate")
    tokenizer = data.train_bpe(TEXTS * 3, vocab_size=300)
    settings = SETTINGS | {"vocab_size": tokenizer.vocab_size}
    folder = write_folder(path / "model", settings, random_tensors(llama_shapes(settings)))
    data.export_tokenizer(tokenizer, folder)
    (path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    (path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    questions = [{"prompt": "what? ", "answer": text} for text in TEXTS]
    (path / "asked.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return folder


def run(folder, **fields):
    fields = {
        k: data.TextFiles(path=str(folder.parent / v)) if k == "text" else v
        for k, v in fields.items()
    }
    return evaluation.evaluate(Evaluate(checkpoint=folder, **fields))


def log_probability(model, tokens, first):
    """Of the tokens from one on, given all before."""
    log_probs = float64_log_probs(model.config, model.params, tokens[:-1])
    return log_probs[np.arange(first - 1, len(tokens) - 1), tokens[first:]].sum()


@pytest.mark.slow
def test_a_text_is_measured_by_documents(folder, capsys):
    model = load_run(folder)
    ids = [[*model.bos_tokens, *model.tokenizer.encode(text).tolist()] for text in TEXTS]
    nats = -sum(log_probability(model, tokens, 1) for tokens in ids)
    size, words = len("".join(TEXTS).encode()), len("".join(TEXTS).split())
    stats = run(folder, text="x.jsonl")["text"]
    tokens = sum(map(len, ids)) - 2
    assert [stats[n] for n in ("documents", "bytes", "words", "tokens")] == [2, size, words, tokens]
    assert stats["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert stats["token_perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert stats["word_perplexity"] == pytest.approx(math.exp(nats / words), rel=1e-3)
    output = capsys.readouterr().out
    assert "x.jsonl, with a context of at most 1024 tokens:\n  documents: 2\n" in output
    assert f"  bits per byte: {stats['bits_per_byte']:.4g}\n" in output


def test_a_window_slides_over_what_is_longer(folder):
    """With a stride of one each token is given as many before it as the model may read."""
    model = load_run(folder)
    nats = 0.0
    for text in TEXTS:
        tokens = [*model.bos_tokens, *model.tokenizer.encode(text).tolist()]
        for i in range(1, len(tokens)):
            part = tokens[max(0, i - 5) : i + 1]
            nats -= log_probability(model, part, len(part) - 1)
    figures = run(folder, text="x.jsonl", length=5, stride=1)["text"]
    size = len("".join(TEXTS).encode())
    assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    wide = run(folder, text="x.jsonl", length=5)["text"]
    assert wide["tokens"] == figures["tokens"] and wide["bits_per_byte"] != figures["bits_per_byte"]


def test_contexts_beyond_those_of_the_model_are_named(folder, tmp_path, capsys):
    short = shutil.copytree(folder, tmp_path / "model")
    settings = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 20}
    (short / "config.json").write_text(json.dumps(settings))
    for length, is_named in ((None, False), (20, False), (21, True)):
        evaluator.load_evaluator(Evaluate(checkpoint=short, choices=Path("x"), length=length))
        warning = "Warning: contexts have up to 21 tokens, but the model knows 20 positions "
        assert capsys.readouterr().err.startswith(warning) == is_named


@pytest.mark.slow
def test_only_the_answers_of_instructions_are_measured(folder):
    model = load_run(folder)
    end, encode = model.tokenizer.end_of_text, model.tokenizer.encode
    prompt = encode("what? ").tolist()
    nats, size = 0.0, 0
    for text in TEXTS:
        whole = encode("what? " + text).tolist()  # its first word may have the space before it
        first = len(os.path.commonprefix([prompt, whole])) + 1
        size += len(model.tokenizer.decode(whole[first - 1 :]).encode())
        nats -= log_probability(model, [*model.bos_tokens, *whole, end], first)
    corpus = data.Instructions(path=str(folder.parent / "asked.jsonl"))
    figures = evaluation.evaluate(Evaluate(checkpoint=folder, text=corpus))["text"]
    assert figures["bytes"] == size
    assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    windowed = evaluation.evaluate(Evaluate(checkpoint=folder, text=corpus, length=7))["text"]
    assert windowed["tokens"] == figures["tokens"] == sum(len(encode(t)) + 1 for t in TEXTS)


def test_answers_that_are_all_empty_have_no_figures(folder, tmp_path):
    (tmp_path / "none.jsonl").write_text('{"prompt": "what?", "answer": ""}\n' * 2)
    corpus = data.Instructions(path=str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"The answers of .*none\.jsonl are empty\."):
        evaluation.evaluate(Evaluate(checkpoint=folder, text=corpus))


@pytest.mark.slow
def test_a_perplexity_beyond_all_floats_is_infinite(folder, tmp_path):
    """A hundred characters, one word: e to the power of some 1,500."""
    (tmp_path / "x.txt").write_text("\u5929" * 100, encoding="utf-8")
    text, output = data.TextFiles(path=str(tmp_path / "x.txt")), tmp_path / "figures.json"
    figures = evaluation.evaluate(Evaluate(checkpoint=folder, text=text, output=output))["text"]
    nats = figures["bits_per_byte"] * math.log(2) * 300
    assert nats > 710 and figures["word_perplexity"] == math.inf
    assert figures["token_perplexity"] == pytest.approx(math.exp(nats / figures["tokens"]))
    written = json.loads(output.read_text(), parse_constant=pytest.fail)
    assert written == {"text": figures | {"word_perplexity": None}}


def test_a_choice_that_joins_the_last_token_is_scored_with_it(folder, tmp_path):
    """So are the others of its question: the likeliest text wins, from where all of them part."""
    model = load_run(folder)
    encode, prompt, choices = model.tokenizer.encode, "the qu", ["ick", "iz"]
    assert len(encode(prompt)) == len(encode(prompt + choices[0])) == 2
    scores = []
    for choice, (first, more) in zip(choices, model.continuations(prompt, choices), strict=True):
        assert [*first, *more] == model.encode_prompt(prompt + choice)[0]
        assert len(first) == 2  # the start of a text, and "the"
        scores.append(log_probability(model, [*first, *more], 2))
    assert max(scores) < 0
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "choices": choices, "answer": 1}))
    assert run(folder, choices=path)["choices"]["acc"] == float(np.argmax(scores) == 1)


def test_the_likeliest_choice_is_compared_with_the_right_one(folder, tmp_path):
    model = load_run(folder)
    right = right_by_byte = 0
    for question in QUESTIONS:
        scores, sizes = [], []
        for choice in question["choices"]:
            first, more = model.encode_continuation(question["prompt"], choice)
            text = model.tokenizer.decode([*first[not question["prompt"] :], *more])
            assert text == question["prompt"] + choice
            scores.append(log_probability(model, [*first, *more], len(first)))
            sizes.append(len(choice.encode()))
        right += int(np.argmax(scores)) == question["answer"]
        right_by_byte += int(np.argmax(np.divide(scores, sizes))) == question["answer"]
    path = folder.parent / "questions.jsonl"
    figures = run(folder, choices=path, output=tmp_path / "figures.json")
    expected = {"questions": 3, "acc": right / 3, "acc_norm": right_by_byte / 3}
    assert figures["choices"] == expected
    assert json.loads((tmp_path / "figures.json").read_text()) == {"choices": expected}


@pytest.mark.slow
def test_many_devices_measure_what_one_does(folder):
    one = run(folder, text="x.jsonl", length=16)["text"]
    mesh = MeshConfig(fsdp=2, context=2, tensor=2)
    many = run(folder, text="x.jsonl", length=16, mesh=mesh, devices=8)["text"]
    assert many["bits_per_byte"] == pytest.approx(one["bits_per_byte"], rel=1e-5)


def test_what_cannot_be_measured_or_written_is_said_before_the_model_is_read(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(evaluator, "load_run", pytest.fail)
    with pytest.raises(ValueError, match="pass --text, --choices or --tasks"):
        Evaluate(checkpoint=folder)
    with pytest.raises(ValueError, match=r"nothing\.txt does not exist"):
        run(folder, text="nothing.txt")
    for output, message in (
        (Path(""), r"output must name a file; '\.' is a folder"),
        (tmp_path / "no" / "x.json", "the folder .*no does not exist"),
        (folder.parent / "x.jsonl", r"output .*x\.jsonl is the file that is read; name another"),
    ):
        with pytest.raises(ValueError, match=message):
            run(folder, text="x.jsonl", output=output)
    path = tmp_path / "q.jsonl"
    for line, message in (
        ({"choices": ["a"], "answer": 0}, r"q\.jsonl line 1 lacks prompt; it has answer"),
        (
            {"prompt": "a", "choices": ["a", 3], "answer": 0},
            r"line 1: choices must be non-empty strings",
        ),
        (
            {"prompt": "a", "choices": ["a"], "answer": 1},
            "answer must be an index from 0 to 0; got 1",
        ),
        (None, r"q\.jsonl has no questions"),
    ):
        path.write_text("" if line is None else json.dumps(line))
        with pytest.raises(ValueError, match=message):
            run(folder, choices=path)


def test_the_command_names_the_folder_and_a_text_by_its_path(folder):
    path = str(folder.parent / "x.jsonl")
    run = parse_args(Evaluate, "", [str(folder), "--text", path, "--step", "best"])
    assert run == Evaluate(checkpoint=folder, text=data.TextFiles(path=path), step="best")
    assert replace(run, choices=Path("q")).choices == Path("q")


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_unknown_tasks_are_refused_before_the_model_is_read(folder, monkeypatch):
    pytest.importorskip("lm_eval", reason="pip install 'jaxformer[eval]'")
    monkeypatch.setattr(evaluator, "load_run", pytest.fail)
    for fields, message in (
        ({"tasks": ("nope", "hellaswag")}, r"lm-evaluation-harness has no task 'nope'\."),
        ({"tasks": ("nope",), "task_folder": Path("no")}, r"task_folder no does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            run(folder, **fields)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_the_harness_has_the_figures_of_its_own_transformers_backend(folder):
    reason = "pip install 'jaxformer[parity,eval]'"
    pytest.importorskip("torch", reason=reason)
    lm_eval = pytest.importorskip("lm_eval", reason=reason)
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from jaxformer.run.lm_eval_harness import LMEvalModel

    theirs = HFLM(pretrained=str(folder), device="cpu", max_length=16, batch_size=2)
    ours = LMEvalModel.from_folder(folder, length=16)
    assert ours.prefix_token_id == theirs.prefix_token_id == 0  # config.json says another
    text = "".join(TEXTS)
    pairs = [(text[:i], text[i : i + n]) for i, n in ((0, 9), (7, 1), (10, 4), (60, 12), (4, 3))]

    def ask(model, kind, *arguments):
        requests = [Instance(kind, {}, argument, i) for i, argument in enumerate(arguments)]
        return getattr(model, kind)(requests)

    expected, actual = (np.array(ask(x, "loglikelihood", *pairs)) for x in (theirs, ours))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    joined = np.array(ask(ours, "loglikelihood", ("the qu", "ick")))  # theirs has no token for it
    assert joined[0, 0] < 0
    expected, actual = (
        ask(x, "loglikelihood_rolling", (text,), (TEXTS[0],), ("x",)) for x in (theirs, ours)
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    options = {"until": [" "], "max_gen_toks": 9, "do_sample": False}
    answers = [
        ask(x, "generate_until", (TEXTS[0], options), ("my", options)) for x in (theirs, ours)
    ]
    assert answers[0] == answers[1]
    task = {
        "task": "quiz",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder.parent / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    results = [
        lm_eval.simple_evaluate(model=x, tasks=[task], bootstrap_iters=0)["results"]["quiz"]
        for x in (theirs, ours)
    ]
    assert results[0] == results[1]
    figures = run(folder, choices=folder.parent / "questions.jsonl", length=16)["choices"]
    assert results[1]["acc,none"] == figures["acc"]


CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{% endfor %}"
)
CHAT += "{% if add_generation_prompt %}[assistant]{% endif %}"
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHAT


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    """A folder whose tokenizer adds <s>, with 64 positions and a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("chat")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>", "<end>"]
    vocab = {text: i for i, text in enumerate([*special, *letters])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(special)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    settings = SETTINGS | {"vocab_size": len(vocab), "max_position_embeddings": 64}
    settings |= {"bos_token_id": 0, "eos_token_id": 1}
    folder = write_folder(path / "model", settings, random_tensors(llama_shapes(settings)))
    backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "chat_template": CHAT}
    named["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def both_models(folder, **fields):
    reason = "pip install 'jaxformer[parity,eval]'"
    pytest.importorskip("torch", reason=reason)
    pytest.importorskip("lm_eval", reason=reason)
    from lm_eval.models.huggingface import HFLM

    from jaxformer.run.lm_eval_harness import LMEvalModel

    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)
    return theirs, LMEvalModel.from_folder(folder, **fields)


def asked(model, kind, *arguments):
    from lm_eval.api.instance import Instance

    requests = [Instance(kind, {}, argument, i) for i, argument in enumerate(arguments)]
    return getattr(model, kind)(requests)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_contexts_are_cut_to_what_answers_leave_of_the_models_own_length(chat_folder, capsys):
    theirs, ours = both_models(chat_folder)
    assert ours.max_length == theirs.max_length == 64
    long, texts = "the quick fox jumps over " * 4, []
    for options in (
        {"max_gen_toks": 40},
        {"max_new_tokens": 63, "temperature": 0.0},
        {"max_gen_toks": 20, "do_sample": False, "temperature": 0.7, "until": "e"},
        {"max_gen_toks": 20, "until": ["<end>"], "repetition_penalty": 3.0},
    ):
        expected, actual = (
            asked(x, "generate_until", (long, options), ("a", options)) for x in (theirs, ours)
        )
        assert actual == expected
        texts += actual
    assert len(set(texts)) == 8
    message = "1 of 2 contexts are cut from the left, by up to 77 tokens, as the model reads 64."
    assert message in capsys.readouterr().out
    expected, actual = (
        np.array(asked(x, "loglikelihood", (long, "fox"), ("a", "b"))) for x in (theirs, ours)
    )
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    with pytest.raises(ValueError, match="max_gen_toks 64 leave no context of the 64 tokens of"):
        asked(ours, "generate_until", ("a", {"max_gen_toks": 64}))
    with pytest.raises(ValueError, match="generation_kwargs stop are not supported; until, do_s"):
        asked(ours, "generate_until", ("a", {"stop": "x"}))


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_an_empty_context_is_what_the_tokenizer_adds(chat_folder):
    models = both_models(chat_folder)
    for kind, arguments in (
        ("loglikelihood", [("", "fox"), ("", "<s>x"), (" ", "x")]),
        ("loglikelihood_rolling", [("",), ("x",)]),
    ):
        expected, actual = (np.array(asked(x, kind, *arguments)) for x in models)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    expected, actual = (asked(x, "generate_until", ("", {"max_gen_toks": 9})) for x in models)
    assert actual == expected


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_sampled_answers_differ_and_are_drawn_from_the_filtered_tokens(chat_folder):
    _, ours = both_models(chat_folder)
    one = {"max_gen_toks": 8, "do_sample": True, "temperature": 3.0, "top_k": 40}
    assert len(set(asked(ours, "generate_until", *[("the", one)] * 4))) == 4
    for narrow in ({**one, "top_k": 1}, {**one, "top_p": 1e-6}):
        greedy, narrowed = (
            asked(ours, "generate_until", ("the", x)) for x in ({"max_gen_toks": 8}, narrow)
        )
        assert narrowed == greedy


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_conversations_are_rendered_and_encoded_as_by_the_harness(chat_folder, tmp_path):
    theirs, ours = both_models(chat_folder)
    history = [{"role": x, "content": f" {x}! "} for x in ("system", "user", "assistant")]
    for messages, prompted in ((history[:2], True), (history, False), (history[:1], True)):
        expected, text = (x.apply_chat_template(messages, prompted) for x in (theirs, ours))
        assert text == expected and text.startswith("<s>[system]system!")
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        assert ours.tok_encode(text).count(0) == 1
    assert ours.chat_template(True) == theirs.chat_template(True) == CHAT
    assert not ours.chat_template(False)
    assert ours.tok_encode("ab") == theirs.tok_encode("ab") == [0, *theirs.tok_encode("ab")[1:]]
    (tmp_path / "t.jinja").write_text(REFUSING)
    theirs.tokenizer.chat_template = REFUSING
    _, ours = both_models(chat_folder, chat_template=str(tmp_path / "t.jinja"))
    expected, text = (x.apply_chat_template(history[:2]) for x in (theirs, ours))
    assert text == expected == "<s>[user]user![assistant]"


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, "Say 0"),
        ({"apply_chat_template": True}, "<s>[user]Say 0[assistant]"),
        ({"chat_template": "t.jinja"}, "(Say 0)"),
        (
            {"apply_chat_template": True, "system_instruction": "Hi"},
            "<s>[system]Hi[user]Say 0[assistant]",
        ),
    ],
)
def test_tasks_are_rendered_by_flag(fields, expected, chat_folder, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="pip install 'jaxformer[eval]'")
    from jaxformer.run import lm_eval_harness

    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text("({{ messages[0]['content'] }})")
    Path("rows.jsonl").write_text('{"q": "Say 0", "a": "0"}\n')
    Path("tasks").mkdir()
    Path("tasks/mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
        f"{tmp_path / 'rows.jsonl'}\ntest_split: test\noutput_type: generate_until\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\ngeneration_kwargs:\n  max_gen_toks: 4\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    contexts = []
    answer = lambda self, context, options: contexts.append(context) or "0"  # noqa: E731
    monkeypatch.setattr(lm_eval_harness.LMEvalModel, "_answer", answer)
    run(chat_folder, tasks=("mine",), task_folder=Path("tasks"), **fields)
    assert contexts == [expected]
