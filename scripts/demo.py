#!/usr/bin/env python3
"""Starts a server on a free port, asks one question, prints the answer as it streams, and stops the server.

    scripts/demo.py [--question TEXT] [--port PORT] KWIRE_BINARY

The server is stopped by its process id, also on failure and on Ctrl-C. Standard library only.
"""
import argparse
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

START_LIMIT_S = 120
STOP_LIMIT_S = 15


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_until_healthy(server, base):
    start = time.monotonic()
    while time.monotonic() - start < START_LIMIT_S:
        if server.poll() is not None:
            sys.exit(f"demo: the server ended with status {server.returncode}; its messages are above")
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=2):
                return time.monotonic() - start
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    sys.exit(f"demo: the server was not healthy after {START_LIMIT_S} s")


def ask(base, model, question):
    """Prints the answer; returns the seconds to its first piece, the number of pieces, and the seconds in all."""
    body = {"model": model, "stream": True, "temperature": 0, "max_tokens": 64,
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": question},
            ]}
    request = urllib.request.Request(f"{base}/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    start, first, pieces = time.monotonic(), None, 0
    with urllib.request.urlopen(request, timeout=60) as response:
        for raw in response:
            line = raw.decode().strip()
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                break
            event = json.loads(data)
            if event.get("error"):
                sys.exit(f"\ndemo: the server said: {event['error']}")
            piece = (event["choices"][0]["delta"].get("content") or "") if event.get("choices") else ""
            if piece:
                first = first or time.monotonic()
                pieces += 1
                print(piece, end="", flush=True)
    print()
    if not pieces:
        sys.exit("demo: the answer was empty")
    return first - start, pieces, time.monotonic() - start


def stop(server):
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("binary")
    p.add_argument("--model", default="smollm2")
    p.add_argument("--question", default="What is the capital of France?")
    p.add_argument("--port", type=int, help="a free one by default")
    args = p.parse_args()
    port = args.port or free_port()
    base = f"http://127.0.0.1:{port}"
    command = [args.binary, "serve", args.model, "--host", "127.0.0.1", "--port", str(port)]
    print(f"$ kwire {' '.join(command[1:])}", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        server = subprocess.Popen(command)
    except OSError as e:
        sys.exit(f"demo: {args.binary} cannot be run ({e.strerror}); `make build` makes it")
    try:
        ready = wait_until_healthy(server, base)
        print(f"\nserver ready after {ready:.2f} s\n\nQ: {args.question}\nA: ", end="", flush=True)
        first, pieces, whole = ask(base, args.model, args.question)
        print(f"\nfirst token after {first * 1000:.0f} ms, {pieces} pieces in {whole:.2f} s")
    except (urllib.error.URLError, OSError) as e:
        sys.exit(f"demo: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        stop(server)


if __name__ == "__main__":
    main()
