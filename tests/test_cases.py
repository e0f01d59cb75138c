"""Hard files from the real world, each with the one right answer: these tensors, or a refusal that says why.

`cases/cases.json` lists them. A verdict is `ok` (converts, to exactly these tensors), `error` (is refused: the message
names the file, nothing is left behind, nothing in the file was executed) or `either`. `with` tells what each
`--policy` has to yield instead. Cases for whole folders (`batch`) are not run here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import convert

from . import oracle

CASES = Path(__file__).resolve().parent / "cases"
FILES = CASES / "files"
ALL_CASES: list[dict[str, Any]] = json.loads((CASES / "cases.json").read_text("utf-8"))

MARKER = "CONVERT_PWNED"
"""The file that a payload creates in the current folder when it gets to run."""

# What a refusal has to say, wherever cases.json gives the reason: for each case, patterns that all must be found in the
# message, in any case. The name of the file is taken out first, as it tells what is wrong with it.
REASONS: dict[str, tuple[str, ...]] = {
    # npy
    "A14": (r"header|literal|dictionary",),
    "A17": (r"shape", r"tuple|list"),
    "A19": (r"shape|dimension", r"true|bool|integer|\bint\b"),
    "A20": (
        r"shape|elements|data|bytes",
        r"overflow|too (large|big|many)|limit|needs|short|truncat|cut|end|expected|found|only",
    ),
    "A22": (r"short|truncat|cut|incomplete|ends|expected|missing", r"\b(32|160)\b", r"\b(24|152)\b"),
    "A25": (r"empty|0 bytes|no bytes",),
    "A26": (r"header", r"short|truncat|cut|incomplete|ends|past|beyond|expected"),
    "A28": (r"version", r"4\.0|\(4, 0\)"),
    "A29": (r"fortran_order",),
    "A31": (r"fortran_order", r"bool|true|false"),
    "A40": (r"header|literal|shape",),
    "A41": (r"header|literal|shape",),
    "A43": (r"header|literal|shape",),
    "A46": (r"header|literal|descr|object",),
    "A53": (r"git lfs", r"git lfs pull"),
    "A55": (r"npy|magic|recogni[sz]|unknown format|format",),
    "A58": (r"newline|line end|cr-?lf|carriage|text mode|\\r|trailing|after the (data|array)|more bytes|longer",),
    "A59": (r"object|pickle|\|?O8",),
    # npz
    "B22": (r"deflate64",),
    "B23": (r"crc", r"\bw\b"),
    "B25": (r"crc|follow the array", r"\bw\b"),  # the sizes contradict each other before any data is read
    "B28": (r"\bw\b", r"empty|0 bytes|no bytes"),
    "B29": (r"truncat|incomplete|cut|interrupted|end[- ]of[- ]central|central directory|end record",),
    "B31": (r"\bw\b", r"encrypt|password"),
    "B32": (r"local", r"\bw\b", r"\bx\b"),
    "B37": (r"zip64",),
    "B52": (r"\btar\b|not (a |an )?(zip|npz)|no (zip|npz)|format|recogni[sz]",),
    "B53": (r"pytorch|torch", r"pickle|npz"),
    # safetensors
    "C16": (r"utf-?8",),
    "C17": (r"duplicate|twice|repeated|more than once", r"['\"]w['\"]"),
    "C20": (r"unicode|surrogate|utf-?8",),
    "C22": (r"json",),
    "C23": (r"hole|gap|unindexed|not covered|belong|no tensor", r"\b4\b"),
    "C25": (r"short|truncat|cut|incomplete|ends|missing|past|beyond", r"\b(14|24|96)\b"),
    "C26": (r"header", r"5000|5,000", r"exceed|past|beyond|larger|longer|only|short|truncat|cut|incomplete|file"),
    "C28": (r"header", r"limit|large|long|exceed|at most|past|beyond|maximum"),
    "C29": (r"header", r"empty|length|\b0\b"),
    "C31": (r"empty|0 bytes|no bytes",),
    "C32": (r"overlap|share|owner|same bytes|twice",),
    "C34": (r"offsets?|range|begin", r"begin|end|24"),
    "C35": (r"negative|-24", r"offset"),
    "C37": (r"data_offsets", r"two|pair|\b2\b|begin"),
    "C38": (r"shape|bytes", r"4000000|4,000,000|4 ?mb|1000", r"\b24\b"),
    "C40": (r"shape|bytes", r"17179869192|17,179,869,192|4294967298|17 ?gb", r"\b8\b"),
    "C41": (r"negative|-2", r"shape|dimension|size"),
    "C43": (r"dtype", r"(?-i:\bF128\b)"),
    "C44": (r"dtype", r"(?-i:\bf32\b)"),
    "C46": (r"data_offsets",),
    "C52": (r"__metadata__", r"reserved|tensor"),
    "C59": (r"git lfs",),
    "C61": (r"pickle",),
    "C62": (r"header|json|nest|deep|depth|metadata",),
    "C64": (r"header", r"object|list|array|\{"),
    "C65": (r"['\"]w['\"]", r"object|string|dictionary|str\b"),
    # pickles
    "F05": (r"pickle",),
    "F08": (r"object|pickle",),
    "F11": (r"descr|dtype",),
    # archives that lie
    "I05": (r"\bw\b", r"size|more|larger|longer|past|exceed|declared|\b152\b"),
    "I07": (r"\bw\b", r"short|truncat|cut|incomplete|ends|smaller|expected|only|exceed|more|past|larger|limit|claim"),
    "I08": (r"\bw\b", r"symlink|symbolic link|\blink\b"),
}
NOT_SAID = {"A25": r"pickle", "C31": r"pickle", "A53": r"pickle", "C59": r"header length"}
"""What a message must not say: the wrong guess of common readers."""


PAYLOADS = ("A43_code_in_header.npy", "F07_malicious_in_npz.npz")


@dataclass(frozen=True)
class Check:
    """One conversion to judge."""

    case: dict[str, Any]
    policies: tuple[str, ...]
    verdict: str
    tensors: list[dict[str, Any]] | None

    def __str__(self) -> str:
        return " ".join([self.case["file"], *self.policies])

    @property
    def source(self) -> Path:
        return FILES / str(self.case["file"])

    def wanted(self) -> dict[str, tuple[str, tuple[int, ...], str]]:
        assert self.tensors is not None
        stem = self.source.name.rsplit(".", 1)[0]
        return {t["name"].replace("$npy", stem): (t["dtype"], tuple(t["shape"]), t["sha256"]) for t in self.tensors}


def checks() -> list[Check]:
    """Every case that is a single file, under the default policy and under each policy it lists."""
    result = []
    for case in ALL_CASES:
        if case["verdict"] == "batch":
            continue
        result.append(Check(case, (), case["verdict"], case.get("tensors")))
        for policy, tensors in case.get("with", {}).items():
            refused = tensors == "error"
            result.append(Check(case, (policy,), "error" if refused else "ok", None if refused else tensors))
    return result


CHECKS = checks()
REFUSALS = [check for check in CHECKS if check.case["id"] in REASONS and not check.policies]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the output, current too: a payload that runs leaves its mark here."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(source: Path, target: Path, policies: tuple[str, ...]) -> str | None:
    """Convert; None if that worked, else the message. Anything but a proper refusal fails the test."""
    before = source.read_bytes()
    caught: convert.ConvertError | None = None
    try:
        convert.convert_file(source, target, policy=convert.Policy.parse(list(policies)))
    except convert.ConvertError as error:
        caught = error
    left = sorted(path.name for path in target.parent.iterdir())
    assert MARKER not in left, "a payload was executed"
    assert source.read_bytes() == before, "the source was changed"
    if caught is None:
        assert left == [target.name], f"left behind {left}"
        return None
    message = str(caught)
    assert left == [], f"refused, yet left behind {left}: {message}"
    assert source.name in message, f"the message does not name the file: {message}"
    assert source.name in {Path(problem.path).name for problem in caught.problems if problem.path is not None}
    return message


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_case(check: Check, folder: Path) -> None:
    """The file gives exactly the right tensors, or is refused where that is right."""
    to_npz = check.verdict == "either-npz"
    target = folder / ("out.npz" if to_npz else "out.safetensors")
    message = refusal(check.source, target, check.policies)
    if message is not None:
        assert check.verdict != "ok", f"was refused: {message}"
        return
    assert check.verdict != "error", f"was accepted; right: {check.case.get('reason', 'refuse')}"
    if to_npz or check.tensors is None:
        return
    _, tensors = oracle.read_safetensors(target)
    found = {name: (code, shape, sha256(data).hexdigest()) for name, (code, shape, data) in tensors.items()}
    assert found == check.wanted()


@pytest.mark.parametrize("check", REFUSALS, ids=str)
def test_refusal_says_what_is_wrong(check: Check, folder: Path) -> None:
    """The message tells the user the actual fault, not a consequence of it."""
    message = refusal(check.source, folder / "out.safetensors", ())
    assert message is not None, f"was accepted; right: {check.case['reason']}"
    text = message
    for own_name in (str(check.source), check.source.name, check.source.stem):
        text = text.replace(own_name, "")
    for pattern in REASONS[check.case["id"]]:
        assert re.search(pattern, text, re.IGNORECASE), f"{pattern!r} not in: {text} (right: {check.case['reason']})"
    wrong = NOT_SAID.get(check.case["id"])
    assert wrong is None or not re.search(wrong, text, re.IGNORECASE), f"a wrong guess: {text}"


@pytest.mark.parametrize("check", [check for check in CHECKS if str(check) in PAYLOADS], ids=str)
def test_payload_does_not_run_when_unpickling_is_asked_for(check: Check, folder: Path) -> None:
    """`object=unpickle` builds arrays and containers; it never calls what a pickle names."""
    message = refusal(check.source, folder / "out.safetensors", ("object=unpickle",))
    assert message is not None, "a hostile file was accepted"


def test_all_cases_are_run() -> None:
    """No case is lost on the way into the parameters."""
    assert len(ALL_CASES) == 185
    assert len(CHECKS) == 201
    assert len({str(check) for check in CHECKS}) == 201
    assert {check.verdict for check in CHECKS} == {"ok", "error", "either", "either-npz"}


def test_every_reason_is_checked() -> None:
    """Each reason in cases.json has its patterns, and its case its file."""
    assert REASONS.keys() == {case["id"] for case in ALL_CASES if "reason" in case}
    assert NOT_SAID.keys() <= REASONS.keys()
    assert len(REFUSALS) == len(REASONS)
    assert all((FILES / case["file"]).exists() for case in ALL_CASES)
