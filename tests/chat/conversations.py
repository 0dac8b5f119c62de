"""Conversations that templates are compared with."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather at a place: temperature in °C & wind <km/h>.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the \"city\""},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "array", "items": {"type": "integer"}},
                "limit": {"type": "number", "default": 1e-05, "maximum": 1e16},
            },
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "description": "Time now.", "parameters": {"type": "object", "properties": {}}}}


def call(name, arguments, id=None):
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": id} | made if id else made


CONVERSATIONS = [
    {
        "name": "system and two answers",
        "messages": [
            {"role": "system", "content": "You answer in one sentence."},
            {"role": "user", "content": "Why is the sky blue?"},
            {"role": "assistant", "content": "Air scatters blue light most."},
            {"role": "user", "content": "And at night?"},
            {"role": "assistant", "content": "There is no sunlight to scatter."},
        ],
    },
    {
        "name": "thoughts in a field",
        "messages": [
            {"role": "user", "content": "What is 17 + 25?"},
            {"role": "assistant", "reasoning_content": "17 + 25 is 42.\n", "content": "42"},
            {"role": "user", "content": "Twice that?"},
            {"role": "assistant", "thinking": "\n2 * 42 = 84", "content": "84"},
        ],
    },
    {
        "name": "thoughts in the content",
        "messages": [
            {"role": "user", "content": "Is 91 prime?"},
            {"role": "assistant", "content": "<think>\n91 = 7 * 13\n</think>\n\nNo, it is 7 times 13."},
            {"role": "user", "content": "Is 97?"},
            {"role": "assistant", "content": "<think>\nno divisor up to 9\n</think>\n\nYes."},
        ],
    },
    {
        "name": "tools with objects",
        "tools": [WEATHER, TIME],
        "messages": [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "Weather in Zürich and Köln?"},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    call("get_weather", {"city": "Zürich", "days": [1, 2], "limit": 0.5}, "abcdef123"),
                    call("get_weather", {"city": "Köln <b>", "unit": None, "nested": {"a": True, "b": [1.5, "x"]}}, "abcdef124"),
                ],
            },
            {"role": "tool", "name": "get_weather", "tool_call_id": "abcdef123", "content": "{\"temperature\": 3.5}"},
            {"role": "tool", "name": "get_weather", "tool_call_id": "abcdef124", "content": "rain"},
            {"role": "assistant", "content": "3.5 °C in Zürich, rain in Köln."},
        ],
    },
    {
        "name": "tools with strings, no content",
        "tools": [TIME],
        "messages": [
            {"role": "user", "content": "What time is it?"},
            {"role": "assistant", "content": None, "tool_calls": [call("get_time", "{\"zone\": \"UTC\", \"n\": 1e-07}", "abcdef125")]},
            {"role": "tool", "tool_call_id": "abcdef125", "content": "12:34"},
            {"role": "assistant", "reasoning": "The tool says so.", "content": "12:34 UTC."},
        ],
    },
    {
        "name": "generation prompt",
        "prompt": True,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": "Bye"},
        ],
    },
    {
        "name": "white space, emoji and line ends",
        "messages": [
            {"role": "user", "content": "  \n tab\there \u00a0 \u2028 \U0001f469\u200d\U0001f680 \r\n<b>&amp;\"quotes\"</b> \x1c "},
            {"role": "assistant", "content": "\n\n  e\u0301 日本語  \n"},
            {"role": "user", "content": ""},
            {"role": "assistant", "content": "last\n"},
        ],
    },
    {
        "name": "developer, parts and two users",
        "messages": [
            {"role": "developer", "content": "Speak plainly."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]},
            {"role": "user", "content": "three"},
            {"role": "assistant", "content": [{"type": "text", "text": "four"}]},
        ],
    },
]
