from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.core.sequence import SequenceRequest
from inferdbg.engine.serving.core_process import Launch
from inferdbg.engine.serving.messages import Abort, Credit, FrontMessage, Shutdown, Submit
from inferdbg.engine.serving.transport import ChannelClosed, ChannelCorrupt, MessageChannel, make_socket_pair


@pytest.fixture
def ends():
    ours, theirs = make_socket_pair()
    with ours, theirs:
        yield ours, theirs


def request(seq_id=7, prompt=(1, 2, 3)):
    sampling = SamplingParams(seed=2**63 - 1, logit_bias={5: -1.5}, stop=("a", "b"), forced_token_ids=(9,))
    return SequenceRequest(seq_id=seq_id, prompt_ids=prompt, sampling=sampling, cache_salt="s", arrival_ns=2**62)


def test_messages_arrive_whole_and_in_order(ends):
    sender, receiver = (MessageChannel(sock, FrontMessage) for sock in ends)
    sent = [Submit([request(), request(8)]), Abort([7, 9]), Credit(8, 1024), Shutdown()]
    for message in sent:
        sender.send(message)
    assert receiver.wait(1.0) == sent
    assert receiver.receive() == []


def test_the_configuration_with_its_path_survives(ends):
    sender, receiver = (MessageChannel(sock, Launch) for sock in ends)
    launch = Launch(CoreConfig(model_dir=Path("/models/a b"), decode_buckets=(1, 2)), "m:f")
    sender.send(launch)
    assert receiver.wait(1.0) == [launch]


@given(cuts=st.lists(st.integers(1, 40), max_size=30))
def test_frames_may_be_cut_anywhere(cuts):
    source, middle = make_socket_pair()
    relay, sink = make_socket_pair()
    with source, middle, relay, sink:
        sender, receiver = MessageChannel(source, FrontMessage), MessageChannel(sink, FrontMessage)
        sent = [Credit(i, i * i) for i in range(20)]
        for message in sent:
            sender.send(message)
        data = middle.recv(1 << 20)
        got = []
        for cut in [*cuts, len(data)]:
            relay.send(data[:cut])
            data = data[cut:]
            got += receiver.receive()
        assert got == sent


def test_a_send_never_blocks_and_the_rest_follows(ends):
    sender, receiver = (MessageChannel(sock, FrontMessage) for sock in ends)
    big = Submit([request(prompt=tuple(range(100_000)))])
    for _ in range(30):  # far more than the socket holds
        sender.send(big)
    assert sender.has_unsent
    got = []
    while len(got) < 30:
        sender.flush()
        got += receiver.receive()
    assert all(message == big for message in got)
    assert not sender.has_unsent


def test_what_was_sent_before_the_end_is_still_received(ends):
    sender, receiver = (MessageChannel(sock, FrontMessage) for sock in ends)
    sender.send(Shutdown())
    sender.close()
    assert receiver.wait(1.0) == [Shutdown()]
    with pytest.raises(ChannelClosed):
        receiver.wait(1.0)


def test_sending_to_a_closed_peer_says_so(ends):
    sender, receiver = (MessageChannel(sock, FrontMessage) for sock in ends)
    receiver.close()
    with pytest.raises(ChannelClosed):
        sender.send(Shutdown())


@pytest.mark.parametrize("garbage", [struct.pack("<I", 2**32 - 1), struct.pack("<I", 3) + b"\xc1\xc1\xc1"])
def test_garbage_is_corrupt_not_a_crash(ends, garbage):
    sock, receiver = ends[0], MessageChannel(ends[1], FrontMessage)
    sock.send(garbage)
    with pytest.raises(ChannelCorrupt):
        receiver.wait(1.0)


def test_waiting_ends_with_its_timeout(ends):
    assert isinstance(ends[0], socket.socket)
    assert MessageChannel(ends[0], FrontMessage).wait(0.01) == []
