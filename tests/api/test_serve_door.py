"""The door's flags of `python -m tools.serve`: keys, TLS, origins, strictness."""
from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.api.serving import TIMEOUT_S, request
from tests.api.test_serve import ROOT, Served, posix, serving

SECRET = "sk-very-secret-0123456789"


def stop(served: Served) -> None:
    served.signal(signal.SIGTERM)
    assert served.exit_code() == 0


def refused(*args: str) -> str:
    """What a server says that does not start."""
    result = subprocess.run([sys.executable, "-m", "tests.api.serve_fake", "--port", "0", *args], cwd=ROOT,
                            capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    assert result.returncode in (1, 2)
    assert "Traceback" not in result.stderr
    assert SECRET not in result.stderr
    return result.stderr


@posix
def test_keys_open_the_door_and_are_in_no_log(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# a comment\n{SECRET}-file\n\n")
    file.chmod(0o640)
    with serving("--api-key", f"{SECRET}-1", "--api-key", f"{SECRET}-2", "--api-key-file", str(file), "--log-level",
                 "debug") as served:
        served.wait_for("ready after")
        served.wait_for("3 API keys: every path but /health asks for one")
        served.wait_for("can be read by other users of this machine: chmod 600 it")
        assert served.request("GET", "/health").status == 200
        for path in ("/v1/models", "/metrics", "/ready", "/openapi.json", "/version"):
            assert served.request("GET", path).status == 401
        for key in ("1", "2", "file"):
            answer = request(served.port, "POST", "/v1/completions", {"prompt": "a FAIL"},
                             {"Authorization": f"Bearer {SECRET}-{key}"})
            assert answer.status == 500
            assert SECRET.encode() not in answer.body
        assert request(served.port, "GET", "/v1/models", headers={"x-api-key": SECRET}).status == 401
        stop(served)
    assert not any("very-secret" in line for line in served.lines)


@posix
def test_a_key_file_of_ones_own_is_no_reason_to_warn(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(SECRET)
    file.chmod(0o600)
    with serving("--api-key-file", str(file)) as served:
        served.wait_for("1 API keys")
        served.wait_for("ready after")
        stop(served)
    assert not any("chmod" in line for line in served.lines)


def test_keys_that_cannot_be_used(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("# none yet\n\n")
    binary.write_bytes(b"\xff\xfe")
    assert "has no API key" in refused("--api-key-file", str(empty))
    assert "is not UTF-8 text" in refused("--api-key-file", str(binary))
    assert "No such file" in refused("--api-key-file", str(tmp_path / "nowhere"))
    assert "API key 1 must be" in refused("--api-key", "")
    assert "API key 2 must be" in refused("--api-key", "a", "--api-key", f"{SECRET} x")


@pytest.mark.parametrize("bad", [["--allow-origin", "example.org"], ["--allow-origin", "https://example.org/"],
                                 ["--idle-timeout", "-1"], ["--request-timeout", "x"],
                                 ["--sse-keep-alive-interval", "inf"], ["--ssl-keyfile", "key.pem"],
                                 ["--ssl-certfile", "nowhere.pem"]])
def test_other_flags_that_cannot_be_used(bad: list[str]) -> None:
    assert bad[0].removeprefix("--") in refused(*bad) or "nowhere.pem" in bad[1]


@posix
def test_an_open_door_to_others_is_told() -> None:
    with serving("--host", "0.0.0.0", listening="http://0.0.0.0") as served:
        served.wait_for("no API key is asked for: whoever reaches 0.0.0.0 can use this server")
        served.wait_for("ready after")
        stop(served)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command makes the certificate, and it is not here")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out",
                    folder / "cert.pem"], check=True, capture_output=True)
    return folder


@posix
def test_https(certificate: Path) -> None:
    with serving("--ssl-certfile", str(certificate / "cert.pem"), "--ssl-keyfile", str(certificate / "key.pem"),
                 listening="https://127.0.0.1") as served:
        served.wait_for("ready after")
        trusting = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
        connection = http.client.HTTPSConnection("127.0.0.1", served.port, timeout=TIMEOUT_S, context=trusting)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "stream": True}))
        assert b"[DONE]" in connection.getresponse().read()
        connection.close()
        with socket.create_connection(("127.0.0.1", served.port), TIMEOUT_S) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert not plain.recv(4096).startswith(b"HTTP/1.1 200")
        stop(served)


@posix
def test_a_certificate_that_does_not_fit(certificate: Path, tmp_path: Path) -> None:
    cert, key = str(certificate / "cert.pem"), str(certificate / "key.pem")
    assert "no certificate with its key" in refused("--ssl-certfile", cert)
    assert "no certificate with its key" in refused("--ssl-certfile", key, "--ssl-keyfile", key)
    locked = tmp_path / "locked.pem"
    subprocess.run(["openssl", "rsa", "-aes256", "-passout", "pass:x", "-in", key, "-out", locked], check=True,
                   capture_output=True)
    assert "the key is encrypted" in refused("--ssl-certfile", cert, "--ssl-keyfile", str(locked))
    both = tmp_path / "both.pem"
    both.write_text(Path(cert).read_text() + Path(key).read_text())
    with serving("--ssl-certfile", str(both), listening="https://127.0.0.1") as served:
        served.wait_for("ready after")
        stop(served)


@posix
def test_strict_refuses_what_it_does_not_know() -> None:
    with serving("--strict", "--api-key", SECRET) as served:
        served.wait_for("ready after")
        with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key=SECRET, max_retries=0) as client:
            assert client.completions.create(model="fake", prompt="a").choices[0].text == "re a"
            with pytest.raises(openai.BadRequestError) as unknown:
                client.completions.create(model="fake", prompt="a", extra_body={"top_q": 1})
            assert unknown.value.param == "top_q"
        stop(served)


def test_help_names_every_flag_of_the_door() -> None:
    told = subprocess.run([sys.executable, "-m", "tools.serve", "--help"], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout
    for flag in ("api-key", "api-key-file", "allow-origin", "ssl-certfile", "ssl-keyfile", "request-timeout",
                 "idle-timeout", "sse-keep-alive-interval", "strict", "shutdown-timeout",
                 "enable-per-request-metrics"):
        assert re.search(rf"--{flag}\b", told)
