"""Shared blocks are the same text in every script. `python tests/test_shared_blocks.py --fix` copies the canonical one.

A block starts with a line `# ---- shared: NAME (...) ----` and ends with `# ---- end shared ----`; `paws_mlp.py`
holds the canonical text. Needs the standard library alone.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CANONICAL = ROOT / "paws_mlp.py"
SCRIPTS = sorted([CANONICAL, ROOT / "paws_transformer.py", *(ROOT / "baselines").glob("*.py")])
EVERYWHERE = {"flags", "environment", "data", "policy", "evaluation", "run directory"}
BLOCK = re.compile(r"^ *# ---- shared: (?P<name>[^(\n]+?) \(.*?^ *# ---- end shared ----\n", re.MULTILINE | re.DOTALL)
OWN = {path.stem for path in ROOT.glob("*.py")} | {"baselines", "benchmark", "data_gen", "tests"}


def blocks(path: Path) -> dict[str, str]:
    return {match["name"]: match[0] for match in BLOCK.finditer(path.read_text())}


def differences() -> list[str]:
    canonical, found = blocks(CANONICAL), []
    for script in SCRIPTS:
        here = blocks(script)
        found += [f"{script.name}: block '{name}' is missing" for name in sorted(EVERYWHERE - here.keys())]
        for name, text in here.items():
            if name not in canonical:
                found.append(f"{script.name}: block '{name}' has no counterpart in {CANONICAL.name}")
            elif text != canonical[name]:
                found.append(f"{script.name}: block '{name}' differs from {CANONICAL.name}")
    return found


def fix() -> None:
    canonical = blocks(CANONICAL)
    for script in SCRIPTS:
        text = script.read_text()
        fixed = BLOCK.sub(lambda match: canonical.get(match["name"], match[0]), text)
        if fixed != text:
            script.write_text(fixed)
            print(f"fixed {script.name}")


def test_shared_blocks_are_identical():
    assert EVERYWHERE <= blocks(CANONICAL).keys()
    assert not differences(), "run python tests/test_shared_blocks.py --fix"


def test_scripts_import_nothing_of_this_repository():
    for script in SCRIPTS:
        for node in ast.walk(ast.parse(script.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in OWN], f"{script.name} line {node.lineno}"


if __name__ == "__main__":
    if "--fix" in sys.argv:
        fix()
    print("\n".join(differences()) or f"shared blocks of {len(SCRIPTS)} scripts are identical")
    sys.exit(bool(differences()))
