"""Options of tasks: the sampler and the lengths of lm-evaluation-harness's own backend."""

import json

import pytest

from jaxformer.generation import Beam, Greedy, Sample
from jaxformer.run.task_options import max_new_tokens, stated_length, task_sampler


@pytest.mark.parametrize(
    "options, defaults, expected",
    [
        ({}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}, Greedy()),
        ({"until": ["x"], "temperature": 0.0}, {}, Greedy()),
        ({"do_sample": False, "temperature": 0.7}, {}, Greedy()),
        ({"repetition_penalty": 1.2}, {}, Sample(top_k=1, repetition_penalty=1.2)),
        (
            {"do_sample": False},
            {"repetition_penalty": 1.05},
            Sample(top_k=1, repetition_penalty=1.05),
        ),
        ({"temperature": 0.7}, {}, Sample(temperature=0.7, top_k=50)),
        ({"do_sample": True}, {}, Sample(top_k=50)),
        ({"temperature": 1, "top_k": 0, "top_p": 1}, {}, Sample(top_p=1.0)),
        (
            {"temperature": 0.5, "top_p": 0.8, "min_p": 0.1},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1},
            Sample(temperature=0.5, top_k=20, top_p=0.8, min_p=0.1, repetition_penalty=1.1),
        ),
        ({"num_beams": 3, "length_penalty": 0.5}, {}, Beam(num_beams=3, length_penalty=0.5)),
        ({"num_beams": 1, "max_gen_toks": 5, "top_k": None}, {}, Greedy()),
    ],
)
def test_the_sampler_of_a_task(options, defaults, expected, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    assert task_sampler(options, tmp_path) == expected


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"typical_p": 0.9, "stop": "x"},
            "generation_kwargs typical_p, stop are not supported; unt",
        ),
        ({"do_sample": True, "temperature": 0.0}, "temperature must be positive; got 0.0"),
        ({"do_sample": True, "num_beams": 2}, "num_beams 2 cannot be combined with do_sample"),
        ({"temperature": 1, "top_p": 2}, r"top_p must be in \(0, 1\]; got 2.0"),
    ],
)
def test_options_that_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        task_sampler(options, tmp_path)


def test_tokens_of_an_answer_and_of_the_longest_text(tmp_path):
    for options, expected in (
        ({}, 256),
        ({"max_gen_toks": None}, 256),
        ({"max_new_tokens": 9, "max_tokens": 8}, 9),
        ({"max_completion_tokens": "7"}, 7),
    ):
        assert max_new_tokens(options) == expected
    for name, content, expected in (
        ("tokenizer_config.json", {"model_max_length": 10**30}, 2048),
        ("tokenizer_config.json", {"model_max_length": 77}, 77),
        ("config.json", {"max_position_embeddings": 40}, 40),
        ("config.json", {"n_positions": 30, "n_ctx": 20}, 30),
        ("config.json", {"max_position_embeddings": 9, "text_config": {"n_ctx": 50}}, 50),
    ):
        (tmp_path / name).write_text(json.dumps(content))
        assert stated_length(tmp_path) == expected
