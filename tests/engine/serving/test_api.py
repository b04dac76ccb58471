"""The API's shapes on a core that repeats the prompt: so every output is known."""

from __future__ import annotations

import json

import httpx
import pytest
from serving_events import Heard

from inferdbg.engine.core.events import FinishReason
from inferdbg.engine.serving.events import Arrived, Closed

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
FOX = "the quick brown fox"
CLIENT = httpx.Client(timeout=30)


@pytest.fixture(scope="module")
def heard():
    return Heard()


@pytest.fixture(scope="module")
def server(make_server, heard):
    with make_server(heard, front={"keep_text": True}) as handle:
        yield handle


def post(server, path, **body):
    response = CLIENT.post(server.url + path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(server, path, **body):
    response = CLIENT.post(server.url + path, json=body | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def text_of(chunks, index=0):
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def test_a_completion(server):
    document = post(server, COMPLETIONS, prompt=FOX, max_tokens=8)
    assert document["object"] == "text_completion"
    assert document["model"] == "parrot"
    (choice,) = document["choices"]
    assert choice["text"] == FOX * 2
    assert choice["finish_reason"] == "length"
    assert document["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 8,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_prompts_in_every_form_and_in_batches(server, tokenizer):
    ids = tokenizer.encode(FOX).ids
    for prompt, texts in (
        (FOX, [FOX]),
        (ids, [FOX]),
        ([FOX, "lazy dog"], [FOX, "lazy dog" * 2]),
        ([ids, ids[:2]], [FOX, "the quick" * 2]),
        (["lazy dog", ids], ["lazy dog" * 2, FOX]),
    ):
        document = post(server, COMPLETIONS, prompt=prompt, max_tokens=4)
        assert [c["index"] for c in document["choices"]] == list(range(len(texts)))
        assert [c["text"] for c in document["choices"]] == [
            tokenizer.decode((tokenizer.encode(text).ids * 4)[:4]) for text in texts
        ]


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(server):
    document = post(server, COMPLETIONS, prompt=[FOX, "lazy dog"], max_tokens=1, n=2)
    # the runner starts at the choice's own index
    assert [(c["index"], c["text"]) for c in document["choices"]] == [(0, "the"), (1, " quick"), (2, "la"), (3, "zy")]


def test_the_stream_says_what_the_whole_says(server):
    body = {"prompt": "naïve 🎉 你好 größer", "max_tokens": 60}
    whole = post(server, COMPLETIONS, **body)["choices"][0]
    chunks = stream(server, COMPLETIONS, **body)
    assert text_of(chunks) == whole["text"]
    assert "\ufffd" not in "".join(c["choices"][0]["text"] for c in chunks[:-1])
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"
    assert len({c["id"] for c in chunks}) == 1


def test_usage_in_the_stream_only_when_asked(server):
    assert all("usage" not in chunk for chunk in stream(server, COMPLETIONS, prompt=FOX))
    chunks = stream(server, COMPLETIONS, prompt=FOX, max_tokens=5, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5


def test_cached_tokens_are_reported(server):
    prompt = list(range(60, 160))
    first = post(server, COMPLETIONS, prompt=prompt, max_tokens=1)
    again = post(server, COMPLETIONS, prompt=prompt, max_tokens=1)
    salted = post(server, COMPLETIONS, prompt=prompt, max_tokens=1, cache_salt="tenant")
    cached = [d["usage"]["prompt_tokens_details"]["cached_tokens"] for d in (first, again, salted)]
    assert cached == [0, 96, 0]  # pages of 16


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_across_tokens_never_shows(server, heard, streamed):
    body = {"prompt": FOX, "max_tokens": 50, "stop": ["wn fo", "zzz"]}
    if streamed:
        chunks = stream(server, COMPLETIONS, **body)
        text, last = text_of(chunks), chunks[-1]["choices"][0]
        assert all("w" not in chunk["choices"][0]["text"] for chunk in chunks)
    else:
        last = post(server, COMPLETIONS, **body)["choices"][0]
        text = last["text"]
    assert text == "the quick bro"
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "wn fo")
    choice = heard.of(Closed)[-1].choices[0]
    assert choice.stop_matched == "wn fo"
    assert choice.finish_reason is FinishReason.STOP
    assert choice.output_text == "the quick bro"
    assert len(choice.output_ids) == 4  # the tokens up to the one that completed it, however many were on their way


def test_a_stop_string_can_be_included(server):
    choice = post(server, COMPLETIONS, prompt=FOX, max_tokens=50, stop="bro", include_stop_str_in_output=True)[
        "choices"
    ][0]
    assert choice["text"] == "the quick bro"


def test_stops_do_not_count_before_min_tokens(server):
    choice = post(server, COMPLETIONS, prompt=FOX, max_tokens=50, min_tokens=4, stop="quick")["choices"][0]
    assert choice["text"] == FOX + "the "


def test_a_held_back_stop_prefix_hides_its_tokens_and_logprobs_too(server):
    chunks = stream(server, COMPLETIONS, prompt=FOX, max_tokens=7, stop=[" brown foxes"], logprobs=0)
    for i in range(len(chunks)):
        shown = text_of(chunks[: i + 1])
        tokens = "".join(t for c in chunks[: i + 1] for t in c["choices"][0]["logprobs"]["tokens"])
        assert tokens == shown
    assert shown == FOX + "the quick brown"


def test_eos_ends_without_its_text_and_is_in_the_ids(server, tokenizer):
    eos = tokenizer.token_to_id("<|eos|>")
    prompt = [*tokenizer.encode(FOX).ids, eos]
    document = post(server, COMPLETIONS, prompt=prompt, max_tokens=50, return_token_ids=True)
    (choice,) = document["choices"]
    assert choice["text"] == FOX
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["token_ids"] == prompt
    assert document["usage"]["completion_tokens"] == 5


def test_a_stop_token_is_named(server, heard, tokenizer):
    ids = tokenizer.encode(FOX).ids
    choice = post(server, COMPLETIONS, prompt=FOX, max_tokens=50, stop_token_ids=[ids[2]])["choices"][0]
    assert choice["text"] == "the quick"
    assert choice["stop_reason"] == ids[2]
    assert heard.of(Closed)[-1].choices[0].stop_matched == str(ids[2])


def test_a_stop_token_is_not_taken_for_a_stop_string_of_its_digits(server, heard, tokenizer):
    token_id = tokenizer.encode(FOX).ids[2]
    body = {"prompt": FOX, "max_tokens": 50, "stop": [str(token_id)], "stop_token_ids": [token_id]}
    assert post(server, COMPLETIONS, **body)["choices"][0]["stop_reason"] == token_id
    text = f"a {token_id} b"
    assert post(server, COMPLETIONS, **body | {"prompt": text})["choices"][0]["stop_reason"] == str(token_id)


def test_ignore_eos_and_special_tokens_in_the_text(server, tokenizer):
    prompt = [*tokenizer.encode("the").ids, tokenizer.token_to_id("<|eos|>")]
    body = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True}
    assert post(server, COMPLETIONS, **body)["choices"][0]["text"] == "thethe"
    shown = post(server, COMPLETIONS, **body, skip_special_tokens=False)["choices"][0]["text"]
    assert shown == "the<|eos|>the"


def test_forced_ids_come_out_and_set_the_length(server, heard, tokenizer):
    forced = [*tokenizer.encode("museum").ids, tokenizer.token_to_id("<|eos|>"), 70]
    document = post(server, COMPLETIONS, prompt=FOX, forced_token_ids=forced, stop="mu", return_token_ids=True)
    (choice,) = document["choices"]
    assert choice["token_ids"] == forced
    assert choice["finish_reason"] == "length"
    assert heard.of(Closed)[-1].choices[0].finish_reason is FinishReason.FORCED


def test_completion_logprobs(server, tokenizer):
    document = post(server, COMPLETIONS, prompt=FOX, max_tokens=3, logprobs=2)
    logprobs = document["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["the", " quick", " brown"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 3, 9]
    runner_up = tokenizer.decode([tokenizer.encode("the").ids[0] + 1])
    assert logprobs["top_logprobs"][0] == {"the": -0.5, runner_up: -1.5}


def test_chat_logprobs_hold_bytes_that_join_to_the_text(server):
    body = {"messages": [{"role": "user", "content": "🎉é"}], "max_tokens": 20, "logprobs": True, "top_logprobs": 3}
    document = post(server, CHAT, **body)
    entries = document["choices"][0]["logprobs"]["content"]
    assert len(entries) == 20
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    joined = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert "🎉é" in joined
    streamed = [
        e for c in stream(server, CHAT, **body) for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == entries


@pytest.mark.parametrize("streamed", [False, True])
def test_prompt_logprobs_and_token_ids(server, tokenizer, streamed):
    body = {"prompt": FOX, "max_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True, "n": 2}
    if streamed:
        chunks = [c["choices"][0] for c in stream(server, COMPLETIONS, **body)]
        first = next(c for c in chunks if c["index"] == 0)
        assert sum("prompt_token_ids" in c for c in chunks if c["index"] == 0) == 1
        assert [i for c in chunks if c["index"] == 0 for i in c["token_ids"]] == tokenizer.encode("the quick").ids
    else:
        first = post(server, COMPLETIONS, **body)["choices"][0]
        assert first["token_ids"] == tokenizer.encode("the quick").ids
    ids = tokenizer.encode(FOX).ids
    assert first["prompt_token_ids"] == ids
    scores = first["prompt_logprobs"]
    assert scores[0] is None
    assert len(scores) == 4
    assert scores[1][str(ids[1])] == {"logprob": -1.0, "rank": 1, "decoded_token": " quick"}


def test_a_chat(server, heard, tokenizer):
    messages = [{"role": "user", "content": [{"type": "text", "text": "lazy"}, {"type": "text", "text": "dog"}]}]
    document = post(server, CHAT, messages=messages, max_completion_tokens=4, max_tokens=9, return_token_ids=True)
    assert document["object"] == "chat.completion"
    prompt = "<|im_start|>user\nlazy\ndog<|im_end|>\n<|im_start|>assistant\n"
    # a template writes the special tokens itself, and its text is not given others
    assert document["prompt_token_ids"] == tokenizer.encode(prompt, add_special_tokens=False).ids
    assert document["usage"]["completion_tokens"] == 4
    (choice,) = document["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == tokenizer.decode(choice["token_ids"])
    arrived = heard.of(Arrived)[-1]
    assert json.loads(arrived.messages_json) == messages
    assert arrived.prompt_text == prompt


def test_a_chat_stream_begins_with_the_role(server):
    chunks = stream(
        server, CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=5, n=2, return_token_ids=True
    )
    for index in (0, 1):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all("role" not in delta for delta in deltas[1:])
    assert ["prompt_token_ids" in chunk for chunk in chunks].count(True) == 1
    assert "prompt_token_ids" in chunks[0]
    ends = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert ends == ["length", "length"]


def test_a_chat_without_max_tokens_has_what_the_context_leaves(server, heard):
    with CLIENT.stream(
        "POST", server.url + CHAT, json={"messages": [{"role": "user", "content": "hi"}], "stream": True}
    ) as response:
        next(response.iter_lines())
    arrived = heard.of(Arrived)[-1]
    assert arrived.sampling.max_tokens == 4096 - len(arrived.prompts[0])
    heard.wait(lambda heard: len(heard.of(Closed)) == len(heard.of(Arrived)))


def test_the_last_message_can_be_continued(server, tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the quick "}]
    document = post(server, CHAT, messages=messages, max_tokens=1, continue_final_message=True, return_token_ids=True)
    assert tokenizer.decode(document["prompt_token_ids"], skip_special_tokens=False).endswith("assistant\nthe quick ")


def test_an_unset_seed_is_drawn_and_a_set_one_kept(server, heard):
    post(server, COMPLETIONS, prompt=FOX)
    post(server, COMPLETIONS, prompt=FOX)
    post(server, COMPLETIONS, prompt=FOX, seed=7)
    a, b, c = [arrived.sampling.seed for arrived in heard.of(Arrived)[-3:]]
    assert None not in (a, b)
    assert a != b
    assert c == 7


def test_equal_prompts_without_a_seed_are_sampled_apart_and_with_one_alike(server, heard):
    def seeds(**body):
        post(server, COMPLETIONS, prompt=[FOX] * 4, n=2, **body)
        closed = heard.of(Closed)[-1]
        return closed.arrived.sampling.seed, [(c.prompt_index, c.seed) for c in closed.choices]

    drawn, by_choice = seeds()
    assert by_choice[0] == (0, drawn)
    assert len(set(by_choice)) == 4  # choices of one prompt share a seed: their index tells their noise apart
    assert len({seed for _, seed in by_choice}) == 4
    assert {seed for _, seed in seeds(seed=-5)[1]} == {-5}


def test_text_is_in_the_events_only_where_it_is_kept(make_server):
    heard = Heard()
    with make_server(heard) as server:
        post(server, CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=1)
    (arrived,) = heard.of(Arrived)
    assert (arrived.messages_json, arrived.prompt_text) == (None, None)


def test_headers_identify_a_request(server, heard):
    response = CLIENT.post(
        server.url + COMPLETIONS,
        json={"prompt": FOX},
        headers={
            "x-request-id": "mine-1",
            "x-inferdbg-replay-of": "cmpl-0",
            "x-inferdbg-class": "batch",
            "x-inferdbg-tenant": "acme",
            "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "tracestate": "a=1",
        },
    )
    arrived = heard.of(Arrived)[-1]
    assert response.headers["x-request-id"] == response.json()["id"] == arrived.request_id
    assert (arrived.client_request_id, arrived.replay_of) == ("mine-1", "cmpl-0")
    assert (arrived.service_class, arrived.tenant) == ("batch", "acme")
    assert (arrived.trace.trace_id, arrived.trace.parent_span_id) == (
        "4bf92f3577b34da6a3ce929d0e0e4736",
        "00f067aa0ba902b7",
    )
    assert arrived.trace.tracestate == "a=1"


def test_models_health_version(server):
    listed = CLIENT.get(server.url + "/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["parrot"]
    assert listed["data"][0]["max_model_len"] == 4096
    assert CLIENT.get(server.url + "/v1/models/parrot").json() == listed["data"][0]
    assert CLIENT.get(server.url + "/health").json() == {"status": "ok"}
    assert CLIENT.get(server.url + "/version").json()["version"]


def test_tokenize_and_detokenize(server, tokenizer):
    document = post(server, "/tokenize", prompt=FOX, return_token_strs=True)
    assert document == {
        "count": 4,
        "max_model_len": 4096,
        "tokens": tokenizer.encode(FOX).ids,
        "token_strs": ["the", "Ġquick", "Ġbrown", "Ġfox"],
    }
    assert post(server, "/detokenize", tokens=document["tokens"]) == {"prompt": FOX}
    chat = post(server, "/tokenize", messages=[{"role": "user", "content": "hi"}])
    assert chat["token_strs"] is None
    text = post(server, "/detokenize", tokens=chat["tokens"])["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_preempted_request_counts_its_requeue(make_server):
    heard = Heard()
    # two sequences that together need more pages than there are
    with make_server(heard, core={"num_pages": 12, "page_size": 16, "prefix_cache": False}) as server:
        document = post(server, COMPLETIONS, prompt=["lazy dog", "the quick"], max_tokens=120)
    assert [c["finish_reason"] for c in document["choices"]] == ["length", "length"]
    (closed,) = heard.of(Closed)
    assert sum(choice.num_preemptions for choice in closed.choices) >= 1
    victim = max(closed.choices, key=lambda choice: choice.num_preemptions)
    assert 0 < victim.requeue_ns < closed.closed_ns - closed.boundaries.received_ns
    assert len(victim.output_ids) == 120
