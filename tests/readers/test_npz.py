"""Every rule of the npz reader, by archives built from structs: each refusal, and the legal neighbour beside it.

Nothing here uses the product to make a file. `Member` is one entry with every field free to lie.
"""

from __future__ import annotations

import bz2
import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import convert
from tests import oracle
from tests.lyingzip import (
    BZIP2,
    DEFLATED,
    FULL,
    LONG,
    LZMA,
    OTHER,
    PLAIN,
    SIZE,
    SPLIT_SIZE,
    TRUE_END,
    B,
    End,
    Member,
    W,
    archive,
    deflated,
    extra,
    nested,
    two_ends,
    unicode_path,
    zip64,
    zip_lzma,
)
from tests.strategies import npy_bytes, savez

Array = npt.NDArray[Any]
# --- accepted ----------------------------------------------------------------------------------------------------

w, b, long = {"w": W}, {"b": B}, {"long": LONG}

LEGAL: dict[str, tuple[Callable[[], bytes], dict[str, Array]]] = {
    "plain": (lambda: archive(PLAIN, OTHER), {**w, **b}),
    "empty-archive": (lambda: archive(), {}),
    "version-0-crc": (lambda: archive(replace(PLAIN, local_crc=0, local_size=0, local_packed_size=0)), w),
    # sizes
    "descriptor": (
        lambda: archive(
            replace(
                PLAIN,
                flags=8,
                local_crc=0,
                local_size=0,
                local_packed_size=0,
                descriptor=b"PK\x07\x08" + struct.pack("<3L", zlib.crc32(PLAIN.data), SIZE, SIZE),
            ),
            OTHER,
        ),
        {**w, **b},
    ),
    "descriptor-without-signature": (
        lambda: archive(
            replace(
                DEFLATED,
                flags=8,
                local_crc=0,
                local_size=0,
                local_packed_size=0,
                descriptor=struct.pack("<3L", 1, 2, 3),
            ),
            OTHER,
        ),
        {**long, **b},
    ),
    "zip64-local": (
        lambda: archive(replace(PLAIN, local_size=FULL, local_packed_size=FULL, local_extra=zip64(SIZE, SIZE))),
        w,
    ),
    "zip64-directory-sizes": (
        lambda: archive(replace(PLAIN, size=FULL, packed_size=FULL, extra=zip64(SIZE, SIZE))),
        w,
    ),
    "zip64-directory-size-only": (lambda: archive(replace(PLAIN, size=FULL, extra=zip64(SIZE))), w),
    "zip64-directory-offset": (lambda: archive(replace(PLAIN, offset=FULL, extra=zip64(0))), w),
    "zip64-directory-all": (
        lambda: archive(
            replace(
                PLAIN,
                size=FULL,
                packed_size=FULL,
                offset=FULL,
                disk=0xFFFF,
                extra=struct.pack("<2H3QL", 1, 28, SIZE, SIZE, 0, 0),
            )
        ),
        w,
    ),
    "zip64-field-not-needed": (lambda: archive(replace(PLAIN, extra=zip64())), w),
    "zip64-field-after-another": (
        lambda: archive(replace(PLAIN, size=FULL, extra=extra(0x5455, b"\x01abcd") + zip64(SIZE))),
        w,
    ),
    "zip64-end": (lambda: archive(PLAIN, OTHER, end=End(zip64=True)), {**w, **b}),
    "zip64-end-not-saturated": (lambda: archive(PLAIN, end=End(zip64=True, saturated=False)), w),
    "zip64-end-and-comment": (lambda: archive(PLAIN, end=End(zip64=True, comment=b"hello")), w),
    "padding-in-extra": (lambda: archive(replace(PLAIN, extra=b"\0\0\0", local_extra=b"\0\0\0")), w),
    "torn-extra": (lambda: archive(replace(PLAIN, extra=struct.pack("<2H", 0x9999, 50) + b"x")), w),
    "long-local-extra": (lambda: archive(replace(PLAIN, local_extra=extra(0xD935, bytes(4000)))), w),
    # place
    "comment": (lambda: archive(PLAIN, end=End(comment=b"made by hand")), w),
    "longest-comment": (lambda: archive(PLAIN, end=End(comment=bytes(0xFFFF))), w),
    "signature-in-comment": (lambda: archive(PLAIN, end=End(comment=b"PK\x05\x06" + bytes(30))), w),
    "archive-in-comment": (lambda: nested(archive(OTHER)), w),
    "bytes-before": (lambda: archive(PLAIN, before=b"#!/bin/sh\n"), w),
    "gap-between": (lambda: archive(replace(PLAIN, descriptor=b"gap"), OTHER), {**w, **b}),
    "not-listed": (lambda: archive(replace(OTHER, listed=False), PLAIN), w),
    "another-order": (lambda: swapped_order(), {**b, **w}),
    "member-comment": (lambda: archive(replace(PLAIN, comment=b"hello")), w),
    "folder-entry": (lambda: archive(Member(name=b"sub/", data=b""), replace(PLAIN, name=b"sub/w.npy")), {"sub/w": W}),
    "regular-file": (lambda: archive(replace(PLAIN, attributes=0o100644 << 16)), w),
    "link-bits-of-dos": (lambda: archive(replace(PLAIN, system=0, attributes=0o120777 << 16)), w),
    # names
    "utf-8": (lambda: archive(replace(PLAIN, name="caf\u00e9.npy".encode(), flags=0x800)), {"caf\u00e9": W}),
    "cp437": (lambda: archive(replace(PLAIN, name=b"caf\x82.npy")), {"caf\u00e9": W}),
    "unicode-path": (
        lambda: archive(replace(PLAIN, name=b"x?.npy", extra=unicode_path("\u4f60.npy", b"x?.npy"))),
        {"\u4f60": W},
    ),
    "unicode-path-stale": (
        lambda: archive(replace(PLAIN, extra=unicode_path("\u4f60.npy", b"before renaming"))),
        w,
    ),
    "unicode-path-version-2": (
        lambda: archive(replace(PLAIN, extra=unicode_path("\u4f60.npy", PLAIN.name, version=2))),
        w,
    ),
    "unicode-path-short": (lambda: archive(replace(PLAIN, extra=extra(0x7075, b"\x01\x02"))), w),
    "unicode-path-and-flag": (
        lambda: archive(replace(PLAIN, flags=0x800, extra=unicode_path("\u4f60.npy", PLAIN.name))),
        w,
    ),
    "control-characters": (lambda: archive(replace(PLAIN, name=b"a\n\x7f.npy")), {"a\n\x7f": W}),
    "no-name": (lambda: archive(replace(PLAIN, name=b".npy")), {"": W}),
    "no-suffix": (lambda: archive(replace(PLAIN, name=b"w")), w),
    "upper-and-lower": (lambda: archive(PLAIN, replace(PLAIN, name=b"W.npy")), {"w": W, "W": W}),
    "twice-the-suffix": (lambda: archive(PLAIN, replace(PLAIN, name=b"w.npy.npy")), {"w": W, "w.npy": W}),
    "macosx": (
        lambda: archive(
            PLAIN,
            Member(name=b"__MACOSX/._w.npy", data=b"junk"),
            Member(name=b"._w.npy", data=b"junk"),
        ),
        w,
    ),
    "blob": (lambda: archive(PLAIN, Member(name=b"README", data=b"text"), Member(name=b"e", data=b"")), w),
    # compression
    "deflate": (lambda: archive(DEFLATED), long),
    "deflate-level-0": (
        lambda: archive(replace(DEFLATED, packed=zlib.compress(DEFLATED.data, 0)[2:-4])),
        long,
    ),
    "bzip2": (lambda: archive(BZIP2), long),
    "lzma": (lambda: archive(LZMA), long),
    "lzma-without-end-mark": (lambda: archive(replace(LZMA, packed=zip_lzma(LZMA.data, end_mark=False))), long),
    "deflated-empty-blob": (lambda: archive(PLAIN, Member(name=b"e", data=b"", method=8)), w),
}


def swapped_order() -> bytes:
    """The directory lists the members in another order than they lie."""
    out = PLAIN.local() + OTHER.local()
    directory = OTHER.central(len(PLAIN.local())) + PLAIN.central(0)
    return out + directory + TRUE_END.pack(2, len(directory), len(out))


@pytest.mark.parametrize("case", LEGAL)
def test_legal_archives_are_read(case: str, tmp_path: Path) -> None:
    """Each legal neighbour of a refusal gives its arrays, in the order of the directory."""
    make, wanted = LEGAL[case]
    source = tmp_path / "a.npz"
    source.write_bytes(make())
    with convert.open(source, format="npz") as checkpoint:
        arrays = [tensor.name for tensor in checkpoint.values() if tensor.dtype.kind != "blob"]
    assert arrays == list(wanted)
    convert.convert_file(source, tmp_path / "a.safetensors", format="npz")
    tensors = oracle.read_safetensors(tmp_path / "a.safetensors")[1]
    assert tensors == {
        name: (oracle.SAFETENSORS_CODES[array.dtype.name], array.shape, array.tobytes())
        for name, array in wanted.items()
    }


# --- refused -----------------------------------------------------------------------------------------------------

Refusal = tuple[Callable[[], bytes], type[convert.ConvertError], tuple[str, ...]]
CORRUPT, UNSUPPORTED, LIMIT = convert.CorruptError, convert.UnsupportedError, convert.LimitError


def lying(member: Member = PLAIN, *, end: End = TRUE_END, before: bytes = b"", **fields: Any) -> Callable[[], bytes]:
    return lambda: archive(replace(member, **fields), end=end, before=before)


REFUSED: dict[str, Refusal] = {
    # end record
    "no-end": (lambda: archive(PLAIN)[:-22], CORRUPT, ("truncated", "no end-of-central-directory")),
    "end-cut": (lambda: archive(PLAIN)[:-1], CORRUPT, ("truncated",)),
    "comment-cut": (lambda: archive(PLAIN, end=End(comment_bytes=5)), CORRUPT, ("truncated",)),
    "trailing": (lambda: archive(PLAIN, tail=b"abc"), CORRUPT, ("3 bytes follow the end record",)),
    "trailing-newline": (lambda: archive(PLAIN, tail=b"\n"), CORRUPT, ("1 bytes follow the end record",)),
    "two-ends": (two_ends, CORRUPT, ("2 end records", "ambiguous")),
    "two-archives": (lambda: archive(PLAIN) + archive(OTHER), CORRUPT, ("directory", "expected byte", "found")),
    "begin-late": (lying(end=End(begin=1000)), CORRUPT, ("directory does not end", "expected byte", "found")),
    "prepended": (lambda: b"#!/bin/sh\n" + archive(PLAIN), CORRUPT, ("directory does not end",)),
    "gap-before-end": (lying(end=End(gap=b"gap")), CORRUPT, ("directory does not end",)),
    "disk": (lying(end=End(disk=1)), UNSUPPORTED, ("split over several files", "join")),
    "first-disk": (lying(end=End(first_disk=1)), UNSUPPORTED, ("split over several files",)),
    "counts-differ": (lying(end=End(here=2)), UNSUPPORTED, ("split over several files",)),
    "count-high": (lying(end=End(count=2)), CORRUPT, ("incomplete", "expected 2 members, found 1")),
    "count-low": (lying(end=End(count=0)), CORRUPT, ("expected 0 members, found 1",)),
    "zip64-count-high": (lying(end=End(zip64=True, count64=65_537)), CORRUPT, ("expected 65537 members, found 1",)),
    "zip64-locator-lies": (lying(end=End(zip64=True, locator_at=3)), CORRUPT, ("no zip64 end record", "byte 3")),
    "zip64-locator-far": (lying(end=End(zip64=True, locator_at=1 << 60)), CORRUPT, ("zip64 end", str(1 << 60))),
    "zip64-locator-disk": (lying(end=End(zip64=True, locator_disk=1)), UNSUPPORTED, ("split",)),
    "zip64-locator-disks": (lying(end=End(zip64=True, disks=2)), UNSUPPORTED, ("split",)),
    "zip64-signature": (
        lying(end=End(zip64=True, signature64=b"PK\x06\x09")),
        CORRUPT,
        ("no zip64 end", r"PK\\x06\\t"),
    ),
    "zip64-ends-differ": (
        lying(end=End(zip64=True, saturated=False, count64=2)),
        CORRUPT,
        ("two end records differ", "expected 2, found 1"),
    ),
    # directory
    "directory-signature": (lying(signature=b"PK\x01\x03"), CORRUPT, ("directory is damaged", "expected a member")),
    "directory-cut": (lying(end=End(size=60), before=b""), CORRUPT, ("directory",)),
    "directory-name-long": (lambda: name_too_long(), CORRUPT, ("directory is cut short", "expected", "found")),
    "member-on-a-disk": (lying(disk=1), UNSUPPORTED, ("split over several files",)),
    "zip64-absent": (lying(size=FULL), CORRUPT, ("zip64 sizes are promised but absent", "w.npy")),
    "zip64-absent-offset": (lying(offset=FULL), CORRUPT, ("zip64 sizes are promised but absent",)),
    "zip64-other-field-only": (lying(size=FULL, extra=extra(2, b"12345678")), CORRUPT, ("promised but absent",)),
    "zip64-short": (lying(size=FULL, packed_size=FULL, extra=zip64(SIZE)), CORRUPT, ("promised but absent",)),
    "zip64-torn": (lying(size=FULL, extra=zip64(SIZE)[:-1]), CORRUPT, ("promised but absent",)),
    "zip64-twice": (lying(size=FULL, extra=zip64(SIZE) + zip64(SIZE)), CORRUPT, ("two zip64 fields",)),
    "zip64-size-endless": (
        lying(
            size=FULL,
            packed_size=FULL,
            local_size=FULL,
            local_packed_size=FULL,
            extra=zip64((1 << 64) - 1, (1 << 64) - 1),
        ),
        CORRUPT,
        ("reaches into the directory", "found 1844674407"),
    ),
    "zip64-offset-endless": (lying(offset=FULL, extra=zip64((1 << 64) - 1)), CORRUPT, ("no member header", "1844")),
    # names
    "not-utf-8": (lying(name=b"\xff.npy", flags=0x800), CORRUPT, ("flagged UTF-8 and is not", "xff")),
    "nul-in-name": (lying(name=b"w\0x.npy"), CORRUPT, ("contains NUL", "x00")),
    "nul-in-unicode-path": (lying(extra=unicode_path("\0.npy", PLAIN.name)), CORRUPT, ("contains NUL",)),
    "unicode-path-not-utf-8": (
        lying(extra=extra(0x7075, struct.pack("<BL", 1, zlib.crc32(b"w.npy")) + b"\xff")),
        CORRUPT,
        ("UTF-8",),
    ),
    "same-name": (lambda: archive(PLAIN, PLAIN), CORRUPT, ("two members", "'w'", "'w.npy'")),
    "same-name-without-suffix": (
        lambda: archive(PLAIN, replace(PLAIN, name=b"w")),
        CORRUPT,
        ("two members", "same name 'w'"),
    ),
    # local header
    "local-signature": (lying(local_signature=b"PK\x03\x05"), CORRUPT, ("no member header", "at byte 0")),
    "offset-beyond": (lying(offset=1 << 30), CORRUPT, ("no member header", str(1 << 30))),
    "offset-at-the-end": (lying(offset=240), CORRUPT, ("no member header", "240")),
    "names-differ": (lying(local_name=b"x.npy"), CORRUPT, ("names differ", r"b'w\.npy'", r"b'x\.npy'")),
    "encrypted": (lying(flags=1), UNSUPPORTED, ("encrypted",)),
    "encrypted-locally": (lying(local_flags=1), UNSUPPORTED, ("encrypted",)),
    "strongly-encrypted": (lying(flags=0x40), UNSUPPORTED, ("encrypted",)),
    "masked": (lying(flags=0x2000), UNSUPPORTED, ("encrypted",)),
    "patch": (lying(flags=0x20), UNSUPPORTED, ("patch",)),
    "methods-differ": (lying(local_method=8), CORRUPT, ("methods differ", "expected 0, found 8")),
    "checksums-differ": (lying(local_crc=7), CORRUPT, ("checksums differ", "found 7")),
    "sizes-differ": (lying(local_size=SIZE + 1), CORRUPT, ("sizes differ", f"expected {SIZE}, found {SIZE + 1}")),
    "packed-sizes-differ": (lying(local_packed_size=9), CORRUPT, ("compressed sizes differ", "found 9")),
    "symlink": (lying(attributes=0o120777 << 16), UNSUPPORTED, ("symlink",)),
    # extent
    "into-the-directory": (
        lying(size=SIZE + 60, packed_size=SIZE + 60, local_size=SIZE + 60, local_packed_size=SIZE + 60),
        CORRUPT,
        ("reaches into the directory", "expected to end by byte", "found"),
    ),
    "into-the-directory-by-its-own-header": (
        lying(
            packed=npy_bytes(np.zeros(40, "f4"))[:-136],
            size=288,
            packed_size=288,
            local_size=288,
            local_packed_size=288,
        ),
        CORRUPT,
        ("reaches into the directory", "expected to end by byte", "found"),
    ),
    "overlap": (lambda: overlapping(0), CORRUPT, ("overlap", "byte")),
    "overlap-by-one": (lambda: overlapping(1), CORRUPT, ("overlap", "byte")),
    "two-sizes": (
        lying(packed_size=SIZE + 1, local_packed_size=SIZE + 1, packed=PLAIN.data + b"x"),
        CORRUPT,
        ("two sizes", f"expected {SIZE}, found {SIZE + 1}"),
    ),
    # content
    "crc": (lying(crc=1, local_crc=1), CORRUPT, ("CRC-32 mismatch", "expected 00000001, found [0-9a-f]{8}")),
    "crc-deflated": (lying(DEFLATED, crc=1, local_crc=1), CORRUPT, ("CRC-32 mismatch", "expected 00000001")),
    "crc-bzip2": (lying(BZIP2, crc=1, local_crc=1), CORRUPT, ("CRC-32 mismatch", "expected 00000001")),
    "crc-lzma": (lying(LZMA, crc=1, local_crc=1), CORRUPT, ("CRC-32 mismatch", "expected 00000001")),
    "crc-of-nothing": (lying(data=npy_bytes(np.zeros((0,), "f4")), crc=1, local_crc=1), CORRUPT, ("CRC-32 mismatch",)),
    "crc-long-trailing": (
        lying(data=PLAIN.data + bytes(9000), crc=1, local_crc=1),
        CORRUPT,
        ("9000 bytes follow the array", "expected 24", "found 9024"),
    ),
    "trailing-in-member": (lying(data=PLAIN.data + b"x"), CORRUPT, ("1 bytes follow the array",)),
    "trailing-in-deflated": (
        lying(DEFLATED, data=DEFLATED.data + bytes(9000)),
        CORRUPT,
        ("9000 bytes follow the array",),
    ),
    "short-member": (lying(data=PLAIN.data[:-1]), CORRUPT, ("cut short", "expected 24 bytes", "found 23")),
    "no-bytes": (lying(data=b""), CORRUPT, ("empty", "w.npy")),
    "no-npy": (lying(data=b"not an npy file"), CORRUPT, ("no npy file", "NUMPY", "not an")),
    "header-cut": (lying(data=PLAIN.data[:50]), CORRUPT, ("header is cut short", "expected 128 bytes, found 50")),
    "only-blobs": (lambda: archive(Member(name=b"README", data=b"x")), UNSUPPORTED, ("without arrays", "README")),
    "pytorch": (lambda: archive(Member(name=b"m/data.pkl", data=b"\x80\x02.")), UNSUPPORTED, ("PyTorch", "pickle")),
    # compression
    **{
        f"method-{number}": (
            lying(method=number, packed=b"x"),
            UNSUPPORTED,
            (f"method {number} [(]{name}", "expected stored, deflate"),
        )
        for number, name in (
            (1, "shrink"),
            (6, "implode"),
            (9, "deflate64"),
            (93, "zstandard"),
            (95, "xz"),
            (97, "wav"),
        )
    },
    "method-unknown": (lying(method=1234, packed=b"x"), UNSUPPORTED, ("method 1234 [(]unknown",)),
    "deflate-cut": (
        lying(DEFLATED, packed=DEFLATED.stored[:-40]),
        CORRUPT,
        ("ends early", f"expected {SPLIT_SIZE} bytes", "found"),
    ),
    "deflate-empty": (lying(DEFLATED, packed=b""), CORRUPT, ("ends early", "found 0")),
    "deflate-damaged": (lying(DEFLATED, packed=b"\xff" * 300), CORRUPT, ("deflate stream is damaged",)),
    "deflate-damaged-late": (
        lying(DEFLATED, packed=DEFLATED.stored[:9000] + b"\xff" * 4000 + DEFLATED.stored[13_000:]),
        CORRUPT,
        ("deflate stream is damaged|another size|past its declared|CRC-32 mismatch|ends early|follow the compressed",),
    ),
    "deflate-longer": (
        lying(DEFLATED, packed=deflated(DEFLATED.data + bytes(99_999))),
        CORRUPT,
        ("past its declared size", f"expected {SPLIT_SIZE} bytes"),
    ),
    "deflate-one-longer": (
        lying(DEFLATED, packed=deflated(DEFLATED.data + b"x")),
        CORRUPT,
        ("past its declared size", f"expected {SPLIT_SIZE} bytes"),
    ),
    "deflate-shorter": (
        lying(DEFLATED, packed=deflated(DEFLATED.data[:-1])),
        CORRUPT,
        ("another size", f"expected {SPLIT_SIZE} bytes, found {SPLIT_SIZE - 1}"),
    ),
    "deflate-trailing": (
        lying(DEFLATED, packed=DEFLATED.stored + b"junk!"),
        CORRUPT,
        ("5 bytes follow the compressed stream",),
    ),
    "deflate-trailing-long": (
        lying(DEFLATED, packed=DEFLATED.stored + bytes(200_000)),
        CORRUPT,
        ("200000 bytes follow the compressed stream",),
    ),
    "bzip2-cut": (lying(BZIP2, packed=BZIP2.stored[:-40]), CORRUPT, ("ends early", "found")),
    "bzip2-damaged": (lying(BZIP2, packed=b"BZh9" + b"\xff" * 300), CORRUPT, ("bzip2 stream is damaged",)),
    "bzip2-no-bzip2": (lying(BZIP2, packed=b"hello" * 9), CORRUPT, ("bzip2 stream is damaged",)),
    "bzip2-longer": (lying(BZIP2, packed=bz2.compress(BZIP2.data + b"x")), CORRUPT, ("past its declared size",)),
    "bzip2-shorter": (lying(BZIP2, packed=bz2.compress(BZIP2.data[:-1])), CORRUPT, ("another size",)),
    "bzip2-trailing": (lying(BZIP2, packed=BZIP2.stored + b"xy"), CORRUPT, ("2 bytes follow the compressed stream",)),
    "lzma-header-cut": (lying(LZMA, packed=b"\x09\x14\x05\0\x5d"), CORRUPT, ("cut short",)),
    "lzma-props-length": (lying(LZMA, packed=zip_lzma(LZMA.data, length=6)), CORRUPT, ("invalid lzma properties",)),
    "lzma-props-225": (
        lying(LZMA, packed=zip_lzma(LZMA.data, props=b"\xe1\0\0\x80\0")),
        CORRUPT,
        ("invalid lzma properties", "xe1"),
    ),
    "lzma-props-lc-lp": (
        lying(LZMA, packed=zip_lzma(LZMA.data, props=bytes([8 + 9 * 4]) + b"\0\0\x80\0")),
        CORRUPT,
        ("lzma stream cannot be begun",),
    ),
    "lzma-dictionary": (
        lying(LZMA, packed=zip_lzma(LZMA.data, props=b"\x5d\xff\xff\xff\xff")),
        LIMIT,
        ("lzma dictionary is too large", "found 4294967295"),
    ),
    "lzma-cut": (lying(LZMA, packed=LZMA.stored[:-400]), CORRUPT, ("ends early", "found")),
    "lzma-damaged": (lying(LZMA, packed=LZMA.stored[:9] + b"\xff" * 300), CORRUPT, ("lzma stream is damaged",)),
    "lzma-longer": (lying(LZMA, packed=zip_lzma(LZMA.data + b"x")), CORRUPT, ("past its declared size",)),
    "lzma-shorter": (lying(LZMA, packed=zip_lzma(LZMA.data[:-1])), CORRUPT, ("another size|ends early",)),
    "lzma-trailing": (lying(LZMA, packed=LZMA.stored + b"xy"), CORRUPT, ("2 bytes follow the compressed stream",)),
}


def name_too_long() -> bytes:
    """The last entry of the directory claims more name than there is."""
    data = bytearray(archive(PLAIN))
    at = data.index(b"PK\x01\x02") + 28
    data[at : at + 2] = b"\xff\x00"
    return bytes(data)


def overlapping(by: int) -> bytes:
    """Two members of one and the same bytes, or the second inside the first by some bytes."""
    inner = replace(OTHER, name=b"inner.npy").local()
    outer = Member(name=b"outer.bin", data=b"x" * 20 + inner)
    at = 30 + len(outer.name) + 20
    if by:  # the outer member ends within the inner one's header
        shorter = 20 + by
        outer = replace(outer, size=shorter, packed_size=shorter, local_size=shorter, local_packed_size=shorter)
        outer = replace(outer, crc=zlib.crc32(outer.data[:shorter]), local_crc=zlib.crc32(outer.data[:shorter]))
    out = outer.local()
    directory = outer.central(0) + replace(OTHER, name=b"inner.npy").central(at)
    return out + directory + TRUE_END.pack(2, len(directory), len(out))


@pytest.mark.parametrize("case", REFUSED)
def test_broken_archives_are_refused(case: str, tmp_path: Path) -> None:
    """Each rule has its refusal, which says what was expected and what was found; nothing is written."""
    import re

    make, kind, patterns = REFUSED[case]
    source = tmp_path / "a.npz"
    source.write_bytes(make())
    with pytest.raises(kind) as caught:
        convert.convert_file(source, tmp_path / "a.safetensors", format="npz")
    assert len(caught.value.problems) == 1, "one fault, one problem"
    text = str(caught.value)
    assert text.startswith(str(source))
    for pattern in patterns:
        assert re.search(pattern, text), f"{pattern!r} not in: {text}"
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_all_broken_members_are_named_together(tmp_path: Path) -> None:
    """Each member's fault is told in one error, and the healthy ones can still be had."""
    members = (
        replace(PLAIN, name=b"one.npy", data=b""),
        PLAIN,
        replace(PLAIN, name=b"two.npy", method=93, packed=b"x"),
        replace(OTHER, name=b"three.npy", flags=1),
    )
    (tmp_path / "a.npz").write_bytes(archive(*members))
    with pytest.raises(convert.InputError) as caught:
        convert.convert_file(tmp_path / "a.npz", tmp_path / "a.safetensors")
    assert [problem.tensor for problem in caught.value.problems] == ["one.npy", "two.npy", "three.npy"]
    convert.convert_file(tmp_path / "a.npz", tmp_path / "a.safetensors", include=["w"])
    assert oracle.read_safetensors(tmp_path / "a.safetensors")[1] == {"w": ("F32", (2, 3), W.tobytes())}
    with convert.open(tmp_path / "a.npz") as checkpoint:
        assert list(checkpoint) == ["one", "w", "two", "three"]
        with pytest.raises(convert.CorruptError, match="empty"):
            checkpoint["one"].numpy()


def test_all_damaged_data_is_named_together(tmp_path: Path) -> None:
    """Faults that only the data shows are gathered as well, for any writer."""
    members = [
        replace(PLAIN, name=b"one.npy", crc=1, local_crc=1),
        replace(DEFLATED, name=b"two.npy", crc=2, local_crc=2),
        replace(BZIP2, name=b"three.npy", crc=3, local_crc=3),
        OTHER,
    ]
    (tmp_path / "a.npz").write_bytes(archive(*members))
    options: list[tuple[str, dict[str, Any]]] = [
        ("a.safetensors", {}),
        ("b.npz", {}),
        ("c.npz", {"compress": True}),
        ("d.npz", {"jobs": 1}),
    ]
    for target, more in options:
        with pytest.raises(convert.CorruptError) as caught:
            convert.convert_file(tmp_path / "a.npz", tmp_path / target, **more)
        assert {problem.tensor for problem in caught.value.problems} == {"one", "two", "three"}, target
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_blobs_are_skipped_and_reported(tmp_path: Path) -> None:
    """What is no array is left out by default, and the report says so."""
    (tmp_path / "a.npz").write_bytes(archive(PLAIN, Member(name=b"README", data=b"text")))
    report = convert.convert_file(tmp_path / "a.npz", tmp_path / "a.safetensors")
    assert [(row.name, row.dtype) for row in report.skipped] == [("README", "blob")]
    report = convert.convert_file(tmp_path / "a.npz", tmp_path / "b.npz")
    assert report.skipped == []
    with zipfile.ZipFile(tmp_path / "b.npz") as found:
        assert found.read("README") == b"text"


def test_blobs_are_checked_too(tmp_path: Path) -> None:
    """The checksum of a member that is no array is owed as well."""
    bad = Member(name=b"README", data=b"text", crc=1, local_crc=1)
    (tmp_path / "a.npz").write_bytes(archive(PLAIN, bad))
    with pytest.raises(convert.CorruptError, match="CRC-32 mismatch"):
        convert.convert_file(tmp_path / "a.npz", tmp_path / "b.npz")


def test_a_blob_and_an_array_do_not_share_a_member_name(tmp_path: Path) -> None:
    """An array gets `.npy` added, a blob keeps its name; where they would meet, it is refused."""
    (tmp_path / "a.npz").write_bytes(archive(PLAIN, Member(name=b"._x.npy", data=b"text")))
    with pytest.raises(convert.PolicyError, match="same member name"):
        convert.convert_file(tmp_path / "a.npz", tmp_path / "b.npz", rename=[("^w$", "._x")])
    convert.convert_file(tmp_path / "a.npz", tmp_path / "b.npz", rename=[("^w$", "x")])
    with zipfile.ZipFile(tmp_path / "b.npz") as found:
        assert found.namelist() == ["x.npy", "._x.npy"]


def test_directory_limit(tmp_path: Path) -> None:
    """A directory longer than the limit is refused before it is read."""
    (tmp_path / "a.npz").write_bytes(archive(PLAIN, OTHER))
    size = len(PLAIN.central(0) + OTHER.central(0))
    with convert.open(tmp_path / "a.npz", limits=convert.Limits(directory_bytes=size)) as checkpoint:
        assert len(checkpoint) == 2
    with pytest.raises(convert.LimitError, match=f"expected at most {size - 1} bytes, found {size}"):
        convert.open(tmp_path / "a.npz", limits=convert.Limits(directory_bytes=size - 1))


def test_header_limit(tmp_path: Path) -> None:
    """So is a header of one array, compressed or not."""
    record = npy_bytes(np.zeros(1, [(f"field{number}", "<f4") for number in range(20)]))
    size = 10 + int.from_bytes(record[8:10], "little")
    for method in (0, 8):
        (tmp_path / "a.npz").write_bytes(archive(replace(PLAIN, data=record, method=method)))
        with convert.open(tmp_path / "a.npz", limits=convert.Limits(header_bytes=size)) as checkpoint:
            assert checkpoint["w"].problem is None
        with convert.open(tmp_path / "a.npz", limits=convert.Limits(header_bytes=size - 1)) as checkpoint:
            problem = checkpoint["w"].problem
        assert isinstance(problem, convert.LimitError)
        assert f"expected at most {size - 1} bytes, found {size}" in str(problem)


@pytest.mark.parametrize("method", [0, 8, 12, 14])
def test_a_damaged_last_byte_is_found(method: int, tmp_path: Path) -> None:
    """Wherever numpy stops reading, the whole member is checked."""
    good = replace(DEFLATED, method=method)
    stored = bytearray(replace(good, data=good.data[:-1] + bytes([good.data[-1] ^ 1])).stored)
    source = archive(replace(good, packed=bytes(stored)))
    (tmp_path / "a.npz").write_bytes(source)
    for target in ("a.safetensors", "b.npz", "c.npy"):
        with pytest.raises(convert.CorruptError, match="CRC-32 mismatch"):
            convert.convert_file(tmp_path / "a.npz", tmp_path / target)
    with convert.open(tmp_path / "a.npz") as checkpoint, pytest.raises(convert.CorruptError, match="CRC-32"):
        checkpoint["long"].numpy()


def test_large_members_are_checked_across_their_spans(tmp_path: Path) -> None:
    """A tensor shared by several threads, Fortran or not, has the checksum of its pieces joined."""
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((2_300, 1000))  # 18 MB: more than one span
    savez(tmp_path / "a.npz", {"c": plain, "f": np.asfortranarray(plain[:400])})
    good = (tmp_path / "a.npz").read_bytes()
    convert.convert_file(tmp_path / "a.npz", tmp_path / "b.safetensors", jobs=4)
    tensors = oracle.read_safetensors(tmp_path / "b.safetensors")[1]
    assert {name: data for name, (_, _, data) in tensors.items()} == {
        "c": plain.tobytes(),
        "f": np.ascontiguousarray(plain[:400]).tobytes(),
    }
    with zipfile.ZipFile(io.BytesIO(good)) as opened:
        offsets = {info.filename: info.header_offset for info in opened.infolist()}
    for name, at in (("c", offsets["c.npy"] + 17_500_000), ("f", offsets["f.npy"] + 1_000_000)):
        bad = bytearray(good)
        bad[at] ^= 0x10
        (tmp_path / "bad.npz").write_bytes(bytes(bad))
        for target, jobs in (("bad.safetensors", 4), ("bad2.npz", 1)):
            with pytest.raises(convert.CorruptError, match=f"'{name}': CRC-32 mismatch"):
                convert.convert_file(tmp_path / "bad.npz", tmp_path / target, jobs=jobs)
            assert not (tmp_path / target).exists()


def test_short_cut_and_strict_way_agree(tmp_path: Path) -> None:
    """Members as numpy writes them are read by a short cut; moved off it by a comment, they are read the same."""
    rng = random.Random(5)
    arrays: list[Array] = [
        W,
        B,
        np.asfortranarray(W),
        W.astype(">f4"),
        np.zeros((0, 3), "i8"),
        np.array(5.0),
        np.zeros(3, "M8[ns]"),
        np.zeros(2, "V2"),
        np.zeros(2, "S3"),
    ]
    members = [Member(name=f"a{index}.npy".encode(), data=npy_bytes(array)) for index, array in enumerate(arrays)]
    rng.shuffle(members)
    found = []
    for comment in (b"", b"not plain"):
        (tmp_path / "a.npz").write_bytes(archive(*(replace(member, comment=comment) for member in members)))
        with convert.open(tmp_path / "a.npz") as checkpoint:
            found.append(
                [
                    (t.name, t.dtype, t.shape, t.stored_big, t.stored_fortran, b"".join(map(bytes, t.chunks())))
                    for t in checkpoint.values()
                ]
            )
    assert found[0] == found[1]
    assert [row[0] for row in found[0]] == [member.name.decode().removesuffix(".npy") for member in members]


def test_every_cut_of_an_archive_is_refused(tmp_path: Path) -> None:
    """No prefix of an archive is an archive."""
    data = archive(PLAIN, replace(OTHER, method=8), end=End(comment=b"the end"))
    for length in range(len(data)):
        (tmp_path / "a.npz").write_bytes(data[:length])
        with pytest.raises(convert.InputError):
            convert.open(tmp_path / "a.npz", format="npz")
