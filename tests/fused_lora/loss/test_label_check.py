"""Labels outside the vocabulary: which one is found, and where its error is raised."""

import pytest
import torch
from cases.cross_entropy_case import TOKENS, VOCABULARY, inputs

from fused_lora.loss import label_check
from fused_lora.loss.cross_entropy import linear_cross_entropy
from fused_lora.loss.label_check import find_wrong_label

RIGHT = [0, 138, -100, 5, -100, 7, 138, 1, 2]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("wrong", "first"),
    [({}, 0), ({0: 139}, 139), ({8: -1}, -1), ({3: -101, 8: 500}, -101), ({1: 2**30}, 2**30)],
)  # fmt: skip
def test_the_first_wrong_label_is_found_and_kept(wrong, first, dtype, monkeypatch, device):
    """Check in blocks of four, the last one partial."""
    monkeypatch.setattr(label_check, "BLOCK_LABELS", 4)
    labels = torch.tensor(RIGHT, dtype=dtype, device=device)
    for place, label in wrong.items():
        labels[place] = label
    found = torch.zeros(2, dtype=torch.int64, device=device)
    find_wrong_label(labels[::1], found, 139, -100)
    assert found.tolist() == [first, 139 if wrong else 0]
    find_wrong_label(torch.full_like(labels, -7), found, 139, -100)
    assert found.tolist() == ([first, 139] if wrong else [-7, 139])


@pytest.mark.parametrize("label", [VOCABULARY, -1, -101])
@pytest.mark.parametrize("options", [{}, {"drop_ignored": False}, {"max_labelled": 20}], ids=str)
def test_a_wrong_label_is_an_error_that_names_it(options, label, device):
    """On a GPU the host does not wait: this call returns NaN, and the next one raises."""
    *right, labels = inputs(*TOKENS, dtype=torch.float32, device=device)
    wrong = labels.clone()
    wrong[1, 2] = label
    said = rf"is {label}, outside the vocabulary of {VOCABULARY} words \(0 to {VOCABULARY - 1}, or"

    def loss(labels):
        return linear_cross_entropy(right[0], right[1], labels, bias=right[2], **options)

    with pytest.raises(ValueError, match=said) as error:
        assert loss(wrong).isnan() and options
        torch.cuda.synchronize()
        loss(labels)
    assert "\n" not in str(error.value)
    assert loss(labels).isfinite() and loss(labels).isfinite()


@pytest.mark.gpu
def test_nobody_waits_for_it(device):
    *right, labels = inputs(*TOKENS, dtype=torch.float32, device=device)
    options = {"bias": right[2], "drop_ignored": False}
    linear_cross_entropy(*right[:2], labels, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(*right[:2], labels.masked_fill(labels == 0, -1), **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="a label of an earlier batch is -1, outside"):
        linear_cross_entropy(*right[:2], labels, **options)
