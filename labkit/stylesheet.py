"""How the page of a run looks: wide and narrow, light and dark, on paper."""

from __future__ import annotations

CSS = """
:root{color-scheme:light dark;--ink:#1d2129;--soft:#5c6470;--line:#dfe3e8;--page:#fff;--panel:#f5f7f9;
--good:#00805d;--bad:#c2500a;--half:#b87a00;--plain:#aab1bb;--info:#2a7ab0}
@media (prefers-color-scheme:dark){:root{--ink:#e6e8eb;--soft:#a2aab5;--line:#363c45;--page:#16191d;--panel:#1f2329;
--good:#2fc49a;--bad:#f2894a;--half:#e6ad3c;--plain:#5d6570;--info:#66b1e3}}
*{box-sizing:border-box}html{scroll-behavior:smooth}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
header,main,footer{max-width:1160px;margin:0 auto;padding:0 24px}header{padding-top:28px}
.kicker{margin:0;color:var(--soft)}h1{margin:0 0 .5em;font-size:1.9em;line-height:1.2}
h2{margin:2.2em 0 .4em;font-size:1.3em}h3{margin:1.6em 0 .4em;font-size:1.05em}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));gap:2px 18px;margin:0;
background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:8px 16px}
.facts div{padding:3px 0}dt{color:var(--soft);font-size:.82em}dd{margin:0}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;margin:18px 0 0;padding-bottom:8px;border-bottom:1px solid var(--line)}
a{color:var(--info)}nav a{text-decoration:none}
table{border-collapse:collapse;width:100%;font-size:.93em}
th{text-align:left;font-weight:600;color:var(--soft);font-size:.88em;vertical-align:bottom}
th,td{padding:6px 12px 6px 0;border-bottom:1px solid var(--line)}
td{vertical-align:top;font-variant-numeric:tabular-nums}
td[data-label="Off by"],td[data-label="Source"],td[data-label="Guess"],td[data-label="Formula"],td[data-label="For"],
td[data-label="Status"],td[data-label="Points"]{white-space:nowrap}
td:first-child,th:first-child{padding-left:10px}
tr.good td:first-child{box-shadow:inset 4px 0 var(--good)}
tr.bad td:first-child{box-shadow:inset 4px 0 var(--bad)}
tr.half td:first-child{box-shadow:inset 4px 0 var(--half)}tr.plain td:first-child{box-shadow:inset 4px 0 var(--plain)}
.failure{border-left:4px solid var(--bad);background:var(--panel);padding:8px 14px;margin:8px 0;overflow-wrap:anywhere}
pre{overflow-x:auto;font-size:.82em;line-height:1.4}code{font-size:.92em}
details{margin:6px 0}summary{cursor:pointer}.wide{overflow-x:auto}
svg{vertical-align:middle}svg path{stroke:var(--ink);fill:none}svg .axis{stroke:var(--plain)}
svg .band{fill:var(--good);opacity:.22}
.guess{fill:var(--info);background:var(--info)}.formula{fill:var(--half);background:var(--half)}
.dot{display:inline-block;width:10px;height:10px;border-radius:50%;margin:0 2px 0 8px}
.key{color:var(--soft);font-size:.88em}.key .dot:first-child{margin-left:0}
.gallery{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(480px,100%),1fr));gap:22px;align-items:start}
figure{margin:0}
figure img{display:block;max-width:100%;height:auto;background:#fff;border:1px solid var(--line);border-radius:6px}
figcaption{color:var(--soft);font-size:.84em;margin-top:6px;max-width:60em}
footer{color:var(--soft);font-size:.88em;padding-top:2.5em;padding-bottom:3em}
@media (max-width:700px){header,main,footer{padding-left:14px;padding-right:14px}thead{display:none}
table,tbody,tr,td{display:block}tr{border-bottom:1px solid var(--line);padding:8px 0}
td,td:first-child{border:0;padding:1px 0 1px 12px;box-shadow:none!important}
tr.good{box-shadow:inset 4px 0 var(--good)}tr.bad{box-shadow:inset 4px 0 var(--bad)}
tr.half{box-shadow:inset 4px 0 var(--half)}tr.plain{box-shadow:inset 4px 0 var(--plain)}
td,td:first-child{display:grid;grid-template-columns:7.2em 1fr;gap:.4em}td.empty{display:none}
td::before{content:attr(data-label);color:var(--soft);font-size:.86em}
td[data-label=""]{display:block}}
@media print{nav{display:none}details{display:block}}
"""
