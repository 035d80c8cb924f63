"""How much of this project there is, beside the aims of its design.

python tests/budget.py
"""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLD_STARTS = {  # interpreters that the tests of a file may start, 40 in all; others none
    "cli/test_bad_input.py": 2,
    "evidence/test_benchmarks.py": 2,
    "evidence/test_figures.py": 1,
    "evidence/test_gpu_evidence.py": 3,
    "evidence/test_package.py": 7,
    "evidence/test_truth.py": 3,
    "evidence/test_tuning.py": 1,
    "process/test_demo.py": 1,
    "process/test_launch.py": 5,
    "ranks/test_distributed.py": 1,
    "unit/test_device.py": 3,
    "unit/test_training.py": 2,
}
AIMS = {  # non-blank lines, docstrings included
    "product": 20_500,
    "cli": 2_100,
    "training": 3_100,
    "figures": 1_600,
    "tuning": 1_200,
    "benchmarks": 2_600,
    "optimizers": 1_500,
    "distributed": 1_300,
    "tests": 10_000,
}


def count(files: list[str]) -> int:
    """Return the number of lines that are not blank."""
    texts = ((ROOT / name).read_text(encoding="utf-8") for name in files)
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())


def main() -> None:
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    python = [name for name in files if name.endswith(".py")]
    product = [name for name in python if not name.startswith("tests/")]
    rows = [("", "now", "aim")]
    for part, aim in AIMS.items():
        of_part = [name for name in python if name.startswith(f"{part}/")]
        rows.append((f"lines of {part}", count(product if part == "product" else of_part), aim))
    words = {
        name: len((ROOT / name).read_text(encoding="utf-8").split())
        for name in files
        if name.endswith(".md")
    }
    rows += [
        ("words of docs/", sum(n for name, n in words.items() if name.startswith("docs/")), 18_000),
        ("words of README", words["README.md"], 900),
        ("files in figures/logs", sum(name.startswith("figures/logs/") for name in files), 80),
    ]
    for row in rows:
        print(f"{row[0]:<24}{row[1]:>8}{row[2]:>8}")


if __name__ == "__main__":
    main()
