"""The official client, unmodified, against the real engine on a tiny random Llama."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from serving_events import Heard
from serving_models import train_tokenizer, write_tokenizer

from inferdbg.engine.config import CoreConfig, FrontConfig
from inferdbg.engine.core.events import StepRecord
from inferdbg.engine.serving.core_process import DEFAULT_ENGINE_FACTORY
from inferdbg.engine.serving.events import Closed, EndKind
from inferdbg.engine.serving.server import ServerHandle


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = train_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.token_to_id("<|bos|>"),
        eos_token_id=tokenizer.token_to_id("<|eos|>"),
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory, tokenizer)
    return directory


@pytest.fixture(scope="module")
def heard():
    return Heard()


@pytest.fixture(scope="module")
def server(model_dir, heard):
    core = CoreConfig(model_dir=model_dir, dtype="float64", num_pages=64, num_threads=1)
    front = FrontConfig(model_name="tiny", model_dir=model_dir, port=0, api_key="secret")
    with ServerHandle(core, front, heard, engine_factory=DEFAULT_ENGINE_FACTORY) as handle:
        yield handle


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as client:
        yield client


MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


def greedy(model_dir, prompt_ids, num_tokens):
    """transformers' own greedy output."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    ids = torch.tensor([prompt_ids])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return output[0, len(prompt_ids) :].tolist()


def test_a_chat_is_what_transformers_says(client, model_dir):
    completion = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=24, temperature=0, extra_body={"return_token_ids": True}
    )
    ids = completion.choices[0].token_ids
    assert ids == greedy(model_dir, completion.prompt_token_ids, 24)
    assert completion.usage.completion_tokens == len(ids)
    assert completion.choices[0].finish_reason in ("stop", "length")


def test_a_streamed_chat_is_the_whole_one(client):
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**body)
    with client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_choices_are_reproduced_by_their_seed(client):
    body = {"model": "tiny", "prompt": "the quick", "max_tokens": 12, "n": 3, "seed": 11, "temperature": 1.5}
    first, second = (client.completions.create(**body) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 3


def test_a_batch_of_equal_prompts_differs_unless_it_is_seeded(client):
    body = {"model": "tiny", "prompt": ["the quick"] * 4, "max_tokens": 12, "temperature": 1.5}
    assert len({choice.text for choice in client.completions.create(**body).choices}) == 4
    assert len({choice.text for choice in client.completions.create(**body, seed=3).choices}) == 1


def test_logprobs_in_both_shapes(client):
    completion = client.completions.create(model="tiny", prompt="the quick", max_tokens=5, logprobs=2, temperature=0)
    logprobs = completion.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 5
    assert all(
        max(top.values()) == own for top, own in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True)
    )
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=4, temperature=0
    )
    for entry in chat.choices[0].logprobs.content:
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert len(entry.top_logprobs) == 4


def test_a_cancelled_stream_frees_its_pages(client, heard):
    stream = client.completions.create(
        model="tiny", prompt="the", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    heard.wait(lambda heard: heard.of(Closed)[-1].end is EndKind.ABORTED)
    heard.wait(lambda heard: heard.of(StepRecord)[-1].pages_used == 0)


def test_errors_are_the_clients_own_classes(client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt=[50] * 600)
    assert raised.value.code == "context_length_exceeded"
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_many_clients_at_once_get_what_one_gets(client):
    prompts = [f"museum placard {i}" for i in range(12)]

    def ask(prompt):
        return client.completions.create(model="tiny", prompt=prompt, max_tokens=16, temperature=0).choices[0].text

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, prompts))
    assert together == alone
