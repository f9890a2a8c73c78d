"""Commands that stream the tensors of an NLLB-MoE need neither torch nor transformers."""

import json
import subprocess
import sys

from tests.tiny import tiny_nllb_moe

CHILD = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"{name} is wanted, and must not be", name=name)

absent = {"transformers", "torch", "tokenizers", "accelerate"}
sys.meta_path.insert(0, Absent())
from prunecli.commands.app import main

found = []
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as end:
        found.append([arguments[0], end.code or 0])
print(json.dumps(found))
"""


def test_what_only_rewrites(tmp_path):
    experts = tiny_nllb_moe(tmp_path / "experts")
    drawn = ["--metric", "random", "--ratio", "0.5", "--output"]
    calls = [
        ["inspect", str(experts)],
        ["inspect", str(experts), "--json"],
        ["prune-experts", str(experts), *drawn, str(tmp_path / "1")],
        ["prune-experts", str(experts), *drawn, str(tmp_path / "2"), "--dry-run"],
        ["prune-heads", str(experts), *drawn, str(tmp_path / "3")],
        ["share-ffn", str(experts), "--preset", "SharedEnc", "--dense-only", "--output", str(tmp_path / "4")],
    ]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(calls)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [[call[0], 0] for call in calls], done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3", "4", "experts"]
