"""Make .venv as requirements.txt says: `python3 gpt2/study/environment.py`, as every target of the Makefile does first.

It needs only the standard library. Two marks tell how far a .venv is: `installing` stands in it while it is being made,
so that one whose making was killed is made anew; `finished` holds the hash of the requirements it meets.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
FINISHED = VENV / "finished"
INSTALLING = VENV / "installing"
OLDEST = (3, 11)


def main() -> None:
    """Bring .venv up to date, or exit with one clear line."""
    if is_finished():
        return
    try:
        (ROOT / "build").mkdir(exist_ok=True)
        with open(ROOT / "build" / "venv.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_finished():  # another make may have made it while we waited
                bring_up_to_date()
    except OSError as error:
        sys.exit(f"error: cannot make .venv: {error}")


def bring_up_to_date() -> None:
    """Create what is missing or broken, install what changed."""
    if not is_working():
        create()
    FINISHED.unlink(missing_ok=True)
    install()
    packages = subprocess.check_output([PYTHON, "-c", "import site; print(site.getsitepackages()[0])"], text=True)
    (Path(packages.strip()) / "study.pth").write_text(f"{ROOT}\n")  # kernels of this .venv find the package
    FINISHED.write_text(wanted())


def wanted() -> str:
    """What a finished .venv says: a hash of the requirements it meets and of the place it was made for."""
    return hashlib.sha256((ROOT / "requirements.txt").read_bytes() + str(ROOT).encode()).hexdigest()


def is_finished() -> bool:
    """Whether .venv works and meets the requirements."""
    return FINISHED.is_file() and FINISHED.read_text() == wanted() and is_working()


def is_working() -> bool:
    """Whether .venv has an interpreter that runs and is new enough, and was not given up half made."""
    if INSTALLING.exists():
        return False
    question = f"import sys; sys.exit(sys.version_info < {OLDEST})"
    try:
        return subprocess.call([PYTHON, "-c", question], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def create() -> None:
    """An empty .venv of this interpreter; whatever stood there goes."""
    print(f"making .venv with Python {sys.version.split()[0]}", flush=True)
    if VENV.is_symlink() or VENV.is_file():
        VENV.unlink()
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    INSTALLING.touch()
    made = subprocess.run([sys.executable, "-m", "venv", VENV], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if made.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        reason = " ".join(made.stdout.decode(errors="replace").split())[:300]
        hint = " (on Debian: apt-get install python3-venv)" if "ensurepip" in reason else ""
        sys.exit(f"error: python3 -m venv failed{hint}: {reason or f'exit status {made.returncode}'}")


def install() -> None:
    """Install the pinned packages, a line for each; pip keeps its downloads in build/ until all are there."""
    cache = ROOT / "build" / "pip"
    command = [PYTHON, "-m", "pip", "install", "--progress-bar", "off", "--no-input", "--cache-dir", cache]
    command += ["--disable-pip-version-check", "-r", ROOT / "requirements.txt"]
    INSTALLING.touch()
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as pip:
        for line in pip.stdout:
            if line.startswith(("Collecting", "Installing", "Successfully")):
                print(line.strip()[:100], flush=True)
    INSTALLING.unlink()
    if pip.returncode:
        sys.exit("error: the packages of requirements.txt could not all be installed; the next make tries again")
    shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    main()
