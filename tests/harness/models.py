"""Safetensors files, good and bad, written byte by byte so that nothing is corrected on the way."""

import json
import os
import struct

import numpy

HEADER_LENGTH = struct.Struct("<Q")
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4,
    "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


def product(shape):
    total = 1
    for size in shape:
        total *= size
    return total


def pack(header, data=b"", pad_to=8):
    """header: a dict, or the bytes of it."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % pad_to)
    return HEADER_LENGTH.pack(len(text)) + text + data


def write(path, tensors, metadata=None, seed=1):
    """tensors: [(name, dtype, shape)]; random bytes. Returns {name: bytes}."""
    random = numpy.random.default_rng(seed)
    header, parts, offset = {}, {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, dtype, shape in tensors:
        length = product(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + length]}
        data = random.integers(0, 2 if dtype == "BOOL" else 256, length, dtype=numpy.uint8).tobytes()
        parts[name] = data
        offset += length
    path.write_bytes(pack(header, b"".join(parts.values())))
    return parts


def write_plain(path, mib=4, tensors=8, seed=1):
    """A file of about `mib` MiB in `tensors` F32 tensors of equal size. Returns {name: bytes}."""
    elements = max(1, mib * 1024 * 1024 // 4 // tensors)
    return write(path, [(f"block.{i}.weight", "F32", (elements,)) for i in range(tensors)], seed=seed)


def write_sparse(path, mib):
    """One U8 tensor of zeros that takes no room on the disk: for loads that must last."""
    length = mib * 1024 * 1024
    head = pack({"zeros": entry("U8", [length], 0, length)})
    path.write_bytes(head)
    os.truncate(path, len(head) + length)


def write_every_dtype(path, seed=7):
    """Every dtype that is supported, odd shapes, a scalar, an empty tensor, rank 8, metadata, non-ASCII names."""
    tensors = [(f"dtype.{name}", name, (3, 5)) for name in DTYPE_BYTES]
    tensors += [
        ("scalar", "F32", ()),
        ("empty", "F16", (0, 4)),
        ("rank8", "U8", (1, 2, 1, 3, 1, 2, 1, 5)),
        ("großer.Name.名前", "BF16", (17,)),
        ("large", "F32", (257, 1025)),
    ]
    return write(path, tensors, metadata={"format": "pt", "note": "zwölf"}, seed=seed)


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {"a": entry("F32", [4], 0, 16), "b": entry("U8", [8], 16, 24)}
GOOD_DATA = bytes(range(24))

# name -> bytes of a file that must be refused as malformed.
BAD_FILES = {
    "empty": b"",
    "seven_bytes": b"\x10\0\0\0\0\0\0",
    "header_length_beyond_file": HEADER_LENGTH.pack(1 << 20) + b"{}",
    "header_length_huge": HEADER_LENGTH.pack(2**64 - 1) + b"{}",
    "header_length_overflows": HEADER_LENGTH.pack(2**64 - 8) + b"{}" + b"\0" * 100,
    "header_over_limit": HEADER_LENGTH.pack(200 << 20) + b"{",
    "not_json": pack(b"this is not JSON"),
    "json_list": pack(b"[1, 2, 3]"),
    "json_cut": pack(b'{"a": {"dtype": "F32", '),
    "json_not_utf8": pack(b'{"\xff\xfe": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "json_deep": pack(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "json_trailing": pack(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}} x', b"x"),
    "truncated": pack(GOOD, GOOD_DATA[:-1]),
    "truncated_to_header": pack(GOOD),
    "trailing_bytes": pack(GOOD, GOOD_DATA + b"x"),
    "overlap": pack({"a": entry("F32", [4], 0, 16), "b": entry("U8", [8], 12, 20)}, GOOD_DATA[:20]),
    "same_bytes": pack({"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 0, 8)}, GOOD_DATA[:8]),
    "gap": pack({"a": entry("F32", [4], 0, 16), "b": entry("U8", [8], 20, 28)}, GOOD_DATA + b"gap!"),
    "gap_at_start": pack({"a": entry("U8", [8], 8, 16)}, GOOD_DATA[:16]),
    "end_before_begin": pack({"a": entry("U8", [8], 8, 0)}, GOOD_DATA[:8]),
    "offsets_overflow": pack({"a": entry("U8", [8], 2**64 - 8, 2**64 + 0)}, GOOD_DATA[:8]),
    "offset_negative": pack({"a": entry("U8", [8], -8, 0)}, GOOD_DATA[:8]),
    "offset_fraction": pack({"a": entry("U8", [8], 0.0, 8.5)}, GOOD_DATA[:8]),
    "shape_wrong": pack({"a": entry("F32", [5], 0, 16)}, GOOD_DATA[:16]),
    "shape_overflows": pack({"a": entry("F32", [2**32, 2**32], 0, 0)}),
    "shape_overflows_to_right_size": pack({"a": entry("F32", [2**63, 2**63, 2**3], 0, 0)}),
    "shape_negative": pack({"a": entry("F32", [-4], 0, 16)}, GOOD_DATA[:16]),
    "shape_text": pack({"a": {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}}, GOOD_DATA[:16]),
    "rank_nine": pack({"a": entry("U8", [1] * 9, 0, 1)}, b"x"),
    "dtype_unknown": pack({"a": entry("F31", [4], 0, 16)}, GOOD_DATA[:16]),
    "dtype_missing": pack({"a": {"shape": [4], "data_offsets": [0, 16]}}, GOOD_DATA[:16]),
    "offsets_missing": pack({"a": {"dtype": "F32", "shape": [4]}}, GOOD_DATA[:16]),
    "offsets_three": pack({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8, 8]}}, GOOD_DATA[:8]),
    "duplicate_name": pack(
        b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}}',
        GOOD_DATA[:16],
    ),
    "metadata_not_text": pack({"__metadata__": {"a": 1}, **GOOD}, GOOD_DATA),
}

# Understood, but not supported: the error says so.
UNSUPPORTED_FILES = {
    "sub_byte_f4": pack({"a": entry("F4", [16], 0, 8)}, GOOD_DATA[:8]),
}


def write_many_tensors(path, count=1_000_000):
    """`count` one-byte tensors: a header of tens of MiB."""
    parts = (
        f'"t.{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}'
        for i in range(count)
    )
    header = b"{" + ",".join(parts).encode() + b"}"
    data = (numpy.arange(count, dtype=numpy.uint64) % 251).astype(numpy.uint8).tobytes()
    path.write_bytes(pack(header, data))
    return data
