"""Still pictures of README and docs are figures of the committed notebooks: real runs, never drawn by hand.

    python tests/readme_images.py        # writes images/ from the outputs in notebooks/

test_readme.py holds each to those outputs.
"""

from __future__ import annotations

import base64
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]

# image -> (notebook, how the figure's alt text begins)
IMAGES = {
    "cliff_at_the_host.png": ("09_plan_at_scale", "Ethernet 100 Gb, one NIC per node"),
}


def figure(notebook: Path, alt: str) -> bytes:
    """The PNG of the notebook's figure whose alt text begins with `alt`.

    Raises:
        LookupError: the notebook's outputs hold no such figure.
    """
    for cell in nbformat.read(notebook, as_version=4).cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data and data.get("text/plain", "").startswith(alt):
                return base64.b64decode(data["image/png"])
    raise LookupError(f"{notebook.name} has no figure whose alt text begins with {alt!r}")


def main() -> None:
    """Write every image."""
    for name, (notebook, alt) in IMAGES.items():
        path = ROOT / "images" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(figure(ROOT / "notebooks" / f"{notebook}.ipynb", alt))
        print(f"images/{name}  from {notebook}")


if __name__ == "__main__":
    main()
