"""How the pages look, and the few lines that filter their tables. No page needs anything from outside."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--fg:#1d232b;--dim:#5b6673;--bg:#fff;--card:#f5f6f8;--line:#dde1e6;--frame:#e9ecf0;
--bad:#b3261e;--c0:#9fc0ea;--c1:#f6bf86;--c2:#a5d3a0;--c3:#d8b4de;--c4:#f2a9a4;--c5:#98d6d4;--c6:#ead27c;--c7:#cbb69f;
--c8:#bfc6ce;--bar:#4b7fc0}
@media (prefers-color-scheme:dark){:root{--fg:#e4e8ed;--dim:#9aa5b1;--bg:#14181d;--card:#1d232a;--line:#323a44;
--frame:#272e37;--bad:#ff8a80;--c0:#2f5d93;--c1:#8f5a1c;--c2:#33703a;--c3:#74467c;--c4:#8f3a35;--c5:#22706e;--c6:#796412;
--c7:#6a533a;--c8:#4a535e;--bar:#7fb0ee}}
*{box-sizing:border-box}[hidden]{display:none!important}
body{margin:0 auto;max-width:1280px;padding:16px;background:var(--bg);color:var(--fg);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.35em;margin:0;overflow-wrap:anywhere}h2{font-size:1.1em;margin:1.8em 0 .5em}
h3{font-size:1em;margin:1.2em 0 .4em;overflow-wrap:anywhere}
p{margin:.3em 0;overflow-wrap:anywhere}.dim{color:var(--dim)}.bad{color:var(--bad)}
.tiles{display:flex;flex-wrap:wrap;gap:8px;margin:14px 0}
.tile{background:var(--card);border-radius:8px;padding:8px 14px;min-width:92px}
.tile b{display:block;font-size:1.25em;white-space:nowrap}.tile span{color:var(--dim);font-size:.85em}
svg{display:block;max-width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:var(--fg);pointer-events:none}
svg .size{fill:var(--dim)}svg rect.frame{fill:var(--frame)}svg rect:hover{stroke:var(--fg);stroke-width:1}
.narrow{display:none}
.c0{fill:var(--c0);background:var(--c0)}.c1{fill:var(--c1);background:var(--c1)}.c2{fill:var(--c2);background:var(--c2)}
.c3{fill:var(--c3);background:var(--c3)}.c4{fill:var(--c4);background:var(--c4)}.c5{fill:var(--c5);background:var(--c5)}
.c6{fill:var(--c6);background:var(--c6)}.c7{fill:var(--c7);background:var(--c7)}.c8{fill:var(--c8);background:var(--c8)}
.share{display:flex;height:22px;border-radius:5px;overflow:hidden;margin:6px 0 10px}.share i{min-width:1px}
.key{display:inline-block;width:.85em;height:.85em;border-radius:3px;margin-right:.5em;vertical-align:-1px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{text-align:left;color:var(--dim);font-weight:600;font-size:.85em}
th,td{padding:4px 14px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap}td.name{overflow-wrap:anywhere;min-width:12em}
td.s{white-space:nowrap}tr.fold td.name{color:var(--dim)}
.legend{width:auto}
.hist{fill:var(--bar);width:128px;height:26px}
input{font:inherit;width:100%;max-width:28em;padding:7px 10px;margin:4px 0 10px;border:1px solid var(--line);
border-radius:7px;background:var(--card);color:var(--fg)}
ul{padding-left:1.2em;margin:.3em 0}li{overflow-wrap:anywhere;margin:.25em 0;white-space:pre-line}
details{margin:.6em 0}summary{cursor:pointer;overflow-wrap:anywhere}
footer{margin:2.5em 0 1em;color:var(--dim);font-size:.85em}
@media screen and (max-width:700px){body{padding:12px;font-size:16px}.wide{display:none}.narrow{display:block}
table.cards,table.cards tbody,table.cards tr{display:block}
table.cards thead{display:none}table.cards tr{border-bottom:1px solid var(--line);padding:7px 0}
table.cards td{display:inline-block;border:0;padding:0 1em 0 0;text-align:left;white-space:normal;color:var(--dim)}
table.cards td:empty{display:none}table.cards td.name{display:block;color:var(--fg);font-weight:600}
table.cards td[data-t]::before{content:attr(data-t) " "}}
@media print{:root{--bg:#fff;--fg:#000;--dim:#444;--card:#f3f3f3;--line:#ccc;--frame:#eee;--c0:#9fc0ea;--c1:#f6bf86;
--c2:#a5d3a0;--c3:#d8b4de;--c4:#f2a9a4;--c5:#98d6d4;--c6:#ead27c;--c7:#cbb69f;--c8:#bfc6ce;--bar:#4b7fc0;--bad:#900}
body{max-width:none;padding:0;font-size:11px}input{display:none}svg,tr,.tile,li{break-inside:avoid}h2,h3{break-after:avoid}
thead{display:table-header-group}*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
""".strip()

SCRIPT = """
const box=document.getElementById("filter"),left=document.getElementById("left");
box.hidden=false;
const rows=[...document.querySelectorAll("table.cards tbody tr")];
const texts=rows.map(row=>row.textContent.toLowerCase());
box.addEventListener("input",()=>{
const words=box.value.toLowerCase().split(/\\s+/).filter(Boolean);
let shown=0;
rows.forEach((row,at)=>{row.hidden=!words.every(word=>texts[at].includes(word));shown+=!row.hidden});
left.textContent=words.length?shown+" of "+rows.length+" rows":"";
});
""".strip()
