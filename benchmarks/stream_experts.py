"""`prunecli prune-experts --stream` of a model on a hub on loopback: time, memory, disk, bytes over the wire.

    python benchmarks/stream_experts.py /data/scratch --size 2GB --ratio 0.5
    python benchmarks/stream_experts.py /data/scratch --size 2GB --ratio 0.5 --latency 40 --rate 25MB

In the folder, which has to be empty and is left so: a Qwen3-MoE of random weights in bfloat16, 16 layers of 64 experts,
in shards, is pruned at random from its directory, streamed from the hub, and fetched whole from it and then pruned; by
turns, whole processes, each with an empty cache, and the results are compared byte for byte. The hub is a process of
its own; --latency is what it waits before each answer, in ms, --rate what each connection gets in a second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

import runs
from prune_mixture import made, sizes_of

from prunecli.tensors.quantities import bytes_text, parse_size

LAYERS, EXPERTS = 16, 64
COMMIT = "1" * 40
REPO = "org/mixture"
BLOCK = 1 << 20


def main() -> None:
    """Make, run by turns, print."""
    options = parse()
    if options.serve:
        serve(options)
        return
    options.work.mkdir(parents=True, exist_ok=True)
    sizes = sizes_of(parse_size(options.size), LAYERS, EXPERTS)
    with made(options.work / "source", sizes, "bfloat16") as source:
        served = [sys.executable, __file__, str(source), "--serve", "--latency", str(options.latency)]
        hub = subprocess.Popen(
            [*served, *(["--rate", options.rate] if options.rate else [])], stdout=subprocess.PIPE, text=True
        )
        try:
            assert hub.stdout is not None
            compare(options, source, hub.stdout.readline().strip())
        finally:
            hub.terminate()
            hub.wait()


def compare(options: argparse.Namespace, source: Path, url: str) -> None:
    """Each way of pruning, by turns."""
    cache, output = options.work / "cache", options.work / "out"
    ways = {
        "directory": [str(source)],
        "streamed": [REPO, "--stream"],
        "fetched whole": [REPO],
    }
    taken: dict[str, list[tuple[float, float, int, int]]] = {way: [] for way in ways}
    found: dict[str, str] = {}
    environment = {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    for _ in range(options.rounds):
        for way, arguments in ways.items():
            shutil.rmtree(cache, ignore_errors=True)
            shutil.rmtree(output, ignore_errors=True)
            os.sync()
            before = sent(url)
            command = [*runs.PRUNECLI, "prune-experts", *arguments, "--metric", "random"]
            ran = runs.run([*command, "--ratio", options.ratio, "--quiet", "-o", output], environment)
            disk = sum(
                path.stat().st_size for path in cache.rglob("*") if not path.is_symlink() and path.is_file()
            )
            taken[way].append((ran.seconds, ran.peak, disk, sent(url) - before))
            found[way] = weights_digest(output)
    if len(set(found.values())) > 1:
        sys.exit("the results differ")
    kept = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    held = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    print(
        f"{bytes_text(held)} of weights, {bytes_text(kept)} of them kept; median of {options.rounds} rounds"
    )
    for way, rounds in taken.items():
        seconds, peak, disk, wire = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(
            f"{way:14} {seconds:6.2f} s, peak {peak / 2**20:4.0f} MiB, {bytes_text(int(wire))} over the wire, "
            f"{bytes_text(int(disk))} in the cache"
        )
    shutil.rmtree(cache, ignore_errors=True)
    shutil.rmtree(output, ignore_errors=True)


def weights_digest(directory: Path) -> str:
    """Of the weight files."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
    return digest.hexdigest()


def sent(url: str) -> int:
    """Bytes of files that the hub has sent so far."""
    with urlopen(f"{url}/sent") as answer:
        return int(answer.read())


def serve(options: argparse.Namespace) -> None:
    """Be the hub: print its address, answer until the end."""
    files = {path.name: path for path in sorted(options.work.iterdir()) if path.is_file()}
    rate = parse_size(options.rate) if options.rate else None
    siblings = [
        {"rfilename": name, "size": path.stat().st_size, "blobId": etag(name), "lfs": lfs(name, path)}
        for name, path in files.items()
    ]
    total = [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if self.path == "/sent":
                self.answer(200, str(total[0]).encode())
                return
            time.sleep(options.latency / 1000)
            if self.path.startswith(f"/api/models/{REPO}"):
                self.answer(200, json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode())
            elif (name := self.path.rpartition("/")[2]) in files and "/resolve/" in self.path:
                self.file(name)
            else:
                self.answer(404, b"")

        def file(self, name: str) -> None:
            size = files[name].stat().st_size
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            start, stop = (int(wanted[1]), min(int(wanted[2] or size), size - 1) + 1) if wanted else (0, size)
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(stop - start))
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            self.send_header("ETag", f'"{etag(name)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.flush()
            begun, position = time.perf_counter(), start
            with files[name].open("rb") as source:
                while position < stop:
                    count = min(BLOCK, stop - position)
                    try:
                        position += os.sendfile(self.connection.fileno(), source.fileno(), position, count)
                    except OSError:
                        self.close_connection = True
                        break
                    if rate is not None:
                        time.sleep(max(0.0, (position - start) / rate - (time.perf_counter() - begun)))
            total[0] += position - start

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


def etag(name: str) -> str:
    """The name of a file's content; nothing changes here, so that the name of the file will do."""
    return hashlib.sha256(name.encode()).hexdigest()


def lfs(name: str, path: Path) -> dict[str, object] | None:
    """What the hub says of a large file."""
    large = {"sha256": etag(name), "size": path.stat().st_size, "pointerSize": 130}
    return large if name.endswith(".safetensors") else None


def parse() -> argparse.Namespace:
    """The command line."""
    parser = runs.parser(__doc__)
    parser.add_argument("work", type=Path, help="folder on the disk to measure")
    parser.add_argument("--size", default="2GB", help="of the experts")
    parser.add_argument("--ratio", type=float, default=0.5, help="fraction of the experts to remove")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.0, help="ms before each answer")
    parser.add_argument("--rate", default=None, help="bytes a second of each connection")
    parser.add_argument("--serve", action="store_true", help="be the hub of the folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
