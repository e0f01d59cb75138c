"""Writes docs/rules.md from the code: the rules that `convert check` knows.

`python docs/make_rules.py` prints it; a test compares it with the committed file.
"""

from __future__ import annotations

import sys

from convert.checking import all_rules
from convert.findings import MAX_PER_RULE, Rule

_HEAD = f"""# The rules of `convert check`

Made from the code by `python docs/make_rules.py`.

```
convert check model.npz checkpoints/ model.safetensors.index.json
convert check --json model.npz
convert check --explain NPZ-002
```

`check` reads a file to its end, damaged or not, and tells every rule that it breaks: id, tensor or archive member,
byte, what was expected and what is there. A folder means all tensor files in it, an index of shards also the shards;
URLs are read too. Of one rule at most {MAX_PER_RULE} findings are listed for a file; the rest are counted. Without an
end record the members of an archive are looked for by their headers.

**Errors** (exit status 3) make a file, or a tensor in it, unreadable here; a file without any can be read.
**Warnings**, from 101 on, are legal: other programs may stumble, or something is not carried over. They do not change
the exit status, unless `--strict` is given. What a policy refuses (a long double, a datetime64, an object) is no
fault of the file; of the pickle in an object array, what unpickling would refuse is told (PKL-...), and nothing in it
is ever run.

`--headers` leaves out checksums, pickles and booleans, and so reads little of a large file. `--json` prints one
document: `files`, each with `path` and `findings` (or `error`, if it cannot be opened), and the counts
`files_checked`, `errors` and `warnings`. In the library:

```python
for finding in convert.check("in.npz"):
    print(finding.rule, finding.severity, finding.tensor, finding.offset, finding.message)
```

The ids NPZ-001 and NPZ-002 are those of the published description of the format; the others are this project's.
"""
_SECTIONS = {
    "FILE": "Any file",
    "NPY": "npy: a file, or a member of an npz",
    "PKL": "Pickles in object arrays",
    "NPZ": "npz",
    "ST": "safetensors",
    "SHARD": "Index of shards",
}


def _row(rule: Rule) -> str:
    return f"| {rule.id} | {rule.severity} | {rule.title} | {rule.about} |"


def page() -> str:
    """The whole page."""
    rules = all_rules()
    parts = [_HEAD]
    for prefix, title in _SECTIONS.items():
        rows = [_row(rule) for rule in rules if rule.id.rpartition("-")[0] == prefix]
        parts.append("\n".join([f"## {title}", "", "| id | | rule | |", "|---|---|---|---|", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
