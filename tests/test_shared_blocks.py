"""Shared blocks are the same text in every script. `python tests/test_shared_blocks.py --fix` copies the canonical one.

A block starts with `# ---- shared: NAME (...) ----` and ends with `# ---- end shared ----`. The canonical text is
that of `paws_mlp.py`, or of the first baseline that has the block. Needs the standard library alone.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [ROOT / "paws_mlp.py", ROOT / "paws_transformer.py", *sorted((ROOT / "baselines").glob("*.py"))]
EVERYWHERE = {"flags", "environment", "data", "policy", "evaluation", "run directory"}
BLOCK = re.compile(r"^ *# ---- shared: (?P<name>[^(\n]+?) \(.*?^ *# ---- end shared ----\n", re.MULTILINE | re.DOTALL)
OWN = {path.stem for path in ROOT.glob("*.py")} | {"baselines", "benchmark", "data_gen", "tests"}


def blocks(path: Path) -> dict[str, str]:
    return {match["name"]: match[0] for match in BLOCK.finditer(path.read_text())}


def canonical_blocks() -> dict[str, str]:
    found = {}
    for script in reversed(SCRIPTS):
        found |= blocks(script)
    return found


def differences() -> list[str]:
    canonical, found = canonical_blocks(), []
    for script in SCRIPTS:
        here = blocks(script)
        found += [f"{script.name}: block '{name}' is missing" for name in sorted(EVERYWHERE - here.keys())]
        found += [f"{script.name}: block '{name}' differs" for name in here if here[name] != canonical[name]]
    return found


def fix() -> None:
    canonical = canonical_blocks()
    for script in SCRIPTS:
        text = script.read_text()
        fixed = BLOCK.sub(lambda match: canonical[match["name"]], text)
        if fixed != text:
            script.write_text(fixed)
            print(f"fixed {script.name}")


def test_shared_blocks_are_identical():
    assert not differences(), "run python tests/test_shared_blocks.py --fix"


def test_each_block_is_shared():
    for name in canonical_blocks():
        assert sum(name in blocks(script) for script in SCRIPTS) > 1, name


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
