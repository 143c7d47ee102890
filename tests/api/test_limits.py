"""Bodies that are too long or lie about their length, and request ids."""
from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from api.exchange import MAX_BODY_BYTES
from tests.api.serving import Server


def status_of(connection: socket.socket) -> int:
    """Reads the answer's head."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(4096)
        if not part:
            break
        data += part
    return int(data.split()[1])


def test_honest_long_body_is_refused_before_it_is_sent(server: Server) -> None:
    """FAULTS A14."""
    with server.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 67108864\r\n\r\n{")
        assert status_of(connection) == 413
        while connection.recv(4096):            # the server closes: it will not read the rest
            pass


def test_chunked_long_body_is_refused_at_the_limit(server: Server) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with server.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        num_sent = 0
        try:
            while num_sent < 64 << 20:
                connection.sendall(chunk)
                num_sent += 0x10000
        except ConnectionError:
            pass
        # Past the limit only what was under way is taken: the sockets' buffers.
        assert MAX_BODY_BYTES <= num_sent < MAX_BODY_BYTES + (32 << 20)


def test_body_at_the_limit_is_read(server: Server) -> None:
    body = b'{"prompt": "a"}'.ljust(MAX_BODY_BYTES)
    assert server.request("POST", "/v1/completions", body).status == 200
    assert server.request("GET", "/health").status == 200


@pytest.mark.parametrize("length", ["-1", "abc", "99999999999999999999999999", "1e3", "16, 17", "0x10"])
def test_length_that_is_no_length(server: Server, length: str) -> None:
    with server.connect() as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode())
        assert status_of(connection) in (400, 413)


def test_length_that_is_too_short(server: Server) -> None:
    """What follows the declared body is not this request's."""
    with server.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n"
                           b'{"prompt": "a"}' + b"x" * 100_000)
        assert status_of(connection) == 200


def test_body_that_never_ends_up(server: Server) -> None:
    """The declared length never comes; the client leaves."""
    with server.connect() as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"prompt"')
        assert server.request("GET", "/health").status == 200


def test_long_legal_body_is_parsed_off_the_loop(server: Server) -> None:
    prompt = "a" * 200_000
    answer = server.complete(prompt=prompt)
    assert answer.status == 400                 # longer than the context
    assert "200000" in answer.error["message"]


@pytest.mark.parametrize("sent", ["abc", "a" * 128, "A.b_c:9-"])
def test_plain_request_id_is_echoed(server: Server, sent: str) -> None:
    for path in ("/health", "/v1/nothing"):
        assert server.request("GET", path, headers={"X-Request-Id": sent}).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["a" * 129, "a b", "a\tb", "é", "a/b", "", "a" * 40_000])
def test_other_request_ids_are_replaced(server: Server, sent: str) -> None:
    """FAULTS A16."""
    answer = server.request("GET", "/health", headers={"X-Request-Id": sent.encode().decode("latin-1")})
    shown = answer.headers["x-request-id"]
    assert shown != sent
    assert len(shown) == 32
    assert len(answer.headers.get_all("x-request-id", [])) == 1


def test_equal_request_ids_do_not_mix(server: Server) -> None:
    """FAULTS A16: two connections at once with one id; each gets its own answer under its own answer id."""
    def send(prompt: str) -> socket.socket:
        connection = server.connect()
        body = json.dumps({"prompt": prompt}).encode()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: same\r\nConnection: close\r\n"
                           b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body)
        return connection

    def document(connection: socket.socket) -> Any:
        data = b""
        while part := connection.recv(4096):
            data += part
        connection.close()
        return json.loads(data.partition(b"\r\n\r\n")[2])

    documents = [document(connection) for connection in [send("one"), send("two")]]
    assert [answer["choices"][0]["text"] for answer in documents] == ["re one", "re two"]
    assert documents[0]["id"] != documents[1]["id"]
