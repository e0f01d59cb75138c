"""What may stand in a field's place: values at the edges of what is allowed, and beyond."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from fuzz.fields import Field

_SIZES = b"0 1 3 -1 255 2147483648 4294967297 4611686018427387904 9223372036854775807 9223372036854775808".split()
_SIZES += [*b"18446744073709551616 01 1.0 1e3 0x1 2L True".split(), b"1" + b"0" * 40]
_DESCRS = b"<f4 >f4 |f4 =f4 f4 <f8 >i2 |u1 >u1 |b1 <f2 <c8 >c16 <f1 |f1 <V1 <V2 >V2 |V0 |V3 <g2 |S0 |S5 <U0 >U3".split()
_DESCRS += (
    b"<f16 <c32 <M8[ns] >m8 <M8[0s] |O |O8 <l float32 bfloat16 float8_e4m3fn <i16 a3 <V4611686018427387904".split()
)
_RECORD_DESCRS = b"""
[]  ('<f4', (2,))  ('<f4', {'k': 'v'})  [('a', '<f4'), ('b', '>i2')]  [('', '|V4'), ('x', '|b1')]  [('a', '|V0')]
[('a', '<f4', (2, 0))]  [('a', [('b', '<f2'), ('c', '|S3')])]  [('a', '<f4', (4611686018427387904, 4))]
[(('title', 'n'), '<f4')]  [('a', '|O')]  [('a', '<V2'), ('a', '<V2')]  [('w', '>f8', 3)]
""".strip()
_CODES = b"BOOL F4 F6_E2M3 F6_E3M2 U8 F8_E5M2 I16 BF16 F32 C64 F64 I64 f32 F128".split()
_TEXTS = [b"", *rb"w __metadata__ tensor-convert format \u0000 \ud800 ../x data_offsets".split(), b"\xc3\xa9", b"\xff"]
_ORIGIN_TYPES = b"bfloat16 float4_e2m1fn float8_e5m2 datetime64[ns] blob S4611686018427387904 complex128".split()
NOTES = [
    b'{"tensor-convert":{"dtype":"%s","encoding":"%s","shape":[%s]}}' % (dtype, encoding, shape)
    for dtype in _ORIGIN_TYPES
    for encoding in (b"bytes", b"unpack", b"float32", b"text")
    for shape in (b"", b"3", b"2,3", b"0,9223372036854775807")
]
NOTES += [b'{"tensor-convert":{"metadata":{"format":"pt","a":"b"}}}', b"{", b"text"]
NOTES += [b'{"tensor-convert":{"packed_metadata":"00000"}}']
_GLOBALS = (b"numpy ndarray", b"numpy dtype", b"os system", b"numpy.core.multiarray _reconstruct", b"_codecs encode")
_OPCODES = [bytes([code]) for code in b"N])}(tl012.aesubR\x81\x85\x86\x87\x88\x93\x94"]
_OPCODES += [b"c" + name.replace(b" ", b"\n") + b"\n" for name in (*_GLOBALS, b"numpy.core.multiarray scalar")]
_OPCODES += [
    b"K\x01",
    b"J\xff\xff\xff\xff",
    b"h\0",
    b"j\xff\xff\xff\x7f",
    b"q\1",
    b"\x8c\1x",
    b"X\1\0\0\0x",
    b"C\1a",
    b"U\1a",
]
_OPCODES += [b"\x8a\x0a" + b"\xff" * 10, b"G\x7f\xf0" + bytes(6), b"\x80\4", b"\x95" + bytes(8), b"\x8e" + b"\x7f" * 8]
_OPCODES += [line + b"\n" for line in b"V\\u0041 I01 L1L F1.5 S'a' g0 p0".split()]


def replacements(data: bytes, field: Field) -> list[bytes]:
    """What may stand in a field's place; all differ from what stands there."""
    old = data[field.begin : field.end]
    found = _OF_KIND[field.kind](data, old)
    return [new for new in dict.fromkeys(found) if new != old]


def _numbers(data: bytes, old: bytes) -> list[bytes]:
    width = len(old)
    full = (1 << 8 * width) - 1
    value = int.from_bytes(old, "little")
    near = {
        value + 1,
        value - 1,
        value + 4,
        value * 2,
        value ^ 8,
        len(data),
        len(data) - value,
        value + (full + 1) // 2,
    }
    bits = {value ^ (1 << bit) for bit in range(16)} if width == 2 else {value ^ 1, value ^ 1 << 8 * width - 1}
    known = {0, 1, 2, 8, 12, 14, 20, 0xFFFF, full, full // 2, full - 1}
    return [new.to_bytes(width, "little") for new in sorted(near | bits | known) if 0 <= new <= full]


def _python(data: bytes, old: bytes) -> list[bytes]:
    if old[:1] in b"'\"" and old:
        quoted = [
            b"'" + text + b"'" for text in (*_DESCRS, b"descr", b"shape", b"fortran_order", b"\\x41", b"\xe9", b"\0")
        ]
        return [
            *quoted,
            *re.split(rb"  |\n", _RECORD_DESCRS),
            b"u" + old,
            b"b" + old,
            old[:-1],
            old.replace(b"'", b'"'),
            b"None",
            b"1",
            *_around(old),
        ]
    if old[:1].isdigit():
        return [*_SIZES, b"None", b"'1'", b"(2,)", old + b"L", *_around(old)]
    if old[:1].isalpha():
        return [b"True", b"False", b"None", b"0", b"1", b"'True'", b"true", *_around(old)]
    return [
        b"",
        b" ",
        b"\t",
        b"\n",
        b"\0",
        b"\x0c",
        b",",
        b", 1",
        b"(",
        b")",
        b"[",
        b"]",
        b"{",
        b"}",
        b"()",
        b"#",
        *_around(old),
    ]


def _json(data: bytes, old: bytes) -> list[bytes]:
    if old[:1] == b'"':
        others = sorted(set(re.findall(rb'"[^"\\]{0,60}"', data)))[:20]
        quoted = [b'"' + text + b'"' for text in (*_CODES, *_TEXTS)]
        notes = [b'"' + NOTES[index].replace(b'"', b'\\"') + b'"' for index in range(0, len(NOTES), 5)]
        return [*quoted, *others, *notes, b"null", b"1", b"{}", b"[]", old + b"," + old, *_around(old)]
    if old[:1] in b"-0123456789" and old.isdigit():
        near = [str(int(old[:18]) + step).encode() for step in (1, -1, 4, -4)]
        return [*near, *_SIZES, b"null", b'"1"', b"[]", b"-0", b"NaN", b"1e400", *_around(old)]
    return [
        b"",
        b" ",
        b"\t",
        b"\n",
        b"\0",
        b",",
        b", ",
        b"[",
        b"]",
        b"{",
        b"}",
        b"null",
        b"[]",
        b"{}",
        b"//",
        b",,",
        *_around(old),
    ]


def _around(old: bytes) -> list[bytes]:
    return [old + old, b" " + old, old + b"\0"]


def _data(data: bytes, old: bytes) -> list[bytes]:
    flipped = bytes([old[0] ^ 1]) + old[1:] if old else b"\1"
    return [
        b"",
        old[:-1],
        old[1:],
        old + b"\0",
        old + old,
        bytes(len(old)),
        b"\xff" * len(old),
        flipped,
        old[: len(old) // 2],
        b"\r\n" + old,
    ]


def _extra(data: bytes, old: bytes) -> list[bytes]:
    zip64 = struct.pack("<2H2Q", 1, 16, len(data), len(data))
    return [
        b"",
        old[:-1],
        old + old,
        old + b"\0\0",
        zip64,
        zip64 + zip64,
        struct.pack("<2H", 1, 0),
        b"\1\0\xff\xff",
        b"up\x05\0" + bytes(5),
    ]


def _name(data: bytes, old: bytes) -> list[bytes]:
    same = [
        b"x" * len(old),
        b"\xff" * len(old),
        b"/" * len(old),
        b"\0" * len(old),
        old[:-1] + b"/",
        old[::-1],
        old.upper(),
    ]
    return [*same, b"", old + b".npy", b"../" + old, b"w.npy", *NOTES[::7]]


def _opcode(data: bytes, old: bytes) -> list[bytes]:
    return [b"", old + old, *_OPCODES, *(op + old for op in _OPCODES), old[:-1], old + b"\0"]


_OF_KIND: dict[str, Callable[[bytes, bytes], list[bytes]]] = {
    "number": _numbers,
    "python": _python,
    "json": _json,
    "data": _data,
    "extra": _extra,
    "name": _name,
    "opcode": _opcode,
}
