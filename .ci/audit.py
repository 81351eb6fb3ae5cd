"""Ask for known vulnerabilities in what requirements/*.txt installs; without a network, say so and pass.

    python .ci/audit.py      with pip-audit installed in the same environment

The service is that of the package index. A package for which it has no answer is not counted as checked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    vulnerable = answered = 0
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--format", "json", "-r", path]
        result = subprocess.run(command, capture_output=True, text=True)
        if not result.stdout:
            print(f"{path.name}: not checked, no service answers: {result.stderr.strip().splitlines()[-1]}")
            continue
        packages = json.loads(result.stdout)["dependencies"]
        checked = [package for package in packages if "skip_reason" not in package]
        answered += len(checked)
        print(f"{path.name}: {len(checked)} of {len(packages)} packages checked")
        for package in checked:
            for found in package["vulns"]:
                vulnerable += 1
                mended = ", ".join(found["fix_versions"]) or "no version"
                print(f"  {package['name']} {package['version']}: {found['id']}, mended in {mended}")
    print(f"{vulnerable} known vulnerabilities" if answered else "not checked: no service answered for any package")
    return 1 if vulnerable else 0


if __name__ == "__main__":
    sys.exit(main())
