"""What scripts have in common is the same text in each: `python tests/test_shared.py --fix` copies it.

From paws_mlp.py: all below the line COMMON, and the flags below `# the same in every script`. A block from
`# ---- shared by ... ----` to `# ---- end ----` is copied from the first of SCRIPTS that has it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINES = ("bc", "cpl", "cpl_kl", "p_iql", "ipl", "preference_transformer", "dppo")
SCRIPTS = [ROOT / "paws_mlp.py", ROOT / "paws_transformer.py", *(ROOT / f"baselines/{name}.py" for name in BASELINES)]
COMMON = "# ======== The rest is the same in every script: python tests/test_shared.py --fix copies it ========\n"
FLAGS = re.compile(r"    # the same in every script\n(?:    .+\n)+")
BLOCK = re.compile(r"# ---- (shared by [^\n]+) ----\n.*?\n# ---- end ----\n", re.DOTALL)
LINES = re.compile(r"The method is lines \d+ to \d+\.")


def method_lines(text: str) -> str:
    """From the first import to the line before COMMON, without the blank lines there."""
    first = text[: text.index('\n"""\n\nimport')].count("\n") + 4
    return f"The method is lines {first} to {text[: text.index(COMMON)].rstrip().count(chr(10)) + 1}."


def repaired(text: str, texts: list[str]) -> str:
    """`text` with the shared parts of `texts`, the scripts in their order."""
    text = text[: text.index(COMMON)] + texts[0][texts[0].index(COMMON) :]
    text = FLAGS.sub(lambda _: FLAGS.search(texts[0])[0], text)
    blocks = {}
    for other in texts:
        for block in BLOCK.finditer(other):
            blocks.setdefault(block[1], block[0])
    text = BLOCK.sub(lambda block: blocks[block[1]], text)
    return LINES.sub(method_lines(text), text)


def different() -> dict[Path, str]:
    texts = [path.read_text() for path in SCRIPTS]
    fixed = {path: repaired(text, texts) for path, text in zip(SCRIPTS, texts, strict=True)}
    return {path: text for path, text in fixed.items() if text != path.read_text()}


def test_shared_parts_are_the_same_text_in_every_script():
    assert not different(), "run `python tests/test_shared.py --fix`"


def test_every_script_says_where_its_method_is():
    for path in SCRIPTS:
        assert len(LINES.findall(path.read_text())) == 1, path


def test_a_difference_in_any_shared_part_is_found_and_repaired():
    texts = [path.read_text() for path in SCRIPTS]
    changed = texts[1].replace("class Policy(nn.Module):", "class Policy(nn.Module):  # mine")
    changed = changed.replace("eval_episodes: int = 25", "eval_episodes: int = 26")
    changed = changed.replace("def preference_loss(", "def loss_of_preferences(")
    assert changed.count("# mine") == changed.count("= 26") == changed.count("loss_of_preferences(") == 1
    assert repaired(changed, texts) == texts[1]


def test_scripts_import_nothing_from_the_repository_and_nothing_imports_them():
    local = "data_gen|benchmark|baselines|paws_mlp|paws_transformer|tests|conftest"
    for path in SCRIPTS:
        assert not re.search(rf"^\s*(from|import) +({local})\b", path.read_text(), re.MULTILINE), path
    for path in (*ROOT.glob("data_gen/*.py"), *ROOT.glob("benchmark/*.py")):
        assert not re.search(r"^\s*(from|import) +paws_(mlp|transformer)", path.read_text(), re.MULTILINE), path


if __name__ == "__main__":
    found = different()
    if "--fix" in sys.argv:
        for path, text in found.items():
            path.write_text(text)
    for path in found:
        print(f"{'repaired' if '--fix' in sys.argv else 'differs'}: {path.relative_to(ROOT)}")
    sys.exit(bool(found) and "--fix" not in sys.argv)
