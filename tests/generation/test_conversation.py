"""Answers of a conversation equal those of whole prompts, and only new tokens are read."""

import logging
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer import config as c
from jaxformer import generate
from jaxformer.config import DynamicNTK, Rope
from jaxformer.generation import Conversation, Sample
from jaxformer.generation import conversation as module
from tests.small_models import BASE, TINY_LLAMA, random_params

NEW = 5  # tokens of an answer
DYNAMIC = replace(
    TINY_LLAMA,
    attention=replace(
        TINY_LLAMA.attention,
        positions=(Rope(scaling=DynamicNTK(factor=2.0, original_max_length=16)),),
    ),
)
WINDOW = replace(TINY_LLAMA, attention=replace(TINY_LLAMA.attention, windows=(7, None)))


def whole(config, params, prompt, **options):
    tokens = generate(config, params, [prompt], max_new_tokens=NEW, **options)
    return np.asarray(tokens)[0, len(prompt) :].tolist()


@pytest.fixture
def chunks(monkeypatch):
    """Numbers of each chunk that is read: tokens that are kept, tokens of the chunk, and all."""
    monkeypatch.setattr(module, "CHUNK", 4)
    read, numbers = module._read_chunk, []
    monkeypatch.setattr(
        module, "_read_chunk", lambda *args: numbers.append(args[-1].tolist()) or read(*args)
    )
    return numbers


@pytest.mark.parametrize("config", [TINY_LLAMA, WINDOW, DYNAMIC], ids=["full", "window", "NTK"])
@pytest.mark.slow(but=["NTK"])  # the others begin a conversation below
def test_each_answer_is_that_to_the_whole_prompt(config, chunks):
    params, sampler = random_params(config), Sample(temperature=0.9)
    conversation = Conversation(config, params, max_new_tokens=NEW, sampler=sampler)
    prompt = [3, 5, 7, 2, 9, 4]
    for turn in range(3):
        key = jax.random.key(turn)
        answer = list(conversation.answer(prompt, key=key))
        assert answer == whole(config, params, prompt, sampler=sampler, key=key)
        prompt = [*prompt, *answer, 11, 8, 6]


@pytest.mark.slow
def test_an_answer_reads_only_new_tokens_and_compiles_nothing(chunks, caplog):
    params = random_params(TINY_LLAMA)
    conversation = Conversation(TINY_LLAMA, params, max_new_tokens=NEW)
    prompt = [3, 5, 7, 2, 9]
    prompt += list(conversation.answer(prompt))
    assert chunks == [[0, 4, 5], [4, 1, 5]]
    # The last token of the answer is not yet in the cache.
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        prompt += list(conversation.answer([*prompt, 6]))[:3]
    assert chunks[2:] == [[9, 2, 11]]
    assert not [x for x in caplog.messages if "Compiling jit(_" in x or "decode_next" in x]
    list(conversation.answer([*prompt[:10], 6, *prompt[10:], 6]))  # as the template wrote it


@pytest.mark.slow
def test_a_prompt_that_changes_an_answer_keeps_what_is_equal(chunks):
    params = random_params(TINY_LLAMA)
    conversation = Conversation(TINY_LLAMA, params, max_new_tokens=NEW)
    list(conversation.answer([3, 5, 7, 2, 9]))
    changed = [3, 5, 7, 2, 9, 12, 13]
    assert list(conversation.answer(changed)) == whole(TINY_LLAMA, params, changed)
    first = chunks[2]
    assert first[0] >= 5 and first[2] == 7
    windowed = random_params(WINDOW)
    conversation = Conversation(WINDOW, windowed, max_new_tokens=NEW)
    list(conversation.answer([3, 5, 7, 2, 9]))
    assert list(conversation.answer(changed[1:])) == whole(WINDOW, windowed, changed[1:])
    assert chunks[-2][0] == 0


@pytest.mark.slow
def test_an_answer_that_is_left_keeps_what_was_read(chunks):
    params, prompt = random_params(TINY_LLAMA), [3, 5, 7]
    conversation = Conversation(TINY_LLAMA, params, max_new_tokens=NEW)
    answer = conversation.answer(prompt)
    prompt += [next(answer), next(answer)]
    answer.close()
    assert list(conversation.answer([*prompt, 6])) == whole(TINY_LLAMA, params, [*prompt, 6])
    assert chunks[1:] == [[4, 2, 6]]


@pytest.mark.slow
def test_room_grows_by_powers_of_two_and_ends_at_the_learned_positions():
    conversation = Conversation(TINY_LLAMA, random_params(TINY_LLAMA), max_new_tokens=NEW)
    rooms = []
    for length in (3, 252, 253):
        next(iter(conversation.answer([3] * length)))
        rooms.append(conversation._context.tokens.shape[-1])
    assert rooms == [256, 256, 1024]
    learned = replace(BASE, embedding=c.Embedding(positions=c.Learned(max_length=11)))
    params = random_params(learned)
    conversation = Conversation(learned, params, max_new_tokens=NEW)
    assert list(conversation.answer([3] * 7)) == whole(learned, params, [3] * 7)
    with pytest.raises(ValueError, match="11 learned positions, but a prompt of 8 tokens with max"):
        next(iter(conversation.answer([3] * 8)))
