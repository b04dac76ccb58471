"""Every bad request gets an answer in OpenAI's shape with the right code, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest
from serving_models import write_tokenizer

from inferdbg.engine.core.events import StepRecord
from inferdbg.engine.serving.events import Arrived, Closed, Rejected

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def heard():
    from serving_events import Heard

    return Heard()


@pytest.fixture(scope="module")
def server(make_server, heard):
    with make_server(heard, front={"max_body_bytes": 100_000}, core={"num_pages": 64}) as handle:
        yield handle


CLIENT = httpx.Client(headers={"content-type": "application/json"})  # one: making one costs more than a request


def post(server, path, content):
    return CLIENT.post(server.url + path, content=content)


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


@pytest.fixture(autouse=True)
def _nothing_is_left(server, heard):
    before = len(heard.of(Rejected)) + len(heard.of(Closed))
    yield
    ended = len(heard.of(Rejected)) + len(heard.of(Closed))
    assert len(heard.of(Arrived)) == len(heard.of(Closed))
    assert ended >= before
    assert server.call(lambda: server.running.front.num_requests) == 0
    assert server.call(lambda: server.running.front.supervisor.dispatcher.num_live) == 0
    response = CLIENT.post(server.url + COMPLETIONS, json={"prompt": "the", "max_tokens": 1})
    assert response.status_code == 200
    heard.wait(lambda heard: heard.of(StepRecord)[-1].pages_used == 0)


MALFORMED = {
    "empty body": b"",
    "cut off": b'{"prompt": "a"',
    "not an object": b"[1, 2]",
    "a number": b"17",
    "not JSON": b"prompt=a",
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "a lone surrogate": b'{"prompt": "\\ud800 and so on"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": 1e999}',
    "deep nesting": b'{"prompt": "a", "x": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
    "trailing data": b'{"prompt": "a"} {"prompt": "b"}',
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_not_a_json_object_is_refused(server, heard, name):
    before = len(heard.of(Rejected))
    error = error_of(post(server, COMPLETIONS, MALFORMED[name]), 400)
    assert error["code"] == "invalid_request"
    assert len(heard.of(Rejected)) == before + 1


BAD_FIELDS = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", 10**30),
    ("max_tokens", True), ("min_tokens", -1), ("min_tokens", 17), ("n", 0), ("n", 129), ("n", 10**12),
    ("temperature", -0.1), ("temperature", 1e6), ("temperature", "hot"), ("temperature", [1]),
    ("top_p", 0), ("top_p", 1.01), ("top_k", -2), ("top_k", 2**63), ("min_p", -0.1), ("min_p", 2),
    ("seed", 2**63), ("seed", -(2**80)), ("seed", "x"), ("repetition_penalty", 0), ("repetition_penalty", -1),
    ("presence_penalty", 3), ("frequency_penalty", -3), ("logit_bias", {"5": 1000}), ("logit_bias", {"-1": 1}),
    ("logit_bias", {"x": 1}), ("logit_bias", {"100000": 1}), ("stop", [""]), ("stop", [1]), ("stop", 5),
    ("stop", ["s"] * 10_000), ("stop", "x" * 5000), ("stop_token_ids", [-1]), ("stop_token_ids", [10**9]),
    ("stop_token_ids", list(range(2000))), ("stop_token_ids", ["a"]), ("logprobs", -1), ("logprobs", 21),
    ("prompt_logprobs", 21), ("forced_token_ids", []), ("forced_token_ids", [10**9]), ("forced_token_ids", [-1]),
    ("stream", "yes"), ("stream_options", 5), ("model", 7),
    ("echo", True), ("suffix", "x"), ("best_of", 3), ("response_format", {"type": "json_object"}),
    ("guided_json", {}), ("allowed_token_ids", [1]), ("bad_words", ["x"]), ("truncate_prompt_tokens", 5),
    ("cache_salt", 5), ("return_token_ids", 1),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda value: str(value)[:20])
def test_a_bad_field_is_refused_by_name(server, field, value):
    body = {"prompt": "the quick", "max_tokens": 16, field: value}
    error = error_of(post(server, COMPLETIONS, json.dumps(body)), 400)
    assert error["param"].startswith(field)
    assert "quick" not in error["message"]


@pytest.mark.parametrize(
    "prompt",
    [
        "", [], [""], [[]], ["a", ""], [[1], []], None, 5, {"a": 1}, [1.5], [-1], [10**6], [2**70], [[1, -1]],
        [[10**6]], [1, "a"], [1, [2]], [True], [["a"]],
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_prompt_is_refused(server, prompt):
    error = error_of(post(server, COMPLETIONS, json.dumps({"prompt": prompt})), 400)
    assert error["param"].startswith("prompt")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([*USER, 5], "messages[1]"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "messages[0].tool_calls[0].function",
        ),
    ],
)
def test_bad_messages_are_refused_where_they_are_bad(server, messages, param):
    assert error_of(post(server, CHAT, json.dumps({"messages": messages})), 400)["param"] == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),  # this template takes none
        ("tool_choice", "required"), ("functions", [{"name": "f"}]), ("modalities", ["audio"]),
        ("chat_template", "{{ 1 }}"), ("top_logprobs", 3), ("logprobs", 5), ("max_completion_tokens", 0),
        ("max_completion_tokens", -5), ("chat_template_kwargs", [1]),
    ],
)  # fmt: skip
def test_bad_chat_fields_are_refused(server, field, value):
    error = error_of(post(server, CHAT, json.dumps({"messages": USER, field: value})), 400)
    # chat has one limit under two names; the engine's is the one that is named
    assert error["param"] == ("max_tokens" if field == "max_completion_tokens" else field)


def test_a_continued_message_and_a_generation_prompt_exclude_each_other(server):
    body = {"messages": USER, "continue_final_message": True, "add_generation_prompt": True}
    assert error_of(post(server, CHAT, json.dumps(body)), 400)["param"] == "continue_final_message"


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_queued(server, heard):
    arrived = len(heard.of(Arrived))
    error = error_of(post(server, COMPLETIONS, json.dumps({"prompt": [50] * 1024, "max_tokens": 1})), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert "1024" in error["message"]
    error = error_of(post(server, COMPLETIONS, json.dumps({"prompt": [50] * 1000, "max_tokens": 25})), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "max_tokens"
    assert post(server, COMPLETIONS, json.dumps({"prompt": [50] * 1000, "max_tokens": 24})).status_code == 200
    assert len(heard.of(Arrived)) == arrived + 1
    assert heard.of(Rejected)[-1].reason == "context_length"


def test_too_many_sequences_in_one_request(server):
    error = error_of(post(server, COMPLETIONS, json.dumps({"prompt": ["a"] * 100, "n": 3})), 400)
    assert "300 sequences" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [[]] * 300_000}, "prompt"),
        ({"prompt": ["a"] * 300_000}, "prompt"),
        ({"prompt": [60] * 1_000_000}, "prompt"),
        ({"prompt": [[60] * 1_000_000]}, "prompt"),
        ({"prompt": "a", "forced_token_ids": [60] * 1_000_000}, "forced_token_ids"),
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(200_000)}}, "logit_bias"),
    ],
    ids=["empty prompts", "texts", "ids", "ids in a list", "forced ids", "biases"],
)
def test_what_is_too_much_is_refused_by_its_length(start_server, body, param):
    server = start_server()
    content = json.dumps(body)

    async def watch():  # the longest time the event loop was away, in seconds
        worst, last = 0.0, time.monotonic()
        while not done.is_set():
            await asyncio.sleep(0.001)
            worst, last = max(worst, time.monotonic() - last), time.monotonic()
        return worst

    done = threading.Event()
    away = asyncio.run_coroutine_threadsafe(watch(), server._loop)
    error = error_of(post(server, COMPLETIONS, content), 400)
    done.set()
    assert error["param"] == param
    assert away.result() < 0.5  # nearly all of it is parsing


def test_what_a_template_quotes_of_the_prompt_is_for_the_client_alone(start_server, tmp_path, tokenizer):
    from serving_events import Heard

    heard = Heard()
    write_tokenizer(tmp_path, tokenizer, template="{{ raise_exception('I refuse ' ~ messages[0].content) }}")
    server = start_server(heard, model_dir=tmp_path)
    response = post(server, CHAT, json.dumps({"messages": [{"role": "user", "content": "my secret"}]}))
    assert "I refuse my secret" in error_of(response, 400)["message"]
    (rejected,) = heard.wait_for(Rejected)
    assert "secret" not in rejected.message
    assert "chat template" in rejected.message


def test_headers_that_never_end_are_not_waited_for(start_server, monkeypatch):
    monkeypatch.setattr("inferdbg.engine.serving.connection.HEADER_SECONDS", 0.3)
    server = start_server()
    begun = time.monotonic()
    answers = []
    for data in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx: "):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.sendall(data)
            answer = b""
            while chunk := sock.recv(65536):
                answer += chunk
            answers.append(answer)
    assert answers[0] == b""
    assert answers[1].startswith(b"HTTP/1.1 408 ")
    assert json.loads(answers[1].partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    assert time.monotonic() - begun < 5
    with httpx.Client() as client:  # a connection whose headers came is kept
        for _ in range(2):
            assert client.post(server.url + COMPLETIONS, json={"prompt": "a"}).status_code == 200
            time.sleep(0.4)


def test_another_model_does_not_exist(server):
    assert error_of(post(server, COMPLETIONS, b'{"prompt": "a", "model": "gpt-9"}'), 404)["code"] == "model_not_found"
    error_of(CLIENT.get(server.url + "/v1/models/gpt-9"), 404)


def test_unknown_fields_are_ignored(server):
    assert post(server, COMPLETIONS, b'{"prompt": "a", "user": "me", "x": {"y": [1]}}').status_code == 200


@pytest.mark.parametrize("size", [100_001, 700_000, 2_000_000])
def test_a_body_that_is_too_large(server, heard, size):
    error = error_of(post(server, COMPLETIONS, b'{"prompt": "' + b"a" * size), 413)
    assert error["code"] == "request_too_large"
    assert (heard.of(Rejected)[-1].status, heard.of(Rejected)[-1].reason) == (413, "too_large")


def test_a_chunked_body_that_is_too_large(server):
    def chunks():
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"a" * 10_000

    error_of(CLIENT.post(server.url + COMPLETIONS, content=chunks()), 413)


def test_unknown_paths_and_methods(server):
    assert error_of(CLIENT.get(server.url + "/v2/nothing"), 404)["code"] == "not_found"
    response = CLIENT.get(server.url + COMPLETIONS)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert "POST" in response.headers["allow"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}), ("/tokenize", {"prompt": 5}), ("/tokenize", {"messages": []}), ("/detokenize", {}),
        ("/detokenize", {"tokens": "a"}), ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [2**70]}),
    ],
)  # fmt: skip
def test_bad_utility_requests(server, path, body):
    error_of(post(server, path, json.dumps(body)), 400)


@pytest.mark.parametrize("data", [b"NONSENSE\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nx: " + b"a" * 100_000])
def test_malformed_http_is_answered_and_closed(server, data):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(data)
        answer = b""
        while chunk := sock.recv(65536):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "malformed_http"


def test_many_hostile_headers_do_no_harm(server, heard):
    headers = {
        "x-request-id": "é" * 1000,
        "traceparent": "00-zz",
        "x-inferdbg-class": "\u00a0",
        "x-inferdbg-replay-of": "a" * 10_000,
    }
    response = CLIENT.post(
        server.url + COMPLETIONS,
        json={"prompt": "a"},
        headers={name: value.encode() for name, value in headers.items()},
    )
    assert response.status_code == 200
    arrived = heard.of(Arrived)[-1]
    assert arrived.client_request_id == "é" * 256
    assert len(arrived.replay_of) == 256
    assert arrived.trace.parent_span_id is None
