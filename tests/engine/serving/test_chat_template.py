from __future__ import annotations

import asyncio
import json
import resource
import time

import pytest
from serving_models import TEMPLATE, write_tokenizer

from inferdbg.engine.errors import InvalidRequest, ModelError
from inferdbg.engine.serving.chat_template import (
    MAX_TEXT_CHARS,
    ChatPrompt,
    ChatTemplate,
    TemplateRefused,
    TemplateSource,
    read_chat_template,
)
from inferdbg.engine.serving.template_process import TemplateProcess
from inferdbg.engine.serving.tokenize import TokenizerPool, load_vocabulary

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": "Be brief.  "},
    {"role": "user", "content": "Hé <b>&'\"</b>"},
    {"role": "assistant", "content": " Well, ", "tool_calls": None},
    {"role": "user", "content": "go on"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": "é<"}}}]

TEMPLATES = {
    "chatml": TEMPLATE,
    "special tokens and trimming": (
        "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'assistant' %}\n"
        "{{ m.content | trim }}{{ eos_token }}\n  {% else %}[{{ m['content'] }}]{% endif %}\n{% endfor %}"
    ),
    "tojson": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ {'a': 1} | tojson(sort_keys=true) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}"
        "{{ ns.n }}"
    ),
    "string methods": (
        "{{ messages[0]['content'].split(' ')[-1] }}{{ 'ab' * 3 }}{{ messages[1].content.startswith('H') }}"
        "{{ messages[0].content.strip().upper() }}"
    ),
    "absent keys": (
        "{{ messages[2].tool_calls is defined }}{{ tools is none }}{{ documents is none }}{{ x is defined }}"
    ),
    "date": "{{ strftime_now('%Y') }}",
    "macro": (
        "{% macro say(m) %}{{ m.role }}: {{ m.content }}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}"
    ),
}  # fmt: skip


def render(source, messages, special_tokens=SPECIALS, **options):
    return ChatTemplate(TemplateSource(source, special_tokens)).render(ChatPrompt(messages=messages, **options))


@pytest.fixture(scope="module")
def reference():
    """transformers' own renderer."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render_theirs(template, messages, **options):
        messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
        texts, _ = render_jinja_template([messages], chat_template=template, **SPECIALS, **options)
        return texts[0]

    return render_theirs


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_templates_render_as_transformers_renders_them(reference, name, generation_prompt):
    ours = render(
        TEMPLATES[name],
        TALK,
        tools=TOOLS if "tools" in TEMPLATES[name] else None,
        add_generation_prompt=generation_prompt,
        arguments={"x": 1},
    )
    theirs = reference(TEMPLATES[name], TALK, tools=TOOLS, add_generation_prompt=generation_prompt, x=1)
    assert ours == theirs


@pytest.mark.parametrize("content", ["The answer", "trailing space ", " both ", "two\nlines\n"])
@pytest.mark.parametrize("name", ["chatml", "special tokens and trimming"])
def test_a_continued_message_ends_as_transformers_ends_it(reference, name, content):
    talk = [*TALK, {"role": "assistant", "content": content}]
    ours = render(TEMPLATES[name], talk, add_generation_prompt=False, continue_final_message=True)
    assert ours == reference(TEMPLATES[name], talk, continue_final_message=True)
    assert ours.endswith(content if name == "chatml" else content.strip())


def test_the_messages_of_the_caller_are_left_alone():
    talk = [{"role": "user", "content": "a"}]
    render(TEMPLATE, talk, continue_final_message=True, add_generation_prompt=False)
    assert talk == [{"role": "user", "content": "a"}]


def test_a_template_that_drops_the_last_message_cannot_continue_it():
    with pytest.raises(InvalidRequest, match="leaves the last message out"):
        render("nothing", [{"role": "user", "content": "a"}], continue_final_message=True)


def test_a_template_without_tools_takes_none():
    with pytest.raises(InvalidRequest, match="takes no tools"):
        render(TEMPLATE, TALK, tools=TOOLS)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.nope.nope }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ range(10000000) | list }}",
        "{{ messages[0].content + 1 }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ 1 // 0 }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_fails_or_tries_to_escape_is_a_refused_request(source):
    with pytest.raises(InvalidRequest) as raised:
        render(source, [{"role": "user", "content": "secret"}])
    assert "secret" not in str(raised.value)


def test_what_a_template_says_of_the_prompt_is_not_for_the_record():
    with pytest.raises(TemplateRefused, match="no secret please") as raised:
        render(
            "{{ raise_exception('no ' ~ messages[0].content ~ ' please') }}", [{"role": "user", "content": "secret"}]
        )
    assert "secret" not in raised.value.recorded


HUGE = "messages[0].size"
DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x OP ns.x %}{% endfor %}"
GREEDY = {
    "repeat": f"{{{{ 'a' * {HUGE} }}}}",
    "a list": f"{{{{ [1] * {HUGE} }}}}",
    "center": f"{{{{ 'x'|center({HUGE}) }}}}",
    "ljust": f"{{{{ 'x'.ljust({HUGE}) }}}}",
    "percent": f"{{{{ ('%' ~ {HUGE} ~ 'd') % 1 }}}}",
    "format": f"{{{{ ('%' ~ {HUGE} ~ 'd')|format(1) }}}}",
    "str.format": f"{{{{ ('{{:>' ~ {HUGE} ~ '}}').format(1) }}}}",
    "indent": f"{{{{ 'x'|indent({HUGE}, true) }}}}",
    "expandtabs": f"{{{{ '\t'.expandtabs({HUGE}) }}}}",
    "replace": "{% set x = 'a' * 100000 %}{{ x|replace('a', x) }}",
    "join": "{{ range(90000)|join('a' * 900000) }}",
    "tilde": DOUBLING.replace("OP", "~"),
    "plus": DOUBLING.replace("OP", "+"),
    "output": "{% set x = 'a' * 900000 %}{% for i in range(90000) %}{{ x }}{% endfor %}",
    "capture": "{% set y %}{% for i in range(90000) %}{{ 'a' * 900000 }}{% endfor %}{% endset %}",
}


@pytest.mark.parametrize("name", GREEDY)
def test_a_template_that_wants_all_memory_is_refused_and_the_next_chat_is_served(name):
    choice = "{% if messages[0].size %}" + GREEDY[name] + "{% else %}fine{% endif %}"
    renderer = TemplateProcess(TemplateSource(choice, {}), seconds=10)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateRefused, match="MemoryError"):
        renderer.render(ChatPrompt(messages=[{"role": "user", "size": 2_000_000_000}]))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB: nothing of it here
    assert renderer.render(ChatPrompt(messages=[{"role": "user"}])) == "fine"
    renderer.close()


def test_a_text_that_no_context_holds_is_not_tokenized():
    renderer = TemplateProcess(TemplateSource("{{ 'x'|center(messages[0].size) }}", {}), seconds=10)
    assert len(renderer.render(ChatPrompt(messages=[{"size": MAX_TEXT_CHARS}]))) == MAX_TEXT_CHARS
    with pytest.raises(TemplateRefused, match=str(MAX_TEXT_CHARS)):
        renderer.render(ChatPrompt(messages=[{"size": MAX_TEXT_CHARS + 1}]))
    renderer.close()


def test_one_endless_operation_is_ended():
    source = "{% if messages[0].n %}{{ messages[0].n ** (messages[0].n ** messages[0].n) }}{% else %}fine{% endif %}"
    renderer = TemplateProcess(TemplateSource(source, {}), seconds=0.3)
    begun = time.monotonic()
    with pytest.raises(TemplateRefused, match=r"did not finish within 0\.3 s"):
        renderer.render(ChatPrompt(messages=[{"n": 99}]))
    assert time.monotonic() - begun < 5
    assert renderer.render(ChatPrompt(messages=[{"n": 0}])) == "fine"
    renderer.close()


@pytest.mark.parametrize("source", ["{{ 'x'|center(40000000000) }}{% for %}", "{{ 9 ** (9 ** 9) }}"])
def test_a_template_is_compiled_under_the_same_bounds(source):
    renderer = TemplateProcess(TemplateSource(source, {}), seconds=0.3)
    with pytest.raises(ModelError, match="chat template"):
        renderer.start()


def test_a_renderer_carries_what_json_can_hold():
    renderer = TemplateProcess(TemplateSource("{{ messages[0].content }} {{ x }} {{ tools|length }}", {"x": "s"}), 10)
    messages = [{"role": "user", "content": 2**70}]
    assert renderer.render(ChatPrompt(messages=messages, tools=TOOLS)) == f"{2**70} s 1"
    assert renderer.render(ChatPrompt(messages=messages, tools=TOOLS, arguments={"x": "é"})) == f"{2**70} é 1"
    renderer.close()


def test_a_template_that_is_no_jinja_is_a_bad_model():
    with pytest.raises(ModelError, match="not valid"):
        ChatTemplate(TemplateSource("{% for %}", {}))


def test_where_a_template_comes_from(tmp_path):
    assert read_chat_template(tmp_path, {}) is None
    named = {
        "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d{{ eos_token }}"}]
    }
    template = read_chat_template(tmp_path, named | {"eos_token": {"content": "</s>"}})
    assert render(template.source, TALK, template.special_tokens) == "d</s>"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_chat_template(tmp_path, named).source == "file"


def test_a_template_that_is_no_text_is_a_bad_model(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        read_chat_template(tmp_path, {})


ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% set c = a + b %}{% endfor %}{% endfor %}"


def test_an_endless_template_is_ended_and_its_thread_goes_on(tmp_path, tokenizer):
    write_tokenizer(tmp_path, tokenizer, template=ENDLESS)
    pool = TokenizerPool(load_vocabulary(tmp_path), num_threads=1, template_seconds=0.2)
    prompt = ChatPrompt(messages=[{"role": "user", "content": "a"}])

    async def run():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        with pytest.raises(InvalidRequest, match="did not finish within"):
            await pool.encode_chat(prompt)
        ticking.cancel()
        prompts, _ = await pool.encode(["the quick"], add_special_tokens=True)
        return ticks, prompts[0].ids

    begun = time.monotonic()
    ticks, ids = asyncio.run(run())
    pool.close()
    assert time.monotonic() - begun < 3
    assert ticks >= 3  # the event loop was not held up
    assert ids == tuple(tokenizer.encode("the quick").ids)


def test_waiting_and_working_are_told_apart(tmp_path, tokenizer):
    write_tokenizer(tmp_path, tokenizer)
    pool = TokenizerPool(load_vocabulary(tmp_path), num_threads=1)

    async def run():
        return await asyncio.gather(*(pool.run(lambda: time.sleep(0.05)) for _ in range(3)))

    times = [timed for _, timed in asyncio.run(run())]
    pool.close()
    assert all(timed.service_ns >= 50e6 for timed in times)
    assert times[0].wait_ns < 40e6
    assert times[2].wait_ns >= 95e6


def test_a_prompt_is_never_truncated_or_padded(tmp_path, tokenizer):
    write_tokenizer(tmp_path, tokenizer)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|bos|>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    ids = load_vocabulary(tmp_path).encode("the quick brown fox", add_special_tokens=True)
    assert len(ids) == 4


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_corrupt_tokenizer_file_is_named(tmp_path, tokenizer, name, content):
    write_tokenizer(tmp_path, tokenizer)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        load_vocabulary(tmp_path)
