"""Queue limits, keys, administrative routes."""

from __future__ import annotations

import threading

import httpx
import pytest
from serving_events import Heard
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from inferdbg.engine.serving.events import Arrived, Closed, Rejected


@pytest.fixture
def heard():
    return Heard()


def test_beyond_the_queue_limit_it_is_429_with_retry_after(start_server, heard, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.01")
    server = start_server(heard, front={"max_queued_requests": 2})
    url = server.url + "/v1/completions"
    clients = [
        threading.Thread(target=httpx.post, args=(url,), kwargs={"json": {"prompt": "a", "max_tokens": 100}})
        for _ in range(2)
    ]
    for client in clients:
        client.start()
    heard.wait(lambda heard: len(heard.of(Arrived)) == 2)
    refused = httpx.post(url, json={"prompt": "a"})
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert heard.of(Rejected)[0].reason == "queue_full"
    for client in clients:
        client.join()
    assert httpx.post(url, json={"prompt": "a"}).status_code == 200
    assert len(heard.of(Closed)) == 3


def test_a_refused_client_is_told_to_wait_as_long_as_finished_requests_took(start_server, heard, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.01")
    server = start_server(heard, front={"max_queued_requests": 1})
    front = server.running.front
    server.call(lambda: setattr(front, "_mean_seconds", 40.0))
    url = server.url + "/v1/completions"
    for _ in range(30):
        assert httpx.post(url, json={"prompt": "a", "temperature": -1}).status_code == 400
    client = threading.Thread(target=httpx.post, args=(url,), kwargs={"json": {"prompt": "a", "max_tokens": 50}})
    client.start()
    heard.wait_for(Arrived)
    assert httpx.post(url, json={"prompt": "a"}).headers["retry-after"] == "40"
    client.join()
    assert server.call(lambda: front._mean_seconds) < 40


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [60]})])
def test_tokenizing_counts_like_any_request_and_ends_with_the_server(start_server, path, body):
    server = start_server(front={"max_queued_requests": 1, "tokenizer_threads": 1})
    front = server.running.front
    release = threading.Event()
    server.call(lambda: front.pool._pool.submit(release.wait, 20))  # the only thread is taken
    answers = []
    client = threading.Thread(target=lambda: answers.append(httpx.post(server.url + path, json=body, timeout=30)))
    client.start()
    while server.call(lambda: front._num_held) == 0:
        pass
    refused = httpx.post(server.url + path, json=body)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "a"}).status_code == 429
    server.call(lambda: setattr(front, "is_draining", True))
    refused = httpx.post(server.url + path, json=body)
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    release.set()
    client.join()
    assert answers[0].status_code == 200
    assert server.call(lambda: front._num_held) == 0


def test_the_api_key_guards_the_api_and_leaves_health_open(start_server, heard):
    server = start_server(heard, front={"api_key": "sésame"}, metrics=lambda accept: (b"m 1\n", "text/plain"))
    for path in ("/health", "/version", "/metrics"):
        assert httpx.get(server.url + path).status_code == 200
    assert httpx.get(server.url + "/v1/models").status_code == 401
    assert httpx.post(server.url + "/tokenize", json={"prompt": "a"}).status_code == 401
    for value in ("", "Bearer", "Bearer wrong", "Basic sésame", "Bearer sésame!"):
        refused = httpx.post(
            server.url + "/v1/completions", json={"prompt": "a"}, headers={"authorization": value.encode()}
        )
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert heard.of(Rejected)[-1].status == 401
    allowed = httpx.get(server.url + "/v1/models", headers={"authorization": "Bearer sésame".encode()})
    assert allowed.status_code == 200


async def hello(request):
    return PlainTextResponse("done")


ROUTES = [Route("/trace/steps", hello, methods=["POST"])]
KEY = {"authorization": "Bearer root"}


def test_administrative_routes_are_off_without_a_key(start_server):
    server = start_server(extra_routes=ROUTES)
    refused = httpx.post(server.url + "/trace/steps")
    assert refused.status_code == 403
    assert "admin-key-file" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer api"}, 401),
        (KEY, 200),
        (KEY | {"host": "evil.example"}, 403),
        (KEY | {"origin": "https://evil.example"}, 403),
        (KEY | {"origin": "null"}, 403),
    ],
)
def test_administrative_routes_need_their_own_key_host_and_origin(start_server, headers, status):
    server = start_server(front={"api_key": "api", "admin_key": "root"}, extra_routes=ROUTES)
    assert httpx.post(server.url + "/trace/steps", headers=headers).status_code == status


@pytest.mark.parametrize(
    "path", ["/admin/steps", "/admin/", "/trace/7/steps", "/trace/a%2Fb/steps", "//trace/7/steps", "/elsewhere/steps"]
)
def test_an_administrative_route_of_any_form_is_guarded(start_server, path):
    routes = [
        Route("/trace/{number}/steps", hello, methods=["POST"]),
        Mount("/admin", routes=[Route("/steps", hello, methods=["POST"]), Route("/", hello, methods=["POST"])]),
        Mount("/", routes=[Route("/elsewhere/steps", hello, methods=["POST"])]),
    ]
    server = start_server(front={"api_key": "api", "admin_key": "root"}, extra_routes=routes)
    for headers in ({}, {"authorization": "Bearer api"}):
        assert httpx.post(server.url + path, headers=headers).status_code == 401
    assert httpx.post(server.url + path, headers=KEY).status_code in (200, 404)
    # and one that would match everything opens nothing
    assert httpx.get(server.url + "/v1/models", headers=KEY).status_code == 401


def test_metrics_are_rendered_for_what_the_client_accepts(start_server):
    server = start_server(metrics=lambda accept: (accept.encode(), "text/x-metrics"))
    response = httpx.get(server.url + "/metrics", headers={"accept": "application/openmetrics-text"})
    assert response.text == "application/openmetrics-text"
    assert response.headers["content-type"] == "text/x-metrics"
