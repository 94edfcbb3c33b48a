"""Chat templates in the style of five families, written for tests, with the turns that each of them takes."""

from __future__ import annotations

from typing import NamedTuple

CHATML = r"""{%- set told = namespace(at=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set told.at = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}
    {{- '<|im_start|>system\n' -}}
    {%- if messages[0].role == 'system' -%}{{- messages[0].content ~ '\n\n' -}}{%- endif -%}
    {{- 'Functions, one JSON object a line:\n<tools>' -}}
    {%- for tool in tools -%}{{- '\n' ~ (tool | tojson) -}}{%- endfor -%}
    {{- '\n</tools>\nCall one as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n' -}}
{%- endif -%}
{%- for m in messages -%}
    {%- if m.role == 'system' and tools and loop.first -%}{%- continue -%}{%- endif -%}
    {%- if m.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
        {%- continue -%}
    {%- endif -%}
    {{- '<|im_start|>' + m.role + '\n' -}}
    {%- if m.role == 'assistant' and m.reasoning_content is string and loop.index0 > told.at -%}
        {{- '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' -}}
    {%- endif -%}
    {{- m.content -}}
    {%- for call in m.tool_calls or [] -%}
        {%- set call = call.function if call.function is defined else call -%}
        {{- '\n' if m.content or not loop.first -}}
        {{- '<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' ~ (call.arguments | tojson) -}}
        {{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""
LLAMA3 = r"""{{- bos_token }}
{%- set day = date_string if date_string is defined else '26 Jul 2024' %}
{%- set preface = '' %}
{%- if messages and messages[0].role == 'system' %}
    {%- set preface = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
<|start_header_id|>system<|end_header_id|>

{% if tools %}Environment: ipython
{% endif %}Today Date: {{ day }}

{{ preface }}<|eot_id|>
{%- for m in messages %}
    {%- if m.role == 'tool' or m.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {{- m.content if m.content is string else m.content | tojson }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('one call a turn') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}
        {%- if tools and loop.first and m.role == 'user' %}
            {%- for tool in tools %}{{- tool | tojson(indent=4) ~ '\n\n' }}{%- endfor %}
        {%- endif %}
        {{- m['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
GEMMA = r"""{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}
{% for m in messages %}
    {% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('turns of user and assistant alternate') }}
    {% endif %}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m['content'] | trim }}<end_of_turn>
{% endfor %}
{% if add_generation_prompt %}
{{ '<start_of_turn>model\n' }}{% endif %}"""
MISTRAL = r"""{%- set ns = namespace(shown=false, last=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endfor -%}
{%- set users = namespace(count=0) -%}
{{- bos_token -}}
{%- for m in messages -%}
    {%- if m.role == 'system' -%}
        {{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' -}}
    {%- elif m.role == 'user' -%}
        {%- if tools is not none and users.count == ns.last -%}
            {{- '[AVAILABLE_TOOLS] [' -}}
            {%- for tool in tools -%}
                {{- '{"type": "function", "function": {' -}}
                {%- for key, value in tool.function.items() if key != 'strict' -%}
                    {{- '"' ~ key ~ '": ' ~ (value | tojson) ~ ('' if loop.last else ', ') -}}
                {%- endfor -%}
                {{- '}}' ~ ('' if loop.last else ', ') -}}
            {%- endfor -%}
            {{- '][/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        {%- set users.count = users.count + 1 -%}
        {{- '[INST] ' + m.content + '[/INST]' -}}
    {%- elif m.role == 'tool' -%}
        {%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 -%}
            {{- raise_exception('ids of calls have the length 9: letters and digits') -}}
        {%- endif -%}
        {{- '[TOOL_RESULTS] {"content": ' ~ (m.content | tojson) ~ ', "call_id": "' + m.tool_call_id -}}
        {{- '"}[/TOOL_RESULTS]' -}}
    {%- elif m.tool_calls is defined and m.tool_calls -%}
        {{- '[TOOL_CALLS] [' -}}
        {%- for call in m.tool_calls -%}
            {{- (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' ~ ('' if loop.last else ', ') -}}
        {%- endfor -%}
        {{- ']' + eos_token -}}
    {%- else -%}
        {{- ' ' + m.content | trim + eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""
FILTERS = r"""{% macro shown(turn, number) %}
{% set text = turn.content.split('</think>')[-1].strip() %}
{{ number }}. {{ turn.role | upper }}{{ ' (' ~ turn.name ~ ')' if turn.name else '' }}: {% if text is not none %}
{{ text.lstrip('\n').rstrip() }}
{% endif %}
{% for line in turn.content.split('\n')[:3] %}
    {%- if line.startswith('#') %}{{ '§' ~ line[1:] | trim }}{% endif %}
    {{- '|' if not loop.last }}
{% endfor %}
{% endmacro %}
{%- for tool in tools or [] %}
<tool {{ tool.function.name }}>{{ tool.function | tojson(ensure_ascii=true, sort_keys=true) }}
{%- for name, schema in (tool.function.parameters or {}).get('properties', {}) | dictsort %}
    {{- '\n- ' ~ name ~ ': ' ~ (schema | tojson(indent=2, separators=(',', ': '))) }}
{%- endfor %}
{%- endfor %}
{%- set ns = namespace(words=0) %}
{% for turn in messages %}
    {% set ns.words = ns.words + turn.content.split() | length %}
<|turn|>{{ shown(turn, loop.index) }}
    {%- for call in turn.tool_calls %}
<|call|>{{ call.function.name ~ '(' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- key ~ '=' ~ (value | tojson if value is not string else value | trim) ~ ('' if loop.last else ', ') }}
        {%- endfor %})
    {% endfor %}
    {%- if turn.tool_call_id is defined %}{{ '<- ' + turn.tool_call_id }}{% endif %}
<|end|>
{% endfor %}
{{ ns.words }} {{ messages | map(attribute='role') | join(',') }} {{ messages[-1].content[:7] }}
{%- if add_generation_prompt %}<|turn|>{{ mood | default('calm') }}:{% endif %}"""


class WrittenTemplate(NamedTuple):
    """A chat template, its control tokens, and the turns that it takes."""

    text: str
    control_tokens: tuple[str, ...]
    has_system: bool = True
    alternates: bool = False
    """Whether turns of the user and the assistant take turns."""
    calls: int = 3
    """The most calls of a turn; 0 for a template without tools."""
    variables: tuple[str, ...] = ()
    """Variables that the template reads."""


WRITTEN = {
    "ChatML": WrittenTemplate(CHATML, ("<|im_start|>", "<|im_end|>"), variables=("enable_thinking",)),
    "Llama 3": WrittenTemplate(
        LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), calls=1, variables=("date_string",)
    ),
    "Gemma": WrittenTemplate(GEMMA, ("<start_of_turn>", "<end_of_turn>"), has_system=False, alternates=True, calls=0),
    "Mistral": WrittenTemplate(
        MISTRAL,
        (
            *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
    ),
    "filters": WrittenTemplate(FILTERS, ("<|turn|>", "<|call|>", "<|end|>"), variables=("mood",)),
    "replace": WrittenTemplate(
        FILTERS.replace(".rstrip() }}", ".rstrip() | replace('/think', '') }}"),
        ("<|turn|>", "<|call|>", "<|end|>"),
        variables=("mood",),
    ),
}
"""Templates by family."""
