//! Renderings of beginnings that are found in one rendering of the whole equal those by themselves, and so do
//! the masks: for our templates, for templates that look ahead by any means, and for those of the folder that
//! the variable CHAT_TEMPLATES names, if it is set.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::{MaskOptions, TrainOn, samples};
use crate::error::{DropReason, RowFailure};
use crate::row::{ChatRow, Conversation, RowFormat, read_row};
use crate::template::{Literals, Prepared, Template, TemplateSettings, Templates};

const SPECIAL: [&str; 6] = ["<|im_start|>", "<|im_end|>", "</s>", "<end_of_turn>", "<|eot_id|>", "<|end|>"];

/// Loops whose renderings are found together.
const FORWARD: &[&str] = &[
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{{ bos_token }}{% for m in messages %}{{ loop.index }}{% if loop.first %}first{% endif %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}",
    "{%- for m in messages -%}\n  [{{ m.role }}] {{ m.content }}<|im_end|>\n  {%- endfor -%}\n  tail  {% if add_generation_prompt -%}\n [assistant] {%+ endif +%}\n  \n",
    "{% for m in messages %}\n[{{ m.role }}]{{ m.content }}<|im_end|>\n{% endfor %}\n  {% if add_generation_prompt %}\n[assistant]{% else %}\nend\n  {% endif %}\n  ",
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if messages[-1].role == 'user' %}U{{ messages|length }}{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.role %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{{ ns.last }}{% if add_generation_prompt and ns.last != 'tool' %}[assistant]{% endif %}",
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% macro head(role) %}[{{ role }}]{% endmacro %}{% for m in messages %}{{ head(m.role) }}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}",
    "{% for m in messages %}{% if loop.index0 > 0 and messages[loop.index0 - 1].role == m.role %}same{% endif %}{{ loop.previtem.role if loop.previtem }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'system' %}{% continue %}{% endif %}[{{ m.role }}]{{ c }}<|im_end|>{% endfor %}{{ c }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_{% if m.role != 'assistant' %}end|>{% endif %}{% endfor %}end|>{% if add_generation_prompt %}[assistant]{% endif %}",
    "{# {% for x in messages %} #}{% for m in messages %}{{ '{% endfor %}' }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{# {% endfor %} #}{{ \"}}\" }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}{% if m.role == 'tool' and (loop.last or messages[loop.index0 + 1].role != 'tool') %}end{% endif %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.a = ns.a + m.content %}{% endif %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a=false) %}{%- for m in messages -%}\n {%- if m.role == 'system' -%} {% set ns.a = m.content %}{% break %} {%- endif -%} \n{%- endfor %}\n  {% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    // A test is no call.
    "{% set ns = namespace(n=0) %}{% macro f() %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endmacro %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if messages|length is not divisibleby(2) or ns.n is divisibleby(3) %}{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}",
];

/// Templates that learn the number of messages early, or whose tail is no copy.
const DECEIVING: &[&str] = &[
    // The end of the loop, and the message after.
    "{% for m in messages %}{% if loop.last %}last{% endif %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}{{ loop.length }}{{ loop.revindex }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}{{ loop.revindex0 }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}{{ loop['last'] }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}{% set l = loop %}{{ l.last }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% macro f(l) %}{{ l.last }}{% endmacro %}{% for m in messages %}{{ f(loop) }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}{{ [loop]|map(attribute='last')|first }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}{{ loop.nextitem.role if loop.nextitem }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}{% for x in [1] %}{{ loop.last }}{% endfor %}{% if messages[loop.index] is defined %}more{% endif %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{{ 'more' if loop.index < messages|length }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    // The list.
    "{{ messages|length }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{{ messages[-1].role }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{{ messages[3].role }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set n = messages %}{{ (n|last).role }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{{ messages[1:]|length }}{% for m in messages[1:] %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages[:3] %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages[::2] %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages[::-1] %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages|reverse %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages|sort(attribute='role') %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages|list %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages + messages[:1] %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages|selectattr('role', 'equalto', 'assistant') %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set messages = messages|rejectattr('role', 'equalto', 'tool')|list %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set later = messages[:99] %}{% for m in messages %}{% if loop.index == 3 %}{{ later|length }}{% endif %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(m=messages) %}{% for m in messages %}{% if loop.index == 2 %}{{ ns.m|length }}{% endif %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{{ ns.m|length }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set d = {'m': messages} %}{% for m in d.m %}{% if loop.index == 2 %}{{ d['m'][-1].role }}{% endif %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}{% if m == messages[-1] %}last{% endif %}{% if m in messages[2:] %}late{% endif %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}{{ messages.count(m) }}{{ messages.index(m) }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{{ messages is sequence }}{{ messages[1:] is sequence }}{{ messages is iterable }}{{ messages is string }}{{ messages is mapping }}{{ messages == messages }}{{ messages == [] }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{{ messages|tojson|length }}{{ (messages ~ '')|length }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{{ messages[0:][0].role }}{{ messages[1:][0].role }}{{ messages[1:][-1].role }}{{ messages[9:] is true }}{{ 'x' if messages[2:] }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% if messages[4:] %}many{% endif %}{% for m in messages[2:] %}[{{ m.role }}]{{ m.content }}<|im_end|>{% else %}none{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for messages in messages %}[{{ messages.role }}]{{ messages.content }}<|im_end|>{% endfor %}{{ messages|length }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages[1:][1:] %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    // Two loops, and loops in blocks.
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = ns.s + m.content %}{% endif %}{% endfor %}{{ ns.s }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% if m.role == 'user' and not ns.n %}{% set ns.n = loop.index %}{% endif %}{% endfor %}{% for m in messages %}{{ ns.n }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% for m in messages %}{{ m.role }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}{% for o in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ o.role }}{% endfor %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for i in range(messages|length) %}{% set m = messages[i] %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set all %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% endset %}{{ all|trim|upper }}<|im_end|>{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% filter replace('a', 'b') %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% endfilter %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% macro all() %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% endmacro %}{{ all() }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% macro wrap() %}{{ caller() }}{% endmacro %}{% call wrap() %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% endcall %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages recursive %}[{{ m.role }}]{{ m.content }}<|im_end|>{% if loop.depth < 2 and m.role == 'user' %}{{ loop(messages[:1]) }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% if messages %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}",
    // Tails.
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{{ m }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{{ loop is defined }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% set xtrain_prefix = 1 %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% set x = messages[1:] %}{{ x|length }}{{ x[0].role if x }}{{ (x|last).role if x }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% filter upper %}{% with n = messages|length %}{{ n }}{% endwith %}{{ messages|map(attribute='role')|join }}{% endfilter %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% set add_generation_prompt = not add_generation_prompt %}{% if not add_generation_prompt %}[assistant]{% endif %}",
    "{% set m = 'x' %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{{ m }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set c = 'x' %}{% for m in messages %}{{ c }}{% set c = m.role %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{{ c }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{{ ns.n }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(n=0) %}{% macro raise_exception() %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endmacro %}{% for m in messages %}{{ ns.n }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{{ raise_exception() }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(n=0) %}{% macro f() %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endmacro %}{% for m in messages %}{{ ns.n }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{{ f() }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(n=0) %}{% macro f() %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endmacro %}{% set ns.f = f %}{% for m in messages %}{{ ns.n }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{{ ns.f() }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set x = 'a' %}{% macro f() %}{{ x }}{% endmacro %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% set x = 'b' %}{{ f() }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% macro f() %}{% if add_generation_prompt %}P{% endif %}{% endmacro %}{% for m in messages %}{{ f() }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{{ f() }}",
    "{% macro f() %}{{ messages|length }}{% endmacro %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{{ f() }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt and messages|length > 3 %}{{ raise_exception('long') }}{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set p = add_generation_prompt %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if p %}[assistant]{% endif %}",
    "{% set add_generation_prompt = true %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% if loop.last and add_generation_prompt %}[assistant]{% endif %}{% endfor %}",
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% raw %}{% endfor %}{% endraw %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% with x = 1 %}{{ x }}{% endwith %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% for m in messages %}[{{ m.role }}]{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}{% if add_generation_prompt %}[assistant]{% generation %}x{% endgeneration %}{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}{% set a, ns.n = 1, ns.n + 1 %}{{ ns.n }}[assistant]{% endif %}",
    "{% set ns = namespace(n=0) %}{% macro f() %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endmacro %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}{{ f() }}[assistant]{% endif %}",
    "{% set ns = namespace(n=0) %}{% macro f() %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endmacro %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}{% if not f() %}x{% endif %}{{ ns.n }}[assistant]{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}{% set ns.n = ns.n + 1 %}{{ ns.n }}[assistant]{% endif %}",
    // Loops that gather.
    "{% set ns = namespace(a='') %}{% for m in messages %}{% set ns.a = m.role %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a=0) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a=0) %}{% for m in messages %}{% set ns.a = (ns.a + 1) % 2 %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = true if m.role == 'tool' else 1.0 if m.role == 'assistant' else 1 %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a=[]) %}{% for m in messages %}{% set ns.a = ns.a + [m.role] %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a=none) %}{% for m in messages %}{% if m.role == 'assistant' %}{% set ns.a = m %}{% endif %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% set o = ns %}{% for m in messages %}{% if m.role == 'assistant' %}{% set o.a = m.content %}{% endif %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% for m in messages %}{% set o = ns %}{% if m.role == 'assistant' %}{% set o.a = m.content %}{% set ns.b = 1 %}{% endif %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='', o=namespace(a='')) %}{% set o = ns.o %}{% for m in messages %}{% set ns.b = 1 %}{% if m.role == 'assistant' %}{% set o.a = 'x' %}{% endif %}{% endfor %}{{ ns.o.a }}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% for m in messages %}{% if loop.first or m.role == 'tool' %}{{ m.role }}{% set ns.a = 'x' %}{% endif %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% for m in messages %}{% if loop.last %}{% set ns.a = 'x' %}{% endif %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% for m in messages %}{% if loop.index == 2 %}{% set ns.a = messages|length %}{% endif %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% macro f() %}{% set ns.a = 'x' %}{% endmacro %}{% for m in messages %}{% set ns.b = 1 %}{% if m.role == 'tool' %}{{ f() }}{% endif %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% for m in messages[2:] %}{% set ns.a = 'x' %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% for m in messages[1:] %}{% if loop.index0 == 1 %}{% set ns.a = loop.previtem.role %}{% endif %}{% else %}{% set ns.a = 'none' %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% for m in messages if m.role == 'tool' %}{% set ns.a = 'x' %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% for m in messages %}{% for t in messages %}{% set ns.a = t.role %}{% endfor %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% for m in messages %}{% set x %}{% set ns.a = m.role %}{% endset %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% for m in messages %}{% set ns.a = 'x' if messages[loop.index] is defined else 'y' %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='', b='') %}{% for m in messages %}{% set ns.a, ns.b = m.role, 1 %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% for i in range(3) %}{% set ns.a = messages[i].role if messages[i] %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.a = 'x' %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}{% set ns.a = ns.a + 'y' %}{% endif %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a=[1]) %}{% for m in messages %}{% set ns.a = [true] if m.role == 'assistant' else [1] %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "{% set ns = namespace(a='') %}{% set o = namespace(a='') %}{% for m in messages %}{% set o = ns %}{% if m.role == 'assistant' %}{% set o.a = m.content %}{% endif %}{% endfor %}{% for m in messages %}{{ ns.a }}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
];

/// Numbers that look random.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap_or_default() % end
    }

    fn choose<'v>(&mut self, values: &[&'v str]) -> &'v str {
        values[self.below(values.len())]
    }
}

fn text(numbers: &mut Numbers) -> String {
    const TEXTS: [&str; 12] = [
        "",
        "hello",
        " spaces\n",
        "\n\n",
        "aé漢🙂",
        "<think>\nwhy\n</think>\n\nso",
        "assistant",
        "a{{ b }}{% c %}",
        "[x]",
        "line\nline",
        "\u{301}\u{200d}",
        "end|>",
    ];
    let special = numbers.below(60) == 0;
    let name = numbers.choose(&SPECIAL);
    format!("{}{}", numbers.choose(&TEXTS), if special { name } else { "" })
}

fn message(numbers: &mut Numbers, role: &str) -> Value {
    let mut message = json!({"role": role, "content": text(numbers)});
    match (role, numbers.below(8)) {
        ("assistant", 0) => message["reasoning_content"] = json!(text(numbers)),
        ("assistant", 1) => {
            message["tool_calls"] = json!([{"type": "function", "id": "abcdefghi",
                "function": {"name": "f", "arguments": {"x": numbers.below(9), "y": [text(numbers)]}}}]);
        }
        ("assistant", 2) => message["train"] = json!(false),
        ("user", 0) => message["content"] = json!([{"type": "text", "text": text(numbers)}]),
        ("tool", _) => message["tool_call_id"] = json!("abcdefghi"),
        _ => {}
    }
    message
}

/// Rows of 1 to 10 messages; most take turns.
fn conversation(numbers: &mut Numbers) -> Option<Conversation> {
    let takes_turns = numbers.below(4) > 0;
    let mut messages = Vec::new();
    if numbers.below(3) == 0 {
        messages.push(message(numbers, "system"));
    }
    for at in 0..=numbers.below(9) {
        let role = match takes_turns {
            true => ["user", "assistant"][at % 2],
            false => numbers.choose(&["user", "assistant", "tool", "system", "assistant"]),
        };
        messages.push(message(numbers, role));
    }
    let mut row = json!({"messages": messages});
    if numbers.below(5) == 0 {
        row["tools"] = json!([{"type": "function", "function": {"name": "f", "description": "d",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}]);
    }
    match read_row(RowFormat::Messages, row.as_object()?) {
        Ok(ChatRow::Chat(conversation)) => Some(conversation),
        _ => None,
    }
}

/// Compares a template with itself without the second source. Returns the numbers of rows that it renders and
/// of renderings that were found.
fn compare(name: &str, source: &str, kwargs: &Value, rows: usize, seed: u64) -> [usize; 2] {
    let mut kwargs: Map<String, Value> = kwargs.as_object().cloned().unwrap_or_default();
    for (token, text) in [("bos_token", "<s>"), ("eos_token", "</s>"), ("pad_token", "<pad>")] {
        kwargs.insert(token.to_owned(), json!(text));
    }
    let settings = TemplateSettings { kwargs, ..TemplateSettings::default() };
    let template = Template::compile(source, name, &settings).unwrap_or_else(|error| panic!("{error}"));
    let (fast, plain) = (Templates::of(template.clone()), Templates::of(template.clone().without_prefixes()));
    let literals = Literals::new(SPECIAL).expect("names");
    let mut numbers = Numbers(seed);
    let (mut rendered, mut found) = (0, 0);
    for _ in 0..rows {
        let Some(row) = conversation(&mut numbers) else { continue };
        let train_on = if numbers.below(4) == 0 { TrainOn::Last } else { TrainOn::Assistant };
        let stops: &[&str] = if numbers.below(4) == 0 { &["<|im_end|>\n", "<|im_end|>"] } else { &SPECIAL };
        let options = MaskOptions::new(train_on, stops, &SPECIAL).expect("options");
        let masks = [&fast, &plain].map(|templates| format!("{:?}", samples(&row, templates, &options)));
        assert_eq!(masks[0], masks[1], "{name}: {source}\n{:?}", row.messages);
        let prepared = Prepared::new(&row.messages, row.tools.as_deref(), &literals);
        let messages = row.messages.len();
        let Ok(whole) = template.render_first(&prepared, messages, false) else { continue };
        rendered += 1;
        for needed in [[true; 2], [true, false], [false, true]] {
            // No messages are rendered by themselves: a tail may ask for the last.
            let needed = [vec![[false; 2]], vec![needed; messages]].concat();
            let prefixes = template.render_prefixes(&prepared, &whole, needed);
            for (len, prompt) in (0..=messages).flat_map(|len| [(len, true), (len, false)]) {
                let Some((shared, rest)) = prefixes.get(len, prompt) else { continue };
                let text = whole.text[..shared].to_owned() + rest;
                let alone = template.render_first(&prepared, len, prompt);
                let alone = alone.unwrap_or_else(|error| panic!("{name}: {source}\n{error:?}"));
                assert_eq!(text, alone.text, "{name}, {len} of {messages}, {prompt}: {source}");
                found += 1;
            }
        }
    }
    [rendered, found]
}

#[test]
fn templates_that_look_only_back_are_rendered_once() {
    for source in FORWARD {
        let [_, found] = compare("forward", source, &json!({}), 150, 1);
        assert!(found > 500, "{found}: {source}");
    }
}

#[test]
fn templates_that_look_ahead_have_the_masks_of_each_rendering() {
    for source in DECEIVING {
        let [rendered, _] = compare("deceiving", source, &json!({}), 100, 2);
        assert!(rendered > 20, "{rendered}: {source}");
    }
}

fn templates(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jinja"));
    paths.sort();
    paths
}

#[test]
fn templates_of_models_have_the_masks_of_each_rendering() {
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/chat/templates");
    let more = std::env::var_os("CHAT_TEMPLATES").map(PathBuf::from);
    let paths = std::iter::once(ours).chain(more).flat_map(|folder| templates(&folder));
    for path in paths {
        let source = std::fs::read_to_string(&path).expect("a template");
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let without_spans = source
            .replace("endgeneration", "endif")
            .replace("generation %}", "if true %}")
            .replace("generation -%}", "if true -%}");
        let mut found = [0; 2];
        for (source, found) in [&source, &without_spans].into_iter().zip(&mut found) {
            for thinks in [json!({}), json!({"enable_thinking": true}), json!({"enable_thinking": false})] {
                *found += compare(name, source, &thinks, 60, 3)[1];
                if !source.contains("enable_thinking") {
                    break;
                }
            }
        }
        println!("{name}: {} renderings found, {} without spans", found[0], found[1]);
    }
}

#[test]
fn a_row_whose_turns_have_too_much_text_is_dropped_by_name() {
    let row = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
        {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]});
    let Some(Ok(ChatRow::Chat(row))) = row.as_object().map(|row| read_row(RowFormat::Messages, row)) else {
        panic!("no conversation");
    };
    let plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}\
                 {% if add_generation_prompt %}[assistant]{% endif %}";
    let looks_ahead = plain
        .replace("[{{ m.role }}]", "[{{ m.role }}]{{ 'old' if not loop.last and m.role == 'assistant' }}");
    let masked = |source: &str, limits: [usize; 2]| {
        let template = Template::compile(source, "limits", &TemplateSettings::default()).expect("a template");
        let options = MaskOptions::new(TrainOn::Assistant, &SPECIAL[1..2], &SPECIAL).expect("options");
        let options = options.with_limits(limits[0], limits[1]);
        samples(&row, &Templates::of(template.without_prefixes()), &options)
    };
    let dropped = Err(RowFailure::Drop(DropReason::TooManyTurns));
    let turns = masked(&looks_ahead, [1000, 1000]).expect("a mask");
    assert_eq!(turns.method, super::Method::TurnByTurn);
    let bytes = turns.sample_bytes();
    assert!(masked(&looks_ahead, [bytes, 1000]).is_ok());
    assert_eq!(masked(&looks_ahead, [bytes - 1, 1000]), dropped);
    assert_eq!(masked(&looks_ahead, [1000, 40]), dropped);
    // One sample needs no text of each turn.
    assert_eq!(masked(plain, [1, 1000]), masked(plain, [1000, 1000]));
    assert_eq!(masked(plain, [1, 1000]).expect("a mask").method, super::Method::Prefixes);
    assert_eq!(masked(plain, [1000, 40]), dropped);
}
