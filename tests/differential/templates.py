"""Chat templates in the style of well-known models, for scenarios and for the tests of prompts.

They stand here because an older checkout is played with this folder alone. A change of one changes recordings.
"""

from __future__ import annotations

CHATML = """\
{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# As Qwen3: attribute access, a backwards scan into a namespace, thinking split off, tool calls, enable_thinking
QWEN3 = r"""
{%- macro turn(role, text) %}{{ '<|im_start|>' ~ role ~ '\n' ~ text ~ '<|im_end|>\n' }}{% endmacro %}
{%- set intro = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
    {%- set ns = namespace(listed='# Tools\n') %}
    {%- for tool in tools %}
        {%- set ns.listed = ns.listed + '\n' + tool | tojson %}
    {%- endfor %}
    {{- turn('system', intro + '\n\n' + ns.listed) }}
{%- elif intro %}
    {{- turn('system', intro) }}
{%- endif %}
{%- set seen = namespace(searching=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if seen.searching and message.role == 'user' and message.content is string
           and not message.content.startswith('<tool_response>') %}
        {%- set seen.searching = false %}
        {%- set seen.last_query = messages | length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set text = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- turn(message.role, text) }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not thought and '</think>' in text %}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > seen.last_query and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- text }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\n' if text or not loop.first }}
            {{- '<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + text + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""

# As Llama 3: bos_token, `set` over the loop's own name, strftime_now behind a test, trim, tojson(indent=4)
LLAMA3 = r"""
{{- bos_token }}
{%- macro header(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{% endmacro %}
{%- if date_string is not defined %}
    {%- set date_string = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- endif %}
{%- set intro = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set intro = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- header('system') + 'Today: ' + date_string + '\n\n' + intro + '<|eot_id|>' }}
{%- if tools is not none %}
    {{- header('user') }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- header('assistant') + '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- elif message.role in ('tool', 'ipython') %}
        {{- header('ipython') }}
        {%- set is_data = message.content is mapping or message.content is iterable %}
        {{- message.content | tojson if is_data else message.content }}
    {%- else %}
        {{- header(message['role']) + message['content'] | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- header('assistant') }}{% endif %}
"""

# As Mistral: alternation enforced with raise_exception, a filtered loop, eos_token after answers
MISTRAL = r"""
{{- bos_token }}
{%- set has_intro = messages[0]["role"] == "system" %}
{%- for message in (messages[1:] if has_intro else messages) | rejectattr("role", "equalto", "tool") %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, user and assistant must take turns') }}
    {%- elif message["role"] == "user" %}
        {{- " [INST] " ~ (messages[0]["content"] ~ "\n\n" if has_intro and loop.first) }}
        {{- message["content"] ~ " [/INST]" }}
    {%- else %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# As Gemma 3: content as parts, whitespace control on every tag, trim of each part
GEMMA = r"""
{{- bos_token -}}
{%- set intro = '' -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] -%}
    {%- set intro = (first if first is string else first[0]['text']) + '\n\n' -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
    {{ '<start_of_turn>' + {'assistant': 'model'}.get(message['role'], message['role']) + '\n' }}
    {{- intro if loop.first }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for part in message['content'] -%}
            {{ '<start_of_image>' if part['type'] == 'image' else part['text'] | trim }}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception('content must be text or parts') }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""

# Generation blocks, break and continue, macros, documents, dict(), dictsort, default
EXOTIC = """\
{% macro shown(value) %}{{ value | upper | tojson }}{% endmacro %}
{% for document in documents or [] %}
  [{{ loop.index }}: {{ document.title | default('?', true) }}] {{ document['text'] }}
{% endfor %}
{% for message in messages %}
  {% if message.role == 'system' %}{% continue %}{% endif %}
  {% if message.content == 'STOP' %}{% break %}{% endif %}
{{ message.role }}: {% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ message.content }}{% endif %}

{% endfor %}
{% for key, value in (dict(b=2, a='<&>"é') | dictsort) %}{{ key }}={{ value | tojson }};{% endfor %}
{{ shown('mixed') }} {{ tools | default([], true) | length }} {{ extra | default('none') }} {{ [1, 2, 3] | sum }}
{%- if add_generation_prompt %}{{ '\nassistant:' }}{% endif %}"""

TEMPLATES = {"chatml": CHATML, "qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "exotic": EXOTIC}
