"""dpo_rewards.png: the committed file has its finding, and the picture shows it."""

import pytest
from cases import picture_case as case
from matplotlib.text import Text

from report import committed
from report.dpo_rewards import NAMES, margins, rewards_figure
from report.picture import WIDTH

PHONE = 390  # pixels


def test_the_picture_shows_the_margins_and_its_title_is_true():
    found = committed.small_adapters()
    by_name = {NAMES[variant]: values for variant, values in margins(found).items()}
    exact = by_name["fp32"][-1]
    assert by_name["whole layers"][-1] == pytest.approx(exact, rel=0.02)
    assert max(by_name[hides][-1] for hides in ("vanilla PEFT", "Unsloth")) < 0.06 * exact
    picture = rewards_figure(found)
    (axes,) = picture.axes
    drawn = [list(line.get_ydata()) for line in axes.lines]
    assert sorted(drawn) == sorted(by_name.values()) and {len(each) for each in drawn} == {5}
    said = {text.get_text() for text in axes.texts}
    assert said == {f"{name} {values[-1]:.2f}" for name, values in by_name.items()}
    case.assert_readable(picture)
    sizes = [text.get_fontsize() for text in picture.findobj(Text) if text.get_text().strip()]
    assert min(sizes) / 72 * PHONE / WIDTH >= 11


def test_a_margin_is_the_mean_reward_of_chosen_less_that_of_rejected_answers():
    seen = {"variant": "vanilla_peft_no_checkpointing", "adapter": {"is_dpo": True},
            "chosen": [0.3, 0.5], "rejected": [-0.1, 0.3]}  # fmt: skip
    chats = seen | {"adapter": {"is_dpo": False}, "chosen": [], "rejected": []}
    unknown = seen | {"variant": "another"}
    found = margins({"seen": [chats, unknown, seen]})
    assert found.pop("vanilla_peft_no_checkpointing") == [0.0, pytest.approx(0.3)]
    assert {tuple(values) for values in found.values()} == {(0.0,)}
