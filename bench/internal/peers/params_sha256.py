"""Prints the params_sha256 of a run from its model.safetensors:

    python3 bench/peers/params_sha256.py RUN_DIR

and, where the folder holds a summary.json, compares: exit status 1 if they
differ. Needs NumPy, and nothing of Soliton.
"""

import json
import pathlib
import sys

from soliton import model_file, params_sha256, read_safetensors


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    file = model_file(sys.argv[1])
    digest = params_sha256(read_safetensors(file))
    summary = file.parent / "summary.json"
    if not summary.exists():
        print(digest)
        return
    claimed = json.loads(pathlib.Path(summary).read_text())["params_sha256"]
    print(digest, "as in summary.json" if digest == claimed else f"but summary.json says {claimed}")
    sys.exit(digest != claimed)


if __name__ == "__main__":
    main()
