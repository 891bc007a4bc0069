"""What processes say to each other before they work together."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxformer.parallel import (
    DistributedConfig,
    broadcast_from_process_0,
    check_equal_across_processes,
    initialize_distributed,
    is_primary_process,
)
from jaxformer.parallel import distributed as hosts


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            dict(coordinator_address="a:1"),
            r"num_processes and process_id must be passed together or not at all; got a:1, None "
            r"and None\.",
        ),
        (dict(num_processes=2, process_id=0), r"together or not at all; got None, 2 and 0\."),
        (
            dict(coordinator_address="a:1", num_processes=2, process_id=2),
            r"^process_id must be between 0 and 1; got 2\.$",
        ),
        (
            dict(coordinator_address="a:1", num_processes=2, process_id=-1),
            r"^process_id must be between 0 and 1; got -1",
        ),
        (dict(heartbeat_timeout=0), r"heartbeat_timeout must be positive; got 0\.$"),
        (dict(initialization_timeout=-3), r"initialization_timeout must be positive; got -3\.$"),
    ],
    ids=[
        "only where",
        "only which",
        "one too far",
        "negative",
        "no heartbeat",
        "no initialization",
    ],
)
def test_hosts_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DistributedConfig(**settings)


@pytest.mark.parametrize(
    "address", ["localhost", "localhost:x", "localhost:", ":1234", "a:0", "a:65536", "::1:80", ""]
)
def test_a_coordinator_without_host_or_port_is_refused(address):
    message = rf"^coordinator_address must be host:port, .* 65535; got '{re.escape(address)}'\.$"
    with pytest.raises(ValueError, match=message):
        DistributedConfig(coordinator_address=address, num_processes=2, process_id=0)


def test_a_coordinator_may_have_an_address_of_ipv6():
    assert (
        DistributedConfig(coordinator_address="[::1]:80", num_processes=2, process_id=0).process_id
        == 0
    )


def test_a_cluster_that_is_detected_needs_no_address():
    assert DistributedConfig().coordinator_address is None
    assert (
        DistributedConfig(
            coordinator_address="a:1", num_processes=2, process_id=1, heartbeat_timeout=1
        ).process_id
        == 1
    )


def test_a_process_that_cannot_find_the_others_says_what_it_needs(capfd):
    with pytest.raises(ValueError, match=r"initialize failed: .*Except on Slurm, TPU pods"):
        initialize_distributed(DistributedConfig())
    assert "did not come together" not in capfd.readouterr().err


@pytest.fixture
def port():
    with socket.create_server(("localhost", 0)) as chosen:
        number = chosen.getsockname()[1]
    return number


def met(port, *ranks, processes=3, wait=1):
    """What these processes, which begin in this order, say in the end; None where all met."""

    def meet(rank):
        at = f"localhost:{port}"
        config = DistributedConfig(
            coordinator_address=at,
            num_processes=processes,
            process_id=rank,
            initialization_timeout=wait,
        )
        try:
            return hosts.meet(config)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(meet, ranks))


def test_processes_meet_in_any_order_and_leave_the_port_to_jax(port):
    assert met(port, 2, 0, 1, wait=30) == [None] * 3
    with socket.create_server(("localhost", port)):
        pass
    assert met(port, 0, processes=1) == [None]


def test_all_that_came_are_told_who_is_missing(port):
    messages = met(port, 0, 2)
    assert messages[0] == messages[1]
    start = f"2 of 3 processes connected to localhost:{port} in 1 seconds; missing: 1. Check that "
    assert messages[0].startswith(start)


def test_a_process_that_reaches_nobody_says_where(port):
    (message,) = met(port, 1)
    start = rf"Process 1 of 3 got no answer in 1 seconds at localhost:{port}: .*refused\. Check "
    assert re.match(start, message)


def test_what_answers_otherwise_is_not_process_0(port):
    def answer():
        with listening.accept()[0] as connection:
            connection.sendall(b"\xff\n")
        listening.close()

    listening = socket.create_server(("localhost", port))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(answer)
        (message,) = met(port, 1)
    assert message.startswith(f"Process 1 of 3 got no answer in 1 seconds at localhost:{port}: ")


def test_process_0_whose_port_is_taken_says_so(port):
    with socket.create_server(("localhost", port)):
        (message,) = met(port, 0)
    assert re.match(rf"Process 0 of 3 cannot listen at localhost:{port}: .* in use", message)


def test_foreign_requests_at_the_port_are_no_processes(port):
    def bother():
        for request in (b"GET / HTTP/1.1", b"7"):
            with socket.create_connection(("localhost", port), timeout=1) as connection:
                connection.sendall(request)
                assert connection.makefile().readline() == "[1]\n"

    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(met, port, 0, processes=2, wait=30)
        while True:
            try:
                bother()
                break
            except ConnectionRefusedError:
                continue
        assert met(port, 1, processes=2, wait=30) == zero.result() == [None]


def test_one_process_is_the_first_and_agrees_with_itself():
    assert is_primary_process()
    assert check_equal_across_processes({"steps": 3}) is None
    assert broadcast_from_process_0(lambda: "here") == "here"


@pytest.fixture
def peers(monkeypatch):
    """Let the others say something, to a process that believes it is one of three."""

    def let_say(*texts):
        monkeypatch.setattr(hosts, "all_gather_strings", lambda text: [text, *texts])
        monkeypatch.setattr(jax, "process_count", lambda: 1 + len(texts))

    return let_say


def heard(**settings):
    there = {"local devices": [8, "cpu"]}
    return json.dumps(there | settings)


def test_processes_that_were_told_different_things_are_refused_with_each_difference(peers):
    peers(heard(steps=20, seed=0), heard(steps=30, seed=1))
    with pytest.raises(ValueError) as refused:
        check_equal_across_processes({"steps": 20, "seed": 0, "output": "a"})
    assert str(refused.value) == (
        "The processes have different settings:\n"
        "  output: a in process 0, None in process 1\n"
        "  seed: 0 in process 0, 1 in process 2\n"
        "  steps: 20 in process 0, 30 in process 2"
    )


def test_processes_with_other_numbers_of_devices_are_refused(peers):
    peers(json.dumps({"steps": 20, "local devices": [4, "cpu"]}))
    with pytest.raises(ValueError) as refused:
        check_equal_across_processes({"steps": 20})
    assert str(refused.value).splitlines()[1:] == [
        "  local devices: [8, 'cpu'] in process 0, [4, 'cpu'] in process 1"
    ]


def test_processes_that_were_told_the_same_are_let_through(peers):
    peers(heard(steps=20), heard(steps=20))
    assert check_equal_across_processes({"steps": 20}) is None


def test_what_the_first_process_refuses_all_refuse(peers, monkeypatch):
    monkeypatch.setattr(hosts, "is_primary_process", lambda: False)
    monkeypatch.setattr(hosts, "all_gather_strings", lambda text: ['["no room", ""]', text])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="^no room$"):
        broadcast_from_process_0(lambda: "here")


def test_texts_of_any_length_are_gathered():
    for text in ("", "a", "ü" * 300):
        assert hosts.all_gather_strings(text) == [text]
    rows = hosts.all_gather_arrays(np.arange(6, dtype=np.int32).reshape(2, 3))
    np.testing.assert_array_equal(rows, [[[0, 1, 2], [3, 4, 5]]])
