"""Requests that two programs on the way could read differently are refused before anything else, and end their connection."""

import re

import pytest
from harness import http as web

HOST = b"Host: localhost\r\n"
JOB = b'{"job_id":"smuggled","type":"test"}'
POST = b"POST /resvisor/v1/jobs HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
NEXT = b"GET /resvisor/v1/status HTTP/1.1\r\n" + HOST + b"\r\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    service = web.start_small(tmp_path_factory.mktemp("framing"))
    yield service
    service.end()


def chunk(data):
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)


AMBIGUOUS = {
    "two_content_lengths": POST + b"Content-Length: 35\r\nContent-Length: 35\r\n\r\n" + JOB,
    "two_different_content_lengths": POST + b"Content-Length: 35\r\nContent-Length: 0\r\n\r\n" + JOB,
    "a_list_of_content_lengths": POST + b"Content-Length: 35, 35\r\n\r\n" + JOB,
    "content_length_with_a_sign": POST + b"Content-Length: +35\r\n\r\n" + JOB,
    "content_length_in_hexadecimal": POST + b"Content-Length: 0x23\r\n\r\n" + JOB,
    "content_length_negative": POST + b"Content-Length: -1\r\n\r\n" + JOB,
    "content_length_empty": POST + b"Content-Length:\r\n\r\n" + JOB,
    "content_length_beyond_64_bits": POST + b"Content-Length: 18446744073709551651\r\n\r\n" + JOB,
    "content_length_and_transfer_encoding": POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(JOB),
    "transfer_encoding_and_content_length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n" + chunk(JOB),
    "two_transfer_encodings": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(JOB),
    "two_transfer_encodings_one_of_them_identity": POST
    + b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(JOB),
    "transfer_encoding_gzip": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + chunk(JOB),
    "transfer_encoding_identity": POST + b"Transfer-Encoding: identity\r\n\r\n" + JOB,
    "transfer_encoding_with_a_tab": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + chunk(JOB),
    "transfer_encoding_in_http_1_0": POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(JOB),
    "two_hosts": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    "no_host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "bare_lf_everywhere": b"GET /healthz HTTP/1.1\nHost: localhost\n\n",
    "bare_lf_after_the_request_line": b"GET /healthz HTTP/1.1\nHost: localhost\r\n\r\n",
    "bare_lf_after_a_field": b"GET /healthz HTTP/1.1\r\nA: b\nHost: localhost\r\n\r\n",
    "bare_lf_after_the_last_field": b"GET /healthz HTTP/1.1\r\nHost: localhost\n\r\n",
    "bare_lf_as_the_empty_line": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\n",
    "bare_cr_after_a_field": b"GET /healthz HTTP/1.1\r\nA: b\rHost: localhost\r\n\r\n",
    "a_hidden_length_behind_a_bare_cr": POST + b"A: b\rContent-Length: 35\r\n\r\n" + JOB,
    "a_hidden_coding_behind_a_bare_lf": POST + b"A: b\nTransfer-Encoding: chunked\r\n\r\n" + chunk(JOB),
    "a_folded_field": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\n\r\n",
    "a_blank_before_the_colon": POST + b"Content-Length : 35\r\n\r\n" + JOB,
    "a_field_without_a_colon": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nnonsense\r\n\r\n",
    "a_field_without_a_name": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n: x\r\n\r\n",
    "a_nul_in_a_field": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: b\0c\r\n\r\n",
    "two_blanks_in_the_request_line": b"GET  /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a_blank_in_the_target": b"GET /healthz x HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "another_version": b"GET /healthz HTTP/2.0\r\nHost: localhost\r\n\r\n",
    "a_longer_version": b"GET /healthz HTTP/1.10\r\nHost: localhost\r\n\r\n",
    "no_version": b"GET /healthz\r\nHost: localhost\r\n\r\n",
    "no_target": b"GET HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a_target_with_a_host": b"GET http://localhost/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a_tls_greeting": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_can_be_read_in_two_ways_is_refused(served, name):
    """The request behind it on the same connection is never looked at."""
    status, answer = web.exchange(served, AMBIGUOUS[name] + NEXT, timeout=30)
    assert status in (0, 400, 413, 414, 431, 501, 505), answer
    # libmicrohttpd 0.9.75 sends the head of a refusal of its own twice; nothing follows it.
    assert set(re.findall(rb"HTTP/1\.1 (\d+)", answer)) <= {b"%d" % status} and b"supervisor_pid" not in answer
    with web.Client(served) as client:
        assert client.get("/resvisor/v1/jobs/smuggled").status == 404
        assert client.get("/healthz").status == 200


def test_the_refusal_says_why(served):
    _, answer = web.exchange(served, AMBIGUOUS["bare_lf_after_the_last_field"])
    assert b"HTTP/1.1 400" in answer and b"CR LF" in answer and b"Connection: close" in answer
    _, answer = web.exchange(served, AMBIGUOUS["two_different_content_lengths"])
    assert b"two Content-Length" in answer


HONEST = {
    "no_blank_after_the_colon": b"GET /healthz HTTP/1.1\r\nHost:localhost\r\n\r\n",
    "blanks_around_a_value": b"GET /healthz HTTP/1.1\r\nHost:   localhost\r\nA: b c\r\n\r\n",
    "an_empty_field": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA:\r\nB: \r\n\r\n",
    "an_empty_last_field": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA:\r\n\r\n",
    "an_empty_line_first": b"\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a_body_of_no_bytes": b"GET /healthz HTTP/1.1\r\nContent-Length: 0\r\nHost: localhost\r\n\r\n",
    "forty_fields": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"A%d: %s\r\n" % (i, b"x" * 200) for i in range(40)) + b"\r\n",
    "a_cookie": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nCookie: a=b; c=d\r\n\r\n",
    "a_query": b"GET /readyz?type=test HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "an_escaped_path": b"GET /%68ealthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "chunks": POST + b"Transfer-Encoding: Chunked\r\n\r\n5\r\n{\"job\r\n" + chunk(b'_id":"in-chunks","type":"test"}'),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("pieces", [1, 7, 100000], ids=["byte_by_byte", "in_sevens", "at_once"])
def test_what_is_clear_is_served_however_it_arrives(served, name, pieces):
    data = HONEST[name]
    with web.raw(served) as sock:
        for at in range(0, len(data), pieces if len(data) < 500 else max(pieces, 100)):
            sock.sendall(data[at : at + (pieces if len(data) < 500 else max(pieces, 100))])
        assert web.read_head(sock).startswith((b"HTTP/1.1 200", b"HTTP/1.1 202"))


def test_requests_may_follow_each_other_without_waiting(served):
    last = b"GET /healthz HTTP/1.0\r\n\r\n"
    _, answer = web.exchange(served, NEXT.replace(b"/resvisor/v1/status", b"/healthz") * 20 + last)
    assert answer.count(b"HTTP/1.1 200") == 21


def test_a_bad_request_behind_a_good_one_is_refused(served):
    good = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
    _, answer = web.exchange(served, good + AMBIGUOUS["bare_lf_after_a_field"] + good)
    assert answer.count(b"HTTP/1.1 200") == 1 and answer.count(b"HTTP/1.1 400") == 1
