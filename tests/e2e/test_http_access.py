"""Who may do what by HTTP, what is refused in configuration, and what methods and paths that are not there answer."""

import pytest
from harness import http as web

V1 = "/resvisor/v1"
OPERATORS = [
    ("POST", f"{V1}/models/small/unload"), ("POST", f"{V1}/models/small/pin"), ("POST", f"{V1}/models/small/unpin"),
    ("POST", f"{V1}/types/test/restart"), ("GET", f"{V1}/types/test/logs"),
]  # fmt: skip
CLIENTS = [
    ("GET", "/metrics"), ("GET", f"{V1}/status"), ("GET", f"{V1}/models"), ("GET", f"{V1}/models/small"),
    ("POST", f"{V1}/models/small/load"), ("GET", f"{V1}/jobs"), ("GET", f"{V1}/jobs/a"), ("GET", f"{V1}/jobs/a/wait"),
    ("POST", f"{V1}/jobs/a/cancel"), ("GET", f"{V1}/jobs/a/outputs/0"), ("GET", f"{V1}/events"), ("POST", f"{V1}/jobs"),
]  # fmt: skip


@pytest.fixture(scope="module")
def make_module_service(tmp_path_factory):
    made = []

    def make(name, **kwargs):
        made.append(web.start_small(tmp_path_factory.mktemp(name), **kwargs))
        return made[-1]

    yield make
    for service in made:
        service.end()


@pytest.fixture(scope="module")
def with_token(make_module_service):
    return make_module_service("with", token=web.TOKEN)


@pytest.fixture(scope="module")
def without_token(make_module_service):
    return make_module_service("without")


@pytest.mark.parametrize("method, path", OPERATORS)
def test_operators_requests_need_a_token(without_token, method, path):
    starts = without_token.worker("test").starts
    with web.Client(without_token) as client:
        answer = client.request(method, path)
        assert (answer.status, answer.code) == (403, "not_permitted") and "http.token_file" in answer.json["error"]["remedy"]
        assert client.request(method, path, headers={"Authorization": "Bearer "}).status == 403
        assert client.request(method, path, headers={"Authorization": "Bearer x"}).status == 403
    assert without_token.worker("test").starts == starts and not without_token.model("small").pinned


@pytest.mark.parametrize("method, path", OPERATORS + CLIENTS)
@pytest.mark.parametrize("shown", [None, "Bearer", "Bearer x", f"Bearer {web.TOKEN}x", f"Bearer {web.TOKEN[:-1]}", f"Basic {web.TOKEN}", web.TOKEN])
def test_a_wrong_token_is_refused(with_token, method, path, shown):
    with web.Client(with_token) as client:
        answer = client.request(method, path, headers={"Authorization": shown} if shown else {})
    assert (answer.status, answer.code) == (401, "unauthenticated")
    assert answer.headers["WWW-Authenticate"].startswith("Bearer") and web.TOKEN.encode() not in answer.body


def test_two_tokens_are_none(with_token):
    field = f"Authorization: Bearer {web.TOKEN}\r\n" * 2
    status, _ = web.exchange(with_token, f"GET {V1}/status HTTP/1.0\r\n{field}\r\n".encode())
    assert status == 401


def test_the_token_admits(with_token):
    with web.Client(with_token, web.TOKEN) as client:
        assert client.get(f"{V1}/status").status == 200
        assert client.get(f"{V1}/status", headers={"Authorization": f"bearer {web.TOKEN}"}).status == 200
        assert client.get(f"{V1}/status", headers={"Host": "a.name.of.mine"}).status == 200
    with web.Client(with_token) as stranger:
        assert stranger.get("/healthz").status == stranger.get("/readyz").status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8188", "localhost.evil.example", "", "[::1", "127.0.0.1.evil.example"])
def test_a_foreign_name_that_points_here_is_refused(without_token, host):
    """DNS rebinding: a page of evil.example would be of one origin with us."""
    with web.Client(without_token) as client:
        assert client.get(f"{V1}/status", headers={"Host": host}).status == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8188", "127.0.0.1", "127.0.0.1:8188", "[::1]:8188", "192.168.0.7"])
def test_own_names_are_admitted(without_token, host):
    with web.Client(without_token) as client:
        assert client.get(f"{V1}/status", headers={"Host": host}).status == 200
        assert client.get(f"{V1}/status", headers={"Host": host, "Origin": f"http://{host}"}).status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1", "file://", "http://127.0.0.1.evil.example"])
def test_pages_of_other_origins_are_refused(without_token, origin):
    with web.Client(without_token) as client:
        headers = {"Origin": origin}
        assert client.post(f"{V1}/models/small/load", headers=headers).status == 403
        assert client.get(f"{V1}/status", headers=headers).status == 403
        assert client.request("OPTIONS", f"{V1}/jobs", headers=headers).headers["Access-Control-Allow-Origin"] is None


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx"])
def test_a_body_that_a_page_could_send_is_refused(without_token, kind):
    with web.Client(without_token) as client:
        headers = {"Content-Type": kind} if kind else {}
        assert client.post(f"{V1}/jobs", '{"job_id":"page","type":"test"}', headers=headers).status == 415
        assert client.get(f"{V1}/jobs/page").status == 404


@pytest.mark.parametrize(
    "path", ["/", "/nothing", "/resvisor", V1, f"{V1}/", f"{V1}/nothing", f"{V1}/jobs/", f"{V1}/jobs/a/b", f"{V1}/../v1/status",
             f"{V1}/jobs/%2e%2e/status", f"{V1}//status", "/healthz/", "/HEALTHZ", f"{V1}/" + "a/" * 50, "/resvisor%2Fv1%2Fstatus"],
)  # fmt: skip
def test_unknown_paths(without_token, path):
    with web.Client(without_token) as client:
        for method in ("GET", "POST", "OPTIONS"):
            assert client.request(method, path).status == 404


@pytest.mark.parametrize("path", ["/%", "/%0", "/%zz", "/%00", "/%ff", f"{V1}/jobs/%c3%28", "/healthz?%", "/healthz?a=%00", "/healthz?x=1"])
def test_malformed_targets(without_token, path):
    with web.Client(without_token) as client:
        assert client.get(path).status == 400


def test_a_target_that_is_too_long(without_token):
    with web.Client(without_token) as client:
        assert client.get("/" + "a" * 9000).status == 414
    assert web.exchange(without_token, b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] in (0, 413, 414, 431)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "PROPFIND", "get", "X" * 100])
def test_unknown_methods(without_token, method):
    status, answer = web.exchange(without_token, f"{method} /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert status == 405 and b"Allow: GET, HEAD, OPTIONS" in answer


def test_options_names_the_methods(without_token):
    with web.Client(without_token) as client:
        answer = client.request("OPTIONS", f"{V1}/jobs")
        assert answer.status == 204 and answer.headers["Allow"] == "POST, GET, HEAD, OPTIONS" and answer.body == b""


@pytest.mark.parametrize("path", ["/healthz", "/metrics", f"{V1}/status", f"{V1}/events", f"{V1}/jobs/no-such-job"])
def test_head_is_get_without_the_body(without_token, path):
    with web.Client(without_token) as client:
        answer = client.request("HEAD", path)
        assert answer.status == (404 if "no-such" in path else 200) and answer.body == b""
        assert client.get("/healthz").status == 200


def test_http_1_0_gets_one_answer(without_token):
    status, answer = web.exchange(without_token, b"GET /healthz HTTP/1.0\r\n\r\n")
    assert status == 200 and answer.endswith(b'{"status":"ok"}')


def test_connection_close_is_obeyed(without_token):
    status, answer = web.exchange(without_token, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert status == 200 and b"Connection: close" in answer


def test_expect_is_answered(without_token):
    body = b'{"job_id":"expect","type":"test"}'
    with web.raw(without_token) as sock:
        sock.sendall(b"POST %s/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
                     b"Content-Length: %d\r\n\r\n" % (V1.encode(), len(body)))  # fmt: skip
        assert web.read_head(sock) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert web.read_head(sock).startswith(b"HTTP/1.1 20")


# ---- configuration ----


@pytest.mark.parametrize(
    "address, said",
    [("0.0.0.0:8188", "needs http.token_file"), ("[::]:8188", "needs http.token_file"), ("192.168.1.1:80", "needs http.token_file"),
     ("example.org:80", "neither a number nor localhost"), ("127.0.0.1", "is not an address"), ("127.0.0.1:0", "is not an address"),
     ("*:80", "neither a number nor localhost")],
)  # fmt: skip
def test_addresses_that_are_refused(make_service, address, said):
    service = make_service({"http": {"listen": address}})
    service.write_config()
    result = service.cli("check", "-c", service.config_file, check=False)
    assert result.returncode == 2 and said in result.stdout + result.stderr


def test_an_address_for_all_is_good_with_a_token(make_service):
    service = web.listen(make_service(), token=web.TOKEN)
    service.config["http"]["listen"] = f"0.0.0.0:{service.http_port}"
    service.start()
    with web.Client(service, web.TOKEN) as client:
        assert client.get(f"{V1}/status").status == 200


def test_a_token_file_that_others_can_read_is_refused(make_service):
    service = web.listen(make_service(), token=web.TOKEN)
    (service.folder / "token").chmod(0o644)
    service.write_config()
    result = service.cli("check", "-c", service.config_file, check=False)
    assert result.returncode == 2 and "http.token_file" in result.stdout + result.stderr


def test_localhost_and_ipv6(make_service):
    service = make_service({"http": {"listen": f"localhost:{web.free_port()}"}})
    service.start()
    assert "HTTP is served at http://localhost:" in service.log()
