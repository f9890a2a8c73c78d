"""Every command that writes, for rounds of kills."""

from __future__ import annotations

from dataclasses import dataclass

from tools.fuzz.materials import ONE, PLAIN, STREAM, TEXT


@dataclass(frozen=True)
class Writer:
    """A command that writes.

    Attributes:
        needs: names of the material that it reads.
        command: its words; it writes `out` or `out.json`, and `--force` goes with it.
        states: hidden or named beside the output, what an interrupted run may keep to go on from.
        same: whether two runs give the same bytes.
        of: what tells it from others of its command, in a word or two.
        served: a directory of the material that a hub on loopback has, whose cache is `cache`.
    """

    needs: tuple[str, ...]
    command: str
    states: tuple[str, ...] = ()
    same: bool = True
    of: str = ""
    served: str = ""

    @property
    def name(self) -> str:
        """As it is called in the table."""
        return f"{self.command.partition(' ')[0]} {self.of}".strip()


STATES = (".out.json.partial", ".out.json.layers")

WRITERS = (
    Writer(("moe", "gates.json"), "prune-experts moe --gates gates.json --ratio 0.5 -o out"),
    Writer(("moe",), "prune-heads moe --metric random --ratio 0.5 --dtype float16 -o out"),
    Writer(("moe",), "share-ffn moe --preset SharedEncSharedDec --dense-only -o out"),
    Writer(("m2m_100", "text.txt"), "trim-vocabulary m2m_100 --text text.txt -o out"),
    Writer(
        ("gpt2",), "factorize-embeddings gpt2 --map-dim 4 --expand-dim 12 --max-groups 2 --epochs 3 -o out"
    ),
    Writer(("m2m_100",), "prune-layers m2m_100 --remove encoder:1 -o out"),
    Writer(("m2m_100",), "prune-ffn m2m_100 --metric norms --ratio 0.5 -o out"),
    Writer(("m2m_100",), "share-attention m2m_100 --encoder share -o out"),
    Writer(
        ("quantised-gptq",), "prune-experts quantised-gptq --metric aimer --ratio 0.5 -o out", of="quantised"
    ),
    Writer((), STREAM, of="--stream", served="moe-sharded"),
    Writer(
        ("m2m_100", "data"),
        f"finetune m2m_100 {TEXT} --steps 8 --eval-every 2 --warmup 1 -o out",
        ("out.training",),
        same=False,  # the result is; OUTPUT.finetune.json holds times
    ),
    Writer(
        ("mixture", "text.txt"),
        f"finetune mixture {PLAIN} --valid-text text.txt --steps 4 --eval-every 2 --warmup 1 -o out",
        ("out.training",),
        same=False,
        of="of a mixture",
    ),
    Writer(("moe", "data"), f"collect-gates moe {ONE} -o out.json", STATES),
    Writer(("moe", "data"), f"collect-gates moe {ONE} --memory 4GiB -o out.json", STATES, of="--memory"),
    Writer(
        ("mixture", "text.txt"),
        "collect-gates mixture --text a=text.txt --device cpu --mean-outputs -o out.json",
        STATES,
        of="of texts",
    ),
    Writer(("moe", "data"), f"score-heads moe {ONE} -o out.json"),
    Writer(
        ("moe", "data"),
        f"evaluate moe {ONE} --beam 2 --max-new-tokens 8 --bootstrap 20 -o out.json",
        (".out.json.partial",),
        same=False,
    ),
    Writer(
        ("gpt2", "text.txt"), f"evaluate gpt2 {PLAIN} --memory 4GiB -o out.json", same=False, of="--memory"
    ),
    Writer(("sentence", "text.txt"), f"evaluate sentence {PLAIN} -o out.json", same=False, of="embedding"),
    Writer(("heads.json", "other-heads.json"), "compare-heads heads.json other-heads.json -o out.json"),
    Writer(("gates.json",), "compare-languages gates.json --ratio 0.5 -o out.json"),
    Writer(
        ("moe", "data"),
        "bench-latency moe --data data --split val --pairs eng_Latn-fra_Latn --device cpu --runs 2 --warmup 0"
        " --sentences 2 --max-new-tokens 4 --no-memory -o out.json",
        same=False,
    ),
    Writer(("moe", "reduced-1", "data"), f"compare-models moe reduced-1 {ONE} -o out.json"),
    Writer(("gates.json", "heads.json", "evaluation.json", "moe"), "report . -o out.html"),
    Writer(("moe", "data", "recipe.yaml"), "run recipe.yaml", (".prunecli",), same=False),
)
"""Every command that writes, on tiny models."""
