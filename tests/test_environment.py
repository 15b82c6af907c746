"""`make` and its .venv: made when missing or broken, left alone when finished, never half made and called finished."""

import os
import shutil
import subprocess
import sys

import pytest

from gpt2.study import paths


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout that needs no packages, so that its .venv takes no network."""
    folder = tmp_path_factory.mktemp("venv") / "checkout with a space"
    (folder / "gpt2/study").mkdir(parents=True)
    for file in ("Makefile", "gpt2/__init__.py", "gpt2/study/environment.py"):
        shutil.copy(paths.ROOT / file, folder / file)
    (folder / "requirements.txt").write_text("# nothing\n")
    return folder


def make(folder, *words) -> subprocess.CompletedProcess:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *words], cwd=folder, env=clean, capture_output=True, text=True, timeout=120)


def test_help_names_every_target(checkout):
    done = make(checkout)
    targets = "reproduce test measure lab figures html bench lint clean".split()
    assert done.returncode == 0 and all(f"\n  {target} " in done.stdout for target in targets)


def test_a_missing_venv_is_made_and_a_finished_one_left_alone(checkout):
    first, second = make(checkout, "venv"), make(checkout, "venv")
    assert first.returncode == 0 and first.stdout.startswith("making .venv with Python 3."), first.stderr
    assert (second.returncode, second.stdout) == (0, "")
    asked = [checkout / ".venv/bin/python", "-c", "import gpt2; print(gpt2.__file__)"]
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # `make test` sets its own
    assert subprocess.check_output(asked, text=True, cwd="/", env=plain).strip() == str(checkout / "gpt2/__init__.py")


@pytest.mark.parametrize("damage", ["no interpreter", "killed while it was made"])
def test_a_broken_venv_is_made_again(checkout, damage):
    if damage == "no interpreter":
        for link in (checkout / ".venv/bin").glob("python*"):
            link.unlink()
    else:
        (checkout / ".venv").mkdir(exist_ok=True)
        (checkout / ".venv/installing").touch()
    done = make(checkout, "venv")
    assert done.returncode == 0 and "making .venv" in done.stdout
    assert make(checkout, "venv").stdout == ""


def test_a_failed_installation_is_one_clear_line_and_not_finished(checkout):
    (checkout / "requirements.txt").write_text("./no/such/package\n")
    for _ in range(2):
        done = make(checkout, "lint")
        assert done.returncode and "error: the packages of requirements.txt could not all be installed" in done.stderr
        assert not (checkout / ".venv/finished").exists() and (checkout / ".venv").exists()
    (checkout / "requirements.txt").write_text("# nothing again\n")
    assert make(checkout, "venv").returncode == 0 and (checkout / ".venv/finished").exists()


@pytest.mark.parametrize("python", ["no-such-python", "false"])
def test_a_wrong_python_is_one_clear_line(checkout, python):
    done = make(checkout, "venv", f"PYTHON={python}")
    assert done.returncode and done.stderr.startswith(f"error: {python} is not Python 3.11 or newer")


def test_two_makes_at_once_make_one_venv(checkout):
    shutil.rmtree(checkout / ".venv", ignore_errors=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    start = {"cwd": checkout, "env": clean, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(["make", "venv"], **start) for _ in range(2)]
    said = [one.communicate(timeout=120) for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert sum("making .venv" in out for out, _ in said) == 1


def test_a_python_without_our_packages_is_one_clear_line():
    bare = [sys.executable, "-S", "-m", "gpt2", "predict", "--gpu", "A40"]
    done = subprocess.run(bare, cwd=paths.ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: this Python has no torch; after `make venv` it is .venv/bin/python\n"
