"""Chat formats of published families, each written here in a few lines, after the model card or documentation named.

The tokens and their order are the families'; the templates are ours, without their options and error messages.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen(kw_only=True)
class Family:
    """A format: its template, its special tokens, and the one that the model ends a turn with."""

    source: str
    template: str
    special: tuple[str, ...]
    end: str
    outcome: str = "stable"
    """What the checker says of two plain turns."""

    call: str = "refused"
    """What it says of a call of a tool; refused: the template shows no tools."""


def turns(
    user: str,
    assistant: str,
    generation_prompt: str,
    *,
    other: str | None = None,
    start: str = "",
    tools: str = "",
    call: str = "",
) -> str:
    """A template of one piece for each role, in which `CONTENT` stands for what is said, `TOOLS` for what there is, and
    NAME and ARGUMENTS for those of a call, which is an assistant's content.
    """
    content = "{{ m['content'] }}"
    calls = call.replace("NAME", "{{ c.function.name }}").replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
    tool_text = tools.replace("TOOLS", "{% for t in tools %}{{ t.function | tojson }}{% endfor %}")
    said_or_called = content + "{% for c in m['tool_calls'] or [] %}" + calls + "{% endfor %}" if call else content
    pieces = [f"{{% if m['role'] == 'assistant' %}}{assistant.replace('CONTENT', said_or_called)}"]
    pieces.append(f"{{% elif m['role'] == 'user' %}}{user.replace('CONTENT', content)}")
    if other is None:
        pieces.append("{% else %}{{ raise_exception('only user and assistant') }}{% endif %}")
    else:
        pieces.append(f"{{% else %}}{other.replace('CONTENT', content)}{{% endif %}}")
    body = f"{{% for m in messages %}}{''.join(pieces)}{{% endfor %}}"
    first = f"{{% if tools %}}{tool_text}{{% endif %}}" if tools else ""
    return f"{start}{first}{body}{{% if add_generation_prompt %}}{generation_prompt}{{% endif %}}"


ROLE = "{{ m['role'] }}"
HERMES = '<tool_call>{{ "\\n" }}{"name": "NAME", "arguments": ARGUMENTS}{{ "\\n" }}</tool_call>'
"""Of Hermes 2 Pro, which Qwen took over."""

RESPONSE = "<|im_start|>user\n<tool_response>\nCONTENT\n</tool_response><|im_end|>\n"
IM_TOOLS = "<|im_start|>system\n# Tools\n<tools>TOOLS</tools><|im_end|>\n"
EVERY = "<|im_start|>" + ROLE + "\nCONTENT<|im_end|>\n"
LLAMA3 = "<|start_header_id|>" + ROLE + "<|end_header_id|>\n\nCONTENT<|eot_id|>"
GRANITE = "<|start_of_role|>" + ROLE + "<|end_of_role|>CONTENT<|end_of_text|>\n"
COHERE = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>CONTENT<|END_OF_TURN_TOKEN|>"

FAMILIES: Mapping[str, Family] = {
    "chatml": Family(
        source="Qwen2.5-Instruct, model card and tokenizer_config.json",
        template=turns(EVERY, EVERY, "<|im_start|>assistant\n", other=RESPONSE, tools=IM_TOOLS, call=HERMES),
        special=(),
        end="<|im_end|>",
        call="stable",
    ),
    "llama 3": Family(
        source="Meta, Llama 3 model cards and prompt formats",
        template=turns(
            LLAMA3,
            LLAMA3,
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            other="<|start_header_id|>ipython<|end_header_id|>\n\nCONTENT<|eot_id|>",
            start="<|begin_of_text|>",
            tools="<|start_header_id|>system<|end_header_id|>\n\nYou have these functions: TOOLS<|eot_id|>",
            call='{"name": "NAME", "parameters": ARGUMENTS}',
        ),
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        end="<|eot_id|>",
        call="stable",
    ),
    "llama 2": Family(
        source="Meta, Llama 2 model cards and prompt formats",
        template=turns("<s>[INST] CONTENT [/INST]", " CONTENT </s>", ""),
        special=("<s>", "</s>"),
        end="</s>",
        outcome="differs",  # the template writes spaces around an answer
    ),
    "mistral": Family(
        source="Mistral-7B-Instruct-v0.3, model card",
        template=turns(
            "[INST] CONTENT[/INST]",
            "{% if m['tool_calls'] %}CONTENT{% else %} {{ m['content'] }}{% endif %}</s>",
            "",
            other="[TOOL_RESULTS] {\"content\": {{ m['content'] | tojson }}}[/TOOL_RESULTS]",
            start="<s>",
            tools="[AVAILABLE_TOOLS] [TOOLS][/AVAILABLE_TOOLS]",
            call='[TOOL_CALLS] [{"name": "NAME", "arguments": ARGUMENTS}]',
        ),
        special=(
            *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        end="</s>",
        outcome="differs",
        call="differs",  # by the space before the last answer
    ),
    "gemma": Family(
        source="Google, Gemma formatting and system instructions",
        template=turns(
            "<start_of_turn>user\nCONTENT<end_of_turn>\n",
            "<start_of_turn>model\nCONTENT<end_of_turn>\n",
            "<start_of_turn>model\n",
            start="<bos>",
        ),
        special=("<bos>", "<start_of_turn>", "<end_of_turn>"),
        end="<end_of_turn>",
    ),
    "phi 3": Family(
        source="Phi-3-mini-4k-instruct, model card",
        template=turns(
            "<|user|>\nCONTENT<|end|>\n",
            "<|assistant|>\nCONTENT<|end|>\n",
            "<|assistant|>\n",
            other="<|tool|>\nCONTENT<|end|>\n",
        ),
        special=("<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
        end="<|end|>",
    ),
    "zephyr": Family(
        source="zephyr-7b-beta, model card",
        template=turns("<|user|>\nCONTENT</s>\n", "<|assistant|>\nCONTENT</s>\n", "<|assistant|>\n"),
        special=("</s>",),
        end="</s>",
    ),
    "vicuna": Family(
        source="FastChat, docs/vicuna_weights_version.md, prompt template v1.1",
        template=turns("USER: CONTENT ", "ASSISTANT: CONTENT</s>", "ASSISTANT:"),
        special=("</s>",),
        end="</s>",
        outcome="differs",
    ),
    "alpaca": Family(
        source="tatsu-lab/stanford_alpaca, README",
        template=turns("### Instruction:\nCONTENT\n\n", "### Response:\nCONTENT</s>\n\n", "### Response:\n"),
        special=("</s>",),
        end="</s>",
    ),
    "deepseek r1": Family(
        source="DeepSeek-R1, tokenizer_config.json: thoughts of earlier turns are left out",
        template=turns(
            "<|User|>CONTENT",
            "<|Assistant|>{{ m['content'].split('</think>')[-1] }}<|end_of_sentence|>",
            "<|Assistant|><think>\n",
        ),
        special=("<|User|>", "<|Assistant|>", "<|end_of_sentence|>"),
        end="<|end_of_sentence|>",
        outcome="differs",
    ),
    "qwen 3": Family(
        source="Qwen3, tokenizer_config.json: the last answer gets an empty thought, earlier ones lose theirs",
        template=turns(
            EVERY,
            "<|im_start|>assistant\n{% if loop.last %}<think>\n\n</think>\n\n{% endif %}"
            "{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% for c in m['tool_calls'] or [] %}"
            '<tool_call>{{ "\\n" }}{{ c.function | tojson }}{{ "\\n" }}</tool_call>{% endfor %}<|im_end|>\n',
            "<|im_start|>assistant\n",
            other=RESPONSE,
            tools=IM_TOOLS,
        ),
        special=(),
        end="<|im_end|>",
        outcome="differs",
        call="differs",
    ),
    "glm 4": Family(
        source="glm-4-9b-chat, model card: the next speaker's token ends a turn",
        template=turns(
            "<|user|>\nCONTENT",
            "<|assistant|>\nCONTENT",
            "<|assistant|>\n",
            other="<|observation|>\nCONTENT",
            start="[gMASK]<sop>",
            tools="<|system|>\nTOOLS",
            call="NAME\nARGUMENTS",
        ),
        special=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        end="<|user|>",
        call="stable",
    ),
    "command r": Family(
        source="Cohere, Command R prompt format",
        template=turns(
            COHERE.format("USER"),
            COHERE.format("CHATBOT"),
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            other="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><results>\nCONTENT</results><|END_OF_TURN_TOKEN|>",
            tools="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>## Available Tools\nTOOLS<|END_OF_TURN_TOKEN|>",
            call='Action: ```json\n[{"tool_name": "NAME", "parameters": ARGUMENTS}]```',
        ),
        special=(
            *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
            "<|SYSTEM_TOKEN|>",
        ),
        end="<|END_OF_TURN_TOKEN|>",
        call="stable",
    ),
    "granite 3": Family(
        source="IBM, Granite 3 prompt engineering guide",
        template=turns(
            GRANITE,
            GRANITE,
            "<|start_of_role|>assistant<|end_of_role|>",
            other="<|start_of_role|>tool_response<|end_of_role|>CONTENT<|end_of_text|>\n",
            tools="<|start_of_role|>available_tools<|end_of_role|>TOOLS<|end_of_text|>\n",
            call='<|tool_call|>[{"name": "NAME", "arguments": ARGUMENTS}]',
        ),
        special=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
        end="<|end_of_text|>",
        call="stable",
    ),
    "kimi k2": Family(
        source="Moonshot, Kimi-K2-Instruct, chat_template.jinja",
        template=turns(
            "<|im_user|>user<|im_middle|>CONTENT<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>CONTENT<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>",
            other="<|im_system|>tool<|im_middle|>## Return of a call\nCONTENT<|im_end|>",
            tools="<|im_system|>tool_declare<|im_middle|>[TOOLS]<|im_end|>",
            call=(
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS"
                "<|tool_call_end|><|tool_calls_section_end|>"
            ),
        ),
        special=(
            *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ),
        end="<|im_end|>",
        call="stable",
    ),
    "harmony": Family(
        source="OpenAI, gpt-oss: harmony response format",
        template=turns(
            "<|start|>user<|message|>CONTENT<|end|>",
            "<|start|>assistant<|channel|>final<|message|>CONTENT<|end|>",
            "<|start|>assistant",
            other="<|start|>functions to=assistant<|channel|>commentary<|message|>CONTENT<|end|>",
            tools="<|start|>developer<|message|># Tools\nTOOLS<|end|>",
            call="to=functions.NAME<|message|>ARGUMENTS",
        ),
        special=("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        end="<|end|>",
        outcome="differs",  # the policy writes the channel, which is no part of what was said
        call="differs",
    ),
    "jamba 1.5": Family(
        source="AI21, AI21-Jamba-1.5-Mini, model card",
        template=turns(
            "<|bom|><|user|> CONTENT<|eom|>",
            "<|bom|><|assistant|> CONTENT<|eom|>",
            "<|bom|><|assistant|>",
            other="<|bom|><|tool|> CONTENT<|eom|>",
            tools="<|bom|><|system|> # Tools\n<tool_definitions>TOOLS</tool_definitions><|eom|>",
            call='<tool_calls>[{"name": "NAME", "arguments": ARGUMENTS}]</tool_calls>',
        ),
        special=("<|bom|>", "<|eom|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"),
        end="<|eom|>",
        outcome="differs",  # a space before each answer
        call="differs",
    ),
    "deepseek v3.1": Family(
        source="DeepSeek-V3.1, model card: an answer goes on behind the output of a tool, without a header",
        template=turns(
            "<|User|>CONTENT<|Assistant|></think>",
            "CONTENT<|end_of_sentence|>",
            "",
            other="<|tool_output_begin|>CONTENT<|tool_output_end|>",
            tools="## Tools\nTOOLS\n\n",
            call=(
                "<|tool_calls_begin|><|tool_call_begin|>NAME<|tool_sep|>ARGUMENTS<|tool_call_end|><|tool_calls_end|>"
            ),
        ),
        special=(
            *("<|User|>", "<|Assistant|>", "<|end_of_sentence|>", "<|tool_output_begin|>", "<|tool_output_end|>"),
            *("<|tool_calls_begin|>", "<|tool_call_begin|>", "<|tool_sep|>", "<|tool_call_end|>", "<|tool_calls_end|>"),
        ),
        end="<|end_of_sentence|>",
        call="stable",
    ),
    "glm 4.5": Family(
        source="GLM-4.5, chat_template.jinja: an answer begins on a new line, which the policy writes",
        template=turns(
            "<|user|>\nCONTENT",
            "<|assistant|>\nCONTENT",
            "<|assistant|>",
            other="<|observation|>\n<tool_response>\nCONTENT\n</tool_response>",
            start="[gMASK]<sop>",
            tools="<|system|>\n# Tools\n<tools>\nTOOLS\n</tools>",
            call="\n<tool_call>NAME\n<arg_key>all</arg_key>\n<arg_value>ARGUMENTS</arg_value>\n</tool_call>",
        ),
        special=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        end="<|user|>",
        outcome="differs",
        call="differs",
    ),
}
