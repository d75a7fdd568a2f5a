"""Sizes of models: parameters by the tensors of their layers, and what is known without a download."""

from __future__ import annotations

import pytest

from skyrl.planning.known_models import KNOWN_MODELS, known_shape
from skyrl.planning.model_shape import ModelShape, shape_of

PUBLISHED = {  # billions of parameters, as their model cards have them
    "Qwen/Qwen2.5-0.5B": 0.494,
    "Qwen/Qwen2.5-1.5B": 1.544,
    "Qwen/Qwen2.5-3B": 3.086,
    "Qwen/Qwen2.5-7B": 7.616,
    "Qwen/Qwen2.5-14B": 14.77,
    "Qwen/Qwen2.5-32B": 32.764,
    "Qwen/Qwen2.5-72B": 72.706,
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B": 1.721,
    "Qwen/Qwen3-4B": 4.022,
    "Qwen/Qwen3-8B": 8.191,
    "Qwen/Qwen3-14B": 14.768,
    "Qwen/Qwen3-32B": 32.762,
    "Qwen/Qwen3-30B-A3B": 30.532,
    "Qwen/Qwen3-235B-A22B": 235.094,
    "meta-llama/Llama-3.2-1B": 1.236,
    "meta-llama/Llama-3.2-3B": 3.213,
    "meta-llama/Llama-3.1-8B": 8.030,
    "meta-llama/Llama-3.1-70B": 70.554,
    "meta-llama/Llama-3.3-70B": 70.554,
    "meta-llama/Llama-3.1-405B": 405.853,
}

TOY = {
    "model_type": "qwen2",
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
    "tie_word_embeddings": True,
}


def toy(**changes: object) -> ModelShape:
    shape = shape_of(TOY | changes)
    assert shape is not None
    return shape


def test_known_models_have_the_published_number_of_parameters() -> None:
    counted = {name: round((known_shape(name) or toy()).parameters / 1e9, 3) for name in KNOWN_MODELS}
    assert counted == PUBLISHED


def test_parameters_of_a_toy_by_hand() -> None:
    # q 16, k and v 8 each, o 16, biases 4 + 2 + 2, two norms 8, three matrices of 24: 136; table 40 and last norm 4
    assert (toy().layer_parameters, toy().parameters) == (136, 2 * 136 + 44)
    assert toy(tie_word_embeddings=False).parameters == 2 * 136 + 44 + 40
    assert toy(model_type="llama").layer_parameters == 136 - 8
    assert toy(model_type="qwen3").layer_parameters == 136 - 8 + 4  # a norm of two for queries, and one for keys


def test_experts_count_all_and_compute_some() -> None:
    moe = toy(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=1, moe_intermediate_size=3)
    # attention 48 with norms 8 and 4, router 16, four experts of three matrices of 12; of which a token meets one
    assert moe.layer_parameters == 48 + 12 + 16 + 144
    assert moe.active_parameters == 2 * (48 + 12 + 16 + 36) + 40


def test_keys_and_values_of_a_token() -> None:
    assert toy().cache_bytes_per_token(2) == 2 * 2 * 2 * 2  # keys and values, two layers, one head of two, two bytes


def test_an_adapter_is_two_thin_matrices_for_each_linear_layer() -> None:
    # a rank of 1 beside q, o (8 each), k, v (6 each), gate, up and down (10 each), in two layers
    assert toy().adapter_parameters(1) == 2 * (16 + 12 + 30)


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-Math-7B", "mirror/qwen2.5-7b-instruct", "Qwen/Qwen2.5-Coder-7B"]
)
def test_variants_have_the_sizes_of_their_base(name: str) -> None:
    assert known_shape(name) == known_shape("Qwen/Qwen2.5-7B")


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-AWQ", "somebody/else", "Qwen/Qwen2-7B", ""])
def test_other_names_are_not_guessed(name: str) -> None:
    assert known_shape(name) is None


def test_a_configuration_without_a_size_has_no_shape() -> None:
    assert shape_of({key: value for key, value in TOY.items() if key != "hidden_size"}) is None
    assert shape_of(TOY | {"hidden_size": "4"}) is None


def test_the_sizes_of_a_language_model_inside_another_are_its_own() -> None:
    assert shape_of({"model_type": "llava", "text_config": TOY}) == toy()
