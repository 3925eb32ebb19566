#!/usr/bin/env python3
"""Starts Kwire and measures it with `kwire bench`, beside the servers whose addresses are given.

    scripts/bench.py --kwire target/release/kwire [--suite cpu] [--only AB] [--rounds 3] [NAME=URL ...]

Prints Markdown tables; with other servers they have ratios. The servers take turns within each workload. Kwire is
stopped by its process id. Standard library only.
"""
import argparse
import subprocess
import sys

from demo import free_port, stop, wait_until_healthy


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kwire", required=True, help="the binary")
    p.add_argument("--model", default="smollm2")
    p.add_argument("--suite", default="cpu")
    p.add_argument("--only", help="letters of workloads")
    p.add_argument("--rounds", default="1")
    p.add_argument("--json", help="also write the reports here")
    p.add_argument("peers", nargs="*", metavar="[NAME=]URL")
    args = p.parse_args()
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([args.kwire, "serve", args.model, "--host", "127.0.0.1", "--port", str(port)])
    try:
        print(f"ready after {wait_until_healthy(server, base):.2f} s", file=sys.stderr)
        command = [args.kwire, "bench", "--suite", args.suite, "--rounds", args.rounds, f"kwire={base}", *args.peers]
        command += ["--only", args.only] if args.only else []
        command += ["--json", args.json] if args.json else []
        status = subprocess.run(command).returncode
    except KeyboardInterrupt:
        status = 130
    finally:
        stop(server)
    sys.exit(status)


if __name__ == "__main__":
    main()
