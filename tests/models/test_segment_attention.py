"""Attention inside segments is attention under the mask that says the same."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from skyrl.models.segment_attention import Segments, segment_attention
from skyrl.models.segments import Segment


@pytest.mark.parametrize(
    ("segments", "together"),
    [
        ((Segment(0, 4), Segment(4, 3)), True),  # sequences on their own
        ((Segment(0, 5, (3, 1, 9)), Segment(18, 4)), True),  # answers to one prompt, some longer than it
        ((Segment(0, 9, (3, 2)), Segment(14, 200)), False),  # answers much shorter than their prompt
        ((Segment(0, 600), Segment(600, 560)), False),  # causally, where a mask would have more pairs than are seen
        ((Segment(0, 40, (90, 30, 60, 70)), Segment(290, 7)), False),
        ((Segment(0, 600, (200,)), Segment(800, 2, (300, 520))), False),  # long answers, which are computed causally
    ],
)
def test_every_token_sees_its_own_prompt_and_its_own_answer_so_far(
    segments: tuple[Segment, ...], together: bool
) -> None:
    """Short groups go through one call, `together`; long ones are computed answer by answer."""
    generator = torch.Generator().manual_seed(0)
    tokens = segments[-1].stop
    query = torch.randn(1, 4, tokens, 8, generator=generator)
    key, value = (torch.randn(1, 2, tokens, 8, generator=generator) for _ in range(2))
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for segment in segments:
        prompt = range(segment.start, segment.start + segment.prompt)
        stretches = [prompt]
        for length in segment.answers:
            stretches.append(range(stretches[-1].stop, stretches[-1].stop + length))
        for stretch in stretches:
            for token in stretch:
                seen[token, stretch.start : token + 1] = True
                if stretch is not prompt:
                    seen[token, prompt.start : prompt.stop] = True
    row = Segments(segments, query.device)
    assert (row.together is not None) == together
    found, _ = segment_attention(torch.nn.Identity(), query, key, value, None, segments=row)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
