"""A batch on a dask cluster: a real scheduler and workers on loopback, some of which are killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert import UsageError
from convert.batch import convert_folder
from convert.batchtree import STATE
from convert.version import __version__

pytest.importorskip("distributed")
pytestmark = pytest.mark.skipif(os.name == "nt", reason="sends signals")

PATIENCE_SECONDS = 60
HERE = "127.0.0.1"

# What counts as large is small here; the workers need not know.
PROGRAM = """
import os, signal, sys
from convert import batchrun, cluster, spread
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell may have it ignored
batchrun.SPREAD_BYTES, batchrun.CHUNK_FILES = 1 << 20, 3
spread.LEAST_BYTES, spread.RANGE_BYTES = 1 << 17, 1 << 18
cluster._CONNECT_SECONDS, cluster._LOOK_SECONDS = int(os.environ.get("CONNECT", "60")), 0.1
really = cluster.Cluster.__init__
def connected(self, client, options):
    really(self, client, options)
    client._timeout = int(os.environ.get("GIVE_UP", "60"))  # when it has lost the scheduler
cluster.Cluster.__init__ = connected
cluster.FIRST_WORKER_SECONDS = int(os.environ.get("FIRST_WORKER", "60"))
from convert.cli.main import main
main(["batch", *sys.argv[1:]])
"""
# Notes every range; hangs at one moment, leaving a mark, so that it can be killed right there.
PRELOAD = """
import itertools, os, tempfile, threading
from convert import batchwork, output, spread
if hasattr(os, "O_TMPFILE"):
    tempfile._O_TMPFILE_WORKS = False
    del os.O_TMPFILE  # as on a network file system
numbers = itertools.count(1)
moment, at = os.environ.get("HANG", "never 0").split()
def hang():
    open(os.environ["MARK"], "w").close()
    threading.Event().wait()
if not hasattr(output, "is_patched"):  # dask runs this twice
    really_commit, really_copy = output.OutputFile.commit, spread.copy_span
def commit(self, *, fsync=False):
    number = next(numbers) if moment in ("before", "after") else 0
    if moment == "before" and number == int(at):
        hang()
    really_commit(self, fsync=fsync)
    if moment == "after" and number == int(at):
        hang()
def copy_span(data, pipe, begin, end, write, at_, *rest):
    with open(os.environ["RANGES"], "a") as file:
        file.write(f"{os.getpid()}\\n")
    if moment == "range" and next(numbers) == int(at):
        really_copy(data, pipe, begin, end // 2 // pipe.unit_in * pipe.unit_in, write, at_, *rest)
        hang()
    return really_copy(data, pipe, begin, end, write, at_, *rest)
if not hasattr(output, "is_patched"):
    output.is_patched = True
    output.OutputFile.commit, spread.copy_span = commit, copy_span
    exec(os.environ.get("PATCH", ""))
"""


class Site:
    """A scheduler and its workers, in a folder of their own; nothing of it outlives the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "preload.py").write_text(PRELOAD)
        self.mark, self.ranges = folder / "mark", folder / "ranges"
        self.ranges.touch()
        self.address = ""
        self.processes: list[subprocess.Popen[bytes]] = []
        self._count = 0

    def _start(self, module: str, *arguments: str, **env: str) -> tuple[subprocess.Popen[bytes], Path]:
        self._count += 1
        log = self.folder / f"{self._count}.log"
        known = {
            "MARK": str(self.mark),
            "RANGES": str(self.ranges),
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1",
        }
        path = os.pathsep.join([*([env.pop("SITE")] if "SITE" in env else []), *sys.path])
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.{module}", *arguments],
                env={**os.environ, **known, **env, "PYTHONPATH": path}, stdout=file, stderr=file, cwd=self.folder,
            )  # fmt: skip
        self.processes.append(process)
        return process, log

    def scheduler(self, **env: str) -> subprocess.Popen[bytes]:
        """Start one; a second takes the address of the first."""
        file = self.folder / "scheduler.json"
        file.unlink(missing_ok=True)
        port = self.address.rpartition(":")[2] or "0"
        process, log = self._start(
            "dask_scheduler", "--host", HERE, "--port", port, "--no-dashboard", "--scheduler-file", str(file), **env
        )
        wait_until(lambda: file.exists() and file.read_bytes().endswith(b"}"), process, log)
        self.address = json.loads(file.read_bytes())["address"]
        return process

    def worker(self, **env: str) -> subprocess.Popen[bytes]:
        """Start one and wait until it is known."""
        process, log = self._start(
            "dask_worker", self.address, "--nthreads", "1", "--no-nanny", "--no-dashboard",
            *([] if "SITE" in env else ["--preload", str(self.folder / "preload.py")]), **env,
        )  # fmt: skip
        wait_until(lambda: b"Registered to" in log.read_bytes(), process, log)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def wait_until(true: Callable[[], bool], process: subprocess.Popen[bytes], log: Path | None = None) -> None:
    """Until something has happened, or cannot any more."""
    patience = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert process.poll() is None, log.read_text() if log is not None else process.communicate()
        assert time.monotonic() < patience, log.read_text() if log is not None else ""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Nothing runs yet."""
    made = Site(tmp_path / "site")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A scheduler and two workers for the tests that leave them alone."""
    made = Site(tmp_path_factory.mktemp("lasting") / "site")
    try:
        made.scheduler()
        for _ in range(2):
            made.worker()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small ones, three that count as large, one of which cannot be shared out, one to copy, and a damaged one."""
    top = tmp_path_factory.mktemp("cluster") / "src"
    generator = np.random.default_rng(1)
    for number in range(12):
        path = top / f"folder{number % 3}" / f"file{number:02}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, a=generator.standard_normal(3000).astype("f4"), b=np.arange(number))
    values = generator.standard_normal(400_000).astype("f4")
    np.savez(top / "large0.npz", a=values, b=values[:9], c=values[:200_000].reshape(2, -1), d=np.float64(1))
    np.savez(top / "large1.npz", a=values.astype(">f4"), b=np.zeros((0, 3)), c=values[:1].astype(">f8"))
    np.savez(top / "large2.npz", a=np.asfortranarray(values.reshape(800, -1)))
    (top / "config.json").write_bytes(b"{}" * 99)
    (top / "bad.npz").write_bytes(b"x")
    return top


def tree(folder: Path) -> dict[str, bytes]:
    """All that is there, hidden or not, but what is remembered."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(f"{STATE}/")}


WAYS: dict[str, dict[str, Any]] = {
    "safetensors": {"to": "safetensors", "copy_others": True, "verify": True},
    "npz": {"to": "npz", "byteorder": "keep"},
    "aligned": {"to": "npz", "align": 64},
    "npy": {"to": "npy"},
    "shards": {"to": "safetensors", "max_shard_size": 1_000_000},
    "deflated": {"to": "npz", "compress": 7},
}


def options(way: str) -> list[str]:
    """As on the command line."""
    given = {f"--{name.replace('_', '-')}": value for name, value in WAYS[way].items()}
    return [word for name, value in given.items() for word in ([name] if value is True else [name, str(value)])]


def start(src: Path, dst: Path, address: str, way: str = "safetensors", **env: str) -> subprocess.Popen[bytes]:
    """A batch on the cluster."""
    command = [sys.executable, "-c", PROGRAM, str(src), str(dst), *options(way), "--scheduler", address]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes], status: int) -> str:
    """Let it come to its end; what it said."""
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == status, errors.decode()
    return errors.decode()


@pytest.fixture(scope="module")
def undisturbed(src: Path) -> Callable[[str], dict[str, bytes]]:
    """What comes out here, without a cluster."""
    found: dict[str, dict[str, bytes]] = {}

    def make(way: str) -> dict[str, bytes]:
        if way not in found:
            report = convert_folder(src, src.parent / way, fsync=False, **WAYS[way])
            assert [failure.source for failure in report.failures] == ["bad.npz"]
            found[way] = tree(src.parent / way)
        return found[way]

    return make


@pytest.mark.parametrize("way", WAYS)
def test_same_bytes_as_here(
    src: Path, tmp_path: Path, lasting: Site, undisturbed: Callable[[str], dict[str, bytes]], way: str
) -> None:
    """Every file; one failure stops no other and has the status it has here. Large files were shared out."""
    before = len(lasting.ranges.read_text().split())
    said = finish(start(src, tmp_path / "dst", lasting.address, way), 3)
    assert tree(tmp_path / "dst") == undisturbed(way)
    assert "bad.npz: " in said
    assert "1 failed" in said
    shared = len(lasting.ranges.read_text().split()) - before
    workers_spans = 4  # a worker that does a whole file copies spans as well, one for each of its tensors over 64 KiB
    assert shared > workers_spans if way in ("safetensors", "aligned", "npy") else shared >= 0
    state = tmp_path / "dst" / STATE
    assert os.listdir(state / "runs") == ["gate"]
    assert not any(os.listdir(state / name) for name in ("claims", "again") if (state / name).exists())


@pytest.mark.parametrize("hang", ["before 3", "after 4", "range 2"])
def test_a_worker_is_killed(
    src: Path, tmp_path: Path, site: Site, undisturbed: Callable[[str], dict[str, bytes]], hang: str
) -> None:
    """In the middle of a file, just after it got its name, in the middle of a range: others do it again."""
    site.scheduler()
    victim = site.worker(HANG=hang)
    site.worker()
    process = start(src, tmp_path / "dst", site.address)
    wait_until(site.mark.exists, process)
    victim.kill()
    finish(process, 3)
    assert tree(tmp_path / "dst") == undisturbed("safetensors")


def test_a_file_that_kills_workers(
    src: Path, tmp_path: Path, site: Site, undisturbed: Callable[[str], dict[str, bytes]]
) -> None:
    """It is named, with status 1; all others are done by who is left."""
    deadly = (
        "import sys\n"
        "def hook(event, args):\n"
        "    if event == 'open' and str(args[0]).endswith('file07.npz') and not os.path.exists(os.environ['MARK']):\n"
        "        os._exit(9)\n"
        "sys.addaudithook(hook)\n"
    )
    site.scheduler(DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES="0")
    for _ in range(3):
        site.worker(PATCH=deadly)
    process = start(src, tmp_path / "dst", site.address)
    said = finish(process, 1)
    assert "file07.npz: WorkerDiedError" in said
    wanted = undisturbed("safetensors")
    assert tree(tmp_path / "dst") == {name: data for name, data in wanted.items() if "file07" not in name}
    site.mark.touch()
    finish(start(src, tmp_path / "dst", site.address), 3)
    assert tree(tmp_path / "dst") == wanted


def test_an_interrupt(src: Path, tmp_path: Path, site: Site, undisturbed: Callable[[str], dict[str, bytes]]) -> None:
    """Status 130 at once, though a worker hangs; nothing half written is seen; the same command resumes."""
    site.scheduler()
    victim = site.worker(HANG="before 3")
    process = start(src, tmp_path / "dst", site.address)
    wait_until(site.mark.exists, process)
    process.send_signal(signal.SIGINT)
    said = finish(process, 130)
    assert said.startswith("interrupted; ")
    assert said.count("\n") == 1
    wanted = undisturbed("safetensors")
    names = {name: data for name, data in tree(tmp_path / "dst").items() if "convert-tmp" not in name}
    assert names.items() <= wanted.items()
    victim.kill()
    victim.wait()
    site.worker()
    finish(start(src, tmp_path / "dst", site.address), 3)
    assert tree(tmp_path / "dst") == wanted


def test_the_scheduler_is_lost(
    src: Path, tmp_path: Path, site: Site, undisturbed: Callable[[str], dict[str, bytes]]
) -> None:
    """It ends with a message if the scheduler stays away, and goes on if it comes back."""
    scheduler = site.scheduler()
    victim = site.worker(HANG="before 3")
    process = start(src, tmp_path / "dst", site.address, GIVE_UP="1")
    wait_until(site.mark.exists, process)
    scheduler.kill()
    said = finish(process, 5)
    assert said == (
        f"{site.address}: the connection to the scheduler is lost\n"
        "hint: when it runs again, the same command goes on from here\n"
    )
    victim.kill()
    scheduler.wait()
    site.mark.unlink()
    scheduler = site.scheduler()
    victim = site.worker(HANG="before 2")
    process = start(src, tmp_path / "dst", site.address)
    wait_until(site.mark.exists, process)
    scheduler.kill()
    victim.kill()
    scheduler.wait()
    site.scheduler()
    site.worker()
    finish(process, 3)
    assert tree(tmp_path / "dst") == undisturbed("safetensors")


LIBRARY = """
import sys
from convert import batchrun, spread
batchrun.SPREAD_BYTES = 1 << 20
spread.LEAST_BYTES, spread.RANGE_BYTES = 1 << 17, 1 << 18
import convert
from distributed import Client
src, dst, address = sys.argv[1:]
if __name__ == "__main__":
    seen = []
    with Client(address, set_as_default=False) as client:
        for number, executor in enumerate([client, client.get_executor(), client.get_executor(retries=2)]):
            report = convert.convert_folder(
                src, f"{dst}{number}", to="safetensors", copy_others=True, executor=executor, fsync=False,
                progress=lambda done, total, name: seen.append((done, total)),
            )
            assert (report.failed, report.exit_status) == (1, 3), report
        assert client.status == "running"  # it is not ours
    assert sorted(seen[: len(seen) // 3]) == seen[: len(seen) // 3]
    assert seen[-1][0] == seen[-1][1] > 0
"""


def test_from_python(src: Path, tmp_path: Path, lasting: Site, undisturbed: Callable[[str], dict[str, bytes]]) -> None:
    """A client, and executors that it makes; progress counts bytes and comes to its end."""
    command = [sys.executable, "-c", LIBRARY, str(src), str(tmp_path / "dst"), lasting.address]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr.decode()
    for number in range(3):
        assert tree(tmp_path / f"dst{number}") == undisturbed("safetensors")


# --- what is wrong with a cluster ----------------------------------------------------------------------------------

NO_PACKAGE = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "convert":
            raise ModuleNotFoundError("No module named 'convert'")
sys.meta_path.insert(0, Blocker())
"""


def test_nobody_answers(src: Path, tmp_path: Path) -> None:
    """Status 5; an address that is none is a usage error. Nothing was written."""
    said = finish(start(src, tmp_path / "dst", f"tcp://{HERE}:1", CONNECT="1"), 5)
    assert said.startswith(f"tcp://{HERE}:1: the scheduler does not answer")
    assert "\nhint: dask scheduler --port 8786 starts one" in said
    for address in ("nonsense://x", "tcp://host", ""):
        with pytest.raises(UsageError, match="no scheduler's address") as caught:
            convert_folder(src, tmp_path / "dst", to="npz", executor=address)
        assert caught.value.hint == "--scheduler tcp://HOST:8786"
    assert not (tmp_path / "dst").exists()


def test_workers_that_cannot_work(src: Path, tmp_path: Path, site: Site) -> None:
    """None at all; one with another version; one without the folder; one without the package: each is told apart."""
    site.scheduler()
    said = finish(start(src, tmp_path / "dst", site.address, FIRST_WORKER="1"), 5)
    assert said == (
        f"{site.address}: the cluster has no workers (waited 1 s)\nhint: dask worker {site.address} starts one\n"
    )
    other = site.worker(PATCH="import convert.version; convert.version.__version__ = '0.0.9'")
    said = finish(start(src, tmp_path / "dst", site.address), 5)
    assert f"the worker has another version of tensor-convert (expected {__version__}, found 0.0.9)\nhint: " in said
    other.kill()
    other.wait()
    blind = "really = os.path.exists; os.path.exists = lambda path: not str(path).endswith('.lock') and really(path)"
    other = site.worker(PATCH=blind)
    said = finish(start(src, tmp_path / "dst", site.address), 5)
    assert said.startswith(f"{tmp_path / 'dst'}: the worker of process {other.pid} on ")
    assert "does not see this folder\nhint: all workers need it under the same path" in said
    other.kill()
    other.wait()
    (site.folder / "lacks").mkdir()
    (site.folder / "lacks" / "sitecustomize.py").write_text(NO_PACKAGE)
    site.worker(SITE=str(site.folder / "lacks"))
    said = finish(start(src, tmp_path / "dst", site.address), 5)
    assert f"does not have tensor-convert (No module named 'convert')\nhint: install version {__version__}" in said
    assert tree(tmp_path / "dst") == {}


def test_a_scheduler_without_the_package(src: Path, tmp_path: Path, site: Site) -> None:
    """It unpacks what it passes on, so this is said at once."""
    (site.folder / "lacks").mkdir()
    (site.folder / "lacks" / "sitecustomize.py").write_text(NO_PACKAGE)
    site.scheduler(SITE=str(site.folder / "lacks"))
    said = finish(start(src, tmp_path / "dst", site.address), 5)
    assert said.startswith(f"{site.address}: the scheduler does not have tensor-convert")
