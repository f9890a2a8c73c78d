"""Commands that the rounds run, on a model `{m}`; they write `out`, `out.json` or `out.html`, if anything."""

from __future__ import annotations

from tools.fuzz.materials import ONE, PLAIN, SERVED, STREAM, TEXT

TIMED = "--runs 1 --warmup 0 --sentences 2 --max-new-tokens 2 --no-memory --device cpu"
REWRITES = (
    "inspect {m}",
    "inspect {m} --json",
    "prune-heads {m} --metric random --ratio 0.5 -o out",
    "prune-heads {m} --metric random --count 1 --config-only -o out",
    "share-ffn {m} --preset OneWide --dense-only -o out",
    "share-ffn {m} --preset SharedEncSharedDec --dense-only -o out",
    "share-ffn {m} --preset Shared --width match --dtype bfloat16 -o out",
    "factorize-embeddings {m} --map-dim 4 --expand-dim 12 --max-groups 2 --epochs 0 -o out",
    "trim-vocabulary {m} --text text.txt -o out",
    "trim-vocabulary {m} --text text.txt --keep keep.txt --multiple-of 8 -o out",
    "prune-layers {m} --remove 1 -o out",
    "prune-layers {m} --remove encoder:1 -o out",
    "prune-layers {m} --metric last --count 1 -o out",
    "prune-ffn {m} --metric norms --ratio 0.5 --dense-only -o out",
    "prune-ffn {m} --metric norms --uneven --ratio 0.3 --dtype float16 -o out",
    "share-attention {m} --encoder share -o out",
    "share-attention {m} --decoder share --cross share --init first -o out",
)
MOE = (
    "inspect {m} --fit 100KiB",
    "prune-experts {m} --metric random --ratio 0.5 -o out",
    "prune-experts {m} --metric random --fit 60KiB -o out --dtype float16",
    "prune-experts {m} --gates gates.json --ratio 0.25 -o out",
)
SEQ2SEQ = (
    f"score-heads {{m}} {ONE} -o out.json",
    f"score-heads {{m}} {ONE} --memory 4GiB -o out.json",
    f"score-heads {{m}} {ONE} --metric ablation --measure loss --max-sentences 2 -o out.json",
    f"evaluate {{m}} {ONE} --beam 2 --max-new-tokens 6 --bootstrap 5 -o out.json",
    f"evaluate {{m}} {ONE} --beam 1 --max-new-tokens 4 --bootstrap 0 --dtype int8 -o out.json",
    f"evaluate {{m}} {ONE} --beam 1 --max-new-tokens 4 --bootstrap 0 --hypotheses hyp --table out.csv -o out.json",
    f"compare-models {{m}} {{m}} {ONE} -o out.json",
    f"compare-models {{m}} {ONE} --random-baseline 1 --measure cka -o out.json",
    f"finetune {{m}} {TEXT} --steps 1 --eval-every 1 -o out",
    f"finetune {{m}} {TEXT} --steps 1 --eval-every 1 --lora 2 --teacher {{m}} -o out",
    f"finetune --from-scratch {{m}} {TEXT} --steps 1 --eval-every 1 -o out",
    f"prune-layers {{m}} {ONE} --metric cosine --count 1 -o out",
    f"prune-ffn {{m}} {ONE} --metric activation --dense-only --ratio 0.5 -o out",
    f"bench-latency {{m}} --data data --pairs eng_Latn-fra_Latn {TIMED} -o out.json",
)
LM = (
    f"evaluate {{m}} {PLAIN} -o out.json",
    f"evaluate {{m}} {{m}} {PLAIN} --context 8 --stride 4 --continuations 2 --max-new-tokens 3 -o out.json",
    f"evaluate {{m}} {PLAIN} --memory 4GiB -o out.json",
    f"score-heads {{m}} {PLAIN} -o out.json",
    f"score-heads {{m}} {PLAIN} --memory 4GiB -o out.json",
    f"compare-models {{m}} {PLAIN} -o out.json",
    f"prune-layers {{m}} {PLAIN} --metric perplexity --count 1 -o out",
    f"prune-ffn {{m}} {PLAIN} --metric activation-norm --ratio 0.5 -o out",
    f"evaluate {{m}} --task embedding {PLAIN} -o out.json",
    f"bench-latency {{m}} --text text.txt {TIMED} -o out.json",
    f"finetune {{m}} {PLAIN} --valid-text text.txt --steps 1 --eval-every 1 -o out",
    f"finetune --from-scratch {{m}} {PLAIN} --valid-text text.txt --steps 1 --eval-every 1 -o out",
)
CLASSIFIER = (
    "evaluate bert --labelled labelled.tsv --task classification -o out.json",
    "evaluate bert --text text.txt --task mlm -o out.json",
    "score-heads bert --labelled labelled.tsv --device cpu -o out.json",
    "finetune bert --labelled labelled.tsv --valid-labelled labelled.tsv --task classification"
    " --steps 1 --eval-every 1 -o out",
)
EMBEDDING = (
    f"evaluate sentence sentence {PLAIN} -o out.json",
    "evaluate sentence --labelled pairs.tsv --task embedding --device cpu -o out.json",
    f"evaluate sentence --task embedding {ONE} -o out.json",
    f"finetune sentence {PLAIN} --valid-text text.txt --steps 1 --eval-every 1 -o out",
    "prune-heads sentence --metric random --ratio 0.5 -o out",
    "trim-vocabulary sentence --text text.txt -o out",
    "prune-layers sentence --remove 1 -o out",
    "factorize-embeddings sentence --map-dim 4 --expand-dim 12 --max-groups 2 --epochs 0 -o out",
)
CUTS = (
    "inspect {m}",
    "inspect {m} --fit 60KiB --json",
    "prune-experts {m} --metric random --ratio 0.5 -o out",
    "prune-experts {m} --metric aimer --ratio 0.5 -o out",
    "prune-experts {m} --gates mixture-gates.json --ratio 0.5 -o out",
    "prune-experts {m} --metric random --fit 60KiB --active 1 --mtp drop -o out",
    "prune-layers {m} --remove 1 -o out",
    "trim-vocabulary {m} --text text.txt -o out",
)
MIXTURE = (
    *CUTS,
    "collect-gates {m} --text a=text.txt --text b=chats.jsonl --device cpu -o out.json",
    "collect-gates {m} --text a=text.txt --device cpu --memory 4GiB -o out.json",
    f"evaluate {{m}} --task lm {PLAIN} -o out.json",
    f"evaluate {{m}} --task lm {PLAIN} --memory 4GiB -o out.json",
    f"finetune {{m}} {PLAIN} --valid-text text.txt --steps 1 --eval-every 1 -o out",
    f"finetune {{m}} {PLAIN} --valid-text text.txt --steps 1 --eval-every 1 --train routers -o out",
)
EXPLAINING = (
    "explain {m}",
    "explain {m} --json",
    "explain {m} expert 3 of encoder layer 1",
    "explain {m} expert 0 --json",
    "explain {m} head 1 of layer 0",
    "explain {m} unit 5 of layer 1 --json",
    "explain {m} layer 1",
    "explain {m} token 7",
    "explain {m} expert 99999999999999999999 of layer -1",
    "report . -o out.html",
    "prune-heads {m} --metric random --ratio 0.5 --explain -o out",
    "trim-vocabulary {m} --text text.txt --explain -o out",
    "inspect {m}",
)
STREAMED = (
    f"inspect {SERVED}",
    f"prune-experts {SERVED} --metric random --ratio 0.5 -o out",
    STREAM,
    f"prune-layers {SERVED} --remove 1 --stream -o out",
    f"trim-vocabulary {SERVED}@main --text text.txt --stream -o out",
)
