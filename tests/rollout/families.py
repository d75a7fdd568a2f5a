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


def turns(user: str, assistant: str, ask: str, *, other: str | None = None, start: str = "") -> str:
    """A template of one piece for each role, in which `CONTENT` stands for what is said."""
    said = "{{ m['content'] }}"
    pieces = [f"{{% if m['role'] == 'assistant' %}}{assistant.replace('CONTENT', said)}"]
    pieces.append(f"{{% elif m['role'] == 'user' %}}{user.replace('CONTENT', said)}")
    if other is None:
        pieces.append("{% else %}{{ raise_exception('only user and assistant') }}{% endif %}")
    else:
        pieces.append(f"{{% else %}}{other.replace('CONTENT', said)}{{% endif %}}")
    each = f"{{% for m in messages %}}{''.join(pieces)}{{% endfor %}}"
    return f"{start}{each}{{% if add_generation_prompt %}}{ask}{{% endif %}}"


ROLE = "{{ m['role'] }}"
EVERY = "<|im_start|>" + ROLE + "\nCONTENT<|im_end|>\n"
LLAMA3 = "<|start_header_id|>" + ROLE + "<|end_header_id|>\n\nCONTENT<|eot_id|>"
GRANITE = "<|start_of_role|>" + ROLE + "<|end_of_role|>CONTENT<|end_of_text|>\n"
COHERE = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>CONTENT<|END_OF_TURN_TOKEN|>"

FAMILIES: Mapping[str, Family] = {
    "chatml": Family(
        source="Qwen2.5-Instruct, model card and tokenizer_config.json",
        template=turns(EVERY, EVERY, "<|im_start|>assistant\n", other=EVERY),
        special=(),
        end="<|im_end|>",
    ),
    "llama 3": Family(
        source="Meta, Llama 3 model cards and prompt formats",
        template=turns(
            LLAMA3, LLAMA3, "<|start_header_id|>assistant<|end_header_id|>\n\n", other=LLAMA3, start="<|begin_of_text|>"
        ),
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        end="<|eot_id|>",
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
        template=turns("[INST] CONTENT[/INST]", " CONTENT</s>", "", start="<s>"),
        special=("<s>", "</s>", "[INST]", "[/INST]"),
        end="</s>",
        outcome="differs",
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
            "{{ m['content'].split('</think>')[-1].lstrip('\n') }}<|im_end|>\n",
            "<|im_start|>assistant\n",
            other="<|im_start|>user\n<tool_response>\nCONTENT\n</tool_response><|im_end|>\n",
        ),
        special=(),
        end="<|im_end|>",
        outcome="differs",
    ),
    "glm 4": Family(
        source="glm-4-9b-chat, model card: the next speaker's token ends a turn",
        template=turns(
            "<|user|>\nCONTENT",
            "<|assistant|>\nCONTENT",
            "<|assistant|>\n",
            other="<|observation|>\nCONTENT",
            start="[gMASK]<sop>",
        ),
        special=("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"),
        end="<|user|>",
    ),
    "command r": Family(
        source="Cohere, Command R prompt format",
        template=turns(
            COHERE.format("USER"),
            COHERE.format("CHATBOT"),
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            other=COHERE.format("SYSTEM"),
        ),
        special=(
            *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
            "<|SYSTEM_TOKEN|>",
        ),
        end="<|END_OF_TURN_TOKEN|>",
    ),
    "granite 3": Family(
        source="IBM, Granite 3 prompt engineering guide",
        template=turns(GRANITE, GRANITE, "<|start_of_role|>assistant<|end_of_role|>", other=GRANITE),
        special=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        end="<|end_of_text|>",
    ),
}
