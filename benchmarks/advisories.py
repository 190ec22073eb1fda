"""Known advisories for the versions of constraints.txt, by pip-audit: `make audit`. Exits with 1 where there is one."""

import json
import subprocess
import sys
from pathlib import Path

PINNED = Path(__file__).resolve().parents[1] / "constraints.txt"


def main() -> None:
    command = [sys.executable, "-m", "pip_audit", "-r", str(PINNED), "--no-deps", "--disable-pip", "--format", "json"]
    done = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True)
    if "No module named pip_audit" in done.stderr:
        print("pip-audit is not installed and cannot be fetched here: nothing was audited")
        return
    if not done.stdout.startswith("{"):
        print(f"pip-audit gave no answer, so nothing was audited: {done.stderr.strip().splitlines()[-1:]}")
        return
    packages = json.loads(done.stdout)["dependencies"]
    known = [package for package in packages if "vulns" in package]
    if not known:
        print(f"no advisory can be looked up here, for any of {len(packages)} packages: nothing was audited")
        return
    found = [(package, one) for package in known for one in package["vulns"]]
    for package, one in found:
        fixed = ", ".join(one["fix_versions"]) or "no version"
        print(f"{package['name']} {package['version']}: {one['id']}, fixed in {fixed}")
    print(f"{len(known)} of {len(packages)} packages audited, {len(found)} advisories")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
