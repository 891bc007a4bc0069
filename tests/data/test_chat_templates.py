"""Chat templates: the Jinja they are written in, what of a conversation counts, what ends them."""

import datetime
import json

import pytest

from jaxformer import data
from jaxformer.data import template_sandbox
from jaxformer.data.chat_templates import MARK, ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = [{"role": "user", "content": "a <b> & 'c' é"}]
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "yes"},
]
TURN = "<{{ m.role }}>{{ m.content }}<|end|>"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"


@pytest.mark.parametrize(
    "source, expected",
    [
        # each as apply_chat_template of transformers 5.24 writes it
        ("{{ messages[0]|tojson }}", '{"role": "user", "content": "a <b> & \'c\' é"}'),
        ("{{ {'b': 'é', 'a': 1}|tojson(ensure_ascii=true) }}", '{"b": "\\u00e9", "a": 1}'),
        ("{{ {'b': [1], 'a': 2}|tojson(sort_keys=true) }}", '{"a": 2, "b": [1]}'),
        ("{{ [1, 2]|tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ [1]|tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("{{ tools is defined }} {{ pad_token is defined }}", "True False"),
        ("{{ add_generation_prompt }}{{ bos_token }}", "False<s>"),
        ("{% for i in [1, 2, 3] %}{{ i }}{% break %}{% endfor %}", "1"),
        ("{% for i in [1, 2] if i > 1 %}{{ i }}{{ loop.last }}{% endfor %}", "2True"),
        ("{% for i in [1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "2"),
        ("{%- generation -%} x {%- endgeneration %}", "x"),
        ("  {% if true %}\n a\n  {% endif %}\n", " a\n"),
    ],
)
def test_templates_find_what_transformers_gives_them(source, expected):
    assert ChatTemplate(source, TOKENS).render(HELLO) == expected


def test_a_template_knows_the_date():
    years = {str(datetime.datetime.now().year) for _ in range(2)}
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(HELLO) in years


def test_messages_come_without_null_and_with_reasoning_by_both_names():
    message = {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": None}
    actual = ChatTemplate("{{ messages[0]|tojson }}", {}).render([message])
    expected = {"thinking": "r", "role": "assistant", "reasoning": "r", "reasoning_content": "r"}
    assert actual == json.dumps(expected)


def counted(source, messages):
    """What counts, of pieces that make the text."""
    template = ChatTemplate(source, TOKENS)
    pieces = template.spans(messages)
    assert "".join(text for text, _ in pieces) == template.render(messages)
    assert pieces[-1] == ("", False)
    return [text for text, counts in pieces if counts]


HEAD = "{% if add_generation_prompt %}<assistant>{% endif %}"
THOUGHTS = """{% for m in messages %}<{{ m.role }}>
{%- if m.role == 'assistant' and loop.last %}
<think>{{ m.reasoning_content }}</think>
{%- endif %}
{{- m.content.split('</think>')[-1] }}<|end|>
{%- endfor %}"""
CALLS = """{% for m in messages %}<{{ m.role }}>
{%- if m.tool_calls %}{{ m.tool_calls|tojson }}{% else %}{{ m.content }}{% endif %}<|end|>
{%- endfor %}"""


@pytest.mark.parametrize(
    "source, expected",
    [
        (LOOP + HEAD, ["yo<|end|>", "yes<|end|>"]),
        # a finished conversation is closed, as by Phi 3; the next message begins as that end does
        (
            LOOP + "{% if add_generation_prompt %}<assistant>{% else %}{{ eos_token }}{% endif %}",
            ["yo<|end|>", "yes<|end|></s>"],
        ),
        # the space before an answer is the assistant's to say, as in Llama 2
        (
            "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
            "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
            [" yo </s>", " yes </s>"],
        ),
        # so are empty thoughts, which the last answer alone has, as in Qwen 3
        (THOUGHTS + HEAD, ["yo<|end|>", "<think></think>yes<|end|>"]),
        # text that is gathered and written at once
        (
            "{% set ns = namespace(text='') %}{% for m in messages %}"
            "{% set ns.text = ns.text + m.role + ': ' + m.content + '\n' %}{% endfor %}"
            "{{ ns.text }}{% if add_generation_prompt %}assistant: {% endif %}",
            ["yo\n", "yes\n"],
        ),
        # what the template itself marks, more or less as it may be
        (
            "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' %}"
            "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}"
            "{% endif %}.{% endfor %}",
            ["yo", "yes"],
        ),
        # one that writes the last messages alone
        ("{{ messages[-1].role }}:{{ messages[-1].content }}", ["yes"]),
        # marked in a macro, behind text of it, and in a block that is written later
        (
            "{% macro say(m) %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}"
            "{% endmacro %}{% for m in messages %}{% set text %}{{ say(m) }};{% endset %}"
            "{% if m.role == 'assistant' %}{{ text }}{% else %}{{ m.content }}{% endif %}"
            "{% endfor %}",
            ["yo", "yes"],
        ),
        # the last message of all is written otherwise than the same one in a longer conversation
        (
            "{% for m in messages %}{{ loop.length }}/{{ loop.revindex }}/{{ loop.last }}/"
            "{{ loop.nextitem is defined }}:" + TURN + "{% endfor %}" + HEAD,
            ["yo<|end|>", "yes<|end|>"],
        ),
    ],
    ids="plain closed space thoughts gathered marked last macro neighbours".split(),
)
def test_answers_are_told_from_the_whole_conversation(source, expected):
    assert counted(source, TALK) == expected


def test_thoughts_that_a_later_turn_drops_do_not_count_where_they_are_not_written():
    talk = [dict(message) for message in TALK]
    talk[1]["content"] = "<think>hm</think>yo"
    talk[3] = {"role": "assistant", "content": "yes", "reasoning_content": "ah"}
    expected = ["yo<|end|>", "<think>ah</think>yes<|end|>"]
    assert counted(THOUGHTS + HEAD, talk) == expected


def test_a_call_of_a_tool_counts():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "1", "n": 2}}}
    talk = [TALK[0], {"role": "assistant", "tool_calls": [call]}, *TALK[2:]]
    assert counted(CALLS + HEAD, talk) == [json.dumps([call]) + "<|end|>", "yes<|end|>"]


def test_a_question_that_is_written_otherwise_where_it_is_the_last_does_not_count():
    """In the form of Mistral 7B Instruct v0.3, system words stand before a question that nobody has
    answered yet."""
    source = """{% set system = messages[0].content %}{% for m in messages[1:] %}
{%- if m.role == 'user' %}[INST] {{ system + ' ' if loop.last }}
{{- m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"""
    talk = [{"role": "system", "content": "Be brief."}, *TALK]
    assert counted(source, talk) == [" yo</s>", " yes</s>"]


# In the form of gpt-oss, a tool's message repeats the name of the call, and thoughts that led to
# an answer are dropped from the next turn on.
HARMONY = """{% set calls = namespace(name='') %}{% for m in messages %}
{%- if m.role == 'tool' %}<|start|>{{ calls.name }} to=assistant<|message|>{{ m.content }}<|end|>
{%- elif m.tool_calls %}{% set calls.name = m.tool_calls[0].function.name %}
{%- if m.content %}<|start|>assistant<|message|>{{ m.content }}<|end|>{% endif -%}
<|start|>assistant to={{ calls.name }}<|message|>{{ m.tool_calls[0].function.arguments|tojson }}
{{- '<|call|>' }}
{%- elif m.role == 'assistant' %}
{%- if m.thinking and loop.last %}<|start|>assistant<|thinks|>{{ m.thinking }}<|end|>{% endif -%}
<|start|>assistant<|says|>{{ m.content }}<|end|>
{%- else %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


@pytest.mark.parametrize("content", [None, "", "I ask."])
@pytest.mark.parametrize("arguments", [{"x": "1", "n": 2}, {"n": 2}, {}])
def test_of_a_turn_with_a_tool_all_that_the_assistant_says_counts(content, arguments):
    function = {"name": "f", "arguments": arguments}
    call = {"role": "assistant", "content": content, "tool_calls": [{"function": function}]}
    talk = [
        TALK[0],
        call,
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "yo", "thinking": "hm"},
        TALK[2],
        {"role": "assistant", "content": "yes", "thinking": "ah"},
    ]
    message = f"<|message|>{content}<|end|><|start|>assistant" if content else ""
    assert counted(HARMONY, talk) == [
        f"{message} to=f<|message|>{json.dumps(arguments)}<|call|>",
        "<|says|>yo<|end|>",
        "<|thinks|>ah<|end|><|start|>assistant<|says|>yes<|end|>",
    ]


REPEATED = """{% for m in messages %}{{ m.content }},{% endfor %}
{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"""
TRIMMED = """{% set text %}{% generation %}{{ messages[1].content }} {% endgeneration %}{% endset %}
{{ text|trim }}"""


@pytest.mark.parametrize(
    "source, message",
    [
        (REPEATED, "renders other messages differently depending on message 2"),
        (TRIMMED, "changes the text that it marks by {% generation %}"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source, TOKENS).spans(TALK[:3])


def test_a_conversation_may_begin_with_the_assistant():
    source = "{% if messages[0].role == 'system' %}{% endif %}" + LOOP + HEAD
    assert counted(source, TALK[1:]) == ["yo<|end|>", "yes<|end|>"]


@pytest.mark.parametrize(
    "source",
    [
        LOOP + HEAD,
        "{{ messages[0].content }}"
        "{% generation %}{{ messages[1].content }}<|end|>{% endgeneration %}",
    ],
    ids=["unmarked", "marked"],
)
@pytest.mark.parametrize("mark", [MARK, MARK[::-1], "\ufdd0"])
def test_an_answer_may_hold_the_mark(source, mark):
    talk = [TALK[0], {"role": "assistant", "content": f"{mark} is it"}]
    assert counted(source, talk) == [f"{mark} is it<|end|>"]


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10 ** 6) %}x{% endfor %}", "Range too big"),
        ("{{ 'a'.encode('nope') }}", "unknown encoding: nope"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth"),
        ("{{ 'a'.index('z') }}", "substring not found"),
        ("{{ 'a' * 10 ** 11 }}", "it repeats 1 items 100000000000 times"),
        ("{{ 10 ** (10 ** 10) }}", "it computes a power of more than 10000000 bits"),
        ("{% for i in range(9) %}{{ 'xyz' * 10 ** 6 }}{% endfor %}", "more than 10000000 char"),
        ("{{ raise_exception('No.') }}", r"No\.$"),
        ("{{ [].append(1) }}", "access to attribute 'append'"),
    ],
)
def test_whatever_a_template_raises_is_its_refusal(source, message):
    with pytest.raises(ValueError, match=f"The chat template fails on these messages: .*{message}"):
        ChatTemplate(source, {}).render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
        "{% for a in 'x' * 99999 %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    ],
    ids=["loops", "filtered", "macro", "sums"],
)
def test_a_template_that_does_not_end_is_ended(source, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.05)
    with pytest.raises(ValueError, match=r"fails .*: it runs for more than 0\.05 seconds"):
        ChatTemplate(source, {}).render(HELLO)


def test_a_template_that_python_cannot_compile_is_none():
    with pytest.raises(ValueError, match="Invalid chat template: too many statically nested"):
        ChatTemplate("{% for a in b %}" * 30 + "{% endfor %}" * 30, {})


NAMED = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "{{ bos_token }}d"}]


@pytest.mark.parametrize(
    "config, more, expected",
    [
        ({"chat_template": NAMED, "bos_token": {"content": "<s>", "lstrip": False}}, {}, "<s>d"),
        # of switches, whose names end as those of tokens do, a template knows nothing
        ({"chat_template": "{{ add_bos_token is defined }}", "add_bos_token": True}, {}, "False"),
        ({"chat_template": "{{ bos_token }}"}, {"bos_token": "<b>"}, "<b>"),
        (
            {"chat_template": "{{ bos_token }}", "bos_token": "<a>", "added_tokens_decoder": {}},
            {"bos_token": "<b>"},
            "<a>",
        ),
    ],
    ids=["named", "switch", "map", "newer"],
)
def test_a_folders_tokens_are_those_that_transformers_reads(config, more, expected, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(more))
    assert data.load_chat_template(tmp_path).render(HELLO) == expected


@pytest.mark.parametrize(
    "config, message",
    [
        ({"chat_template": 5}, "chat_template must be a string or a list .*; got an integer"),
        ({"chat_template": {"default": "x"}}, "chat_template must be .* got an object"),
        (
            {"chat_template": [{}]},
            r"chat_template must have objects with name and template; got \{\}",
        ),
        ({"chat_template": [5]}, "chat_template must have objects .* got 5"),
        (
            {"chat_template": NAMED[:1]},
            "chat_template has no template named default; it has tool_use",
        ),
        (
            {"chat_template": "x", "bos_token": {"lstrip": False}},
            "bos_token must be a string, .* got {'lstrip': False}",
        ),
        ({"chat_template": "x", "unk_token": 5}, "unk_token must be a string, null .*; got 5"),
    ],
)
def test_what_a_config_has_of_another_type_is_named(config, message, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {message}"):
        data.load_chat_template(tmp_path)


@pytest.mark.parametrize("end", ["<|im_end|>", "</s>", None])
def test_a_template_may_be_given_by_name_or_file(end, tmp_path):
    """ChatML, whose messages end as the tokenizer's texts do."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    (tmp_path / "chat_template.jinja").write_text("the folder's")
    (tmp_path / "mine.jinja").write_text("mine")
    end = end or "<|im_end|>"
    expected = f"<|im_start|>user\nhi{end}\n<|im_start|>assistant\n"
    template = data.load_chat_template(tmp_path, "chatml")
    assert template.render(TALK[:1], add_generation_prompt=True) == expected
    assert [text for text, counts in template.spans(TALK) if counts] == [
        f"yo{end}\n",
        f"yes{end}\n",
    ]
    assert data.load_chat_template(tmp_path, str(tmp_path / "mine.jinja")).render(TALK) == "mine"
    with pytest.raises(
        ValueError, match="nope is not a file of a chat template, nor one of chatml"
    ):
        data.load_chat_template(tmp_path, "nope")


def test_a_template_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8"):
        data.load_chat_template(tmp_path)
