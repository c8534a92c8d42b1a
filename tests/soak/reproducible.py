"""Builds the wheel twice, in folders of other names and depths, and compares the bytes."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
#: What was built, and what builds.
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "target", "dist", "*.so", "__pycache__", ".*_cache", ".hypothesis")


def build(folder: Path) -> Path:
    """The wheel of the sources in a folder, made there as `make wheel` makes it."""
    environment = Path(sys.prefix)
    subprocess.run(["make", "--no-print-directory", "wheel", f"VENV={environment}"], cwd=folder, check=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def parts(wheel: Path) -> dict[str, str]:
    """The digest of each file in a wheel, with its place, time and mode."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            f"{place} {entry.filename} {entry.date_time} {entry.external_attr:o}": hashlib.sha256(
                archive.read(entry)
            ).hexdigest()
            for place, entry in enumerate(archive.infolist())
        }


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="devicegraph-") as folder:
        copies = [Path(folder) / name for name in ("one", "another/and/deeper")]
        for copy in copies:  # both before either is built: somebody may be at work on the sources
            shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        first, second = map(build, copies)
        digests = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in (first, second)]
        if digests[0] == digests[1]:
            sys.stdout.write(f"{first.name}: two builds, the same {first.stat().st_size} bytes, sha256 {digests[0]}\n")
            return 0
        for part, _ in sorted(set(parts(first).items()) ^ set(parts(second).items())):
            sys.stdout.write(f"differs: {part}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
