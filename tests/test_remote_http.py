"""Files from web servers: with and without ranges, with cut connections and servers that are busy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert import remote, remotefile
from tests.remoteservers import Web, web_server

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

MIB = 1 << 20
SOURCES = ("in.npz", "deflated.npz", "in.safetensors", "large.npy")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another try comes at once."""
    monkeypatch.setattr(remote, "WAIT_SECONDS", (0.0, 0.0, 0.0))


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    """A server for a folder with the same tensors in each format."""
    root = tmp_path / "web"
    root.mkdir()
    rng = np.random.default_rng(3)
    values = {"large": rng.integers(0, 256, 5 * MIB, dtype=np.uint8), "small": np.arange(10)}
    convert.save(values, root / "in.npz")
    convert.save(values, root / "deflated.npz", compress=True)
    convert.save(values, root / "in.safetensors")
    convert.save({"large": values["large"]}, root / "large.npy")
    convert.save(values, root / "sh ards.safetensors", max_shard_size=MIB)
    with web_server(root) as server:
        yield server


def converted(web: Web, source: str, tmp_path: Path) -> bytes:
    """What comes of a source by HTTP."""
    target = tmp_path / f"{source}-web.safetensors"
    convert.convert_file(web.url + source, target, overwrite=True)
    return target.read_bytes()


def expected(web: Web, source: str, tmp_path: Path) -> bytes:
    """What comes of the file itself."""
    target = tmp_path / f"{source}-file.safetensors"
    convert.convert_file(web.root / source, target, overwrite=True)
    return target.read_bytes()


@pytest.mark.parametrize("source", SOURCES)
def test_ranges_are_used(web: Web, tmp_path: Path, source: str) -> None:
    """Every byte is sent once, but for a few at the ends of requests."""
    assert converted(web, source, tmp_path) == expected(web, source, tmp_path)
    assert all(wanted is not None for method, _, wanted in web.requests if method == "GET")
    assert web.sent <= (web.root / source).stat().st_size + 4 * remotefile.LEAST_BYTES


def test_a_listing_reads_headers(web: Web) -> None:
    """Of 5 MiB, what a few requests bring at least."""
    for source in ("in.npz", "in.safetensors"):
        web.sent = 0
        with convert.open(web.url + source) as found:
            assert set(found) == {"large", "small"}
        assert web.sent <= 4 * remotefile.LEAST_BYTES


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("source", SOURCES)
def test_a_server_without_ranges_is_read_once(web: Web, tmp_path: Path, source: str, lengths: bool) -> None:
    """It sends everything; that is never taken for the range that was asked for."""
    web.ranges, web.lengths = False, lengths
    report = convert.convert_file(web.url + source, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == expected(web, source, tmp_path)
    assert [note for note in report.notes if "does not serve ranges" in note] != []
    assert sum(1 for method, _, _ in web.requests if method == "GET") <= 6


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("source", SOURCES)
def test_cut_connections_and_busy_servers_are_tried_again(web: Web, tmp_path: Path, source: str, ranges: bool) -> None:
    """Every second request fails, each in another way."""
    web.ranges = ranges
    kinds: list[tuple[str, int]] = [("status", 503), ("cut", 1000), ("status", 500), ("cut", 0), ("status", 429)]

    def faults(number: int, method: str, path: str) -> tuple[str, int] | None:
        if number % 2 == 0:
            return None
        kind = kinds[number // 2 % len(kinds)]
        return kind if method == "GET" or kind[0] == "status" else None

    web.faults = faults
    assert converted(web, source, tmp_path) == expected(web, source, tmp_path)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (("status", 503), "the server is not able to answer .status 503."),
        (("cut", 10), "the connection failed"),
        (("status", 403), "the server says no"),
        (("status", 401), "the server wants other credentials"),
        (("status", 404), "there is nothing of this name"),
    ],
)
def test_what_does_not_pass_is_an_error(web: Web, tmp_path: Path, fault: tuple[str, int], message: str) -> None:
    """After a few tries, or at once where another would not help; the target is not there."""
    web.faults = lambda number, method, path: fault if method == "GET" or fault[0] == "status" else None
    with pytest.raises(convert.InputError, match=message) as caught:
        convert.convert_file(web.url + "in.npz", tmp_path / "out.npz")
    assert caught.value.hint is not None
    assert not (tmp_path / "out.npz").exists()
    gets = sum(1 for method, _, _ in web.requests if method == "GET")
    assert gets <= (1 if fault[1] in (401, 403, 404) else 4)


def test_short_bodies_are_not_taken_for_whole(web: Web, tmp_path: Path) -> None:
    """A range that is answered in good form, but with fewer bytes, is asked for again, and then an error."""
    web.faults = lambda number, method, path: ("short", 100) if method == "GET" and number % 2 else None
    assert converted(web, "large.npy", tmp_path) == expected(web, "large.npy", tmp_path)
    web.faults = lambda number, method, path: ("short", 100) if method == "GET" else None
    with pytest.raises(convert.InputError, match="the server sent 100 bytes of"):
        convert.convert_file(web.url + "large.npy", tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()


def test_a_failure_in_the_middle_ends_all_threads(web: Web, tmp_path: Path) -> None:
    """Not every piece of a tensor is tried for as long."""
    web.faults = lambda number, method, path: ("status", 503) if number > 4 else None
    with pytest.raises(convert.InputError, match="status 503"):
        convert.convert_file(web.url + "in.safetensors", tmp_path / "out.npz", jobs=2)
    assert len(web.requests) <= 4 + 2 * 4
    assert list(tmp_path.glob("out*")) == []


def test_a_file_that_changes_is_noticed(web: Web, tmp_path: Path) -> None:
    """By its tag."""

    def change(*_: object) -> None:
        os.utime(web.root / "in.safetensors", (1, 1))

    with pytest.raises(convert.InputError, match="changed while it was read"):
        convert.convert_file(web.url + "in.safetensors", tmp_path / "out.npz", progress=change)
    assert not (tmp_path / "out.npz").exists()


def test_queries_and_odd_names(web: Web, tmp_path: Path) -> None:
    """A tensor's name is the file's, without what a server is asked besides; secrets in it are not shown."""
    with convert.open(web.url + "large.npy?token=geheim&x=1.2/3") as found:
        assert list(found) == ["large"]
    found_values: dict[str, Any] = convert.load(web.url + "sh%20ards.safetensors.index.json?download=true")
    assert sorted(found_values) == ["large", "small"]
    report = convert.convert_file(web.url + "in.npz?token=geheim", tmp_path / "out.npz")
    assert "geheim" not in report.to_json()
    with pytest.raises(convert.InputError) as caught:
        convert.open(web.url + "none.npz?token=geheim")
    assert "geheim" not in str(caught.value)


def test_folders_are_refused(web: Web) -> None:
    """A web server cannot list them."""
    with pytest.raises(convert.InputError, match="no folders that could be listed"):
        convert.open(web.url)


def test_nobody_listens(tmp_path: Path) -> None:
    """The reason is in the message, not only the address."""
    with pytest.raises(convert.InputError, match=r"the connection failed: .*127\.0\.0\.1"):
        convert.open("http://127.0.0.1:1/a.npz")
