"""Writes into the notebooks where they install efx from when they are opened alone.

    python -m launch.notebooks.stamp

That is the address of the git repository, `Repository` under [project.urls] of pyproject.toml;
without one the notebooks ask for it.
"""

import json
import pathlib
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def stamp(root):
    """Writes the address that a checkout's pyproject.toml has into its notebooks."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    address = tomllib.loads(text)["project"].get("urls", {}).get("Repository", "")
    for path in sorted((root / "launch/notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            for i, line in enumerate(cell["source"]):
                if line.startswith("SOURCE = "):
                    _, form = line.split("  # ", 1)
                    cell["source"][i] = f"SOURCE = {json.dumps(address)}  # {form}"
        written = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        path.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    stamp(ROOT)
