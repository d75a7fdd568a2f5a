"""Token ids in, token ids out, as verifiers' training client asks."""

from __future__ import annotations

import httpx

from tests.endpoint.serving import tiny_engine


async def test_token_ids_are_continued_with_log_probabilities() -> None:
    async with tiny_engine() as tiny, httpx.AsyncClient(base_url=tiny.url, timeout=60) as http:
        ids = tiny.tokenizer.encode("ab", add_special_tokens=False)
        sampling = {"temperature": 1.0, "max_tokens": 4, "logprobs": 1, "n": 2, "seed": 5}
        answer = await http.post("/inference/v1/generate", json={"token_ids": ids, "sampling_params": sampling})
        wrong = await http.post("/inference/v1/generate", json={"token_ids": [10**6], "sampling_params": {}})
        none = await http.post("/inference/v1/generate", json={"token_ids": [], "sampling_params": {}})
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice in choices:
        assert 1 <= len(choice["token_ids"]) <= 4
        assert [each["token"] for each in choice["logprobs"]["content"]] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
    assert (wrong.status_code, none.status_code) == (400, 400)
