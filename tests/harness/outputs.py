"""Checks that produced files are what they claim to be, with nothing but the standard library."""

import io
import struct
import wave
import zlib

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def png(data):
    """(width, height, decoded rows): every checksum and the whole pixel data are checked."""
    assert data[:8] == PNG_SIGNATURE
    at, chunks, pixels = 8, [], b""
    while at < len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack_from(">I", data, at + 8 + length)
        assert zlib.crc32(kind + body) == checksum, kind
        chunks.append(kind)
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack_from(">IIBB", body)
        if kind == b"IDAT":
            pixels += body
        at += 12 + length
    assert chunks[0] == b"IHDR" and chunks[-1] == b"IEND"
    rows = zlib.decompress(pixels)
    assert len(rows) == height * (1 + width * CHANNELS[colour] * depth // 8)
    return width, height, rows


def webp_animation(data):
    """(width, height, frames) of an animated WebP."""
    riff, size, kind = struct.unpack_from("<4sI4s", data)
    assert riff == b"RIFF" and kind == b"WEBP" and size + 8 == len(data)
    at, frames, canvas = 12, 0, None
    while at < len(data):
        name, length = struct.unpack_from("<4sI", data, at)
        body = data[at + 8 : at + 8 + length]
        assert len(body) == length
        if name == b"VP8X":
            assert body[0] & 0x02, "the animation flag is set"
            canvas = (1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little"))
        if name == b"ANMF":
            frames += 1
        at += 8 + length + (length & 1)
    assert canvas and frames > 1
    return (*canvas, frames)


def wav(data):
    """(channels, samples per second, frames)."""
    with wave.open(io.BytesIO(data)) as file:
        frames = file.readframes(file.getnframes())
        assert len(frames) == file.getnframes() * file.getnchannels() * file.getsampwidth()
        return file.getnchannels(), file.getframerate(), file.getnframes()
