"""Chat templates in the style of well-known models: each uses the Jinja features its model's own is known for."""

from __future__ import annotations

from tests.differential.templates import TEMPLATES

ALL = TEMPLATES
CHATML, QWEN3 = ALL["chatml"], ALL["qwen3"]

# As Mistral Nemo: the tools before the last question, the system's text in it, roles counted in a namespace
LATE_OPENING = r"""
{%- set intro = '' %}
{%- set turns = messages %}
{%- if messages[0].role == 'system' %}
    {%- set intro = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- endif %}
{%- set questions = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in turns %}
    {%- if message.role in ('user', 'assistant') and not message.tool_calls %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('take turns') }}{% endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if tools and message == questions[-1] %}{{- '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{% endif %}
        {{- '[ASK]' + (intro + '

' if intro and loop.last else '') + message.content + '[/ASK]' }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}{{- '[CALL]' + (call.function | tojson) + eos_token }}{% endfor %}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT]' + message.content | string + '[/RESULT]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- else %}
        {{- raise_exception('only questions and answers') }}
    {%- endif %}
{%- endfor %}
"""

# As DeepSeek R1: all texts of the system in front, thoughts cut off, a flag for the results of tools
HOISTED = r"""
{%- set ns = namespace(is_tool=false, intro='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- set ns.intro = ns.intro + message.content %}{%- endif %}
{%- endfor %}
{{- bos_token }}{{ ns.intro }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.is_tool = false %}{{- '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {%- set text = message.content or '' %}
        {%- if '</think>' in text %}{%- set text = text.split('</think>')[-1] %}{%- endif %}
        {{- ('' if ns.is_tool else '<|Assistant|>') + text }}
        {%- for call in message.tool_calls or [] %}
            {{- '<|call|>' + call.function.name + (call.function.arguments | tojson) }}
        {%- endfor %}
        {{- '<|end|>' }}
        {%- set ns.is_tool = false %}
    {%- elif message.role == 'tool' %}
        {{- ('' if ns.is_tool else '<|results|>') + '<|result|>' + message.content }}
        {%- set ns.is_tool = true %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>
' }}{% endif %}
"""

# As gpt-oss: thoughts until a final answer follows, results under the name of the last call, tools as a program
CHANNELS = r"""
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- set intro, turns = '', messages %}
{%- if messages[0].role in ('developer', 'system') %}
    {%- set intro, turns = messages[0].content, messages[1:] %}
{%- endif %}
{%- if intro or tools %}
    {{- '<|start|>developer<|message|>' + intro }}
    {%- for tool in tools or [] %}{{- '
type ' + tool.function.name + ' = (_: ' + (tool.function.parameters | tojson) + ')' }}{%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in turns %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set later = namespace(is_answered=false) %}
        {%- for other in turns[loop.index:] %}
            {%- if other.role == 'assistant' and not other.tool_calls %}{%- set later.is_answered = true %}{%- endif %}
        {%- endfor %}
        {%- if message.reasoning_content and not later.is_answered %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- set last_call.name = call.name %}
        {{- '<|start|>assistant to=' + call.name + '<|message|>' + (call.arguments | tojson) + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if loop.last and not add_generation_prompt and message.reasoning_content %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + (message.content or '') + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if last_call.name is none %}{{- raise_exception('a result without a call') }}{%- endif %}
        {{- '<|start|>' + last_call.name + ' to=assistant<|message|>' + (message.content | tojson) + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""

# As Command R7B: calls of tools are numbered through the conversation
NUMBERED = r"""
{%- set ns = namespace(calls=0) %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '
' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- ns.calls | string + ': ' + call.function.name }}
        {%- set ns.calls = ns.calls + 1 %}
    {%- endfor %}
    {{- '<|im_end|>
' }}
{%- endfor %}
"""

STYLES = {"late opening": LATE_OPENING, "hoisted": HOISTED, "channels": CHANNELS, "numbered": NUMBERED}
"""Ways to write a chat besides those of `ALL`, by which a conversation may be cut at a message, or may not."""
LOOPS_OVER_PARTS = {"gemma"}
