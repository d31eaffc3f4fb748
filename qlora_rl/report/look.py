"""How the page looks (`CSS`), and the read-out under the pointer (`JS`).

Colours are Okabe and Ito's (safe for colour-blind readers), darkened or lightened for contrast; runs also
differ by dash.
"""

CSS = """
:root { color-scheme: light dark;
  --paper: #fcfbf9; --card: #fff; --ink: #1c1f24; --soft: #5d636d; --line: #e3e1dc; --faint: #f3f1ed;
  --s0: #0a66a8; --s1: #c2500a; --s2: #00795a; --s3: #a5447f; --good: #00704f; --bad: #a8401a;
  --p0: #6f7885; --p1: #c3c8cf; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14161a; --card: #1a1d22; --ink: #e8e7e3; --soft: #a0a5ae; --line: #2e3238; --faint: #1f2329;
  --s0: #62b6f0; --s1: #f2a45a; --s2: #3fc59b; --s3: #e28fc0; --good: #4fcba2; --bad: #f0946c;
  --p0: #8b94a1; --p1: #474e58; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.55; font-size: 1rem;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
main { max-width: 54rem; margin: 0 auto; padding: 3.5rem 1.5rem 4rem; }
h1 { font-size: clamp(1.55rem, 1.1rem + 2vw, 2.3rem); line-height: 1.22; font-weight: 650; letter-spacing: -.018em;
  margin: .6rem 0 .9rem; text-wrap: balance; }
h2 { font-size: 1.2rem; line-height: 1.3; font-weight: 650; letter-spacing: -.008em; margin: 0 0 .3rem; }
h3 { font-size: .95rem; font-weight: 650; margin: 1.8rem 0 .5rem; }
a { color: var(--s0); } p { margin: 0 0 .8rem; } p, li { max-width: 44rem; }
section { margin-top: 3.6rem; }
.soft, .caption, .meta, footer { color: var(--soft); } .caption { font-size: .93rem; margin-bottom: 1.1rem; }
.meta { font-size: .85rem; display: flex; flex-wrap: wrap; gap: .2rem .9rem; align-items: center; }
.chip { border: 1px solid var(--line); border-radius: 1rem; padding: .02rem .65rem; color: var(--ink); }
.chip.failed, .chip.interrupted { border-color: var(--bad); color: var(--bad); }
.live { font-size: .85rem; color: var(--soft); border: 1px solid var(--line); border-radius: .4rem;
  background: var(--card); padding: .35rem .75rem; margin: 0 0 1.6rem; max-width: none; }
.lead { font-size: 1.06rem; color: var(--soft); }
.note { border-left: 3px solid var(--s1); background: var(--faint); padding: .6rem .9rem; font-size: .93rem;
  margin: 1.2rem 0; }
.note li { max-width: none; white-space: pre-wrap; }
.note h3 { margin: 0; } .note ul { margin: .3rem 0 0; padding-left: 1.1rem; }
.tiles { display: grid; grid-template-columns: repeat(3, 1fr); gap: 1px; background: var(--line);
  border: 1px solid var(--line); border-radius: .6rem; overflow: hidden; margin: 2rem 0 1rem; padding: 0; }
.tiles.two { grid-template-columns: repeat(2, 1fr); } .tiles.two > div:last-child:nth-child(n) { grid-column: auto; }
.tiles > div:last-child:nth-child(3n+1) { grid-column: span 3; }
.tiles > div:last-child:nth-child(3n+2) { grid-column: span 2; }
.tiles > div { background: var(--card); padding: 1rem 1.15rem .95rem; min-width: 0; }
.tiles dt { font-size: .82rem; color: var(--soft); } .tiles dd { margin: 0; }
.tiles dd.big { font-size: 1.75rem; line-height: 1.3; font-weight: 620; letter-spacing: -.02em; }
.tiles dd.small { font-size: .82rem; color: var(--soft); }
.chart { margin: 0; } .yl, .xl { font-size: .78rem; color: var(--soft); }
.yl { margin-bottom: .55rem; } .xl { text-align: right; margin: 1.75rem .5rem 0 0; }
.plot { position: relative; height: clamp(200px, 34vw, 290px); margin: 0 .5rem 0 3.3rem; }
.plot svg { display: block; width: 100%; height: 100%; overflow: visible; }
.plot path { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; stroke-linecap: round; }
.plot .grid { stroke: var(--line); stroke-width: 1; stroke-linecap: butt; }
.plot .reference { stroke: var(--ink); stroke-width: 1.25; stroke-dasharray: 2 4; }
.s0 { --c: var(--s0); --dash: none; } .s1 { --c: var(--s1); --dash: 7 4; }
.s2 { --c: var(--s2); --dash: 2 4; } .s3 { --c: var(--s3); --dash: 10 3 2 3; }
.plot .thin { stroke: var(--c); stroke-width: 1; opacity: .3; } .plot .thin.s0 { opacity: .42; }
.plot .bold { stroke: var(--c); stroke-width: 2.25; stroke-dasharray: var(--dash); }
.yt, .xt, .rt { position: absolute; font-size: .78rem; line-height: 1; color: var(--soft); white-space: nowrap; }
.yt { right: calc(100% + .6rem); transform: translateY(-50%); } .yt sup { font-size: .78em; line-height: 0; }
.xt { top: calc(100% + .6rem); transform: translateX(-50%); }
.rt { right: .1rem; transform: translateY(-135%); color: var(--ink); background: var(--paper); padding: .1rem .25rem; }
.chart + .caption { margin: 1rem 0 0; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; padding: 0; margin: .5rem 0 0 3.3rem;
  font-size: .85rem; }
.key { display: inline-block; width: 1.9rem; height: 0; border-top: 3px solid var(--c); margin-right: .5rem;
  vertical-align: .25em; } .key.s1 { border-top-style: dashed; } .key.s2 { border-top-style: dotted; }
.cross { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft); pointer-events: none; }
.readout { position: absolute; top: .3rem; z-index: 1; pointer-events: none; background: var(--card);
  border: 1px solid var(--line); border-radius: .4rem; padding: .35rem .6rem; font-size: .78rem; white-space: pre;
  box-shadow: 0 2px 10px #0002; max-width: 100%; overflow: hidden; }
.readout b { color: var(--c); font-weight: 600; }
.bars { display: grid; gap: .2rem; font-size: .88rem; margin-bottom: 1.1rem; }
.bars > p { display: flex; justify-content: space-between; gap: 1rem; margin: .5rem 0 0; max-width: none; }
.bar { display: flex; height: 1.5rem; gap: 1px; } .bar > i { display: block; min-width: 2px; border-radius: 1px; }
.p0 { background: var(--p0); } .p1 { background: var(--p1); } .p2 { background: var(--ink); }
.p3 { background: var(--s1); } .p4 { background: var(--s2); }
.dot { display: inline-block; width: .7rem; height: .7rem; border-radius: 2px; margin-right: .5rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .42rem 1rem .42rem 0; border-bottom: 1px solid var(--line);
  vertical-align: baseline; font-weight: 400; } th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--soft); font-size: .82rem; vertical-align: bottom; }
tbody th { color: var(--soft); min-width: 6rem; }
.error { color: var(--soft); }
.num { text-align: right; white-space: nowrap; } td.main { font-weight: 620; } thead .num { white-space: normal; }
.sample { border: 1px solid var(--line); border-radius: .6rem; background: var(--card); margin-top: .9rem;
  padding: 1rem 1.15rem; } .sample > p { margin: 0; max-width: none; white-space: pre-wrap; }
.sample img { display: block; max-width: 10rem; max-height: 10rem; border-radius: .3rem; margin-top: .5rem; }
.sample .answer { font-size: .88rem; color: var(--soft); margin-top: .25rem; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1.2rem; margin-top: .8rem; } .pair > div { min-width: 0; }
.pair h4 { margin: 0 0 .25rem; font-size: .82rem; font-weight: 400; color: var(--soft); }
.mark { font-weight: 650; margin-left: .5rem; } .alone .mark { margin-left: 0; }
pre { font: .83rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; margin: 0;
  white-space: pre-wrap; background: var(--faint); border-radius: .4rem; padding: .6rem .75rem; max-height: 15rem;
  overflow: auto; }
details { border-top: 1px solid var(--line); } details:last-of-type { border-bottom: 1px solid var(--line); }
details.intro { border: 0; } details > :last-child { margin-bottom: 1.1rem; }
summary { cursor: pointer; padding: .65rem 0; font-weight: 600; font-size: .95rem; }
.intro summary { font-weight: 400; color: var(--s0); padding: .3rem 0; }
dl.words { display: grid; grid-template-columns: max-content 1fr; gap: .45rem 1.2rem; margin: .4rem 0;
  font-size: .93rem; }
dl.words dt { font-weight: 620; } dl.words dd { margin: 0; color: var(--soft); }
footer { font-size: .82rem; margin-top: 2.5rem; }
@media (max-width: 40rem) {
  main { padding: 1.6rem 1rem 3rem; } section { margin-top: 2.8rem; }
  .tiles, .tiles.two { grid-template-columns: 1fr 1fr; } .tiles > div { padding: .8rem .85rem; }
  .tiles dd.big { font-size: 1.4rem; } .tiles > div:last-child:nth-child(n) { grid-column: auto; }
  .tiles > div:last-child:nth-child(odd) { grid-column: 1 / -1; }
  .plot { margin-left: 2.7rem; height: 210px; } .legend { margin-left: 0; }
  .pair { grid-template-columns: 1fr; gap: .8rem; }
  dl.words { grid-template-columns: 1fr; gap: 0; } dl.words dd { margin-bottom: .5rem; }
  table { font-size: .82rem; } th, td { padding-right: .55rem; } tbody th { min-width: 4.4rem; overflow-wrap: normal; }
  .error { display: block; font-size: .8rem; } }
@media print { .cross, .readout { display: none; } section, .sample { break-inside: avoid; } }
"""

JS = """
for (const plot of document.querySelectorAll("[data-hover]")) {
  const data = JSON.parse(plot.dataset.hover), [low, high] = data.x;
  const make = (name) => {
    const made = plot.appendChild(document.createElement("div"));
    made.className = name; made.hidden = true;
    return made;
  };
  const cross = make("cross"), box = make("readout");
  const isPlain = (v) => v === 0 || (Math.abs(v) >= 1e-3 && Math.abs(v) < 1e6);
  const say = (v) => isPlain(v) ? String(+v.toPrecision(3)) : v.toExponential(1);
  const nearest = (s, at) => s.x.reduce((best, x, i) => Math.abs(x - at) < Math.abs(s.x[best] - at) ? i : best, 0);
  plot.addEventListener("pointermove", (event) => {
    const frame = plot.getBoundingClientRect();
    const part = Math.min(1, Math.max(0, (event.clientX - frame.left) / frame.width)), at = low + part * (high - low);
    box.textContent = data.l + " " + Math.round(at);
    for (const s of data.s) {
      const value = s.x.length ? s.y[nearest(s, at)] : null;
      if (value === null) continue;
      const mark = document.createElement("b"); mark.className = "s" + s.s; mark.textContent = say(value);
      box.append("\\n" + s.n + "  ", mark);
    }
    cross.style.left = 100 * part + "%"; cross.hidden = box.hidden = false;
    box.style.left = part < .5 ? `calc(${100 * part}% + 12px)` : "";
    box.style.right = part < .5 ? "" : `calc(${100 - 100 * part}% + 12px)`;
  });
  plot.addEventListener("pointerleave", () => { cross.hidden = box.hidden = true; });
}
"""
