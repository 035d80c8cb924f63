"""An entry script in which rank 1 has other flags, which are added to those of all ranks.

python one_rank_differs.py SCRIPT FLAGS -- FLAGS_OF_RANK_1
"""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    script, *flags = sys.argv[1:]
    at = flags.index("--")
    flags, other = flags[:at], flags[at + 1 :]
    sys.argv = [script, *flags, *(other if os.environ["RANK"] == "1" else [])]
    runpy.run_path(str(ROOT / script), run_name="__main__")
