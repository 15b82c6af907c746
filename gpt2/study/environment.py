"""Make .venv as requirements.txt says: `python3 gpt2/study/environment.py`, as every target of the Makefile does first.

It needs only the standard library, and interpreters too old for the study must be able to read it, to say so. A stamp
inside .venv, written last, tells a finished one from one whose installation was cut short.
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
STAMP = VENV / "finished"
OLDEST = (3, 11)


def main():
    """Bring .venv up to date, or exit with one clear line."""
    if sys.version_info < OLDEST:
        here = sys.version.split()[0]
        sys.exit(f"error: Python 3.11 or newer is needed, this is {here}; name another: make PYTHON=python3.12")
    try:
        (ROOT / "build").mkdir(exist_ok=True)
        with open(str(ROOT / "build" / "venv.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            bring_up_to_date()
    except OSError as error:
        sys.exit(f"error: cannot make .venv: {error}")


def bring_up_to_date():
    """Create what is missing or broken, install what changed."""
    wanted = hashlib.sha256((ROOT / "requirements.txt").read_bytes() + str(ROOT).encode()).hexdigest()
    working = is_working()
    if working and STAMP.is_file() and STAMP.read_text() == wanted:
        return
    if not working:
        create()
    if STAMP.is_file():
        STAMP.unlink()
    install()
    packages = subprocess.check_output([str(PYTHON), "-c", "import site; print(site.getsitepackages()[0])"], text=True)
    (Path(packages.strip()) / "study.pth").write_text(f"{ROOT}\n")
    STAMP.write_text(wanted)


def is_working():
    """Whether .venv has an interpreter that runs and is new enough."""
    question = f"import sys; sys.exit(sys.version_info < {OLDEST})"
    try:
        return subprocess.call([str(PYTHON), "-c", question], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def create():
    """An empty .venv of this interpreter; whatever stood there goes."""
    print(f"making .venv with Python {sys.version.split()[0]}", flush=True)
    if VENV.is_symlink() or VENV.is_file():
        VENV.unlink()
    shutil.rmtree(str(VENV), ignore_errors=True)
    made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if made.returncode:
        shutil.rmtree(str(VENV), ignore_errors=True)
        reason = made.stdout.decode(errors="replace").strip().replace("\n", " ")[:300]
        sys.exit(f"error: python3 -m venv failed (on Debian: apt-get install python3-venv): {reason}")


def install():
    """Install the pinned packages, a line for each; pip keeps its downloads in build/ until all are there."""
    cache = ROOT / "build" / "pip"
    command = [str(PYTHON), "-m", "pip", "install", "--progress-bar", "off", "--no-input", "--cache-dir", str(cache)]
    command += ["--disable-pip-version-check", "-r", str(ROOT / "requirements.txt")]
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as pip:
        for line in pip.stdout:
            if line.startswith(("Collecting", "Installing", "Successfully")):
                print(line if len(line) < 100 else line[:100] + " ...\n", end="", flush=True)
    if pip.returncode:
        sys.exit("error: the packages of requirements.txt could not all be installed; the next make tries again")
    shutil.rmtree(str(cache), ignore_errors=True)


if __name__ == "__main__":
    main()
