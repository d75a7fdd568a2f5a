"""What proves that weights are loaded: parameters are read back, and an acknowledgement says which set was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn

from skyrl.errors import WeightSyncError
from skyrl.inference.servers.answers import RequestedSample
from skyrl.inference.servers.vllm_server import _parse_completion, _parse_generate
from skyrl.inference.torch.engine import TorchEngine
from skyrl.inference.weights import refuse_not_loaded, replace_weights
from skyrl.processes.answers import BadAnswer
from skyrl.weight_receiver.incoming_weights import (
    LOADED,
    BroadcastWeights,
    DeltaWeights,
    FolderWeights,
    SharedWeights,
    acknowledgement,
    load_failure,
    weight_info,
)
from skyrl.weight_receiver.transfer_group import TransferGroup
from skyrl.weight_sync.senders import FolderSender
from tests.inference.nano import nano_model, nano_tokenizer, request

GROUP = TransferGroup(host="127.0.0.1", port=1, name="a meeting", size=2, rank=1, timeout=1.0)


def sent(path: Path, **tensors: torch.Tensor) -> FolderWeights:
    path.mkdir(parents=True)
    FolderSender(path=str(path), dtype="float32")(iter(tensors.items()))
    return FolderWeights(path=str(path), weights=tuple(weight_info(*named_tensor) for named_tensor in tensors.items()))


def test_an_acknowledgement_names_the_set_of_files_that_was_loaded(tmp_path: Path) -> None:
    one = sent(tmp_path / "one", a=torch.zeros(3), b=torch.ones(2))
    same = sent(tmp_path / "same", b=torch.ones(2), a=torch.zeros(3))
    other = sent(tmp_path / "other", a=torch.zeros(3), b=torch.tensor([1.0, 1.0000001]))
    assert acknowledgement(one) == acknowledgement(same) != acknowledgement(other)
    digests = one.digests()
    files = {"1.safetensors": {"a": digests["a"]}, "2.safetensors": {"b": digests["b"]}}
    assert acknowledgement(DeltaWeights(path=str(tmp_path), files=files, weights=one.weights)) == acknowledgement(one)
    assert (
        acknowledgement(BroadcastWeights(group=GROUP, weights=one.weights))
        == acknowledgement(SharedWeights(()))
        == LOADED
    )


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        (["{}"], ""),
        (["{}", "{}"], ""),
        ([""], "does not show that it loaded what was sent"),
        ([None], "does not show that it loaded what was sent"),
        ([5], "5"),
        (["loaded"], "does not show that it loaded what was sent"),
        (["loaded 00112233445566778899aabbccddeeff"], "does not show that it loaded what was sent"),
        (["{}", ""], "does not show that it loaded what was sent"),
        (["{}", "out of memory", "out of memory"], "out of memory"),
        ([{"a": 1}], "{'a': 1}"),
    ],
)
def test_every_receiver_has_to_give_the_acknowledgement_of_what_was_sent(
    tmp_path: Path, outcomes: list[Any], reason: str
) -> None:
    incoming = sent(tmp_path / "sent", a=torch.zeros(3))
    acknowledgements = [acknowledgement(incoming) if outcome == "{}" else outcome for outcome in outcomes]
    failure = load_failure(acknowledgements, incoming)
    assert failure == "" if reason == "" else reason in failure


def test_what_a_model_holds_is_compared_with_what_arrived_in_the_models_type() -> None:
    arrived = torch.tensor([1.0, 1.001, -3.0])
    refuse_not_loaded({"w": (arrived.bfloat16(), arrived), "x": (arrived.clone(), arrived)})
    refuse_not_loaded({})
    for index, value in ((0, 1.0078125), (1, float("nan")), (2, 0.0)):
        loaded = arrived.bfloat16()
        loaded[index] = value
        with pytest.raises(WeightSyncError, match="^w and 1 more arrived and is not what the model holds"):
            refuse_not_loaded({"v": (arrived, arrived), "w": (loaded, arrived), "x": (loaded, arrived)})


class OneMemory(nn.Module):
    """Two weights that are views of one memory, as a wrongly fused layer has them."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.zeros(4)
        self.first, self.second = nn.Parameter(both[:3]), nn.Parameter(both[1:])


def test_a_weight_that_the_next_one_overwrites_is_named() -> None:
    values = {"first": torch.tensor([1.0, 2.0, 3.0]), "second": torch.tensor([4.0, 5.0, 6.0])}
    with pytest.raises(WeightSyncError, match="^first arrived and is not what the model holds"):
        replace_weights(OneMemory(), values)
    fitting = {"first": torch.tensor([1.0, 2.0, 3.0]), "second": torch.tensor([2.0, 3.0, 4.0])}
    replace_weights(OneMemory(), fitting)


async def test_the_embedded_engine_says_that_it_has_read_its_weights_back() -> None:
    engine = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=2)
    await engine.pause()
    assert await engine.load_weights(SharedWeights(tuple(nano_model(seed=1).state_dict().items())), 1) is True
    await engine.close()


def generated(**changes: Any) -> dict[str, Any]:
    """An answer of three tokens to `/inference/v1/generate`; `changes` are keys of its second log-probability."""
    content: list[dict[str, Any]] = [{"token": f"token_id:{token}", "logprob": -0.5} for token in (7, 8, 9)]
    content[1] |= changes
    return {"choices": [{"token_ids": [7, 8, 9], "logprobs": {"content": content}, "finish_reason": "length"}]}


def asked() -> RequestedSample:
    return RequestedSample(request=request((1, 2)), index=0, limit=3, vocabulary=99, ends=frozenset(), versions={0})


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"token": "text of the token"}, True),
        ({"token_id": 8}, True),
        ({"token": "text", "token_id": 8}, True),
        ({"token": None}, True),
        ({"token": "token_id:7"}, False),
        ({"token": "token_id:"}, False),
        ({"token_id": 7}, False),
        ({"token": "token_id:8", "token_id": 9}, False),
        ({"token": "text", "token_id": 9}, False),
    ],
)
def test_a_log_probability_is_that_of_the_token_that_was_drawn(changes: dict[str, Any], fits: bool) -> None:
    if fits:
        assert _parse_generate(generated(**changes), asked()).logprobs == (-0.5,) * 3
    else:
        with pytest.raises(BadAnswer, match="log-probabilities of other tokens than it drew"):
            _parse_generate(generated(**changes), asked())


@pytest.mark.parametrize("tokens", [["token_id:7", "token_id:8", "token_id:7"], ["token_id:9"] * 3])
def test_completions_may_name_their_tokens_too(tokens: list[str]) -> None:
    def answer(tokens: list[str] | None) -> dict[str, Any]:
        logprobs = {"token_logprobs": [-0.5] * 3, "tokens": tokens}
        return {"choices": [{"token_ids": [7, 8, 9], "logprobs": logprobs, "finish_reason": "length"}]}

    for fitting in (None, ["token_id:7", "token_id:8", "token_id:9"], ["a", "b", "c"]):
        assert _parse_completion(answer(fitting), asked()).logprobs == (-0.5,) * 3
    with pytest.raises(BadAnswer, match="log-probabilities of other tokens than it drew"):
        _parse_completion(answer(tokens), asked())


def test_a_folder_whose_digests_are_gone_is_no_acknowledgement(tmp_path: Path) -> None:
    incoming = sent(tmp_path / "sent", a=torch.zeros(3))
    (tmp_path / "sent" / "00000.json").write_text("{")
    with pytest.raises(WeightSyncError, match="corrupted"):
        acknowledgement(evolve(incoming))
