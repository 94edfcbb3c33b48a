"""Chat templates that take unbounded time or memory."""

from __future__ import annotations

LOOPS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='cat') %}{% for i in range(60) %}{% set ns.x = ns.x PLUS ns.x %}{% endfor %}"
HOSTILE = {
    "loops": LOOPS,
    "width": "{{ '%5000000000d'|format(1) }}",
    "width that is not known before": "{{ ('%' ~ messages|length ~ '000000000d')|format(1) }}",
    "operator": "{{ '%5000000000d' % 1 }}",
    "method": "{{ '{:5000000000d}'.format(1) }}",
    "repetition": "{{ 'cat' * 3000000000 }}",
    "doubled texts": DOUBLED.replace("PLUS", "~"),
    "nested lists": DOUBLED.replace("'cat'", "[1]").replace("ns.x PLUS ns.x", "[ns.x, ns.x]") + "{{ ns.x }}",
    "power": "{{ (10 ** (10 ** 9)) % 7 }}",
    "macros": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else '' }}{% endmacro %}{{ f(40) }}",
    "filters": "{{ 'cat'|center(5000000000) }}",
    "more filters": "{{ range(99999)|map('string')|map('center', 99999)|join }}",
    "words": "{{ lipsum(n=1000000) }}",
    "indented": "{{ messages|tojson(indent=2000000000) }}",
    "blocks": "{% set x %}cat{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40,
    "brackets": "{{ " + "(" * 100_000 + " }}",
    "conditions": "{% if messages %}" * 20_000 + "{% endif %}" * 20_000,
    "longest": "{% for i in range(99999) %}{{ 'the cat sat on the mat ' * 20 }}{% endfor %}",
}
