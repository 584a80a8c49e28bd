"""Set up the course in .venv, once. Standard library only, and no syntax that an old Python cannot read, so that a
Python that is too old is told so in one line.

    python3 tools/setup.py [--torch-index URL] [--recreate]

Does nothing (and is fast) when .venv already has what requirements.lock and pyproject.toml say. An interrupted
set-up goes on where it stopped. `--torch-index` takes torch from another wheel index, for a driver that does not
carry the CUDA version of the default wheel; the choice is remembered. `--recreate` builds .venv anew, with the Python
that runs this script. The log is .venv/setup.log.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys

OLDEST = (3, 10)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, "labkit-setup.json")
LOG = os.path.join(VENV, "setup.log")
PYTHON = os.path.join(VENV, "Scripts" if os.name == "nt" else "bin", "python.exe" if os.name == "nt" else "python")


class SetupError(Exception):
    """What went wrong, in one line."""


def main():
    """Make or complete .venv; returns the exit code."""
    if sys.version_info < OLDEST:
        have = "%d.%d" % sys.version_info[:2]
        print("setup: Python 3.10 or newer is needed, this is %s (choose one: make setup PYTHON=python3.12)" % have)
        return 2
    parser = argparse.ArgumentParser(description="Set up the course in .venv.")
    parser.add_argument("--torch-index", default="", metavar="URL", help="take torch from this wheel index")
    parser.add_argument("--recreate", action="store_true", help="build .venv anew with the Python that runs this")
    options = parser.parse_args()
    try:
        return set_up(options.torch_index, options.recreate)
    except SetupError as error:
        print("setup: %s" % error, file=sys.stderr)
        return 1
    except OSError as error:
        print("setup: %s: %s" % (error.filename or VENV, error.strerror), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run it again to go on", file=sys.stderr)
        return 130


def set_up(torch_index, recreate):
    """Bring .venv to the state that the lock file describes."""
    stamp = read_stamp()
    torch_index = torch_index or stamp.get("torch_index", "")
    content = content_key()
    moved = stamp.get("root", ROOT) != ROOT  # the commands in .venv name the folder that they were made in
    other_python = recreate and stamp.get("python") != "%d.%d" % sys.version_info[:2]
    if not os.path.exists(PYTHON) or moved or other_python:
        if inside(sys.executable, VENV):
            raise SetupError("deactivate .venv first: it has to be built anew")
        make_venv()
        stamp = {}
    elif stamp.get("content") == content and stamp.get("torch_from", "") == torch_index:
        return 0
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    python = subprocess.check_output([PYTHON, "-c", ask], universal_newlines=True).strip()
    stamp.update(python=python, root=ROOT, torch_index=torch_index, content="unfinished")
    write_stamp(stamp)
    print("setup: installing into .venv with Python %s; once, a few minutes" % python, flush=True)
    if torch_index:
        if stamp.get("torch_from", "") != torch_index:
            # the same version from another index looks the same to pip: it has to be told to replace it
            pip("--force-reinstall", "--no-deps", "--index-url", torch_index, locked_torch())
        pip("--index-url", torch_index, locked_torch())
    stamp["torch_from"] = torch_index
    pip("-r", "requirements.lock")
    pip("--no-deps", "--no-build-isolation", "-e", ".")
    stamp["content"] = content
    write_stamp(stamp)
    print("setup: done; this machine, by labkit doctor:", flush=True)
    subprocess.call([PYTHON, "-m", "labkit.cli", "doctor"], cwd=ROOT)  # its blockers are for the reader to act on
    return 0


def content_key():
    """One hash over the files that decide what is installed."""
    key = hashlib.sha256()
    for name in ("requirements.lock", "pyproject.toml"):
        with open(os.path.join(ROOT, name), "rb") as file:
            key.update(file.read())
    return key.hexdigest()


def read_stamp():
    """What the last set-up did; empty when there was none."""
    try:
        with open(STAMP) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def write_stamp(stamp):
    """Keep `stamp`, whole or not at all."""
    partial = STAMP + ".part"
    with open(partial, "w") as file:
        json.dump(stamp, file)
    os.replace(partial, STAMP)


def make_venv():
    """An empty virtual environment with pip."""
    shutil.rmtree(VENV, ignore_errors=True)
    done = subprocess.run([sys.executable, "-m", "venv", VENV], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        hint = "this Python has no venv module (Debian, Ubuntu: apt install python3-venv)"
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        raise SetupError(hint if b"ensurepip" in done.stdout or not lines else "cannot make .venv: " + lines[-1])


def locked_torch():
    """The line of the lock file that pins torch."""
    with open(os.path.join(ROOT, "requirements.lock")) as file:
        return next(line.strip() for line in file if line.startswith("torch=="))


def pip(*arguments):
    """Run ``pip install`` with its whole output in the log and a short progress line on the terminal."""
    command = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    errors, shown = [], sys.stdout.isatty()
    with open(LOG, "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            command + list(arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            universal_newlines=True, encoding="utf-8", errors="replace",
        )  # fmt: skip
        for line in process.stdout:
            log.write(line)
            if line.startswith("ERROR"):
                errors.append(line.strip())
            words = line.split()
            if shown and words and words[0] in ("Collecting", "Downloading", "Installing", "Building"):
                print("\r  %-100.100s" % " ".join(words[:4]), end="", flush=True)
    if shown:
        print("\r%102s\r" % "", end="", flush=True)
    if process.wait():
        raise SetupError(explain(errors))


def explain(errors):
    """pip's failure in one line, with the usual cause."""
    text = " ".join(errors)
    if "No space left" in text:
        return "the disk is full (torch with CUDA takes about 7 GB); free some and run it again"
    if "Could not find a version" in text and "(from versions: none)" in text:
        return "no package index could be reached; check the network and run it again (log: .venv/setup.log)"
    return "%s (log: .venv/setup.log)" % (errors[0][:300] if errors else "pip failed")


def inside(path, folder):
    """Whether `path` lies in `folder`, links not followed."""
    return os.path.abspath(path).startswith(folder + os.sep)


if __name__ == "__main__":
    sys.exit(main())
