"""The real ComfyUI behind resvisor's address: what its frontend asks for, and files both ways."""

import struct
import uuid
import zlib

import pytest
from harness import http as web
from harness import procfs


@pytest.fixture(scope="module")
def front(make_comfy):
    service = make_comfy({"image": {}}, prepare=web.listen)
    with web.Client(service) as client:
        procfs.wait_until(lambda: client.get("/users").status == 200, web.TIMEOUT_S, "the worker at resvisor's address")
    return service


@pytest.fixture
def client(front):
    with web.Client(front, timeout=60) as client:
        yield client


def png():
    """One grey pixel."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0\x7f")) + chunk(b"IEND", b"")


def test_the_page_and_what_it_reads(client):
    assert b"<html>" in client.get("/").body
    for path in ("features", "settings", "users", "models", "models/vae_approx", "embeddings", "i18n", "extensions"):
        for prefix in ("/", "/api/"):
            answer = client.get(prefix + path)
            assert answer.status == 200 and isinstance(answer.json, (dict, list)), (prefix + path, answer)
    nodes = client.get("/api/object_info").json
    assert len(nodes) > 100
    assert client.get("/object_info/SaveImage").json == {"SaveImage": nodes["SaveImage"]}
    stats = client.get("/api/system_stats").json
    assert [device["type"] for device in stats["devices"]] == ["cpu"]
    assert set(stats["resvisor"]) >= {"pool_bytes", "models", "leases"}
    assert client.post("/api/free", {"unload_models": True}).status == 200


def test_settings_and_files_of_the_user(client):
    json_body = {"Content-Type": "application/json"}
    assert client.post("/api/settings/Test.Own", "7", headers=json_body).status == 200
    assert client.get("/api/settings/Test.Own").json == 7
    name = "workflows%2Fa%20b.json"
    assert client.post(f"/api/userdata/{name}?overwrite=true", '{"a":1}', headers=json_body).status == 200
    assert client.get(f"/api/userdata/{name}").json == {"a": 1}
    assert client.request("DELETE", f"/api/userdata/{name}").status == 204
    assert client.get(f"/api/userdata/{name}").status == 404


def test_a_picture_goes_in_and_comes_back(client):
    line, picture = uuid.uuid4().hex, png()
    head = f'--{line}\r\nContent-Disposition: form-data; name="image"; filename="up.png"\r\nContent-Type: image/png\r\n\r\n'
    body = head.encode() + picture + f"\r\n--{line}--\r\n".encode()
    answer = client.post("/upload/image", body, headers={"Content-Type": f"multipart/form-data; boundary={line}"})
    assert (answer.status, answer.json["type"]) == (200, "input")
    url = f"/api/view?filename={answer.json['name']}&type=input"
    answer = client.get(url)
    assert answer.body == picture and answer.headers["Content-Type"] == "image/png"
    assert client.get(url, headers={"If-None-Match": answer.headers["ETag"]}).status == 304
    answer = client.get(url, headers={"Range": "bytes=1-3"})
    assert (answer.status, answer.body) == (206, b"PNG")
    assert client.request("HEAD", url).headers["Content-Length"] == str(len(picture))
    assert client.get("/view?filename=nowhere.png&type=temp").status == 404
    assert client.get(f"{url}&channel=rgb").body.startswith(b"\x89PNG")
