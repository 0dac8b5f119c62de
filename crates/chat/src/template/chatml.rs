//! The template `"chatml"`, for base models without one.

/// Turns between `<|im_start|>` and `<|im_end|>`. The model writes the text and the end of its turns.
pub(super) const CHATML: &str = "\
{%- if tools %}{{ raise_exception('the template \"chatml\" has no tools: name a template that prints them') }}{% endif %}
{%- for message in messages %}
{%- if message.tool_calls or message.role == 'tool' %}
{{- raise_exception('the template \"chatml\" has no tool calls: name a template that prints them') }}
{%- endif %}
{%- if message.reasoning_content %}
{{- raise_exception('the template \"chatml\" has no thoughts: name a template that prints them') }}
{%- endif %}
{%- if message.content is string %}
{%- set content = message.content %}
{%- else %}
{%- set content = message.content | default([], true) | map(attribute='text') | join('') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- content + '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
";
