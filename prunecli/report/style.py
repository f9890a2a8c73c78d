"""The page's style sheet: light and dark by the reader's setting, narrow screens, print. Nothing is fetched."""

from __future__ import annotations

SERIES = 8
"""Colours of series; a ninth series begins again with the first, and has another mark."""
STEPS = 9
"""Steps of a scale of colours, from low to high."""

_LIGHT = {
    "page": "#fcfcfb",
    "ink": "#16161a",
    "soft": "#55555e",
    "line": "#d5d5da",
    "band": "#f1f1f3",
    "link": "#1c5cab",
    "gone": "#e4e4e8",
    "bad": "#a02020",
}
_DARK = {
    "page": "#1a1a19",
    "ink": "#f3f3f1",
    "soft": "#b5b5bd",
    "line": "#45454b",
    "band": "#262629",
    "link": "#86b6ef",
    "gone": "#38383d",
    "bad": "#ee8d8d",
}
_SERIES_LIGHT = ("#2a78d6", "#0f8a60", "#a86f00", "#4a3aa7", "#d03b3b", "#b8437f", "#c4501c", "#55555e")
_SERIES_DARK = ("#5598e7", "#2fb183", "#d99a1c", "#a79df0", "#ee7d7d", "#e57fae", "#ee8a5c", "#b5b5bd")
_RISING = ("#e8f1fb", "#cde2fb", "#aecdf3", "#86b6ef", "#5e9ee8", "#3987e5", "#256abf", "#184f95", "#0d366b")
_AROUND = ("#184f95", "#3987e5", "#86b6ef", "#cde2fb", "#f0efec", "#fbd3d3", "#f09a9a", "#d94f4f", "#932020")
_AROUND_DARK = (
    "#86b6ef", "#5598e7", "#2f66ad", "#27405f", "#383835", "#5d3535", "#a54747", "#e66767", "#f5a3a3",
)  # fmt: skip

_RULES = """
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem 1rem 4rem;max-width:78rem;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:break-word}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 .3rem}
h2{font-size:1.35rem;margin:2.8rem 0 .6rem;padding-top:.6rem;border-top:1px solid var(--line)}
h3{font-size:1.08rem;margin:1.8rem 0 .4rem}
h4{font-size:1rem;margin:1.2rem 0 .3rem}
p{margin:.4rem 0;max-width:48rem}
a{color:var(--link)}
nav ul{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;padding:0;margin:.8rem 0;list-style:none}
code,ol.steps{font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.88em}
ol.steps{margin:.2rem 0 .8rem;padding-left:1.8rem}
ol.steps li{margin:.3rem 0}
code span{display:inline-block;max-width:100%;overflow-wrap:anywhere}
.headline,.bad{margin:.8rem 0 .2rem;padding-left:1.2rem}
.headline{font-size:1.15rem;line-height:1.6}
.bad{color:var(--bad)}
.soft,caption{color:var(--soft)}
.scroll{overflow-x:auto;margin:.8rem 0;scrollbar-width:thin;background:
linear-gradient(90deg,var(--page) 40%,transparent) left/3rem 100% local,
linear-gradient(270deg,var(--page) 40%,transparent) right/3rem 100% local,
linear-gradient(90deg,var(--line),transparent) left/.9rem 100% scroll,
linear-gradient(270deg,var(--line),transparent) right/.9rem 100% scroll;background-repeat:no-repeat}
.scroll:focus-visible{outline:2px solid var(--link);outline-offset:2px}
table{border-collapse:separate;border-spacing:0;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;padding-bottom:.3rem}
th,td{padding:.28rem .55rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
tbody th{font-weight:600;min-width:7rem;max-width:22rem}
th:first-child{padding-left:0}
thead th{font-weight:600;color:var(--soft);vertical-align:bottom}
thead th.n{white-space:normal}
.n{text-align:right;white-space:nowrap}
td{max-width:26rem}
figure{margin:1rem 0}
figcaption{font-size:.9rem;max-width:48rem;margin-bottom:.3rem;color:var(--ink)}
figure .scroll{margin:0}
.charts{display:flex;flex-wrap:wrap;gap:.5rem 2rem;align-items:flex-start}
.charts>*{min-width:0;overflow-wrap:anywhere;max-width:min(100%,460px)}
svg{display:block;max-width:none;font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
svg.fit{max-width:100%;height:auto}
figure.rows{max-width:44rem}
svg text{fill:var(--ink)}
svg text.soft{fill:var(--soft)}
svg text.name{paint-order:stroke;stroke:var(--page);stroke-width:4px;stroke-linejoin:round}
svg .axis{stroke:var(--soft);fill:none}
svg .grid,svg .edge{stroke:var(--line);fill:none}
svg .edge{stroke:var(--soft)}
svg .bold{font-weight:600}
svg .gone{fill:var(--gone)}
svg .kept{fill:var(--s0)}
svg .whisker{stroke:var(--ink);fill:none}
svg .node{fill:var(--page);stroke:var(--ink);stroke-width:1.5}
svg .here{fill:var(--ink)}
.key{display:flex;flex-wrap:wrap;align-items:center;gap:.1rem 1.1rem;padding:0;margin:.2rem 0;list-style:none;
font-size:.88rem}
.key svg{display:inline-block;vertical-align:-1px;margin-right:.35rem}
@media (max-width:34rem){body{padding:1rem .75rem 3rem}h1{font-size:1.4rem}h2{font-size:1.2rem}
th,td{padding:.28rem .4rem}table{font-size:.82rem}tbody th{min-width:5rem;max-width:9rem}
thead th:first-child,tbody th{position:sticky;left:0;background:var(--page)}}
@media print{
:root{--page:#fff}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}
body{max-width:none;padding:0;font-size:10.5pt}
nav{display:none}
h2,h3,h4{break-after:avoid}
figure,tr,svg{break-inside:avoid}
.scroll{overflow:visible}
.scroll svg{max-width:100%;height:auto}
table{font-size:8pt}
}
"""


def style_sheet() -> str:
    """The whole style sheet. Print is light whatever the screen is."""
    light = _variables(_LIGHT, _SERIES_LIGHT, _RISING, _AROUND)
    dark = _variables(_DARK, _SERIES_DARK, tuple(reversed(_RISING)), _AROUND_DARK)
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}" + _RULES + _classes()
    )


def _variables(
    base: dict[str, str], series: tuple[str, ...], rising: tuple[str, ...], around: tuple[str, ...]
) -> str:
    named = [
        *base.items(),
        *((f"s{index}", colour) for index, colour in enumerate(series)),
        *((f"q{index}", colour) for index, colour in enumerate(rising)),
        *((f"d{index}", colour) for index, colour in enumerate(around)),
    ]
    return "".join(f"--{name}:{colour};" for name, colour in named)


def _classes() -> str:
    series = "".join(
        f"svg .s{index}{{fill:var(--s{index})}}svg .l{index}{{stroke:var(--s{index});fill:none}}"
        for index in range(SERIES)
    )
    scales = "".join(
        f"svg .{scale}{step}{{fill:var(--{scale}{step})}}" for scale in "qd" for step in range(STEPS)
    )
    return f"{series}\n{scales}\n"
