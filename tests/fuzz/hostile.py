"""Values and pieces of text that nobody meant, for damage to files."""

import json
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 255, 1 << 31, 1 << 62, 1 << 63, 1 << 64, -(1 << 63), 10**40),
    *(0.0, 0.5, -1.5, 1e308, 1e-320, float("nan"), float("inf"), -float("inf")),
    *(
        "",
        " ",
        "0",
        "-1",
        "nan",
        "x" * 100_000,
        "\0",
        "a\0b",
        "\ud800",
        "\ufeff",
        "é\u0301" * 50,
        "\u202eabc",
    ),
    *(
        "../../etc/passwd",
        "/etc/passwd",
        "..",
        ".",
        "a/../../b",
        "C:\\x",
        "\x1b[31mred",
        "[bold]x[/]",
        "[/x]",
        "{layer}",
    ),
    *(
        "model.encoder.layers.0.ffn",
        "model.decoder.layers.99.ffn",
        "encoder",
        "float8_e4m3fn",
        "int8",
        "nllb-moe",
    ),
    *("bert", "gpt2", "t5", "prunecli-llama", "${x}", "%s", "__class__", "relu", "auto"),
    *([], [[]], [0], [0, 0], [-1], [1, "a"], [None], [1 << 70], [[[[[]]]]], ["a", "b"], list(range(64))),
    *(json.loads("[" * 400 + "]" * 400), json.loads('{"a":' * 300 + "1" + "}" * 300)),
    *({}, {"": 0}, {"a": {}}, {"version": 1}, {"version": 99}, {"0": "x", "00": "y"}),
)
"""What a field may hold that nobody meant."""

TEXT_DAMAGE = (
    "\0",
    "\ufeff",
    "\r",
    "\r\n",
    "\n\r\n",
    "\n\n\n",
    "\u2028",
    "\x0b\x0c\x1c\x85",
    "\u202e\u200b",
    "\ufffd",
    "e" + "\u0301" * 3000,
    "\U0001f600" * 50,
    "a" * 100_000,
    "a b " * 25_000,
    "\t",
    "\t\t\t",
    "<s></s><pad><unk>",
    "eng_Latn</s>",
    '{"label": 1}\n',
    "[bold]x[/bold] [/nothing]",
    "\x1b]0;title\x07\x1b[2J",
)
RAW_DAMAGE = (
    b"\xff",
    b"\xfe\xff",
    b"\xed\xa0\x80",
    b"\xc0\x80",
    b"\xf4\x90\x80\x80",
    b"\xe2\x82",
    b"\x80" * 9,
)
