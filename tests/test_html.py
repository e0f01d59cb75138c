"""Pages of `convert ls --html`: safe, small, complete, and looked at in a real browser where there is one.

The browser is a Chromium: `chromium` of Debian, Chrome, or what the environment variable CONVERT_BROWSER names.
Screenshots go to pytest's temporary folder; with CONVERT_SCREENSHOTS=FOLDER they are kept there to be looked at.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import zlib
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import convert
from convert.batchhtml import BatchPage
from convert.batchjob import FileReport
from convert.batchrun import BatchReport
from convert.cli.main import run
from convert.errors import CorruptError, printable
from convert.html import MOST_ROWS, inventory_page
from convert.inventory import Inventory, Row, take_inventory
from convert.treemap import Box, squarified

HOSTILE = [
    "<script>document.title='owned'</script>",
    "</td></table><h1>owned</h1>",
    "\" onmouseover='owned()' x=\"",
    "&lt;b&gt;",
    "]]><!--",
    "\u202eevil\x1b[31m\x00",
    "</title></style></svg>",
    "javascript:owned()",
]
VOID = {"meta", "input", "br"}


class Reader(HTMLParser):
    """Reads a page strictly: tags must close in order; collects text, attributes and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def names(self) -> list[str]:
        """First cells of all rows."""
        return [text for tag, text in self.texts if tag == "td"]


def page_of(*paths: Path, stats: bool = False) -> str:
    """The page about some files."""
    found: list[Inventory] = []
    problems: list[convert.ConvertError] = []
    for path in paths:
        with convert.open(path) as checkpoint:
            one, damaged = take_inventory(checkpoint, stats=stats)
        found.append(one)
        problems += damaged
    return "".join(inventory_page(found, problems))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with layers, several types, odd values and hostile names."""
    rng = np.random.default_rng(7)
    tensors: dict[str, Any] = {
        "model.embed_tokens.weight": rng.normal(size=(600, 64)).astype(ml_dtypes.bfloat16),
        "optimizer/exp_avg/model.embed_tokens.weight": rng.normal(size=(600, 64)).astype(np.float32),
        "bad": np.array([np.nan, np.inf, 0, 1], np.float32),
        "step": np.array(7),
        "model.layers.0.a_name_that_is_far_too_long_for_any_rectangle_and_for_a_telephone.weight": np.zeros(3000, "u1"),
    }
    for layer in range(12):
        for part in ("q", "k", "v", "o"):
            name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
            tensors[name] = (rng.normal(size=(64, 64)) * 0.02).astype(ml_dtypes.bfloat16)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = np.ones(64, np.float32)
    tensors |= {name: np.zeros(900 + index, np.uint8) for index, name in enumerate(HOSTILE)}
    path = tmp_path_factory.mktemp("checkpoint") / "<model> & more.safetensors"
    save_file(tensors, path, {"format": "pt", HOSTILE[0]: HOSTILE[1]})
    return path


# --- what is in a page -------------------------------------------------------------------------------------------


def test_every_name_is_text_and_nothing_else(checkpoint: Path) -> None:
    """Names, metadata and paths cannot become markup, nor turn around or hide what stands beside them."""
    text = page_of(checkpoint, stats=True)
    page = Reader(text)
    assert {printable(name) for name in HOSTILE} <= set(page.names())
    assert f"{printable(HOSTILE[0])}: {printable(HOSTILE[1])}" in [data for _, data in page.texts]
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert [tag for tag, _ in page.tags].count("h1") == 1
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert all(character.isprintable() or character == "\n" for character in text)


def test_a_page_needs_nothing_from_outside(checkpoint: Path) -> None:
    """No address in it, and a policy that would not let it load or send anything."""
    text = page_of(checkpoint, stats=True)
    page = Reader(text)
    for _, attrs in page.tags:
        assert not {"src", "href", "srcset", "data", "action", "background"} & attrs.keys()
    assert "url(" not in text
    assert "@import" not in text
    (policy,) = [attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    (script,) = [data for tag, data in page.texts if tag == "script"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_the_same_file_gives_the_same_page(checkpoint: Path) -> None:
    """No clock, no chance."""
    assert page_of(checkpoint, stats=True) == page_of(checkpoint, stats=True)


def test_all_tensors_are_in_it(checkpoint: Path) -> None:
    """In the order of the file, with sizes, and histograms where they were asked for."""
    page = Reader(page_of(checkpoint, stats=True))
    names = [printable(tensor) for tensor in convert.load(checkpoint)]
    cells = page.names()
    assert [cell for cell in cells if cell in set(names)] == names
    histograms = [attrs for _, attrs in page.tags if attrs.get("class") == "hist"]
    assert len(histograms) == len(names)
    without = Reader(page_of(checkpoint))
    assert not [attrs for _, attrs in without.tags if attrs.get("class") == "hist"]


def test_a_hundred_thousand_tensors_are_folded() -> None:
    """The page stays below two megabytes, and all of them are in its sums."""
    rows = [
        Row(f"model.layers.{index // 1000}.{index // 10}.w{index}", "float32", (5,), index % 97, 0, "C", "little", None)
        for index in range(100_000)
    ]
    for each in (rows, [row._replace(name=f"t{index}") for index, row in enumerate(rows)]):
        text = "".join(inventory_page([Inventory("x.npz", "npz", "", each)]))
        assert len(text) < 2_000_000
        page = Reader(text)
        count = len([attrs for _, attrs in page.tags if attrs.get("class") == "name"])
        assert count <= MOST_ROWS + 1
        folded = [int(number) for number in re.findall(r"\((\d+) tensors?\)", text)]
        assert sum(folded) + count - len(folded) == 100_000


def test_problems_come_first() -> None:
    """With their hints, before any table."""
    problem = CorruptError("the data is cut short", path="<x>.npz", tensor="<w>", hint="copy it again")
    text = "".join(inventory_page([Inventory("x.npz", "npz")], [problem, problem]))
    page = Reader(text)
    assert "2 problems" in text
    said = "<x>.npz: tensor '<w>': the data is cut short\nhint: copy it again"
    assert next(data for tag, data in page.texts if tag == "li") == said
    assert text.index("2 problems") < text.index("<h2>Tensors")


def test_several_files(checkpoint: Path, tmp_path: Path) -> None:
    """A table for each, one picture of all."""
    arrays: dict[str, Any] = {"x.y": np.zeros((3, 4), ">i2"), "x.z": np.asfortranarray(np.ones((2, 2)))}
    np.savez_compressed(tmp_path / "b.npz", **arrays)
    page = Reader(page_of(checkpoint, tmp_path / "b.npz"))
    headings = [data for tag, data in page.texts if tag == "h3"]
    assert headings == [f"{path} " for path in (checkpoint, tmp_path / "b.npz")]
    texts = [data for _, data in page.texts]
    assert "big-endian, deflate" in texts
    assert "Fortran, deflate" in texts
    assert [tag for tag, _ in page.tags].count("svg") == 2


@pytest.mark.parametrize("rows", [[], [Row("e", "float32", (0,), 0, 0, "C", "little", None)]], ids=["none", "empty"])
def test_nothing_to_draw(rows: list[Row]) -> None:
    """No tensors, or none with bytes: a page all the same."""
    page = Reader("".join(inventory_page([Inventory("x.npz", "npz", "", rows)])))
    assert "svg" not in [tag for tag, _ in page.tags]


# --- the picture -------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 10**12), min_size=1, max_size=60),
    st.floats(5, 2000),
    st.floats(5, 2000),
)
def test_areas_are_in_proportion(sizes: list[int], width: float, height: float) -> None:
    """Each rectangle has its share of the box, lies in it, and covers no other."""
    sizes.sort(reverse=True)
    box = Box(3.0, 4.0, width, height)
    found = squarified([float(size) for size in sizes], box)
    assert len(found) == len(sizes)
    for size, place in zip(sizes, found, strict=True):
        assert place.width * place.height == pytest.approx(width * height * size / sum(sizes), rel=1e-6)
        assert place.x >= box.x - 1e-6
        assert place.y >= box.y - 1e-6
        assert place.x + place.width <= box.x + width + 1e-6 * width
        assert place.y + place.height <= box.y + height + 1e-6 * height
    for index, one in enumerate(found):
        for other in found[index + 1 :]:
            across = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            down = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert min(across / width, down / height) < 1e-6


def test_equal_sizes_are_near_squares() -> None:
    """A hundred equal ones in a box of 4 to 3: no side more than twice the other."""
    for place in squarified([1.0] * 100, Box(0, 0, 400, 300)):
        assert 0.5 < place.width / place.height < 2


# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)


def test_the_page_is_written_and_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing on stdout; the file has what the library gives."""
    np.savez("in.npz", a=np.arange(5.0))
    assert run(["ls", "in.npz", "--html", "report.html", "--stats"]) == 0
    assert capsys.readouterr() == ("", "report.html: 1 file, 1 tensor, 40 B\n")
    assert Path("report.html").read_text("utf-8") == page_of(Path("in.npz"), stats=True)


def test_an_existing_page_is_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless --overwrite is given; a failure leaves nothing new."""
    np.savez("in.npz", a=np.arange(5.0))
    Path("report.html").write_text("mine")
    assert run(["ls", "in.npz", "--html", "report.html"]) == 5
    assert "report.html: the target exists already\nhint: --overwrite" in capsys.readouterr().err
    assert Path("report.html").read_text() == "mine"
    assert run(["ls", "missing.npz", "--html", "report.html", "--overwrite"]) == 3
    assert Path("report.html").read_text() == "mine"
    assert run(["ls", "in.npz", "--html", "no/such/folder.html"]) == 5
    assert run(["ls", "in.npz", "--html", "report.html", "--overwrite"]) == 0
    assert Path("report.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    assert sorted(os.listdir()) == ["in.npz", "report.html"]


def test_a_page_about_what_could_be_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What could not is in it, and on stderr, and in the exit status."""
    np.savez("in.npz", a=np.arange(5.0))
    assert run(["ls", "missing.npz", "in.npz", "--html", "report.html"]) == 3
    assert "missing.npz: cannot be read" in capsys.readouterr().err
    text = Path("report.html").read_text("utf-8")
    assert "1 problem<" in text
    assert "missing.npz: cannot be read" in text


# --- the report of a batch ---------------------------------------------------------------------------------------


@pytest.fixture
def tree(here: Path) -> Path:
    """A folder of sources: good ones, a damaged one, one that is none, a file to copy, a hostile name."""
    src = here / "src"
    (src / "sub").mkdir(parents=True)
    for index in range(12):
        arrays: dict[str, Any] = {"a": np.zeros(50 * index), "z": np.zeros(3, complex), "d": np.zeros(2, "M8[D]")}
        np.savez(src / "sub" / f"m{index}.npz", **arrays)
    np.savez(src / "bad.npz", a=np.arange(100.0))
    data = bytearray((src / "bad.npz").read_bytes())
    data[data.index(np.float64(50).tobytes())] ^= 1
    (src / "bad.npz").write_bytes(data)
    (src / "<b>bold.npz").write_bytes(b"PK\3\4 no archive")
    (src / "config.json").write_text("{}")
    return here


BATCH = ["batch", "src", "dst", "--to", "safetensors", "--copy-others", "--html", "report.html"]
POLICIES = ["--policy", "complex128=pair", "--policy", "datetime64=skip"]


def test_the_page_of_a_batch(tree: Path) -> None:
    """What was done, failed, changed by policy and left out, with sums; then the files, failures first."""
    assert run([*BATCH, *POLICIES]) == 3
    text = Path("report.html").read_text("utf-8")
    page = Reader(text)
    cells = page.names()
    assert _after(cells, "complex128", 5) == ["complex128", "float64", "policy complex128=pair", "12", "12"]
    assert _after(cells, "datetime64[D]", 4) == ["datetime64[D]", "policy datetime64=skip", "12", "12"]
    items = [data for tag, data in page.texts if tag == "li"]
    assert "src/bad.npz: tensor 'a': CRC-32 mismatch" in items[0]
    assert "src/<b>bold.npz: " in items[1]
    sources = [cell for cell in cells if cell.endswith((".npz", ".json"))]
    assert sources[:2] == ["<b>bold.npz", "bad.npz"]
    assert sources[2:] == ["config.json", "config.json", *(f"sub/m{index}.npz" for index in range(12))]
    assert "<b>bold" not in text
    tiles = [data for tag, data in page.texts if tag == "b"]
    assert tiles[:3] == ["13", "0", "2"]


def _after(cells: list[str], first: str, count: int) -> list[str]:
    """Cells from a certain one on."""
    at = cells.index(first)
    return cells[at : at + count]


def test_a_later_run_replaces_the_page_of_a_batch_only(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command goes on where it was; a file that is no such report is kept, and nothing is converted."""
    assert run([*BATCH, *POLICIES]) == 3
    assert run([*BATCH, *POLICIES]) == 3
    assert "finished before" in Path("report.html").read_text("utf-8")
    Path("report.html").write_text("mine")
    shutil.rmtree("dst")
    assert run([*BATCH, *POLICIES]) == 5
    assert "report.html: the target is no report of a batch\nhint: give another name" in capsys.readouterr().err
    assert Path("report.html").read_text() == "mine"
    assert not Path("dst").exists()
    np.savez("in.npz", a=np.zeros(1))
    assert run(["ls", "in.npz", "--html", "list.html"]) == 0
    assert run([*BATCH[:-1], "list.html"]) == 5


def test_an_interrupted_batch_leaves_no_page(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that ends with an error of its own; a dry run has none to write."""
    assert run([*BATCH, "--dry-run"]) == 2

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("convert.batch.convert_folder", interrupted)
    assert run(BATCH) == 130
    monkeypatch.undo()
    monkeypatch.chdir(tree)
    assert run(["batch", "nowhere", "dst", "--to", "npz", "--html", "report.html"]) != 0
    assert sorted(os.listdir()) == ["src"]


def test_ten_thousand_files_are_folded() -> None:
    """The page stays below two megabytes; failures are all there."""
    page = BatchPage()
    for index in range(10_000):
        report = FileReport(f"run{index // 100}/step{index}.npz", f"run{index // 100}/step{index}.safetensors")
        report.source_bytes = report.target_bytes = 1000 + index
        if index % 1000 == 7:
            report.fail(CorruptError("cut short", path=report.source))
        page.add(report)
    text = "".join(page.parts(BatchReport("src", "dst", "safetensors", done=9990, failed=10)))
    assert len(text) < 2_000_000
    assert all(f"run{index // 100}/step{index}.npz<br>" in text for index in range(7, 10_000, 1000))
    assert "(100 files)" in text
    Reader(text)


# --- a real browser ----------------------------------------------------------------------------------------------


def browser() -> str | None:
    """A Chromium, or None."""
    named = os.environ.get("CONVERT_BROWSER")
    if named:
        return named
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next((path for path in map(shutil.which, names) if path), None)


BROWSER = browser()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium found; apt-get install chromium brings one")

PROBE = """
<script>{
const within=(a,b)=>a.left>=b.left-1&&a.right<=b.right+1&&a.top>=b.top-1&&a.bottom<=b.bottom+1;
const visible=e=>e.getClientRects().length>0;
const found={width:innerWidth,scroll:document.documentElement.scrollWidth};
found.dark=matchMedia("(prefers-color-scheme: dark)").matches;
found.outside=[...document.querySelectorAll("body *")].filter(e=>visible(e)&&e.tagName!="SCRIPT"
&&e.getBoundingClientRect().right>innerWidth+1).map(e=>e.outerHTML.slice(0,120));
found.labels=0;
found.spilt=[...document.querySelectorAll("svg g text")].filter(visible).filter(text=>{found.labels+=1;
return !within(text.getBoundingClientRect(),text.parentNode.querySelector("rect").getBoundingClientRect())})
.map(text=>text.textContent);
const cells=[...document.querySelectorAll("table.cards tbody tr")].slice(0,40).flatMap(row=>{
const boxes=[...row.cells].filter(visible).map(cell=>cell.getBoundingClientRect());
return boxes.flatMap((one,at)=>boxes.slice(at+1).filter(other=>
Math.min(one.right,other.right)-Math.max(one.left,other.left)>1
&&Math.min(one.bottom,other.bottom)-Math.max(one.top,other.top)>1))});
found.overlapping=cells.length;
const light=c=>{const v=c.match(/[\\d.]+/g).slice(0,3).map(x=>x/255).map(x=>x<=.03928?x/12.92:((x+.055)/1.055)**2.4);
return .2126*v[0]+.7152*v[1]+.0722*v[2]};
const contrast=(a,b)=>{const[x,y]=[light(a),light(b)].sort((p,q)=>q-p);return(x+.05)/(y+.05)};
const fill=getComputedStyle;
found.contrasts=[...document.querySelectorAll("svg g text:not(.size)")].filter(visible).map(text=>
contrast(fill(text).fill,fill(text.parentNode.querySelector("rect")).fill));
found.contrasts.push(contrast(fill(document.body).color,fill(document.body).backgroundColor));
found.contrasts.push(contrast(fill(document.querySelector(".dim")).color,fill(document.body).backgroundColor));
const box=document.getElementById("filter"),rows=[...document.querySelectorAll("table.cards tbody tr")];
found.box=visible(box);
found.rows=rows.filter(visible).length;
box.value="LAYERS.3. q_proj";box.dispatchEvent(new Event("input"));
found.filtered=rows.filter(visible).map(row=>row.cells[0].textContent);
found.left=document.getElementById("left").textContent;
box.value="";box.dispatchEvent(new Event("input"));
found.again=rows.filter(visible).length;
found.requests=performance.getEntriesByType("resource").map(e=>e.name);
found.title=document.title;
const shown=parent.document.body.appendChild(parent.document.createElement("pre"));
shown.id="probe";shown.textContent=btoa(unescape(encodeURIComponent(JSON.stringify(found))));
}</script></body>"""


def chromium(folder: Path, page: Path, *options: str) -> str:
    """Open a page without a window; what the browser prints."""
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return done.stdout


def framed(text: str, width: int, height: int) -> str:
    """A page inside of another, as wide as a telephone: no window of a Chromium is narrower than 500 pixels."""
    style = f"border:0;width:{width}px;height:{height}px"
    return f'<!DOCTYPE html><body style="margin:0"><iframe style="{style}" srcdoc="{escape(text)}"></iframe></body>'


def probed(folder: Path, text: str, width: int, *options: str) -> dict[str, Any]:
    """What a page looks like from the inside, measured by a script that is added to it."""
    page = folder / "probed.html"
    changed = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    page.write_text(framed(changed.replace("</body>", PROBE), width, 900), "utf-8")
    dom = chromium(folder, page, "--dump-dom", "--window-size=1300,900", *options)
    found = re.search(r'<pre id="probe">([^<]+)</pre>', dom)
    assert found is not None, dom[-2000:]
    measured: dict[str, Any] = json.loads(base64.b64decode(found[1]))
    return measured


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_and_can_be_read(checkpoint: Path, tmp_path: Path, width: int, dark: bool) -> None:
    """On a telephone and a desk, light and dark: nothing sticks out or overlaps, and all text stands out."""
    text = page_of(checkpoint, stats=True)
    options = ["--blink-settings=preferredColorScheme=0"] if dark else []
    found = probed(tmp_path, text, width, *options)
    assert (found["width"], found["dark"]) == (width, dark)
    assert found["scroll"] <= width
    assert found["outside"] == []
    assert found["labels"] > 10
    assert found["spilt"] == []
    assert found["overlapping"] == 0
    assert min(found["contrasts"]) > 4.5
    assert found["requests"] == []
    assert found["filtered"] == ["model.layers.3.self_attn.q_proj.weight"]
    assert "owned" not in found["title"].replace(printable(checkpoint), "")


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_of_a_batch_fits_too(tree: Path, width: int) -> None:
    """The same, for the other kind of page."""
    assert run([*BATCH, *POLICIES]) == 3
    found = probed(tree, Path("report.html").read_text("utf-8"), width)
    assert (found["outside"], found["spilt"], found["overlapping"]) == ([], [], 0)
    assert found["scroll"] <= width
    assert min(found["contrasts"]) > 4.5


@needs_browser
def test_the_filter(checkpoint: Path, tmp_path: Path) -> None:
    """All words must be there, in any case; an empty box brings all rows back."""
    found = probed(tmp_path, page_of(checkpoint), 1280)
    names = list(convert.load(checkpoint))
    assert found["box"]
    assert found["rows"] == found["again"] == len(names)
    assert found["filtered"] == ["model.layers.3.self_attn.q_proj.weight"]
    assert found["left"] == f"1 of {len(names)} rows"


@needs_browser
def test_without_scripts_everything_is_there(checkpoint: Path, tmp_path: Path) -> None:
    """But the box that would do nothing."""
    text = page_of(checkpoint)
    page = tmp_path / "page.html"
    page.write_text(re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL), "utf-8")
    dom = chromium(tmp_path, page, "--dump-dom")
    assert re.search(r'<input id="filter"[^>]* hidden', dom)
    assert "model.layers.3.self_attn.q_proj.weight" in dom


@needs_browser
def test_the_policy_stops_other_scripts(checkpoint: Path, tmp_path: Path) -> None:
    """Were one to get in, it would not run; ours does."""
    page = tmp_path / "page.html"
    foreign = "<script>document.body.dataset.state='ow'+'ned'</script></body>"
    page.write_text(page_of(checkpoint).replace("</body>", foreign), "utf-8")
    dom = chromium(tmp_path, page, "--dump-dom")
    assert 'data-state="owned"' not in dom
    assert not re.search(r'<input id="filter"[^>]* hidden', dom)


def pixels(png: bytes) -> tuple[int, int, int]:
    """Width, height, and how many different rows of pixels a PNG has."""
    width, height = struct.unpack(">II", png[16:24])
    at, data = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        data += png[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    raw = zlib.decompress(data)
    stride = len(raw) // height
    return width, height, len({raw[begin : begin + stride] for begin in range(0, len(raw), stride)})


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_a_screenshot_shows_something(checkpoint: Path, tmp_path: Path, width: int) -> None:
    """Of the size asked for, and not blank."""
    folder = Path(os.environ.get("CONVERT_SCREENSHOTS") or tmp_path)
    page, shot = tmp_path / "page.html", folder / f"report-{width}.png"
    page.write_text(framed(page_of(checkpoint, stats=True), width, 1600), "utf-8")
    chromium(tmp_path, page, f"--screenshot={shot}", f"--window-size={width},1600")
    assert pixels(shot.read_bytes())[:2] == (width, 1600)
    assert pixels(shot.read_bytes())[2] > 300


@needs_browser
def test_it_can_be_printed(checkpoint: Path, tmp_path: Path) -> None:
    """As a PDF of a few pages."""
    folder = Path(os.environ.get("CONVERT_SCREENSHOTS") or tmp_path)
    page, target = tmp_path / "page.html", folder / "report.pdf"
    page.write_text(page_of(checkpoint, stats=True), "utf-8")
    chromium(tmp_path, page, f"--print-to-pdf={target}", "--no-pdf-header-footer")
    data = target.read_bytes()
    assert data.startswith(b"%PDF-")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", data)) < 12
